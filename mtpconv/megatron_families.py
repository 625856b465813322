"""What each family's HF config says in Megatron's words.

`FAMILIES` names the parts that a family is made of; a part turns the fields it knows into
arguments of Megatron-LM. A family that Megatron can build joins with one line here.

Source: megatron-core 0.19.2 transformer_config.py, transformers 5.24 configuration_*.py and
modeling_*.py, read 2026-11-29; facts/families.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from mtpconv.errors import RefusedError, UnsupportedError
from mtpconv.geometry import Config, Geometry

Args = dict[str, Any]
Part = Callable[[Geometry, Args], None]

#: Bases of rotary embeddings where transformers has another default than 10,000.
ROPE_THETA = {"mixtral": 1e6}


def base(g: Geometry, args: Args) -> None:
    """What every decoder has: sizes, norm, MLP, embeddings, MTP depths.

    Raises: UnsupportedError for what no Megatron model has; RefusedError for a missing field.
    """
    c, rope = g.text, _rope(g)
    _only(c, "hidden_act", "silu")
    _only(c, "mlp_bias", False)
    theta = _number(rope, "rope_theta")
    args |= {
        "num_layers": g.layers,
        "hidden_size": g.dim("hidden_size"),
        "ffn_hidden_size": g.dim("intermediate_size"),
        "num_attention_heads": g.dim("num_attention_heads"),
        # No HF config says how long the training sequences were.
        "seq_length": g.dim("max_position_embeddings"),
        "max_position_embeddings": g.dim("max_position_embeddings"),
        "position_embedding_type": "rope",
        "rotary_base": int(theta) if theta == int(theta) else theta,
        "rotary_percent": _number(rope, "partial_rotary_factor", 1.0),
        "normalization": "RMSNorm",
        "norm_epsilon": _number(c, "rms_norm_eps"),
        "swiglu": True,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "untie_embeddings_and_output_weights": not g.fact("is_tied", 0),
        "mtp_num_layers": g.depths or None,
        "mtp_loss_scaling_factor": 0.1,
    }
    kinds = {g.fact("is_moe", g.layers + depth) for depth in range(g.depths)}
    if kinds and kinds != {g.fact("is_moe", g.layers - 1)}:
        raise UnsupportedError(
            f"{g.model_type}: an MTP depth with another MLP than the last layer; Megatron builds "
            "depths from the spec of that layer"
        )


def _gqa(g: Geometry, args: Args) -> None:
    c, rope = g.text, _rope(g)
    kind = rope["rope_type"]
    if kind == "llama3":
        _only(rope, "low_freq_factor", 1.0)
        _only(rope, "high_freq_factor", 4.0)
        _only(rope, "original_max_position_embeddings", 8192)
        args |= {"use_rope_scaling": True, "rope_scaling_factor": _number(rope, "factor")}
    elif kind != "default":
        raise UnsupportedError(
            f"config.json: rope_type {kind!r}: Megatron arguments are known for default and llama3"
        )
    # Mixtral has only the width, the others have one they do not use unless told to.
    window = "sliding_window" if g.model_type == "mixtral" else "use_sliding_window"
    if c.get(window):
        raise UnsupportedError(f"config.json: {window}: Megatron arguments have none here")
    args |= {
        "group_query_attention": True,
        "num_query_groups": g.dim("num_key_value_heads"),
        "kv_channels": g.dim("head_dim"),
    }


def _no_attention_bias(g: Geometry, args: Args) -> None:
    # `attention_bias` biases o_proj too in these families; Megatron biases qkv or every linear.
    del args
    _only(g.text, "attention_bias", False)


def _qkv_bias(g: Geometry, args: Args) -> None:
    del g
    args["add_qkv_bias"] = True


def _qk_norm(g: Geometry, args: Args) -> None:
    del g
    args["qk_layernorm"] = True


def _glm4_attention(g: Geometry, args: Args) -> None:
    args["add_qkv_bias"] = g.fact("has_qkv_bias", 0)
    args["qk_layernorm"] = g.fact("has_qk_norm", 0)
    if "partial_rotary_factor" not in _rope(g):
        args["rotary_percent"] = 0.5


def _mla(g: Geometry, args: Args) -> None:
    c, rope = g.text, _rope(g)
    _only(c, "attention_bias", False)
    _only(c, "rope_interleave", True)
    kind = rope["rope_type"]
    if kind not in ("default", "yarn"):
        raise UnsupportedError(
            f"config.json: rope_type {kind!r}: Megatron's MLA knows default and yarn"
        )
    args |= {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": None if c.get("q_lora_rank") is None else g.dim("q_lora_rank"),
        "kv_lora_rank": g.dim("kv_lora_rank"),
        "qk_head_dim": g.dim("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": g.dim("qk_rope_head_dim"),
        "v_head_dim": g.dim("v_head_dim"),
        # No weight has this width, but without it Megatron wants hidden_size / heads to be whole.
        "kv_channels": g.dim("qk_nope_head_dim"),
        # The head's rotary part has a dimension of its own, whatever partial_rotary_factor says.
        "rotary_percent": 1.0,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    }
    if kind == "default":
        args["apply_rope_fusion"] = False  # MLATransformerConfig refuses it unless yarn
        return
    longest = g.dim("max_position_embeddings")
    args |= {
        "rope_type": "yarn",
        "rotary_scaling_factor": _number(rope, "factor"),
        "mscale": _number(rope, "mscale", 1.0),
        "mscale_all_dim": _number(rope, "mscale_all_dim", 0.0),
        "original_max_position_embeddings": int(
            _number(rope, "original_max_position_embeddings", longest)
        ),
        "beta_fast": _number(rope, "beta_fast", 32.0),
        "beta_slow": _number(rope, "beta_slow", 1.0),
    }


def _dsa(g: Geometry, args: Args) -> None:
    shared = "index_topk_freq" in g.text and g.dim("index_topk_freq") > 1
    frequency = g.dim("index_topk_freq") if shared else 1
    offset = g.dim("index_skip_topk_offset") if "index_skip_topk_offset" in g.text else 2
    for layer in range(g.layers):
        if g.fact("has_indexer", layer) != (max(layer - offset + 1, 0) % frequency == 0):
            raise UnsupportedError(
                f"config.json: whether layer {layer} has an indexer does not follow from "
                f"index_topk_freq {frequency} and index_skip_topk_offset {offset}, the only "
                "pattern Megatron can build"
            )
    args |= {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": g.dim("index_n_heads"),
        "dsa_indexer_head_dim": g.dim("index_head_dim"),
        "dsa_indexer_topk": g.dim("index_topk"),
        "dsa_indexer_topk_freq": frequency,
        "dsa_indexer_skip_topk_offset": offset if shared else 0,
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "dsa_indexer_scoring_relu": True,
        "apply_rope_fusion": False,  # DSAttention refuses it
    }


def _deepseek_indexer(g: Geometry, args: Args) -> None:
    # Source: transformers modeling_deepseek_v32.py: half-split rope, a Hadamard rotation.
    del g
    args |= {"dsa_indexer_rope_interleaved": False, "dsa_indexer_rotate_activation": True}


def _glm_indexer(g: Geometry, args: Args) -> None:
    # Source: Megatron-Bridge glm5_bridge.py 06874539; equal to transformers as measured.
    args["dsa_indexer_rope_interleaved"] = bool(g.text.get("indexer_rope_interleave", True))
    args["dsa_indexer_rotate_activation"] = False


def _moe(g: Geometry, args: Args) -> None:
    layers = [g.fact("is_moe", layer) for layer in range(g.layers)]
    if not any(layers):
        return
    width = "moe_intermediate_size" if "moe_intermediate_size" in g.text else "intermediate_size"
    shared = g.text.get("n_shared_experts") and g.dim("n_shared_experts") * g.dim(width)
    args |= {
        "num_experts": g.experts,
        "moe_ffn_hidden_size": g.dim(width),
        "moe_shared_expert_intermediate_size": shared or None,
        # The int 1 makes Megatron stack layers that are alike, a list keeps them apart.
        "moe_layer_freq": 1 if all(layers) else [int(is_moe) for is_moe in layers],
        "moe_router_topk": g.dim("num_experts_per_tok"),
        "moe_grouped_gemm": True,  # as training runs do; torch_dist keys are the same without
    }


def _sigmoid_router(g: Geometry, args: Args) -> None:
    c = g.text
    if args["num_experts"] is None:
        return
    _only(c, "scoring_func", "sigmoid")
    _only(c, "topk_method", "noaux_tc")
    _only(c, "norm_topk_prob", True)
    args |= {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": _number(c, "routed_scaling_factor", 1.0),
        "moe_router_dtype": "fp32",
    }
    if c.get("n_group") and g.dim("n_group") > 1:
        args["moe_router_num_groups"] = g.dim("n_group")
        args["moe_router_group_topk"] = g.dim("topk_group")


def _softmax_router(g: Geometry, args: Args) -> None:
    # Softmax over the chosen experts is softmax over all, made to sum to one again.
    if args["num_experts"] is not None:
        again = g.text.get("norm_topk_prob", g.model_type == "mixtral")
        args["moe_router_pre_softmax"] = not again


def _qwen3_next(g: Geometry, args: Args) -> None:
    every = g.dim("full_attention_interval") if "full_attention_interval" in g.text else 4
    kinds = g.text.get("layer_types") or []
    for layer, kind in enumerate(kinds[: g.layers]):
        if (kind == "full_attention") != ((layer + 1) % every == 0):
            raise UnsupportedError(
                f"config.json: layer_types: layer {layer} is not what full_attention_interval "
                f"{every} makes it, the only pattern known here"
            )
    if g.depths and g.layers % every:
        raise UnsupportedError(
            f"{g.model_type}: MTP depths have full attention, the last layer has not; Megatron "
            "builds depths from the spec of that layer"
        )
    args |= {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": every,
        "linear_conv_kernel_dim": g.dim("linear_conv_kernel_dim"),
        "linear_key_head_dim": g.dim("linear_key_head_dim"),
        "linear_value_head_dim": g.dim("linear_value_head_dim"),
        "linear_num_key_heads": g.dim("linear_num_key_heads"),
        "linear_num_value_heads": g.dim("linear_num_value_heads"),
        "attention_output_gate": True,
        "apply_layernorm_1p": True,
        "moe_shared_expert_intermediate_size": g.dim("shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
    }
    if "partial_rotary_factor" not in _rope(g):
        args["rotary_percent"] = 0.25


def _rope(g: Geometry) -> dict[str, Any]:
    """Rope parameters as transformers 5 spells them, whichever spelling the config has."""
    c = g.text
    found = {n: c[n] for n in ("rope_theta", "partial_rotary_factor") if c.get(n) is not None}
    for name in ("rope_scaling", "rope_parameters"):
        block = c.get(name)
        if isinstance(block, Mapping):
            found |= {k: v for k, v in block.items() if v is not None}
    found.setdefault("rope_theta", ROPE_THETA.get(g.model_type, 1e4))
    found.setdefault("rope_type", found.get("type", "default"))
    return found


def _number(config: Config, name: str, default: float | None = None) -> float:
    """A field as a float. Raises: RefusedError if it is absent or no finite number."""
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        shown = "missing" if value is None else repr(value)
        raise RefusedError(f"config.json: {name} is {shown}; Megatron needs it as a number")
    return float(value)


def _only(config: Config, name: str, known: Any) -> None:
    """Refuse a field with another value than Megatron builds. Raises: UnsupportedError."""
    value = config.get(name)
    if value is not None and value != known:
        raise UnsupportedError(
            f"config.json: {name} = {value!r}: Megatron can build this family only with {known!r}"
        )


FAMILIES: Mapping[str, tuple[Part, ...]] = {
    "deepseek_v3": (_mla, _moe, _sigmoid_router),
    "deepseek_v32": (_mla, _dsa, _deepseek_indexer, _moe, _sigmoid_router),
    "glm4_moe": (_gqa, _glm4_attention, _moe, _sigmoid_router),
    "glm4_moe_lite": (_mla, _moe, _sigmoid_router),
    "glm_moe_dsa": (_mla, _dsa, _glm_indexer, _moe, _sigmoid_router),
    "kimi_k2": (_mla, _moe, _sigmoid_router),
    "llama": (_gqa, _no_attention_bias),
    "mimo": (_gqa, _qkv_bias),
    "mixtral": (_gqa, _moe, _softmax_router),
    "qwen2": (_gqa, _qkv_bias),
    "qwen3": (_gqa, _no_attention_bias, _qk_norm),
    "qwen3_moe": (_gqa, _no_attention_bias, _qk_norm, _moe, _softmax_router),
    "qwen3_next": (_gqa, _no_attention_bias, _qk_norm, _moe, _softmax_router, _qwen3_next),
}
