"""What one checkpoint alone is held against when its config or the checkpoint itself is odd."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.finding import Report
from mtpconv.audit.sides import open_sides
from mtpconv.cli.plan import run_plan
from mtpconv.convert import hf2mcore
from mtpconv.errors import UsageError
from mtpconv.mapping.table_reader import mappings_folder
from mtpconv.store.hf import open_hf
from mtpconv.store.manifest import take_manifest, write_manifest
from mtpconv.synth import fewer, shrink
from tests.audit.models import FAMILIES, Model, base_model, errors, said, shown
from tests.convert.folders import make_hf

CONFIGS = Path(__file__).resolve().parents[2] / "fixtures" / "configs"
TRUNK = "model.layers.3.self_attn.o_proj.weight"


def alone(model: Model, place: Path) -> Report:
    sides = open_sides(None, model.write(place))
    return audit(None, sides.after)


BROKEN: dict[str, tuple[str, Any]] = {
    "gone": ("hidden_size", None),
    "a word": ("q_lora_rank", "x"),
    "far too large": ("hidden_size", 10**20),
    "an unknown dtype": ("dtype", "int4"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_field_is_an_error_and_names_are_still_checked(name: str, tmp_path: Path) -> None:
    field, value = BROKEN[name]
    model = base_model("glm-5.2.json")
    if value is None:
        del model.config[field]
    else:
        model.config[field] = value
    report = alone(model, tmp_path / "whole")
    (one,) = errors(report)
    assert (one.kind, one.file) == ("config_contradiction", "config.json"), shown(report)
    assert field in one.message
    assert "completeness_not_checked" not in {f.kind for f in report.findings}
    del model.tensors[TRUNK]
    for mtp in model.mtp():
        del model.tensors[mtp]
    model.tensors["stray"] = model.tensors["model.norm.weight"]
    assert said(alone(model, tmp_path / "damaged")) == [
        ("config_contradiction", "config.json"),
        ("extra_tensor", "stray"),
        ("missing_tensor", TRUNK),
        ("mtp_missing", "num_nextn_predict_layers"),
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", "4"), ("num_hidden_layers", 4.0), ("n_routed_experts", 10**9),
    ],
)  # fmt: skip
def test_a_field_that_no_name_can_do_without(field: str, value: Any, tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    model.config[field] = value
    report = alone(model, tmp_path)
    assert "config_contradiction" in {f.kind for f in errors(report)}, shown(report)
    (note,) = [f for f in report.findings if f.kind == "completeness_not_checked"]
    assert "no mapping table" not in note.message
    assert "config.json is no glm_moe_dsa" in note.message


@pytest.mark.parametrize("family", FAMILIES)
def test_a_manifest_is_held_against_the_table(family: str, tmp_path: Path) -> None:
    model = base_model(family)

    def listed(name: str) -> Report:
        folder = model.write(tmp_path / name)
        opened = open_hf(folder)
        taken = take_manifest(opened, folder, "hf", config=opened.config)
        write_manifest(taken, tmp_path / f"{name}.json")
        return audit(None, open_sides(None, tmp_path / f"{name}.json").after)

    whole = listed("whole")
    assert whole.verdict == "pass", shown(whole)
    assert "completeness_not_checked" not in {f.kind for f in whole.findings}
    gone = next(n for n in model.trunk() if n.endswith("input_layernorm.weight") or ".0" in n)
    del model.tensors[gone]
    assert said(listed("damaged")) == [("missing_tensor", gone)]


def test_a_manifest_of_an_unknown_model_is_checked_by_names(tmp_path: Path) -> None:
    model = base_model("glm-4.5.json")
    model.config["model_type"] = "unheard_of"
    for name in [n for n in model.tensors if n.startswith("model.layers.2.")]:
        del model.tensors[name]
    folder = model.write(tmp_path / "a")
    opened = open_hf(folder)
    write_manifest(take_manifest(opened, folder, "hf", config=opened.config), tmp_path / "m.json")
    report = audit(None, open_sides(None, tmp_path / "m.json").after)
    assert said(report) == [("missing_tensor", "model.layers.2.")]


def test_a_base_of_another_format_changes_no_promise(tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    whole = model.write(tmp_path / "whole")
    hf2mcore(whole, tmp_path / "mcore")
    del model.tensors[TRUNK]
    damaged = model.write(tmp_path / "damaged")
    for after, base, wanted in (
        (damaged, tmp_path / "mcore", [("missing_tensor", TRUNK)]),
        (whole, tmp_path / "mcore", []), (tmp_path / "mcore", whole, []),
    ):  # fmt: skip
        sides = open_sides(None, after, base=base)
        report = audit(None, sides.after, base=sides.base)
        assert said(report) == wanted, shown(report)
        assert "completeness_not_checked" not in {f.kind for f in report.findings}


def test_a_table_that_cannot_be_read_is_refused_although_nobody_needs_it(tmp_path: Path) -> None:
    folder = base_model("mimo-7b.json").write(tmp_path / "a")
    for before in (None, folder):
        with pytest.raises(UsageError, match=r"nope\.toml"):
            open_sides(before, folder, mapping=tmp_path / "nope.toml")
    own = mappings_folder() / "mimo.toml"
    assert open_sides(folder, folder, mapping=own).after.expected is None


def test_depths_that_no_release_ships_are_spoken_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = json.loads((CONFIGS / "minimax-m2.json").read_text())
    assert (raw["num_mtp_modules"], raw["use_mtp"]) == (3, True)
    hf = make_hf(tmp_path / "hf", fewer(shrink(raw), layers=2, experts=2))
    hf2mcore(hf, tmp_path / "mcore")
    note = (
        "config.json says num_mtp_modules = 3, use_mtp = true, and no release of minimax_m2 ships"
        " MTP tensors: none are asked for"
    )
    for path in (hf, tmp_path / "mcore"):
        report = audit(None, open_sides(None, path).after)
        assert report.verdict == "pass", shown(report)
        assert note in report.compared.notes
        capsys.readouterr()
        run_plan(str(path), rows=False, mapping=None)
        assert f"MTP: none ({note})" in capsys.readouterr().out

    config = json.loads((hf / "config.json").read_text()) | {"num_mtp_modules": 0}
    (hf / "config.json").write_text(json.dumps(config))
    assert audit(None, open_sides(None, hf).after).compared.notes == ()
