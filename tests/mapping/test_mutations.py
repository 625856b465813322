"""Every row of a table deleted, every two rows of equal shape exchanged: something turns red.

Deleting is seen by coverage. An exchange keeps names and shapes, so coverage and a load into
Megatron see nothing: static rule M14 sees it if the names are crossed, the audit across formats
sees it if the checkpoint was written with the right table. A converter that uses the wrong table
in both directions is only caught by a forward pass; those exchanges are listed in
docs/guarantees.md, and are what `mtpconv parity` is for. That the shipped tables are not such
wrong ones is held against `tests.mapping.meaning`, which is written by hand.

Shapes are equal if they are in a pinned release; bytes are audited at small widths under which
whatever is equal there is equal here.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from mtpconv.convert import hf2mcore
from mtpconv.mapping.check import check_inventory, check_plan, check_table
from mtpconv.mapping.moves import ShapeError
from mtpconv.mapping.plan import Plan, make_plan
from mtpconv.mapping.table import Row, Table
from mtpconv.mapping.table_reader import find_table
from mtpconv.store.digest import digest_tensor
from mtpconv.store.hf import open_hf
from mtpconv.store.torch_dist import open_torch_dist
from mtpconv.synth import TINY
from mtpconv.tensors import TensorSpec
from mtpconv.view import HfView
from tests.families import CONVERTED, Variant, fewest_layers, variants
from tests.mapping.meaning import are_parts_meant, is_meant

DOCS = Path(__file__).resolve().parents[2] / "docs" / "guarantees.md"
#: GLM-4.5's dense layers are as wide as its queries.
WIDTHS = {**TINY, "intermediate_size": 16}

RowName = tuple[str, str]


@dataclass(frozen=True)
class Exchange:
    """Two names of HF, or two parts of one, in each other's place."""

    left: str
    right: str
    table: Table
    #: rows that now hold another HF tensor than they should
    rows: frozenset[RowName]

    @property
    def line(self) -> str:
        """As docs/guarantees.md lists it."""
        return f"| `{self.left}` | `{self.right}` |"


def rows_used(plan: Plan) -> dict[RowName, Row]:
    return {(s.row.block, s.row.key): s.row for s in plan.steps}


def with_rows(table: Table, changed: Mapping[RowName, Row | None]) -> Table:
    """The table with other rows; None deletes one."""
    blocks = {}
    for block, rows in table.blocks.items():
        new = [changed.get((block, r.key), r) for r in rows]
        blocks[block] = tuple(r for r in new if r is not None)
    return replace(table, blocks=blocks)


def exchanges(plan: Plan) -> Iterator[Exchange]:
    """Every two HF names of equal shape and dtype exchanged, and every two equal parts of one."""
    table, rows = plan.table, rows_used(plan)
    specs: dict[tuple[RowName, int], set[TensorSpec]] = defaultdict(set)
    for step in plan.steps:
        for operand, spec in enumerate(step.specs):
            specs[(step.row.block, step.row.key), operand].add(spec)
    for (a, x), (b, y) in itertools.combinations(specs, 2):
        left, right = rows[a].hf[x], rows[b].hf[y]
        if left == right or not specs[a, x] & specs[b, y]:
            continue
        names = {a: list(rows[a].hf), b: list(rows[b].hf)}
        names[a][x], names[b][y] = right, left
        changed = {at: replace(rows[at], hf=tuple(names[at])) for at in names}
        yield Exchange(left, right, with_rows(table, changed), frozenset(changed))
    for name, parts in table.parts.items():
        users = frozenset(at for at, row in rows.items() if name in row.hf)
        for i, j in itertools.combinations(range(len(parts.rows) if users else 0), 2):
            (a_name, a_rows), (b_name, b_rows) = parts.rows[i], parts.rows[j]
            if a_rows != b_rows:
                continue
            order = list(parts.rows)
            order[i], order[j] = (b_name, b_rows), (a_name, a_rows)
            wrong = {**table.parts, name: replace(parts, rows=tuple(order))}
            hurt = frozenset(at for at in users if at[1].endswith((f".{a_name}", f".{b_name}")))
            yield Exchange(
                f"{name}, {a_name}", f"{name}, {b_name}", replace(table, parts=wrong), hurt
            )


def mutated(right: Plan, table: Table) -> tuple[Plan | None, Set[str]]:
    """The plan of the wrong table for the same checkpoint, and what the rules say of it."""
    codes = {f.code for f in check_table(table)}
    try:
        plan = make_plan(right.geometry.config, table, right.hf)
    except ShapeError:  # a part of a tensor that is not cut: M02 where a table is read
        return None, codes | {"M02"}
    faults = (*check_plan(plan), *check_inventory(plan, right.hf))
    return plan, codes | {f.code for f in faults}


@cache
def plans(family: str, *, tiny: bool = False) -> tuple[tuple[Variant, Plan], ...]:
    """The variants of a family with few layers, at the widths of the releases or at small ones."""
    cut = [fewest_layers(v, WIDTHS if tiny else None) for v in variants(family)]
    return tuple((v, v.plan()) for v in cut)


