"""Tensors as shaped words: dtype name, shape and raw bytes, never floats.

dtype names are those of safetensors (`BF16`, `F8_E4M3`, ...). Because no value is ever
interpreted here, no cast can happen, and NaN payloads and -0.0 need no care.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]

#: Bits of one element, by safetensors dtype name.
#: Source: safetensors 0.8 README, "Format", read 2026-11-29.
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


def are_dims(values: Iterable[object]) -> bool:
    """Whether values that a file gave are sizes or offsets: whole numbers from 0 to 2**63 - 1."""
    for value in values:  # noqa: SIM110 a generator would take twice as long, and there are 300,000
        if type(value) is not int or not 0 <= value < 1 << 63:
            return False
    return True


class TensorSpec(NamedTuple):
    """What a tensor is, apart from its bytes: dtype name and shape."""

    dtype: str
    shape: Shape

    @property
    def elements(self) -> int:
        """Number of elements; 1 for shape `()`, 0 if any axis is 0."""
        return prod(self.shape)

    @property
    @lru_cache(4096)  # noqa: B019 asked ten times a tensor, and a model has few different ones
    def nbytes(self) -> int:
        """Bytes on disk, sub-byte dtypes packed."""
        return self.elements * DTYPE_BITS[self.dtype] // 8


class Box(NamedTuple):
    """A rectangular part of a tensor: `offsets[i] <= index[i] < offsets[i] + sizes[i]`."""

    offsets: Shape
    sizes: Shape

    @staticmethod
    def whole(shape: Shape) -> Box:
        """The box that covers a tensor of this shape."""
        return Box((0,) * len(shape), shape)

    @property
    def elements(self) -> int:
        """Number of elements inside."""
        return prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """The part inside both boxes, or None; boxes of different rank never meet."""
        if len(self.offsets) != len(other.offsets):
            return None
        low = tuple(map(max, self.offsets, other.offsets))
        high = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(b - a for a, b in zip(low, high, strict=True))
        if any(n <= 0 for n in sizes):
            return None
        return Box(low, sizes)


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """The part of a model that a tensor belongs to: root, one trunk layer or one MTP depth."""

    kind: str  # "root" | "trunk" | "mtp" | "carried"
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind in ("root", "carried") else f"{self.kind}.{self.index}"


ROOT = Region("root")
CARRIED = Region("carried")
