"""Packed experts (one [E, ...] tensor) against per-expert tensors: the same bytes in a row?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from mtpconv.audit.compare import aligned, side_blocks
from mtpconv.audit.names import split_expert
from mtpconv.audit.pair import Differences
from mtpconv.audit.subject import Subject
from mtpconv.store.content import Files

_PACKED = re.compile(
    r"(?P<before>.*\bexperts\.)(?P<leaf>gate_up_proj|down_proj)(?P<end>(\.weight)?)"
)
#: Leaves of one expert in the order in which the packed tensor holds them.
#: Source: facts on MTP families, section 3: rows are [gate; up], no transpose.
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def same_experts(found: Differences, before: Subject, after: Subject) -> Iterator[tuple[str, str]]:
    """Names that are missing and extra only because the experts are packed differently."""
    if not (before.has_bytes and after.has_bytes):
        return
    for packed, loose, names in (
        (before, after, (found.missing, found.extra)),
        (after, before, (found.extra, found.missing)),
    ):
        single = _by_group(names[1])
        for name in names[0]:
            parts = _parts(name, packed, loose, single)
            if parts and _equal(packed, name, loose, parts):
                reason = "the same experts, packed differently; allowed by the switch expert-layout"
                yield name, reason
                for part in parts:
                    yield part, reason


def _by_group(names: Sequence[str]) -> dict[tuple[str, str], dict[int, str]]:
    groups: dict[tuple[str, str], dict[int, str]] = {}
    for name in names:
        split = split_expert(name)
        if split:
            before, expert, leaf = split
            groups.setdefault((before, leaf), {})[expert] = name
    return groups


def _parts(
    name: str, packed: Subject, loose: Subject, single: dict[tuple[str, str], dict[int, str]]
) -> list[str] | None:
    match = _PACKED.fullmatch(name)
    spec = packed.tensors[name]
    if not match or len(spec.shape) != 3:
        return None
    leaves = _PARTS[match["leaf"]]
    columns = [single.get((match["before"], f".{leaf}.weight"), {}) for leaf in leaves]
    experts = spec.shape[0]
    # The count is what an untrusted header says; what is counted must be there.
    if any(len(column) != experts or max(column, default=-1) >= experts for column in columns):
        return None
    parts = [column[e] for e in range(experts) for column in columns]
    shape = (spec.shape[1] // len(leaves), spec.shape[2])
    fits = all(
        loose.tensors[p].dtype == spec.dtype and loose.tensors[p].shape == shape for p in parts
    )
    return parts if fits and spec.shape[1] % len(leaves) == 0 else None


def _equal(packed: Subject, name: str, loose: Subject, parts: Sequence[str]) -> bool:
    with Files() as left, Files() as right:
        whole = side_blocks(packed, name, left, "before")
        joined = (b for part in parts for b in side_blocks(loose, part, right, "after"))
        return all(bytes(x) == bytes(y) for x, y in aligned(whole, joined))
