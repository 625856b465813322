"""What must be true of a target folder before anything is written there, and again at the end."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from mtpconv.errors import UsageError, WriteError
from mtpconv.ranges import compress
from mtpconv.store.places import Places, real_path
from mtpconv.store.source import FOLDER

#: Folders of a Megatron checkpoint; hf2mcore writes one of them, with `hf_source` beside it. Wider
#: than what is read as one: what was removed does not come back.
_ITERATION = re.compile(r"release|iter_\d+")


def check_target(target: Path, reads: Places, *, overwrite: bool) -> None:
    """Refuse a target that would lose something, or that cannot appear by a rename.

    Raises: UsageError.
    """
    real = real_path(target)
    reads.require_apart(real, target)
    reads.require_apart(work_folder(real), target)
    if not os.path.lexists(real):
        return
    if not real.is_dir():
        raise UsageError(f"{target}: is a file; name a folder")
    for mount in _mounts():
        if mount == real:
            raise UsageError(
                f"{target}: is a mount point, and a target appears by being renamed, which a "
                "mount point cannot be; name a folder inside it"
            )
        if real in mount.parents:
            raise UsageError(f"{target}: holds the mount point {mount}; name another folder")
    if os.path.ismount(real):  # where there is no /proc
        raise UsageError(f"{target}: is a mount point; name a folder inside it")
    if not any(real.iterdir()):
        return
    if not overwrite:
        raise UsageError(f"{target}: exists and is not empty; pass --overwrite or name another")
    iterations = sorted(p.name for p in real.iterdir() if _ITERATION.fullmatch(p.name))
    if len(iterations) > 1 or (iterations and not (real / FOLDER).exists()):
        raise UsageError(
            f"{target}: holds what was trained there ({compress(iterations, 3)}), and --overwrite "
            "would remove it; name another folder"
        )
    here = _current()
    if here is not None and (here == real or real in here.parents):
        # Its place is taken by another folder, and relative paths would lead nowhere.
        raise UsageError(f"{target}: is or holds the current folder; go elsewhere to replace it")


def _current() -> Path | None:
    try:
        return real_path(Path.cwd())
    except OSError:
        return None  # somebody removed it


def work_folder(real: Path) -> Path:
    """Where a target, given by its real path, is prepared."""
    return real.parent / f".{real.name}.partial"


def check_space(target: Path, need: int) -> None:
    """Refuse a target whose disk is too small. Raises: WriteError."""
    folder = real_path(target).parent  # it is prepared there
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
        return WriteError(f"{target}: {error.strerror}; free some space and run again")
    return WriteError(f"{target}: cannot be written: {error.strerror or error}")


def _mounts() -> Iterator[Path]:
    """Mount points of this machine; unlike `os.path.ismount` also those within one disk.

    Source: proc_pid_mountinfo(5), man-pages 6.9, field 5 and its octal escapes.
    """
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        name = re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), line.split(b" ")[4])
        yield Path(os.fsdecode(name))
