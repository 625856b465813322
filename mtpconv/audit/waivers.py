"""Findings that someone accepted: by code and tensor pattern, with a reason and an expiry date."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

from mtpconv.audit.codes import CODES, finding
from mtpconv.audit.finding import Finding
from mtpconv.errors import UsageError

_FIELDS = frozenset({"code", "tensor", "reason", "expires"})
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Waiver:
    """One accepted finding, or a family of them by a pattern with `*` and `?`."""

    code: str
    tensor: str
    reason: str
    expires: date
    where: str

    def covers(self, one: Finding) -> bool:
        """Whether this waiver is about the finding."""
        subject = one.tensor or one.field or one.prefix or one.file or ""
        return one.code == self.code and fnmatchcase(subject, self.tensor)


def read_waivers(path: Path) -> tuple[Waiver, ...]:
    """Reads a waivers file: `[[waiver]]` tables with code, tensor, reason and expires.

    Raises: UsageError if the file is not there, no TOML, or a waiver is incomplete.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise UsageError(f"{path}: is larger than {_MAX_BYTES} bytes")
        value = tomllib.loads(text.decode("utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is no TOML: {error}") from error
    entries = value.get("waiver", [])
    if value.keys() - {"waiver"} or not isinstance(entries, list):
        raise UsageError(f"{path}: must hold [[waiver]] tables and nothing else")
    return tuple(_waiver(entry, f"{path}: waiver {i}") for i, entry in enumerate(entries, 1))


def _waiver(entry: Any, where: str) -> Waiver:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        _refuse(where, f"needs exactly {', '.join(sorted(_FIELDS))}")
    code, tensor, reason, expires = (entry[k] for k in ("code", "tensor", "reason", "expires"))
    if code not in CODES.values():
        _refuse(where, f"there is no finding code {code!r}; docs/findings.md lists them")
    if code.startswith(("A", "W")):
        _refuse(where, f"{code} is about the audit itself and cannot be waived")
    if not isinstance(tensor, str) or not tensor:
        _refuse(where, "tensor must be a pattern of names")
    if not isinstance(reason, str) or not reason.strip():
        _refuse(where, "reason must say why the finding is accepted")
    if not isinstance(expires, date) or isinstance(expires, datetime):
        _refuse(where, "expires must be a date such as 2027-01-31, without quotes")
    return Waiver(code, tensor, reason.strip(), expires, where)


def _refuse(where: str, what: str) -> NoReturn:
    raise UsageError(f"{where}: {what}")


def apply_waivers(
    findings: Iterable[Finding], waivers: Sequence[Waiver], today: date | None
) -> Iterator[Finding]:
    """The findings with accepted ones marked, then one finding per waiver that is no use.

    A waiver is good through its last day. Notes need no waiver.
    """
    live = [w for w in waivers if today is None or today <= w.expires]
    used: set[str] = set()
    for one in findings:
        waiver = next((w for w in live if one.severity != "note" and w.covers(one)), None)
        if waiver is not None:
            used.add(waiver.where)
            one = replace(one, waived=waiver.reason)
        yield one
    for waiver in waivers:
        if waiver not in live:
            yield finding(
                "waiver_expired", "error",
                f"{waiver.where}: {waiver.code} {waiver.tensor} expired on {waiver.expires};"
                " delete it or decide again",
            )  # fmt: skip
        elif waiver.where not in used:
            yield finding(
                "waiver_unused", "warning",
                f"{waiver.where}: {waiver.code} {waiver.tensor} matches no finding; delete it",
            )  # fmt: skip
