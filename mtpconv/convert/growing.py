"""Several files written at once: what all of them do, whatever is in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, Self, TypeVar

from mtpconv.convert.flush import Flusher
from mtpconv.store.crew import Crew, interleaved
from mtpconv.store.files import Files
from mtpconv.store.new_file import NewFile


class Growing(Protocol):
    """A file that is being written."""

    #: parts that are not in it yet
    left: int
    #: of the HF tensors that went in so far
    digests: dict[str, str]

    @property
    def out(self) -> NewFile:
        """What the bytes go into. Raises: OSError, WriteError."""

    def finish(self) -> Self:
        """Bring it to disk and close it. Raises: OSError, WriteError."""

    def close(self) -> None:
        """Close it if it is open."""


File = TypeVar("File", bound=Growing)
Part = TypeVar("Part")


def write_files(
    files: Sequence[File],
    batches: Callable[[File], Iterator[Sequence[Part]]],
    write: Callable[[File, Sequence[Part], Files], Iterable[tuple[str, str]]],
    crew: Crew,
    wrote: Callable[[Sequence[Part]], int],
    done: Callable[[File], None],
    *,
    keep: bool,
) -> None:
    """Write files, as many at once as there are jobs; they will be read soon if `keep`.

    `batches` begins a file and gives its parts, `write` puts some into it and gives their digests;
    `wrote` is told of them and gives their bytes, `done` of each file that is on disk.

    Raises: whatever these raise.
    """

    def stream(file: File) -> Iterator[tuple[File, Sequence[Part]]]:
        for batch in batches(file):
            yield file, batch

    def work(
        item: tuple[File, Sequence[Part]], own: Files
    ) -> tuple[File, Sequence[Part], Iterable[tuple[str, str]]]:
        return *item, write(*item, own)

    empty = [file for file in files if not file.left]
    try:
        with Flusher(keep=keep) as flusher:
            for file, batch, digests in crew.map(work, interleaved(map(stream, files), crew.jobs)):
                file.digests.update(digests)
                flusher.wrote(file.out, wrote(batch))
                file.left -= len(batch)
                if not file.left:
                    flusher.finish(file.out, file.finish, done)
            for file in empty:  # begun above, like all
                flusher.finish(file.out, file.finish, done)
            flusher.settle()
    finally:
        for file in files:
            file.close()
