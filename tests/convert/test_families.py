"""Every family there and back with its real layer numbers, whole files compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.sides import open_sides
from mtpconv.convert import hf2mcore, mcore2hf
from mtpconv.errors import UnsupportedError
from mtpconv.geometry import EXPERT_FIELDS
from mtpconv.mapping.table import find_table, table_names
from mtpconv.store.torch_dist import open_torch_dist
from mtpconv.synth import shrink
from tests.convert.folders import file_hashes, make_hf, tensors_of, write_hf

CONFIGS = Path(__file__).resolve().parents[2] / "fixtures" / "configs"

CONVERTED = [n for n in table_names() if find_table(n).converts]
NOT_CONVERTED = [n for n in table_names() if not find_table(n).converts]


def small(name: str) -> dict[str, Any]:
    """The config of the table's first release with small widths and three experts."""
    entry = next(iter(find_table(name).releases.values()))
    config = shrink(json.loads((CONFIGS / entry["config"]).read_text(encoding="utf-8")))
    config.pop("quantization_config", None)
    for part in (config, config.get("text_config", {})):
        part.update({field: 3 for field in EXPERT_FIELDS if part.get(field)})
    return config


def require_equal_across_formats(hf: Path, mcore: Path, tensors: int) -> None:
    sides = open_sides(hf, mcore)
    report = audit(sides.before, sides.after)
    assert [f.message for f in report.findings if f.severity != "note"] == []
    assert (report.verdict, report.tier) == ("pass", "L2")
    assert report.compared.tensors == tensors


@pytest.mark.parametrize("name", CONVERTED)
def test_a_family_there_and_back(tmp_path: Path, name: str) -> None:
    hf = make_hf(tmp_path / "hf", small(name))
    there = hf2mcore(hf, tmp_path / "mcore")
    assert there.verified
    require_equal_across_formats(hf, tmp_path / "mcore", there.tensors)
    back = mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert back.unchanged == back.tensors == len(tensors_of(hf))
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


def test_a_decoder_under_language_model_comes_back(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", small("qwen3_5"))
    hf2mcore(hf, tmp_path / "mcore", layout="training,language_model")
    keys = open_torch_dist(tmp_path / "mcore").tensors
    assert all(key.startswith("language_model.") for key in keys)
    assert "language_model.mtp.layers.0.eh_proj.weight" in keys
    done = mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert "language_model" in done.layout
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


@pytest.mark.parametrize("name", NOT_CONVERTED)
def test_a_family_that_is_not_converted_is_refused_with_the_reason(
    tmp_path: Path, name: str
) -> None:
    hf = make_hf(tmp_path / "hf", small(name))
    with pytest.raises(UnsupportedError) as refused:
        hf2mcore(hf, tmp_path / "mcore")
    assert str(find_table(name).needs) in str(refused.value)
    assert not (tmp_path / "mcore").exists()


def test_a_block_that_is_used_again_for_every_depth(tmp_path: Path) -> None:
    config = small("nemotron_h") | {"num_nextn_predict_layers": 3, "mtp_use_repeated_layer": True}
    hf = make_hf(tmp_path / "hf", config)
    there = hf2mcore(hf, tmp_path / "mcore")
    assert (there.mtp_depths, there.verified) == (1, True)
    require_equal_across_formats(hf, tmp_path / "mcore", there.tensors)
    mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


def test_heads_of_mtp_depths_that_differ_travel_beside(tmp_path: Path) -> None:
    # Step-3.5 trains a head for each of its three depths; Megatron has one.
    config = small("step3p5")
    tensors = tensors_of(make_hf(tmp_path / "made", config))
    spec, raw = tensors["lm_head.weight"]
    heads = [f"model.layers.{n}.transformer.shared_head.output.weight" for n in (45, 46, 47)]
    tensors |= dict.fromkeys(heads, (spec, raw))
    tensors[heads[1]] = spec, bytes([raw[0] ^ 1]) + raw[1:]
    hf = write_hf(tmp_path / "hf", tensors, config)
    assert hf2mcore(hf, tmp_path / "mcore").carried == (heads[1],)
    mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
