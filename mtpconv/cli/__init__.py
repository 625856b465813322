"""The command line: the only place that prints, draws progress and decides exit codes."""

from __future__ import annotations

import os
import sys

_INTERRUPTED = 130


def main() -> None:
    """Entry point of the `mtpconv` command; never shows a traceback unless asked."""
    from mtpconv.cli.app import app
    from mtpconv.errors import MtpconvError

    try:
        app()
    except MtpconvError as error:
        if os.environ.get("MTPCONV_TRACEBACK"):
            raise
        print(f"mtpconv: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except SystemExit as stop:
        if stop.code == _INTERRUPTED:
            print("mtpconv: interrupted; the target was left as it was", file=sys.stderr)
        raise
    except Exception as error:  # a bug in mtpconv, not in the input
        if os.environ.get("MTPCONV_TRACEBACK"):
            raise
        print(
            f"mtpconv: internal error: {type(error).__name__}: {error}; "
            "please report it with the output of MTPCONV_TRACEBACK=1",
            file=sys.stderr,
        )
        sys.exit(70)
