"""The bytes of a tensor, streamed in C order, wherever its pieces lie.

A wanted tensor is described by pieces: each says which box of it is stored as which box of
which chunk. Whether it is copied from one place, cut out of a stacked tensor or gathered from
eight tensor-parallel ranks makes no difference to the callers: they get blocks in order.
Pieces that are one stretch of bytes on both sides become runs, which are only read; others
are gathered, a bounded number of rows at a time. Nothing is mapped: a file that shrinks while
it is read must be an error, not a SIGBUS.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from mtpconv.errors import UnreadableError
from mtpconv.store.checkpoint import Checkpoint
from mtpconv.tensors import DTYPE_BITS, Box, Shape, TensorSpec

Words = NDArray[Any]

#: Units: bytes. Large enough for full disk speed, small enough to stay in the L2/L3 cache.
BLOCK = 4 << 20
#: Units: bytes. What a transposing gather may hold: most matrices fit and are read once.
_PANEL = 32 << 20
#: Units: bytes. A box with gaps is read in one go if it spans no more than this.
_SPAN = 64 << 10

_WORD: Mapping[int, str] = {8: "<u1", 16: "<u2", 32: "<u4", 64: "<u8"}


@dataclass(frozen=True, slots=True)
class Piece:
    """`box` of the wanted tensor is `chunk_box` of the chunk at byte `start` of `file`.

    The two boxes have the same sizes once axes of size 1 are left out; with `swap` the last
    two axes are exchanged. `file` None means zeros (padding rows).
    """

    box: Box
    file: Path | None
    start: int
    chunk_shape: Shape
    chunk_box: Box
    swap: bool = False


class Run(NamedTuple):
    """`nbytes` bytes from `at` of a tensor are those from `start` of `file`; None: zeros."""

    at: int
    nbytes: int
    file: Path | None
    start: int


class Pieced(Protocol):
    """Anything whose tensors can be streamed: a checkpoint, or one seen under other names."""

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor, by name."""

    def pieces(self, name: str) -> Sequence[Piece]:
        """Where the bytes of a tensor lie."""


class Files:
    """A bounded pool of open files and of buffers; for one thread."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._buffers: list[bytearray] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file."""
        while self._open:
            os.close(self._open.popitem()[1])
        self._buffers.clear()

    def fd(self, path: Path) -> int:
        """A read-only descriptor, valid until `limit` other files have been asked for."""
        found = self._open.get(path)
        if found is not None:
            self._open.move_to_end(path)
            return found
        while len(self._open) >= self._limit:
            os.close(self._open.popitem(last=False)[1])
        try:
            found = self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UnreadableError(f"{path}: {error.strerror}") from error
        return found

    def read_into(self, path: Path, start: int, view: memoryview) -> None:
        """Fill `view` from byte `start` of the file.

        Raises: UnreadableError if the file ends early or cannot be read.
        """
        fd, size = self.fd(path), len(view)
        try:
            done = os.preadv(fd, (view,), start)
            while done < size:  # a signal, more than 2 GiB at once, or the end of the file
                got = os.preadv(fd, (view[done:],), start + done)
                if got == 0:
                    raise UnreadableError(
                        f"{path}: ends at byte {start + done}, {size - done} bytes short; "
                        "the file is truncated, fetch it again"
                    )
                done += got
        except OSError as error:
            raise UnreadableError(f"{path}: {error.strerror} at byte {start}") from error

    @contextmanager
    def buffer(self, size: int) -> Iterator[memoryview]:
        """`size` bytes to work in, of any content, used again by whoever comes next."""
        buffer = self._buffers.pop() if self._buffers else bytearray()
        if len(buffer) < size:
            buffer = bytearray(size)
        try:
            yield memoryview(buffer)[:size]
        finally:
            self._buffers.append(buffer)


def pieces(source: Checkpoint | Pieced, name: str) -> Sequence[Piece]:
    """Where the bytes of a tensor lie, one piece per chunk for a plain checkpoint."""
    own = getattr(source, "pieces", None)
    if own is not None:
        found: Sequence[Piece] = own(name)
        return found
    chunks = source.chunks(name)  # type: ignore[union-attr]
    return [Piece(c.box, c.file, c.start, c.box.sizes, Box.whole(c.box.sizes)) for c in chunks]


def blocks(
    source: Checkpoint | Pieced, name: str, files: Files | None = None, size: int = BLOCK
) -> Iterator[memoryview]:
    """The bytes of a tensor in C order, in blocks of at most `size` bytes (at least a word).

    A block is valid until the next one is asked for. An empty tensor has no blocks.

    Raises: UnreadableError if a file ends early or the pieces leave a gap; KeyError if there
    is no such tensor.
    """
    spec = source.tensors[name]
    if files is not None:
        yield from blocks_of(spec, pieces(source, name), files, size)
        return
    with Files() as own:
        yield from blocks_of(spec, pieces(source, name), own, size)


