"""slime's checkpoints: linear attention as HF modules, the indexer with turned heads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.finding import Report
from mtpconv.audit.sides import open_sides
from mtpconv.convert import hf2mcore, mcore2hf
from mtpconv.errors import UnsupportedError, UsageError
from mtpconv.store.hf import open_hf
from mtpconv.store.manifest import take_manifest, write_manifest
from mtpconv.synth import shrink
from tests.convert.folders import file_hashes, make_hf
from tests.mapping.toy import config
from tests.store import legacy_ranks, slime
from tests.store.respelled import respelled

CONFIGS = Path(__file__).resolve().parents[2] / "fixtures" / "configs"
NETS = ["qwen3-next-80b-a3b", "qwen3.5-35b-a3b-text", "qwen3.6-27b-text"]
HEAD, ROPE = 128, 64  # slime has no other


def qwen(name: str, **changes: Any) -> dict[str, Any]:
    small: dict[str, Any] = shrink(json.loads((CONFIGS / f"{name}.json").read_text()))
    experts = {"num_experts": 2, "num_experts_per_tok": 1} if "num_experts" in small else {}
    return small | {"num_hidden_layers": 4} | experts | changes


def glm(model_type: str = "glm_moe_dsa") -> dict[str, Any]:
    return config(model_type, index_head_dim=HEAD, qk_rope_head_dim=ROPE, index_topk=4)


def compare(before: Path, after: Path) -> Report:
    sides = open_sides(before, after)
    return audit(sides.before, sides.after)


def as_slime(folder: Path, raw: dict[str, Any], layout: str = "training") -> tuple[Path, Path]:
    """An HF folder, and the checkpoint that slime makes of it."""
    hf, mcore, target = (folder / n for n in ("hf", "mcore", "slime"))
    make_hf(hf, raw)
    hf2mcore(hf, mcore, layout=layout)
    if "index_topk" in raw:
        return hf, slime.indexer(mcore, target, head=HEAD, rope=ROPE)
    swapped = raw["model_type"] == "qwen3_next"
    return hf, slime.linear_attention(hf, mcore, target, swapped=swapped)


@pytest.mark.parametrize("layout", ["training", "canonical"])
@pytest.mark.parametrize("name", NETS)
def test_linear_attention_comes_back_byte_for_byte(tmp_path: Path, name: str, layout: str) -> None:
    hf, other = as_slime(tmp_path, qwen(name), layout)
    done = mcore2hf(other, tmp_path / "back", like=hf)
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
    spelled = "stacked_experts+" if layout == "training" and "27b" not in name else ""
    assert done.layout == f"{spelled}slime_linear_attention; slime"
    assert not done.steps  # no arithmetic: its norm is HuggingFace's own


@pytest.mark.parametrize("name", NETS)
def test_the_audit_reads_it_too(tmp_path: Path, name: str) -> None:
    hf, other = as_slime(tmp_path, qwen(name))
    report = compare(hf, other)
    assert report.verdict == "pass"
    assert (report.after.dialect or "").endswith("slime_linear_attention; slime")
    doubts = [n for n in report.compared.notes if "not told by bytes" in n]
    assert [n.split("bytes, ")[1].split(":")[0] for n in doubts] == [
        "rows of linear_qkv", "halves of eh_proj",
    ]  # fmt: skip
    assert all(n.endswith("audit against its HuggingFace original decides") for n in doubts)
    assert ("this is slime's, and read so" in doubts[1]) == (name == NETS[0])


def test_a_manifest_is_enough(tmp_path: Path) -> None:
    hf, other = as_slime(tmp_path, qwen(NETS[0]))
    manifest = tmp_path / "manifest.json"
    opened = open_hf(hf)
    write_manifest(take_manifest(opened, manifest, "hf", config=opened.config), manifest)
    assert compare(manifest, other).verdict == "pass"


def test_halves_that_slime_did_not_exchange_are_seen(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", qwen(NETS[0]))
    hf2mcore(hf, tmp_path / "mcore")
    other = slime.linear_attention(hf, tmp_path / "mcore", tmp_path / "slime", swapped=False)
    report = compare(hf, other)
    assert {f.tensor for f in report.findings if f.kind == "value_mismatch"} == {"mtp.fc.weight"}


@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "deepseek_v32"])
@pytest.mark.parametrize("layout", ["training", "canonical"])
def test_the_indexer_comes_back_byte_for_byte(tmp_path: Path, model_type: str, layout: str) -> None:
    hf, other = as_slime(tmp_path, glm(model_type), layout)
    done = mcore2hf(other, tmp_path / "back", like=hf)
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
    assert done.layout.endswith("slime_indexer; slime")
    assert any("AReaL and Relax use its names and keep the order" in note for note in done.notes)
    assert compare(hf, other).verdict == "pass"


def test_an_indexer_in_the_order_of_the_original_is_seen(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", glm())
    hf2mcore(hf, tmp_path / "mcore")
    report = compare(hf, slime.indexer(tmp_path / "mcore", tmp_path / "other", head=HEAD, rope=0))
    changed = {f.tensor for f in report.findings if f.kind == "value_mismatch"}
    wanted = {n for n in open_hf(hf).tensors if ".indexer." in n and "weights_proj" not in n}
    assert changed == wanted
    assert any("rows of the indexer" in note for note in report.compared.notes)


def test_the_first_gated_attention_is_refused_by_name(tmp_path: Path) -> None:
    hf, other = as_slime(tmp_path, qwen(NETS[0]))
    old = respelled(other, tmp_path / "old", ("linear_qkv.", "linear_qgkv."))
    with pytest.raises(UnsupportedError, match="slime, gated attention of its first versions"):
        mcore2hf(old, tmp_path / "back", like=hf)
    assert not (tmp_path / "back").exists()


def test_a_trained_norm_of_the_net_is_written_as_trained(tmp_path: Path) -> None:
    """mtpconv's own checkpoint of the model holds it less 1; the originals must not come back."""
    hf, other = as_slime(tmp_path, qwen(NETS[0]))
    fresh = make_hf(tmp_path / "fresh", qwen(NETS[0]), seed=1)
    hf2mcore(fresh, tmp_path / "fresh_mcore")
    shutil.copytree(other, tmp_path / "later/iter_0000001")
    mcore2hf(tmp_path / "later", tmp_path / "back", like=tmp_path / "fresh_mcore/hf_source")
    before, after = (file_hashes(f) for f in (hf, tmp_path / "back"))
    shards = [n for n in before if n.endswith(".safetensors")]
    assert shards
    assert all(before[n] == after[n] for n in shards)


@pytest.mark.parametrize("raw", [qwen(NETS[0]), glm()], ids=["linear attention", "indexer"])
def test_legacy_ranks_are_merged(tmp_path: Path, raw: dict[str, Any]) -> None:
    """Tensor-parallel ranks each have all of slime's own modules."""
    pytest.importorskip("torch")
    hf, other = as_slime(tmp_path, raw, "canonical")
    sizes = {"hidden_size": raw["hidden_size"], "kv_lora_rank": 4, "qk_pos_emb_head_dim": ROPE}
    tensors = legacy_ranks.as_tensors(other, {})
    legacy_ranks.save(tmp_path / "old/iter_0000009", tensors=tensors, tp=2, q_lora_rank=4, **sizes)
    done = mcore2hf(tmp_path / "old", tmp_path / "back", like=hf)
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
    assert done.layout.endswith("; slime")


@pytest.mark.parametrize("dialect", ["slime_linear_attention", "slime_indexer"])
def test_they_are_only_read(tmp_path: Path, dialect: str) -> None:
    hf = make_hf(tmp_path / "hf", glm())
    with pytest.raises(UsageError, match="is read, never written"):
        hf2mcore(hf, tmp_path / "mcore", layout=f"training,{dialect}")
