"""Files that a command writes beside its answer: refused early, never instead of what it reads."""

from __future__ import annotations

from pathlib import Path

from mtpconv.errors import UsageError
from mtpconv.store.places import Places


def require_file(option: str, file: Path, reads: Places) -> None:
    """Refuse a name that cannot be a file, or that belongs to what is read. Raises: UsageError."""
    if file.is_dir() or not file.parent.is_dir():
        what = "is a folder" if file.is_dir() else f"{file.parent} is no folder"
        raise UsageError(f"{option} {file}: {what}; name a file in an existing folder")
    reads.require_new(file, option)
