"""Conversions as processes that can be killed, without the half second that Python takes to start.

One process has everything imported and forks a child for each conversion.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]


class Nursery:
    """Starts conversions and kills them."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.convert.nursery"], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._answer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def run(self, name: str, *paths: Path, kill_after: float | None = None, **options: Any) -> int:
        """The exit status of a conversion: 0, or the negative number of what killed it."""
        assert self._process.stdin is not None
        order = {"name": name, "paths": [str(p) for p in paths], "options": options}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        pid = self._answer()
        if kill_after is not None:
            time.sleep(kill_after)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it was faster
        return self._answer()

    def _answer(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


def serve() -> None:
    from mtpconv.convert import hf2mcore, mcore2hf, record_files

    setattr(record_files, "FILE_LIMIT", 2000)  # noqa: B010 several files of a small model
    todo: dict[str, Callable[..., Any]] = {"hf2mcore": hf2mcore, "mcore2hf": mcore2hf}
    _say(0)
    for line in sys.stdin:
        order = json.loads(line)
        # The child may be gone before it can be killed, but its number is not given anew yet.
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                todo[order["name"]](*map(Path, order["paths"]), **order["options"])
                status = 0
            finally:
                os._exit(status)
        _say(pid)
        _, ended = os.waitpid(pid, 0)
        _say(os.waitstatus_to_exitcode(ended))


def _say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve()
