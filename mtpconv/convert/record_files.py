"""One rank's `.distcp` files: written record by record, or taken over from an earlier run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from mtpconv import __version__
from mtpconv.convert import identity
from mtpconv.convert.growing import write_files
from mtpconv.convert.journal import Done
from mtpconv.convert.output import Output
from mtpconv.convert.records import Placed, Recorder, together, write_batch
from mtpconv.errors import UnreadableError
from mtpconv.mapping.layouts import Layout
from mtpconv.mapping.plan import Plan, Step
from mtpconv.progress import Progress
from mtpconv.ranks import share
from mtpconv.store.crc_check import crc_of
from mtpconv.store.crew import Crew
from mtpconv.store.dequant import HfTensors
from mtpconv.store.dist_metadata_writer import write_metadata
from mtpconv.store.extra_state import extra_state_keys
from mtpconv.store.files import Files
from mtpconv.store.new_file import NewFile
from mtpconv.store.torch_dist_writer import Room, TorchDistWriter, Written

#: Units: bytes. A new file is begun when the current one has this many.
FILE_LIMIT = 2 << 30


class Share(NamedTuple):
    """What one rank wrote, and the digests of the HF tensors that went in."""

    written: list[Written]
    digests: dict[str, str]


class RecordFiles:
    """Writes the records of a plan; `source` stands for the state of the source."""

    def __init__(self, hf: HfTensors, plan: Plan, layout: Layout, source: str) -> None:
        self._plan = plan
        self._recorder = Recorder(hf, plan, layout)
        self._source = f"{source} {layout.name}"

    def write(
        self, folder: Path, out: Output, crew: Crew, progress: Progress, *, keep: bool
    ) -> dict[str, str]:
        """Write this rank's records, and as the first one `.metadata` for those of all.

        Gives the digests of the HF tensors that went in, whoever wrote them. The records will be
        read soon if `keep`.

        Raises: WriteError, UnreadableError.
        """
        mine = self._write_share(folder, out, crew, progress, keep)
        shares: list[Any] = out.ranks.gather("written", [mine.written, mine.digests])
        if out.ranks.is_first:
            write_metadata(folder, (w for written, _ in shares for w in map(_written, written)))
        return {name: digest for _, digests in shares for name, digest in digests.items()}

    def _write_share(
        self, folder: Path, out: Output, crew: Crew, progress: Progress, keep: bool
    ) -> Share:
        steps = share(self._plan.steps, self._recorder.nbytes, out.ranks)
        progress.begin("convert", sum(map(self._recorder.nbytes, steps)))
        files = [
            _File(folder, out.ranks.rank, number, group, self._recorder, self._source)
            for number, group in enumerate(self._groups(steps))
        ]

        def wrote(batch: Sequence[Placed]) -> int:
            nbytes = sum(placed.room.nbytes for placed in batch)
            progress.advance(nbytes, str(batch[-1].record.step.region))
            return nbytes

        write_files(
            [f for f in files if not _take_over(f, folder, out, crew, progress)],
            _File.batches,
            lambda file, batch, own: write_batch(file.out, batch, own),
            crew,
            wrote,
            lambda file: out.journal.add(file.name, Done(file.holds, file.digests)),
            keep=keep,
        )
        mine = Share([], {})
        for file in files:
            mine.written.extend(file.written)
            mine.digests.update(file.digests)
        if out.ranks.is_first:
            others = self._plan.steps if out.ranks.size > 1 else ()
            with TorchDistWriter(folder, 0, len(files)) as writer:
                writer.write_objects(extra_state_keys(self._recorder.stored(others)), [None])
                mine.written.extend(writer.close())
        return mine

    def _groups(self, steps: Iterable[Step]) -> Iterator[list[Step]]:
        """Steps of one file, as many as the limit allows; the last one may reach beyond."""
        group: list[Step] = []
        size = 0
        for step in steps:
            group.append(step)
            size += self._recorder.nbytes(step)
            if size >= FILE_LIMIT:
                yield group
                group, size = [], 0
        if group:
            yield group


def _take_over(file: _File, folder: Path, out: Output, crew: Crew, progress: Progress) -> bool:
    """Use what an earlier run finished, if it did and every byte is right."""
    found = out.finished(file.name, file.holds)
    if found is None or not file.check(found[0], crew):
        return False
    path, done = found
    file.digests.update(done.digests)
    out.take_over(path, folder, done)
    progress.advance(file.nbytes, "taken over")
    return True


def _written(said: Sequence[Any]) -> Written:
    """What another rank said came as JSON, which has no tuples."""
    if isinstance(said, Written):
        return said
    return Written._make(tuple(v) if isinstance(v, list) else v for v in said)


class _File:
    """One `.distcp` file and the steps whose tensors it has to hold."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        number: int,
        steps: Sequence[Step],
        recorder: Recorder,
        source: str,
    ) -> None:
        self.name = f"__{rank}_{number}.distcp"
        self.left = len(steps)
        self.digests: dict[str, str] = {}
        self.written: Sequence[Written] = ()
        self._rank = rank
        self._number = number
        self._steps = steps
        self._recorder = recorder
        self._source = source
        self._writer = TorchDistWriter(folder, rank, number)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(map(self._recorder.nbytes, self._steps))

    @cached_property
    def holds(self) -> str:
        """One digest over everything that decides the bytes of the file, hex."""
        return identity.of_steps(self._steps, __version__, self._source)

    @property
    def out(self) -> NewFile:
        """What the bytes go into. Raises: WriteError."""
        return self._writer.file

    def batches(self) -> Iterator[Sequence[Placed]]:
        """What goes into the file. Raises: UnsupportedError."""
        return together(
            Placed(r, self._writer.reserve(r.key, r.spec, r.box), self._recorder.apart(r))
            for r in self._recorder.records(self._steps)
        )

    def finish(self) -> _File:
        """Bring it to disk and close it. Raises: WriteError."""
        self.written = self._writer.close()
        return self

    def close(self) -> None:
        """Close it if it is open."""
        self._writer.release()

    def check(self, path: Path, crew: Crew) -> bool:
        """Whether every record of a finished file has its CRC; then `written` has them."""
        wanted = TorchDistWriter(path.parent, self._rank, self._number)
        records = self._recorder.records(self._steps)
        each = (Placed(r, wanted.reserve(r.key, r.spec, r.box)) for r in records)

        def is_whole(batch: Sequence[Placed], files: Files) -> bool:
            return all(_is_whole(path, placed.room, files) for placed in batch)

        try:
            if not all(crew.map(is_whole, together(each))):
                return False
        except UnreadableError:  # too short
            return False
        last = wanted.written[-1]
        if path.stat().st_size != last.offset + last.length:
            return False
        self.written = wanted.written
        return True


def _is_whole(path: Path, room: Room, files: Files) -> bool:
    prefix, suffix = room.sealed(crc_of(path, room.start, room.nbytes, files))
    for at, wanted in ((room.begin, prefix), (room.start + room.nbytes, suffix)):
        with files.buffer(len(wanted)) as found:
            files.read_into(path, at, found)
            if found != wanted:
                return False
    return True
