"""Does the gate still close? Every kind of fault is put into a copy, and the audit must turn red.

The copy is small: a small checkpoint is copied as it is, of a large one a twin is made with the
same names, layers and config and small widths. Nothing is written outside the given folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpconv.audit.audit import audit
from mtpconv.audit.finding import Report
from mtpconv.audit.sides import open_sides
from mtpconv.convert import hf2mcore
from mtpconv.errors import MtpconvError, RefusedError
from mtpconv.geometry import MTP_FIELDS, text_config
from mtpconv.mapping.plan import make_plan
from mtpconv.mapping.table_reader import find_table
from mtpconv.selftest.copies import Copy, NotApplicable, read_copy, write_copy
from mtpconv.selftest.faults import FAULTS
from mtpconv.store.hf import open_hf
from mtpconv.synth import shrink, synth

__all__ = ["COPY_LIMIT", "FAULTS", "Trial", "run_selftest"]

#: Units: bytes. Larger checkpoints get a twin.
COPY_LIMIT = 64 << 20


@dataclass(frozen=True, slots=True)
class Trial:
    """What the audit said about one fault; `red` is what must be true."""

    fault: str
    red: bool
    found: tuple[str, ...]
    skipped: str | None = None


def run_selftest(folder: Path | None, place: Path, config: Mapping[str, Any]) -> Iterator[Trial]:
    """Try the undamaged copy, which must be green, and then every fault.

    `folder` is the user's checkpoint, None for the built-in one made from `config`.
    """
    original = _original(folder, place, config)
    clean = write_copy(read_copy(original), place / "clean")
    control = audit(*_sides(original, clean))
    yield Trial("(no fault: must be green)", control.verdict == "pass", _kinds(control))
    crossing = _Crossing(original, clean, place / "mcore")
    for number, fault in enumerate(FAULTS):
        copy = read_copy(original)
        target = place / f"fault{number}"
        try:
            fault.damage(copy)
            write_copy(copy, target)
            if fault.side == "cross":
                target = crossing.convert(target, copy, place / f"mcore{number}")
            found = _kinds(audit(*_sides(original, target)))
        except NotApplicable as why:
            yield Trial(fault.name, True, (), str(why))
        except MtpconvError as error:
            # The others are tried all the same; this one did not get as far as the audit.
            yield Trial(fault.name, False, (f"{type(error).__name__}: {error}",))
        else:
            yield Trial(fault.name, bool(fault.kinds & set(found)), found)


@dataclass
class _Crossing:
    """Conversions to Megatron; what does not even convert undamaged has no such faults."""

    original: Path
    clean: Path
    place: Path
    #: None until it was tried; empty if the undamaged copy converts and its audit is green
    why_not: str | None = None

    def convert(self, damaged: Path, copy: Copy, target: Path) -> Path:
        """The damaged copy as a Megatron checkpoint. Raises: NotApplicable, MtpconvError."""
        if self.why_not is None:
            self.why_not = self._try_clean()
        if self.why_not:
            raise NotApplicable(self.why_not)
        dropped = _promises(_read_config(self.original)) and not _promises(copy.config)
        hf2mcore(damaged, target, drop_mtp=dropped)
        return target

    def _try_clean(self) -> str:
        try:
            hf2mcore(self.clean, self.place)
        except MtpconvError as error:
            return str(error).removeprefix(f"{self.clean}: ")
        wrong = _kinds(audit(*_sides(self.original, self.place)))
        if wrong:
            raise RefusedError(f"undamaged, its Megatron checkpoint is red: {', '.join(wrong)}")
        return ""


def _sides(before: Path, after: Path) -> tuple[Any, Any]:
    sides = open_sides(before, after)
    return sides.before, sides.after


def _kinds(report: Report) -> tuple[str, ...]:
    return tuple(sorted({f.kind for f in report.findings if f.severity == "error"}))


def _original(folder: Path | None, place: Path, config: Mapping[str, Any]) -> Path:
    if folder is not None:
        hf = open_hf(folder, compare_duplicates=False)
        if sum(s.nbytes for s in hf.tensors.values()) <= COPY_LIMIT:
            return folder
        config = hf.config or {}
    small = shrink(config)
    small.pop("quantization_config", None)
    plan = make_plan(small, find_table(str(small.get("model_type"))))
    synth(plan, place / "original", shards=3)
    return place / "original"


def _read_config(folder: Path) -> Mapping[str, Any]:
    return open_hf(folder, compare_duplicates=False).config or {}


def _promises(config: Mapping[str, Any]) -> bool:
    return any(text_config(config).get(f) for f in MTP_FIELDS)
