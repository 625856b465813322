"""The report as JUnit XML, for the test tab of a CI system.

One test case for each rule and layer group. Warnings and waived findings do not fail a case;
they are in its output. The file holds no time and no host: the same report, the same bytes.
Source: Jenkins' junit-10.xsd, as pytest 9.0 ships it, read 2026-11-29.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import mtpconv
from mtpconv.audit.finding import Report
from mtpconv.report import words
from mtpconv.report.cases import Case, test_cases
from mtpconv.report.escape import plain, xml
from mtpconv.report.groups import Group

#: Lines of names in one case before the rest is only counted.
_MAX_NAMES: Final = 200
_MAX_MESSAGES: Final = 20


def render(report: Report) -> str:
    """The report as one JUnit document."""
    suites: dict[str, list[Case]] = {}
    for case in test_cases(report):
        suites.setdefault(case.layers, []).append(case)
    every = [case for cases in suites.values() for case in cases]
    lines = ['<?xml version="1.0" encoding="UTF-8"?>']
    lines.append(f'<testsuites name="mtpconv audit" {_counts(every)}>')
    for layers, cases in suites.items():
        lines.append(f'<testsuite name="{_attribute(layers)}" {_counts(cases)}>')
        lines += _properties(report)
        for case in cases:
            lines += _case(case)
        lines.append("</testsuite>")
    lines.append("</testsuites>")
    return "\n".join(lines) + "\n"


def _attribute(text: str) -> str:
    return xml(plain(text, 1000), attribute=True)


def _counts(cases: list[Case]) -> str:
    failures = sum(case.outcome == "failed" for case in cases)
    errors = sum(case.outcome == "error" for case in cases)
    return f'tests="{len(cases)}" failures="{failures}" errors="{errors}" time="0"'


def _properties(report: Report) -> Iterator[str]:
    said = {
        "mtpconv": mtpconv.__version__,
        "verdict": report.verdict,
        "tier": report.tier,
        "mtp": words.mtp(report.mtp),
        "after": words.side(report.after),
    }
    if report.before is not None:
        said["before"] = words.side(report.before)
    if report.switches:
        said["allowed"] = ", ".join(report.switches)
    yield "<properties>"
    for name, value in said.items():
        yield f'<property name="{name}" value="{_attribute(value)}"/>'
    yield "</properties>"


def _case(case: Case) -> Iterator[str]:
    group = f"mtpconv.{case.layers}"
    yield f'<testcase classname="{_attribute(group)}" name="{_attribute(case.rule)}" time="0">'
    tag = {"failed": "failure", "error": "error"}.get(case.outcome)
    text = "\n".join(_text(case))
    if tag is None and text:
        yield f"<system-out>{xml(text)}</system-out>"
    elif tag is not None:
        attributes = f'type="{_attribute(case.rule)}" message="{_attribute(case.summary)}"'
        yield f"<{tag} {attributes}>{xml(text)}</{tag}>"
    yield "</testcase>"


def _text(case: Case) -> Iterator[str]:
    if not case.groups and case.summary:
        yield case.summary
    for group in case.groups:
        yield from _group(group)


def _group(group: Group) -> Iterator[str]:
    yield f"{group.label} {plain(group.code)} {plain(group.kind)}"
    yield from (f"  {message}" for message in group.messages[:_MAX_MESSAGES])
    if len(group.messages) > _MAX_MESSAGES:
        yield f"  and {len(group.messages) - _MAX_MESSAGES:,} more like it"
    names = group.lines
    yield from (f"    {name}" for name in names[:_MAX_NAMES])
    if len(names) > _MAX_NAMES:
        yield f"    and {words.count(len(names) - _MAX_NAMES, 'more line')}"
    yield from (f"  hint: {hint}" for hint in group.hints[:3])
    if group.step is not None:
        yield f"  do: {group.step}"
    for reason in list(dict.fromkeys(f.waived for f in group.findings if f.waived))[:3]:
        yield f"  waived: {plain(reason)}"
