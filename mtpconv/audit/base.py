"""After training: what moved, what did not, and whether MTP was left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from mtpconv.audit.codes import finding
from mtpconv.audit.compare import SideError, same_bytes
from mtpconv.audit.finding import Finding
from mtpconv.audit.options import Options
from mtpconv.audit.pair import Differences
from mtpconv.audit.subject import Subject
from mtpconv.store.content import Files
from mtpconv.tensors import Region


def changed_regions(
    found: Differences, regions: Mapping[str, Region]
) -> tuple[tuple[str, ...], list[Finding]]:
    """How many tensors changed per region, and what that says about MTP.

    For `--expect structure`: after training, bytes must differ.
    """
    changed = Counter(regions[n].kind for n in found.changed)
    total = changed + Counter(regions[n].kind for n in found.same)
    notes = tuple(
        f"{kind}: {changed[kind]} of {total[kind]} tensors changed" for kind in sorted(total)
    )
    findings = []
    if not found.changed and found.same:
        findings.append(
            finding("mtp_unchanged", "warning", "no tensor changed: this is the checkpoint itself")
        )
    elif changed["trunk"] and total["mtp"] and not changed["mtp"]:
        findings.append(
            finding(
                "mtp_unchanged",
                "warning",
                f"{changed['trunk']} of {total['trunk']} trunk tensors changed and none of the"
                f" {total['mtp']} MTP tensors did; was MTP trained and exported?",
                region=Region("mtp", 0),
            )
        )
    return notes, findings


def is_compared(base: Subject | None, after: Subject, options: Options) -> bool:
    """Whether the bytes of the base can be looked at."""
    return base is not None and options.read_bytes and not (base.afar or after.afar)


def stale_findings(
    after: Subject, base: Subject | None, regions: Mapping[str, Region], options: Options
) -> Iterator[Finding]:
    """MTP depths whose every tensor still equals the base while the trunk moved on."""
    if base is None:
        return
    if not is_compared(base, after, options):
        why = "only headers were asked for" if not options.read_bytes else "it is not on this disk"
        yield finding(
            "not_read", "warning",
            f"base {base.path}: was not compared, {why}; whether MTP is stale was not checked",
        )  # fmt: skip
        return
    shared = [n for n in sorted(after.tensors) if base.tensors.get(n) == after.tensors[n]]
    by_kind: dict[Region, list[str]] = {}
    trunk = []
    for name in shared:
        region = regions[name]
        if region.kind == "mtp":
            by_kind.setdefault(region, []).append(name)
        elif region.kind == "trunk":
            trunk.append(name)
    with Files() as left, Files() as right:
        try:
            if not any(not same_bytes(base, n, after, n, left, right) for n in trunk):
                return
            for region, names in sorted(by_kind.items()):
                if all(same_bytes(base, n, after, n, left, right) for n in names):
                    yield finding(
                        "stale_mtp",
                        "error",
                        f"MTP depth {region.index}: all {len(names)} tensors have the bytes of the"
                        f" base {base.path} while the trunk changed; export the trained MTP",
                        region=region,
                        tensors=tuple(names),
                    )
        except SideError as error:
            yield finding("unreadable_file", "error", f"base or checkpoint: {error}")
