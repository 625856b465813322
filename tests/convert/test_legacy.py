"""Checkpoints that others wrote, through the export and the audit: legacy ranks above all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.sides import open_sides
from mtpconv.convert import hf2mcore, mcore2hf
from mtpconv.errors import RefusedError, UsageError
from tests.convert.folders import file_hashes, make_hf
from tests.mapping.toy import config
from tests.store import legacy_ranks
from tests.store.respelled import respelled

torch = pytest.importorskip("torch")

MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": config("deepseek_v3", num_hidden_layers=4),
    "glm4_moe": config(
        "glm4_moe", num_hidden_layers=4, q_lora_rank=None, attention_bias=True, use_qk_norm=True,
        head_dim=4, num_attention_heads=4,
    ),
}  # fmt: skip
SIZES = ("hidden_size", "q_lora_rank", "kv_lora_rank", "qk_pos_emb_head_dim")
MLP = ("pre_mlp_layernorm", "mlp")
#: What the module is called in `state_dict()`, where torch_dist calls it otherwise.
MODULES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
PARALLEL: list[dict[str, Any]] = [
    {}, {"tp": 2, "pp": 2, "ep": 2}, {"tp": 2, "pp": 2, "virtual": 2, "grouped": True},
    {"packed": True}, {"tp": 2, "etp": 1, "ep": 2, "packed": True},
]  # fmt: skip


def legacy(tmp_path: Path, model: str, parallel: dict[str, Any], rename: dict[str, str]) -> Path:
    """An HF folder, and the same model as legacy ranks without an hf_source."""
    hf = make_hf(tmp_path / "hf", MODELS[model])
    hf2mcore(hf, tmp_path / "mcore", layout="canonical")
    args: dict[str, Any] = {
        "hidden_size": 8,
        "q_lora_rank": 4,
        "kv_lora_rank": 4,
        "qk_pos_emb_head_dim": 2,
    }
    tensors = legacy_ranks.as_tensors(tmp_path / "mcore", rename)
    legacy_ranks.save(tmp_path / "old/iter_0000009", tensors=tensors, **parallel, **args)
    return hf


@pytest.mark.parametrize("parallel", PARALLEL, ids=str)
@pytest.mark.parametrize("spelling", ["transformer_layer", "mtp_model_layer"])
@pytest.mark.parametrize("spec", ["te", "local"])
@pytest.mark.parametrize("model", MODELS)
def test_the_same_files_come_back(
    tmp_path: Path, model: str, spec: str, spelling: str, parallel: dict[str, Any]
) -> None:
    rename = {".transformer_layer.": f".{spelling}."}
    if spec == "local" and model == "glm4_moe":
        rename |= MODULES
    hf = legacy(tmp_path, model, parallel, rename)
    done = mcore2hf(tmp_path / "old", tmp_path / "back", like=hf)
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
    assert ("grouped_gemm" in done.layout) == ("packed" in parallel)
    assert ("mtp_model_layer" in done.layout) == (spelling == "mtp_model_layer")
    assert ("local_modules_gqa" in done.layout) == (rename.keys() > MODULES.keys())
    assert any("optimizer state" in note for note in done.notes)
    report = audit(*_both(hf, tmp_path / "old"))
    assert report.verdict == "pass"
    assert report.after.format == "torch"
    assert any("optimizer state" in note for note in report.compared.notes)
    report = audit(*_both(tmp_path / "mcore", tmp_path / "old"))  # through the plan of hf_source
    assert report.verdict == "pass"


def _both(before: Path, after: Path) -> tuple[Any, Any]:
    sides = open_sides(before, after)
    return sides.before, sides.after


def test_a_depth_that_is_gone_is_refused(tmp_path: Path) -> None:
    hf = legacy(tmp_path, "deepseek_v3", {}, {})
    left = [
        t for t in legacy_ranks.as_tensors(tmp_path / "mcore", {}) if not t[0].startswith("mtp.")
    ]
    shutil.rmtree(tmp_path / "old")
    legacy_ranks.save(tmp_path / "old/iter_0000009", tensors=left)
    with pytest.raises(RefusedError, match=r"of them MTP.*--drop-mtp"):
        mcore2hf(tmp_path / "old", tmp_path / "back", like=hf)
    assert not (tmp_path / "back").exists()


def test_ranks_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    hf = legacy(tmp_path, "deepseek_v3", {"tp": 2}, {})
    file = tmp_path / "old/iter_0000009/mp_rank_01/model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    state["model"]["mtp.layers.0.enorm.weight"][0] += 1
    torch.save(state, file)
    with pytest.raises(RefusedError, match=r"mtp\.layers\.0\.enorm\.weight differs between"):
        mcore2hf(tmp_path / "old", tmp_path / "back", like=hf)


@pytest.mark.parametrize("layout", ["local_modules_gqa", "training,hybrid_layers"])
def test_layouts_that_are_only_read_are_not_written(tmp_path: Path, layout: str) -> None:
    hf = make_hf(tmp_path / "hf", MODELS["glm4_moe"])
    with pytest.raises(UsageError, match="is read, never written"):
        hf2mcore(hf, tmp_path / "mcore", layout=layout)


def test_a_hybrid_model_is_read(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", MODELS["deepseek_v3"])
    hf2mcore(hf, tmp_path / "mcore", layout="canonical")
    layers = [
        (f"decoder.layers.{n}.{part}.", f"decoder.layer.{2 * n + (part in MLP)}.{part}.")
        for n in range(4)
        for part in ("self_attention", "input_layernorm", *MLP)
    ]
    inner = [
        (f".transformer_layer.{part}.", f".mtp_model_layer.layers.{int(part in MLP)}.{part}.")
        for part in ("self_attention", "input_layernorm", *MLP)
    ]
    names = [*layers, ("decoder.layer.", "decoder.layers."), *inner]
    norm = ("decoder.final_layernorm", "decoder.final_norm")
    other = respelled(tmp_path / "mcore", tmp_path / "hybrid", *names, norm)
    done = mcore2hf(other, tmp_path / "back", like=hf)
    assert done.layout == "hybrid_layers; HybridModel"
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
