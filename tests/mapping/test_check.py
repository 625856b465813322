"""Static rules: each one turns red when it must; mutated tables are caught."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtpconv.errors import UsageError
from mtpconv.mapping import check as rules
from mtpconv.mapping.check import RULES, check, check_inventory, check_plan, check_table
from mtpconv.mapping.plan import make_plan
from mtpconv.mapping.table import Row, Stack, Table, Use
from mtpconv.mapping.table_reader import find_table, parse_table, table_names
from mtpconv.store import dist_metadata
from mtpconv.tensors import TensorSpec
from tests.mapping.toy import config


def codes(faults: Any) -> set[str]:
    return {f.code for f in faults}


@pytest.mark.parametrize("name", table_names())
def test_shipped_tables_break_no_rule(name: str) -> None:
    assert [str(f) for f in check_table(find_table(name))] == []


def edited(table: Table, block: str, rows: tuple[Row, ...]) -> Table:
    return replace(table, blocks={**table.blocks, block: rows})


def test_crossed_enorm_and_hnorm_are_seen_statically() -> None:
    table = find_table("glm_moe_dsa")
    rows = table.blocks["mtp_glue"]
    swapped = tuple(
        replace(r, hf=({"enorm.weight": "hnorm.weight", "hnorm.weight": "enorm.weight"}[r.key],))
        if r.key in ("enorm.weight", "hnorm.weight")
        else r
        for r in rows
    )
    faults = check_table(edited(table, "mtp_glue", swapped))
    assert codes(faults) == {"M14"}
    assert len(faults) == 2


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (Row("mtp_glue", "x.{layer}.weight", "copy", ("enorm.weight",), "t:1"), "M04"),
        (Row("mtp_glue", "x.{expert}.weight", "copy", ("enorm.weight",), "t:1"), "M04"),
        (Row("mtp_glue", "x.weight", "copy", ("no_shape.weight",), "t:1"), "M15"),
    ],
)
def test_bad_rows(row: Row, code: str) -> None:
    table = find_table("glm_moe_dsa")
    assert code in codes(check_table(edited(table, "mtp_glue", (*table.blocks["mtp_glue"], row))))


def test_unknown_and_unused_blocks() -> None:
    table = find_table("glm_moe_dsa")
    stack = replace(table.stacks[0], use=(Use("root"), Use("nowhere")))
    assert codes(check_table(replace(table, stacks=(stack, *table.stacks[1:])))) == {"M07"}
    own = Row("mine", "x.weight", "copy", ("enorm.weight",), f"{table.path.name}:9")
    assert codes(check_table(edited(table, "mine", (own,)))) == {"M07"}


def test_a_stack_that_ignores_its_placeholder_writes_every_layer_to_one_place() -> None:
    table = find_table("glm_moe_dsa")
    stack = Stack("layer in trunk", "decoder.", "model.layers.{layer}.", table.stacks[1].use, "t:1")
    broken = replace(table, stacks=(table.stacks[0], stack, *table.stacks[2:]))
    assert "M04" in codes(check_table(broken))
    assert "M08" in codes(check_plan(make_plan(config(), broken)))


def test_plan_rules_see_double_consumption_and_broken_shapes() -> None:
    table = find_table("glm_moe_dsa")
    rows = table.blocks["mtp_glue"]
    twice = Row("mtp_glue", "again.weight", "copy", ("enorm.weight",), "t:1")
    plan = make_plan(config(), edited(table, "mtp_glue", (*rows, twice)))
    assert codes(check_plan(plan)) == {"M09"}
    odd = Row("mtp_glue", "odd.weight", "concat", ("enorm.weight", "eh_proj.weight"), "t:1")
    plan = make_plan(config(), edited(table, "mtp_glue", (odd,)))
    assert "M10" in codes(check_plan(plan))


def test_config_that_promises_mtp_needs_a_stack_for_it() -> None:
    table = find_table("glm_moe_dsa")
    trunk_only = replace(table, stacks=table.stacks[:2])
    assert codes(check_plan(make_plan(config(), trunk_only))) == {"M13"}
    assert check_plan(make_plan(config(num_nextn_predict_layers=0), trunk_only)) == []


def test_inventory_rules_name_both_directions() -> None:
    plan = make_plan(config(), find_table("glm_moe_dsa"))
    whole = dict(plan.hf)
    assert check_inventory(plan, whole) == []
    without = {n: s for n, s in whole.items() if "enorm" not in n}
    (fault,) = check_inventory(plan, without)
    assert fault.code == "M06"
    assert "model.layers.3.enorm.weight" in fault.message
    (fault,) = check_inventory(plan, {**whole, "model.layers.4.enorm.weight": None})
    assert fault.code == "M05"
    assert "where MTP lives" in fault.message
    bent = {**whole, "model.norm.weight": TensorSpec("BF16", (7,))}
    assert codes(check_inventory(plan, bent)) == {"M17"}
    # Conversions keep the dtype that a release stores.
    other = {**whole, "model.norm.weight": TensorSpec("F32", whole["model.norm.weight"].shape)}
    assert check_inventory(plan, other) == []


def test_check_runs_everything_at_once() -> None:
    table = find_table("glm_moe_dsa")
    plan = make_plan(config(), table)
    assert check(table, config(), plan.hf) == []
    assert codes(check(table, {"model_type": "glm_moe_dsa"})) == {"M01"}


def test_rules_mean_in_the_docs_what_they_mean_in_the_code() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs" / "mapping.md"
    text = docs.read_text(encoding="utf-8").replace("`", "")
    assert [f"| {code} | {meaning}" in text for code, meaning in RULES.items()] == [True] * 17


PARTS = """\
format = 1
model_type = "toy"
stacks = [{ each = "once", mcore = "", hf = "", use = ["root"] }]
[blocks.root]
ROWS
[parts."p.a"]
rows = { q = 2, r = 4 }
[shapes]
"p.a" = DIMS
"""
TOY = {"model_type": "toy", "num_hidden_layers": 1, "num_local_experts": 4, "dtype": "bfloat16"}


def faults_of(folder: Path, *rows: str, dims: str = "[6, 2]") -> list[str]:
    path = folder / "toy.toml"
    path.write_text(PARTS.replace("ROWS", "\n".join(rows)).replace("DIMS", dims))
    return [f.code for f in check(parse_table(path), TOY)]


def test_partial_rows_must_tile_their_tensor(tmp_path: Path) -> None:
    q, r = '"b.q" = { part = "p.a" }', '"b.r" = { part = "p.a" }'
    experts = '"x.{expert}.w" = { slice = "p.a" }'
    assert faults_of(tmp_path, q, r) == []
    assert faults_of(tmp_path, experts, dims="[4, 2]") == []
    # Entries 0 to 3 and rows 0 to 1: as many elements as the tensor has, no two boxes alike.
    assert faults_of(tmp_path, experts, q) == ["M09"]
    assert faults_of(tmp_path, q) == ["M09"]
    assert faults_of(tmp_path, q, '"c.q" = { part = "p.a" }', r) == ["M09"]
    assert faults_of(tmp_path, experts) == ["M09"]


@pytest.mark.parametrize(
    ("mcore", "key"),
    [
        ("", "optimizer.state.weight"),
        ("optimizer.", "x.weight"),
        ("chained_0.", "optimizer.x.weight"),
        ("chained_{layer}.optimizer.", "x.weight"),
        ("", ""),
    ],
)
def test_keys_that_would_not_be_read_back(mcore: str, key: str) -> None:
    table = find_table("glm_moe_dsa")
    row = Row("own", key, "copy", ("model.norm.weight",), f"{table.path.name}:9")
    each = "layer in trunk" if mcore.startswith("chained_{") else "once"
    stack = Stack(each, mcore, "", (Use("own"),), "t:1")
    broken = edited(replace(table, stacks=(*table.stacks, stack)), "own", (row,))
    faults = [f for f in check_table(broken) if f.code == "M01"]
    assert [f.where for f in faults] == [row.where]
    fine = edited(broken, "own", (replace(row, key="model.optimizer.weight"),))
    assert ("M01" in codes(check_table(fine))) == ("optimizer." in mcore)


def test_the_reader_leaves_out_what_the_rule_refuses() -> None:
    assert rules._OPTIMIZER.pattern == dist_metadata._OPTIMIZER.pattern


def test_a_tensor_that_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    nines = "*".join(["9" * 18] * 8)
    dims = str([nines] * 8).replace("'", '"')
    row = '"b.a" = "p.a"'
    assert faults_of(tmp_path, row, dims=dims) == ["M01"]
    with pytest.raises(UsageError, match=r"toy\.toml:5: p\.a has more elements than"):
        make_plan(TOY, parse_table(tmp_path / "toy.toml"))


def test_codes_are_documented_in_rules() -> None:
    assert sorted(RULES) == [f"M{i:02d}" for i in range(1, len(RULES) + 1)]
