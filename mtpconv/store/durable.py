"""Small files that are on disk when the call returns."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from mtpconv.errors import WriteError


def copy_file(source: Path, target: Path) -> None:
    """Copy one file, executable if it was, and fsync it; what was written is read again.

    Raises: WriteError if it cannot be written or is not what was read.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        mode = target.stat().st_mode
        # As the umask has it: whoever may read may also run.
        runs = source.stat().st_mode & 0o111 & (mode & 0o444) >> 2
        if runs:
            target.chmod(mode | runs)
        sync(target)
        same = _is_same(source, target)
    except OSError as error:
        raise WriteError(f"{target}: cannot be written: {error.strerror}") from error
    if not same:
        raise WriteError(f"{target}: is not what {source} holds; check the disk and run again")


def _is_same(source: Path, target: Path) -> bool:
    with source.open("rb") as wanted, target.open("rb") as found:
        if hasattr(os, "posix_fadvise"):  # from the disk, not from memory
            os.posix_fadvise(found.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while block := wanted.read(1 << 20):
            if found.read(len(block)) != block:
                return False
        return not found.read(1)


def write_bytes(target: Path, data: bytes) -> None:
    """Write one small file and fsync it. Raises: WriteError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        sync(target)
    except OSError as error:
        raise WriteError(f"{target}: cannot be written: {error.strerror}") from error


def sync(path: Path) -> None:
    """Force a file or folder to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
