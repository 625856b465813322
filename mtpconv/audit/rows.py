"""Tensors of one module that hold the same rows in another order: QKV or gate and up regrouped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from blake3 import blake3

from mtpconv.audit.compare import side_blocks
from mtpconv.audit.pair import Differences
from mtpconv.audit.subject import Subject
from mtpconv.audit.values import whole_rows
from mtpconv.store.content import Files
from mtpconv.tensors import DTYPE_BITS

#: Rows looked at in all: a few seconds.
_MAX_ROWS = 1 << 20

Group = tuple[str, str, str, tuple[int, ...]]


def regrouped_rows(
    found: Differences, before: Subject, after: Subject, known: Collection[str], budget: int
) -> Iterator[tuple[str, str]]:
    """Names whose rows, taken together with their neighbours', only changed places."""
    groups: dict[Group, list[str]] = defaultdict(list)
    for name in found.changed:
        spec = after.tensors[name]
        if name in known or not spec.shape or DTYPE_BITS[spec.dtype] < 8:
            continue
        module, _, leaf = name.rpartition(".")
        groups[module.rpartition(".")[0], leaf, spec.dtype, spec.shape[1:]].append(name)
    rows = 0
    for names in groups.values():
        rows += sum(after.tensors[n].shape[0] for n in names)
        budget -= 2 * sum(after.tensors[n].nbytes for n in names)
        if budget < 0 or rows > _MAX_ROWS:
            return
        if _row_sum(before, names) == _row_sum(after, names):
            leaves = ", ".join(n.split(".")[-2] for n in sorted(names))
            for name in names:
                yield name, f"the rows of {leaves} are the same in another order"


def _row_sum(subject: Subject, names: Sequence[str]) -> int:
    """A hash of the rows that does not depend on their order or tensor."""
    total = 0
    with Files() as files:
        for name in names:
            spec = subject.tensors[name]
            size = max(spec.nbytes // max(spec.shape[0], 1), 1)
            for block in whole_rows(side_blocks(subject, name, files, "hint"), size):
                for start in range(0, len(block), size):
                    digest = blake3(block[start : start + size]).digest()
                    total += int.from_bytes(digest[:16], "little")
    return total
