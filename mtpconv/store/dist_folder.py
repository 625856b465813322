"""Where a torch_dist checkpoint lies: parent folder, tracker file, `iter_*` and `release`.

Source: megatron-core 0.19.2 megatron/training/checkpointing.py, get_checkpoint_name and
read_metadata, read 2026-11-29.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import Literal

from mtpconv.errors import UnreadableError
from mtpconv.store.checkpoint import Problem

TRACKER = "latest_checkpointed_iteration.txt"
METADATA = ".metadata"
CONFIG = "metadata.json"
COMMON = "common.pt"

#: A training iteration, or "release" for a checkpoint that was converted, not trained.
Iteration = int | Literal["release"]

#: A tracker that says more is damaged.
MAX_ITERATION = 10**18 - 1
_ITERATION = re.compile(r"iter_(\d{7,})")


def folder_name(iteration: Iteration) -> str:
    """The folder that Megatron looks for: `release` or `iter_0000123`."""
    return "release" if iteration == "release" else f"iter_{iteration:07d}"


def named_iteration(folder: Path) -> Iteration | None:
    """The iteration that a folder's name says, None if the name says nothing."""
    for name in (folder.name, folder.resolve().name):
        number = _ITERATION.fullmatch(name)
        if name == "release" or number:
            return int(number[1]) if number else "release"
    return None


def tracked(data: bytes) -> tuple[str, Iteration | None]:
    """What a tracker file says, and the iteration if it names one."""
    text = data.decode("ascii", "replace").strip()
    if text == "release":
        return text, "release"
    return text, int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def find_folder(path: Path) -> tuple[Path, Iteration, Problem | None]:
    """The folder that holds `.metadata`, its iteration, and what is wrong with the tracker file.

    Raises: UnreadableError if `path` holds no torch_dist checkpoint, or several and no tracker.
    """
    if not path.is_dir():
        raise UnreadableError(f"{path} is not a folder; name a torch_dist checkpoint")
    if (
        (path / METADATA).exists()
        or any(next(path.glob(pattern), None) for pattern in ("*.distcp", "mp_rank_*"))
        or _names_backend(path / CONFIG)
    ):
        iteration = named_iteration(path)
        return path, "release" if iteration is None else iteration, None
    tracker = path / TRACKER
    if tracker.exists():
        text, latest = tracked(read_bounded(tracker, 1 << 10))
        if latest is not None and (path / folder_name(latest)).is_dir():
            return path / folder_name(latest), latest, None
        message = f"{TRACKER} says {text[:40]!r}, and there is no such folder beside it"
        return path, "release", Problem("unreadable_file", message, file=TRACKER)
    names = sorted(p.name for p in path.iterdir() if p.is_dir() and named_iteration(p) is not None)
    if len(names) == 1:
        return path / names[0], named_iteration(path / names[0]) or 0, None
    if names:
        raise UnreadableError(
            f"{path} holds {', '.join(names[:5])} and no {TRACKER}; name one of the folders"
        )
    raise UnreadableError(f"{path} holds no torch_dist checkpoint (no .metadata, no iter_* folder)")


def _names_backend(config: Path) -> bool:
    """Whether a `metadata.json` is Megatron's; other tools have files of that name too."""
    try:
        return b"sharded_backend" in read_bounded(config, 1 << 20)
    except UnreadableError:
        return False


def is_torch_dist(path: Path) -> bool:
    """Whether a folder looks like a torch_dist checkpoint or the parent of one."""
    try:
        find_folder(path)
    except UnreadableError:
        return False
    return True


def is_parent(path: Path) -> bool:
    """Whether a folder holds those of iterations, even if nothing says which one is meant."""
    try:
        return any(named_iteration(p) is not None for p in path.iterdir() if p.is_dir())
    except OSError:
        return False


def open_file(file: Path) -> int:
    """A descriptor for reading an ordinary file.

    Raises: UnreadableError if it is missing, not readable or not a file (a pipe would block).
    """
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        full = error.errno in (errno.EMFILE, errno.ENFILE)
        advice = "raise `ulimit -n`" if full else "copy the checkpoint again"
        raise UnreadableError(
            f"{file.name}: cannot be opened: {error.strerror}; {advice}"
        ) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UnreadableError(f"{file.name}: is not an ordinary file; copy the checkpoint again")
    return fd


def read_bounded(file: Path, limit: int) -> bytes:
    """A whole small file.

    Raises: UnreadableError as `open_file`, or if it is larger than `limit`.
    """
    fd = open_file(file)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise UnreadableError(f"{file.name} has {size:,} bytes, more than {limit:,}; not read")
        with open(fd, "rb", closefd=False) as stream:
            return stream.read(size)
    except OSError as error:
        raise UnreadableError(f"{file.name} cannot be read: {error.strerror}") from None
    finally:
        os.close(fd)
