"""One checkpoint against its own config: complete, and nothing that does not belong there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from mtpconv.audit.codes import finding
from mtpconv.audit.companions import companion_base, is_kv_scale, is_stored
from mtpconv.audit.finding import Finding
from mtpconv.audit.mtp import depths_of
from mtpconv.audit.promise import read_promise
from mtpconv.audit.quantised import form_findings, scale_findings
from mtpconv.audit.subject import ARGS, Expected, Subject
from mtpconv.audit.tablefree import tablefree_findings
from mtpconv.ranges import compress
from mtpconv.store.hf import CONFIG_NAME
from mtpconv.tensors import Region


def single_regions(subject: Subject) -> dict[str, Region]:
    """The region of every tensor: from the table where it knows the name, else from the name."""
    regions = subject.naming.regions(subject.tensors)
    known = subject.expected.regions if subject.expected else subject.regions
    regions.update((n, known[n]) for n in subject.tensors if n in known)
    return regions


def missing_names(subject: Subject) -> list[str]:
    """Tensors that the table promises and that are neither there nor in an unreadable file."""
    expected = subject.expected
    if expected is None or subject.blind:
        return []
    elsewhere = subject.unread | subject.ghosts
    return sorted(
        n for n in expected.tensors if n not in elsewhere and not is_stored(subject.tensors, n)
    )


def completeness_findings(
    subject: Subject, regions: Mapping[str, Region], missing: Collection[str]
) -> Iterator[Finding]:
    """What the table, or without one the names and the config, say is wrong."""
    expected = subject.expected
    if expected is None:
        why = (
            f"there is no mapping table for model_type {subject.model_type!r}"
            if subject.config is not None
            else "there is no config"
        )
        if subject.config_source == ARGS:
            why = "there is no hf_source, and args name no model type that has a mapping table"
        elif any(p.kind == "config_contradiction" for p in subject.problems):
            why = f"config.json is no {subject.model_type}, so the mapping table cannot be used"
        yield finding(
            "completeness_not_checked",
            "note",
            f"{why}; that every tensor is there was not checked, only what names and config tell",
        )
        if subject.config_source == CONFIG_NAME:
            yield from tablefree_findings(subject, regions)
    else:
        yield from _missing(subject, expected, missing)
        yield from _unexpected(subject, expected, regions)
        yield from _misshapen(subject, expected)
    yield from scale_findings(subject, regions)


def missing_parts(
    subject: Subject, missing: Collection[str], findings: Iterable[Finding]
) -> dict[str, Region]:
    """What findings say is missing beyond what the table promises: parts of quantised weights."""
    known = {*missing, *subject.tensors}
    return {
        f.tensor: f.region
        for f in findings
        if f.kind == "missing_tensor"
        and f.tensor is not None
        and f.region is not None
        and f.tensor not in known
    }


def left_out_notes(subject: Subject) -> Iterator[str]:
    """What is there and the table leaves out on purpose: no finding, and not to be silent about."""
    expected = subject.expected
    if expected is None or not expected.left_out:
        return
    groups: dict[str, list[str]] = {}
    for name in subject.tensors:
        what = _left_out(expected, name) if name not in expected.tensors else None
        if what is not None:
            groups.setdefault(what, []).append(name)
    for what, names in sorted(groups.items()):
        plural = "" if len(names) == 1 else "s"
        yield f"{len(names)} tensor{plural} {what}: {compress(sorted(names), 3)}"


def _left_out(expected: Expected, name: str) -> str | None:
    """What becomes of a tensor that the table leaves out, codes and scales of one too."""
    return expected.left_out.get(name) or expected.left_out.get(companion_base(name) or "")


def _missing(subject: Subject, expected: Expected, missing: Collection[str]) -> Iterator[Finding]:
    present = depths_of(subject.tensors, {**subject.naming.regions(subject.tensors)})
    for name in missing:
        region = expected.regions[name]
        if region.kind == "mtp" and region.index not in present:
            continue  # the depth as a whole is one finding, mtp_missing
        if companion_base(name) is not None:
            continue  # scale_findings says which weight lacks it
        yield finding(
            "missing_tensor",
            "error",
            f"{name}: config and mapping table promise it, the checkpoint does not hold it",
            tensor=name,
            region=region,
        )


def _unexpected(
    subject: Subject, expected: Expected, regions: Mapping[str, Region]
) -> Iterator[Finding]:
    promise = read_promise(subject.config)
    for name in sorted(subject.tensors):
        if name in expected.tensors:
            continue
        base = companion_base(name)
        if base in expected.tensors or is_kv_scale(name, subject.tensors):
            continue
        if _left_out(expected, name) is not None:
            continue  # left_out_notes says so
        region = regions[name]
        if region.kind == "mtp" and region.index >= (promise.depths or 0):
            continue  # the depth as a whole is one finding, mtp_orphan
        yield finding(
            "extra_tensor",
            "error",
            f"{name}: neither config nor mapping table know it",
            tensor=name,
            region=region,
        )


def _misshapen(subject: Subject, expected: Expected) -> Iterator[Finding]:
    for name, wanted in sorted(expected.tensors.items()):
        if wanted is not None and subject.tensors.get(name) != wanted:
            yield from form_findings(subject, name, wanted, expected.regions[name])
