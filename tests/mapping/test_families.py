"""Every shipped table against what its family really published."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mtpconv.geometry import EXPERT_FIELDS, read_geometry, text_config
from mtpconv.mapping.check import check, check_plan
from mtpconv.mapping.plan import Plan, make_plan
from mtpconv.mapping.table import Table
from mtpconv.mapping.table_reader import find_table, parse_table, table_names

CONFIGS = Path(__file__).resolve().parents[2] / "fixtures" / "configs"

#: What issue 5 asks for; a table may come, none may go.
FAMILIES = {
    "bailing_moe_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "ernie4_5_moe", "exaone_moe",
    "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hy_v3", "kimi_k2", "llama", "longcat_flash",
    "mimo", "mimo_v2_flash", "minimax_m2", "mixtral", "nemotron_h", "qwen2", "qwen3", "qwen3_5",
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "step3p5",
}  # fmt: skip

RELEASES = [(name, release) for name in table_names() for release in find_table(name).releases]


def config_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / entry["config"]).read_text(encoding="utf-8"))
    return found


def plan_of(name: str, release: str) -> Plan:
    """All of a release: only totals need every expert."""
    table = find_table(name)
    entry = table.releases[release]
    return make_plan(config_of(entry), table, entry.get("present"))


def small(config: dict[str, Any]) -> dict[str, Any]:
    """The same layers with two experts each: all rows, a hundredth of the steps."""
    text = text_config(config)
    fewer = {field: 2 for field in EXPERT_FIELDS if text.get(field)}
    if text is config:
        return config | fewer
    return config | {"text_config": dict(text) | fewer}


def totals(plan: Plan) -> dict[str, int]:
    mtp = [n for n, region in plan.regions.items() if region.kind == "mtp"]
    return {
        "tensors": len(plan.hf),
        "elements": sum(s.elements for s in plan.hf.values()),
        "bytes": sum(s.nbytes for s in plan.hf.values()),
        "mtp_tensors": len(mtp),
        "mtp_elements": sum(plan.hf[n].elements for n in mtp),
    }


def test_all_families_have_a_table() -> None:
    assert set(table_names()) >= FAMILIES


@pytest.mark.parametrize(("name", "release"), RELEASES)
def test_the_plan_has_the_published_totals(name: str, release: str) -> None:
    entry = find_table(name).releases[release]
    found = totals(plan_of(name, release))
    # Tensors that the table carries beside are in a release's totals, not in the plan's.
    found["tensors"] += entry.get("carried_tensors", 0)
    found["elements"] += entry.get("carried_elements", 0)
    found["bytes"] += 2 * entry.get("carried_elements", 0)
    wanted = {what: entry[what] for what in found if what in entry}
    assert {what: found[what] for what in wanted} == wanted


@pytest.mark.parametrize("name", table_names())
def test_every_table_is_held_against_a_published_config(name: str) -> None:
    table = find_table(name)
    assert table.releases
    for entry in table.releases.values():
        config = small(config_of(entry))
        assert config["model_type"] == name
        assert check(table, config) == []
        assert check_plan(make_plan(config, table, entry.get("present"))) == []
        assert set(entry) <= _RELEASE_KEYS


_RELEASE_KEYS = {
    "bytes", "carried_elements", "carried_tensors", "computed", "config", "elements",
    "mtp_elements", "mtp_tensors", "present", "tensors",
}  # fmt: skip


@pytest.mark.parametrize("name", table_names())
def test_a_table_that_is_not_converted_says_why(name: str) -> None:
    table = find_table(name)
    assert table.converts or table.needs


@pytest.mark.parametrize(
    "name", [n for n in table_names() if any("mtp" in s.each for s in find_table(n).stacks)]
)
def test_the_inventory_of_a_plan_is_covered_and_nothing_less(name: str) -> None:
    table = find_table(name)
    config = small(config_of(next(iter(table.releases.values()))))
    if not read_geometry(config, table.mtp_default).depths:
        config["num_nextn_predict_layers"] = 1
    plan = make_plan(config, table)
    inventory = dict(plan.hf)
    assert check(table, config, inventory) == []
    lost = next(n for n, region in plan.regions.items() if region.kind == "mtp")
    del inventory[lost]
    faults = [str(f) for f in check(table, config, inventory)]
    assert faults
    assert any(lost in f for f in faults)


def test_glm_5_2_indexers_are_in_21_trunk_layers_and_in_mtp() -> None:
    config = config_of(find_table("glm_moe_dsa").releases["GLM-5.2"])
    plan = make_plan(small(config), find_table("glm_moe_dsa"))
    layers = sorted(int(n.split(".")[2]) for n in plan.hf if n.endswith("indexer.wk.weight"))
    assert layers == [0, 1, *range(2, 78, 4), 78]


def test_only_the_checkpoint_tells_glm_4_6_from_4_7() -> None:
    config = small(config_of(find_table("glm4_moe").releases["GLM-4.6"]))
    copy = "model.layers.92.shared_head.head.weight"
    assert copy in make_plan(config, find_table("glm4_moe")).hf
    assert copy not in make_plan(config, find_table("glm4_moe"), []).hf
    assert copy in make_plan(config, find_table("glm4_moe"), [copy]).hf


def test_packed_and_single_experts_are_told_apart_for_trunk_and_mtp() -> None:
    entry = find_table("qwen3_5_moe").releases["Qwen3.5-35B-A3B"]
    trunk = "model.language_model.layers.0.mlp.experts."
    names = make_plan(
        small(config_of(entry)),
        find_table("qwen3_5_moe"),
        [trunk + "0.gate_proj.weight", "mtp.layers.0.mlp.experts.gate_up_proj"],
    ).hf
    assert trunk + "1.down_proj.weight" in names
    assert trunk + "gate_up_proj" not in names
    assert "mtp.layers.0.mlp.experts.down_proj" in names
    assert "mtp.layers.0.mlp.experts.0.down_proj.weight" not in names


def test_depths_are_counted_where_the_config_is_silent() -> None:
    table = find_table("mimo_v2_flash")
    config = small(config_of(table.releases["MiMo-V2-Flash"]))
    assert make_plan(config, table).geometry.depths == 3
    present = [f"model.mtp.layers.{d}.enorm.weight" for d in (0, 1)]
    assert make_plan(config, table, present).geometry.depths == 2
    assert make_plan(config, table, ["model.norm.weight"]).geometry.depths == 0
    assert make_plan(config, table, ["model.norm.weight"], depths=3).geometry.depths == 3


def test_a_promise_in_the_config_is_kept_whatever_is_there() -> None:
    table = find_table("mimo")
    config = config_of(table.releases["MiMo-7B"])
    assert make_plan(config, table, ["model.norm.weight"]).geometry.depths == 1


@pytest.mark.parametrize("name", ["glm4_moe", "llama", "qwen3_next", "mimo", "bailing_moe_v2"])
def test_a_tied_head_is_a_copy_or_nothing(name: str) -> None:
    table = find_table(name)
    config = small(config_of(next(iter(table.releases.values()))))
    config["tie_word_embeddings"] = True
    assert "lm_head.weight" not in make_plan(config, table).hf
    plan = make_plan(config, table, ["lm_head.weight"])
    assert [c.hf for c in plan.copies] == ["lm_head.weight"]
    assert all(s.key != "output_layer.weight" for s in plan.steps)


def test_a_tied_head_copied_into_mtp_is_a_copy_of_the_embedding() -> None:
    table = find_table("glm4_moe")
    config = small(config_of(table.releases["GLM-4.5-Air"])) | {"tie_word_embeddings": True}
    copies = {c.hf: c.of for c in make_plan(config, table).copies}
    assert copies == {
        "model.layers.46.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.46.shared_head.head.weight": "model.embed_tokens.weight",
    }


def test_nested_mtp_is_numbered_through() -> None:
    table = find_table("nemotron_h")
    config = small(config_of(table.releases["Nemotron-3-Super-120B-A12B"]))
    plan = make_plan(config | {"num_nextn_predict_layers": 2}, table)
    pairs = {s.key: s.hf for s in plan.steps}
    assert pairs["mtp.layers.1.eh_proj.weight"] == ("mtp.layers.2.eh_proj.weight",)
    assert pairs["mtp.layers.1.final_layernorm.weight"] == ("mtp.layers.3.final_layernorm.weight",)
    inner = "mtp.layers.1.mtp_model_layer.layers.1.mlp.router.weight"
    assert pairs[inner] == ("mtp.layers.3.mixer.gate.weight",)
    assert check_plan(plan) == []
    repeated = config | {"num_nextn_predict_layers": 3, "mtp_use_repeated_layer": True}
    assert make_plan(repeated, table).geometry.depths == 1


def test_sliding_layers_have_heads_of_their_own() -> None:
    table = find_table("step3p5")
    plan = make_plan(small(config_of(table.releases["Step-3.5-Flash"])), table)
    q = "model.layers.{}.self_attn.q_proj.weight"
    assert plan.hf[q.format(0)].shape == (64 * 128, 4096)
    assert plan.hf[q.format(1)].shape == (96 * 128, 4096)
    assert plan.hf[q.format(47)].shape == (96 * 128, 4096)


def table_with(tmp_path: Path, text: str) -> Table:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return parse_table(path)


def test_a_part_that_is_not_cut_is_a_fault(tmp_path: Path) -> None:
    table = table_with(
        tmp_path,
        """
format = 1
model_type = "x"
stacks = [{ each = "once", mcore = "", hf = "", use = ["a"] }]
[blocks.a]
"in_proj.weight.q" = { part = "qkv.weight" }
"in_proj.weight.k" = { part = "kv.weight" }
[parts."qkv.weight"]
rows = { k = 1 }
[parts."other"]
repeats = 2
[shapes]
"qkv.weight" = ["1"]
"kv.weight" = ["1"]
""",
    )
    assert [f.code for f in table.faults] == ["M01", "M02", "M02"]
