"""Progress on a terminal as a bar, elsewhere as plain lines or JSON now and then."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

from mtpconv.errors import UsageError
from mtpconv.progress import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID


def make_progress(quiet: bool, log_format: str = "auto") -> Progress:
    """What was asked for and fits the place: nothing, a bar, or lines on stderr.

    Raises: UsageError for a format that there is not.
    """
    if log_format not in ("auto", "text", "json"):
        raise UsageError(f"--log-format {log_format}: must be auto, text or json")
    if quiet:
        return Progress()
    if log_format == "json":
        return _JsonLines()
    return _Bar() if log_format == "auto" and sys.stderr.isatty() else _Lines()


def human(nbytes: float) -> str:
    """Bytes as people say them (GB = 1e9)."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def one_line(text: str) -> str:
    """A message without what a terminal or the log of a CI system acts on.

    Names, paths and config values in it are anybody's. Law: what came out is left as it is.
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text.replace("##", r"#\x23")  # starts a command wherever it stands in a line


def say(text: str) -> None:
    """Print one line on standard output."""
    print(one_line(text), flush=True)


def remark(text: str) -> None:
    """Print one line on standard error."""
    print(one_line(text), file=sys.stderr, flush=True)


def write_json(event: str, **facts: Any) -> None:
    """One line of JSON on stderr, with the time since the epoch in seconds."""
    line = json.dumps({"time": round(time.time(), 3), "event": event, **facts})
    print(line, file=sys.stderr, flush=True)


class _Lines(Progress):
    """One line per stage and then one every few seconds."""

    #: Units: seconds between two lines.
    PAUSE = 5.0

    def begin(self, stage: str, total: int) -> None:
        self.stage, self.total, self.done = stage, total, 0
        self.start = self.last = time.monotonic()
        self.say_stage()

    def advance(self, nbytes: int, what: str = "") -> None:
        self.done += nbytes
        now = time.monotonic()
        if now - self.last < self.PAUSE:
            return
        self.last = now
        rate = self.done / (now - self.start)
        self.say(rate, (self.total - self.done) / rate if rate else 0.0, what)

    def note(self, text: str) -> None:
        remark(text)

    def say_stage(self) -> None:
        """A stage begins."""
        remark(f"{self.stage}: {human(self.total)}")

    def say(self, rate: float, left: float, what: str) -> None:
        """How far it is. Units: rate in bytes per second, left in seconds."""
        remark(
            f"{self.stage}: {human(self.done)} of {human(self.total)}, {human(rate)}/s, "
            f"{left:.0f} s left {what}".rstrip()
        )


class _JsonLines(_Lines):
    """The same for programs."""

    def note(self, text: str) -> None:
        write_json("note", text=text)

    def say_stage(self) -> None:
        write_json("begin", stage=self.stage, bytes=self.total)

    def say(self, rate: float, left: float, what: str) -> None:
        write_json(
            "progress", stage=self.stage, done=self.done, bytes=self.total,
            bytes_per_second=round(rate), seconds_left=round(left, 1), what=what,
        )  # fmt: skip


class _Bar(Progress):
    """A bar with bytes, rate and time left."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def begin(self, stage: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bar

        self.end()
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[what]}", markup=False),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(stage, total=total, what="")
        self._bar.start()

    def advance(self, nbytes: int, what: str = "") -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=nbytes, what=one_line(what))

    def note(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(one_line(text), markup=False, highlight=False)
        else:
            remark(text)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
