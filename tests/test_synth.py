"""Small checkpoints of every published config: sound by their own audit, and they convert."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.sides import open_sides
from mtpconv.cli.app import app
from mtpconv.convert import hf2mcore
from mtpconv.errors import UnsupportedError, UsageError
from mtpconv.geometry import read_geometry, text_config
from mtpconv.mapping.plan import make_plan
from mtpconv.mapping.table_reader import find_table
from mtpconv.synth import fewer, released, shrink, synth
from tests.conftest import ROOT

CONFIGS = ROOT / "fixtures" / "configs"
NAMES = sorted(p.stem for p in CONFIGS.glob("*.json"))
#: Enough for one layer of each kind where kinds alternate.
LAYERS, EXPERTS = 8, 4


def config(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return value


@pytest.mark.parametrize("name", NAMES)
def test_it_passes_its_own_audit_and_converts(name: str, tmp_path: Path) -> None:
    words = ["synth", CONFIGS / f"{name}.json", tmp_path / "hf"]
    words += ["--layers", LAYERS, "--experts", EXPERTS, "--shards", 2]
    assert app([*map(str, words)], standalone_mode=False) in (0, None)
    report = audit(None, open_sides(None, tmp_path / "hf").after)
    assert report.verdict == "pass", [f.message for f in report.findings][:5]
    # MiniMax-M2 promises depths that no release of it has ever shipped.
    assert {f.code for f in report.findings} <= ({"P01"} if name == "minimax-m2" else set())
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    geometry = read_geometry(written)
    assert geometry.layers == LAYERS
    assert geometry.experts in (0, EXPERTS)
    table = find_table(geometry.model_type)
    if not table.converts:
        with pytest.raises(UnsupportedError, match="is not converted"):
            hf2mcore(tmp_path / "hf", tmp_path / "mcore")
        return
    hf2mcore(tmp_path / "hf", tmp_path / "mcore")
    sides = open_sides(tmp_path / "hf", tmp_path / "mcore")
    assert audit(sides.before, sides.after).verdict == "pass"


def test_layers_are_cut_out_of_every_list_and_mtp_keeps_its_entries() -> None:
    step = config("step-3.5-flash")
    small = fewer(step, layers=5)
    assert small["layer_types"] == step["layer_types"][:5] + step["layer_types"][45:]
    assert small["num_nextn_predict_layers"] == 3
    flash = fewer(config("deepseek-v4-flash"), layers=4)
    assert flash["compress_ratios"] == [0, 0, 4, 128, 0]
    nemotron = fewer(config("nemotron-3-super-120b-a12b"), layers=9)
    assert nemotron["hybrid_override_pattern"] == "MEMEMEM*E"
    assert nemotron["mtp_hybrid_override_pattern"] == "*E"
    longcat = fewer(config("longcat-flash-chat"), layers=3, experts=6)
    assert (longcat["num_layers"], longcat["n_routed_experts"], longcat["moe_topk"]) == (3, 6, 6)
    assert "num_hidden_layers" not in longcat
    with pytest.raises(UsageError, match="the config has 45 trunk layers"):
        fewer(step, layers=46)


def test_a_decoder_inside_a_larger_config_is_what_is_cut() -> None:
    whole = config("qwen3.5-35b-a3b")
    small = fewer(whole, layers=4, experts=2)
    text = text_config(small)
    assert (text["num_hidden_layers"], text["num_experts"], len(text["layer_types"])) == (4, 2, 4)
    assert text["num_experts_per_tok"] == 2
    assert small["vision_config"] == whole["vision_config"]
    assert whole["text_config"]["num_experts"] == 256, "the original is not touched"


def test_expert_groups_stay_possible() -> None:
    small = fewer(config("deepseek-v3"), experts=4)
    assert (small["n_group"], small["topk_group"]) == (1, 1)
    kept = fewer(config("deepseek-v3"), experts=16)
    assert (kept["n_group"], kept["topk_group"]) == (8, 4)


def test_deepseek_v4_has_the_published_number_of_scales() -> None:
    """69,187 tensors in the listing of DeepSeek-V4-Flash, 34,167 of them scales."""
    raw = config("deepseek-v4-flash")
    inventory = released(make_plan(raw, find_table("deepseek_v4")))
    assert len(inventory) == 69_187
    assert sum(n.endswith(".scale") for n in inventory) == 34_167
    weight, scale = (inventory[f"layers.0.ffn.experts.0.w1.{end}"] for end in ("weight", "scale"))
    assert (weight.dtype, weight.shape) == ("I8", (2048, 2048))
    assert (scale.dtype, scale.shape) == ("F8_E8M0", (2048, 128))


@pytest.mark.parametrize("name", ["deepseek-r1", "deepseek-v3.2-exp", "kimi-k2"])
def test_fp8_configs_give_fp8_checkpoints(name: str) -> None:
    raw = fewer(shrink(config(name)), layers=4, experts=2)
    inventory = released(make_plan(raw, find_table(raw["model_type"])))
    kinds = Counter(s.dtype for s in inventory.values())
    assert kinds["F8_E4M3"] == sum(n.endswith("_scale_inv") for n in inventory) > 20


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    plan = make_plan(
        fewer(shrink(config("deepseek-v4-flash")), layers=4, experts=2), find_table("deepseek_v4")
    )
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        synth(plan, tmp_path / folder, seed=seed, shards=1)
    a, b, c = ((tmp_path / f / "model.safetensors").read_bytes() for f in "abc")
    assert a == b != c
