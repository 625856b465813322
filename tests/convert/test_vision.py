"""Vision towers: beside the checkpoint byte for byte; Megatron's own are never guessed at."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.sides import open_sides
from mtpconv.cli import main
from mtpconv.convert import hf2mcore, mcore2hf
from mtpconv.errors import RefusedError, UsageError
from mtpconv.synth import shrink
from mtpconv.tensors import TensorSpec
from tests.convert.folders import file_hashes, make_hf, tensors_of, write_hf
from tests.store.respelled import Held, rewritten

CONFIGS = Path(__file__).resolve().parents[2] / "fixtures" / "configs"
TOWER = {
    "model.visual.patch_embed.proj.weight": (TensorSpec("BF16", (2, 3)), b"\x01\x02" * 6),
    "model.visual.blocks.0.attn.qkv.weight": (TensorSpec("F32", (3, 1)), b"\x03\x04\x05\x7f" * 3),
}
#: Megatron-Bridge's spelling, and mcore-bridge's.
MEGATRONS = {
    "vision_model.decoder.layers.0.self_attention.linear_qkv.weight": TOWER[
        "model.visual.blocks.0.attn.qkv.weight"
    ],
    "visual.visual.patch_embed.proj.weight": TOWER["model.visual.patch_embed.proj.weight"],
}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """An HF folder with a vision tower, and what hf2mcore makes of it."""
    raw: dict[str, Any] = shrink(json.loads((CONFIGS / "qwen3.6-27b.json").read_text()))
    raw["text_config"] |= {"num_hidden_layers": 4}
    text = make_hf(tmp_path / "text", raw)
    hf = write_hf(tmp_path / "hf", tensors_of(text) | TOWER, raw)
    hf2mcore(hf, tmp_path / "mcore", layout="training,language_model")
    return hf, tmp_path / "mcore"


def trained(mcore: Path, target: Path, more: dict[str, Held]) -> Path:
    """What a training run saved later: `more` beside the language model, hf_source kept."""
    target.mkdir()
    rewritten(mcore, target / "iter_0000001", lambda key, held: [(key, held)], more)
    shutil.copytree(mcore / "hf_source", target / "hf_source")
    return target


def test_a_tower_travels_beside_and_comes_back(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    hf, mcore = folders
    done = mcore2hf(mcore, tmp_path / "back")
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
    assert "language_model" in done.layout
    assert not any(key.startswith("vision") for key in done.changed)
    sides = open_sides(hf, mcore)
    report = audit(sides.before, sides.after)
    assert report.verdict == "pass"
    assert report.after.tensors == len(tensors_of(hf))


def test_it_is_reported_as_carried(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    hf, _ = folders
    done = hf2mcore(hf, tmp_path / "again")
    assert set(TOWER) <= set(done.carried)
    assert any("have no place in Megatron and are carried beside" in note for note in done.notes)


@pytest.mark.parametrize("key", MEGATRONS)
def test_megatrons_own_tower_is_refused_with_a_way_out(
    tmp_path: Path, folders: tuple[Path, Path], key: str
) -> None:
    _, mcore = folders
    later = trained(mcore, tmp_path / "later", {key: MEGATRONS[key]})
    with pytest.raises(RefusedError) as caught:
        mcore2hf(later, tmp_path / "back")
    said = str(caught.value)
    assert f"M05 1 Megatron tensors are a vision tower, which no table translates: {key}" in said
    assert "if it was frozen, --frozen-vision writes the 2 HF tensors" in said
    assert "if it was trained, export it with the tool that trained it" in said
    assert "\n" not in said
    assert not (tmp_path / "back").exists()


def test_a_frozen_tower_is_the_one_that_travelled(
    tmp_path: Path,
    folders: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hf, mcore = folders
    later, back = trained(mcore, tmp_path / "later", dict(MEGATRONS)), tmp_path / "back"
    command = ["mtpconv", "mcore2hf", str(later), str(back)]
    for more, code, said in (
        ([], 1, "--frozen-vision writes the 2 HF tensors"),
        (["--frozen-vision"], 0, "warning: 2 tensors of Megatron's vision tower were left out as"),
    ):
        monkeypatch.setattr(sys, "argv", [*command, *more])
        with pytest.raises(SystemExit) as stop:
            main()
        assert (stop.value.code or 0) == code
        assert said in "".join(capsys.readouterr())
        assert back.exists() == (code == 0)
    assert file_hashes(back) == file_hashes(hf)


def test_other_unknown_tensors_stay_refused(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    _, mcore = folders
    extra = {
        "language_model.reward_head.weight": MEGATRONS["visual.visual.patch_embed.proj.weight"]
    }
    later = trained(mcore, tmp_path / "later", MEGATRONS | extra)
    with pytest.raises(RefusedError, match=r"M05 1 Megatron tensors are not in .*reward_head"):
        mcore2hf(later, tmp_path / "back", frozen_vision=True)
    with pytest.raises(RefusedError, match=r"M05 3 Megatron tensors are not in the table"):
        mcore2hf(later, tmp_path / "back")


def test_there_must_be_two_towers(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    _, mcore = folders
    with pytest.raises(UsageError, match="has no vision tower that --frozen-vision"):
        mcore2hf(mcore, tmp_path / "back", frozen_vision=True)
    later = trained(mcore, tmp_path / "later", dict(MEGATRONS))
    with pytest.raises(RefusedError, match="no vision tower travelled beside it"):
        mcore2hf(later, tmp_path / "back", like=tmp_path / "text", frozen_vision=True)
    with pytest.raises(RefusedError, match=r"translates: .*; export it with the tool"):
        mcore2hf(later, tmp_path / "back", like=tmp_path / "text")


def test_mtp_is_left_out_of_a_vision_language_model_too(
    tmp_path: Path, folders: tuple[Path, Path]
) -> None:
    _, mcore = folders
    done = mcore2hf(mcore, tmp_path / "back", drop_mtp=True)
    assert done.mtp_tensors == 0
    assert TOWER.keys() <= tensors_of(tmp_path / "back").keys()
