"""Files that a command writes beside its answer: refused early, never instead of what it reads."""

from __future__ import annotations

import os
from pathlib import Path

from mtpconv.errors import UsageError, WriteError
from mtpconv.store.places import Places


def require_file(option: str, file: Path, reads: Places) -> None:
    """Refuse a name that cannot be a file, or that belongs to what is read.

    Raises: UsageError; WriteError if its folder cannot be written to.
    """
    if file.is_dir() or not file.parent.is_dir():
        what = "is a folder" if file.is_dir() else f"{file.parent} is no folder"
        raise UsageError(f"{option} {file}: {what}; name a file in an existing folder")
    plain = not os.path.lexists(file) or (file.is_file() and not file.is_symlink())
    if plain and not os.access(file.parent, os.W_OK):  # it is written beside and renamed
        raise WriteError(f"{option} {file}: nothing can be written into {file.parent}")
    reads.require_new(file, option)
