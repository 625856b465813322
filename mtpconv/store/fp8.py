"""Block FP8: E4M3 codes, one scale for each block of the last two axes.

The only arithmetic in mtpconv's conversions, and exact by definition: a value is the code times
the scale in fp32, rounded once to BF16. Everything works on stretches of rows, so that callers
hold a bounded number of them.

Source: OCP OFP8 specification rev 1.0, section 5 (E4M3: no infinities, two NaN codes); OCP MX
specification 1.0, section 5.4.1 (E8M0); families.md section 5 (128x128 blocks, `weight_scale_inv`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtpconv.errors import RefusedError
from mtpconv.tensors import Shape

Codes = NDArray[np.uint8]
Bf16 = NDArray[np.uint16]
Scales = NDArray[np.float32]

#: The largest E4M3 number, and the largest that rounds to it (a tie, and 448 is the even one).
LARGEST = 448.0
_LARGEST_ROUNDED = 464.0
#: A scale that is no normal fp32 number would lose bits of its own.
_SMALLEST_SCALE = 2.0**-126
#: dtypes in which releases store scales. BF16: Qwen3's FP8 releases. E8M0: powers of two.
SCALE_DTYPES = ("F32", "BF16", "F8_E8M0")


@dataclass(frozen=True, slots=True)
class Grid:
    """A tensor cut into blocks along its last two axes; axes before them count matrices."""

    shape: Shape
    block: tuple[int, int] = (128, 128)

    @property
    def rows(self) -> int:
        """Rows of one matrix."""
        return self.shape[-2]

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self.shape[-1]

    @property
    def scale_shape(self) -> Shape:
        """Shape of the scale tensor: blocks at the edges may be smaller, each has a scale."""
        *lead, rows, columns = self.shape
        return (*lead, -(-rows // self.block[0]), -(-columns // self.block[1]))

    def stripes(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Rows `first` to `last`, of all matrices, cut where scales change.

        Each is (first row, last row, row of the scale tensor), both counted through all matrices.
        """
        found, per_matrix = [], -(-self.rows // self.block[0])
        while first < last:
            matrix, row = divmod(first, self.rows)
            number = row // self.block[0]
            end = min(last, matrix * self.rows + min(self.rows, (number + 1) * self.block[0]))
            found.append((first, end, matrix * per_matrix + number))
            first = end
        return found


@cache
def e4m3_values() -> Scales:
    """The numbers that the 256 codes stand for."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent.astype(float) - 10)
    )
    value = np.where(code & 127 == 127, np.nan, value)
    return np.where(code >> 7, -value, value).astype(np.float32)


def to_bf16(values: Scales) -> Bf16:
    """fp32 rounded to nearest even; a NaN becomes the quiet one of its sign."""
    bits = values.view(np.uint32)
    # The sum may wrap for NaNs only, and those are replaced.
    rounded = ((bits + ((bits >> 16) & 1) + np.uint32(0x7FFF)) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        quiet = ((bits >> 16) & 0x8000).astype(np.uint16) | np.uint16(0x7FC0)
        rounded[nan] = quiet[nan]
    return rounded


def from_bf16(words: Bf16) -> Scales:
    """BF16 as fp32, exactly."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def read_scales(dtype: str, data: bytes | memoryview) -> Scales:
    """The bytes of a scale tensor as fp32, exactly."""
    if dtype == "F32":
        return np.frombuffer(data, "<f4").astype(np.float32)
    if dtype == "BF16":
        return from_bf16(np.frombuffer(data, "<u2"))
    exponent = np.frombuffer(data, "u1")
    bits = exponent.astype(np.uint32) << 23
    bits[exponent == 0] = 1 << 22  # 2^-127 has no normal form
    bits[exponent == 255] = 0x7FC00000
    return bits.view(np.float32)


def write_scales(dtype: str, scales: Scales) -> bytes:
    """fp32 scales as the bytes of a scale tensor; exact for those that `fresh_scales` gives."""
    if dtype == "F32":
        return scales.astype("<f4").tobytes()
    if dtype == "BF16":
        return to_bf16(scales).astype("<u2").tobytes()
    return (scales.view(np.uint32) >> 23).astype(np.uint8).tobytes()


def dequantise(
    codes: Codes, scales: Scales, width: int, first_column: int = 0, out: Bf16 | None = None
) -> Bf16:
    """BF16 of a stretch of rows that share their scales.

    Shape: codes [rows, columns] from column `first_column`; scales [blocks of a whole row];
    blocks are `width` columns wide.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        table = to_bf16(e4m3_values() * scales[:, None])  # 256 numbers a block: all it can hold
    if out is None:
        out = np.empty(codes.shape, np.uint16)
    last_column = first_column + codes.shape[1]
    for number in range(first_column // width, -(-last_column // width)):
        low = max(number * width, first_column) - first_column
        high = min((number + 1) * width, last_column) - first_column
        out[:, low:high] = table[number].take(codes[:, low:high])
    return out


def quantise(words: Bf16, scales: Scales, width: int) -> Codes:
    """The E4M3 codes nearest to BF16 / scale, ties to even; beyond 448 the largest code.

    Shape: words [rows, columns], scales [blocks of a row].
    """
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        quotient = from_bf16(words) / _spread(scales, width, words.shape[1])
    bits = np.ascontiguousarray(quotient).view(np.uint32)
    sign = ((bits >> 24) & 0x80).astype(np.uint8)
    size = np.minimum(np.abs(quotient), np.float32(LARGEST))
    # Normal numbers: round the fraction to three bits, then move the exponent's zero point.
    magnitude = size.view(np.uint32)
    normal = (magnitude + ((magnitude >> 20) & 1) + np.uint32(0x7FFFF)) >> 20
    normal -= np.uint32(120 << 3)
    subnormal = np.rint(size * np.float32(512))
    code = np.where(size < np.float32(2.0**-6), subnormal, normal).astype(np.uint8)
    code[np.isnan(quotient)] = 0x7F
    found: Codes = code | sign
    return found


def largest(words: Bf16, width: int) -> Bf16:
    """The largest magnitude in each block of a stretch of rows, as a BF16 word.

    Magnitudes of BF16 are ordered like their words, NaN above infinity above all numbers.
    """
    size: Bf16 = np.bitwise_and(words, np.uint16(0x7FFF)).max(axis=0)
    return np.maximum.reduceat(size, np.arange(0, len(size), width))


def fresh_scales(most: Bf16, dtype: str, *, power_of_two: bool, where: str) -> Scales:
    """The scales under which blocks with these largest magnitudes just fit.

    amax / 448, rounded up to a power of two where the release has such scales; 1 for a block
    of zeros. What is returned is what the scale tensor's dtype can hold.

    Raises: RefusedError for NaN and infinity, which have no scale.
    """
    if most.size and most.max() >= 0x7F80:
        raise RefusedError(
            f"{where}: holds NaN or infinity, which FP8 blocks cannot; "
            "repair the weights, or pass --fp8 bf16"
        )
    scales = from_bf16(most) / np.float32(LARGEST)
    scales[most == 0] = 1
    np.maximum(scales, np.float32(_SMALLEST_SCALE), out=scales)
    if power_of_two or dtype == "F8_E8M0":
        fraction, exponent = np.frexp(scales)
        scales = np.ldexp(np.float32(1), exponent - (fraction == 0.5)).astype(np.float32)
    return from_bf16(to_bf16(scales)) if dtype == "BF16" else scales


def fits(most: Bf16, scales: Scales) -> NDArray[np.bool_]:
    """Where a block with this largest magnitude needs no cutting under a scale."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        sound = np.isfinite(scales) & (scales >= np.float32(_SMALLEST_SCALE))
        return sound & (from_bf16(most) / scales <= np.float32(_LARGEST_ROUNDED))


def are_powers_of_two(scales: Scales) -> bool:
    """Whether all scales are (UE8M0 stored as F32 too)."""
    sound = scales[np.isfinite(scales) & (scales > 0)]
    return bool(sound.size) and not (sound.view(np.uint32) & 0x7FFFFF).any()


def _spread(scales: Scales, width: int, columns: int) -> Any:
    return np.repeat(scales, width)[:columns]
