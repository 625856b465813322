"""The command line: the only place that prints, draws progress and decides exit codes."""

from __future__ import annotations

import os
import sys

_INTERRUPTED = 130


def main() -> None:
    """Entry point of the `mtpconv` command; never shows a traceback unless asked."""
    try:
        from mtpconv.cli.signals import Stopped, stoppable
        from mtpconv.cli.streams import guard_streams

        with stoppable() as stop:
            left: list[str] = []
            try:
                guard_streams()
                code = _run()
            except (Stopped, KeyboardInterrupt) as error:
                code = _INTERRUPTED
                left = getattr(error, "__notes__", [])
            if code == _INTERRUPTED:
                code = 128 + stop.number
                _failed("; ".join(["interrupted", "no half-written target was left", *left]), code)
    except BaseException as error:
        if isinstance(error, Exception | SystemExit):
            raise
        code = _INTERRUPTED  # before there was anything to clean up, or after
    sys.exit(code)


def _run() -> int:
    """The command and everything it printed; gives the exit code."""
    from mtpconv.errors import WriteError

    code = _command()
    try:
        sys.stdout.flush()
    except WriteError as error:
        return _failed(str(error), error.exit_code)
    return code


def _command() -> int:
    from mtpconv.errors import MtpconvError

    try:
        from mtpconv.cli.app import app

        app()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except Exception as error:
        if os.environ.get("MTPCONV_TRACEBACK"):
            raise
        if isinstance(error, MtpconvError):
            return _failed(str(error), error.exit_code)
        if isinstance(error, OSError):  # disk and permissions where nothing expects them
            where = f"{error.filename}: " if error.filename is not None else ""
            return _failed(f"{where}{error.strerror or error}", 3)
        if isinstance(error, MemoryError):
            return _failed(
                "there is not enough memory, or a limit on it (ulimit, cgroup); use fewer --jobs "
                "or raise it", 3,
            )  # fmt: skip
        return _failed(  # a bug in mtpconv, not in the input
            f"internal error: {type(error).__name__}: {error}; "
            "please report it with the output of MTPCONV_TRACEBACK=1",
            70,
        )
    return 0


def _failed(text: str, code: int) -> int:
    from mtpconv.cli.terminal import one_line

    print(f"mtpconv: {one_line(text)}", file=sys.stderr)
    return code
