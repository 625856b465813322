"""What an audit says: findings, and the report that collects them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mtpconv.tensors import Region

Severity = Literal["error", "warning", "note"]
Verdict = Literal["pass", "fail", "error"]
Tier = Literal["none", "L0", "L1", "L2"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference or fault, with a stable code and a kind that says the same in words."""

    code: str
    kind: str
    severity: Severity
    message: str
    tensor: str | None = None
    file: str | None = None
    field: str | None = None
    layer: int | None = None
    prefix: str | None = None
    region: Region | None = None
    before: Any = None
    after: Any = None
    hint: str | None = None
    tensors: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    waived: str | None = None


@dataclass(frozen=True, slots=True)
class MtpDepth:
    """State of one MTP depth: preserved, changed, absent, dropped, partial, zero, nan, ..."""

    depth: int
    status: str
    tensors: int
    expected: int | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class MtpStatus:
    """State of the MTP module as a whole; printed even when all is green."""

    status: str
    promised: int | None
    depths: tuple[MtpDepth, ...] = ()


@dataclass(frozen=True, slots=True)
class Side:
    """One side of an audit, as the report names it."""

    path: str
    format: str
    tensors: int
    nbytes: int
    dialect: str | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """What was really looked at; an audit with nothing here never passes."""

    tensors: int = 0
    nbytes: int = 0
    not_read: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one audit: a pure value, the same for the same inputs."""

    verdict: Verdict
    tier: Tier
    mtp: MtpStatus
    findings: tuple[Finding, ...]
    compared: Compared
    before: Side | None
    after: Side
    model_type: str | None = None
    switches: tuple[str, ...] = ()
    #: kinds of findings that were looked for, so that a report can say what was found right
    checked: tuple[str, ...] = ()
    #: state of every tensor seen on either side: identical, changed, missing, extra, ...
    states: Mapping[str, str] = field(default_factory=dict)
    regions: Mapping[str, Region] = field(default_factory=dict)
