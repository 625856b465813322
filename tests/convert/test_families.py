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
from mtpconv.mapping.table_reader import find_table
from mtpconv.store.hf import open_hf
from mtpconv.store.manifest import read_manifest, take_manifest, write_manifest
from mtpconv.store.torch_dist import open_torch_dist
from tests.convert.folders import file_hashes, make_hf, tensors_of, write_hf
from tests.families import CONFIGS, CONVERTED, NOT_CONVERTED, Variant, distinct

#: The first variant of each family always, all others among the slow tests.
VARIANTS = [
    pytest.param(v, id=f"{v.family}-{v.label}", marks=[pytest.mark.slow] if number else [])
    for family in CONVERTED
    for number, v in enumerate(distinct(family))
]


def small_config(family: str) -> dict[str, Any]:
    """The config of a family's first variant with small widths and two experts."""
    return distinct(family)[0].config


def require_equal_across_formats(hf: Path, mcore: Path, tensors: int) -> None:
    sides = open_sides(hf, mcore)
    report = audit(sides.before, sides.after)
    assert [f.message for f in report.findings if f.severity != "note"] == []
    assert (report.verdict, report.tier) == ("pass", "L2")
    assert report.compared.tensors == tensors


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_family_there_and_back(tmp_path: Path, variant: Variant) -> None:
    hf = variant.write(tmp_path / "hf")
    there = hf2mcore(hf, tmp_path / "mcore")
    assert there.verified
    depths = variant.plan().geometry.depths
    assert there.mtp_depths == depths
    require_equal_across_formats(hf, tmp_path / "mcore", there.tensors)
    back = mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert back.unchanged == back.tensors == len(tensors_of(hf))
    assert not [n for n in back.notes if "Megatron's args" in n]
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


def test_every_family_with_mtp_goes_there_and_back_with_it() -> None:
    without = {n for n in CONVERTED if not distinct(n)[0].plan().geometry.depths}
    assert without == {"llama", "minimax_m2", "mixtral", "qwen2", "qwen3", "qwen3_moe"}


def test_args_without_mtp_contradict_no_config_that_is_written_without_it(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", small_config("nemotron_h"))
    for dropped in (True, False):  # the pattern of layers in args says MTP too
        hf2mcore(hf, tmp_path / f"{dropped}", drop_mtp=dropped)
        mcore, back = tmp_path / f"{dropped}", tmp_path / f"back {dropped}"
        done = mcore2hf(mcore, back, drop_mtp=True, like=hf)
        assert not [n for n in done.notes if "Megatron's args" in n]


def test_a_decoder_under_language_model_comes_back(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", small_config("qwen3_5"))
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
    hf = distinct(name)[0].write(tmp_path / "hf")
    before = file_hashes(tmp_path)
    with pytest.raises(UnsupportedError) as refused:
        hf2mcore(hf, tmp_path / "mcore")
    assert str(find_table(name).needs) in str(refused.value)
    assert file_hashes(tmp_path) == before


#: Where the families that are not converted keep MTP, with scales and all.
MTP_PREFIX = {"deepseek_v4": "mtp.", "ernie4_5_moe": "model.mtp_", "longcat_flash": "model.mtp."}


def as_released(family: str) -> dict[str, Any]:
    """The small config of a family, quantised if its release is."""
    entry = next(iter(find_table(family).releases.values()))
    stated = json.loads((CONFIGS / entry["config"]).read_text(encoding="utf-8"))
    quantised = {k: stated[k] for k in ("quantization_config",) if k in stated}
    return small_config(family) | quantised


@pytest.mark.parametrize("name", NOT_CONVERTED)
def test_a_family_that_is_not_converted_has_inventory_and_audit(tmp_path: Path, name: str) -> None:
    config = as_released(name)
    hf = make_hf(tmp_path / "hf", config)
    tensors = tensors_of(hf)
    assert {n for n, (s, _) in tensors.items() if s.dtype == "I8"} or name != "deepseek_v4"
    mtp = [n for n in tensors if n.startswith(MTP_PREFIX[name])]
    assert len(mtp) >= 10

    write_manifest(take_manifest(open_hf(hf), hf, "hf"), tmp_path / "manifest.json")
    inventory = read_manifest(tmp_path / "manifest.json").tensors
    assert inventory == {n: spec for n, (spec, _) in tensors.items()}
    sides = open_sides(tmp_path / "manifest.json", hf)
    assert audit(sides.before, sides.after).verdict == "pass"
    alone = audit(None, open_sides(None, hf).after)
    assert [f.message for f in alone.findings if f.severity == "error"] == []
    (depth,) = alone.mtp.depths
    assert (alone.verdict, depth.status, depth.tensors) == ("pass", "present", depth.expected)


@pytest.mark.parametrize("everything", [True, False], ids=["all of MTP", "one tensor"])
@pytest.mark.parametrize("name", NOT_CONVERTED)
def test_lost_mtp_of_a_family_that_is_not_converted_is_red(
    tmp_path: Path, name: str, everything: bool
) -> None:
    config = as_released(name)
    hf = make_hf(tmp_path / "hf", config)
    tensors = tensors_of(hf)
    mtp = [n for n in tensors if n.startswith(MTP_PREFIX[name])]
    lost = mtp if everything else mtp[:1]
    damaged = write_hf(
        tmp_path / "lost", {n: t for n, t in tensors.items() if n not in lost}, config
    )
    alone = audit(None, open_sides(None, damaged).after)
    wanted = "mtp_missing" if everything else "missing_tensor"
    # No field of LongCat's config promises MTP: alone it may be a model without.
    severity = "warning" if everything and name == "longcat_flash" else "error"
    assert (wanted, severity) in {(f.kind, f.severity) for f in alone.findings}
    assert alone.mtp.status == ("absent" if everything else "partial")
    assert alone.verdict == ("fail" if severity == "error" else "pass")
    sides = open_sides(hf, damaged)
    against = audit(sides.before, sides.after)
    assert against.mtp.status == ("dropped" if everything else "partial")
    said = {n for f in against.findings for n in (f.tensor, *f.tensors)}
    assert said >= {*lost}


def test_a_block_that_is_used_again_for_every_depth(tmp_path: Path) -> None:
    config = small_config("nemotron_h") | {
        "num_nextn_predict_layers": 3,
        "mtp_use_repeated_layer": True,
    }
    hf = make_hf(tmp_path / "hf", config)
    there = hf2mcore(hf, tmp_path / "mcore")
    assert (there.mtp_depths, there.verified) == (1, True)
    require_equal_across_formats(hf, tmp_path / "mcore", there.tensors)
    mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert file_hashes(tmp_path / "back") == file_hashes(hf)


def test_heads_of_mtp_depths_that_differ_travel_beside(tmp_path: Path) -> None:
    # Step-3.5 trains a head for each of its three depths; Megatron has one.
    config = small_config("step3p5")
    tensors = tensors_of(make_hf(tmp_path / "made", config))
    spec, raw = tensors["lm_head.weight"]
    heads = [f"model.layers.{n}.transformer.shared_head.output.weight" for n in (45, 46, 47)]
    tensors |= dict.fromkeys(heads, (spec, raw))
    tensors[heads[1]] = spec, bytes([raw[0] ^ 1]) + raw[1:]
    hf = write_hf(tmp_path / "hf", tensors, config)
    assert hf2mcore(hf, tmp_path / "mcore").carried == (heads[1],)
    mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
