"""What kind a layer is, as far as dims depend on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtpconv.geometry.config import listed

if TYPE_CHECKING:
    from mtpconv.geometry.model import Geometry

#: Sliding window or not, and how many positions share one key.
Kind = tuple[bool, int]


def is_sliding(g: Geometry, layer: int) -> bool:
    """True for layers with sliding-window attention, which may have heads of their own."""
    pattern = g.text.get("hybrid_layer_pattern")
    if isinstance(pattern, list):  # MiMo-V2: 1 is sliding; all its MTP depths are
        return g.is_mtp(layer) or (layer < len(pattern) and pattern[layer] == 1)
    return bool(listed(g, "layer_types", layer) == "sliding_attention")


#: DeepSeek-V4's words for how many positions share one key.
_COMPRESSION = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def compress_ratio(g: Geometry, layer: int) -> int:
    """Positions that share one key (DeepSeek-V4), 0 without compression."""
    ratio = listed(g, "compress_ratios", layer)
    if ratio is None and not g.is_mtp(layer):
        ratio = _COMPRESSION.get(str(listed(g, "layer_types", layer)))
    return ratio if isinstance(ratio, int) else 0


def kind(g: Geometry, layer: int) -> Kind:
    """The kind of a layer."""
    return is_sliding(g, layer), compress_ratio(g, layer)
