"""Content that dialects store otherwise: the ops, and the plans that use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpconv.mapping.check import check_plan
from mtpconv.mapping.layouts import (
    DIALECTS,
    addresses,
    as_stored,
    detect_layout,
    layout_of,
    read_dialect,
    training_layout,
)
from mtpconv.mapping.ops import Concat, Copy, Op, ShapeError, Slice
from mtpconv.mapping.plan import Plan, make_plan
from mtpconv.mapping.stored import REORDERINGS, Half, RopeLast, Transposed
from mtpconv.mapping.table_reader import find_table
from mtpconv.tensors import Shape
from tests.mapping.toy import config

CONFIGS = Path(__file__).resolve().parents[2] / "fixtures" / "configs"
small = st.integers(1, 4)
Case = tuple[Op, list[Shape]]


@st.composite
def turns(draw: st.DrawFn) -> Case:
    rope, rest = draw(small), draw(small)
    tail = draw(st.lists(small, max_size=1))
    return RopeLast(rope + rest, rope), [(draw(small) * (rope + rest), *tail)]


@st.composite
def transposes(draw: st.DrawFn) -> Case:
    columns = draw(small)
    return Transposed(Concat()), [(draw(small), columns), (draw(small), columns)]


def plan_of(name: str, **changes: Any) -> Plan:
    raw: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    raw |= {"num_hidden_layers": 4} | ({"num_experts": 2} if "num_experts" in raw else {})
    return make_plan(raw | changes, find_table(raw["model_type"]))


@given(st.one_of(turns(), transposes()), st.integers(0, 1 << 30))
def test_law_forward_and_backward_undo_each_other(case: Case, seed: int) -> None:
    op, shapes = case
    random = np.random.default_rng(seed)
    operands = [random.integers(0, 1 << 16, s, dtype=np.uint16) for s in shapes]
    made = op.forward(operands)
    assert made.shape == op.shape(shapes)
    for back, operand in zip(op.backward(made, shapes), operands, strict=True):
        np.testing.assert_array_equal(back, operand)
    np.testing.assert_array_equal(op.forward(op.backward(made, shapes)), made)


@given(small, small, small, st.booleans(), st.integers(0, 1 << 30))
def test_law_two_halves_tile_what_they_are_halves_of(
    half: int, columns: int, entry: int, packed: bool, seed: int
) -> None:
    shapes: list[Shape] = [(half, columns), (half, columns)]
    op: Op = Concat()
    if packed:
        op, shapes = Slice(entry - 1), [(entry, 2 * half, columns)]
    random = np.random.default_rng(seed)
    operands = [random.integers(1, 1 << 16, s, dtype=np.uint16) for s in shapes]
    halves = [Half(op, index) for index in (0, 1)]
    made = [h.forward(operands) for h in halves]
    np.testing.assert_array_equal(np.concatenate(made), op.forward(operands))
    assert [m.shape for m in made] == [h.shape(shapes) for h in halves]
    whole = op.backward(op.forward(operands), shapes)
    back = [h.backward(m, shapes) for h, m in zip(halves, made, strict=True)]
    for first, second, wanted in zip(*back, whole, strict=True):
        assert not (first * second).any()
        np.testing.assert_array_equal(first + second, wanted)


def test_rope_last_turns_every_head() -> None:
    rows = np.arange(10, dtype=np.uint16).reshape(10, 1)
    assert RopeLast(5, 2).forward([rows]).ravel().tolist() == [2, 3, 4, 0, 1, 7, 8, 9, 5, 6]


def test_transposed_is_what_numpy_transposes() -> None:
    gate, up = (np.arange(6, dtype=np.uint16).reshape(2, 3) + n for n in (0, 10))
    np.testing.assert_array_equal(
        Transposed(Concat()).forward([gate, up]), np.concatenate([gate, up]).T
    )
    packed = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
    np.testing.assert_array_equal(Transposed(Slice(1)).forward([packed]), packed[1].T)


@pytest.mark.parametrize(
    ("op", "shape"),
    [(RopeLast(4, 4), (4,)), (RopeLast(4, 0), (4,)), (RopeLast(4, 2), (6,)), (RopeLast(4, 2), ()),
     (Half(Copy(), 0), (3,)), (Half(Copy(), 1), ()), (Transposed(Copy()), (3,)),
     (Transposed(Copy()), (1, 2, 3))],
)  # fmt: skip
def test_shape_laws_are_refused(op: Op, shape: Shape) -> None:
    with pytest.raises(ShapeError, match=f"^{op.name}"):
        op.shape([shape])


@pytest.mark.parametrize(
    ("plan", "dialect"),
    [
        (plan_of("qwen3-next-80b-a3b"), "slime_linear_attention"),
        (plan_of("qwen3.5-35b-a3b-text"), "slime_linear_attention"),
        (plan_of("qwen3.6-27b-text"), "slime_linear_attention"),
        (plan_of("qwen3-next-80b-a3b"), "mcore_bridge_modules"),
        (plan_of("qwen3.6-27b-text"), "mcore_bridge_modules"),
        (make_plan(config(), find_table("glm_moe_dsa")), "slime_indexer"),
        (make_plan(config(), find_table("glm_moe_dsa")), "singleton_local_shards"),
        (make_plan(config(), find_table("glm_moe_dsa")), "grouped_gemm"),
        (plan_of("qwen3.5-35b-a3b-text"), "singleton_local_shards"),
        (make_plan(config("deepseek_v32"), find_table("deepseek_v32")), "slime_indexer"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.geometry.model_type,
)
def test_a_dialect_is_recognised_and_breaks_no_rule(plan: Plan, dialect: str) -> None:
    for other in (dialect, "stacked_experts", "mtp_model_layer", "language_model"):
        if other in read_dialect(dialect).excludes:
            continue
        layout = layout_of([dialect, other])
        there = as_stored(plan, layout)
        assert there.hf == plan.hf
        assert there.regions == plan.regions
        assert check_plan(there, layout) == []
        spots = addresses(there, layout)
        found = detect_layout(plan, {spot.key for spot in spots})
        assert dialect in found.name.split("+")
        assert addresses(as_stored(plan, found), found) == spots


@pytest.mark.parametrize("model", ["qwen3-next-80b-a3b", "qwen3.5-35b-a3b-text"])
def test_a_checkpoint_of_megatron_is_not_taken_for_slimes(model: str) -> None:
    plan = plan_of(model)
    written = training_layout(plan)
    found = detect_layout(plan, {spot.key for spot in addresses(plan, written)})
    assert found == written
    assert as_stored(plan, found) is plan


def test_only_qwen3_next_has_halves_exchanged() -> None:
    layout = layout_of(["slime_linear_attention"])
    for model, word in (("qwen3-next-80b-a3b", "swap_halves"), ("qwen3.5-35b-a3b-text", "copy")):
        steps = as_stored(plan_of(model), layout).steps
        assert {s.op.name for s in steps if s.key.endswith("eh_proj.weight")} == {word}


def test_dialects_name_rows_and_words_that_exist() -> None:
    tables = [find_table(t) for t in ("qwen3_next", "glm_moe_dsa", "deepseek_v3")]
    rows = [row for table in tables for block in table.blocks.values() for row in block]
    for dialect in map(read_dialect, DIALECTS):
        for order in dialect.reordered:
            assert order.op in REORDERINGS
            assert order.key in {row.key for row in rows}
        for cut in dialect.halved:
            assert any(row.key.endswith(cut.key) and row.op == "concat" for row in rows)
        for kept in dialect.kept:
            assert any(name.startswith(kept.hf) for row in rows for name in row.hf)
