"""Words as numbers, for statistics and hints only; verdicts never depend on a decoded value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtpconv.tensors import DTYPE_BITS

Floats = NDArray[Any]
Words = NDArray[Any]

_WORD = {8: "<u1", 16: "<u2", 32: "<u4", 64: "<u8"}


def as_words(dtype: str, block: memoryview | bytes) -> Words:
    """Unsigned words of the element's size; bytes for sub-byte dtypes."""
    return np.frombuffer(block, _WORD.get(DTYPE_BITS[dtype], "<u1"))


def decode(dtype: str, words: Words) -> Floats | None:
    """The numbers that the words stand for, exactly; None if the dtype is no float here."""
    if dtype == "BF16":
        return (words.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F16":
        return words.view("<f2").astype(np.float32)
    if dtype in ("F32", "F64"):
        return words.view("<f4" if dtype == "F32" else "<f8")
    table = _FP8.get(dtype)
    return None if table is None else table[words]


def is_float(dtype: str) -> bool:
    """Whether `decode` knows the dtype."""
    return dtype in ("BF16", "F16", "F32", "F64") or dtype in _FP8


def round_to(dtype: str, values: Floats) -> Words | None:
    """The words of a wider or narrower float dtype, rounded to nearest even; None if unknown."""
    if dtype == "F32":
        return values.astype(np.float32).view(np.uint32)
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    if dtype == "BF16":
        bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), (bits >> 16).astype(np.uint16) | 0x40, rounded)
    return None


def _minifloat(exponent: int, mantissa: int, *, has_infinity: bool) -> Floats:
    """All 256 values of an FP8 format with this many exponent and mantissa bits.

    Source: OCP OFP8 specification rev 1.0, section 5; E4M3 has no infinities.
    """
    code = np.arange(256)
    e = (code >> mantissa) & ((1 << exponent) - 1)
    m = code & ((1 << mantissa) - 1)
    bias = (1 << (exponent - 1)) - 1
    fraction = m / (1 << mantissa)
    value = np.where(
        e == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (e.astype(float) - bias)
    )
    top = (1 << exponent) - 1
    if has_infinity:
        value = np.where(e == top, np.where(m == 0, np.inf, np.nan), value)
    else:
        value = np.where((e == top) & (m == (1 << mantissa) - 1), np.nan, value)
    return np.where(code >> 7, -value, value).astype(np.float32)


def _scale_exponents() -> Floats:
    """All values of E8M0, powers of two with one NaN. Source: OCP MX specification 1.0, 5.4.1."""
    code = np.arange(256)
    return np.where(code == 255, np.nan, 2.0 ** (code - 127.0)).astype(np.float64)


_FP8: Mapping[str, Floats] = {
    "F8_E4M3": _minifloat(4, 3, has_infinity=False),
    "F8_E5M2": _minifloat(5, 2, has_infinity=True),
    "F8_E8M0": _scale_exponents(),
}


@dataclass(slots=True)
class Stats:
    """What is worth knowing about the values of one tensor, gathered block by block."""

    dtype: str
    elements: int = 0
    zeros: int = 0
    not_finite: int = 0
    total: float = 0.0
    squares: float = 0.0
    #: the word that every element has so far
    only_word: int | None = None
    constant: bool = True
    #: the low 16 bits of all F32 words, or-ed
    low_bits: int = 0
    #: sign bit cleared: +0.0 and -0.0 both count as zero
    _magnitude: int = field(init=False)

    def __post_init__(self) -> None:
        """Precompute what depends on the dtype only."""
        bits = DTYPE_BITS[self.dtype]
        self._magnitude = (1 << (bits - 1)) - 1 if is_float(self.dtype) else (1 << bits) - 1

    def add(self, block: memoryview | bytes) -> None:
        """Count one more block."""
        words = as_words(self.dtype, block)
        if not words.size:
            return
        if self.only_word is None:
            self.only_word = int(words[0])
        if self.constant:
            self.constant = bool((words == words.dtype.type(self.only_word)).all())
        self.elements += words.size
        self.zeros += int(words.size - np.count_nonzero(words & words.dtype.type(self._mask())))
        if self.dtype == "F32":
            self.low_bits |= int(np.bitwise_or.reduce(words)) & 0xFFFF
        values = decode(self.dtype, words)
        if values is None:
            return
        with np.errstate(over="ignore", invalid="ignore"):
            finite = np.isfinite(values)
            bad = int(values.size - np.count_nonzero(finite))
            self.not_finite += bad
            good = (values[finite] if bad else values).astype(np.float64)
            self.total += float(good.sum())
            # No dot product: BLAS would start threads that spin beside those that read.
            self.squares += float(np.square(good, out=good).sum())

    def _mask(self) -> int:
        return self._magnitude if DTYPE_BITS[self.dtype] >= 8 else 0xFF

    @property
    def all_zero(self) -> bool:
        """Every value is 0.0 or -0.0."""
        return self.elements > 0 and self.zeros == self.elements

    @property
    def mean(self) -> float:
        """Mean of the finite values."""
        count = self.elements - self.not_finite
        return self.total / count if count else 0.0

    @property
    def std(self) -> float:
        """Standard deviation of the finite values."""
        count = self.elements - self.not_finite
        return sqrt(max(self.squares / count - self.mean**2, 0.0)) if count else 0.0

    @property
    def only_value(self) -> float | None:
        """The value every element has, if there is one and the dtype is a float."""
        if not self.constant or self.only_word is None:
            return None
        word = np.array([self.only_word], _WORD.get(DTYPE_BITS[self.dtype], "<u1"))
        values = decode(self.dtype, word)
        return None if values is None else float(values[0])

    @property
    def fits_bf16(self) -> bool:
        """An F32 tensor of which no value uses a bit that BF16 lacks."""
        return self.dtype == "F32" and self.elements > 0 and self.low_bits == 0
