"""What is done of an unfinished conversion: one line for each finished file.

A line is written when its file is on disk. What a line says is believed only if the file
should hold the same from the same source, and after its bytes have been checked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mtpconv.store.durable import sync

#: Tensors written at once.
_ROWS = 1000


class Done(NamedTuple):
    """A finished file: what it should hold, and the digests of the HF tensors that went in."""

    holds: str
    digests: Mapping[str, str]


class Journal:
    """The lines of all ranks; each rank adds to a file of its own."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self._path = folder / f"journal.{rank}.jsonl"
        self._fd: int | None = None

    def add(self, file: str, done: Done) -> None:
        """Say that a file is done. Raises: OSError."""
        if self._fd is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o644)
            sync(self._path.parent)
        # The line break in front ends a line that a killed run left unfinished. In parts: a file
        # may hold tens of thousands of tensors.
        head = json.dumps({"file": file, "holds": done.holds})
        self._write(f'\n{head[:-1]}, "digests": {{')
        names = list(done.digests)
        for at in range(0, len(names), _ROWS):
            part = json.dumps({name: done.digests[name] for name in names[at : at + _ROWS]})
            self._write((", " if at else "") + part[1:-1])
        self._write("}}\n")
        os.fsync(self._fd)

    def _write(self, text: str) -> None:
        assert self._fd is not None
        data = memoryview(text.encode())
        while data:
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def read_journals(folder: Path) -> dict[str, Done]:
    """What all ranks finished, by file name; unreadable lines are as good as none."""
    found: dict[str, Done] = {}
    for path in sorted(folder.glob("journal.*.jsonl")):
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError:
            continue
        for line in lines:
            done = _parse(line)
            if done is not None:
                found[done[0]] = done[1]
    return found


def _parse(line: bytes) -> tuple[str, Done] | None:
    try:
        value: Any = json.loads(line)
        file, holds, digests = value["file"], value["holds"], value["digests"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(file, str) or not isinstance(digests, dict):
        return None
    return file, Done(str(holds), digests)
