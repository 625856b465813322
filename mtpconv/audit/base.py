"""After training: what moved, what did not, and whether MTP was left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from mtpconv.audit.codes import finding
from mtpconv.audit.compare import SideError, same_bytes
from mtpconv.audit.excuses import copy_of
from mtpconv.audit.finding import Finding
from mtpconv.audit.mtp import depths_of
from mtpconv.audit.options import Options
from mtpconv.audit.pair import Differences, is_router_bias
from mtpconv.audit.subject import Subject
from mtpconv.store.content import Files
from mtpconv.tensors import Region


def changed_regions(
    found: Differences, after: Subject, regions: Mapping[str, Region]
) -> tuple[tuple[str, ...], list[Finding]]:
    """How many tensors changed per region, and what that says about each MTP depth.

    For `--expect structure`: after training, bytes must differ.
    """
    changed = Counter(regions[n].kind for n in found.changed)
    total = changed + Counter(regions[n].kind for n in found.same)
    notes = tuple(
        f"{kind}: {changed[kind]} of {total[kind]} tensors changed" for kind in sorted(total)
    )
    if found.changed:
        trunk = f"{changed['trunk']} of {total['trunk']} trunk tensors changed"
        return notes, list(_unchanged(found, after, regions, trunk)) if changed["trunk"] else []
    if not found.same:
        return notes, []
    said = "no tensor changed: this is the checkpoint itself"
    if found.not_read:
        said = f"no tensor that was read changed, and --sample left {len(found.not_read)} unread"
    return notes, [finding("mtp_unchanged", "warning", said)]


def _unchanged(
    found: Differences, after: Subject, regions: Mapping[str, Region], trunk: str
) -> Iterator[Finding]:
    """Depths of which nothing changed that training MTP changes.

    The bias of a router moves with every batch, trained or not, and a copy moves with its root.
    """
    for depth, names in depths_of(sorted({*found.same, *found.changed}), regions).items():
        moved = [n for n in names if n in found.changed]
        if all(is_router_bias(n) or _is_copy(after, n, regions) for n in moved):
            which = f"none of the {len(names)} tensors of MTP depth {depth} did"
            if moved:
                which = (
                    f"of the {len(names)} tensors of MTP depth {depth} only router biases and"
                    f" copies of root tensors did ({len(moved)})"
                )
            yield finding(
                "mtp_unchanged", "warning",
                f"{trunk} and {which}; was MTP trained and exported?",
                region=Region("mtp", depth),
            )  # fmt: skip


def _is_copy(after: Subject, name: str, regions: Mapping[str, Region]) -> bool:
    root = copy_of(after, name, regions)
    if root is None or after.tensors[root] != after.tensors[name]:
        return False
    try:
        with Files() as left, Files() as right:
            return same_bytes(after, root, after, name, left, right)
    except SideError:
        return False


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
