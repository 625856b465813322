"""Every row of a table deleted, every two rows of equal shape exchanged: something turns red.

Deleting is seen by coverage. An exchange keeps names and shapes, so coverage and a load into
Megatron see nothing: static rule M14 sees it if the names are crossed, the audit across formats
sees it if the checkpoint was written with the right table. A converter that uses the wrong table
in both directions is only caught by a forward pass; those exchanges are listed here and in
docs/guarantees.md, and are what `mtpconv parity` is for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mtpconv.convert import hf2mcore
from mtpconv.mapping.check import check_inventory, check_plan, check_table
from mtpconv.mapping.plan import Plan, make_plan
from mtpconv.mapping.table import Row, Table, find_table
from mtpconv.store.digest import digest_tensor
from mtpconv.store.hf import open_hf
from mtpconv.store.torch_dist import open_torch_dist
from mtpconv.view import HfView
from tests.convert.folders import make_hf
from tests.mapping.toy import config

TABLES = ("glm_moe_dsa", "deepseek_v3")
DOCS = Path(__file__).resolve().parents[2] / "docs" / "guarantees.md"


def used_blocks(plan: Plan) -> dict[str, tuple[Row, ...]]:
    table = plan.table
    return {b: table.blocks[b] for b in dict.fromkeys(s.row.block for s in plan.steps)}


def with_rows(table: Table, block: str, rows: tuple[Row, ...]) -> Table:
    return replace(table, blocks={**table.blocks, block: rows})


def exchanges(plan: Plan) -> Iterator[tuple[str, str, Table]]:
    """Every two HF names of one stack with equal dims exchanged, and the table that results."""
    table = plan.table
    used = set(used_blocks(plan))
    tried: set[tuple[str, str]] = set()
    for stack in table.stacks:
        blocks = [u.name for u in table.uses(stack) if u.name in used]
        rows = {(b, i): r for b in blocks for i, r in enumerate(table.blocks[b])}
        spots = [(at, j) for at, row in rows.items() for j in range(len(row.hf))]
        for (a, x), (b, y) in itertools.combinations(spots, 2):
            left, right = rows[a].hf[x], rows[b].hf[y]
            same = table.shapes[left] == table.shapes[right]
            if left == right or not same or table.dtypes.get(left) != table.dtypes.get(right):
                continue
            if (left, right) in tried:
                continue
            tried.add((left, right))
            names = {at: list(row.hf) for at, row in rows.items()}
            names[a][x], names[b][y] = right, left
            changed = {
                block: tuple(
                    replace(row, hf=tuple(names[block, i]))
                    for i, row in enumerate(table.blocks[block])
                )
                for block in (a[0], b[0])
            }
            yield left, right, replace(table, blocks={**table.blocks, **changed})


@pytest.mark.parametrize("name", TABLES)
def test_deleting_any_row_is_seen_by_coverage(name: str) -> None:
    whole = make_plan(config(name), find_table(name))
    tried = 0
    for block, rows in used_blocks(whole).items():
        for row in rows:
            left = tuple(r for r in rows if r is not row)
            plan = make_plan(config(name), with_rows(whole.table, block, left))
            codes = {f.code for f in check_inventory(plan, whole.hf)}
            assert "M05" in codes, f"deleting {row.key} went unnoticed"
            tried += 1
    assert tried >= 25


@pytest.mark.parametrize("name", TABLES)
def test_exchanging_any_two_rows_is_seen_across_formats(name: str, tmp_path: Path) -> None:
    hf_folder = make_hf(tmp_path / "hf", config(name))
    hf2mcore(hf_folder, tmp_path / "mcore", verify=False)
    hf, mcore = open_hf(hf_folder), open_torch_dist(tmp_path / "mcore")
    plan = make_plan(config(name), find_table(name), hf.tensors)
    digests = {n: digest_tensor(hf, n) for n in hf.tensors}
    tried = 0
    for left, right, table in exchanges(plan):
        mutated = make_plan(config(name), table, hf.tensors)
        if check_plan(mutated):
            continue  # seen before any byte is read
        view = HfView(mcore, mutated)
        wrong = [n for n in digests if digest_tensor(view, n) != digests[n]]
        assert any(n.endswith(left.replace("{expert}", "0")) for n in wrong), (left, right)
        assert any(n.endswith(right.replace("{expert}", "0")) for n in wrong), (left, right)
        tried += 1
    assert tried >= 7


@pytest.mark.parametrize("name", TABLES)
def test_exchanges_that_only_a_forward_pass_sees_are_listed(name: str) -> None:
    plan = make_plan(config(name), find_table(name))
    said = DOCS.read_text()
    for left, right, table in exchanges(plan):
        broken = make_plan(config(name), table)
        seen = {f.code for f in (*check_table(table), *check_plan(broken))}
        line = f"| `{left}` | `{right}` |"
        if seen:
            assert line not in said, f"{line} is seen statically"
        else:
            assert line in said, f"docs/guarantees.md does not list {line}"
