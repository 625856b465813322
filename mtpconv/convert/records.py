"""The steps of a plan as torch_dist records: how each is read, where it goes, what it digests.

Records are placed one after another in plan order before they are written, so the files do
not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    pieces,
    reading,
    reading_of,
    stretch,
)
from mtpconv.store.crc import crc32
from mtpconv.store.crew import Crew, batches
from mtpconv.store.dequant import HfTensors
from mtpconv.store.digest import digest_reading
from mtpconv.store.files import BLOCK
from mtpconv.store.record_writer import ALIGNMENT, tensor_frame
from mtpconv.store.torch_dist_writer import Reservation, TorchDistWriter, write_at
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
    #: HF tensors that lie one after another in the record, with their bytes
    inside: Sequence[tuple[str, int]]
    #: HF tensors that lie in it otherwise and are digested apart
    apart: Sequence[tuple[str, Reading]]

    @property
    def nbytes(self) -> int:
        """Bytes of the record in its file."""
        return tensor_frame(self.spec.dtype, self.box.sizes).length


class _Form(NamedTuple):
    """What all steps with the same op and shapes have in common."""

    spec: TensorSpec
    box: Box
    inner: TensorSpec
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
        self._made = 0

    def nbytes(self, step: Step) -> int:
        """Bytes of a step's Megatron tensor."""
        return self._form(step, ()).spec.nbytes

    def stored(self) -> dict[str, TensorSpec]:
        """All tensors of the plan as Megatron stores them, by sharded key."""
        if self._made < len(self._plan.steps):  # other ranks make the other records
            for step in self._plan.steps:
                address = self._layout.address(step.key, self._plan.geometry)
                self._stored[address.key] = self._form(step, address.lead).spec
        return self._stored

    def records(self, steps: Iterable[Step]) -> Iterator[Record]:
        """The records of these steps, in order."""
        for step in steps:
            record = self._record(step)
            self._stored[record.key] = record.spec
            self._made += 1
            yield record

    def _record(self, step: Step) -> Record:
        address = self._layout.address(step.key, self._plan.geometry)
        form = self._form(step, address.lead)
        box = form.box
        if address.index:
            box = Box((*address.index, *box.offsets[len(address.index) :]), box.sizes)
        if form.runs is None:
            what = reading_of(form.inner, megatron_pieces(self._hf, step))
        else:
            what = Reading(form.inner, self._runs(step, form.runs))
        inside: list[tuple[str, int]] = []
        apart: list[tuple[str, Reading]] = []
        for name in step.hf:
            if step.op.name in _STREAMS:
                inside.append((name, self._hf.tensors[name].nbytes))
            elif name not in self._digested:
                self._digested.add(name)
                apart.append((name, reading(self._hf, name)))
        return Record(step, address.key, form.spec, box, what, inside, apart)

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
    whole = Box((0,) * (len(lead) + len(inner.shape)), (*(1 for _ in lead), *inner.shape))
    bits = DTYPE_BITS[dtype]
    runs = []
    for move in step.op.moves(shapes):
        there = stretch(inner.shape, move.mcore)
        shape = move.mcore.sizes if move.operand == PADDING else shapes[move.operand]
        here = 0 if move.operand == PADDING else stretch(shape, move.hf)
        size = move.mcore.elements * bits
        if move.swap or there is None or here is None or size % 8 or there * bits % 8:
            return _Form(TensorSpec(dtype, (*lead, *inner.shape)), whole, inner, None)
        if size:
            runs.append((there * bits // 8, size // 8, move.operand, here * bits // 8))
    runs.sort()
    return _Form(TensorSpec(dtype, (*lead, *inner.shape)), whole, inner, tuple(runs))


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


Placed = tuple[Record, Reservation]


def write_records(
    records: Iterable[Record],
    writer: TorchDistWriter,
    crew: Crew,
    done: Callable[[Sequence[Placed]], None],
) -> Iterator[tuple[str, str]]:
    """Write records where the writer places them; gives HF names with their digests.

    `done` is called for every batch that is in its file. Raises: WriteError, UnreadableError.
    """
    for batch, digests in crew.map(_write_batch, placed(records, writer)):
        yield from digests
        done(batch)


def placed(records: Iterable[Record], writer: TorchDistWriter) -> Iterator[list[Placed]]:
    """Records with their places; neighbours together, as many as fit into a block."""
    each = ((r, writer.reserve(r.key, r.spec, r.box)) for r in records)
    return batches(each, lambda p: p[1].frame.length + ALIGNMENT)


_Digests = list[tuple[str, str]]


def _write_batch(batch: Sequence[Placed], files: Files) -> tuple[Sequence[Placed], _Digests]:
    found: _Digests = []
    first, last = batch[0][1], batch[-1][1]
    begin = first.start - len(first.frame.prefix)
    end = last.start + last.nbytes + len(last.frame.suffix)
    if end - begin > BLOCK:  # one large record
        for record, room in batch:
            _write_large(record, room, files, found)
    else:
        with files.buffer(end - begin) as window:
            _fill_window(batch, begin, window, files, found)
            write_at(first.fd, first.file, begin, window)
    for record, _ in batch:
        found += [(name, digest_reading(what, files)) for name, what in record.apart]
    return batch, found


def _fill_window(
    batch: Sequence[Placed], begin: int, window: memoryview, files: Files, found: _Digests
) -> None:
    at = 0
    for record, room in batch:
        data = room.start - begin
        after = data + room.nbytes
        body = window[data:after]
        record.what.fill(files, body)
        prefix, suffix = room.frame.sealed(crc32(body))
        # Everything between the data, the gap that aligns it included.
        window[at:data] = bytes(data - at - len(prefix)) + prefix
        at = after + len(suffix)
        window[after:at] = suffix
        for name, nbytes in record.inside:
            found.append((name, blake3(body[:nbytes]).hexdigest()))
            body = body[nbytes:]


def _write_large(record: Record, room: Reservation, files: Files, found: _Digests) -> None:
    """A record larger than a block: its data block by block, then what surrounds them."""
    crc, at = 0, room.start
    operands = [(name, nbytes, blake3()) for name, nbytes in record.inside]
    number, left = 0, operands[0][1] if operands else 0
    for block in record.what.blocks(files):
        crc = crc32(block, crc)
        write_at(room.fd, room.file, at, block)
        at += len(block)
        while len(block) and number < len(operands):
            part = block[:left]
            operands[number][2].update(part)
            block, left = block[len(part) :], left - len(part)
            if not left:
                number += 1
                left = operands[number][1] if number < len(operands) else 0
    found += [(name, hasher.hexdigest()) for name, _, hasher in operands]
    prefix, suffix = room.frame.sealed(crc)
    write_at(room.fd, room.file, room.start - len(prefix), prefix)
    write_at(room.fd, room.file, room.start + room.nbytes, suffix)
