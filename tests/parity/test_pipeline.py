"""The whole way: converted by mtpconv, run by Megatron, compared with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpconv.convert import hf2mcore, mcore2hf
from mtpconv.geometry import read_geometry
from mtpconv.mapping import check
from mtpconv.mapping.table_reader import table_names
from mtpconv.parity.families import FAMILIES, NOT_RUN
from mtpconv.parity.report import ParityOptions
from mtpconv.parity.run import run_parity
from tests.parity import checkpoints, configs

pytestmark = pytest.mark.megatron

MODELS = configs.WITH_MTP | configs.WITHOUT_MTP
TABLES = Path(__file__).parents[2] / "mappings"


@pytest.mark.parametrize("layout", ["training", "local"])
@pytest.mark.parametrize("name", MODELS)
def test_what_mtpconv_converts_means_the_same(
    megatron_cpu: None, tmp_path: Path, name: str, layout: str
) -> None:
    config = MODELS[name]
    checkpoints.need_megatron_for(config)
    checkpoints.write_hf(config, tmp_path / "hf", dtype="bfloat16")
    hf2mcore(tmp_path / "hf", tmp_path / "mcore", layout=layout)
    report = run_parity(tmp_path / "hf", tmp_path / "mcore")
    assert report.verdict == "pass", report.fault
    assert len(report.heads) == 1 + read_geometry(config).depths


def test_a_norm_that_less_one_is_no_bfloat16_is_named(megatron_cpu: None, tmp_path: Path) -> None:
    """Megatron keeps gamma - 1, and bfloat16 has fewer numbers near -1 than near 0."""
    from safetensors.torch import load_file, save_file

    file = checkpoints.write_hf(configs.QWEN3_5_TEXT, tmp_path / "hf", dtype="bfloat16")
    tensors = load_file(file / "model.safetensors")
    tensors["model.layers.1.linear_attn.norm.weight"].fill_(0.10009765625)
    save_file(tensors, file / "model.safetensors", {"format": "pt"})
    hf2mcore(tmp_path / "hf", tmp_path / "mcore")
    report = run_parity(tmp_path / "hf", tmp_path / "mcore")
    assert report.fault is not None
    assert report.fault.message == "layer 1, after attention: out_norm was rounded to bfloat16"
    usual = run_parity(tmp_path / "hf", tmp_path / "mcore", ParityOptions(dtype="bfloat16"))
    assert usual.verdict == "pass"


def test_every_table_is_run_or_has_a_reason() -> None:
    assert set(table_names()) == set(FAMILIES) | set(NOT_RUN)
    assert set(FAMILIES) & set(NOT_RUN) == {"exaone_moe"}  # without MTP
    assert {config["model_type"] for config in MODELS.values()} == set(FAMILIES)
    page = (TABLES.parent / "docs" / "parity.md").read_text()
    assert [name for name in FAMILIES if name not in page] == []
    assert [why for why in NOT_RUN.values() if why not in page] == []


def test_a_wrong_table_round_trips_byte_for_byte_and_is_caught_here(
    megatron_cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_crossed", lambda *_: ())  # M14 would not let it pass
    glue = (TABLES / "blocks" / "decoder.toml").read_text()
    right = """[blocks.mtp_glue]
"enorm.weight"           = "enorm.weight"
"hnorm.weight"           = "hnorm.weight"
"""
    assert right in glue
    wrong = '[blocks.mtp_glue]\n"enorm.weight" = "hnorm.weight"\n"hnorm.weight" = "enorm.weight"\n'
    (tmp_path / "blocks").mkdir()
    for block in (TABLES / "blocks").iterdir():
        (tmp_path / "blocks" / block.name).write_text(block.read_text())
    (tmp_path / "blocks" / "decoder.toml").write_text(glue.replace(right, wrong))
    table = tmp_path / "deepseek_v3.toml"
    table.write_text((TABLES / "deepseek_v3.toml").read_text())

    source = checkpoints.write_hf(configs.DEEPSEEK_V3, tmp_path / "hf", dtype="bfloat16")
    hf2mcore(source, tmp_path / "mcore", mapping=table)
    mcore2hf(tmp_path / "mcore", tmp_path / "back", mapping=table)
    before, after = source / "model.safetensors", tmp_path / "back" / "model.safetensors"
    assert before.read_bytes() == after.read_bytes()

    report = run_parity(source, tmp_path / "mcore")
    assert [head.passed for head in report.heads] == [True, False]
    assert report.fault is not None
    assert report.fault.message == "depth 0, after enorm: enorm and hnorm are swapped"
