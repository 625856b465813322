"""Ctrl-C, and the signals by which launchers, schedulers and terminals end a job."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Units: seconds. They come in twos and threes, and cleaning up must not be interrupted.
_GRACE = 10.0


class Stopped(BaseException):
    """A signal came.

    No KeyboardInterrupt: Python ends itself by SIGINT if one has passed through an `exec`,
    such as those of dataclasses during start-up, even when it was caught.
    Source: CPython 3.11 Python/pythonrun.c, unhandled_keyboard_interrupt.
    """


class Stop:
    """Which signal came; 128 more is the exit code that shells know."""

    def __init__(self) -> None:
        self.number = int(signal.SIGINT)
        self._at = float("-inf")

    def __call__(self, number: int, _: FrameType | None) -> None:
        """The handler: the first one unwinds the stack, so that every cleanup runs."""
        now = time.monotonic()
        if now - self._at < _GRACE:
            return
        self._at, self.number = now, number
        raise Stopped


@contextlib.contextmanager
def stoppable() -> Iterator[Stop]:
    """All of these signals unwind the stack meanwhile; those ignored (nohup) stay ignored."""
    stop = Stop()
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in _ENDS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, stop)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
