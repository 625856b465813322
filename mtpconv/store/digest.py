"""BLAKE3 of tensors: one thread for one tensor, many tensors at once.

blake3's own threads cost more than they give below about 1.5 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from blake3 import blake3

from mtpconv.store.checkpoint import Checkpoint
from mtpconv.store.content import Files, Pieced, Reading, fill_all, reading
from mtpconv.store.crew import Crew, batches
from mtpconv.store.files import BLOCK

Progress = Callable[[int], object]


def digest_tensors(
    source: Checkpoint | Pieced,
    names: Sequence[str],
    progress: Progress | None = None,
    workers: int | None = None,
) -> Iterator[tuple[str, str]]:
    """The name and BLAKE3 hex of each tensor, in the order of `names`."""
    with Crew(workers) as crew:
        yield from digest_by(crew, source, names, progress)


def digest_by(
    crew: Crew,
    source: Checkpoint | Pieced,
    names: Sequence[str],
    progress: Progress | None = None,
) -> Iterator[tuple[str, str]]:
    """The same by a crew that is there already, which may be told of what is read."""
    # Where the bytes lie is found out here, by one thread: a checkpoint looks it up once.
    wanted = ((name, reading(source, name)) for name in names)
    for found in crew.map(_digest_batch, batches(wanted, lambda w: w[1].spec.nbytes)):
        yield from found
        if progress is not None:
            progress(sum(source.tensors[name].nbytes for name, _ in found))


def digest_tensor(source: Checkpoint | Pieced, name: str, files: Files | None = None) -> str:
    """BLAKE3 of the bytes of one tensor in C order, hex."""
    if files is not None:
        return digest_reading(reading(source, name), files)
    with Files() as own:
        return digest_reading(reading(source, name), own)


def digest_reading(what: Reading, files: Files) -> str:
    """BLAKE3 of the bytes of one tensor, hex."""
    hasher = blake3()
    for block in what.blocks(files):
        hasher.update(block)
    return hasher.hexdigest()


def digest_parts(parts: Iterable[tuple[str, int]], view: memoryview) -> Iterator[tuple[str, str]]:
    """Names and BLAKE3 hex of tensors that lie one after another in `view`, given their bytes."""
    at = 0
    for name, nbytes in parts:
        yield name, blake3(view[at : at + nbytes]).hexdigest()
        at += nbytes


def _digest_batch(batch: Sequence[tuple[str, Reading]], files: Files) -> list[tuple[str, str]]:
    total = sum(what.spec.nbytes for _, what in batch)
    if total > BLOCK:  # one large tensor
        return [(name, digest_reading(what, files)) for name, what in batch]
    with files.buffer(total) as buffer:
        fill_all([what for _, what in batch], files, buffer)
        return list(digest_parts(((n, what.spec.nbytes) for n, what in batch), buffer))
