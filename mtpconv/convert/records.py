"""The steps of a plan as torch_dist records: how each is read, where it goes, what it digests.

Records are placed one after another in plan order before they are written, so the files do
not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from blake3 import blake3

from mtpconv.mapping.layouts import Layout
from mtpconv.mapping.ops import PADDING
from mtpconv.mapping.plan import Plan, Step
from mtpconv.store.content import (
    Files,
    Piece,
    Reading,
    Run,
    fill_each,
    pieces,
    reading,
    reading_of,
    stretch,
)
from mtpconv.store.crc import crc32
from mtpconv.store.crew import batches
from mtpconv.store.dequant import HfTensors
from mtpconv.store.digest import digest_parts, digest_reading
from mtpconv.store.files import BLOCK
from mtpconv.store.new_file import NewFile
from mtpconv.store.torch_dist_writer import Room
from mtpconv.tensors import DTYPE_BITS, Box, Shape, TensorSpec

#: Ops whose Megatron tensor is its operands one after another (and padding).
_STREAMS = frozenset({"copy", "concat", "pad_rows", "squeeze"})


class Record(NamedTuple):
    """One Megatron tensor, or one entry of a stacked one."""

    step: Step
    key: str
    spec: TensorSpec
    box: Box
    what: Reading
    #: bytes of each HF tensor if they lie one after another in the record, else nothing
    sizes: tuple[int, ...]


class _Form(NamedTuple):
    """What all steps with the same op and shapes have in common."""

    spec: TensorSpec
    box: Box
    inner: TensorSpec
    sizes: tuple[int, ...]
    #: (offset, bytes, operand, offset in the operand); None if there is more to it than runs
    runs: tuple[tuple[int, int, int, int], ...] | None


class Recorder:
    """Makes records of steps; experts and layers of one kind share all but names and places."""

    def __init__(self, hf: HfTensors, plan: Plan, layout: Layout) -> None:
        self._hf = hf
        self._plan = plan
        self._layout = layout
        self._forms: dict[tuple[int, int, str, Shape], _Form] = {}
        self._digested: set[str] = set()
        self._stored: dict[str, TensorSpec] = {}

    def nbytes(self, step: Step) -> int:
        """Bytes of a step's Megatron tensor."""
        return self._form(step, ()).spec.nbytes

    def stored(self, others: Iterable[Step]) -> dict[str, TensorSpec]:
        """The tensors of all records made so far, and of other steps, by sharded key in order.

        Sorted: what was made when depends on the number of threads and on what was taken over.
        """
        for step in others:
            address = self._layout.address(step.key, self._plan.geometry)
            self._stored[address.key] = self._form(step, address.lead).spec
        return dict(sorted(self._stored.items()))

    def records(self, steps: Iterable[Step]) -> Iterator[Record]:
        """The records of these steps, in order."""
        for step in steps:
            address = self._layout.address(step.key, self._plan.geometry)
            form = self._form(step, address.lead)
            self._stored[address.key] = form.spec
            box = form.box
            if address.index:
                box = Box((*address.index, *box.offsets[len(address.index) :]), box.sizes)
            if form.runs is None:
                what = reading_of(form.inner, megatron_pieces(self._hf, step))
            else:
                what = Reading(form.inner, self._runs(step, form.runs))
            yield Record(step, address.key, form.spec, box, what, form.sizes)

    def apart(self, record: Record) -> list[tuple[str, Reading]]:
        """HF tensors that must be digested apart: no record has them in one piece.

        Each is named once, however many records have parts of it.
        """
        if record.sizes:
            return []
        fresh = [name for name in record.step.hf if name not in self._digested]
        self._digested.update(fresh)
        return [(name, reading(self._hf, name)) for name in fresh]

    def _form(self, step: Step, lead: Shape) -> _Form:
        dtype = self._hf.tensors[step.hf[0]].dtype
        # The plan holds ops and specs as long as this lives, so their ids name them.
        at = (id(step.op), id(step.specs), dtype, lead)
        form = self._forms.get(at)
        if form is None:
            form = self._forms[at] = _form(step, dtype, lead)
        return form

    def _runs(self, step: Step, runs: tuple[tuple[int, int, int, int], ...]) -> list[Run]:
        found: list[Run] = []
        for at, nbytes, operand, skip in runs:
            if operand == PADDING:
                found.append(Run(at, nbytes, None, 0))
                continue
            (stored,) = self._hf.runs(step.hf[operand])
            start = stored.start + skip
            last = found[-1] if found else None
            if last and last.file is stored.file and last.start + last.nbytes == start:
                found[-1] = Run(last.at, last.nbytes + nbytes, last.file, last.start)
            else:
                found.append(Run(at, nbytes, stored.file, start))
        return found


