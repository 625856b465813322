"""Families whose layers are of several kinds, and what Megatron cannot be told of them."""

from __future__ import annotations

from mtpconv.errors import RefusedError
from mtpconv.megatron_families.decoders import EPSILONS, rotary_default
from mtpconv.megatron_families.draft import Draft, number


def gated_delta_net(d: Draft) -> None:
    """Qwen3-Next and Qwen3.5: full attention with an output gate in every n-th layer."""
    g = d.geometry
    every = d.dim("full_attention_interval") if "full_attention_interval" in g.text else 4
    if not every:
        raise RefusedError("config.json: full_attention_interval is 0; no layer is the 0th")
    kinds = ["full_attention" if (i + 1) % every == 0 else "linear_attention"
             for i in range(g.layers)]  # fmt: skip
    if (g.text.get("layer_types") or kinds) != kinds:
        d.gaps.append(
            f"config.json: layer_types do not follow full_attention_interval {every}, the only "
            "pattern known here"
        )
    if g.depths and kinds[-1:] != ["full_attention"]:
        d.gaps.append(
            f"{g.model_type}: MTP depths have full attention, the last layer has not; Megatron "
            "builds depths from the spec of that layer"
        )
    d.args |= {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": every,
        "linear_conv_kernel_dim": d.dim("linear_conv_kernel_dim"),
        "linear_key_head_dim": d.dim("linear_key_head_dim"),
        "linear_value_head_dim": d.dim("linear_value_head_dim"),
        "linear_num_key_heads": d.dim("linear_num_key_heads"),
        "linear_num_value_heads": d.dim("linear_num_value_heads"),
        "attention_output_gate": True,
        "apply_layernorm_1p": True,
    }
    if d.args["num_experts"] is not None:
        d.args |= {
            "moe_shared_expert_intermediate_size": d.dim("shared_expert_intermediate_size"),
            "moe_shared_expert_gate": True,
        }
    rotary_default(d, 0.25)


def bailing_attention(d: Draft) -> None:
    """Ling: norms on q and k, a bias by config."""
    d.only("use_bias", False)
    d.args |= {"qk_layernorm": True, "add_qkv_bias": d.geometry.fact("has_qkv_bias", 0)}


def exaone_attention(d: Draft) -> None:
    """K-EXAONE: windows in most layers, and rope in those only."""
    _windows(d)
    if d.args.get("window_attn_skip_freq"):
        d.args["no_rope_freq"] = [1 - slides for slides in d.args["window_attn_skip_freq"]]


def minimax_attention(d: Draft) -> None:
    """MiniMax-M2: a norm over all heads, the first `rotary_dim` of each turn."""
    name = d.geometry.model_type
    d.gaps.append(f"{name}: q/k norms over all heads at once; Megatron's are per head")
    if d.config.get("rotary_dim") is not None:
        rotary_default(d, d.dim("rotary_dim") / max(d.dim("head_dim"), 1))


def mimo_v2_attention(d: Draft) -> None:
    """MiMo-V2-Flash: sliding layers with query groups, rope base and sinks of their own."""
    _windows(d)
    _by_layer(d, "num_key_value_heads", "query groups")
    if d.dim("v_head_dim") != d.dim("head_dim"):
        d.gaps.append(
            f"{d.geometry.model_type}: values narrower than keys; Megatron's are as wide unless "
            "attention is multi-latent"
        )
    if any(d.geometry.fact("has_sink", layer) for layer in range(d.geometry.layers)):
        d.gaps.append(
            f"{d.geometry.model_type}: learned softmax offsets in some layers; Megatron has them "
            "in all or in none"
        )
    d.only("swa_rope_theta", d.config.get("rope_theta"))
    d.only("attention_value_scale", 1.0)


def step_attention(d: Draft) -> None:
    """Step-3.5: sliding layers with heads of their own, a gate per head, zero-centred norms."""
    _windows(d)
    _by_layer(d, "num_attention_heads", "attention heads")
    d.only("use_head_wise_attn_gate", False)
    for name in ("swiglu_limits", "swiglu_limits_shared", "partial_rotary_factors"):
        if any(d.config.get(name) or ()):
            d.gaps.append(f"config.json: {name}: Megatron has none by layer")
    d.args |= {"apply_layernorm_1p": True, "qk_layernorm": True}


