"""Safetensors shards written by several threads, each tensor where the header says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from mtpconv.convert.growing import write_files
from mtpconv.errors import UnreadableError
from mtpconv.store.checkpoint import Checkpoint
from mtpconv.store.content import Pieced, Reading, fill_all, reading
from mtpconv.store.crew import Crew, batches
from mtpconv.store.digest import digest_parts, digest_tensors
from mtpconv.store.files import BLOCK, Files
from mtpconv.store.hf import HfCheckpoint
from mtpconv.store.new_file import NewFile
from mtpconv.store.safetensors_header import ShardHeader, read_header


class _Tensor(NamedTuple):
    name: str
    what: Reading
    at: int


class Shard:
    """A safetensors file that is being written; `digests` grows with it."""

    def __init__(self, path: Path, header: ShardHeader) -> None:
        self.path = path
        self.header = header
        self.digests: dict[str, str] = {}
        self.left = len(header.tensors)
        self._file: NewFile | None = None

    @property
    def out(self) -> NewFile:
        """What the bytes go into, created when first asked for. Raises: OSError."""
        if self._file is None:
            self._file = NewFile(self.path)
        return self._file

    def batches(self, source: Checkpoint | Pieced) -> Iterator[Sequence[_Tensor]]:
        """Begin the file, and what is to be copied into it. Raises: OSError, WriteError."""
        self.out.write(0, self.header.raw)
        tensors = (
            _Tensor(name, reading(source, name), self.header.start(name))
            for name in self.header.payload_order
        )
        yield from batches(tensors, lambda t: t.what.spec.nbytes)

    def finish(self) -> Shard:
        """Bring it to disk and close it. Raises: OSError, WriteError."""
        self.out.sync()
        self.close()
        return self

    def close(self) -> None:
        """Close it if it is open."""
        if self._file is not None:
            self._file.close()


def write_shards(
    shards: Sequence[Shard],
    source: Checkpoint | Pieced,
    crew: Crew,
    advance: Callable[[int, str], None],
    done: Callable[[Shard], None],
    *,
    digest: bool = True,
) -> None:
    """Write shards, as many at once as there are jobs; `done` is told of each that is on disk.

    Without `digest` nobody looks at the bytes, now or later, and there are no digests.

    Raises: WriteError, OSError, UnreadableError.
    """

    def wrote(tensors: Sequence[_Tensor]) -> int:
        nbytes = _nbytes(tensors)
        advance(nbytes, tensors[-1].name)
        return nbytes

    write_files(
        shards,
        lambda shard: shard.batches(source),
        partial(_copy, digest=digest),
        crew,
        wrote,
        done,
        keep=digest,
    )


def shard_is_whole(path: Path, header: ShardHeader, digests: Mapping[str, str], crew: Crew) -> bool:
    """Whether a finished file has this header and tensors with these digests."""
    try:
        found = read_header(path)
    except UnreadableError:
        return False
    if found.raw != header.raw or digests.keys() != header.tensors.keys():
        return False
    alone = HfCheckpoint(
        path.parent, found.tensors, (), None, {path.name: found}, None, None, {},
        dict.fromkeys(found.tensors, path.name),
    )  # fmt: skip
    names = list(found.payload_order)
    return all(digests[n] == d for n, d in digest_tensors(alone, names, workers=crew.jobs))


def _nbytes(tensors: Sequence[_Tensor]) -> int:
    return sum(t.what.spec.nbytes for t in tensors)


def _copy(
    shard: Shard, tensors: Sequence[_Tensor], files: Files, *, digest: bool
) -> list[tuple[str, str]]:
    """Copy neighbours of a shard; gives their names with their digests.

    Through memory, in blocks that stay in the cache: inside the kernel (`copy_file_range`) it took
    longer, as source and target differ in order and do not begin at the same place of a page.
    """
    total = _nbytes(tensors)
    if total > BLOCK:  # one large tensor
        found = [(t.name, _stream(shard, t, files, digest=digest)) for t in tensors]
        return found if digest else []
    with files.buffer(total) as window:
        fill_all([t.what for t in tensors], files, window)
        shard.out.write(tensors[0].at, window)
        sizes = ((t.name, t.what.spec.nbytes) for t in tensors)
        return list(digest_parts(sizes, window)) if digest else []


def _stream(shard: Shard, tensor: _Tensor, files: Files, *, digest: bool) -> str:
    hasher, at = blake3(), tensor.at
    for block in tensor.what.blocks(files):
        if digest:
            hasher.update(block)
        shard.out.write(at, block)
        at += len(block)
    return hasher.hexdigest()
