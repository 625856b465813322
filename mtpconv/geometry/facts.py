"""Facts: truths of one layer that a table may name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mtpconv.geometry.config import (
    MTP_PATTERN_FIELDS,
    PATTERN_FIELDS,
    listed,
    number,
    pattern,
)
from mtpconv.geometry.dims import SHARED_FIELDS
from mtpconv.geometry.kinds import compress_ratio, is_sliding

if TYPE_CHECKING:
    from mtpconv.geometry.model import Geometry


#: Families whose MTP blocks are dense, though their trunk is MoE. Source: families.md section 1.
_DENSE_MTP = frozenset({"ernie4_5_moe", "exaone_moe", "mimo_v2_flash", "step3p5"})


def _is_moe(g: Geometry, layer: int) -> bool:
    """MoE or dense."""
    if not g.experts or (g.is_mtp(layer) and g.model_type in _DENSE_MTP):
        return False
    kind = listed(g, "mlp_layer_types", layer)
    if kind is not None:
        return bool(kind != "dense")
    each = g.text.get("moe_layer_freq")
    if isinstance(each, list):
        return bool(each[layer]) if layer < len(each) else True
    if g.is_mtp(layer):
        return True
    for rule in (_moe_by_enumeration, _moe_by_sparse_step, _moe_by_range):
        known = rule(g, layer)
        if known is not None:
            return known
    first, frequency = number(g, "first_k_dense_replace", 0), number(g, "moe_layer_freq", 1)
    return layer >= first and layer % max(frequency, 1) == 0


def _moe_by_enumeration(g: Geometry, layer: int) -> bool | None:
    named = g.text.get("moe_layers_enum")  # Step-3.5: "3,4,5,..."
    if not isinstance(named, str | list):
        return None
    return str(layer) in (named.split(",") if isinstance(named, str) else map(str, named))


def _moe_by_sparse_step(g: Geometry, layer: int) -> bool | None:
    if "decoder_sparse_step" not in g.text and "mlp_only_layers" not in g.text:  # Qwen
        return None
    step, dense = number(g, "decoder_sparse_step", 1), g.text.get("mlp_only_layers")
    excepted = isinstance(dense, list) and layer in dense
    return not excepted and (layer + 1) % max(step, 1) == 0


def _moe_by_range(g: Geometry, layer: int) -> bool | None:
    if "moe_layer_start_index" not in g.text:  # ERNIE; transformers 5.24 modeling_ernie4_5_moe.py
        return None
    last = g.layers - 1
    if g.text.get("moe_layer_end_index") != -1:
        last = number(g, "moe_layer_end_index", last)
    inside = number(g, "moe_layer_start_index", 0) <= layer <= last
    return inside and (layer + 1) % max(number(g, "moe_layer_interval", 1), 1) == 0


def _is_linear(g: Geometry, layer: int) -> bool:
    """Linear attention (gated delta net); MTP blocks never have it."""
    if g.is_mtp(layer):
        return False
    kind = listed(g, "layer_types", layer)
    if kind is not None:
        return bool(kind == "linear_attention")
    interval = number(g, "full_attention_interval", 0)
    return interval > 0 and (layer + 1) % interval != 0


def _has_sink(g: Geometry, layer: int) -> bool:
    """A learned softmax offset for each head (MiMo-V2: in its sliding layers)."""
    kind = "swa" if is_sliding(g, layer) else "full"
    return bool(g.text.get(f"add_{kind}_attention_sink_bias"))


#: Nemotron-H layer kinds: letter of the pattern, words of `layers_block_type`.
_HYBRID_KINDS: Mapping[str, tuple[str, ...]] = {
    "mamba": ("M", "mamba", "linear_attention"),
    "attention": ("*", "attention", "full_attention"),
    "mlp": ("-", "mlp"),
    "moe": ("E", "moe"),
}


def _hybrid(kind: str) -> Callable[[Geometry, int], bool]:
    def holds(g: Geometry, layer: int) -> bool:
        fields = MTP_PATTERN_FIELDS if g.is_mtp(layer) else PATTERN_FIELDS
        kinds = pattern(g.text, fields)
        if kinds is None:
            return False
        return kinds[(layer - g.layers) % len(kinds)] in _HYBRID_KINDS[kind]

    return holds


def _has_indexer(g: Geometry, layer: int) -> bool:
    if g.text.get("index_topk") is None:
        return False
    if "compress_ratios" in g.text:
        return compress_ratio(g, layer) == 4
    if g.is_mtp(layer):
        return True
    kind = listed(g, "indexer_types", layer)
    if kind is not None:
        return bool(kind != "shared")
    # Source: transformers 5.24 configuration_glm_moe_dsa.py; the offset's default is 2 there.
    letters = g.text.get("index_topk_pattern")
    if isinstance(letters, str) and layer < len(letters):
        return letters[layer] == "F"
    frequency, offset = number(g, "index_topk_freq", 1), number(g, "index_skip_topk_offset", 2)
    return max(layer - offset + 1, 0) % max(frequency, 1) == 0


def index_sharing(g: Geometry) -> tuple[int, int] | None:
    """Frequency and offset by which layers share indexers; None if they follow no such rule.

    The rule, transformers' and Megatron's alike: layer i has an indexer of its own exactly if
    max(i - offset + 1, 0) is a multiple of the frequency. Some configs list the layers instead.
    """
    own = [_has_indexer(g, layer) for layer in range(g.layers)]
    if not own or not own[0]:
        return None  # the first layer has nobody to share with
    said = number(g, "index_topk_freq", 1), number(g, "index_skip_topk_offset", 2)
    shared = own.index(False) if False in own else g.layers
    again = own.index(True, shared) if True in own[shared:] else g.layers
    for frequency, offset in (said, (1, 0), (again - shared + 1, shared)):
        if own == [max(i - offset + 1, 0) % max(frequency, 1) == 0 for i in range(g.layers)]:
            return max(frequency, 1), offset
    return None


def _says(*fields: str) -> Callable[[Geometry, int], bool]:
    """True where the config sets one of these fields to something true."""
    return lambda g, layer: any(bool(g.text.get(f)) for f in fields)


def _is_tied(g: Geometry, layer: int) -> bool:
    del layer
    return bool(g.config.get("tie_word_embeddings", g.text.get("tie_word_embeddings", False)))


#: The closed list of facts a table may name. Law: a pure function of config and layer.
FACTS: Mapping[str, Callable[[Geometry, int], bool]] = {
    "is_moe": _is_moe,
    "is_dense": lambda g, layer: not _is_moe(g, layer),
    "has_indexer": _has_indexer,
    "is_tied": _is_tied,
    "is_linear": _is_linear,
    "is_sliding": lambda g, layer: is_sliding(g, layer),
    "has_sink": _has_sink,
    "is_compressed": lambda g, layer: compress_ratio(g, layer) > 0,
    "is_hash_routed": lambda g, layer: layer < number(g, "num_hash_layers", 0),
    "is_hybrid_mamba": _hybrid("mamba"),
    "is_hybrid_attention": _hybrid("attention"),
    "is_hybrid_mlp": _hybrid("mlp"),
    "is_hybrid_moe": _hybrid("moe"),
    "has_shared_experts": _says(*SHARED_FIELDS),
    "has_latent_experts": _says("moe_latent_size"),
    "has_q_lora": _says("q_lora_rank"),
    "has_qk_norm": _says("use_qk_norm"),
    "has_qkv_bias": _says("attention_bias", "use_qkv_bias", "qkv_bias"),
    "is_mtp": lambda g, layer: g.is_mtp(layer),
    "is_first_inner": lambda g, layer: (layer - g.layers) % g.mtp_inner == 0,
    "is_last_inner": lambda g, layer: (layer - g.layers) % g.mtp_inner == g.mtp_inner - 1,
}
