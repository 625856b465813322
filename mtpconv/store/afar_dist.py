"""A torch_dist checkpoint far away, read in ranges as if it lay here; none of it is kept.

Whoever plans a conversion asks where tens of thousands of tensors lie. A request for each would
take longer than the conversion, so a record is found when the first byte of its tensor is read:
what must be looked at is mostly in the stretches that are fetched for that.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from mtpconv.errors import UnreadableError
from mtpconv.store.afar import AfarCheckpoint, AfarFile, Stretches, require_marks
from mtpconv.store.checkpoint import Chunk
from mtpconv.store.crc import LATE, Sealed, SealedFile
from mtpconv.store.dist_metadata import Place, StoredChunk
from mtpconv.store.files import Files
from mtpconv.store.objects import object_at
from mtpconv.store.records import Located, RecordReader
from mtpconv.store.remote_dist import DistMirror, mirror_dist
from mtpconv.store.source import CARRIED, QUANTISED, HfSource, find_source
from mtpconv.store.torch_dist import TorchDistCheckpoint, open_torch_dist
from mtpconv.store.zips import Pread
from mtpconv.tensors import TensorSpec

_Held = tuple[Place, str, TensorSpec]


class AfarRecords:
    """The records of one remote file; stands where a path would (`mtpconv.store.files.Computed`).

    The bytes of a tensor begin at the place of its record here, wherever inside it they are.
    """

    def __init__(self, file: AfarFile, reader: RecordReader, held: Sequence[_Held]) -> None:
        """`held` are the records with the tensors that they must hold, in the order of the file."""
        self._file = file
        self._reader = reader
        self._held = held
        #: where the bytes begin in the file; -1 until the record is found
        self._begins = array("q", [-1]) * len(held)
        self.sealed = SealedFile()
        for place, name, spec in held:
            nbytes = spec.nbytes
            self.sealed.add(name, place.offset, nbytes, LATE if nbytes else 0)

    def __str__(self) -> str:
        return str(self._file)

    @property
    def name(self) -> str:
        """The file's name."""
        return self._file.name

    def read_into(self, files: Files, start: int, view: memoryview) -> None:
        """Fill `view` from byte `start`.

        Raises: UnreadableError if the record is not what `.metadata` says, or as `AfarFile`;
        UnsupportedError if its tensor is not contiguous or not little-endian.
        """
        at = bisect_right(self.sealed.starts, start) - 1
        begin = self._begins[at]
        if begin < 0:
            begin = self._find(at)
        self._file.read_into(files, begin + start - self.sealed.starts[at], view)

    def _find(self, at: int) -> int:
        place, name, spec = self._held[at]
        found = self._reader.find(self._file.pread, place, name, spec, str(self))
        # The CRC-32 of a larger storage says nothing about a view of it.
        whole = (found.stored_start, found.stored) == (found.start, spec.nbytes)
        self.sealed.crcs[at] = found.crc if whole else 0
        self._begins[at] = found.start  # last: other threads look at it first
        return found.start


class AfarDist(TorchDistCheckpoint):
    """A remote torch_dist checkpoint; `path` and `folder` are in its mirror."""

    def __init__(self, mirrored: TorchDistCheckpoint, files: Mapping[str, AfarFile]) -> None:
        """`mirrored` is what the mirror says; `files` are the `.distcp` files that are there."""
        super().__init__(mirrored.path, mirrored.folder, mirrored.iteration)
        self.common = mirrored.common
        self._metadata = mirrored._metadata
        self._problems = mirrored._problems
        self._files = files
        held: dict[str, list[_Held]] = {}
        for name, spec in self.tensors.items():
            for chunk in self._metadata.chunks[name]:
                one = chunk.place, name, TensorSpec(spec.dtype, chunk.box.sizes)
                held.setdefault(chunk.place.file, []).append(one)
        self._afar = {
            file: AfarRecords(files[file], self._records, sorted(records, key=lambda r: r[0]))
            for file, records in held.items()
            if file in files
        }

    def chunks(self, name: str) -> Sequence[Chunk]:
        """The chunks of a tensor; whoever reads one finds its record.

        Raises: UnreadableError if a file is missing; KeyError if there is no such tensor.
        """
        chunks = self._metadata.chunks[name]
        for chunk in chunks:
            self._file(chunk.place)
        return [Chunk(cast(Path, self._afar[c.place.file]), c.place.offset, c.box) for c in chunks]

    def sealed(self) -> Sealed:
        """Which bytes have a CRC-32; which one becomes known as they are read."""
        return {cast(Path, records): records.sealed for records in self._afar.values()}

    def read_object(self, name: str) -> Any:
        """See `TorchDistCheckpoint.read_object`."""
        place = self._metadata.objects[name]
        file = self._file(place)
        where = f"{file}: the record of {name} at byte {place.offset:,}"
        return object_at(file.pread, place.offset, place.length, where)

    def _locate(
        self,
        name: str,
        spec: TensorSpec,
        chunk: StoredChunk,
        files: dict[str, Pread],  # noqa: ARG002
        closing: ExitStack,  # noqa: ARG002
    ) -> Located:
        file = self._file(chunk.place)
        held = TensorSpec(spec.dtype, chunk.box.sizes)
        return self._records.find(file.pread, chunk.place, name, held, str(file))

    def _file(self, place: Place) -> AfarFile:
        found = self._files.get(place.file)
        if found is None:
            raise UnreadableError(f"{place.file} is named in .metadata and is not there")
        return found


@dataclass(frozen=True, slots=True)
class AfarMegatron:
    """A remote torch_dist checkpoint and its `hf_source`, opened."""

    checkpoint: AfarDist
    source: HfSource | None
    mirror: DistMirror

    @property
    def memory(self) -> int:
        """Units: bytes. What is kept of it at most."""
        return Stretches.memory() * (1 + len(self.mirror.beside))

    def require_unchanged(self) -> None:
        """Refuse a source that changed. Raises: UnreadableError naming the first file."""
        require_marks(self.mirror.remote, self.mirror.marks)
        for tensors in self.mirror.beside.values():
            tensors.require_unchanged()


def open_dist_afar(url: str, place: Path, *, source: bool = True) -> AfarMegatron:
    """Open a remote torch_dist checkpoint; its mirror lies below `place`, which is empty.

    Without `source` its `hf_source` is not looked at.

    Raises: as `mirror_dist`, `open_torch_dist` and `find_source`.
    """
    mirror = mirror_dist(url, place, source=source)
    kept = Stretches()
    files = {
        name: AfarFile(mirror.remote, mirror.url, name, size, kept)
        for name, size in mirror.sizes.items()
    }
    checkpoint = AfarDist(open_torch_dist(mirror.path), files)
    origin = find_source(mirror.path) if source else None
    if origin is not None:  # what it found is the mirror, which has no bytes
        tensors: Mapping[str, AfarCheckpoint] = mirror.beside
        origin = replace(origin, carried=tensors.get(CARRIED), quantised=tensors.get(QUANTISED))
    return AfarMegatron(checkpoint, origin, mirror)
