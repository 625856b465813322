"""Files that are being written, on request past the page cache.

The page cache costs most of the CPU of writing: 1.6 to 2.1 CPU s/GB against 0.1 without it (ext4,
measured 2026-11-30). It pays if what was written is read back from there. What is larger than
memory evicts itself, and what others read.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache
from pathlib import Path

from mtpconv.errors import WriteError

#: Units: bytes. What goes to disk at once.
STRIDE = 2 << 20
#: Units: bytes. How much of the disk a file takes that became larger than was said.
_AHEAD = 256 << 20
#: Blocks on their way to disk: with one at a time a disk idles between them.
_DEPTH = 8

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
#: 0 where the system has no such thing.
_DIRECT: int = getattr(os, "O_DIRECT", 0)

#: Bounds the memory of blocks that are full and not on disk.
_on_the_way = threading.BoundedSemaphore(_DEPTH)


@cache
def _writers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_DEPTH)


class _Block:
    """A stride of the file whose bytes are not all there yet."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.view = memoryview(memory)
        self.filled = 0


class NewFile:
    """A file that is written once, in any order, from any number of threads.

    Past the page cache the kernel takes aligned blocks only: bytes are put together here until a
    block is full. So whoever writes a `direct` file leaves no gaps.
    """

    def __init__(self, path: Path, *, direct: bool = False, size: int = 0) -> None:
        """Create the file; `direct` asks to pass the page cache, which not every disk can.

        It will have about `size` bytes. Raises: OSError.
        """
        self.path = path
        self._fd = os.open(path, _NEW, 0o644)
        self.direct = direct and _on_own_disk(self._fd) and _set_direct(self._fd)
        #: the kernel lets one thread into a file and the others spin; here they sleep
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._blocks: dict[int, _Block] = {}
        self._free: list[mmap.mmap] = []
        self._under_way: list[Future[None]] = []
        self._end = 0
        self._size = size
        self._taken = 0
        self._takes = hasattr(os, "posix_fallocate")

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Put bytes at a place that has none yet.

        Raises: WriteError, of a `direct` file maybe for earlier bytes.
        """
        if not self.direct:
            with self._turn:
                write_at(self._fd, self.path, at, data)
            return
        done = 0
        for room in self.rooms(at, len(data)):
            room[:] = data[done : done + len(room)]
            done += len(room)

    def rooms(self, at: int, nbytes: int) -> Iterator[memoryview]:
        """Where these bytes of a `direct` file go: fill each room before the next is asked for.

        Raises: as `write`.
        """
        end = at + nbytes
        while at < end:
            number, skip = divmod(at, STRIDE)
            take = min(STRIDE - skip, end - at)
            with self._lock:
                block = self._blocks.get(number)
                if block is None:
                    self._take((number + 1) * STRIDE)
                    memory = self._free.pop() if self._free else mmap.mmap(-1, STRIDE)
                    block = self._blocks[number] = _Block(memory)
            yield block.view[skip : skip + take]
            at += take
            with self._lock:
                self._end = max(self._end, at)
                block.filled += take
                full = block.filled == STRIDE
                if full:
                    del self._blocks[number]
            if full:
                self._send(number * STRIDE, block)

    def copy_range(self, at: int, nbytes: int, source: int, start: int) -> int:
        """Copy up to `nbytes` inside the kernel into a file that is not `direct`; how many it did.

        Raises: OSError.
        """
        with self._turn:
            return os.copy_file_range(source, self._fd, nbytes, start, at)

    def begin_writeback(self) -> None:
        """Bring what is in the page cache to disk. Raises: OSError."""
        if not self.direct:
            os.fdatasync(self._fd)

    def sync(self) -> None:
        """Bring all of it to disk. Raises: OSError, WriteError."""
        for future in self._under_way:
            future.result()
        if self._blocks:  # the end of the file, which fills no block
            ((number, block),) = self._blocks.items()
            start = number * STRIDE
            assert block.filled == self._end - start, f"{self.path}: written with gaps"
            _clear_direct(self._fd)
            write_at(self._fd, self.path, start, block.view[: block.filled])
        if self._taken > self._end:
            os.ftruncate(self._fd, self._end)
        os.fsync(self._fd)

    def close(self) -> None:
        """Close it if it is open, whatever is in it."""
        wait(self._under_way)
        self._under_way.clear()
        self._blocks.clear()
        self._free.clear()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _take(self, end: int) -> None:
        """Take disk up to `end`: writers of blocks that are not there yet wait for each other."""
        while self._takes and end > self._taken:
            more = self._size - self._taken if self._size > self._taken else _AHEAD
            try:
                os.posix_fallocate(self._fd, self._taken, more)
                self._taken += more
            except OSError:  # whoever writes hears of it, if there is anything to hear
                self._takes = False

    def _send(self, at: int, block: _Block) -> None:
        with self._lock:
            over = [future for future in self._under_way if future.done()]
            self._under_way = [future for future in self._under_way if future not in over]
        for future in over:
            future.result()
        _on_the_way.acquire()
        future = _writers().submit(self._store, at, block)
        with self._lock:
            self._under_way.append(future)

    def _store(self, at: int, block: _Block) -> None:
        try:
            write_at(self._fd, self.path, at, block.view)
        except WriteError as error:
            cause = error.__cause__
            # The disk wants other blocks than ours, or what is left of a cut write.
            if not isinstance(cause, OSError) or cause.errno != errno.EINVAL:
                raise
            _clear_direct(self._fd)
            write_at(self._fd, self.path, at, block.view)
        finally:
            _on_the_way.release()
            with self._lock:
                self._free.append(block.memory)


def _on_own_disk(fd: int) -> bool:
    """Whether a file is on a filesystem that is alone on a block device, as ext4 and XFS are.

    Others have no device: network filesystems copy on the server, which is faster than anything
    here, and each has rules of its own for what passes the page cache.
    """
    return os.major(os.fstat(fd).st_dev) != 0


def _set_direct(fd: int) -> bool:
    if _DIRECT:
        with suppress(OSError):  # EINVAL: this filesystem cannot
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | _DIRECT)
            return True
    return False


def _clear_direct(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_DIRECT)


def write_at(fd: int, file: Path, offset: int, data: bytes | memoryview) -> None:
    """Write a whole block into an open file.

    Raises: WriteError.
    """
    try:
        done = os.pwrite(fd, data, offset)
        while done < len(data):  # more than 2 GiB at once, or a signal
            done += os.pwrite(fd, memoryview(data)[done:], offset + done)
    except OSError as error:
        raise cannot_write(file, error) from error


def cannot_write(file: Path, error: OSError) -> WriteError:
    """The one line for a write that failed."""
    what = f"{file}: cannot be written: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what += "; free some space or choose another disk"
    return WriteError(what)
