"""Plans: what a config promises, exactly."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from mtpconv.errors import RefusedError, UsageError
from mtpconv.mapping.check import check_plan
from mtpconv.mapping.plan import make_plan, promised_names
from mtpconv.mapping.table_reader import find_table
from tests.mapping.toy import config, configs


@given(configs())
def test_law_every_plan_passes_its_own_rules(raw: dict[str, Any]) -> None:
    plan = make_plan(raw, find_table(raw["model_type"]))
    assert check_plan(plan) == []
    assert len({s.key for s in plan.steps}) == len(plan.steps)
    depths = {r.index for r in plan.regions.values() if r.kind == "mtp"}
    assert depths == set(range(raw["num_nextn_predict_layers"]))
    # Elements are conserved: both sides of a plan hold the same number of words.
    copies = {c.hf for c in plan.copies}
    hf = sum(s.elements for n, s in plan.hf.items() if n not in copies)
    mcore = 0
    for step in plan.steps:
        size = 1
        for n in step.shape:
            size *= n
        mcore += size
    assert hf == mcore


def test_copies_follow_the_checkpoint_and_else_the_table() -> None:
    raw = config("deepseek_v3")
    table = find_table("deepseek_v3")
    shipped = make_plan(raw, table)
    assert [c.hf for c in shipped.copies] == [
        "model.layers.3.embed_tokens.weight",
        "model.layers.3.shared_head.head.weight",
    ]
    without = [n for n in shipped.hf if n not in {c.hf for c in shipped.copies}]
    assert make_plan(raw, table, without).copies == ()


def test_zero_null_and_absent_depths() -> None:
    table = find_table("glm_moe_dsa")
    for value in (0, None):
        plan = make_plan(config(num_nextn_predict_layers=value), table)
        assert plan.geometry.depths == 0
        assert plan.geometry.mtp_field == "num_nextn_predict_layers"
    raw = config()
    del raw["num_nextn_predict_layers"]
    plan = make_plan(raw, table)
    assert (plan.geometry.depths, plan.geometry.mtp_field) == (0, None)


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "kv_lora_rank"])
def test_a_missing_field_is_named(field: str) -> None:
    raw = config()
    del raw[field]
    with pytest.raises(RefusedError, match=f"{field} is missing"):
        make_plan(raw, find_table("glm_moe_dsa"))


@given(configs())
def test_law_names_need_no_dims(raw: dict[str, Any]) -> None:
    table = find_table(raw["model_type"])
    plan = make_plan(raw, table)
    bare = {k: v for k, v in raw.items() if k not in ("hidden_size", "kv_lora_rank")}
    assert promised_names(bare, table) == plan.regions
    fewer = [n for n in plan.hf if "shared_head.head" not in n]
    assert promised_names(bare, table, fewer) == make_plan(raw, table, fewer).regions


def test_a_table_of_another_model_is_refused() -> None:
    with pytest.raises(UsageError, match=r"config\.json says 'glm_moe_dsa'"):
        make_plan(config(), find_table("deepseek_v3"))


def test_mtp_shares_the_decoder_block_of_the_trunk() -> None:
    plan = make_plan(config(), find_table("glm_moe_dsa"))
    tails = {
        kind: {s.row.key for s in plan.steps if s.region.kind == kind} for kind in ("trunk", "mtp")
    }
    glue = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight"}
    assert glue <= tails["mtp"]
    assert tails["mtp"] - glue <= tails["trunk"]