def _form(step: Step, dtype: str, lead: Shape) -> _Form:
    shapes = [spec.shape for spec in step.specs]
    inner = TensorSpec(dtype, step.op.shape(shapes))
    spec = TensorSpec(dtype, (*lead, *inner.shape))
    whole = Box((0,) * len(spec.shape), (*(1 for _ in lead), *inner.shape))
    streams = step.op.name in _STREAMS
    sizes = tuple(TensorSpec(dtype, s).nbytes for s in shapes) if streams else ()
    bits = DTYPE_BITS[dtype]
    runs = []
    for move in step.op.moves(shapes):
        there = stretch(inner.shape, move.mcore)
        here = 0 if move.operand == PADDING else stretch(shapes[move.operand], move.hf)
        size = move.mcore.elements * bits
        if move.swap or there is None or here is None or size % 8 or there * bits % 8:
            return _Form(spec, whole, inner, sizes, None)
        if size:
            runs.append((there * bits // 8, size // 8, move.operand, here * bits // 8))
    return _Form(spec, whole, inner, sizes, tuple(sorted(runs)))


def megatron_pieces(hf: HfTensors, step: Step) -> list[Piece]:
    """Where the bytes of a step's Megatron tensor lie in the HF folder."""
    found = []
    for move in step.op.moves([hf.tensors[n].shape for n in step.hf]):
        if move.operand == PADDING:
            found.append(Piece(move.mcore, None, 0, move.mcore.sizes, Box.whole(move.mcore.sizes)))
            continue
        (stored,) = pieces(hf, step.hf[move.operand])
        found.append(
            Piece(move.mcore, stored.file, stored.start, stored.chunk_shape, move.hf, move.swap)
        )
    return found


class Placed(NamedTuple):
    """A record, its room in a file, and HF tensors that are digested along with it."""

    record: Record
    room: Room
    apart: Sequence[tuple[str, Reading]] = ()


def together(each: Iterable[Placed]) -> Iterator[list[Placed]]:
    """Neighbours in a file, as many as fit into a block."""
    return batches(each, lambda p: p.room.end - p.room.begin)


_Digests = list[tuple[str, str]]


def write_batch(file: NewFile, batch: Sequence[Placed], files: Files) -> list[tuple[str, str]]:
    """Write neighbours of one file; gives HF names with their digests.

    Raises: WriteError, UnreadableError.
    """
    found: _Digests = []
    begin, end = batch[0].room.begin, batch[-1].room.end
    if end - begin > BLOCK:  # one large record
        for record, room, _ in batch:
            _write_large(file, record, room, files, found)
    else:
        with files.buffer(end - begin) as window:
            _fill_window(batch, begin, window, files, found)
            file.write(begin, window)
    for placed in batch:
        found += [(name, digest_reading(what, files)) for name, what in placed.apart]
    return found


def _fill_window(
    batch: Sequence[Placed], begin: int, window: memoryview, files: Files, found: _Digests
) -> None:
    bodies = [window[room.start - begin : room.start + room.nbytes - begin] for _, room, _ in batch]
    fill_each([(p.record.what, body) for p, body in zip(batch, bodies, strict=True)], files)
    for (record, room, _), body in zip(batch, bodies, strict=True):
        data, after, end = room.start - begin, room.start + room.nbytes - begin, room.end - begin
        window[room.begin - begin : data], window[after:end] = room.sealed(crc32(body))
        found += digest_parts(zip(record.step.hf, record.sizes, strict=False), body)


def _write_large(file: NewFile, record: Record, room: Room, files: Files, found: _Digests) -> None:
    """A record larger than a block: its data block by block, then what surrounds them."""
    crc, at = 0, room.start
    # No sizes: nothing to digest here.
    operands = [(n, size, blake3()) for n, size in zip(record.step.hf, record.sizes, strict=False)]
    number, left = 0, operands[0][1] if operands else 0
    for block in record.what.blocks(files):
        crc = crc32(block, crc)
        file.write(at, block)
        at += len(block)
        while len(block) and number < len(operands):
            part = block[:left]
            operands[number][2].update(part)
            block, left = block[len(part) :], left - len(part)
            if not left:
                number += 1
                left = operands[number][1] if number < len(operands) else 0
    found += [(name, hasher.hexdigest()) for name, _, hasher in operands]
    room.seal(file, crc)
