"""Open files and buffers, used again from one tensor to the next."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from mtpconv.errors import UnreadableError

#: Units: bytes. Large enough for full disk speed, small enough to stay in the L2/L3 cache.
BLOCK = 2 << 20
#: Units: bytes. What lies between two stretches is read along if it is no more than this: the
#: frames of records are shorter.
_GAP = 4 << 10
#: Views that the kernel fills in one call; the gaps between them are views, too.
_MOST_VIEWS = 512


class Computed(Protocol):
    """Stands where a file would: bytes that are worked out when they are read."""

    def read_into(self, files: Files, start: int, view: memoryview) -> None:
        """Fill `view` from byte `start`."""


#: What pieces and runs point into.
Store = Path | Computed
#: Called with a file, a place in it and the bytes that were read from there.
OnRead = Callable[[Store, int, memoryview], None]


class Wanted(NamedTuple):
    """`view` shall have the bytes from `start` of `file`."""

    file: Store
    start: int
    view: memoryview


class Files:
    """A bounded pool of open files and of buffers; for one thread.

    `on_read` is told of everything that is read, with the bytes.
    """

    def __init__(self, limit: int = 64, on_read: OnRead | None = None) -> None:
        self._limit = limit
        self._on_read = on_read
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._buffers: list[bytearray] = []
        self._between = memoryview(bytearray(_GAP))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file."""
        while self._open:
            os.close(self._open.popitem()[1])
        self._buffers.clear()

    def fd(self, path: Path) -> int:
        """A read-only descriptor, valid until `limit` other files have been asked for."""
        found = self._open.get(path)
        if found is not None:
            self._open.move_to_end(path)
            return found
        while len(self._open) >= self._limit:
            os.close(self._open.popitem(last=False)[1])
        try:
            found = self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UnreadableError(f"{path}: {error.strerror}") from error
        return found

    def read_into(self, path: Store, start: int, view: memoryview) -> None:
        """Fill `view` from byte `start` of the file.

        Raises: UnreadableError if the file ends early or cannot be read.
        """
        if not isinstance(path, Path):
            path.read_into(self, start, view)
        else:
            self._read_into(path, start, view)
        if self._on_read is not None:
            self._on_read(path, start, view)

    def read_all(self, wanted: Iterable[Wanted]) -> None:
        """Fill views, in the order of the disk and neighbours at once.

        Raises: as `read_into`.
        """
        group: list[Wanted] = []
        views: list[memoryview] = []
        end = 0
        for one in sorted(wanted, key=lambda w: (id(w.file), w.start)):
            gap = one.start - end
            if group and (
                one.file is not group[0].file or not 0 <= gap <= _GAP or len(views) >= _MOST_VIEWS
            ):
                self._read_group(group, views)
                group, views = [], []
            elif group and gap:
                views.append(self._between[:gap])
            group.append(one)
            views.append(one.view)
            end = one.start + len(one.view)
        self._read_group(group, views)

    def _read_group(self, group: Sequence[Wanted], views: Sequence[memoryview]) -> None:
        """Fill the views of one stretch; some of them are gaps that nobody wants."""
        path, start = (group[0].file, group[0].start) if group else (None, 0)
        if len(group) < 2 or not isinstance(path, Path):
            for one in group:
                self.read_into(*one)
            return
        try:
            got = os.preadv(self.fd(path), views, start)
        except OSError as error:
            raise UnreadableError(f"{path}: {error.strerror} at byte {start}") from error
        for view in views:
            if got < len(view):  # a signal, or the end of the file
                self._read_into(path, start + got, view[got:])
            start += len(view)
            got = max(0, got - len(view))
        if self._on_read is not None:
            for one in group:
                self._on_read(*one)

    def _read_into(self, path: Path, start: int, view: memoryview) -> None:
        fd, size = self.fd(path), len(view)
        try:
            done = os.preadv(fd, (view,), start)
            while done < size:  # a signal, more than 2 GiB at once, or the end of the file
                got = os.preadv(fd, (view[done:],), start + done)
                if got == 0:
                    raise UnreadableError(
                        f"{path}: ends at byte {start + done}, {size - done} bytes short; "
                        "the file is truncated, fetch it again"
                    )
                done += got
        except OSError as error:
            raise UnreadableError(f"{path}: {error.strerror} at byte {start}") from error

    @contextmanager
    def buffer(self, size: int) -> Iterator[memoryview]:
        """`size` bytes to work in, of any content, used again by whoever comes next."""
        buffer = self._buffers.pop() if self._buffers else bytearray()
        if len(buffer) < size:
            buffer = bytearray(size)
        try:
            yield memoryview(buffer)[:size]
        finally:
            self._buffers.append(buffer)
