"""Tensors whose pieces are more than runs: columns and transposes, gathered row by row.

Only as many rows as fit into a block are held. Nothing is mapped: a file that shrinks while
it is read must be an error, not a SIGBUS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mtpconv.errors import UnreadableError
from mtpconv.store.files import Files, Store
from mtpconv.tensors import DTYPE_BITS, Box, Shape, TensorSpec

if TYPE_CHECKING:
    from mtpconv.store.content import Piece

Words = NDArray[Any]

#: Units: bytes. What a transposing gather may hold: most matrices fit and are read once.
_PANEL = 32 << 20
#: Units: bytes. A box with gaps is read in one go if it spans no more than this.
_SPAN = 64 << 10

_WORD: Mapping[int, str] = {8: "<u1", 16: "<u2", 32: "<u4", 64: "<u8"}


def gather(
    spec: TensorSpec, parts: Sequence[Piece], files: Files, size: int
) -> Iterator[memoryview]:
    """The bytes of a tensor in C order, in blocks of at most `size` bytes.

    Raises: UnreadableError if a file ends early or the dtype is narrower than a byte.
    """
    bits = DTYPE_BITS[spec.dtype]
    if bits not in _WORD:
        raise UnreadableError(f"a {spec.dtype} tensor of shape {spec.shape} cannot be cut")
    word = _WORD[bits]
    # Leading axes of size 1 would make every block the whole tensor.
    lead = next((i for i, n in enumerate(spec.shape) if n > 1), len(spec.shape) - 1)
    shape = spec.shape[lead:]
    row = prod(shape[1:]) * bits // 8
    # Each block of a transposed piece touches all of its rows: few and large ones, then.
    panel = max(size, _PANEL) if any(part.swap for part in parts) else size
    rows = max(1, min(shape[0], panel // row))
    out = np.empty((rows, *shape[1:]), word)
    for first in range(0, shape[0], rows):
        last = min(first + rows, shape[0])
        for part in parts:
            _rows(part, lead, (first, last), out, files)
        flat = out[: last - first].reshape(-1).view("u1").data
        for at in range(0, len(flat), size):
            yield flat[at : at + size]


def _rows(part: Piece, lead: int, rows: tuple[int, int], out: Words, files: Files) -> None:
    """Put what a piece has of rows `rows[0]` to `rows[1]` into `out`."""
    offsets, sizes = part.box.offsets[lead:], part.box.sizes[lead:]
    low, high = max(rows[0], offsets[0]), min(rows[1], offsets[0] + sizes[0])
    if low >= high or not part.box.elements:
        return
    sizes = (high - low, *sizes[1:])
    offsets = (low - rows[0], *offsets[1:])
    target = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
    if part.file is None:
        out[target] = 0
        return
    inside = part.chunk_box
    if part.box.sizes[lead] > 1:  # the rows are an axis of the chunk, too
        axes = list(range(len(inside.sizes)))
        if part.swap:
            axes[-2:] = axes[:-3:-1]
        axis = next(a for a in axes if inside.sizes[a] > 1)
        inside = _cut(inside, axis, low - part.box.offsets[lead], high - low)
    chunk = _read_box(files, part.file, part.start, out.dtype, part.chunk_shape, inside)
    out[target] = (chunk.swapaxes(-1, -2) if part.swap else chunk).reshape(sizes)


def _cut(box: Box, axis: int, skip: int, size: int) -> Box:
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[axis] += skip
    sizes[axis] = size
    return Box(tuple(offsets), tuple(sizes))


def _read_box(
    files: Files, path: Store, start: int, word: np.dtype[Any], shape: Shape, box: Box
) -> Words:
    """A box of a chunk as an array; what lies between is read along where that is cheaper."""
    strides = _strides(shape)
    first = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
    span = 1 + sum((n - 1) * s for n, s in zip(box.sizes, strides, strict=True))
    if span <= 2 * box.elements or span * word.itemsize <= _SPAN:
        flat = np.empty(span, word)
        files.read_into(path, start + first * word.itemsize, flat.view("u1").data)
        steps = tuple(s * word.itemsize for s in strides)
        return np.lib.stride_tricks.as_strided(flat, box.sizes, steps, writeable=False)
    out = np.empty(box.sizes, word)
    axis = next(a for a, n in enumerate(box.sizes) if n > 1)
    for i in range(box.sizes[axis]):
        entry = _read_box(files, path, start, word, shape, _cut(box, axis, i, 1))
        out[(slice(None),) * axis + (slice(i, i + 1),)] = entry
    return out


def _strides(shape: Shape) -> Shape:
    found, step = [], 1
    for n in reversed(shape):
        found.append(step)
        step *= n
    return tuple(reversed(found))
