"""Whether the files of a source stayed as they were while they were read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from blake3 import blake3

from mtpconv.errors import UnreadableError
from mtpconv.store.other_files import other_files

#: size, time of change of the bytes, time of change of anything
_State = tuple[int, int, int]


class Snapshot:
    """Size and time of change of files, taken before anything of them is read."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._seen = {path: _state(path) for path in files}

    def require_unchanged(self) -> None:
        """Refuse a source that changed.

        Raises: UnreadableError naming the first file and what happened to it.
        """
        for path, before in self._seen.items():
            after = _state(path)
            if (after and after[:2]) == (before and before[:2]):
                continue
            if after is None:
                what = "vanished"
            elif before is None:
                what = "appeared"
            elif after[0] != before[0]:
                what = f"grew or shrank from {before[0]:,} to {after[0]:,} bytes"
            else:
                what = "was written to"
            raise UnreadableError(
                f"{path}: {what} while it was read; nothing was kept, "
                "run again when nobody writes to it"
            )

    @property
    def digest(self) -> str:
        """One BLAKE3 over all of it, hex: the same source in the same state."""
        return self._digest(2)

    @property
    def strict_digest(self) -> str:
        """The same, and no file was replaced by one of its size and time, as `cp -p` does."""
        return self._digest(3)

    def _digest(self, fields: int) -> str:
        hasher = blake3()
        for path, state in sorted(self._seen.items()):
            known = state if state is None else state[:fields]
            hasher.update(os.fsencode(path.name) + f"\0{known}\n".encode())
        return hasher.hexdigest()


def files_of(folder: Path) -> list[Path]:
    """Every file directly in a folder, sorted; nothing if it is not a readable folder."""
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(e.path) for e in entries if e.is_file())
    except OSError:
        return []  # whoever reads the folder says what is wrong with it


def files_below(folder: Path) -> list[Path]:
    """Every file of an HF folder, links followed; nothing if it is not a readable folder."""
    try:
        return [folder / name for name in other_files(folder, ()).travel]
    except UnreadableError:
        return []  # whoever reads the folder says what is wrong with it


def _state(path: Path) -> _State | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns
