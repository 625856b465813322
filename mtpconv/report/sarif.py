"""The report as SARIF 2.1.0, for code scanning: findings at lines of config.json and the index.

One result for each rule, file, field and layer: code scanning shows 5,000 results at most.
Source: OASIS SARIF 2.1.0 errata 01, sections 3.11 and 3.27; GitHub docs, "SARIF support for
code scanning", read 2026-11-29.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import mtpconv
from mtpconv.audit.codes import CODES
from mtpconv.audit.finding import Finding, Report
from mtpconv.report import words
from mtpconv.report.escape import plain
from mtpconv.report.groups import Group, group_findings, region_of
from mtpconv.report.locate import Lines, read_lines
from mtpconv.report.values import plain_json
from mtpconv.store.hf_index import find_index

_SCHEMA: Final = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_MAX_RESULTS: Final = 5000
#: Lines of names in one result.
_MAX_NAMES: Final = 50
_CONFIG: Final = "config.json"
_EXIT_CODES: Final = {"pass": 0, "fail": 1, "error": 3}


def render(report: Report) -> str:
    """The report as one SARIF log; reads config and index of `after` for line numbers."""
    places = _Places(report)
    results: list[dict[str, Any]] = []
    left_out = 0
    for group in group_findings(report.findings):
        for part, place in _parts(report, group, places):
            if len(results) < _MAX_RESULTS:
                results.append(_result(report, part, place))
            else:
                left_out += 1
    run = {
        "tool": {"driver": _driver(report)},
        "invocations": [_invocation(report, left_out)],
        "columnKind": "unicodeCodePoints",
        "results": results,
        "properties": {
            "verdict": report.verdict,
            "tier": report.tier,
            "mtp": words.mtp(report.mtp),
            "compared": words.compared(report.compared, report.tier),
            "switches": list(report.switches),
        },
    }
    log = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=1, ensure_ascii=True, allow_nan=False) + "\n"


class _Places:
    """Where in the files of `after` a finding belongs."""

    def __init__(self, report: Report) -> None:
        self._folder = Path(report.after.path)
        self._prefix = _uri(self._folder)
        self._lines: dict[str, Lines] = {}
        self.index = self._find_index()

    def _find_index(self) -> str | None:
        try:
            return find_index(self._folder)[0]
        except (OSError, ValueError):  # no folder, no permission, a NUL in its name
            return None

    def lines(self, file: str) -> Lines:
        """Lines of the keys of config.json or the index, read once."""
        if file not in (_CONFIG, self.index):
            return {}
        if file not in self._lines:
            self._lines[file] = read_lines(self._folder / file)
        return self._lines[file]

    def of(self, finding: Finding) -> tuple[str, int | None]:
        """File below the folder, and line."""
        if finding.field is not None and finding.file in (None, _CONFIG):
            return _CONFIG, self.lines(_CONFIG).get(finding.field, 1)
        if finding.file is not None and finding.file != self.index:
            return finding.file, 1 if finding.file == _CONFIG else None
        if self.index is None:
            return _CONFIG, 1
        lines = self.lines(self.index)
        map_line = lines.get("weight_map", 1)
        return self.index, lines.get(f"weight_map.{finding.tensor}", map_line)

    def uri(self, file: str) -> str:
        """URI of a file of the checkpoint: relative if the user named a relative folder."""
        return f"{self._prefix}/{_quote(file)}"


def _uri(folder: Path) -> str:
    path = _quote(folder.as_posix())
    return f"file://{path}" if folder.is_absolute() else path


def _quote(text: str) -> str:
    return quote(text, errors="surrogatepass")


def _parts(
    report: Report, group: Group, places: _Places
) -> Iterator[tuple[Group, tuple[str, int | None]]]:
    """A rule's findings by file, field and layer, each with the place of the first."""
    found: dict[tuple[str, str | None, str], list[Finding]] = {}
    first: dict[tuple[str, str | None, str], tuple[str, int | None]] = {}
    for one in group.findings:
        place = places.of(one)
        region = region_of(report, one)
        key = (places.uri(place[0]), one.field, "" if region is None else str(region))
        found.setdefault(key, []).append(one)
        first.setdefault(key, (key[0], place[1]))
    for key, findings in found.items():
        part = Group(group.code, group.kind, group.severity, group.waived, tuple(findings))
        yield part, first[key]


def _result(report: Report, group: Group, place: tuple[str, int | None]) -> dict[str, Any]:
    uri, line = place
    first = group.findings[0]
    region = region_of(report, first)
    physical: dict[str, Any] = {"artifactLocation": {"uri": uri}}
    if line is not None:
        physical["region"] = {"startLine": line}
    location: dict[str, Any] = {"physicalLocation": physical}
    names = group.lines[:_MAX_NAMES]
    if names:
        location["logicalLocations"] = [
            {"fullyQualifiedName": name, "kind": "tensor"} for name in names
        ]
    said = [group.messages[0]]
    if names:
        where = "" if region is None else f" in {words.region(region)}"
        said.append(words.count(len(group.names), "tensor") + where)
    said += group.hints[:1]
    if group.step is not None:
        said.append(group.step)
    identity = [group.code, group.kind, uri, first.field, None if region is None else str(region)]
    result: dict[str, Any] = {
        "ruleId": _rule_id(group.code),
        "level": group.severity,
        "message": {"text": _message("; ".join(said))},
        "locations": [location],
        "occurrenceCount": len(group.findings),
        "partialFingerprints": {
            "mtpconv/v1": hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
        },
        "properties": {
            "kind": group.kind,
            "tensors": len(group.names),
            "before": plain_json(first.before),
            "after": plain_json(first.after),
        },
    }
    if group.waived:
        reasons = dict.fromkeys(f.waived for f in group.findings if f.waived)
        result["suppressions"] = [
            {"kind": "external", "status": "accepted", "justification": plain(reason)}
            for reason in list(reasons)[:10]
        ]
    return result


def _message(text: str) -> str:
    """Plain text as a SARIF message string: no placeholder, no link (sections 3.11.5, 3.11.6)."""
    text = text.replace("\\", "\\\\").replace("[", r"\[").replace("]", r"\]")
    return text.replace("{", "{{").replace("}", "}}")


def _rule_id(code: str) -> str:
    return plain(code, 100) or "unknown"


def _driver(report: Report) -> dict[str, Any]:
    kinds = {_rule_id(CODES[kind]): kind for kind in report.checked if kind in CODES}
    kinds.update((_rule_id(one.code), one.kind) for one in report.findings)
    rules = [
        {
            "id": code,
            "name": plain(kind),
            "shortDescription": {"text": _message(plain(kind).replace("_", " ")) or code},
            "help": {"text": f"docs/findings.md explains {_message(code)}."},
        }
        for code, kind in sorted(kinds.items())
    ]
    return {
        "name": "mtpconv",
        "version": mtpconv.__version__,
        "semanticVersion": mtpconv.__version__,
        "rules": rules,
    }


def _invocation(report: Report, left_out: int) -> dict[str, Any]:
    invocation: dict[str, Any] = {
        "executionSuccessful": report.verdict != "error",
        "exitCode": _EXIT_CODES[report.verdict],
    }
    if left_out:
        text = f"{left_out} more results are not listed; the JSON report has every finding"
        invocation["toolExecutionNotifications"] = [{"level": "warning", "message": {"text": text}}]
    return invocation
