"""From findings to a verdict. "Nothing compared" and "tier not reached" are never a pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mtpconv.audit.codes import finding
from mtpconv.audit.finding import Compared, Finding, MtpStatus, Report, Tier, Verdict
from mtpconv.audit.options import Options
from mtpconv.audit.subject import Subject
from mtpconv.audit.waivers import apply_waivers
from mtpconv.ranges import compress
from mtpconv.tensors import Region

_TIERS: tuple[Tier, ...] = ("none", "L0", "L1", "L2")
_SEVERITIES = ("error", "warning", "note")
_UNREADABLE = ("unreadable_file", "index_missing_file")


@dataclass(frozen=True, slots=True)
class Looked:
    """What an audit looked at and how far it got."""

    before: Subject | None
    after: Subject
    tier: Tier
    compared: Compared
    mtp: MtpStatus
    states: Mapping[str, str]
    regions: Mapping[str, Region]
    #: neither side had anything to compare
    nothing: bool
    #: kinds of findings that were looked for
    checked: tuple[str, ...]


def make_report(
    looked: Looked,
    findings: Iterable[Finding],
    reference: Iterable[Finding],
    options: Options,
) -> Report:
    """The report; `reference` are findings about the reference, which say nothing of `after`."""
    own = sorted(apply_waivers(findings, options.waivers, options.today), key=_order)
    about_reference = sorted(reference, key=_order)
    failed = any(_counts(f) for f in own)
    explained = failed or any(_counts(f) for f in about_reference)
    audit = [*_audit_findings(looked, options, explained), *_waived_unread(looked, own)]
    verdict: Verdict = "pass"
    if failed:
        verdict = "fail"
    elif any(_counts(f) for f in (*about_reference, *audit)):
        verdict = "error"
    after, before = looked.after, looked.before
    model_type = after.model_type or (before.model_type if before else None)
    return Report(
        verdict=verdict,
        tier=looked.tier,
        mtp=looked.mtp,
        findings=(*audit, *about_reference, *own),
        compared=looked.compared,
        before=before.side() if before else None,
        after=after.side(),
        model_type=model_type,
        switches=tuple(sorted(options.allow)),
        checked=looked.checked,
        states=looked.states,
        regions=looked.regions,
    )


def _counts(one: Finding) -> bool:
    return one.severity == "error" and one.waived is None


def _order(one: Finding) -> tuple[int, str, str, str]:
    subject = one.tensor or one.field or one.prefix or one.file or ""
    return _SEVERITIES.index(one.severity), one.code, subject, one.message


def _audit_findings(looked: Looked, options: Options, explained: bool) -> Iterator[Finding]:
    if looked.nothing and not explained:
        yield finding(
            "nothing_compared", "error",
            f"{looked.after.path}: nothing could be compared; name two checkpoints of one model",
        )  # fmt: skip
    skipped = looked.compared.not_read
    if skipped:
        total = looked.compared.tensors + len(skipped)
        yield finding(
            "not_read", "note",
            f"--sample left {len(skipped)} of {total} tensors unread; the verdict says nothing"
            " about their bytes",
            tensors=skipped,
        )  # fmt: skip
    if _TIERS.index(looked.tier) < _TIERS.index(options.require):
        yield finding(
            "tier_not_reached", "error",
            f"tier {options.require} was required and {looked.tier} was reached: "
            + _why(looked, options),
        )  # fmt: skip


def _waived_unread(looked: Looked, own: Iterable[Finding]) -> Iterator[Finding]:
    """A waiver accepts that a file cannot be read, not what might be in it."""
    waived = [f for f in own if f.waived is not None and f.kind in _UNREADABLE]
    if not waived:
        return
    names = {name for f in waived for name in f.tensors}
    names.update(name for name, state in looked.states.items() if state == "unreadable")
    files = sorted({f.file for f in waived if f.file is not None})
    held = f"the {len(names)} tensors in them were" if names else "what they hold was"
    yield finding(
        "waived_unread", "error",
        f"a waiver accepts that {compress(files, 3) or 'files'} cannot be read, and {held} never"
        " looked at: nothing says that they are right",
        tensors=tuple(sorted(names)), files=tuple(files),
    )  # fmt: skip


def _why(looked: Looked, options: Options) -> str:
    sides = [s for s in (looked.before, looked.after) if s is not None]
    if looked.before is None:
        return "one checkpoint alone has nothing its bytes could be compared with"
    if not options.read_bytes:
        return "only headers were asked for"
    if looked.compared.not_read:
        return "--sample left tensors unread"
    manifests = [s.path for s in sides if not s.has_bytes]
    if manifests:
        return f"{manifests[0]} is a manifest and holds digests only"
    return "some bytes could not be read"
