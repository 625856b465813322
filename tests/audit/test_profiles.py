"""Engine profiles: what each engine would do with whole and damaged checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.finding import Report
from mtpconv.audit.options import Options, Profile
from mtpconv.audit.sides import open_sides
from mtpconv.convert import hf2mcore
from mtpconv.store.hf_index import INDEX_NAME
from tests.audit import sides
from tests.audit.models import Model, alone, base_model
from tests.audit.test_single import fp8_model
from tests.convert.folders import write_hf

GLM = "model.layers.4."


def rules(report: Report) -> dict[str, str]:
    """Severity by the rule that spoke."""
    return {(f.hint or "").split(":")[0]: f.severity for f in report.findings if f.code[0] == "E"}


def run(model: Model, place: Path, profile: Profile, **options: Any) -> dict[str, str]:
    return rules(alone(model, place, profile=profile, **options))


def test_a_whole_model_raises_nothing_in_serving_engines(tmp_path: Path) -> None:
    for profile in ("vllm", "sglang"):
        assert run(base_model("glm-5.2.json"), tmp_path / profile, profile) == {}


def test_without_a_profile_no_engine_is_mentioned(tmp_path: Path) -> None:
    report = alone(base_model("deepseek-v3.json"), tmp_path)
    assert rules(report) == {}
    assert not any(kind.startswith("engine") for kind in report.checked)


def test_absent_depth(tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    for name in model.mtp():
        del model.tensors[name]
    assert run(model, tmp_path / "v", "vllm") == {"vllm-absent-depth": "error"}
    assert run(model, tmp_path / "s", "sglang") == {"sglang-unchecked": "warning"}
    assert run(model, tmp_path / "t", "transformers") == {}


def test_half_a_depth_depends_on_quantisation(tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    del model.tensors[GLM + "eh_proj.weight"]
    assert run(model, tmp_path / "v", "vllm") == {"vllm-partial-depth": "error"}
    assert run(model, tmp_path / "s", "sglang") == {"sglang-unchecked": "warning"}
    quantised = fp8_model()
    del quantised.tensors[GLM + "eh_proj.weight"]
    assert run(quantised, tmp_path / "q", "vllm")["vllm-partial-depth"] == "warning"


def test_counts(tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    del model.config["num_nextn_predict_layers"]
    assert run(model, tmp_path / "v", "vllm") == {"vllm-count": "warning"}
    assert run(model, tmp_path / "s", "sglang") == {"sglang-count": "error"}
    model.config["num_nextn_predict_layers"] = 2
    assert run(model, tmp_path / "s2", "sglang")["sglang-count"] == "error"
    other = base_model("step-3.5-flash.json")
    assert "sglang-count" not in run(other, tmp_path / "s3", "sglang")


@pytest.mark.parametrize("profile", ["vllm", "sglang"])
def test_copies(profile: Profile, tmp_path: Path) -> None:
    model = base_model("deepseek-v3.json")
    assert GLM + "embed_tokens.weight" in model.tensors
    rule = f"{profile}-copies"
    assert run(model, tmp_path / "a", profile) == {rule: "note"}
    model.data(GLM + "shared_head.head.weight", lambda d: d.__setitem__(0, d[0] ^ 1))
    assert run(model, tmp_path / "b", profile) == {rule: "warning"}
    assert run(model, tmp_path / "c", profile, read_bytes=False) == {rule: "note"}


@pytest.mark.parametrize("profile", ["vllm", "sglang"])
def test_files_outside_the_index(profile: Profile, tmp_path: Path) -> None:
    model = base_model("glm-4.5.json")
    mtp = model.mtp()
    shard_of = {n: "mtp.safetensors" if n in mtp else "a.safetensors" for n in model.tensors}
    folder = write_hf(tmp_path, model.tensors, model.config, shard_of=shard_of)
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if n not in mtp}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    found = rules(audit(None, sides.hf(folder, table=True), Options(profile=profile)))
    assert found[f"{profile}-index"] == "warning"


def test_transformers_drops_at_real_layer_numbers_only_silently(tmp_path: Path) -> None:
    model = base_model("k-exaone-236b-a23b.json")
    assert run(model, tmp_path / "a", "transformers") == {"transformers-drops": "warning"}
    small = base_model("glm-5.2.json")
    # 4 layers: the pattern of the family names layer 78, so the loss is at least reported.
    assert run(small, tmp_path / "b", "transformers") == {"transformers-drops": "note"}
    small.config["num_hidden_layers"] = 78
    for name in [n for n in small.tensors if n.startswith(GLM)]:
        small.tensors[name.replace("layers.4.", "layers.78.")] = small.tensors.pop(name)
    found = run(small, tmp_path / "c", "transformers", table=False)
    assert found == {"transformers-drops": "warning"}


def test_transformers_invents_a_count(tmp_path: Path) -> None:
    model = base_model("deepseek-v3.json")
    del model.config["num_nextn_predict_layers"]
    assert run(model, tmp_path, "transformers")["transformers-count"] == "warning"


@pytest.mark.parametrize("family", ["step-3.5-flash.json", "glm-4.5.json", "mimo-7b.json"])
def test_rules_of_deepseek_say_nothing_of_others(family: str, tmp_path: Path) -> None:
    model = base_model(family)
    model.config["num_nextn_predict_layers"] = len({r.index for r in model.regions.values()
                                                    if r.kind == "mtp"})  # fmt: skip
    for name in model.mtp():
        if "norm" in name:
            del model.tensors[name]
    assert run(model, tmp_path / "s", "sglang") == {"": "note"}  # its MTP was not read there
    assert "vllm-absent-depth" not in run(model, tmp_path / "v", "vllm")


def test_a_depth_that_is_gone_in_other_families(tmp_path: Path) -> None:
    model = base_model("mimo-7b.json")
    for name in model.mtp():
        del model.tensors[name]
    assert run(model, tmp_path, "vllm") == {"vllm-partial-depth": "error"}


def test_step_loads_its_own_heads(tmp_path: Path) -> None:
    model = base_model("step-3.5-flash.json")
    heads = [n for n in model.mtp() if n.endswith("shared_head.output.weight")]
    assert heads
    model.data(heads[0], lambda d: d.__setitem__(0, d[0] ^ 1))
    assert run(model, tmp_path / "v", "vllm") == {}
    assert run(model, tmp_path / "s", "sglang") == {"": "note"}


def test_a_count_that_vllm_does_not_need(tmp_path: Path) -> None:
    model = base_model("step-3.5-flash.json")
    del model.config["num_nextn_predict_layers"]
    assert run(model, tmp_path, "vllm") == {}


@pytest.mark.parametrize("profile", ["vllm", "sglang", "transformers"])
def test_what_is_no_hf_folder_is_said_not_to_be_looked_at(profile: Profile, tmp_path: Path) -> None:
    hf = base_model("glm-5.2.json").write(tmp_path / "hf")
    hf2mcore(hf, tmp_path / "mcore")
    sides_of = open_sides(None, tmp_path / "mcore")
    report = audit(None, sides_of.after, Options(profile=profile))
    (note,) = [f for f in report.findings if f.code[0] == "E"]
    assert (note.kind, note.severity) == ("engine_note", "note")
    assert profile in note.message
    assert "torch_dist" in note.message