def _by_layer(d: Draft, dim: str, what: str) -> None:
    """Note a number that is not the same in all layers."""
    g = d.geometry
    if len({g.dim(dim, layer) for layer in range(g.layers + g.depths)}) > 1:
        d.gaps.append(f"{g.model_type}: {what} differ by layer; Megatron has as many in all")


def _windows(d: Draft) -> None:
    """Sliding windows: `window_attn_skip_freq` has a 1 for each layer that slides.

    A window of HF counts the token itself, Megatron's left side does not.
    """
    g = d.geometry
    slides = [int(g.fact("is_sliding", layer)) for layer in range(g.layers)]
    if d.config.get("sliding_window") and any(slides):
        d.args |= {
            "window_size": (d.dim("sliding_window") - 1, 0),
            "window_attn_skip_freq": slides,
        }


#: Megatron's letter for a kind of layer. Source: hybrid_layer_allocation.py `Symbols`.
_LETTERS = {
    "is_hybrid_mamba": "M", "is_hybrid_attention": "*", "is_hybrid_mlp": "-", "is_hybrid_moe": "E",
}  # fmt: skip


def nemotron_hybrid(d: Draft) -> None:
    """Nemotron-H: Mamba, attention and MLP as layers of their own, in the trunk and in MTP."""
    g = d.geometry
    known = {
        "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "mlp_bias": False, "use_bias": False,
        "attention_bias": False, "mamba_proj_bias": False, "use_conv_bias": True, "conv_kernel": 4,
        "chunk_size": 128,
    }  # fmt: skip
    for name, value in known.items():
        d.only(name, value)
    repeated = bool(g.text.get("mtp_use_repeated_layer"))
    depths = d.dim(g.mtp_field) if repeated and g.mtp_field else g.depths
    trunk = _letters(d, range(g.layers))
    mtp = _letters(d, range(g.layers, g.layers + g.mtp_inner)) if depths else ""
    d.args |= {
        "is_hybrid_model": True,
        "hybrid_layer_pattern": trunk + f"/{mtp}" * depths,
        "num_layers": g.layers,
        "mtp_num_layers": depths or None,
        "mtp_use_repeated_layer": repeated,
        "mtp_loss_scaling_factor": 0.1,
        "hidden_size": d.dim("hidden_size"),
        "ffn_hidden_size": d.dim("intermediate_size"),
        "num_attention_heads": d.dim("num_attention_heads"),
        "group_query_attention": True,
        "num_query_groups": d.dim("num_key_value_heads"),
        "kv_channels": d.dim("head_dim"),
        "mamba_num_heads": d.dim("mamba_num_heads"),
        "mamba_head_dim": d.dim("mamba_head_dim"),
        "mamba_num_groups": d.dim("n_groups"),
        "mamba_state_dim": d.dim("ssm_state_size"),
        "seq_length": d.dim("max_position_embeddings"),
        "max_position_embeddings": d.dim("max_position_embeddings"),
        "position_embedding_type": "none",
        "normalization": "RMSNorm",
        "norm_epsilon": number(d.config, d.named(*EPSILONS)),
        "swiglu": False,
        "squared_relu": True,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "untie_embeddings_and_output_weights": not g.fact("is_tied", 0),
    }
    if "E" in trunk + mtp:
        d.args |= {
            "num_experts": g.experts,
            "moe_ffn_hidden_size": d.dim("moe_intermediate_size"),
            "moe_shared_expert_intermediate_size": (
                d.dim("shared_experts_width") if g.fact("has_shared_experts", 0) else None
            ),
            "moe_latent_size": g.text.get("moe_latent_size") and d.dim("moe_latent_size"),
            "moe_router_topk": d.dim("num_experts_per_tok"),
            "moe_grouped_gemm": True,
        }


def _letters(d: Draft, layers: range) -> str:
    return "".join(
        next(letter for fact, letter in _LETTERS.items() if d.geometry.fact(fact, layer))
        for layer in layers
    )