@cache
def possible(family: str) -> tuple[tuple[Variant, Exchange, Set[str]], ...]:
    """Each exchange with the first variant whose shapes allow it, and what the rules say of it."""
    found: dict[tuple[str, frozenset[RowName]], tuple[Variant, Exchange, Set[str]]] = {}
    for (_, plan), (tiny, _) in zip(plans(family), plans(family, tiny=True), strict=True):
        for exchange in exchanges(plan):
            at = exchange.line, exchange.rows
            if at not in found:
                found[at] = tiny, exchange, mutated(plan, exchange.table)[1]
    return tuple(found.values())


@pytest.mark.parametrize("family", CONVERTED)
def test_every_row_is_used_by_some_checkpoint(family: str) -> None:
    table = find_table(family)
    used = {at for _, plan in plans(family) for at in rows_used(plan)}
    stacked = {use.name for stack in table.stacks for use in table.uses(stack)}
    assert used == {(b, r.key) for b in stacked for r in table.blocks[b]}


@pytest.mark.parametrize("family", CONVERTED)
def test_deleting_any_row_is_seen_by_coverage(family: str) -> None:
    tried: set[RowName] = set()
    for variant, whole in plans(family, tiny=True):
        for at, row in rows_used(whole).items():
            if at not in tried:
                tried.add(at)
                _, codes = mutated(whole, with_rows(whole.table, {at: None}))
                # The name of a tensor in parts is still known to the rows of the others.
                assert codes & ({"M09"} if row.op == "part" else {"M05"}), (variant.label, at)
    assert len(tried) >= 8


@pytest.mark.parametrize("family", CONVERTED)
def test_deleting_any_stack_is_seen_by_coverage(family: str) -> None:
    for variant, whole in plans(family, tiny=True):
        stacks = whole.table.stacks
        for stack in stacks:
            if stack.each.endswith("in mtp") and not whole.geometry.depths:
                continue
            left = tuple(s for s in stacks if s is not stack)
            _, codes = mutated(whole, replace(whole.table, stacks=left))
            tied = whole.geometry.fact("is_tied", 0) and [u.name for u in stack.use] == ["head"]
            assert "M05" in codes or tied, (variant.label, stack)


@pytest.mark.parametrize("family", CONVERTED)
def test_exchanging_any_two_rows_is_seen_across_formats(family: str, tmp_path: Path) -> None:
    tried = 0
    for number, (variant, plan) in enumerate(plans(family, tiny=True)):
        mine = [(e, codes) for v, e, codes in possible(family) if v is variant]
        if not mine:
            continue
        folder = variant.write(tmp_path / f"hf{number}", shards=1)
        hf2mcore(folder, tmp_path / f"mcore{number}", verify=False)
        hf, mcore = open_hf(folder), open_torch_dist(tmp_path / f"mcore{number}")
        assert hf.tensors == plan.hf
        digests = {n: digest_tensor(hf, n) for n in hf.tensors}
        for exchange, seen in mine:
            wrong, codes = mutated(plan, exchange.table)
            if wrong is None or codes - {"M14"}:
                # Of unequal shape at these widths, or no table: seen whatever the widths.
                assert seen, exchange.line
                continue
            view = HfView(mcore, wrong)
            hurt = names_in(plan, exchange)
            assert hurt
            same = [n for n in hurt if digest_tensor(view, n) == digests[n]]
            assert not same, (variant.label, exchange.line, same)
            tried += 1
    assert tried >= 4


def names_in(plan: Plan, exchange: Exchange) -> set[str]:
    """HF names of the plan that an exchange is about."""
    return {
        name
        for step in plan.steps
        if (step.row.block, step.row.key) in exchange.rows
        for name, tail in zip(step.hf, step.row.hf, strict=True)
        if tail in (exchange.left.partition(", ")[0], exchange.right.partition(", ")[0])
    }


def test_exchanges_that_only_a_forward_pass_sees_are_listed() -> None:
    listed = set(re.findall(r"^\| `[^`]+` \| `[^`]+` \|$", DOCS.read_text(), re.MULTILINE))
    assert listed == {e.line for f in CONVERTED for _, e, codes in possible(f) if not codes}


@pytest.mark.parametrize("family", CONVERTED)
def test_the_table_is_right_by_hand_and_no_exchange_is(family: str) -> None:
    rows = [r for _, plan in plans(family) for r in rows_used(plan).values()]
    assert [row for row in rows if not is_meant(row)] == []
    assert are_parts_meant(find_table(family))
    for _, exchange, seen in possible(family):
        wrong = [r for block in exchange.table.blocks.values() for r in block]
        hurt = [r for r in wrong if (r.block, r.key) in exchange.rows]
        right = are_parts_meant(exchange.table) and all(map(is_meant, hurt))
        assert seen or not right, exchange.line
