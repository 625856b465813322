"""One writer for a target: a lock file that names its holder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from mtpconv.errors import UsageError
from mtpconv.ranks import process_lives

#: Filesystems without flock (some Lustre and NFS mounts) answer one of these.
_NO_FLOCK = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})


class Lock:
    """An exclusive lock on a file; released by `release` or by the end of the process.

    flock dies with its process, so a killed run leaves no lock. Where a filesystem has no
    flock, the process id in the file says whether its holder still lives; a second file, made
    exclusively, keeps two that start together apart.
    """

    def __init__(self, path: Path, what: Path) -> None:
        self._path = path
        self._what = what
        self._fd: int | None = None

    @property
    def taken(self) -> bool:
        """Whether this process has it."""
        return self._fd is not None

    def take(self) -> None:
        """Take the lock.

        Raises: UsageError if another process has it, or somebody has a file of that name;
        OSError if the file cannot be made.
        """
        while self._fd is None:
            flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(self._path, flags, 0o644)
            try:
                with self._others_excluded(fd):
                    self._take(fd)
            finally:
                if self._fd is None:
                    os.close(fd)

    def release(self) -> None:
        """Remove the file while the lock is still held, then let go."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._fd)
            self._fd = None

    def _take(self, fd: int) -> None:
        if not _is_ours(fd):
            raise UsageError(
                f"{self._path}: is in the way and was not made by mtpconv; move it "
                "elsewhere or name another target"
            )
        # Its last holder may have removed the file between open and flock.
        if _is_same(fd, self._path):
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "at": time.time()}
            self._fd = fd
            with contextlib.suppress(OSError):  # a full disk is no reason to say it here
                os.ftruncate(fd, 0)
                os.pwrite(fd, json.dumps(holder).encode(), 0)

    @contextlib.contextmanager
    def _others_excluded(self, fd: int) -> Iterator[None]:
        """For good with flock, else until the file names its holder."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            flocked = True
        except OSError as error:
            flocked = False
            if error.errno not in _NO_FLOCK:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                raise self._refusal(fd) from None
        if flocked:
            yield
            return
        claim = self._path.with_name(f"{self._path.name}.claim")
        try:
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        except FileExistsError:
            raise UsageError(
                f"{claim}: another mtpconv is just starting; wait for it, or remove the file if "
                "there is none"
            ) from None
        try:
            if _lives(_holder(fd)):
                raise self._refusal(fd)
            yield
        finally:
            claim.unlink(missing_ok=True)

    def _refusal(self, fd: int) -> UsageError:
        return UsageError(
            f"{self._what}: another mtpconv is writing it{_named(_holder(fd))}; "
            "wait for it or name another target"
        )


def _is_same(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _is_ours(fd: int) -> bool:
    """Whether it is a lock file, or one that is just being made."""
    status = os.fstat(fd)
    return stat.S_ISREG(status.st_mode) and (not status.st_size or bool(_holder(fd)))


def _holder(fd: int) -> dict[str, object]:
    try:
        value = json.loads(os.pread(fd, 4096, 0))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _named(holder: dict[str, object]) -> str:
    if not holder:
        return ""
    return f" (process {holder.get('pid')} on {holder.get('host')})"


def _lives(holder: dict[str, object]) -> bool:
    """False only if it is known that the process is gone."""
    pid = holder.get("pid")
    return bool(holder) and (holder.get("host") != socket.gethostname() or process_lives(pid))
