"""Reports: what an audit found, for people, programs and CI systems.

Each format is a pure function of the report: same report, same bytes.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from mtpconv.audit.finding import Report
from mtpconv.errors import UsageError, WriteError
from mtpconv.report import github, html_page, json_file, junit, markdown, sarif
from mtpconv.report.escape import plain


def _text(report: Report) -> str:
    """The one that needs rich, which nobody waits for who asked for another."""
    from mtpconv.report import text

    return text.render(report)


FORMATS: Final[Mapping[str, Callable[[Report], str]]] = {
    "text": _text,
    "json": json_file.render,
    "markdown": markdown.render,
    "junit": junit.render,
    "sarif": sarif.render,
    "html": html_page.render,
    "github": github.render,
}


def parse_targets(specs: Iterable[str]) -> list[tuple[str, Path]]:
    """Formats and files of `--report FORMAT=FILE`; call it before the audit, which may take long.

    Raises: UsageError for an unknown format, a file named twice, or a file that cannot be.
    """
    targets: list[tuple[str, Path]] = []
    for spec in specs:
        name, equals, file = spec.partition("=")
        if name not in FORMATS or not equals or not file:
            known = ", ".join(FORMATS)
            raise UsageError(f"--report {plain(spec)}: must be FORMAT=FILE, with FORMAT of {known}")
        path = Path(file)
        if path.is_dir() or not path.parent.is_dir():
            what = "is a folder" if path.is_dir() else f"{plain(str(path.parent))} is no folder"
            raise UsageError(f"--report {plain(spec)}: {what}; name a file in an existing folder")
        if any(path.absolute() == other.absolute() for _, other in targets):
            raise UsageError(f"--report {plain(spec)}: the file is named twice")
        targets.append((name, path))
    return targets


def write_reports(report: Report, specs: Iterable[str]) -> None:
    """Write each `FORMAT=FILE`; a file appears whole or not at all.

    Raises: UsageError as `parse_targets`; WriteError if a file cannot be written.
    """
    for name, path in parse_targets(specs):
        write_file(path, FORMATS[name](report))


def write_file(path: Path, content: str) -> None:
    """Write one report or attestation whole or not at all.

    Raises: WriteError if the file cannot be written.
    """
    beside: str | None = None
    try:
        if path.exists() and not stat.S_ISREG(path.lstat().st_mode):
            # /dev/stdout, a pipe or a link: writing through it, never replacing it.
            path.write_text(content, "utf-8", "backslashreplace")
            return
        number, beside = tempfile.mkstemp(prefix=f".{path.name[:50]}.", dir=path.parent)
        with os.fdopen(number, "wb") as file:
            # Names of files need not be UTF-8.
            file.write(content.encode(errors="backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(beside).chmod(0o666 & ~umask)  # mkstemp's 0600 would hide the report from others
        Path(beside).replace(path)
    except BaseException as error:
        if beside is not None:
            Path(beside).unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        why = error.strerror or str(error)
        raise WriteError(f"{plain(str(path))}: the report cannot be written: {why}") from error
