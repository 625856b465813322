"""A target folder that appears whole or not at all.

Everything is written into `.NAME.partial` beside the target, fsynced, and renamed at the end.
A lock on `.NAME.lock` keeps two converters apart; it dies with its process, so a killed run
leaves no stale lock, only a partial folder that the next run removes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from mtpconv.errors import MtpconvError, UsageError, WriteError
from mtpconv.store.source import sync


class Output:
    """Context manager around one target folder.

    Raises: UsageError if the target exists (without `overwrite`), lies in the source or holds
    it; WriteError if there is too little space or the disk fails.
    """

    def __init__(self, target: Path, source: Path, *, overwrite: bool, need: int) -> None:
        self.target = Path(os.path.abspath(target))
        self.folder = self.target.parent / f".{self.target.name}.partial"
        self._lock_path = self.target.parent / f".{self.target.name}.lock"
        self._lock: int | None = None
        self._need = need
        check_target(self.target, source, overwrite=overwrite)

    def __enter__(self) -> Self:
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            check_space(self.target, self._need)
            if self.folder.exists():
                shutil.rmtree(self.folder)
            self.folder.mkdir()
        except OSError as error:
            self._release()
            raise explain(error, self.target) from error
        except MtpconvError:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            shutil.rmtree(self.folder, ignore_errors=True)
        finally:
            self._release()
        if isinstance(error, WriteError):
            text = str(error).replace(str(self.folder), str(self.target))
            raise WriteError(f"{text}; nothing was left behind") from error
        if isinstance(error, OSError):
            raise explain(error, self.target) from error

    def commit(self) -> None:
        """Make the target appear, replacing what was there."""
        sync_tree(self.folder)
        old = self.target.parent / f".{self.target.name}.replaced"
        if old.exists():
            shutil.rmtree(old)
        if self.target.exists():
            self.target.rename(old)
        self.folder.rename(self.target)
        sync(self.target.parent)
        if old.exists():
            shutil.rmtree(old)

    def _take_lock(self) -> None:
        self._lock = os.open(self._lock_path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise UsageError(
                    f"{self.target}: another mtpconv is writing it; wait for it or name another target"
                ) from error
            raise

    def _release(self) -> None:
        if self._lock is not None:
            self._lock_path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


def check_target(target: Path, source: Path, *, overwrite: bool) -> None:
    """Refuse a target that would lose something. Raises: UsageError."""
    real, origin = target.resolve(), source.resolve()
    if real == origin or origin in real.parents:
        raise UsageError(f"{target}: lies inside the source {source}; name another folder")
    if real in origin.parents:
        raise UsageError(f"{target}: holds the source {source}; name another folder")
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise UsageError(f"{target}: is a file; name a folder")
    if any(target.iterdir()) and not overwrite:
        raise UsageError(f"{target}: exists and is not empty; pass --overwrite or name another")


def check_space(target: Path, need: int) -> None:
    """Refuse a target whose disk is too small. Raises: WriteError."""
    folder = target
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < need:
        raise WriteError(
            f"{target}: needs {need / 1e9:.2f} GB and the disk has {free / 1e9:.2f} GB free; "
            "free some or name another disk"
        )


def explain(error: OSError, target: Path) -> WriteError:
    """An operating-system error while writing as one clear line."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"{error.strerror}; nothing was left behind, free some space and run again"
    else:
        what = f"cannot be written: {error.strerror or error}"
    return WriteError(f"{target}: {what}")


def sync_tree(folder: Path) -> None:
    """fsync every folder below; files are synced by whoever writes them."""
    for root, _, _ in os.walk(folder):
        sync(Path(root))
