"""Files that are being written, by any number of threads."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

from mtpconv.errors import WriteError

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class NewFile:
    """A file that is written for the first time, its parts in any order."""

    def __init__(self, path: Path) -> None:
        """Create the file. Raises: OSError."""
        self.path = path
        self._fd = os.open(path, _NEW, 0o644)
        #: the kernel lets one thread into a file and the others spin; here they sleep
        self._turn = threading.Lock()

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Put bytes at a place. Raises: WriteError."""
        with self._turn:
            write_at(self._fd, self.path, at, data)

    def begin_writeback(self, *, keep: bool = True) -> None:
        """Bring what was written so far to disk; `keep` it in memory, too, for whoever reads it.

        Raises: OSError.
        """
        os.fdatasync(self._fd)
        if not keep:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Bring all of it to disk. Raises: OSError."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close it if it is open, whatever is in it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def write_at(fd: int, file: Path, offset: int, data: bytes | memoryview) -> None:
    """Write a whole block into an open file.

    Raises: WriteError.
    """
    try:
        done = os.pwrite(fd, data, offset)
        while done < len(data):  # more than 2 GiB at once, or a signal
            done += os.pwrite(fd, memoryview(data)[done:], offset + done)
    except OSError as error:
        raise cannot_write(file, error) from None


def cannot_write(file: Path, error: OSError) -> WriteError:
    """The one line for a write that failed."""
    what = f"{file}: cannot be written: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what += "; free some space or choose another disk"
    return WriteError(what)
