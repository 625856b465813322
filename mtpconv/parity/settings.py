"""A config.json in Megatron's words: the only place where parity knows family quirks.

`FAMILIES` names the parts a family is made of; a part turns the fields it knows into
megatron-core settings. A family joins parity with one line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mtpconv.errors import RefusedError, UnsupportedError
from mtpconv.geometry import Geometry, index_sharing

#: First megatron-core release that wires up sparse attention with its rope and ReLU switches.
#: Source: facts measured 2026-11-29 on 0.16.1 and 0.19.2.
DSA_NEEDS = (0, 19)

#: transformers builds q_a_layernorm and kv_a_layernorm without passing `rms_norm_eps`.
#: Source: transformers 5.24, modeling_deepseek_v3.py and modeling_glm_moe_dsa.py.
LATENT_NORM_EPS = 1e-6


@dataclass
class Settings:
    """How to build one model in megatron-core.

    `transformer` are fields of its TransformerConfig, the rest are arguments of GPTModel and
    choices of modules. `notes` are remarks the parity report must repeat.
    """

    geometry: Geometry
    transformer: dict[str, Any] = field(default_factory=dict)
    mla: bool = False
    dsa: bool = False
    rotary_percent: float = 1.0
    rotary_base: float = 10000.0
    llama3_factor: float | None = None
    latent_norm_eps: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def moe_layers(self) -> list[bool]:
        """For each trunk layer, whether its MLP is a mixture of experts."""
        g = self.geometry
        return [g.fact("is_moe", layer) for layer in range(g.layers)]

    @property
    def moe_depths(self) -> bool:
        """Whether the block of the MTP depths is a mixture of experts.

        Raises: UnsupportedError if depths differ: Megatron builds all of them from one spec.
        """
        g = self.geometry
        kinds = {g.fact("is_moe", g.layers + depth) for depth in range(g.depths)}
        if len(kinds) > 1:
            raise UnsupportedError("MTP depths with different MLPs: Megatron builds them alike")
        return bool(kinds) and kinds.pop()

    @property
    def tied(self) -> bool:
        """Whether the LM head is the embedding."""
        return self.geometry.fact("is_tied", 0)


Part = Callable[[Settings], None]


def read_settings(geometry: Geometry) -> Settings:
    """The Megatron settings of a model.

    Raises: UnsupportedError for a family that parity does not know.
    """
    parts = FAMILIES.get(geometry.model_type)
    if parts is None:
        raise UnsupportedError(
            f"parity does not know model_type {geometry.model_type!r}; "
            f"it knows {', '.join(sorted(FAMILIES))}"
        )
    settings = Settings(geometry)
    _base(settings)
    for part in parts:
        part(settings)
    return settings


def need(config: Mapping[str, Any], name: str) -> Any:
    """A field that must be there.

    Raises: RefusedError if it is absent or null.
    """
    value = config.get(name)
    if value is None:
        raise RefusedError(f"config.json: {name} is missing; parity needs it to build the model")
    return value


def rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rope parameters in the spelling of transformers 5, whichever the config uses."""
    merged: dict[str, Any] = {"rope_theta": config.get("rope_theta", 10000.0)}
    if "partial_rotary_factor" in config:
        merged["partial_rotary_factor"] = config["partial_rotary_factor"]
    for name in ("rope_scaling", "rope_parameters"):
        block = config.get(name)
        if isinstance(block, Mapping):
            merged.update(block)
    merged.setdefault("rope_type", merged.get("type", "default"))
    return merged


def _base(s: Settings) -> None:
    c, g = s.geometry.text, s.geometry
    if c.get("hidden_act", "silu") != "silu":
        raise UnsupportedError(f"hidden_act {c['hidden_act']!r}: parity knows only silu")
    if c.get("mlp_bias"):
        raise UnsupportedError("mlp_bias: parity does not build MLPs with bias")
    parameters = rope(c)
    s.rotary_base = float(parameters["rope_theta"])
    s.rotary_percent = float(parameters.get("partial_rotary_factor", 1.0))
    s.transformer |= {
        "num_layers": g.layers,
        "mtp_num_layers": g.depths or None,
        "hidden_size": g.dim("hidden_size"),
        "ffn_hidden_size": g.dim("intermediate_size"),
        "num_attention_heads": g.dim("num_attention_heads"),
        "normalization": "RMSNorm",
        "layernorm_epsilon": float(need(c, "rms_norm_eps")),
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Fused kernels exist for CUDA only, and a reference needs none.
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "attention_softmax_in_fp32": True,
    }


