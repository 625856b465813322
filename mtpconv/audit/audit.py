"""One audit: two sides, or one against its own config, to a report. No printing, no exit codes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from mtpconv.audit.args_rules import args_findings, own_args_findings
from mtpconv.audit.base import changed_regions, is_compared, stale_findings
from mtpconv.audit.beside import beside_notes
from mtpconv.audit.codes import checked_kinds, finding
from mtpconv.audit.compare import Outcome, Progress, read_stats
from mtpconv.audit.config_rules import compare_configs
from mtpconv.audit.content import content_findings, depth_status
from mtpconv.audit.crcs import crc_findings, crc_notes, pool_crcs, with_crcs
from mtpconv.audit.excuses import copy_of, find_excuses
from mtpconv.audit.files import (
    file_findings,
    padding_findings,
    record_findings,
    reference_findings,
    source_findings,
)
from mtpconv.audit.finding import Compared, Finding, Report, Tier
from mtpconv.audit.hints import find_hints
from mtpconv.audit.mtp import compare_promises, pair_status, promise_findings, single_status
from mtpconv.audit.names import is_own_head
from mtpconv.audit.options import Options
from mtpconv.audit.pair import (
    Differences,
    difference_findings,
    failure_findings,
    find_differences,
    is_router_bias,
)
from mtpconv.audit.profiles import profile_findings
from mtpconv.audit.quantised import is_quantised
from mtpconv.audit.shares import shared_outcomes
from mtpconv.audit.single import (
    completeness_findings,
    left_out_notes,
    missing_names,
    missing_parts,
    single_regions,
)
from mtpconv.audit.subject import ARGS, Subject, without_unindexed
from mtpconv.audit.twins import twin_findings
from mtpconv.audit.verdict import Looked, make_report
from mtpconv.ranks import Ranks
from mtpconv.tensors import Region


def audit(
    before: Subject | None,
    after: Subject,
    options: Options | None = None,
    *,
    base: Subject | None = None,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
) -> Report:
    """Audit `after` against `before`, or alone if that is None.

    `base` is the checkpoint that `after` was trained from; MTP tensors that still equal it while
    the trunk moved on are stale. The same inputs always give an equal report.
    Several `ranks` share the bytes to be read, and all get that report.

    Raises: UnreadableError if a rank is lost.
    """
    options = options or Options()
    ranks = ranks or Ranks()
    if "index-authoritative" in options.allow:
        after = without_unindexed(after)
        before = without_unindexed(before) if before is not None else None
    if options.read_bytes:
        after = with_crcs(after)
        before = with_crcs(before) if before is not None else None
    if before is None:
        return _audit_single(after, options, base, progress, ranks)
    return _audit_pair(before, after, options, base, progress, ranks)


def _audit_pair(
    before: Subject,
    after: Subject,
    options: Options,
    base: Subject | None,
    progress: Progress | None,
    ranks: Ranks,
) -> Report:
    regions = _pair_regions(before, after)
    found = find_differences(before, after, options, regions, progress, ranks)
    for side in (before, after):
        pool_crcs(side, ranks)  # from here on every rank reads the same
    excused = find_excuses(found, before, after, options, regions)
    findings = list(file_findings(after))
    notes = (*before.notes, *after.notes, *beside_notes(before, after))
    content: list[Finding] = []
    if options.expect == "structure":
        # Values are meant to differ: they are counted per region, not listed.
        listed = Differences(found.missing, found.extra, found.dtype, found.shape)
        findings += difference_findings(listed, before, after, regions, excused, {})
        if options.read_bytes:
            counts, content = changed_regions(found, after, regions)
            notes += counts
    else:
        hints = find_hints(found, before, after, regions) if options.read_bytes else {}
        findings += difference_findings(found, before, after, regions, excused, hints)
    if options.read_bytes:
        findings += [f for side in (before, after) for f in padding_findings(side)]
        findings += source_findings(after)
    failures = list(failure_findings(found.failures, before, after))
    findings += [f for side, f in failures if side == "after"]
    whole = options.sample is None
    findings += crc_findings(after, whole=whole, workers=options.workers, ranks=ranks)
    notes += (*crc_notes(before), *crc_notes(after))
    findings += _config_findings(before, after, found, regions, options)
    content += content_findings(found.outcomes, regions, is_pair=True)
    if after.has_bytes:
        # After training all bytes are new; else a tensor that is as it was is no news.
        looked_at = found.outcomes if options.expect == "structure" else found.changed
        content += twin_findings(after, regions, looked_at, before)
    content += stale_findings(after, base, regions, options)
    findings += content
    findings += _own_faults(before, after, regions, findings)
    findings += _profile(after, regions, found.missing, options)
    states = found.states()
    for name in before.by_value | after.by_value:
        if states.get(name) == "identical":
            states[name] = "equal"
    states.update(dict.fromkeys(excused, "allowed"))
    copies = {
        n
        for side in (before, after)
        for n in side.tensors
        if copy_of(side, n, regions) and not is_own_head(n)
    }
    status = pair_status(before, after, regions, states, excused, depth_status(content), copies)
    compared = Compared(
        len(found.not_read) + len(found.same) + len(found.changed)
        if not options.read_bytes
        else len(found.same) + len(found.changed),
        found.nbytes,
        tuple(found.not_read) if options.read_bytes else (),
        notes,
    )
    differences = found.missing or found.extra or found.dtype or found.shape
    looked = Looked(
        before, after, _pair_tier(before, after, found, options), compared, status, states,
        regions, nothing=not compared.tensors and not differences,
        checked=_checked(before, after, options, base),
    )  # fmt: skip
    about_reference = [
        *reference_findings(before),
        *(f for side, f in failures if side == "before"),
        *crc_findings(
            before, whole=whole, prefix="reference: ", workers=options.workers, ranks=ranks
        ),
    ]
    return make_report(looked, findings, about_reference, options)


def _audit_single(
    after: Subject,
    options: Options,
    base: Subject | None,
    progress: Progress | None,
    ranks: Ranks,
) -> Report:
    regions = single_regions(after)
    missing = missing_names(after)
    findings = [*file_findings(after), *promise_findings(after, regions, "error")]
    complete = list(completeness_findings(after, regions, missing))
    parts = missing_parts(after, missing, complete)
    findings += complete
    findings += _no_config(after)
    if "config" not in options.allow:
        findings += own_args_findings(after)
    content: list[Finding] = []
    nbytes = 0
    if options.read_bytes and after.has_bytes:
        records = list(record_findings(after))
        findings += records
        findings += source_findings(after)
        if not records:
            findings += padding_findings(after)
            nbytes, failures, content = _look_at_values(after, regions, progress, ranks)
            findings += failures
            findings += crc_findings(after, whole=False)
    content += stale_findings(after, base, regions, options)
    findings += content
    findings += _profile(after, regions, missing, options)
    status = single_status(after, regions, missing, depth_status(content), parts)
    states = dict.fromkeys(after.tensors, "present")
    states |= dict.fromkeys(after.unread, "unreadable") | dict.fromkeys(missing, "missing")
    states |= dict.fromkeys(parts, "missing")
    regions |= parts | after.naming.regions(after.unread)
    if after.expected is not None:
        regions |= {n: after.expected.regions[n] for n in missing}
    looked = Looked(
        None, after, "L0" if after.tensors else "none",
        Compared(len(after.tensors), nbytes, (), (*after.notes, *left_out_notes(after))),
        status, dict(sorted(states.items())), regions, nothing=not after.tensors,
        checked=_checked(None, after, options, base),
    )  # fmt: skip
    return make_report(looked, findings, (), options)


def _look_at_values(
    after: Subject, regions: Mapping[str, Region], progress: Progress | None, ranks: Ranks
) -> tuple[int, list[Finding], list[Finding]]:
    """Bytes read, tensors that could not be read, and what the values of MTP tell."""
    outcomes: dict[str, Outcome] = {}
    failures = []
    nbytes = 0
    names = _worth_reading(after, regions)
    for outcome in shared_outcomes(lambda some: read_stats(after, some), names, after, ranks):
        if outcome.unreadable is not None:
            failures.append((outcome.name, *outcome.unreadable))
            continue
        outcomes[outcome.name] = outcome
        nbytes += after.tensors[outcome.name].nbytes
        if progress is not None:
            progress(after.tensors[outcome.name].nbytes)
    pool_crcs(after, ranks)
    unreadable = [f for _, f in failure_findings(failures, None, after)]
    content = [*content_findings(outcomes, regions, is_pair=False)]
    content += twin_findings(after, regions, outcomes)
    return nbytes, unreadable, content


def _pair_regions(before: Subject, after: Subject) -> dict[str, Region]:
    """The regions of all names of both sides.

    The reference says which layer number is the first MTP depth; a config that lost layers
    must not turn trunk tensors into MTP ones.
    """
    naming = (before if before.config is not None else after).naming
    names = before.tensors.keys() | after.tensors.keys() | before.unread | after.unread
    regions = naming.regions(names)
    for subject in (after, before):
        known = subject.expected.regions if subject.expected else subject.regions
        regions.update((n, known[n]) for n in names if n in known)
    return regions


def _config_findings(
    before: Subject,
    after: Subject,
    found: Differences,
    regions: Mapping[str, Region],
    options: Options,
) -> Iterator[Finding]:
    if "config" in options.allow:
        return
    yield from _no_config(after)
    if ARGS in (before.config_source, after.config_source):
        yield from compare_promises(before, after, regions, found.missing)
        yield from args_findings(before, after)
        return
    if before.config is None or after.config is None:
        return
    requantised = any(is_quantised(s, n) for s in (before, after) for n in found.dtype)
    yield from compare_configs(before.config, after.config, tensors_requantised=requantised)


def _no_config(after: Subject) -> Iterator[Finding]:
    """An HF folder, or the manifest of one, that does not say what model it is."""
    if after.config is not None or after.config_source == ARGS:
        return
    if not any(p.file == "config.json" and not p.warning for p in after.problems):
        folder = "was taken of a folder without" if after.format == "manifest" else "has no"
        yield finding(
            "config_missing", "error",
            f"{after.path}: {folder} config.json; no loader can open it. Copy it from the source",
            file="config.json",
        )  # fmt: skip


def _own_faults(
    before: Subject, after: Subject, regions: Mapping[str, Region], findings: list[Finding]
) -> Iterator[Finding]:
    """Contradictions between config and MTP that are no difference to the reference."""
    if before.config is None:
        if after.config is None:
            return  # neither says anything, and they agree on that
        yield from promise_findings(after, regions, "error")
        return
    differs = {"missing_tensor", "extra_tensor", "config_mismatch", "index_missing_file"}
    if not any(f.kind in differs and f.severity == "error" for f in findings):
        yield from promise_findings(after, regions, "warning")


def _profile(
    after: Subject, regions: Mapping[str, Region], absent: Collection[str], options: Options
) -> Iterator[Finding]:
    if options.profile is not None:
        yield from profile_findings(
            after, regions, absent, options.profile, read_bytes=options.read_bytes
        )


def _worth_reading(after: Subject, regions: Mapping[str, Region]) -> list[str]:
    """The tensors whose values say whether MTP was trained."""
    names = after.tensors.keys() - after.unread
    return sorted(n for n in names if regions[n].kind == "mtp" or is_router_bias(n))


def _pair_tier(before: Subject, after: Subject, found: Differences, options: Options) -> Tier:
    if not before.tensors.keys() & after.tensors.keys():
        return "L0" if found.missing or found.extra else "none"
    if not options.read_bytes or found.not_read or found.unread:
        return "L0"
    return "L2" if before.has_bytes and after.has_bytes else "L1"


def _checked(
    before: Subject | None, after: Subject, options: Options, base: Subject | None
) -> tuple[str, ...]:
    both_configs = after.config is not None and (
        before.config is not None if before is not None else after.source is not None
    )
    compares = before is not None and options.read_bytes and options.expect == "bytes"
    return checked_kinds(
        is_pair=before is not None,
        has_config=after.config is not None,
        compares_config=both_configs and "config" not in options.allow,
        compares_bytes=compares,
        reads_values=options.read_bytes and after.has_bytes,
        has_table=after.expected is not None,
        has_base=is_compared(base, after, options),
        has_waivers=bool(options.waivers),
        profile=options.profile,
    )
