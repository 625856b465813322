"""The command line: the only place that prints, draws progress and decides exit codes."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point of the `mtpconv` command; never shows a traceback unless asked."""
    import click

    from mtpconv.cli.app import app
    from mtpconv.errors import MtpconvError

    if os.environ.get("MTPCONV_TRACEBACK"):
        sys.exit(app(standalone_mode=False))
    try:
        code = app(standalone_mode=False)
    except MtpconvError as error:
        print(f"mtpconv: {error}", file=sys.stderr)
        code = error.exit_code
    except click.exceptions.Abort:
        print("mtpconv: interrupted; the target was left as it was", file=sys.stderr)
        code = 130
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except KeyboardInterrupt:
        print("mtpconv: interrupted; the target was left as it was", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except Exception as error:  # a bug in mtpconv, not in the input
        print(
            f"mtpconv: internal error: {type(error).__name__}: {error}; "
            "please report it with the output of MTPCONV_TRACEBACK=1",
            file=sys.stderr,
        )
        code = 70
    sys.exit(code)
