"""What GitHub Actions shows: annotations from the log, and a page for the step.

Source: GitHub docs, "Workflow commands for GitHub Actions", read 2026-11-29: 10 annotations
of one level for each step, a step summary of at most 1 MiB.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Final

from mtpconv.audit.finding import Report
from mtpconv.errors import WriteError
from mtpconv.report import words
from mtpconv.report.escape import command_data, command_property, plain
from mtpconv.report.groups import Group, extent, group_findings
from mtpconv.report.markdown import render as render_markdown

MAX_ANNOTATIONS: Final = 10
#: Units: bytes. GitHub drops a summary of 1 MiB or more whole.
MAX_SUMMARY: Final = (1 << 20) - 1

_LEVELS: Final = {"error": "error", "warning": "warning", "note": "notice", "waived": "notice"}


def active(environment: Mapping[str, str]) -> bool:
    """Whether this runs in GitHub Actions, where both outputs are wanted."""
    return environment.get("GITHUB_ACTIONS") == "true"


def render(report: Report) -> str:
    """At most 10 annotations, one for each rule, as workflow commands to print to the log."""
    groups = group_findings(report.findings)
    if not groups and report.verdict == "pass":
        said = f"{words.headline(report)}; MTP {words.mtp(report.mtp)}"
        return f"::notice title=mtpconv audit passed::{command_data(plain(said))}\n"
    shown = groups if len(groups) <= MAX_ANNOTATIONS else groups[: MAX_ANNOTATIONS - 1]
    lines = [_annotation(report, group) for group in shown]
    if len(groups) > len(shown):
        rest = groups[len(shown) :]
        kinds = ", ".join(f"{group.code} {len(group.findings):,}" for group in rest[:20])
        said = plain(f"{len(rest)} more rules found something: {kinds}")
        level = "error" if any(group.fails for group in rest) else "notice"
        lines.append(f"::{level} title=mtpconv audit::{command_data(said)}")
    return "\n".join(lines) + "\n"


def _annotation(report: Report, group: Group) -> str:
    first = group.findings[0]
    properties = {"title": plain(f"{group.code} {group.kind}", 200)}
    if first.file is not None:
        path = PurePath(report.after.path) / first.file
        properties = {"file": plain(str(path), 500), **properties}
    listed = ",".join(f"{name}={command_property(text)}" for name, text in properties.items())
    lines = [group.messages[0]]
    if group.names:
        lines.append(extent(report, group))
        lines += group.lines[:5]
        if len(group.lines) > 5:
            lines.append(f"and {words.count(len(group.lines) - 5, 'more line')}")
    lines += [f"hint: {hint}" for hint in group.hints[:1]]
    if group.step is not None:
        lines.append(f"do: {group.step}")
    return f"::{_LEVELS[group.label]} {listed}::{command_data(chr(10).join(lines))}"


def write_summary(report: Report, environment: Mapping[str, str] = os.environ) -> None:
    """Append the Markdown report to the page of this step, if there is one.

    Raises: WriteError if the file cannot be written.
    """
    name = environment.get("GITHUB_STEP_SUMMARY")
    if not name:
        return
    path = Path(name)
    try:
        there = path.stat().st_size if path.exists() else 0
        text = render_markdown(report, limit=max(MAX_SUMMARY - there, 0)).encode()
        if there + len(text) <= MAX_SUMMARY:
            with path.open("ab") as file:
                file.write(text)
    except OSError as error:
        raise WriteError(
            f"{plain(str(path))}: the step summary cannot be written: {error.strerror}"
        ) from error