def _gqa(s: Settings) -> None:
    g, c = s.geometry, s.geometry.text
    parameters = rope(c)
    kind = parameters["rope_type"]
    if kind == "llama3":
        fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        fixed["original_max_position_embeddings"] = 8192
        if any(float(parameters.get(k, v)) != v for k, v in fixed.items()):
            raise UnsupportedError(f"rope llama3 other than {fixed}: Megatron has these built in")
        s.llama3_factor = float(need(parameters, "factor"))
    elif kind != "default":
        raise UnsupportedError(f"rope_type {kind!r}: parity knows default and llama3 here")
    if c.get("use_sliding_window") or (c.get("sliding_window") and g.model_type == "mistral"):
        raise UnsupportedError("sliding window attention: parity does not build it")
    s.transformer |= {
        "kv_channels": g.dim("head_dim"),
        "num_query_groups": int(c.get("num_key_value_heads") or g.dim("num_attention_heads")),
        "add_qkv_bias": bool(c.get("attention_bias", False)),
        "qk_layernorm": bool(c.get("use_qk_norm", False)),
    }
    if s.transformer["num_query_groups"] == 1:
        s.notes.append("one query group: the order of groups in linear_qkv was not exercised")


def _qkv_bias(s: Settings) -> None:
    s.transformer["add_qkv_bias"] = True


def _qk_norm(s: Settings) -> None:
    s.transformer["qk_layernorm"] = True


def _half_rotary(s: Settings) -> None:
    # transformers 5.24 sets this default for glm4_moe when the config has no factor.
    if "partial_rotary_factor" not in rope(s.geometry.text):
        s.rotary_percent = 0.5


def _mla(s: Settings) -> None:
    g, c = s.geometry, s.geometry.text
    if c.get("attention_bias"):
        raise UnsupportedError("attention_bias with MLA: Megatron's MLA has no bias")
    if c.get("rope_interleave") is False:
        raise UnsupportedError("rope_interleave false: Megatron's MLA always interleaves")
    parameters = rope(c)
    kind = parameters["rope_type"]
    s.mla = True
    s.rotary_percent = 1.0
    s.latent_norm_eps = LATENT_NORM_EPS
    s.transformer |= {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "num_query_groups": g.dim("num_attention_heads"),
        "q_lora_rank": c.get("q_lora_rank"),
        "kv_lora_rank": g.dim("kv_lora_rank"),
        "qk_head_dim": g.dim("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": g.dim("qk_rope_head_dim"),
        "v_head_dim": g.dim("v_head_dim"),
        "rotary_base": s.rotary_base,
        "rotary_percent": 1.0,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    }
    if kind == "yarn":
        s.transformer |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": float(need(parameters, "factor")),
            "original_max_position_embeddings": int(
                parameters.get("original_max_position_embeddings")
                or need(c, "max_position_embeddings")
            ),
            "beta_fast": float(parameters.get("beta_fast", 32)),
            "beta_slow": float(parameters.get("beta_slow", 1)),
            "mscale": float(parameters.get("mscale", 1.0)),
            "mscale_all_dim": float(parameters.get("mscale_all_dim", 0.0)),
        }
    elif kind != "default":
        raise UnsupportedError(f"rope_type {kind!r}: parity knows default and yarn with MLA")
    if float(c.get("rms_norm_eps", LATENT_NORM_EPS)) != LATENT_NORM_EPS:
        s.notes.append(
            f"q_a_layernorm and kv_a_layernorm use epsilon {LATENT_NORM_EPS:g} on both sides, as "
            f"transformers does; Megatron by itself uses rms_norm_eps {c['rms_norm_eps']:g}"
        )


