"""Safetensors shards written by several threads, each tensor where the header says."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from mtpconv.convert.growing import write_files
from mtpconv.errors import UnreadableError
from mtpconv.store.checkpoint import Checkpoint
from mtpconv.store.content import Pieced, Reading, Run, fill_all, reading
from mtpconv.store.crew import Crew, batches
from mtpconv.store.digest import digest_tensors
from mtpconv.store.files import BLOCK, Files
from mtpconv.store.hf import HfCheckpoint
from mtpconv.store.new_file import NewFile
from mtpconv.store.safetensors_header import ShardHeader, read_header

#: A filesystem that cannot copy inside the kernel answers one of these.
_NO_COPY = frozenset(
    {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY}
)


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

    Without `digest` nobody looks at the bytes: they are copied inside the kernel, and there
    are no digests.

    Raises: WriteError, OSError, UnreadableError.
    """

    def wrote(tensors: Sequence[_Tensor]) -> int:
        nbytes = _nbytes(tensors)
        advance(nbytes, tensors[-1].name)
        return nbytes

    write = _copy_and_digest if digest else _copy
    write_files(shards, lambda shard: shard.batches(source), write, crew, wrote, done)


def shard_is_whole(path: Path, header: ShardHeader, digests: Mapping[str, str], crew: Crew) -> bool:
    """Whether a finished file has this header and tensors with these digests."""
    try:
        found = read_header(path)
    except UnreadableError:
        return False
    if found.raw != header.raw or digests.keys() != header.tensors.keys():
        return False
    alone = HfCheckpoint(
        path.parent, found.tensors, (), None, b"", {path.name: found}, None, None, b"", {},
        dict.fromkeys(found.tensors, path.name),
    )  # fmt: skip
    names = list(found.payload_order)
    return all(digests[n] == d for n, d in digest_tensors(alone, names, workers=crew.jobs))


_Digests = list[tuple[str, str]]


def _nbytes(tensors: Sequence[_Tensor]) -> int:
    return sum(t.what.spec.nbytes for t in tensors)


def _copy_and_digest(shard: Shard, tensors: Sequence[_Tensor], files: Files) -> _Digests:
    total = _nbytes(tensors)
    if total > BLOCK:  # one large tensor
        return [(t.name, _stream(shard, t, files)) for t in tensors]
    digests = []
    with files.buffer(total) as window:
        fill_all([t.what for t in tensors], files, window)
        at = 0
        for name, what, _ in tensors:
            end = at + what.spec.nbytes
            digests.append((name, blake3(window[at:end]).hexdigest()))
            at = end
        shard.out.write(tensors[0].at, window)
    return digests


def _stream(shard: Shard, tensor: _Tensor, files: Files) -> str:
    hasher, at = blake3(), tensor.at
    for block in tensor.what.blocks(files):
        hasher.update(block)
        shard.out.write(at, block)
        at += len(block)
    return hasher.hexdigest()


def _copy(shard: Shard, tensors: Sequence[_Tensor], files: Files) -> _Digests:
    runs = list(_runs(tensors))
    if all(isinstance(run.file, Path) for run in runs):
        try:
            for run in runs:
                _copy_in_kernel(shard.out, run, files)
            return []
        except OSError as error:
            if error.errno not in _NO_COPY:
                raise
    _copy_and_digest(shard, tensors, files)
    return []


def _runs(tensors: Sequence[_Tensor]) -> Iterator[Run]:
    """The runs of all tensors, at places of the file; a gather has none and counts as zeros."""
    for _, what, at in tensors:
        if what.runs is None:
            yield Run(at, 0, None, 0)
        for run in what.runs or ():
            yield Run(at + run.at, run.nbytes, run.file, run.start)


def _copy_in_kernel(out: NewFile, run: Run, files: Files) -> None:
    assert isinstance(run.file, Path)
    source = files.fd(run.file)
    done = 0
    while done < run.nbytes:
        got = out.copy_range(run.at + done, run.nbytes - done, source, run.start + done)
        if got == 0:
            raise UnreadableError(
                f"{run.file}: ends at byte {run.start + done}, {run.nbytes - done} bytes short; "
                "the file is truncated, fetch it again"
            )
        done += got
