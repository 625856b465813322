"""The report names the dialect of the Megatron side, and says what bytes cannot tell."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.finding import Report
from mtpconv.audit.sides import open_sides
from mtpconv.convert import hf2mcore
from mtpconv.report import text
from mtpconv.synth import shrink
from tests.convert.folders import make_hf
from tests.mapping.toy import config

CONFIGS = Path(__file__).resolve().parents[2] / "fixtures" / "configs"


def compare(before: Path, after: Path) -> Report:
    sides = open_sides(before, after)
    return audit(sides.before, sides.after)


@pytest.fixture
def glm(tmp_path: Path) -> tuple[Path, Path]:
    hf = make_hf(tmp_path / "hf", config())
    hf2mcore(hf, tmp_path / "mcore", layout="canonical")
    return hf, tmp_path / "mcore"


@pytest.mark.parametrize(
    ("layout", "shown"),
    [
        ("training", "stacked_experts"),
        ("canonical", "transformer_engine, per layer, per expert"),
        ("local", "stacked_experts+local_spec_mla"),
        ("stacked_experts,mtp_model_layer", "stacked_experts+mtp_model_layer"),
    ],
)
def test_layouts_are_named(tmp_path: Path, layout: str, shown: str) -> None:
    hf = make_hf(tmp_path / "hf", config("deepseek_v3"))
    hf2mcore(hf, tmp_path / "mcore", layout=layout)
    report = compare(hf, tmp_path / "mcore")
    assert (report.verdict, report.after.dialect) == ("pass", shown)
    assert f"(torch_dist, {shown}," in text.render(report)


def test_megatron_bridge_leaves_its_run_config(glm: tuple[Path, Path]) -> None:
    hf, mcore = glm
    (mcore / "release/run_config.yaml").write_text("model: {}\n")
    report = compare(hf, mcore)
    assert report.verdict == "pass"
    assert report.after.dialect == "transformer_engine, per layer, per expert; Megatron-Bridge"


def test_what_only_content_tells_is_said_of_checkpoints_that_others_wrote(tmp_path: Path) -> None:
    raw: dict[str, Any] = shrink(json.loads((CONFIGS / "qwen3-next-80b-a3b.json").read_text()))
    raw |= {"num_hidden_layers": 4, "num_experts": 2, "num_experts_per_tok": 1}
    hf = make_hf(tmp_path / "hf", raw)
    hf2mcore(hf, tmp_path / "mcore")
    report = compare(hf, tmp_path / "mcore")
    assert report.verdict == "pass"
    assert not any("not told by bytes" in note for note in report.compared.notes)
    shutil.rmtree(tmp_path / "mcore/hf_source")
    notes = compare(hf, tmp_path / "mcore").compared.notes
    assert sum("not told by bytes" in note for note in notes) == 4
    assert all("parity decides" in note for note in notes if "not told" in note)
