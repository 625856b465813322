"""Files brought to disk while others, or they themselves, are still being written."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self, TypeVar

from mtpconv.store.new_file import NewFile

Result = TypeVar("Result")


class Flusher:
    """Syncs growing files every `every` bytes, and finishes them, on a thread of its own.

    Without it the disk idles until the kernel thinks of what is in the page cache, and the last
    fsync waits for all of the file: 4.1 s against 2.9 s for 3.2 GB (measured 2026-11-29, two
    threads copying).

    Pages that nobody will read (not `keep`) are given back at once: the next ones are then
    written into the same memory. Memory that was not in use before is several times as slow to
    write on virtual machines: 1.7 against 2.4 CPU s/GB (measured 2026-11-30, hf2mcore).
    """

    def __init__(self, every: int = 256 << 20, *, keep: bool = True) -> None:
        self._every = every
        self._keep = keep
        self._unsynced: dict[NewFile, int] = {}
        #: files that the kernel has told a failed write of; it tells only once
        self._failed: set[NewFile] = set()
        self._pool = ThreadPoolExecutor(1)  # one: a file is closed after its last sync
        self._under_way: deque[tuple[Future[Any], Callable[[Any], None] | None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown()
        while kind is not None and self._under_way:
            # What is finished counts as finished, whatever stopped the rest.
            with suppress(Exception):
                self._collect(wait=True)

    def wrote(self, file: NewFile, nbytes: int) -> None:
        """`nbytes` more are in the file.

        Raises: OSError if earlier bytes could not be brought to disk, and as `finish`.
        """
        self._collect()
        unsynced = self._unsynced.get(file, 0) + nbytes
        if unsynced >= self._every and not self._under_way:
            self._under_way.append((self._pool.submit(self._begin_writeback, file), None))
            unsynced = 0
        self._unsynced[file] = unsynced

    def finish(
        self, file: NewFile, close: Callable[[], Result], then: Callable[[Result], None]
    ) -> None:
        """Have `close` sync and close a file, then call `then` on the caller's own thread.

        Raises: whatever `close` and `then` raise, here, in `wrote` or in `settle`.
        """
        self._unsynced.pop(file, None)
        self._under_way.append((self._pool.submit(self._close, file, close), then))
        self._collect()

    def settle(self) -> None:
        """Wait until every file is where it belongs.

        Raises: as `finish`; the kernel tells of a failed write only once.
        """
        while self._under_way:
            self._collect(wait=True)

    def _begin_writeback(self, file: NewFile) -> None:
        try:
            file.begin_writeback(keep=self._keep)
        except OSError:
            self._failed.add(file)
            raise

    def _close(self, file: NewFile, close: Callable[[], Result]) -> Result:
        result = close()
        if file in self._failed:  # its fsync may well have succeeded
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(file.path))
        return result

    def _collect(self, *, wait: bool = False) -> None:
        while self._under_way and (wait or self._under_way[0][0].done()):
            future, then = self._under_way.popleft()
            result = future.result()
            if then is not None:
                then(result)
