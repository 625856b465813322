"""A torch_dist checkpoint far away, read in ranges as if it lay here; none of it is kept.

Whoever plans a conversion asks where tens of thousands of tensors lie. A request for each would
take longer than the conversion, so a record is found when the first byte of its tensor is read:
what must be looked at is mostly in the stretches that are fetched for that.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from mtpconv.errors import UnreadableError
from mtpconv.store.afar import AfarCheckpoint, AfarFile, Stretches, open_afar, require_marks
from mtpconv.store.checkpoint import Chunk, require_sound
from mtpconv.store.crc import LATE, Sealed, SealedFile
from mtpconv.store.files import Files
from mtpconv.store.objects import object_at
from mtpconv.store.records import RecordReader
from mtpconv.store.remote import Remote, open_remote
from mtpconv.store.remote_dist import (
    DistMirror,
    holds_dist,
    mirror_dist,
    mirror_source,
    stand_in,
)
from mtpconv.store.source import (
    CARRIED,
    FOLDER,
    HEADERS,
    QUANTISED,
    HfSource,
    find_source,
    read_source,
    source_of_hf,
)
from mtpconv.store.torch_dist import Held, TorchDistCheckpoint, open_torch_dist
from mtpconv.store.zips import Pread


class AfarRecords:
    """The records of one remote file; stands where a path would (`mtpconv.store.files.Computed`).

    The bytes of a tensor begin at the place of its record here, wherever inside it they are.
    """

    def __init__(self, file: AfarFile, reader: RecordReader, held: Sequence[Held]) -> None:
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
        self._afar = {
            file: AfarRecords(files[file], self._records, sorted(records, key=lambda r: r[0]))
            for file, records in self._held().items()
            if file in files
        }

    def chunks(self, name: str) -> Sequence[Chunk]:
        """The chunks of a tensor; whoever reads one finds its record.

        Raises: UnreadableError if a file is missing; KeyError if there is no such tensor.
        """
        chunks = self._metadata.chunks[name]
        for chunk in chunks:
            self._file(chunk.place.file)
        return [Chunk(cast(Path, self._afar[c.place.file]), c.place.offset, c.box) for c in chunks]

    def sealed(self) -> Sealed:
        """Which bytes have a CRC-32; which one becomes known as they are read."""
        return {cast(Path, records): records.sealed for records in self._afar.values()}

    def read_object(self, name: str) -> Any:
        """See `TorchDistCheckpoint.read_object`."""
        place = self._metadata.objects[name]
        file = self._file(place.file)
        where = f"{file}: the record of {name} at byte {place.offset:,}"
        return object_at(file.pread, place.offset, place.length, where)

    @contextmanager
    def _opened(self, file: str) -> Iterator[tuple[Pread, str]]:
        found = self._file(file)
        yield found.pread, str(found)

    def _file(self, file: str) -> AfarFile:
        found = self._files.get(file)
        if found is None:
            raise UnreadableError(f"{file} is named in .metadata and is not there")
        return found


@dataclass(frozen=True, slots=True)
class AfarSource:
    """A remote HF folder or `hf_source`; files and headers are in its mirror, tensors are not."""

    source: HfSource
    tensors: tuple[AfarCheckpoint, ...]
    #: where it is read
    reads: tuple[str, ...]

    @property
    def memory(self) -> int:
        """Units: bytes. What is kept of it at most."""
        return Stretches.memory() * len(self.tensors)

    def require_unchanged(self) -> None:
        """Refuse a source that changed. Raises: UnreadableError naming the first file."""
        for tensors in self.tensors:
            tensors.require_unchanged()


@dataclass(frozen=True, slots=True)
class AfarMegatron:
    """A remote torch_dist checkpoint and its `hf_source`, opened."""

    checkpoint: AfarDist
    source: AfarSource | None
    mirror: DistMirror

    @property
    def memory(self) -> int:
        """Units: bytes. What is kept of it at most."""
        return Stretches.memory() + (self.source.memory if self.source else 0)

    def require_unchanged(self) -> None:
        """Refuse a source that changed. Raises: UnreadableError naming the first file."""
        require_marks(self.mirror.remote, self.mirror.marks)
        if self.source is not None:
            self.source.require_unchanged()


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
    found = find_source(mirror.path) if source else None
    origin = None if found is None else _opened_source(found, mirror.beside, mirror.reads)
    return AfarMegatron(checkpoint, origin, mirror)


def open_any_afar(url: str, place: Path) -> AfarCheckpoint | AfarMegatron:
    """Open a remote checkpoint of either format, without an `hf_source`.

    Its mirror lies below `place`, which is empty and stands for the folder that holds the URL.

    Raises: as `open_afar` and `open_dist_afar`.
    """
    url = url.rstrip("/")
    remote = open_remote(url)
    if holds_dist(remote):
        return open_dist_afar(url, place, source=False)
    return _open_hf(url, place, remote)


def open_source_afar(url: str, place: Path) -> AfarSource:
    """Open a remote HF folder, `hf_source`, or a Megatron checkpoint that has one.

    Its mirror lies below `place`, which is empty and stands for the folder that holds the URL.

    Raises: as `open_afar` and `open_dist_afar`; UnreadableError if there is none.
    """
    url = url.rstrip("/")
    remote, folder = open_remote(url), stand_in(url, place)
    saved = folder.name == FOLDER or remote.below(HEADERS)
    beside = mirror_source(remote, url, folder) if saved else None
    if beside is not None:
        return _opened_source(read_source(folder), beside, (url,))
    if holds_dist(remote):
        origin = open_dist_afar(url, place).source
        if origin is None:
            raise UnreadableError(f"{url}: has no {FOLDER}; name the original HuggingFace folder")
        return origin
    hf = _open_hf(url, place, remote)
    require_sound(hf)
    return AfarSource(source_of_hf(hf), (hf,), (url,))


def _open_hf(url: str, place: Path, remote: Remote) -> AfarCheckpoint:
    folder = stand_in(url, place)
    folder.mkdir()
    return open_afar(url, folder, remote)


def _opened_source(
    found: HfSource, beside: Mapping[str, AfarCheckpoint], reads: tuple[str, ...]
) -> AfarSource:
    """What was found is a mirror, which has no tensor bytes: `beside` has them."""
    own = replace(found, carried=beside.get(CARRIED), quantised=beside.get(QUANTISED))
    return AfarSource(own, tuple(beside.values()), reads)