def blocks_of(
    spec: TensorSpec, parts: Sequence[Piece], files: Files, size: int = BLOCK
) -> Iterator[memoryview]:
    """The bytes of a tensor with this spec, given its pieces."""
    if spec.nbytes == 0:
        return
    runs = runs_of(spec, parts)
    if runs is None:
        yield from _gather(spec, parts, files, size)
        return
    with files.buffer(min(size, spec.nbytes)) as buffer:
        room, filled = len(buffer), 0
        for run in runs:
            done = 0
            while done < run.nbytes:
                take = min(room - filled, run.nbytes - done)
                read_run(files, run.file, run.start + done, buffer[filled : filled + take])
                filled, done = filled + take, done + take
                if filled == room:
                    yield buffer
                    filled = 0
        if filled:
            yield buffer[:filled]


def fill(spec: TensorSpec, parts: Sequence[Piece], files: Files, out: memoryview) -> None:
    """Put the bytes of a tensor into `out`, which has exactly their number.

    Raises: as `blocks`.
    """
    runs = runs_of(spec, parts)
    if runs is not None:
        for at, nbytes, file, start in runs:
            read_run(files, file, start, out[at : at + nbytes])
        return
    at = 0
    for block in blocks_of(spec, parts, files):
        out[at : at + len(block)] = block
        at += len(block)


def read_run(files: Files, file: Path | None, start: int, view: memoryview) -> None:
    """Fill `view` with the bytes of a run."""
    if file is not None:
        files.read_into(file, start, view)
    else:
        view[:] = bytes(len(view))


def runs_of(spec: TensorSpec, parts: Sequence[Piece]) -> list[Run] | None:
    """The tensor as stretches of bytes in order; None if a piece is no stretch on both sides.

    Raises: UnreadableError if the pieces leave a gap or overlap.
    """
    bits = DTYPE_BITS[spec.dtype]
    found = []
    for part in parts:
        if not part.box.elements:
            continue
        if part.swap or not _is_run(spec.shape, part.box):
            return None
        if part.file is not None and not _is_run(part.chunk_shape, part.chunk_box):
            return None
        at = _linear(spec.shape, part.box.offsets) * bits
        size = part.box.elements * bits
        start = _linear(part.chunk_shape, part.chunk_box.offsets) * bits
        if bits < 8 and (at % 8 or size % 8 or start % 8):
            raise UnreadableError(f"a {spec.dtype} tensor cannot be cut inside a byte")
        found.append(Run(at // 8, size // 8, part.file, part.start + start // 8))
    found.sort(key=lambda run: run.at)
    end = 0
    for run in found:
        if run.at != end:
            raise _gap(spec)
        end += run.nbytes
    if end != spec.nbytes:
        raise _gap(spec)
    return found


def _gap(spec: TensorSpec) -> UnreadableError:
    return UnreadableError(
        f"the pieces of a {spec.dtype} tensor of shape {list(spec.shape)} do not tile it"
    )


def _gather(
    spec: TensorSpec, parts: Sequence[Piece], files: Files, size: int
) -> Iterator[memoryview]:
    bits = DTYPE_BITS[spec.dtype]
    if bits not in _WORD:
        raise UnreadableError(f"a {spec.dtype} tensor of shape {spec.shape} cannot be cut")
    if sum(part.box.elements for part in parts) != spec.elements:
        raise _gap(spec)
    word = _WORD[bits]
    # Leading axes of size 1 would make every block the whole tensor.
    lead = next(i for i, n in enumerate(spec.shape) if n > 1)
    shape = spec.shape[lead:]
    row = prod(shape[1:]) * bits // 8
    # Each block of a transposed piece touches all of its rows: few and large ones, then.
    panel = max(size, _PANEL) if any(part.swap for part in parts) else size
    rows = max(1, min(shape[0], panel // row))
    out = np.empty((rows, *shape[1:]), word)
    for first in range(0, shape[0], rows):
        last = min(first + rows, shape[0])
        for part in parts:
            _gather_rows(part, lead, (first, last), out, files)
        flat = out[: last - first].reshape(-1).view("u1").data
        for at in range(0, len(flat), size):
            yield flat[at : at + size]


def _gather_rows(part: Piece, lead: int, rows: tuple[int, int], out: Words, files: Files) -> None:
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
    files: Files, path: Path, start: int, word: np.dtype[Any], shape: Shape, box: Box
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


def _is_run(shape: Shape, box: Box) -> bool:
    partial = False
    for n, size in zip(shape, box.sizes, strict=True):
        if partial and size != n:
            return False
        partial = partial or size > 1
    return True


def _linear(shape: Shape, offsets: Shape) -> int:
    at = 0
    for n, o in zip(shape, offsets, strict=True):
        at = at * n + o
    return at
