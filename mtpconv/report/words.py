"""Numbers and parts of a model in words, the same in every report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from mtpconv.audit.finding import Compared, MtpStatus, Report, Side, Tier, Verdict
from mtpconv.report.escape import plain
from mtpconv.tensors import Region

TIERS: Final[Mapping[Tier, str]] = {
    "none": "nothing was read",
    "L0": "headers, index and config",
    "L1": "digests against a manifest",
    "L2": "all bytes",
}

VERDICTS: Final[Mapping[Verdict, str]] = {
    "pass": "PASS",
    "fail": "FAIL",
    "error": "NOT CHECKED",
}


#: Depths that the MTP line lists; no model has more than a few, an untrusted name may say any.
MAX_DEPTHS: Final = 16


def count(number: int, noun: str) -> str:
    """`1 tensor`, `59,585 tensors`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def size(nbytes: int) -> str:
    """Bytes with a decimal unit: `1.51 TB`."""
    amount = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 999.5 or unit == "TB":
            break
        amount /= 1000
    return f"{nbytes} B" if unit == "B" else f"{amount:.3g} {unit}"


def region(where: Region) -> str:
    """One part of a model: `root`, `trunk layer 3`, `MTP depth 0`."""
    if where.kind == "trunk":
        return f"trunk layer {where.index}"
    if where.kind == "mtp":
        return f"MTP depth {where.index}"
    return plain(where.kind)


def regions(places: Iterable[Region]) -> str:
    """Several parts in one phrase, layer numbers as ranges."""
    numbers: dict[str, list[int]] = {}
    for place in sorted(set(places)):
        numbers.setdefault(place.kind, []).append(place.index)
    # MTP first: it is what people look for.
    order = sorted(numbers, key=lambda kind: (kind != "mtp", kind != "root", kind))
    said = []
    for kind in order:
        values = numbers[kind]
        if kind not in ("trunk", "mtp") or len(values) == 1:
            said.append(region(Region(kind, values[0])))
        else:
            said.append(f"{'trunk layers' if kind == 'trunk' else 'MTP depths'} {ranges(values)}")
    return ", ".join(said)


def ranges(values: Iterable[int]) -> str:
    """Sorted numbers as `0..77` or `0, 3..5`."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)


def side(one: Side) -> str:
    """One side of the audit on one line."""
    dialect = f", {plain(one.dialect)}" if one.dialect else ""
    amount = f"{count(one.tensors, 'tensor')}, {size(one.nbytes)}"
    return f"{plain(one.path)} ({plain(one.format)}{dialect}, {amount})"


def compared(what: Compared, tier: Tier) -> str:
    """What was really looked at, with the tier in words."""
    said = f"tier {tier}: {TIERS[tier]}"
    if tier == "L0" and what.nbytes:
        # Some bytes were read, which is less than a tier and more than none.
        total = count(what.tensors + len(what.not_read), "tensor")
        of = f" of {what.tensors:,} of them" if what.not_read else ""
        return f"{total}; {said}, and {size(what.nbytes)} of values{of}"
    return f"{count(what.tensors, 'tensor')}, {size(what.nbytes)}; {said}"


def mtp(status: MtpStatus) -> str:
    """The MTP line, printed whatever the verdict."""
    promised = {None: "config does not say how many depths", 0: "config promises none"}.get(
        status.promised, f"config promises {count(status.promised or 0, 'depth')}"
    )
    said = [f"{plain(status.status)}; {promised}"]
    for depth in status.depths[:MAX_DEPTHS]:
        if depth.expected is None:
            amount = count(depth.tensors, "tensor")
        else:
            amount = f"{depth.tensors:,} of {count(depth.expected, 'tensor')}"
        line = f"depth {depth.depth}: {plain(depth.status)}, {amount}"
        said.append(line + (f" ({plain(depth.detail)})" if depth.detail else ""))
    rest = Counter(depth.status for depth in status.depths[MAX_DEPTHS:])
    if rest:
        kinds = ", ".join(f"{number:,} {plain(kind)}" for kind, number in rest.most_common(5))
        said.append(f"and {count(sum(rest.values()), 'more depth')}: {kinds}")
    return "; ".join(said)


def states(report: Report) -> dict[str, int]:
    """How many tensors are in each state, the most frequent first."""
    found: dict[str, int] = {}
    for state in report.states.values():
        found[state] = found.get(state, 0) + 1
    return dict(sorted(found.items(), key=lambda entry: (-entry[1], entry[0])))


def headline(report: Report) -> str:
    """What came out, in one line after the verdict."""
    failing = [f for f in report.findings if f.severity == "error" and f.waived is None]
    warnings = sum(f.severity == "warning" and f.waived is None for f in report.findings)
    waived = sum(f.waived is not None for f in report.findings)
    more = (f", {count(warnings, 'warning')}" if warnings else "") + (
        f", {waived:,} waived" if waived else ""
    )
    if failing:
        kinds: dict[str, int] = {}
        for one in failing:
            name = f"{one.code} {one.kind}"
            kinds[name] = kinds.get(name, 0) + 1
        top = sorted(kinds.items(), key=lambda entry: (-entry[1], entry[0]))
        listed = ", ".join(f"{plain(name)} {number:,}" for name, number in top[:3])
        rest = f", {len(top) - 3} more kinds" if len(top) > 3 else ""
        return f"{count(len(failing), 'error')} ({listed}{rest}){more}"
    if report.verdict == "error":
        return f"what was asked could not be checked{more}"
    found = states(report)
    if set(found) == {"identical"}:
        return f"all {count(len(report.states), 'tensor')} identical{more}"
    listed = ", ".join(f"{number:,} {plain(state)}" for state, number in found.items())
    if any(f.kind == "completeness_not_checked" for f in report.findings):
        more = f", completeness not checked (A04){more}"
    return f"no errors{more}" + (f"; tensors: {listed}" if listed else "")
