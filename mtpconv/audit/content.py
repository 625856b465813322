"""Whether the values of an MTP module look like trained weights; warnings unless certain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from mtpconv.audit.codes import finding
from mtpconv.audit.companions import is_bookkeeping, is_part
from mtpconv.audit.compare import Outcome
from mtpconv.audit.finding import Finding
from mtpconv.audit.pair import is_router_bias
from mtpconv.audit.words import Stats
from mtpconv.tensors import Region

#: An F32 tensor with fewer non-zero elements can be free of low bits by chance or by nature.
_ENOUGH_ELEMENTS = 8


def content_findings(
    outcomes: Mapping[str, Outcome], regions: Mapping[str, Region], *, is_pair: bool
) -> Iterator[Finding]:
    """Statistics that no trained tensor shows, for every tensor that was watched.

    With a reference, what the reference shows too is no news and is left out.
    """
    for name in sorted(outcomes):
        outcome = outcomes[name]
        stats, old = outcome.after, outcome.before
        if stats is None or not stats.elements:
            continue
        yield from _one(name, stats, old if is_pair else None, regions[name])
    yield from _fresh(outcomes, regions)


def _one(name: str, stats: Stats, old: Stats | None, region: Region) -> Iterator[Finding]:
    if stats.not_finite:
        where = "in the checkpoint only"
        news = old is None or old.not_finite < stats.not_finite
        if not news:
            where = "on both sides"
        yield finding(
            "not_finite", "warning" if news else "note",
            f"{name}: {stats.not_finite} of {stats.elements} values are NaN or infinite, {where}",
            tensor=name, region=region,
        )  # fmt: skip
    if old is not None and old.only_word == stats.only_word and old.constant:
        return
    if is_bookkeeping(name):
        return
    if stats.all_zero and region.kind == "mtp" and not is_router_bias(name):
        yield finding(
            "zero_tensor", "warning", f"{name}: all {stats.elements} values are zero",
            tensor=name, region=region,
        )  # fmt: skip
    elif stats.all_zero and is_router_bias(name):
        yield finding(
            "zero_tensor", "warning",
            f"{name}: all {stats.elements} values are zero, as before any training",
            tensor=name, region=region,
        )  # fmt: skip
    elif stats.constant and stats.elements > 1 and region.kind == "mtp" and _varies(name):
        value = "the same" if stats.only_value is None else stats.only_value
        yield finding(
            "constant_tensor", "warning", f"{name}: all {stats.elements} values are {value}",
            tensor=name, region=region,
        )  # fmt: skip
    nonzero = stats.elements - stats.zeros
    if stats.fits_bf16 and nonzero >= _ENOUGH_ELEMENTS and not (old and old.fits_bf16):
        yield finding(
            "narrowed", "warning",
            f"{name}: F32, but the low 16 bits of all {stats.elements} values are zero; it was"
            f" rounded through BF16 (chance: 2^-{16 * nonzero})",
            tensor=name, region=region,
        )  # fmt: skip


def _is_norm(name: str) -> bool:
    last = name.removesuffix(".weight").rpartition(".")[2]
    return "norm" in last


def _varies(name: str) -> bool:
    """Whether training makes the values differ; a few scales may well be equal."""
    return not _is_norm(name) and not is_part(name)


def _fresh(outcomes: Mapping[str, Outcome], regions: Mapping[str, Region]) -> Iterator[Finding]:
    norms: dict[int, list[tuple[str, Stats]]] = defaultdict(list)
    known: dict[int, bool] = defaultdict(lambda: True)
    for name, outcome in outcomes.items():
        is_norm = _is_norm(name) and name.endswith(".weight")
        if regions[name].kind != "mtp" or not is_norm:
            continue
        if outcome.after is not None and outcome.after.elements > 1:
            depth = regions[name].index
            norms[depth].append((name, outcome.after))
            same = outcome.before is not None and outcome.same
            known[depth] = known[depth] and same
    for depth, found in sorted(norms.items()):
        initial = [n for n, s in found if s.constant and s.only_value in (0.0, 1.0)]
        if len(found) >= 2 and len(initial) == len(found) and not known[depth]:
            yield finding(
                "fresh_init", "warning",
                f"MTP depth {depth} looks freshly initialised: all {len(found)} norm weights are"
                " exactly 1 or 0 (threshold: all of them); training never leaves a norm constant",
                region=Region("mtp", depth), tensors=tuple(sorted(initial)),
            )  # fmt: skip


#: Status that a finding about one tensor gives its depth, and that one about the depth gives.
_STATUS = {"zero_tensor": "zero", "not_finite": "not_finite", "fresh_init": "fresh",
           "constant_tensor": "constant", "stale_mtp": "stale", "same_as_trunk": "same_as_trunk",
           "narrowed": "narrowed"}  # fmt: skip
_RANK = ("narrowed", "same_as_trunk", "constant", "fresh", "stale", "not_finite", "zero")


def depth_status(findings: list[Finding]) -> dict[int, str]:
    """The worst thing that the values of each depth show."""
    out: dict[int, str] = {}
    for one in findings:
        status = _STATUS.get(one.kind)
        if status and one.severity != "note" and one.region and one.region.kind == "mtp":
            best = out.get(one.region.index)
            if best is None or _RANK.index(status) > _RANK.index(best):
                out[one.region.index] = status
    return out
