"""The bytes of a tensor, streamed in C order, wherever its pieces lie.

A wanted tensor is described by pieces: each says which box of it is stored as which box of
which chunk. Whether it is copied from one place, cut out of a stacked tensor or gathered from
eight tensor-parallel ranks makes no difference to the callers: they get blocks in order.
Pieces that are one stretch of bytes on both sides become runs, which are only read; others
are gathered, a bounded number of rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from mtpconv.errors import UnreadableError
from mtpconv.store.checkpoint import Checkpoint
from mtpconv.store.files import BLOCK, Files, Store, Wanted
from mtpconv.store.gather import gather
from mtpconv.tensors import DTYPE_BITS, Box, Shape, TensorSpec

__all__ = [
    "BLOCK", "Files", "Piece", "Pieced", "Reading", "Run", "blocks", "blocks_of", "fill_all",
    "fill_each", "pieces", "reading", "reading_of", "runs_of", "stretch",
]  # fmt: skip


class Piece(NamedTuple):
    """`box` of the wanted tensor is `chunk_box` of the chunk at byte `start` of `file`.

    The two boxes have the same sizes once axes of size 1 are left out; with `swap` the last
    two axes are exchanged. `file` None means zeros (padding rows).
    """

    box: Box
    file: Store | None
    start: int
    chunk_shape: Shape
    chunk_box: Box
    swap: bool = False


class Run(NamedTuple):
    """`nbytes` bytes from `at` of a tensor are those from `start` of `file`; None: zeros."""

    at: int
    nbytes: int
    file: Store | None
    start: int


class Pieced(Protocol):
    """Anything whose tensors can be streamed: a checkpoint, or one seen under other names."""

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor, by name."""

    def pieces(self, name: str) -> Sequence[Piece]:
        """Where the bytes of a tensor lie."""


class Reading(NamedTuple):
    """How to read one tensor: as runs where it is nothing but runs, else piece by piece."""

    spec: TensorSpec
    runs: Sequence[Run] | None
    parts: Sequence[Piece] = ()

    def blocks(self, files: Files, size: int = BLOCK) -> Iterator[memoryview]:
        """The bytes in C order, in blocks of at most `size` bytes (at least a word).

        A block is valid until the next one is asked for. An empty tensor has no blocks.

        Raises: UnreadableError if a file ends early.
        """
        if self.runs is not None:
            return run_blocks(self.runs, files, size)
        return gather(self.spec, self.parts, files, size)

    def fill(self, files: Files, out: memoryview) -> None:
        """Put the bytes into `out`, which has exactly their number.

        Raises: UnreadableError if a file ends early.
        """
        if self.runs is not None:
            fill_each([(self, out)], files)
            return
        at = 0
        for block in gather(self.spec, self.parts, files, BLOCK):
            out[at : at + len(block)] = block
            at += len(block)


def fill_all(readings: Sequence[Reading], files: Files, out: memoryview) -> None:
    """Put tensors one after another into `out`; neighbours on disk are read at once.

    Raises: UnreadableError if a file ends early.
    """
    ends = accumulate((what.spec.nbytes for what in readings), initial=0)
    fill_each(
        [(what, out[a:b]) for what, (a, b) in zip(readings, pairwise(ends), strict=True)], files
    )


def fill_each(targets: Iterable[tuple[Reading, memoryview]], files: Files) -> None:
    """Put tensors where they shall be, each a view of exactly its bytes; else as `fill_all`."""
    wanted: list[Wanted] = []
    for what, out in targets:
        if what.runs is None:
            what.fill(files, out)
            continue
        for at, nbytes, file, start in what.runs:
            part = out[at : at + nbytes]
            if file is None:
                read_run(files, None, 0, part)
            else:
                wanted.append(Wanted(file, start, part))
    files.read_all(wanted)


def reading(source: Checkpoint | Pieced, name: str) -> Reading:
    """How to read a tensor of a checkpoint.

    Raises: UnreadableError if its pieces do not tile it; KeyError if there is no such tensor.
    """
    spec = source.tensors[name]
    short = getattr(source, "runs", None)  # a checkpoint may know its runs without pieces
    runs = short(name) if short is not None else None
    return Reading(spec, runs) if runs is not None else reading_of(spec, pieces(source, name))


def reading_of(spec: TensorSpec, parts: Sequence[Piece]) -> Reading:
    """How to read a tensor, given its pieces. Raises: as `reading`."""
    return Reading(spec, runs_of(spec, parts), parts)


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
    """The bytes of a tensor; see `Reading.blocks` and `reading`."""
    if files is not None:
        yield from reading(source, name).blocks(files, size)
        return
    with Files() as own:
        yield from reading(source, name).blocks(own, size)


def blocks_of(
    spec: TensorSpec, parts: Sequence[Piece], files: Files, size: int = BLOCK
) -> Iterator[memoryview]:
    """The bytes of a tensor, given its pieces; see `Reading.blocks` and `reading_of`."""
    return reading_of(spec, parts).blocks(files, size)


def run_blocks(runs: Sequence[Run], files: Files, size: int = BLOCK) -> Iterator[memoryview]:
    """The bytes of runs, one after another."""
    if not runs:
        return
    with files.buffer(min(size, sum(run.nbytes for run in runs))) as buffer:
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


def read_run(files: Files, file: Store | None, start: int, view: memoryview) -> None:
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
        there = stretch(spec.shape, part.box)
        here = stretch(part.chunk_shape, part.chunk_box)
        if part.swap or there is None or here is None:
            if sum(p.box.elements for p in parts) != spec.elements:
                raise _gap(spec)
            return None
        at, size, start = there * bits, part.box.elements * bits, here * bits
        if bits < 8 and (at % 8 or size % 8 or start % 8):
            raise UnreadableError(f"a {spec.dtype} tensor cannot be cut inside a byte")
        found.append(Run(at // 8, size // 8, part.file, part.start + start // 8))
    if len(found) > 1:
        found.sort(key=lambda run: run.at)
    end = 0
    for run in found:
        if run.at != end:
            raise _gap(spec)
        end += run.nbytes
    if end != spec.nbytes:
        raise _gap(spec)
    return found


def stretch(shape: Shape, box: Box) -> int | None:
    """Where a box begins, in elements, if its elements follow one another; else None."""
    if box.sizes == shape:
        return 0
    at, partial = 0, False
    for n, offset, size in zip(shape, box.offsets, box.sizes, strict=True):
        if partial and size != n:
            return None
        partial = partial or size > 1
        at = at * n + offset
    return at


def _gap(spec: TensorSpec) -> UnreadableError:
    return UnreadableError(
        f"the pieces of a {spec.dtype} tensor of shape {list(spec.shape)} do not tile it"
    )
