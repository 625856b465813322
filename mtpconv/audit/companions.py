"""Weights stored as codes, and the tensors that stand beside them, told from names and headers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mtpconv.tensors import DTYPE_BITS, Shape, TensorSpec

#: What quantisers append to the name of a weight, or put where `weight` stands.
#: Source: facts on MTP families, section 5 (DeepSeek, compressed-tensors, modelopt).
_SCALES = ("_scale_inv", "_scale")
#: A second scale over the first, which NVFP4 cannot do without.
SECOND_SCALES = ("_scale_2", "_global_scale")
PACKED = "_packed"
_BESIDE = ("scale", "input_scale", "input_global_scale")
_BESIDE_CODES = (*_SCALES, *SECOND_SCALES, "_zero_point")
_BESIDE_PACKED = (PACKED, "_shape", "_scale", "_global_scale", "_zero_point", "_g_idx")
_COMPANIONS = tuple(sorted({*_BESIDE_CODES, *_BESIDE_PACKED}, key=len, reverse=True))

FLOATS = ("F64", "F32", "F16", "BF16")
#: FP8: one value a byte, so a code tensor has the shape of its weight.
FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
#: Integers that may be one value, or two of four bits.
_BYTES = ("U8", "I8", "F4")
_PACKED_IN = ("I32", "U8", "I8")
_BITS = (2, 3, 4, 8)


def companion_base(name: str) -> str | None:
    """The weight that a scale or another companion belongs to; None for other names."""
    module, _, leaf = name.rpartition(".")
    if leaf in _BESIDE:
        return f"{module}.weight"
    return next((name.removesuffix(s) for s in _COMPANIONS if name.endswith(s)), None)


def scale_of(known: Collection[str], weight: str) -> str | None:
    """The name of the scale of a weight, in whatever style."""
    module, _, leaf = weight.rpartition(".")
    styles = [weight + s for s in _SCALES] + ([f"{module}.scale"] if leaf == "weight" else [])
    return next((name for name in styles if name in known), None)


def is_code(spec: TensorSpec) -> bool:
    """Whether a weight of this form may be codes; only scales or a config say that it is."""
    return spec.dtype in FP8 or (spec.dtype in _BYTES and len(spec.shape) > 1)


def has_companions(known: Collection[str], weight: str) -> bool:
    """Whether anything of a quantised weight is there."""
    return scale_of(known, weight) is not None or any(weight + s in known for s in _COMPANIONS)


def is_stray(tensors: Mapping[str, TensorSpec], name: str) -> bool:
    """Whether a companion stands beside a weight that needs none: plain numbers are no codes."""
    base = companion_base(name)
    if base is None or base not in tensors:
        return False
    return not (name.endswith((*_BESIDE_CODES, *_BESIDE)) and is_code(tensors[base]))


def code_fits(spec: TensorSpec, wanted: Shape) -> bool:
    """Whether codes of this form can be those of a weight of the wanted shape."""
    if spec.shape == wanted:
        return True
    return spec.dtype in _BYTES and spec.shape == (*wanted[:-1], -(-wanted[-1] // 2))


def packed_fits(spec: TensorSpec, wanted: Shape, config: Mapping[str, Any] | None) -> bool:
    """Whether a packed tensor has room for exactly a weight of the wanted shape.

    compressed-tensors packs rows, as many whole values into a word as fit.
    """
    if spec.dtype not in _PACKED_IN or len(wanted) < 2 or spec.shape[:-1] != wanted[:-1]:
        return False
    width = DTYPE_BITS[spec.dtype]
    return any(
        spec.shape[-1] == -(-wanted[-1] // (width // bits))
        for bits in _stated_bits(config) or _BITS
    )


def _stated_bits(config: Mapping[str, Any] | None) -> list[int]:
    groups = (config or {}).get("config_groups")
    found = []
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        bits = weights.get("num_bits") if isinstance(weights, Mapping) else None
        if type(bits) is int and 0 < bits <= 8:
            found.append(bits)
    return found
