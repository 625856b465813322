"""mcore-bridge's checkpoints: what is read, and what only an original or parity can tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.finding import Report
from mtpconv.audit.sides import open_sides
from mtpconv.convert import hf2mcore, mcore2hf
from mtpconv.errors import UnsupportedError
from mtpconv.synth import shrink
from tests.convert.folders import file_hashes, make_hf
from tests.store import mcore_bridge
from tests.store.respelled import respelled

CONFIGS = Path(__file__).resolve().parents[2] / "fixtures" / "configs"
NETS = ["qwen3-next-80b-a3b", "qwen3.5-35b-a3b-text", "qwen3.6-27b-text"]


def qwen(name: str) -> dict[str, Any]:
    small: dict[str, Any] = shrink(json.loads((CONFIGS / f"{name}.json").read_text()))
    experts = {"num_experts": 2, "num_experts_per_tok": 1} if "num_experts" in small else {}
    # Two query groups of two heads: with one head each, the orders of rows would be the same.
    return small | {
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    } | experts  # fmt: skip


def compare(before: Path, after: Path) -> Report:
    sides = open_sides(before, after)
    return audit(sides.before, sides.after)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    hf = make_hf(tmp_path / "hf", qwen(NETS[0]))
    hf2mcore(hf, tmp_path / "mcore")
    return hf, tmp_path / "mcore"


@pytest.mark.parametrize("name", NETS)
def test_huggingfaces_module_comes_back_byte_for_byte(tmp_path: Path, name: str) -> None:
    raw = qwen(name)
    hf = make_hf(tmp_path / "hf", raw)
    hf2mcore(hf, tmp_path / "mcore")
    other = mcore_bridge.modules(hf, tmp_path / "mcore", tmp_path / "other", raw)
    done = mcore2hf(other, tmp_path / "back", like=hf)
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
    assert done.layout.endswith("local_modules_gqa+mcore_bridge_modules; mcore-bridge")
    assert not done.steps
    report = compare(hf, other)
    assert report.verdict == "pass"
    assert any("mcore-bridge has query and gate" in note for note in report.compared.notes)


def test_its_own_order_under_megatrons_keys_is_a_finding(
    tmp_path: Path, folders: tuple[Path, Path]
) -> None:
    """Names and shapes are Megatron's; every tensor whose rows differ is named, and why."""
    hf, mcore = folders
    other = mcore_bridge.interleaved(hf, mcore, tmp_path / "other", qwen(NETS[0]))
    report = compare(hf, other)
    assert report.verdict == "fail"
    changed = {str(f.tensor) for f in report.findings if f.kind == "value_mismatch"}
    nets = ("in_proj_qkvz.weight", "in_proj_ba.weight", "conv1d.weight", "norm.weight")
    wanted = {f"model.layers.{n}.linear_attn.{t}" for n in range(3) for t in nets}
    heads = ("model.layers.3", "mtp.layers.0")
    assert changed == wanted | {f"{at}.self_attn.q_proj.weight" for at in heads}
    doubts = [n.split("bytes, ")[1] for n in report.compared.notes if "not told by" in n]
    assert [line.split(":")[0] for line in doubts] == [
        "rows of linear_qkv", "rows of in_proj and conv1d", "out_norm", "halves of eh_proj",
    ]  # fmt: skip
    assert all("mcore-bridge" in line for line in doubts)


def test_ms_swift_is_named_by_the_file_beside(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    hf, mcore = folders
    (mcore / "args.json").write_text("{}")
    assert compare(hf, mcore).after.dialect == "stacked_experts; ms-swift"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ((".self_attention.A_log", ".self_attention.in_proj_qkvz.weight"), "mcore-bridge: of its"),
        ((".self_attention.A_log", ".self_attention.in_proj.weight"), "in one piece: its rows"),
    ],
)
def test_its_other_linear_attention_is_refused_by_name(
    tmp_path: Path, folders: tuple[Path, Path], changes: tuple[str, str], said: str
) -> None:
    hf, mcore = folders
    other = respelled(mcore, tmp_path / "other", changes)
    with pytest.raises(UnsupportedError, match=said):
        mcore2hf(other, tmp_path / "back", like=hf)
    assert not (tmp_path / "back").exists()
