"""What decides the bytes of an output, as digests: equal ones were planned alike."""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

from mtpconv.mapping.layouts import Layout
from mtpconv.mapping.plan import Plan, Step
from mtpconv.mapping.table import Table, Use


def of_steps(steps: Iterable[Step], *about: str) -> str:
    """One digest over what steps do to which tensors, and over all else it is `about`, hex."""
    hasher = blake3("\n".join((*about, "")).encode())
    kinds: dict[tuple[int, int], str] = {}  # experts share ops and specs
    for step in steps:
        at = (id(step.op), id(step.specs))
        if at not in kinds:
            kinds[at] = f"{step.op} {step.specs}"
        hasher.update(f"{step.key} {kinds[at]} {' '.join(step.hf)}\n".encode())
    return hasher.hexdigest()


def of_table(table: Table) -> str:
    """One digest over what a table does, not over how it is written, hex."""

    def rows(use: Use) -> list[object]:
        found = table.blocks.get(use.name, ())
        about = [[d.get(n) for r in found for n in r.hf for d in (table.shapes, table.parts)]]
        return [use.facts, bool(use.rivals), *((r.key, r.op, r.hf) for r in found), *about]

    stacks = [(s.each, s.mcore, s.hf, *map(rows, table.uses(s))) for s in table.stacks]
    copies = [(c.each, c.hf, c.of, c.ships, c.facts) for c in table.copies]
    return blake3(repr((stacks, copies, table.mtp_default)).encode()).hexdigest()


def of_plan(plan: Plan, layout: Layout, *about: str) -> str:
    """The same of a whole plan."""
    return of_steps(plan.steps, layout.name, str(plan.copies), str(plan.arithmetic), *about)
