"""Relations between the bytes of two tensors: equal after an upcast, padding, halves, offsets."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from mtpconv.audit.compare import aligned, side_blocks
from mtpconv.audit.subject import Subject
from mtpconv.audit.words import as_words, decode, round_to
from mtpconv.store.content import Files
from mtpconv.tensors import DTYPE_BITS

Blocks = Iterator[memoryview]
#: Units: bytes. A row longer than this is not a row of any weight matrix.
_MAX_ROW = 64 << 20


def upcast_equal(before: Subject, after: Subject, name: str) -> bool:
    """Whether every value of a tensor is exactly equal in the wider dtype, zeros' signs too."""
    old, new = before.tensors[name].dtype, after.tensors[name].dtype
    ratio = DTYPE_BITS[new] // DTYPE_BITS[old]
    with Files() as left, Files() as right:
        narrow = side_blocks(before, name, left, "before")
        wide = side_blocks(after, name, right, "after")
        for x, y in _in_step(narrow, wide, ratio):
            values = decode(old, as_words(old, x))
            others = decode(new, as_words(new, y))
            if values is None or others is None:
                return False
            a, b = values.astype(np.float64), others.astype(np.float64)
            nan = np.isnan(a)
            if not np.array_equal(nan, np.isnan(b)):
                return False
            if not np.array_equal(a[~nan].view("<u8"), b[~nan].view("<u8")):
                return False
    return True


def _in_step(narrow: Blocks, wide: Blocks, ratio: int) -> Iterator[tuple[memoryview, memoryview]]:
    a = b = memoryview(b"")
    while True:
        if not len(a):
            a = next(narrow, memoryview(b""))
        if not len(b):
            b = next(wide, memoryview(b""))
        size = min(len(a), len(b) // ratio)
        if not size:
            return
        yield a[:size], b[: size * ratio]
        a, b = a[size:], b[size * ratio :]


def padded_with_zeros(before: Subject, after: Subject, name: str) -> int | None:
    """Rows by which one side is longer, if the rest is equal and these rows are all zero."""
    old, new = before.tensors[name], after.tensors[name]
    with Files() as left, Files() as right:
        short, long = (
            side_blocks(before, name, left, "before"),
            side_blocks(after, name, right, "after"),
        )
        if old.shape[0] > new.shape[0]:
            short, long = long, short
        rest = _Rest(long)
        for x, y in aligned(short, rest):
            if x != y and not np.array_equal(np.frombuffer(x, "u1"), np.frombuffer(y, "u1")):
                return None
            rest.used(len(y))
        if any(np.frombuffer(block, "u1").any() for block in rest.remaining()):
            return None
    return abs(old.shape[0] - new.shape[0])


class _Rest:
    """Blocks of a stream that remembers what of its last block was not yet used."""

    def __init__(self, stream: Blocks) -> None:
        self._stream = stream
        self._block = memoryview(b"")
        self._used = 0

    def __iter__(self) -> _Rest:
        return self

    def __next__(self) -> memoryview:
        self._block = next(self._stream)
        self._used = 0
        return self._block

    def used(self, size: int) -> None:
        self._used += size

    def remaining(self) -> Blocks:
        yield self._block[self._used :]
        yield from self._stream


def span(subject: Subject, name: str, low: int, high: int, files: Files, side: str) -> Blocks:
    """Bytes `low` to `high` of a tensor."""
    at = 0
    for block in side_blocks(subject, name, files, side):
        begin, end = max(low - at, 0), min(high - at, len(block))
        if begin < end:
            yield block[begin:end]
        at += len(block)
        if at >= high:
            return


def halves_swapped(before: Subject, after: Subject, name: str) -> int | None:
    """The axis along which the two halves changed places, if one explains the difference."""
    spec = after.tensors[name]
    if not spec.shape or spec.nbytes == 0 or DTYPE_BITS[spec.dtype] < 8:
        return None
    if spec.shape[-1] % 2 == 0 and len(spec.shape) > 1 and _rows_swapped(before, after, name):
        return len(spec.shape) - 1
    if spec.shape[0] % 2 == 0 and _halves_equal(before, after, name):
        return 0
    return None


def _halves_equal(before: Subject, after: Subject, name: str) -> bool:
    size = after.tensors[name].nbytes
    half = size // 2
    with Files() as left, Files() as right:
        for low in (0, half):
            old = span(before, name, half - low, size - low, left, "before")
            new = span(after, name, low, low + half, right, "after")
            if not all(_same(x, y) for x, y in aligned(old, new)):
                return False
    return True


def _rows_swapped(before: Subject, after: Subject, name: str) -> bool:
    spec = after.tensors[name]
    row = spec.shape[-1] * DTYPE_BITS[spec.dtype] // 8
    if row > _MAX_ROW:
        return False
    with Files() as left, Files() as right:
        old = whole_rows(side_blocks(before, name, left, "before"), row)
        new = whole_rows(side_blocks(after, name, right, "after"), row)
        for x, y in aligned(old, new):
            a = np.frombuffer(x, "u1").reshape(-1, row)
            b = np.frombuffer(y, "u1").reshape(-1, row)
            half = row // 2
            if not (
                np.array_equal(a[:, :half], b[:, half:])
                and np.array_equal(a[:, half:], b[:, :half])
            ):
                return False
    return True


def whole_rows(stream: Blocks, row: int) -> Blocks:
    """The same bytes in blocks of whole rows."""
    rest = b""
    for block in stream:
        data = rest + bytes(block) if rest else bytes(block)
        size = len(data) // row * row
        if size:
            yield memoryview(data)[:size]
        rest = data[size:]


def shifted_by_one(before: Subject, after: Subject, name: str) -> float | None:
    """1.0 or -1.0 if every value is the old one plus that, rounded to the dtype; else None."""
    spec = after.tensors[name]
    if round_to(spec.dtype, np.zeros(1, np.float32)) is None or prod(spec.shape) > 1 << 20:
        return None
    offsets = {1.0, -1.0}
    with Files() as left, Files() as right:
        pairs = aligned(
            side_blocks(before, name, left, "before"), side_blocks(after, name, right, "after")
        )
        for x, y in pairs:
            values = decode(spec.dtype, as_words(spec.dtype, x))
            new = as_words(spec.dtype, y)
            for offset in sorted(offsets):
                moved = None if values is None else round_to(spec.dtype, values + offset)
                if moved is None or not np.array_equal(moved, new):
                    offsets.discard(offset)
            if not offsets:
                return None
    return max(offsets) if len(offsets) == 1 else None


def rounded_through(before: Subject, after: Subject, name: str) -> str | None:
    """The narrower dtype through which an F32 tensor was rounded, if one explains the change."""
    if after.tensors[name].dtype != "F32" or before.tensors[name].dtype != "F32":
        return None
    left_over = ["BF16", "F16"]
    with Files() as left, Files() as right:
        pairs = aligned(
            side_blocks(before, name, left, "before"), side_blocks(after, name, right, "after")
        )
        for x, y in pairs:
            values, new = decode("F32", as_words("F32", x)), as_words("F32", y)
            for dtype in list(left_over):
                narrow = None if values is None else round_to(dtype, values)
                back = None if narrow is None else decode(dtype, narrow)
                if back is None or not np.array_equal(back.astype("<f4").view("<u4"), new):
                    left_over.remove(dtype)
            if not left_over:
                return None
    return left_over[0] if left_over else None


def _same(x: memoryview, y: memoryview) -> bool:
    return np.array_equal(np.frombuffer(x, "u1"), np.frombuffer(y, "u1"))
