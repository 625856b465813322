"""Progress on a terminal as a bar, elsewhere as plain lines now and then."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from mtpconv.progress import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID


def make_progress(quiet: bool) -> Progress:
    """What fits the place: nothing, a bar, or lines on stderr."""
    if quiet:
        return Progress()
    return _Bar() if sys.stderr.isatty() else _Lines()


def human(nbytes: float) -> str:
    """Bytes as people say them (GB = 1e9)."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


class _Lines(Progress):
    """One line per stage and then one every few seconds."""

    _PAUSE = 5.0

    def begin(self, stage: str, total: int) -> None:
        self.stage, self.total, self.done = stage, total, 0
        self.start = self.last = time.monotonic()
        print(f"{stage}: {human(total)}", file=sys.stderr, flush=True)

    def advance(self, nbytes: int, what: str = "") -> None:
        self.done += nbytes
        now = time.monotonic()
        if now - self.last < self._PAUSE:
            return
        self.last = now
        rate = self.done / (now - self.start)
        left = (self.total - self.done) / rate if rate else 0
        print(
            f"{self.stage}: {human(self.done)} of {human(self.total)}, {human(rate)}/s, "
            f"{left:.0f} s left {what}".rstrip(),
            file=sys.stderr,
            flush=True,
        )


class _Bar(Progress):
    """A bar with bytes, rate and time left."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def begin(self, stage: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn,
        )  # fmt: skip
        from rich.progress import Progress as Bar

        if self._bar is not None:
            self._bar.stop()
        self._bar = Bar(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[what]}"),
            console=Console(stderr=True), transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task(stage, total=total, what="")
        self._bar.start()

    def advance(self, nbytes: int, what: str = "") -> None:
        if self._bar is None or self._task is None:
            return
        self._bar.update(self._task, advance=nbytes, what=what)
        if self._bar.finished:
            self._bar.stop()
            self._bar = None
