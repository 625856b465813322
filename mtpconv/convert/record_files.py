"""One rank's `.distcp` files: written record by record, or taken over from an earlier run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from mtpconv import __version__
from mtpconv.convert.flush import Flusher
from mtpconv.convert.journal import Done
from mtpconv.convert.output import Output
from mtpconv.convert.ranks import share
from mtpconv.convert.records import Placed, Record, Recorder, placed, write_records
from mtpconv.errors import UnreadableError
from mtpconv.mapping.layouts import Layout
from mtpconv.mapping.plan import Plan
from mtpconv.progress import Progress
from mtpconv.store.content import Run, run_blocks
from mtpconv.store.crc import crc32
from mtpconv.store.crew import Crew
from mtpconv.store.dequant import HfTensors
from mtpconv.store.extra_state import extra_state_keys
from mtpconv.store.files import Files
from mtpconv.store.torch_dist_writer import FILE_LIMIT, TorchDistWriter, Written

#: No writer begins a second file by itself: a file is what is taken over or not.
_ONE_FILE = 1 << 62


class Share(NamedTuple):
    """What one rank wrote, and the digests of the HF tensors that went in."""

    written: list[Written]
    digests: dict[str, str]


class RecordFiles:
    """Writes the records of a plan; `source` stands for the state of the source."""

    def __init__(
        self, hf: HfTensors, plan: Plan, layout: Layout, source: str, limit: int = FILE_LIMIT
    ) -> None:
        self._plan = plan
        self._recorder = Recorder(hf, plan, layout)
        self._source = source
        self._limit = limit

    def write(self, folder: Path, out: Output, crew: Crew, progress: Progress) -> Share:
        """This rank's share of the records, and the `_extra_state` objects if it is the first.

        Raises: WriteError, UnreadableError.
        """
        steps = share(self._plan.steps, self._recorder.nbytes, out.ranks)
        progress.begin("convert", sum(map(self._recorder.nbytes, steps)))
        mine = Share([], {})
        number = 0
        for records in self._groups(self._recorder.records(steps)):
            file = _File(folder, out.ranks.rank, number, records)
            holds = file.holds(self._source)
            found = out.finished(file.name, holds)
            written = file.check(found[0], crew) if found else None
            if found and written is not None:
                path, done = found
                out.take_over(path, folder, done)
                progress.advance(sum(r.what.spec.nbytes for r in records), "taken over")
            else:
                written, digests = file.write(crew, progress)
                done = Done(holds, digests)
                out.journal.add(file.name, done)
            mine.written.extend(written)
            mine.digests.update(done.digests)
            number += 1
        if out.ranks.is_first:
            with TorchDistWriter(folder, 0, first=number) as writer:
                writer.write_objects(extra_state_keys(self._recorder.stored()), [None])
                mine.written.extend(writer.close())
        return mine

    def _groups(self, records: Iterable[Record]) -> Iterator[list[Record]]:
        """Records of one file, as many as the limit allows; the last one may reach beyond."""
        group: list[Record] = []
        size = 0
        for record in records:
            group.append(record)
            size += record.nbytes
            if size >= self._limit:
                yield group
                group, size = [], 0
        if group:
            yield group


class _File:
    """One `.distcp` file and what it has to hold."""

    def __init__(self, folder: Path, rank: int, number: int, records: Sequence[Record]) -> None:
        self.name = f"__{rank}_{number}.distcp"
        self._folder = folder
        self._rank = rank
        self._number = number
        self._records = records

    def holds(self, source: str) -> str:
        """One digest over everything that decides the bytes of the file, hex."""
        hasher = blake3(f"{__version__} {source}\n".encode())
        for step, key, spec, box, *_ in self._records:
            hasher.update(f"{key} {spec} {box.offsets} {step.op} {step.hf}\n".encode())
        return hasher.hexdigest()

    def write(self, crew: Crew, progress: Progress) -> tuple[Sequence[Written], Mapping[str, str]]:
        """Write the file and bring it to disk. Raises: WriteError, UnreadableError."""
        with (
            TorchDistWriter(
                self._folder, self._rank, first=self._number, file_limit=_ONE_FILE
            ) as writer,
            Flusher() as flusher,
        ):

            def done(batch: Sequence[Placed]) -> None:
                nbytes = sum(room.nbytes for _, room in batch)
                progress.advance(nbytes, str(batch[-1][0].step.region))
                flusher.wrote(batch[-1][1].fd, nbytes)

            digests = dict(write_records(self._records, writer, crew, done))
            flusher.settle()
            return writer.close(), digests

    def check(self, path: Path, crew: Crew) -> Sequence[Written] | None:
        """The records of a finished file if its every record has its CRC, else None."""
        with TorchDistWriter(
            path.parent, self._rank, first=self._number, file_limit=_ONE_FILE, existing=True
        ) as writer:
            try:
                if all(crew.map(_batch_is_whole, placed(self._records, writer))):
                    return writer.close()
            except UnreadableError:
                pass  # too short
        return None


def _batch_is_whole(batch: Sequence[Placed], files: Files) -> bool:
    for _, room in batch:
        crc = 0
        run = Run(0, room.nbytes, room.file, room.start)
        for block in run_blocks([run], files):
            crc = crc32(block, crc)
        prefix, suffix = room.frame.sealed(crc)
        for at, wanted in ((room.start - len(prefix), prefix), (room.start + room.nbytes, suffix)):
            with files.buffer(len(wanted)) as found:
                files.read_into(room.file, at, found)
                if found != wanted:
                    return False
    return True
