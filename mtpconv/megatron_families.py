"""What each family's HF config says in Megatron's words.

`FAMILIES` names the parts that a family is made of; a part turns the fields it knows into
arguments of Megatron-LM, and notes what Megatron cannot be told. A family that Megatron can
build joins with one line here.

Source: megatron-core 0.19.2 transformer_config.py, transformers 5.24 configuration_*.py and
modeling_*.py, read 2026-11-29; facts/families.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mtpconv.errors import RefusedError
from mtpconv.geometry import Config, Geometry

Args = dict[str, Any]

#: Bases of rotary embeddings where transformers has another default than 10,000.
ROPE_THETA = {"mixtral": 1e6}


@dataclass
class Draft:
    """Arguments in the making: `gaps` is what Megatron cannot be told, a line each."""

    geometry: Geometry
    args: Args
    gaps: list[str] = field(default_factory=list)

    @property
    def config(self) -> Config:
        """The part of the HF config that describes the decoder."""
        return self.geometry.text

    def dim(self, name: str) -> int:
        """A whole number of the config. Raises: RefusedError."""
        return self.geometry.dim(name)

    def only(self, name: str, known: Any, config: Config | None = None) -> None:
        """Note a field that has another value than Megatron can build."""
        value = (self.config if config is None else config).get(name)
        if value is not None and value != known:
            self.gaps.append(
                f"config.json: {name} = {value!r}: Megatron can build {self.geometry.model_type} "
                f"only with {known!r}"
            )


Part = Callable[[Draft], None]


def unknown(d: Draft) -> None:
    """The little that is the same in every family: what Megatron compares when it resumes."""
    g = d.geometry
    d.gaps.append(
        f"model_type {g.model_type!r}: its Megatron arguments are not known; known are "
        f"{', '.join(FAMILIES)}"
    )
    d.args |= {"num_layers": g.layers, "mtp_num_layers": g.depths or None}
    for name in ("hidden_size", "num_attention_heads", "max_position_embeddings"):
        if name in g.text:
            d.args[name] = d.dim(name)


def _decoder(d: Draft) -> None:
    g, rope = d.geometry, _rope(d)
    d.only("hidden_act", "silu")
    d.only("mlp_bias", False)
    theta = _number(rope, "rope_theta")
    d.args |= {
        "num_layers": g.layers,
        "hidden_size": d.dim("hidden_size"),
        "ffn_hidden_size": d.dim("intermediate_size"),
        "num_attention_heads": d.dim("num_attention_heads"),
        # No HF config says how long the training sequences were.
        "seq_length": d.dim("max_position_embeddings"),
        "max_position_embeddings": d.dim("max_position_embeddings"),
        "position_embedding_type": "rope",
        "rotary_base": int(theta) if theta == int(theta) else theta,
        "rotary_percent": _number(rope, "partial_rotary_factor", 1.0),
        "normalization": "RMSNorm",
        "norm_epsilon": _number(d.config, "rms_norm_eps"),
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
        d.gaps.append(
            f"{g.model_type}: an MTP depth with another MLP than the last layer; Megatron builds "
            "depths from the spec of that layer"
        )


def _gqa(d: Draft) -> None:
    rope = _rope(d)
    kind = rope["rope_type"]
    if kind == "llama3":
        d.only("low_freq_factor", 1.0, rope)
        d.only("high_freq_factor", 4.0, rope)
        d.only("original_max_position_embeddings", 8192, rope)
        d.args |= {"use_rope_scaling": True, "rope_scaling_factor": _number(rope, "factor")}
    elif kind != "default":
        d.gaps.append(
            f"config.json: rope_type {kind!r}: Megatron arguments are known for default and llama3"
        )
    # Mixtral has only the width, the others have one they do not use unless told to.
    window = "sliding_window" if d.geometry.model_type == "mixtral" else "use_sliding_window"
    if d.config.get(window):
        d.gaps.append(f"config.json: {window}: Megatron arguments for it are not known")
    d.args |= {
        "group_query_attention": True,
        "num_query_groups": d.dim("num_key_value_heads"),
        "kv_channels": d.dim("head_dim"),
    }


def _no_attention_bias(d: Draft) -> None:
    # `attention_bias` biases o_proj too in these families; Megatron biases qkv or every linear.
    d.only("attention_bias", False)


def _qkv_bias(d: Draft) -> None:
    d.args["add_qkv_bias"] = True


def _qk_norm(d: Draft) -> None:
    d.args["qk_layernorm"] = True


def _glm4_attention(d: Draft) -> None:
    d.args["add_qkv_bias"] = d.geometry.fact("has_qkv_bias", 0)
    d.args["qk_layernorm"] = d.geometry.fact("has_qk_norm", 0)
    _rotary_default(d, 0.5)


def _mla(d: Draft) -> None:
    d.only("attention_bias", False)
    d.only("rope_interleave", True)
    d.args |= {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": None if d.config.get("q_lora_rank") is None else d.dim("q_lora_rank"),
        "kv_lora_rank": d.dim("kv_lora_rank"),
        "qk_head_dim": d.dim("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": d.dim("qk_rope_head_dim"),
        "v_head_dim": d.dim("v_head_dim"),
        # No weight has this width, but without it Megatron wants hidden_size / heads to be whole.
        "kv_channels": d.dim("qk_nope_head_dim"),
        # The rotary part of a head has a dimension of its own, whatever the factor says.
        "rotary_percent": 1.0,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    }
    rope = _rope(d)
    if rope["rope_type"] == "yarn":
        longest = d.dim("max_position_embeddings")
        d.args |= {
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
        return
    d.only("rope_type", "default", rope)
    d.args["apply_rope_fusion"] = False  # MLATransformerConfig refuses it unless yarn


def _dsa(d: Draft) -> None:
    g = d.geometry
    shared = "index_topk_freq" in g.text and d.dim("index_topk_freq") > 1
    frequency = d.dim("index_topk_freq") if shared else 1
    offset = d.dim("index_skip_topk_offset") if "index_skip_topk_offset" in g.text else 2
    for layer in range(g.layers):
        if g.fact("has_indexer", layer) != (max(layer - offset + 1, 0) % frequency == 0):
            d.gaps.append(
                f"config.json: whether layer {layer} has an indexer does not follow from "
                f"index_topk_freq {frequency} and index_skip_topk_offset {offset}, the only "
                "pattern Megatron can build"
            )
            break
    d.args |= {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": d.dim("index_n_heads"),
        "dsa_indexer_head_dim": d.dim("index_head_dim"),
        "dsa_indexer_topk": d.dim("index_topk"),
        "dsa_indexer_topk_freq": frequency,
        "dsa_indexer_skip_topk_offset": offset if shared else 0,
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "dsa_indexer_scoring_relu": True,
        "apply_rope_fusion": False,  # DSAttention refuses it
    }


def _deepseek_indexer(d: Draft) -> None:
    # Source: transformers modeling_deepseek_v32.py: half-split rope, a Hadamard rotation.
    d.args |= {"dsa_indexer_rope_interleaved": False, "dsa_indexer_rotate_activation": True}


def _glm_indexer(d: Draft) -> None:
    # Source: Megatron-Bridge glm5_bridge.py 06874539; equal to transformers as measured.
    d.args["dsa_indexer_rope_interleaved"] = bool(d.config.get("indexer_rope_interleave", True))
    d.args["dsa_indexer_rotate_activation"] = False


def _moe(d: Draft) -> None:
    g = d.geometry
    layers = [g.fact("is_moe", layer) for layer in range(g.layers)]
    if not any(layers) and not (g.depths and g.fact("is_moe", g.layers)):
        return
    width = "moe_intermediate_size" if "moe_intermediate_size" in g.text else "intermediate_size"
    shared = g.text.get("n_shared_experts") and d.dim("n_shared_experts") * d.dim(width)
    d.args |= {
        "num_experts": g.experts,
        "moe_ffn_hidden_size": d.dim(width),
        "moe_shared_expert_intermediate_size": shared or None,
        # The int 1 makes Megatron stack layers that are alike, a list keeps them apart.
        "moe_layer_freq": 1 if all(layers) else [int(is_moe) for is_moe in layers],
        "moe_router_topk": d.dim("num_experts_per_tok"),
        "moe_grouped_gemm": True,  # as training runs do; torch_dist keys are the same without
    }


def _sigmoid_router(d: Draft) -> None:
    if d.args["num_experts"] is None:
        return
    d.only("scoring_func", "sigmoid")
    d.only("topk_method", "noaux_tc")
    d.only("norm_topk_prob", True)
    d.args |= {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": _number(d.config, "routed_scaling_factor", 1.0),
        "moe_router_dtype": "fp32",
    }
    if d.config.get("n_group") and d.dim("n_group") > 1:
        d.args["moe_router_num_groups"] = d.dim("n_group")
        d.args["moe_router_group_topk"] = d.dim("topk_group")


def _softmax_router(d: Draft) -> None:
    # Softmax over the chosen experts is softmax over all, made to sum to one again.
    if d.args["num_experts"] is not None:
        again = d.config.get("norm_topk_prob", d.geometry.model_type == "mixtral")
        d.args["moe_router_pre_softmax"] = not again


def _qwen3_next(d: Draft) -> None:
    g = d.geometry
    every = d.dim("full_attention_interval") if "full_attention_interval" in g.text else 4
    kinds = ["full_attention" if (i + 1) % every == 0 else "linear_attention"
             for i in range(g.layers)]  # fmt: skip
    if (g.text.get("layer_types") or kinds) != kinds:
        d.gaps.append(
            f"config.json: layer_types do not follow full_attention_interval {every}, the only "
            "pattern known here"
        )
    if g.depths and kinds[-1] != "full_attention":
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
        "moe_shared_expert_intermediate_size": d.dim("shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
    }
    _rotary_default(d, 0.25)


def _rotary_default(d: Draft, factor: float) -> None:
    """The share of a head that rotates, where the config leaves it to transformers."""
    if "partial_rotary_factor" not in _rope(d):
        d.args["rotary_percent"] = factor


def _rope(d: Draft) -> Args:
    """Rope parameters as transformers 5 spells them, whichever spelling the config has."""
    c = d.config
    found = {n: c[n] for n in ("rope_theta", "partial_rotary_factor") if c.get(n) is not None}
    for name in ("rope_scaling", "rope_parameters"):
        block = c.get(name)
        if isinstance(block, Mapping):
            found |= {k: v for k, v in block.items() if v is not None}
    found.setdefault("rope_theta", ROPE_THETA.get(d.geometry.model_type, 1e4))
    found.setdefault("rope_type", found.get("type", "default"))
    return found


def _number(config: Config, name: str, default: float | None = None) -> float:
    """A field as a float. Raises: RefusedError if it is absent or no finite number."""
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        shown = "missing" if value is None else repr(value)
        raise RefusedError(f"config.json: {name} is {shown}; Megatron needs it as a number")
    return float(value)


_MLA_MOE = (_decoder, _mla, _moe, _sigmoid_router)
_GQA = (_decoder, _gqa)
FAMILIES: Mapping[str, tuple[Part, ...]] = {
    "deepseek_v3": _MLA_MOE,
    "deepseek_v32": (*_MLA_MOE, _dsa, _deepseek_indexer),
    "glm4_moe": (*_GQA, _glm4_attention, _moe, _sigmoid_router),
    "glm4_moe_lite": _MLA_MOE,
    "glm_moe_dsa": (*_MLA_MOE, _dsa, _glm_indexer),
    "kimi_k2": _MLA_MOE,
    "llama": (*_GQA, _no_attention_bias),
    "mimo": (*_GQA, _qkv_bias),
    "mixtral": (*_GQA, _moe, _softmax_router),
    "qwen2": (*_GQA, _qkv_bias),
    "qwen3": (*_GQA, _no_attention_bias, _qk_norm),
    "qwen3_moe": (*_GQA, _no_attention_bias, _qk_norm, _moe, _softmax_router),
    "qwen3_next": (*_GQA, _no_attention_bias, _qk_norm, _moe, _softmax_router, _qwen3_next),
}
