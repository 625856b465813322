"""Tensors that a table carries beside or discards: in every form no finding, and a note."""

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
from mtpconv.mapping.table_reader import find_table
from mtpconv.store.hf import open_hf
from mtpconv.store.manifest import take_manifest, write_manifest
from mtpconv.synth import fewer, shrink
from mtpconv.tensors import TensorSpec
from tests.audit.models import said, shown
from tests.convert.folders import make_hf, tensors_of, write_hf

CONFIGS = Path(__file__).resolve().parents[2] / "fixtures" / "configs"
TOWER = {
    "model.visual.patch_embed.proj.weight": (TensorSpec("BF16", (2, 3)), b"\x01\x02" * 6),
    "model.visual.blocks.0.attn.qkv.weight": (TensorSpec("F32", (3, 1)), b"\x03\x04\x05\x7f" * 3),
}
QKV = "model.visual.blocks.1.attn.qkv"
CODES = {
    f"{QKV}.weight_packed": (TensorSpec("I32", (3, 1)), b"\x03\x04\x05\x7f" * 3),
    f"{QKV}.weight_scale": (TensorSpec("F32", (3, 1)), b"\x03\x04\x05\x3f" * 3),
    f"{QKV}.weight_shape": (TensorSpec("I64", (2,)), b"\x03" + b"\0" * 15),
}
NOTE = "2 tensors carried beside the table: model.visual."


def alone(path: Path, mapping: Path | None = None) -> Report:
    return audit(None, open_sides(None, path, mapping=mapping).after)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The language model of a vision wrapper, without its tower."""
    raw = json.loads((CONFIGS / "qwen3.5-35b-a3b.json").read_text())
    small: dict[str, Any] = fewer(shrink(raw), layers=4, experts=2)
    return make_hf(tmp_path_factory.mktemp("text") / "hf", small, shards=1), small


@pytest.fixture
def tower(tmp_path: Path, text: tuple[Path, dict[str, Any]]) -> Path:
    folder, config = text
    return write_hf(tmp_path / "vis", tensors_of(folder) | TOWER, config)


def test_a_vision_tower_is_known_and_noted(
    tower: Path, text: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    hf = open_hf(tower)
    write_manifest(take_manifest(hf, tower, "hf", config=hf.config), tmp_path / "m.json")
    hf2mcore(tower, tmp_path / "mcore")
    for path in (tower, tmp_path / "m.json", tmp_path / "mcore"):
        report = alone(path)
        assert report.verdict == "pass", shown(report)
        assert [n for n in report.compared.notes if n.startswith(NOTE)], report.compared.notes
        assert report.mtp.status == "present"
    assert not [n for n in alone(text[0]).compared.notes if "carried" in n]


def test_what_stands_beside_the_tower_is_still_unknown(
    text: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, config = text
    extra = "model.visuals.proj.weight"
    held = tensors_of(folder) | TOWER | {extra: (TensorSpec("U8", (1,)), b"x")}
    assert said(alone(write_hf(tmp_path / "hf", held, config))) == [("extra_tensor", extra)]


def test_the_tower_is_noted_when_the_config_lacks_a_dim(tower: Path) -> None:
    config = json.loads((tower / "config.json").read_text())
    del config["text_config"]["hidden_size"]
    (tower / "config.json").write_text(json.dumps(config))
    report = alone(tower)
    assert {kind for kind, _ in said(report)} == {"config_contradiction"}, shown(report)
    assert [n for n in report.compared.notes if n.startswith(NOTE)], report.compared.notes


def test_codes_of_a_quantised_tower_are_carried_too(
    text: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, config = text
    report = alone(write_hf(tmp_path / "hf", tensors_of(folder) | CODES, config))
    assert report.verdict == "pass", shown(report)
    note = "3 tensors carried beside the table: model.visual."
    assert [n for n in report.compared.notes if n.startswith(note)], report.compared.notes


def test_a_discard_is_noted_with_its_reason(
    tower: Path, text: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    shipped = find_table("qwen3_5_moe").path
    shutil.copytree(shipped.parent, tmp_path / "tables")
    mine = tmp_path / "tables" / shipped.name
    said_there = 'carried    = ["model.visual.*"]'
    assert said_there in mine.read_text()
    discard = 'discards = [{ hf = "model.visual.*", reason = "text only" }]'
    mine.write_text(mine.read_text().replace(said_there, discard))
    report = alone(tower, mine)
    assert report.verdict == "pass", shown(report)
    note = "2 tensors discarded by the table (text only): model.visual."
    assert [n for n in report.compared.notes if n.startswith(note)], report.compared.notes