def _dsa(s: Settings) -> None:
    g = s.geometry
    frequency, offset = _index_sharing(g)
    s.dsa = True
    s.transformer |= {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": g.dim("index_n_heads"),
        "dsa_indexer_head_dim": g.dim("index_head_dim"),
        "dsa_indexer_topk": g.dim("index_topk"),
        "dsa_indexer_topk_freq": frequency,
        "dsa_indexer_skip_topk_offset": offset,
        "dsa_indexer_rope_interleaved": True,
        "dsa_indexer_rotate_activation": False,
        "dsa_indexer_scoring_relu": True,
        # transformers and the serving engines build the indexer's k_norm with this epsilon.
        "dsa_indexer_k_norm_epsilon": 1e-6,
    }
    s.notes.append("the indexer's scores pass a ReLU on both sides")


def _split_indexer_rope(s: Settings) -> None:
    # DeepSeek-V3.2's indexer rotates halves, its attention pairs; GLM-5 pairs in both.
    s.transformer["dsa_indexer_rope_interleaved"] = False


def _index_sharing(g: Geometry) -> tuple[int, int]:
    """Megatron knows index sharing only as a frequency and an offset."""
    found = index_sharing(g)
    if found is None:
        raise UnsupportedError(
            "config.json: the layers that have an indexer follow no index_topk_freq and "
            "index_skip_topk_offset, the only pattern Megatron can build"
        )
    return found


def _moe(s: Settings) -> None:
    g, c = s.geometry, s.geometry.text
    if not any(s.moe_layers) and not s.moe_depths:
        return
    layers = s.moe_layers
    shared = int(c.get("n_shared_experts") or 0) * g.dim("moe_intermediate_size")
    s.transformer |= {
        "num_moe_experts": g.experts,
        "moe_ffn_hidden_size": g.dim("moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_router_topk": g.dim("num_experts_per_tok"),
        # The int 1 makes Megatron stack homogeneous layers, a list makes it keep them apart.
        "moe_layer_freq": 1 if all(layers) else [int(is_moe) for is_moe in layers],
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "allgather",
    }


def _sigmoid_router(s: Settings) -> None:
    c = s.geometry.text
    if "num_moe_experts" not in s.transformer:
        return
    if c.get("norm_topk_prob", True) is False:
        raise UnsupportedError("norm_topk_prob false with a sigmoid router: Megatron normalises")
    s.transformer |= {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": float(c.get("routed_scaling_factor", 1.0)),
    }
    groups = int(c.get("n_group") or 1)
    if groups > 1:
        limit = int(need(c, "topk_group"))
        s.transformer |= {"moe_router_num_groups": groups, "moe_router_group_topk": limit}
        per_group = s.transformer["moe_router_topk"] // limit
        if per_group != 2:
            s.notes.append(
                f"group routing differs by design: Megatron ranks groups by their best "
                f"{per_group} experts, transformers by their best 2"
            )


def _softmax_router(s: Settings) -> None:
    c = s.geometry.text
    if "num_moe_experts" not in s.transformer:
        return
    normalised = bool(c.get("norm_topk_prob", s.geometry.model_type == "mixtral"))
    s.transformer |= {
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not normalised,
    }


def _mixtral_sizes(s: Settings) -> None:
    # Mixtral has no moe_intermediate_size: all its MLPs are experts of intermediate_size.
    g = s.geometry
    s.transformer |= {
        "num_moe_experts": g.experts,
        "moe_ffn_hidden_size": g.dim("intermediate_size"),
        "moe_router_topk": g.dim("num_experts_per_tok"),
        "moe_layer_freq": 1,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "allgather",
    }


FAMILIES: Mapping[str, tuple[Part, ...]] = {
    "deepseek_v3": (_mla, _moe, _sigmoid_router),
    "deepseek_v32": (_mla, _dsa, _split_indexer_rope, _moe, _sigmoid_router),
    "glm_moe_dsa": (_mla, _dsa, _moe, _sigmoid_router),
    "glm4_moe": (_gqa, _half_rotary, _moe, _sigmoid_router),
    "glm4_moe_lite": (_mla, _moe, _sigmoid_router),
    "llama": (_gqa,),
    "mimo": (_gqa, _qkv_bias),
    "mixtral": (_gqa, _mixtral_sizes, _softmax_router),
    "qwen2": (_gqa, _qkv_bias),
    "qwen3": (_gqa, _qk_norm),
    "qwen3_moe": (_gqa, _qk_norm, _moe, _softmax_router),
}
