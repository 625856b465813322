"""What each family's HF config says in Megatron's words.

`FAMILIES` names the parts that a family is made of; a part turns the fields it knows into
arguments of Megatron-LM, and notes what Megatron cannot be told. A family that Megatron can
build joins with one line here.

Source: megatron-core 0.19.2 transformer_config.py, transformers 5.24 configuration_*.py and
modeling_*.py, read 2026-11-29; facts/families.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from mtpconv.megatron_families import decoders, experts, hybrids
from mtpconv.megatron_families.draft import Args, Draft, Part

__all__ = ["FAMILIES", "Args", "Draft", "unknown"]

_GQA = (decoders.decoder, decoders.gqa)
_PLAIN_GQA = (*_GQA, decoders.no_attention_bias)
_MLA_MOE = (decoders.decoder, decoders.mla, experts.moe, experts.sigmoid_router)
_SIGMOID_MOE = (experts.moe, experts.sigmoid_router)
_SOFTMAX_MOE = (experts.moe, experts.softmax_router)
_QWEN_HYBRID = (*_PLAIN_GQA, decoders.qk_norm, *_SOFTMAX_MOE, hybrids.gated_delta_net)

FAMILIES: Mapping[str, tuple[Part, ...]] = {
    "bailing_moe_v2": (*_GQA, hybrids.bailing_attention, *_SIGMOID_MOE),
    "deepseek_v3": _MLA_MOE,
    "deepseek_v32": (*_MLA_MOE, decoders.dsa, decoders.deepseek_indexer),
    "exaone_moe": (*_GQA, decoders.qk_norm, hybrids.exaone_attention, *_SIGMOID_MOE),
    "glm4_moe": (*_GQA, decoders.glm4_attention, *_SIGMOID_MOE),
    "glm4_moe_lite": _MLA_MOE,
    "glm_moe_dsa": (*_MLA_MOE, decoders.dsa, decoders.glm_indexer),
    "hy_v3": (*_PLAIN_GQA, decoders.qk_norm, *_SIGMOID_MOE),
    "kimi_k2": _MLA_MOE,
    "llama": _PLAIN_GQA,
    "mimo": (*_GQA, decoders.qkv_bias),
    "mimo_v2_flash": (*_PLAIN_GQA, hybrids.mimo_v2_attention, *_SIGMOID_MOE),
    "minimax_m2": (*_GQA, decoders.qk_norm, hybrids.minimax_attention, *_SIGMOID_MOE),
    "mixtral": (*_GQA, *_SOFTMAX_MOE),
    "nemotron_h": (hybrids.nemotron_hybrid, experts.sigmoid_router),
    "qwen2": (*_GQA, decoders.qkv_bias),
    "qwen3": (*_PLAIN_GQA, decoders.qk_norm),
    "qwen3_5": _QWEN_HYBRID,
    "qwen3_5_moe": _QWEN_HYBRID,
    "qwen3_5_moe_text": _QWEN_HYBRID,
    "qwen3_5_text": _QWEN_HYBRID,
    "qwen3_moe": (*_PLAIN_GQA, decoders.qk_norm, *_SOFTMAX_MOE),
    "qwen3_next": _QWEN_HYBRID,
    "step3p5": (*_GQA, hybrids.step_attention, *_SIGMOID_MOE),
}


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
