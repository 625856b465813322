"""What a conversion did, as a value for reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class NamedStep:
    """Something done to tensors beyond moving bytes, and what can be claimed of the result.

    `level` is `bytes`, `values` or `structure`: the same bytes, the same numbers by a stated
    rule, or the same names, dtypes and shapes.
    """

    name: str
    level: str
    tensors: int
    what: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """Counts and remarks of one finished (or, with `dry_run`, only planned) conversion."""

    direction: str
    source: Path | str
    target: Path | str
    model_type: str
    tensors: int
    nbytes: int
    mtp_depths: int
    mtp_tensors: int
    layout: str
    disk: int
    memory: int
    seconds: float = 0.0
    verified: bool = False
    dry_run: bool = False
    #: tensors whose digest equals the manifest that travelled along, None without one
    unchanged: int | None = None
    #: those of MTP among them
    unchanged_mtp: int | None = None
    #: tensors in another form than the manifest knows, which says nothing about them
    not_compared: int = 0
    #: those of MTP among them
    not_compared_mtp: int = 0
    #: names of tensors with another digest, in ranges
    changed: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    #: finished files of an earlier run that `resume` took over
    taken_over: int = 0
    #: files of the HF folder that did not travel
    left_behind: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    steps: tuple[NamedStep, ...] = ()
    files: tuple[str, ...] = field(default_factory=tuple)
