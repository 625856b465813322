"""Megatron's args: against another checkpoint's, against an HF config, absent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpconv.audit.args_rules import COMPARED, compare_args, compare_with_config
from mtpconv.audit.audit import audit
from mtpconv.audit.finding import Report
from mtpconv.audit.options import Options
from mtpconv.audit.sides import open_sides
from mtpconv.audit.subject import RUN_CONFIG
from mtpconv.convert import hf2mcore
from mtpconv.geometry import read_geometry
from mtpconv.megatron_args import FLAGLESS, RENAMED, megatron_args
from mtpconv.store.dist_metadata_writer import write_common
from mtpconv.store.objects import read_common
from mtpconv.store.source import FOLDER
from tests.audit.models import CONFIGS, base_model, errors, said, shown

Change = Callable[[dict[str, Any]], object]
GLM = json.loads((CONFIGS / "glm-5.2.json").read_text())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("args")
    hf = base_model("glm-5.2.json").write(place / "hf")
    hf2mcore(hf, place / "mcore")
    return hf, place / "mcore"


def edited(whole: Path, place: Path, change: Change, *, source: bool = True) -> Path:
    """A copy with another common state; `source`: the HF folder's other files are still there."""
    copy = shutil.copytree(whole, place)
    folder = copy / "release"
    common = read_common(folder)
    change(common)
    write_common(folder, common)
    if not source:
        for kept in copy.rglob(FOLDER):
            shutil.rmtree(kept)
    return copy


def run(before: Path | None, after: Path, **options: Any) -> Report:
    sides = open_sides(before, after)
    return audit(sides.before, sides.after, Options(**options))


def without_count(common: dict[str, Any]) -> None:
    del common["args"]["mtp_num_layers"]


def without_args(common: dict[str, Any]) -> None:
    del common["args"]


