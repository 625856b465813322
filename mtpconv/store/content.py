"""The bytes of a tensor, streamed in C order, wherever its pieces lie.

A wanted tensor is described by pieces: each says which box of it is stored as which box of
which chunk. Whether it is copied from one place, cut out of a stacked tensor or gathered from
eight tensor-parallel ranks makes no difference to the callers: they get blocks in order.
Pieces whose bytes lie in one run are read with `pread`; others are gathered through `mmap`,
a bounded block of rows at a time.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from mtpconv.errors import UnreadableError
from mtpconv.store.checkpoint import Checkpoint
from mtpconv.tensors import DTYPE_BITS, Box, Shape, TensorSpec

Words = NDArray[Any]

#: Units: bytes. Large enough for full disk speed, small enough to stay in the L2/L3 cache.
BLOCK = 4 << 20

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


class Pieced(Protocol):
    """Anything whose tensors can be streamed: a checkpoint, or one seen under other names."""

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor, by name."""

    def pieces(self, name: str) -> Sequence[Piece]:
        """Where the bytes of a tensor lie."""


class Files:
    """A bounded pool of open files, with their mappings where a gather needed one."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._open: OrderedDict[Path, tuple[int, mmap.mmap | None]] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file."""
        while self._open:
            self._drop(next(iter(self._open)))

    def fd(self, path: Path) -> int:
        """A read-only descriptor, valid until `limit` other files have been asked for."""
        return self._entry(path)[0]

    def read_into(self, path: Path, start: int, view: memoryview) -> None:
        """Fill `view` from byte `start` of the file.

        Raises: UnreadableError if the file ends early or cannot be read.
        """
        fd, done = self.fd(path), 0
        while done < len(view):
            try:
                got = os.preadv(fd, [view[done:]], start + done)
            except OSError as error:
                raise UnreadableError(f"{path}: {error.strerror} at byte {start + done}") from error
            if got == 0:
                raise UnreadableError(
                    f"{path}: ends at byte {start + done}, {len(view) - done} bytes short; "
                    "the file is truncated, fetch it again"
                )
            done += got

    def words(self, path: Path, start: int, dtype: str, shape: Shape) -> Words:
        """A read-only view of a chunk; its pages are read when touched."""
        fd, mapped = self._entry(path)
        if mapped is None:
            mapped = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
            self._open[path] = (fd, mapped)
        if start + prod(shape) * np.dtype(dtype).itemsize > len(mapped):
            raise UnreadableError(f"{path}: ends inside a tensor; fetch the file again")
        return np.ndarray(shape, dtype, mapped, start)

    def _entry(self, path: Path) -> tuple[int, mmap.mmap | None]:
        entry = self._open.get(path)
        if entry is None:
            while len(self._open) >= self._limit:
                self._drop(next(iter(self._open)))
            try:
                entry = (os.open(path, os.O_RDONLY | os.O_CLOEXEC), None)
            except OSError as error:
                raise UnreadableError(f"{path}: {error.strerror}") from error
            self._open[path] = entry
        else:
            self._open.move_to_end(path)
        return entry

    def _drop(self, path: Path) -> None:
        fd, mapped = self._open.pop(path)
        if mapped is not None:
            try:
                mapped.close()
            except BufferError:
                pass  # a view is still alive; the mapping goes with it
        os.close(fd)


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
    """The bytes of a tensor in C order, in blocks of at most about `size` bytes.

    A block is valid until the next one is asked for. An empty tensor has no blocks.

    Raises: UnreadableError if a file ends early; KeyError if there is no such tensor.
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
    bits = DTYPE_BITS[spec.dtype]
    runs = [byte_run(spec, part) for part in parts]
    if all(run is not None for run in runs):
        buffer = memoryview(bytearray(min(size, spec.nbytes)))
        for _, part, length in sorted((r[0], i, r[1]) for i, r in enumerate(runs) if r):
            yield from _stream(parts[part], bits, length, buffer, files)
        return
    yield from _gather(spec, parts, files, size)


def byte_run(spec: TensorSpec, part: Piece) -> tuple[int, int] | None:
    """(offset in the tensor, length) in bytes if the piece is one run on both sides."""
    if part.swap or not _is_run(spec.shape, part.box):
        return None
    if part.file is not None and not _is_run(part.chunk_shape, part.chunk_box):
        return None
    bits = DTYPE_BITS[spec.dtype]
    offset = _linear(spec.shape, part.box.offsets) * bits // 8
    return offset, part.box.elements * bits // 8


def source_offset(part: Piece, bits: int) -> int:
    """Byte offset in the file where the run of a one-run piece begins."""
    return part.start + _linear(part.chunk_shape, part.chunk_box.offsets) * bits // 8


def _stream(
    part: Piece, bits: int, length: int, buffer: memoryview, files: Files
) -> Iterator[memoryview]:
    start = source_offset(part, bits)
    for done in range(0, length, len(buffer)):
        view = buffer[: min(len(buffer), length - done)]
        if part.file is None:
            view[:] = bytes(len(view))
        else:
            files.read_into(part.file, start + done, view)
        yield view


def _gather(
    spec: TensorSpec, parts: Sequence[Piece], files: Files, size: int
) -> Iterator[memoryview]:
    bits = DTYPE_BITS[spec.dtype]
    if bits not in _WORD:
        raise UnreadableError(f"a {spec.dtype} tensor of shape {spec.shape} cannot be cut")
    word = _WORD[bits]
    # Leading axes of size 1 would make every block the whole tensor.
    lead = next(i for i, n in enumerate(spec.shape) if n > 1)
    shape = spec.shape[lead:]
    views: list[tuple[Box, Words | None]] = []
    for part in parts:
        box = Box(part.box.offsets[lead:], part.box.sizes[lead:])
        views.append((box, _view(part, word, box.sizes, files)))
    row = prod(shape[1:]) * bits // 8
    rows = max(1, size // row)
    buffer = np.empty((min(rows, shape[0]), *shape[1:]), word)
    for first in range(0, shape[0], rows):
        last = min(first + rows, shape[0])
        out = buffer[: last - first]
        for box, view in views:
            low = max(first, box.offsets[0])
            high = min(last, box.offsets[0] + box.sizes[0])
            if low >= high:
                continue
            target = (
                slice(low - first, high - first),
                *(
                    slice(o, o + n)
                    for o, n in zip(box.offsets[1:], box.sizes[1:], strict=True)
                ),
            )
            out[target] = 0 if view is None else view[low - box.offsets[0] : high - box.offsets[0]]
        yield out.reshape(-1).view("u1").data


def _view(part: Piece, word: str, sizes: Shape, files: Files) -> Words | None:
    if part.file is None:
        return None
    whole = files.words(part.file, part.start, word, part.chunk_shape)
    cut = whole[
        tuple(
            slice(o, o + n)
            for o, n in zip(part.chunk_box.offsets, part.chunk_box.sizes, strict=True)
        )
    ]
    if part.swap:
        cut = cut.swapaxes(-1, -2)
    return cut.reshape(sizes)


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
