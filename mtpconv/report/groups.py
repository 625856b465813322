"""Findings in the order in which a person should read them: by rule, not by tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from mtpconv.audit.finding import Finding, Report, Severity
from mtpconv.ranges import compress_names
from mtpconv.report import words
from mtpconv.report.advice import next_step
from mtpconv.report.escape import plain
from mtpconv.tensors import Region

#: A fault of the audit or of a file explains those of the tensors, so it comes first.
_FAMILIES: Final = "AFPTVCEW"
#: Units: characters. No real name comes near.
_MAX_LINE: Final = 1000
_SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Group:
    """All findings of one code and severity, waived ones apart."""

    code: str
    kind: str
    severity: Severity
    waived: bool
    findings: tuple[Finding, ...]

    @property
    def fails(self) -> bool:
        """Whether these findings make the audit fail."""
        return self.severity == "error" and not self.waived

    @property
    def label(self) -> str:
        """`error`, `warning`, `note` or `waived`, in words that need no colour."""
        return "waived" if self.waived else self.severity

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors concerned, each once."""
        found: dict[str, None] = {}
        for one in self.findings:
            found.update(dict.fromkeys(tensors_of(one)))
        return tuple(found)

    @property
    def lines(self) -> list[str]:
        """The tensors as ranges, safe to print; names that look the same are one line."""
        shown = (plain(line, _MAX_LINE) for line in compress_names(self.names))
        return list(dict.fromkeys(shown))

    @property
    def step(self) -> str | None:
        """What to do about it; nothing needs to be done about waived findings."""
        return None if self.waived else next_step(self.kind)

    @property
    def hints(self) -> tuple[str, ...]:
        """What the audit suspects, each once."""
        return tuple(dict.fromkeys(plain(f.hint) for f in self.findings if f.hint))

    @property
    def messages(self) -> tuple[str, ...]:
        """What is wrong, each message once, a tensor's own name left out."""
        return tuple(dict.fromkeys(message_of(f) for f in self.findings))


def tensors_of(finding: Finding) -> tuple[str, ...]:
    """The tensors that one finding is about."""
    if finding.tensor is None:
        return finding.tensors
    return (finding.tensor, *(name for name in finding.tensors if name != finding.tensor))


def message_of(finding: Finding) -> str:
    """The message of a finding; a tensor named at its start is listed elsewhere."""
    message = finding.message
    if finding.tensor is not None and len(finding.tensor) > 1:
        message = message.removeprefix(f"{finding.tensor}: ")
    return plain(message)


def group_findings(findings: Iterable[Finding]) -> list[Group]:
    """Groups with what fails first, causes before consequences."""
    found: dict[tuple[str, str, Severity, bool], list[Finding]] = {}
    for one in findings:
        key = (one.code, one.kind, one.severity, one.waived is not None)
        found.setdefault(key, []).append(one)
    groups = [Group(*key, tuple(members)) for key, members in found.items()]
    return sorted(groups, key=_rank)


def _rank(group: Group) -> tuple[bool, int, int, str, str]:
    severity = _SEVERITIES.index(group.severity)
    family = _FAMILIES.find(group.code[:1])
    return (
        group.waived,
        severity,
        family if family >= 0 else len(_FAMILIES),
        group.code,
        group.kind,
    )


def region_of(report: Report, finding: Finding) -> Region | None:
    """Where a finding belongs; None for the checkpoint as a whole."""
    if finding.region is not None:
        return finding.region
    return next((report.regions[n] for n in tensors_of(finding) if n in report.regions), None)


def extent(report: Report, group: Group) -> str:
    """How much is concerned and where: `791 tensors in MTP depth 0 (all of it)`."""
    names = group.names
    if not names:
        return "" if len(group.findings) == 1 else f"{len(group.findings):,} times"
    places = {report.regions[name] for name in names if name in report.regions}
    places.update(f.region for f in group.findings if f.region is not None)
    if not places:
        return words.count(len(names), "tensor")
    said = f"{words.count(len(names), 'tensor')} in {words.regions(places)}"
    if len(names) > 1 and len(names) == sum(place in places for place in report.regions.values()):
        said += " (all of it)"
    return said