@pytest.mark.parametrize("change", [without_count, without_args])
def test_a_lost_promise_is_an_error_everywhere(
    change: Change, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    hf, mcore = pair
    damaged = edited(mcore, tmp_path / "a", change)
    bare = edited(mcore, tmp_path / "b", change, source=False)
    field = "mtp_num_layers" if change is without_count else "args"
    assert said(run(mcore, damaged)) == [("config_mismatch", field)]
    assert said(run(hf, damaged)) == [("config_mismatch", field)]
    for alone in (damaged, bare):
        report = run(None, alone)
        assert [(f.kind, f.prefix) for f in errors(report)] == [
            ("mtp_orphan", report.findings[0].prefix)
        ], shown(report)
        assert report.mtp.status == "orphan"
    # Both are silent, and so agree.
    assert run(damaged, bare).verdict == "pass"
    assert run(damaged, mcore).verdict == ("fail" if change is without_count else "pass")


def test_without_args_missing_mtp_is_still_missed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    model.config["num_nextn_predict_layers"] = 0
    for name in model.mtp():
        del model.tensors[name]
    hf2mcore(model.write(tmp_path / "hf"), tmp_path / "mcore")
    damaged = edited(tmp_path / "mcore", tmp_path / "a", without_args)
    (config,) = damaged.rglob("config.json")
    config.write_text((pair[0] / "config.json").read_text())
    assert [f.kind for f in errors(run(None, damaged))] == ["source_damaged", "mtp_missing"]


def test_megatron_bridge_says_it_elsewhere(pair: tuple[Path, Path], tmp_path: Path) -> None:
    hf, mcore = pair
    copy = edited(mcore, tmp_path / "a", without_args, source=False)
    (copy / "release" / RUN_CONFIG).write_text("model:\n  mtp_num_layers: 1\n")
    for before in (None, hf, mcore):
        report = run(before, copy)
        assert report.verdict == "pass", shown(report)
        assert any(f.severity == "warning" and RUN_CONFIG in f.message for f in report.findings)


CHANGED: dict[str, Any] = {
    "rotary_base": 123, "rotary_percent": 0.5, "rotary_scaling_factor": 9.0,
    "untie_embeddings_and_output_weights": False, "padded_vocab_size": 96, "num_experts": 2,
    "kv_channels": 3, "hidden_size": 8, "num_layers": 3, "norm_epsilon": 1e-3, "q_lora_rank": None,
    "moe_router_topk": 1, "moe_layer_freq": 1, "swiglu": False, "rope_type": "yarn",
    "position_embedding_type": "none", "moe_router_score_function": "softmax",
    "experimental_attention_variant": None,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_args_that_change_what_weights_mean(
    name: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    hf, mcore = pair

    def change(common: dict[str, Any]) -> None:
        for spelling in (name, RENAMED.get(name, name)):
            common["args"][spelling] = CHANGED[name]

    damaged = edited(mcore, tmp_path / "a", change)
    report = run(mcore, damaged)
    assert ("config_mismatch", name) in said(report), shown(report)
    assert {k for k, _ in said(report)} == {"config_mismatch"}
    assert {f.file for f in errors(report)} == {"args"}
    assert run(mcore, damaged, allow=frozenset({"config"})).verdict == "pass"
    # Where attention is latent and rope plain, two of them stand for nothing.
    # The embedding, not the args, says how many rows there are.
    idle = name in ("kv_channels", "rotary_scaling_factor", "padded_vocab_size")
    for before, after in ((hf, damaged), (damaged, hf)):
        found = said(run(before, after))
        assert (("config_mismatch", name) in found) is not idle
    assert [f.before for f in errors(run(hf, damaged)) if f.field == "rotary_base"] == (
        [8_000_000] if name == "rotary_base" else []
    )


def test_args_are_held_against_the_config_that_an_export_would_get(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    assert "config_mismatch" in run(None, pair[1]).checked
    model = base_model("glm-5.2.json")
    model.config["num_experts_per_tok"] += 1
    hf2mcore(model.write(tmp_path / "hf"), tmp_path / "other")
    mixed = edited(pair[1], tmp_path / "mixed", lambda _: None, source=False)
    shutil.copytree(tmp_path / "other" / FOLDER, mixed / FOLDER)
    report = run(None, mixed)
    assert said(report) == [("config_mismatch", "moe_router_topk")], shown(report)
    assert "config.json in hf_source" in errors(report)[0].message
    assert run(None, mixed, allow=frozenset({"config"})).verdict == "pass"
    # Few args, or none, contradict nothing.
    for change in (without_args, lambda common: common.update(args={"mtp_num_layers": 1})):
        few = edited(mixed, tmp_path / f"{change.__name__}", change)
        assert not [f for f in run(None, few).findings if f.kind == "config_mismatch"]
    # What has no source has nothing to be compared with.
    alone = edited(pair[1], tmp_path / "alone", lambda _: None, source=False)
    assert "config_mismatch" not in run(None, alone).checked


def test_how_a_run_trains_is_its_own_affair(pair: tuple[Path, Path], tmp_path: Path) -> None:
    hf, mcore = pair

    def change(common: dict[str, Any]) -> None:
        common["args"] |= {
            "attention_dropout": 0.1, "mtp_loss_scaling_factor": 0.3, "seq_length": 4096,
            "tensor_model_parallel_size": 8, "bf16": False, "moe_router_dtype": "fp32",
            "tokenizer_model": "elsewhere", "lr": 1e-5, "moe_grouped_gemm": False,
        }  # fmt: skip

    copy = edited(mcore, tmp_path / "a", change)
    for before in (mcore, hf):
        report = run(before, copy)
        assert report.verdict == "pass", shown(report)
        assert not [f for f in report.findings if f.kind == "config_mismatch"]


def test_a_pattern_in_args_renumbers_no_depth(pair: tuple[Path, Path], tmp_path: Path) -> None:
    def change(common: dict[str, Any]) -> None:
        common["args"]["mtp_hybrid_override_pattern"] = "*E"

    copy = edited(pair[1], tmp_path / "a", change, source=False)
    region = open_sides(None, copy).after.naming.region("mtp.layers.1.eh_proj.weight")
    assert (region.kind, region.index) == ("mtp", 1)
    report = run(None, copy)
    assert report.verdict == "pass", shown(report)
    (note,) = [f for f in report.findings if f.kind == "completeness_not_checked"]
    assert "no hf_source" in note.message


def made(**changes: Any) -> dict[str, Any]:
    return megatron_args(read_geometry({**GLM, **changes}), gaps=[])


def fields(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [(f.severity, f.field) for f in compare_args(old, new, "args")]


def test_absent_args_mean_the_default() -> None:
    whole = made()
    for name in ("rotary_base", "swiglu", "num_experts", "untie_embeddings_and_output_weights"):
        less = {k: v for k, v in whole.items() if k != name}
        assert ("error", name) in fields(whole, less)
        assert ("error", name) in fields(less, whole)
    silent = ("rotary_percent", "use_rope_scaling", "window_size", "add_qkv_bias")
    assert fields(whole, {k: v for k, v in whole.items() if k not in silent}) == []


def test_one_meaning_in_several_spellings() -> None:
    whole = made()
    layers = whole["num_layers"]
    for name, value in (
        ("rotary_base", float(whole["rotary_base"])), ("moe_layer_freq", whole["moe_layer_freq"]),
        # Arguments that mean nothing here have whatever default a version gives them.
        ("num_query_groups", 7), ("mamba_state_dim", 64), ("linear_key_head_dim", None),
    ):  # fmt: skip
        assert fields(whole, {**whole, name: value}) == []
    old = {k: v for k, v in whole.items() if k != "norm_epsilon"}
    assert fields(whole, old) == []  # 0.17 renamed it, and both names were written
    every = {**whole, "moe_layer_freq": 1}
    assert fields(every, {**whole, "moe_layer_freq": [1] * layers}) == []
    assert fields(every, {**whole, "moe_layer_freq": [0] + [1] * (layers - 1)}) == [
        ("error", "moe_layer_freq")
    ]
    window = {**whole, "window_size": (127, 0)}
    assert fields(window, {**whole, "window_size": [127, 0]}) == []


def test_fields_without_a_flag_may_get_lost() -> None:
    whole = {**made(), "rope_type": "yarn", "beta_fast": 64.0}
    assert "beta_fast" in FLAGLESS
    less = {k: v for k, v in whole.items() if k != "beta_fast"}
    assert fields(whole, less) == fields(less, whole) == [("warning", "args")]
    assert fields(whole, {**whole, "beta_fast": 32.0}) == [("error", "beta_fast")]


@pytest.mark.parametrize("file", sorted(p.name for p in CONFIGS.glob("*.json")))
def test_law_the_args_of_a_config_fit_it(file: str) -> None:
    config = json.loads((CONFIGS / file).read_text())
    args = megatron_args(read_geometry(config), gaps=[])
    assert fields(args, dict(args)) == []
    rows = args["padded_vocab_size"]
    for first in (True, False):
        found = compare_with_config(args, config, rows, args_first=first, source="args")
        assert list(found) == []
    assert not {"num_layers", "mtp_num_layers"} & {*COMPARED}


def test_few_args_are_one_warning() -> None:
    few = {"num_layers": GLM["num_hidden_layers"], "mtp_num_layers": 1}
    assert fields(few, made()) == fields(made(), few) == [("warning", "args")]
    assert fields({**few, "rotary_base": 5}, made()) == [
        ("error", "rotary_base"), ("warning", "args"),
    ]  # fmt: skip
    (one,) = compare_with_config(few, GLM, None, args_first=False, source="args")
    assert (one.severity, one.field) == ("warning", "args")
    assert "rotary_base" in one.message or "more" in one.message
    broken = {k: v for k, v in GLM.items() if k != "rms_norm_eps"}
    (one,) = compare_with_config(few, broken, None, args_first=False, source="args")
    assert (one.severity, "rms_norm_eps" in one.message) == ("warning", True)
