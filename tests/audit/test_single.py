"""One checkpoint against its own config, with and without a mapping table."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.options import Options
from mtpconv.audit.sides import open_sides
from mtpconv.store.hf import open_hf
from mtpconv.store.hf_index import INDEX_NAME
from mtpconv.store.manifest import take_manifest, write_manifest
from mtpconv.tensors import TensorSpec
from tests.audit import sides
from tests.audit.models import FAMILIES, Model, alone, base_model, errors, said, shown
from tests.convert.folders import write_hf

families = pytest.mark.parametrize("family", FAMILIES)
#: Families whose config counts the depths; the others ship MTP without saying so.
PROMISED = [f for f in FAMILIES if f not in ("mimo-v2-flash.json", "longcat-flash-chat.json")]
COPIES = (".embed_tokens.weight", ".shared_head.head.weight", ".shared_head.output.weight")
tables = pytest.mark.parametrize("table", [True, False], ids=["table", "no table"])


def count_field(model: Model) -> str:
    names = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
    return next(n for n in names if n in model.config)


@tables
@families
def test_whole_models_pass(family: str, table: bool, tmp_path: Path) -> None:
    report = alone(base_model(family), tmp_path, table=table)
    assert report.verdict == "pass", shown(report)
    assert report.tier == "L0"
    assert {d.status for d in report.mtp.depths} == {"present"}
    checked = "completeness_not_checked" not in {f.kind for f in report.findings}
    assert checked == table


@tables
@families
def test_mtp_that_is_gone_is_one_finding_per_depth(
    family: str, table: bool, tmp_path: Path
) -> None:
    model = base_model(family)
    gone = model.mtp()
    depths = {model.regions[n].index for n in gone}
    for name in gone:
        del model.tensors[name]
    report = alone(model, tmp_path, table=table)
    assert report.mtp.status == "absent"
    if family not in PROMISED:
        # Their configs say nothing, so a checkpoint without MTP contradicts nothing.
        assert report.verdict == "pass"
        assert any(f.kind == "mtp_missing" and f.severity == "warning" for f in report.findings)
        return
    assert [f.kind for f in errors(report)] == ["mtp_missing"] * len(depths), shown(report)
    for one in errors(report):
        assert one.prefix
        assert any(n.startswith(one.prefix) for n in gone)
        assert set(one.tensors) <= set(gone)
    if table:
        # Copies are optional: whether a release ships them no config says.
        missing = {n for n, s in report.states.items() if s == "missing"}
        assert missing == {n for n in gone if not n.endswith(COPIES)}


def test_a_promise_that_a_family_never_keeps_is_a_warning(tmp_path: Path) -> None:
    config = {"model_type": "minimax_m2", "num_hidden_layers": 1, "num_mtp_modules": 3}
    tensors = {"model.layers.0.norm.weight": (TensorSpec("U8", (1,)), b"x")}
    report = audit(None, sides.hf(write_hf(tmp_path, tensors, config)))
    assert report.verdict == "pass"
    assert [f.kind for f in report.findings if f.severity == "warning"] == ["mtp_missing"] * 3


@tables
@pytest.mark.parametrize("value", ["absent", None, 0])
@pytest.mark.parametrize("family", PROMISED)
def test_mtp_that_nobody_promises_is_an_orphan(
    family: str, value: Any, table: bool, tmp_path: Path
) -> None:
    model = base_model(family)
    field = count_field(model)
    model.config[field] = value
    if value == "absent":
        del model.config[field]
    report = alone(model, tmp_path, table=table)
    depths = {model.regions[n].index for n in model.mtp()}
    assert [f.kind for f in errors(report)] == ["mtp_orphan"] * len(depths), shown(report)
    found = {n for f in errors(report) for n in f.tensors}
    assert found == set(model.mtp())
    assert report.mtp.status == "orphan"


@tables
def test_more_depths_than_promised_and_fewer(table: bool, tmp_path: Path) -> None:
    model = base_model("step-3.5-flash.json")
    model.config["num_nextn_predict_layers"] = 2
    report = alone(model, tmp_path / "a", table=table)
    assert [(f.kind, f.layer, f.prefix) for f in errors(report)] == [
        ("mtp_orphan", 5, "model.layers.5.")
    ]
    model.config["num_nextn_predict_layers"] = 4
    report = alone(model, tmp_path / "b", table=table)
    assert [(f.kind, f.layer, f.prefix) for f in errors(report)] == [
        ("mtp_missing", 6, "model.layers.6.")
    ]


@families
def test_any_single_tensor_that_is_gone_is_named(family: str, tmp_path: Path) -> None:
    model = base_model(family)
    names = [n for n in model.tensors if n != "lm_head.weight"]
    for number, name in enumerate(names[:: max(len(names) // 6, 1)]):
        damaged = model.copy()
        del damaged.tensors[name]
        alone_here = [n for n in names if model.regions[n] == model.regions[name]] == [name]
        report = alone(damaged, tmp_path / str(number))
        kind = (
            "mtp_missing" if alone_here and model.regions[name].kind == "mtp" else "missing_tensor"
        )
        assert [f.kind for f in errors(report)] == [kind], shown(report)
        if kind == "missing_tensor":
            assert errors(report)[0].tensor == name


def test_a_tensor_that_no_table_knows(tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    model.tensors["model.layers.0.self_attn.o_proj._extra_state"] = (TensorSpec("U8", (0,)), b"")
    assert said(alone(model, tmp_path)) == [
        ("extra_tensor", "model.layers.0.self_attn.o_proj._extra_state")
    ]


def test_shape_and_dtype_against_the_config(tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    spec, data = model.tensors["lm_head.weight"]
    model.tensors["lm_head.weight"] = (TensorSpec(spec.dtype, spec.shape[::-1]), data)
    name = "model.layers.4.mlp.gate.e_score_correction_bias"
    old, raw = model.tensors[name]
    model.tensors[name] = (TensorSpec("BF16", old.shape), raw[: len(raw) // 2])
    report = alone(model, tmp_path)
    assert said(report) == [("shape_mismatch", "lm_head.weight")]
    warned = [(f.kind, f.tensor) for f in report.findings if f.severity == "warning"]
    assert ("dtype_mismatch", name) in warned


# Nesting and aliases.


@pytest.mark.parametrize(
    "field",
    ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers"],
)
@pytest.mark.parametrize("level", ["top", "text_config", "llm_config"])
def test_the_promise_is_found_under_every_name_at_every_level(
    field: str, level: str, tmp_path: Path
) -> None:
    inner = {"num_hidden_layers": 1, field: 1, "vocab_size": 2}
    config = {"model_type": "unheard_of", **(inner if level == "top" else {level: inner})}
    spec = TensorSpec("U8", (2,))
    tensors = dict.fromkeys(
        ("model.layers.0.norm.weight", "model.embed_tokens.weight"), (spec, b"ab")
    )
    subject = sides.hf(write_hf(tmp_path / "a", tensors, config))
    report = audit(None, subject)
    assert [(f.kind, f.layer, f.field) for f in errors(report)] == [
        ("mtp_missing", 1, field if level == "top" else f"{level}.{field}")
    ]
    tensors["model.layers.1.enorm.weight"] = (spec, b"ab")
    assert audit(None, sides.hf(write_hf(tmp_path / "b", tensors, config))).verdict == "pass"


def test_fields_of_other_parts_promise_nothing(tmp_path: Path) -> None:
    config = {
        "model_type": "x",
        "num_hidden_layers": 1,
        "vision_config": {"num_nextn_predict_layers": 1},
        "quantization_config": {"quant_method": "none", "num_mtp_layers": 1},
    }
    tensors = {"model.layers.0.norm.weight": (TensorSpec("U8", (2,)), b"ab")}
    report = audit(None, sides.hf(write_hf(tmp_path, tensors, config)))
    assert report.mtp.promised is None
    assert report.verdict == "pass"


@pytest.mark.parametrize("value", [True, "1", -1, 1.5, [1], 10**9])
def test_a_count_that_is_none(value: Any, tmp_path: Path) -> None:
    model = base_model("glm-4.5.json")
    model.config["num_nextn_predict_layers"] = value
    report = alone(model, tmp_path, table=False)
    assert "config_contradiction" in {f.kind for f in errors(report)}


def test_counts_that_contradict_each_other(tmp_path: Path) -> None:
    model = base_model("glm-4.5.json")
    model.config["num_mtp_layers"] = 0
    assert said(alone(model, tmp_path, table=False)) == [
        ("config_contradiction", "num_nextn_predict_layers")
    ]


def test_vision_towers_are_no_mtp(tmp_path: Path) -> None:
    model = base_model("glm-4.5.json")
    for layer in range(8):
        name = f"vision_tower.encoder.layers.{layer}.norm.weight"
        model.tensors[name] = (TensorSpec("U8", (1,)), b"x")
    assert alone(model, tmp_path, table=False).verdict == "pass"


# Without a table: what names and config alone tell.


def test_a_trunk_layer_that_is_gone(tmp_path: Path) -> None:
    model = base_model("glm-4.5.json")
    for name in [n for n in model.tensors if n.startswith("model.layers.2.")]:
        del model.tensors[name]
    (one,) = errors(alone(model, tmp_path, table=False))
    assert (one.kind, one.layer, one.prefix) == ("missing_tensor", 2, "model.layers.2.")


def test_experts_that_are_gone(tmp_path: Path) -> None:
    model = base_model("glm-4.5.json")
    gone = [n for n in model.tensors if ".experts.2." in n]
    for name in gone:
        del model.tensors[name]
    report = alone(model, tmp_path, table=False)
    assert said(report) == sorted(("missing_tensor", n) for n in gone)


def test_vocabulary_and_head(tmp_path: Path) -> None:
    model = base_model("glm-4.5.json")
    model.config["vocab_size"] += 1
    assert [k for k, _ in said(alone(model, tmp_path / "a", table=False))] == ["shape_mismatch"] * 2
    model = base_model("glm-4.5.json")
    del model.tensors["lm_head.weight"]
    for tied, kinds in ((False, ["missing_tensor"]), (True, [])):
        model.config["tie_word_embeddings"] = tied
        report = alone(model, tmp_path / f"b{tied}", table=False)
        assert [k for k, _ in said(report)] == kinds


def test_half_an_mtp_is_a_warning_without_a_table(tmp_path: Path) -> None:
    model = base_model("glm-4.5.json")
    gone = [n for n in model.mtp() if ".experts." in n]
    for name in gone:
        del model.tensors[name]
    guess = alone(model, tmp_path / "a", table=False)
    assert "mtp_partial" in {f.kind for f in guess.findings if f.severity == "warning"}
    exact = alone(model, tmp_path / "b")
    assert said(exact) == sorted(("missing_tensor", n) for n in gone)
    assert exact.mtp.status == "partial"


# FP8.


def fp8_model(block: int = 8) -> Model:
    model = base_model("deepseek-v3.json")
    model.config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block],
    }  # fmt: skip
    for name in [n for n in model.tensors if n.endswith("_proj.weight") and "eh_proj" not in n]:
        (rows, columns), data = model.tensors[name][0].shape, model.tensors[name][1]
        codes = bytes(b & 0x77 for b in data[: rows * columns])
        model.tensors[name] = (TensorSpec("F8_E4M3", (rows, columns)), codes)
        scales = (-(-rows // block), -(-columns // block))
        raw = struct.pack("<f", 0.01) * (scales[0] * scales[1])
        model.tensors[name + "_scale_inv"] = (TensorSpec("F32", scales), raw)
    return model


@tables
def test_fp8_whole(table: bool, tmp_path: Path) -> None:
    report = alone(fp8_model(), tmp_path, table=table)
    assert report.verdict == "pass", shown(report)


@tables
def test_fp8_scales_that_are_gone(table: bool, tmp_path: Path) -> None:
    model = fp8_model()
    gone = "model.layers.4.self_attn.o_proj.weight_scale_inv"
    del model.tensors[gone]
    assert said(alone(model, tmp_path / "a", table=table)) == [("missing_tensor", gone)]
    everything = [n for n in model.tensors if n.endswith("_scale_inv")]
    for name in everything:
        del model.tensors[name]
    report = alone(model, tmp_path / "b", table=table)
    assert {t for _, t in said(report)} == {gone, *everything}


def test_fp8_scales_of_the_wrong_shape(tmp_path: Path) -> None:
    model = fp8_model()
    model.config["quantization_config"]["weight_block_size"] = [4, 4]
    kinds = {k for k, _ in said(alone(model, tmp_path))}
    assert kinds == {"shape_mismatch"}


def test_fp8_config_without_fp8_tensors_and_the_reverse(tmp_path: Path) -> None:
    model = base_model("deepseek-v3.json")
    model.config["quantization_config"] = {"quant_method": "fp8"}
    assert said(alone(model, tmp_path / "a")) == [("config_contradiction", "quantization_config")]
    model = fp8_model()
    del model.config["quantization_config"]
    report = alone(model, tmp_path / "b")
    assert report.verdict == "pass"
    assert "config_contradiction" in {f.kind for f in report.findings if f.severity == "warning"}


# Four-way agreement, with the audit's eyes.


def _sharded(model: Model, folder: Path) -> Path:
    mtp = set(model.mtp())
    shard_of = {n: "b.safetensors" if n in mtp else "a.safetensors" for n in model.tensors}
    return write_hf(folder, model.tensors, model.config, shard_of=shard_of)


@tables
def test_a_lost_shard_is_one_finding_not_a_missing_mtp(table: bool, tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    folder = _sharded(model, tmp_path)
    (folder / "b.safetensors").unlink()
    report = audit(None, sides.hf(folder, table=table))
    (one,) = errors(report)
    assert (one.kind, one.file) == ("index_missing_file", "b.safetensors")
    assert set(one.tensors) == set(model.mtp())
    assert report.mtp.status == "unreadable"
    (folder / "b.safetensors").write_bytes(b"\0" * 20)
    (one,) = errors(audit(None, sides.hf(folder, table=table)))
    assert one.kind == "unreadable_file"


@tables
def test_an_unreadable_shard_without_index_hides_everything(table: bool, tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    folder = _sharded(model, tmp_path)
    (folder / INDEX_NAME).unlink()
    (folder / "b.safetensors").write_bytes(b"")
    report = audit(None, sides.hf(folder, table=table))
    assert said(report) == [("unreadable_file", "b.safetensors")]
    assert report.mtp.status == "unreadable"


@tables
def test_ghosts_of_the_trunk_and_of_mtp(table: bool, tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    folder = _sharded(model, tmp_path)
    index = json.loads((folder / INDEX_NAME).read_text())
    gone = ["model.layers.1.input_layernorm.weight", model.mtp()[0]]
    for name in gone:
        del model.tensors[name]
    for file in folder.glob("*.safetensors"):
        file.unlink()
    _sharded(model, folder)
    (folder / INDEX_NAME).write_text(json.dumps(index))
    report = audit(None, sides.hf(folder, table=table))
    assert said(report) == sorted(("index_entry_not_in_file", n) for n in gone)


def test_an_mtp_file_outside_the_index(tmp_path: Path) -> None:
    model = base_model("glm-4.5.json")
    folder = _sharded(model, tmp_path)
    index = json.loads((folder / INDEX_NAME).read_text())
    mtp = model.mtp()
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if n not in mtp}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    report = audit(None, sides.hf(folder, table=True))
    assert said(report) == sorted(("tensor_not_in_index", n) for n in mtp)
    as_engines_do = Options(allow=frozenset({"index-authoritative"}))
    report = audit(None, sides.hf(folder, table=True), as_engines_do)
    assert [f.kind for f in errors(report)] == ["mtp_missing"]


def test_no_config_is_an_error(tmp_path: Path) -> None:
    folder = base_model("glm-4.5.json").write(tmp_path)
    (folder / "config.json").unlink()
    report = audit(None, sides.hf(folder))
    assert said(report) == [("config_missing", "config.json")]


def test_the_manifest_of_a_folder_without_config_is_red_as_the_folder_is(tmp_path: Path) -> None:
    model = base_model("glm-4.5.json")
    before, after = model.write(tmp_path / "a"), model.write(tmp_path / "b")
    (after / "config.json").unlink()
    opened = open_hf(after)
    write_manifest(take_manifest(opened, after, "hf", config=opened.config), tmp_path / "m.json")
    for reference in (None, before):
        found = open_sides(reference, tmp_path / "m.json")
        report = audit(found.before, found.after)
        assert said(report) == [("config_missing", "config.json")]
