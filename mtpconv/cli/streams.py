"""Standard output and standard error that may be full or closed.

What cannot be printed on standard output is an error of its own, exit 3: a report that nobody
got was not given. What cannot be printed on standard error is lost, and changes nothing.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO

from mtpconv.errors import WriteError


def guard_streams() -> None:
    """Replace the two streams; streams that somebody else put there are left alone."""
    for number, other in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        _require_open(number, other)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(_Output(1, "wb", closefd=False), sys.__stdout__, lines=False)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Remarks(2, "wb", closefd=False), sys.__stderr__, lines=True)


def _require_open(number: int, flags: int) -> None:
    """Without this a data file would get the number of a closed stream, and be printed into.

    Standard output is then open for reading, so that printing fails as it does when it is closed.
    """
    try:
        os.fstat(number)
    except OSError:
        os.open(os.devnull, flags)  # gets the lowest free number


def _text(raw: io.FileIO, like: TextIO | None, *, lines: bool) -> TextIO:
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=like.encoding if like is not None else "utf-8",
        # File names need not be UTF-8.
        errors="backslashreplace",
        line_buffering=lines or raw.isatty(),
    )


class _Output(io.FileIO):
    """Says once that it cannot be written; what is still buffered then goes nowhere."""

    _lost = False

    def write(self, data: Any) -> int:
        if self._lost:
            return len(data)
        try:
            return super().write(data)
        except OSError as error:
            self._lost = True
            raise WriteError(f"standard output: cannot be written: {error.strerror}") from error


class _Remarks(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)
