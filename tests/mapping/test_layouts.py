"""Layouts: injective respellings, recognised from the keys alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given

from mtpconv.errors import UsageError
from mtpconv.mapping.layouts import (
    DIALECTS,
    addresses,
    detect_layout,
    layout_of,
    read_dialect,
    training_layout,
)
from mtpconv.mapping.plan import make_plan
from mtpconv.mapping.table_reader import find_table, mappings_folder
from tests.mapping.toy import config, configs

#: local_spec_gqa respells nothing that this family keeps apart, the others nothing that it has, or
#: do not respell (tests/mapping/test_stored.py).
ABSENT = (
    "local_spec_gqa", "singleton_local_shards", "slime_linear_attention", "slime_indexer",
    "mcore_bridge_modules",
)  # fmt: skip
OTHERS = [d for d in DIALECTS if d not in ABSENT]
COMBINATIONS = [
    names
    for size in range(len(OTHERS) + 1)
    for names in itertools.combinations(OTHERS, size)
    if not any(n in read_dialect(d).excludes for d in names for n in names)
]


def test_every_file_is_a_dialect() -> None:
    files = {path.stem for path in (mappings_folder() / "layouts").iterdir()}
    assert set(DIALECTS) == files
    assert len(DIALECTS) == len(files)


@given(configs())
def test_law_layouts_are_injective_and_recognised(raw: dict[str, Any]) -> None:
    plan = make_plan(raw, find_table(raw["model_type"]))
    local = ("local_spec_mla",)
    inner = ("stacked_experts", "mtp_model_layer", "language_model")
    for names in ((), ("stacked_experts",), local, inner):
        layout = layout_of(names)
        spots = addresses(plan, layout)
        assert len(set(spots)) == len(plan.steps)
        keys = {a.key for a in spots}
        found = detect_layout(plan, keys)
        assert addresses(plan, found) == spots


@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_every_combination_of_dialects_is_recognised(names: tuple[str, ...]) -> None:
    raw = config("deepseek_v3", first_k_dense_replace=0)
    plan = make_plan(raw, find_table("deepseek_v3"))
    spots = addresses(plan, layout_of(names))
    assert addresses(plan, detect_layout(plan, {a.key for a in spots})) == spots


def test_training_layout_stacks_layers_only_if_all_are_alike() -> None:
    table = find_table("deepseek_v3")
    mixed = training_layout(make_plan(config("deepseek_v3"), table))
    alike = training_layout(make_plan(config("deepseek_v3", first_k_dense_replace=0), table))
    assert mixed.name == "stacked_experts"
    assert alike.name == "stacked_layers+stacked_experts"


def test_stacked_layers_and_experts_become_two_leading_axes() -> None:
    plan = make_plan(config("deepseek_v3", first_k_dense_replace=0), find_table("deepseek_v3"))
    layout = layout_of(["stacked_layers", "stacked_experts"])
    spot = layout.address("decoder.layers.2.mlp.experts.experts.3.linear_fc1.weight", plan.geometry)
    assert spot.key == "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    assert (spot.index, spot.lead) == ((2, 3), (3, 4))
    mtp = layout.address("mtp.layers.0.transformer_layer.input_layernorm.weight", plan.geometry)
    assert (mtp.index, mtp.lead) == ((), ())


def test_an_unknown_layout_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="stacked_experts"):
        layout_of(["sideways"])


def test_a_vision_language_model_keeps_its_decoder_under_language_model() -> None:
    plan = make_plan(config("deepseek_v3"), find_table("deepseek_v3"))
    layout = layout_of(["stacked_experts", "language_model"])
    spot = layout.address("mtp.layers.0.enorm.weight", plan.geometry)
    assert spot.key == "language_model.mtp.layers.0.enorm.weight"


def test_dialects_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="hybrid_layers and stacked_layers exclude each other"):
        layout_of(["stacked_layers", "hybrid_layers"])


def test_hybrid_layers_are_pairs_and_mtp_depths_small_stacks() -> None:
    """Names as in megatron-core 0.19.2's gpt_checkpoint_interop and hybrid_layer_specs."""
    plan = make_plan(config("deepseek_v3"), find_table("deepseek_v3"))
    layout = layout_of(["stacked_experts", "hybrid_layers"])
    keys = {step.key: layout.address(step.key, plan.geometry).key for step in plan.steps}
    assert keys["decoder.final_layernorm.weight"] == "decoder.final_norm.weight"
    norm = "decoder.layers.2.input_layernorm.weight"
    assert keys[norm] == "decoder.layers.4.input_layernorm.weight"
    fc2 = "mlp.experts.experts.3.linear_fc2.weight"
    packed = "mlp.experts.experts.linear_fc2.weight"
    assert keys[f"decoder.layers.2.{fc2}"] == f"decoder.layers.5.{packed}"
    inner = "mtp.layers.0.mtp_model_layer.layers."
    assert keys[f"mtp.layers.0.transformer_layer.{fc2}"] == f"{inner}1.{packed}"
    attention = "self_attention.linear_proj.weight"
    assert keys[f"mtp.layers.0.transformer_layer.{attention}"] == f"{inner}0.{attention}"
    assert keys["mtp.layers.0.eh_proj.weight"] == "mtp.layers.0.eh_proj.weight"
