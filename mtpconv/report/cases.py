"""The report as test cases: one for each rule and layer group, whatever the number of tensors.

JUnit and the attestation show the same cases under the same names, so that a CI system can
tell since when a case fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from mtpconv.audit.codes import CODES
from mtpconv.audit.finding import Finding, Report
from mtpconv.report import words
from mtpconv.report.escape import plain
from mtpconv.report.groups import Group, group_findings, region_of
from mtpconv.tensors import Region

Outcome = Literal["passed", "warned", "failed", "error"]

#: Layer group of what concerns no tensor: config, index, files.
CHECKPOINT: Final = "checkpoint"


@dataclass(frozen=True, slots=True)
class Case:
    """One rule in one layer group."""

    layers: str
    rule: str
    outcome: Outcome
    summary: str = ""
    groups: tuple[Group, ...] = ()

    @property
    def name(self) -> str:
        """`mtp.0: T01 missing_tensor`."""
        return f"{self.layers}: {self.rule}"


def test_cases(report: Report) -> list[Case]:
    """All cases, in an order that does not depend on what was found."""
    found: dict[tuple[str, str], list[Finding]] = {}
    for one in report.findings:
        key = (layer_group(region_of(report, one)), f"{one.code} {one.kind}")
        found.setdefault(key, []).append(one)
    totals = _totals(report)
    for kind in report.checked:
        rule = f"{CODES.get(kind, '')} {kind}".strip()
        for layers in _where(kind, totals):
            # A rule that found something elsewhere says nothing about the checkpoint as a whole.
            if layers != CHECKPOINT or not any(rule == seen for _, seen in found):
                found.setdefault((layers, rule), [])
    cases = [_case(layers, rule, findings) for (layers, rule), findings in found.items()]
    cases += [_tensors(layers, states) for layers, states in totals.items()]
    cases.append(_verdict(report))
    return sorted(cases, key=lambda case: (_order(case.layers), case.layers, case.rule))


def layer_group(region: Region | None) -> str:
    """`checkpoint`, `root`, `trunk` or one MTP depth; depths that no model has are one group."""
    if region is None:
        return CHECKPOINT
    if region.kind == "mtp" and region.index >= words.MAX_DEPTHS:
        return f"mtp.{words.MAX_DEPTHS}+"
    return str(region) if region.kind == "mtp" else plain(region.kind)


def _order(layers: str) -> tuple[int, str]:
    known = (CHECKPOINT, "root", "trunk", "mtp")
    first = layers.partition(".")[0]
    return (known.index(first) if first in known else len(known), first)


def _where(kind: str, totals: dict[str, dict[str, int]]) -> list[str]:
    """The layer groups that a rule without a finding there was applied to."""
    if CODES.get(kind, "").startswith("T") and totals:
        return list(totals)
    return [CHECKPOINT]


def _totals(report: Report) -> dict[str, dict[str, int]]:
    totals: dict[str, dict[str, int]] = {}
    for name, state in report.states.items():
        states = totals.setdefault(layer_group(report.regions.get(name)), {})
        states[state] = states.get(state, 0) + 1
    return totals


def _case(layers: str, rule: str, findings: list[Finding]) -> Case:
    groups = tuple(group_findings(findings))
    failing = [group for group in groups if group.fails]
    outcome: Outcome = "passed"
    if failing:
        outcome = "failed"
    elif any(group.severity == "warning" and not group.waived for group in groups):
        outcome = "warned"
    said = ""
    if groups:
        first = (failing or groups)[0]
        number = len(first.names) or len(first.findings)
        said = first.messages[0] if number == 1 else f"{number:,} times: {first.messages[0]}"
    return Case(layers, plain(rule), outcome, said, groups)


def _tensors(layers: str, states: dict[str, int]) -> Case:
    """What the tensors of a group are; it fails by the rules, never by itself."""
    order = sorted(states.items(), key=lambda entry: (-entry[1], entry[0]))
    said = ", ".join(f"{number:,} {plain(state)}" for state, number in order)
    return Case(layers, "tensors", "passed", said)


def _verdict(report: Report) -> Case:
    outcome: Outcome = "error" if report.verdict == "error" else "passed"
    said = f"MTP {words.mtp(report.mtp)}; {words.compared(report.compared, report.tier)}"
    return Case(CHECKPOINT, "audit", outcome, said)
