"""The norm of gated delta nets: less one in Megatron, the same bytes after a round trip."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.options import Options
from mtpconv.audit.sides import open_sides
from mtpconv.convert import hf2mcore, mcore2hf
from mtpconv.convert.arithmetic import require_restored
from mtpconv.convert.mcore_to_hf_plan import McoreToHf, origin_of, plan_mcore2hf
from mtpconv.errors import RefusedError
from mtpconv.store.arithmetic import Undone, minus_one, plus_one
from mtpconv.store.content import blocks
from mtpconv.store.legacy import open_megatron
from mtpconv.store.torch_dist import open_torch_dist
from mtpconv.tensors import TensorSpec
from mtpconv.view import HfView
from tests.convert.folders import file_hashes, make_hf, overwrite, tensors_of, write_hf
from tests.convert.test_families import small_config

NORM = "model.layers.{}.linear_attn.norm.weight"
KEY = "decoder.layers.{}.self_attention.out_norm.weight"


def source(folder: Path, words: dict[int, np.ndarray] | None = None) -> Path:
    """A Qwen3-Next whose norms hold what does not come back: small numbers, NaN."""
    config = small_config("qwen3_next") | {
        "num_hidden_layers": 4, "linear_value_head_dim": 8, "mtp_num_hidden_layers": 0,
    }  # fmt: skip
    tensors = tensors_of(make_hf(folder.with_name(folder.name + "-made"), config))
    spec = TensorSpec("BF16", (8,))
    for layer in range(3):
        made = np.array([0x3E81, 0x3F80, 0x7FC1, 0x0001, 0xBF03, 0, 0x8000, 0x3DFF], np.uint16)
        tensors[NORM.format(layer)] = spec, (words or {}).get(layer, made).tobytes()
    return write_hf(folder, tensors, config)


def stored(folder: Path, layer: int) -> bytes:
    checkpoint = open_torch_dist(folder)
    return b"".join(bytes(b) for b in blocks(checkpoint, KEY.format(layer)))


def test_every_file_comes_back(tmp_path: Path) -> None:
    hf = source(tmp_path / "hf")
    there = hf2mcore(hf, tmp_path / "mcore")
    words = np.frombuffer(tensors_of(hf)[NORM.format(1)][1], "<u2")
    assert stored(tmp_path / "mcore", 1) == minus_one(words, "BF16").tobytes()
    assert [(s.name, s.level, s.tensors) for s in there.steps] == [("minus_one", "values", 3)]
    assert not there.notes
    back = mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
    assert back.unchanged == back.tensors
    assert [(s.name, s.level, s.tensors) for s in back.steps] == [("restore", "bytes", 3)]


@pytest.mark.parametrize("like", ["saved", "folder"])
def test_a_trained_norm_is_undone_and_said_to_be(tmp_path: Path, like: str) -> None:
    hf = source(tmp_path / "hf")
    hf2mcore(hf, tmp_path / "before")
    trained = np.array([0x3F81] * 8, np.uint16)
    hf2mcore(source(tmp_path / "trained", {1: trained}), tmp_path / "mcore")
    shutil.rmtree(tmp_path / "mcore" / "hf_source")  # as if Megatron had saved it
    other = tmp_path / "before" / "hf_source" if like == "saved" else hf
    done = mcore2hf(tmp_path / "mcore", tmp_path / "back", like=other)
    assert [(s.name, s.level, s.tensors) for s in done.steps] == [
        ("restore", "bytes", 2), ("undo minus_one", "values", 1),
    ]  # fmt: skip
    want = plus_one(minus_one(trained, "BF16"), "BF16")
    assert tensors_of(tmp_path / "back")[NORM.format(1)][1] == want.tobytes()
    if like == "saved":
        assert done.unchanged == done.tensors - 1


def test_what_comes_out_like_the_original_by_rounding_is_not_unchanged(tmp_path: Path) -> None:
    # Megatron's 2^-10 becomes the original's 1 by rounding, but 1 becomes 0 in Megatron.
    one = np.full(8, 0x3F80, np.uint16)
    hf = source(tmp_path / "hf", {0: one})
    hf2mcore(hf, tmp_path / "mcore")
    words = np.full(8, 0x3A80, np.uint16)
    assert plus_one(words, "BF16").tobytes() == one.tobytes()
    poke(tmp_path / "mcore", 0, words)
    done = mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
    assert done.unchanged == done.tensors - 1
    assert ("undo minus_one", "values", 1) in [(s.name, s.level, s.tensors) for s in done.steps]


def poke(folder: Path, layer: int, words: np.ndarray) -> None:
    overwrite(folder, KEY.format(layer), words.tobytes())


def _planned(folder: Path) -> McoreToHf:
    return plan_mcore2hf(folder, open_megatron(folder), origin_of(folder))


def test_a_norm_that_megatron_lost_is_not_answered_by_its_original(tmp_path: Path) -> None:
    hf2mcore(source(tmp_path / "hf"), tmp_path / "mcore")
    work = _planned(tmp_path / "mcore")
    whole = work.view.checkpoint
    lacking = SimpleNamespace(
        path=whole.path, format=whole.format, problems=(), chunks=whole.chunks,
        tensors={n: s for n, s in whole.tensors.items() if n != KEY.format(2)},
    )  # fmt: skip
    view = HfView(lacking, work.view.plan, carried=work.source.carried)
    assert view.missing == [NORM.format(2)]
    assert NORM.format(2) not in view.tensors


def test_verification_wants_what_the_originals_become(tmp_path: Path) -> None:
    hf2mcore(source(tmp_path / "hf"), tmp_path / "mcore")
    poke(tmp_path / "mcore", 0, np.zeros(8, np.uint16))
    back = _planned(tmp_path / "mcore").undone
    assert isinstance(back, Undone)
    with pytest.raises(RefusedError, match="1 tensors are not what their originals become"):
        require_restored(back)


def test_the_audit_compares_by_value_and_says_so(tmp_path: Path) -> None:
    hf = source(tmp_path / "hf")
    hf2mcore(hf, tmp_path / "mcore")
    for before, after in ((hf, tmp_path / "mcore"), (tmp_path / "mcore", hf)):
        sides = open_sides(before, after)
        report = audit(sides.before, sides.after)
        assert (report.verdict, report.tier) == ("pass", "L2")
        assert [n for n in report.compared.notes if "3 tensors" in n and "compared by value" in n]
    poke(tmp_path / "mcore", 1, np.zeros(8, np.uint16))
    sides = open_sides(hf, tmp_path / "mcore")
    report = audit(sides.before, sides.after, Options())
    assert report.verdict == "fail"
    assert [f.tensor for f in report.findings if f.severity == "error"] == [NORM.format(1)]


def test_the_audit_against_a_manifest_takes_the_originals(tmp_path: Path) -> None:
    hf = source(tmp_path / "hf")
    hf2mcore(hf, tmp_path / "mcore")
    manifest = tmp_path / "mcore" / "hf_source" / "manifest.json"
    sides = open_sides(manifest, tmp_path / "mcore")
    report = audit(sides.before, sides.after)
    assert (report.verdict, report.tier) == ("pass", "L1")
    assert any("originals in hf_source" in note for note in report.compared.notes)
    poke(tmp_path / "mcore", 1, np.zeros(8, np.uint16))
    sides = open_sides(manifest, tmp_path / "mcore")
    assert audit(sides.before, sides.after).verdict == "fail"


def test_with_fp8_weights_beside(tmp_path: Path) -> None:
    config = small_config("qwen3_next") | {
        "num_hidden_layers": 4, "quantization_config": {
            "quant_method": "fp8", "weight_block_size": [128, 128],
        },
    }  # fmt: skip
    hf = make_hf(tmp_path / "hf", config)
    there = hf2mcore(hf, tmp_path / "mcore")
    assert [s.name for s in there.steps] == ["dequantise", "keep", "minus_one"]
    back = mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert [(s.name, s.level) for s in back.steps] == [("restore", "bytes"), ("restore", "bytes")]
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
    sides = open_sides(hf, tmp_path / "mcore")
    report = audit(sides.before, sides.after)
    assert report.verdict == "pass"
    assert len([n for n in report.compared.notes if "by value" in n]) == 2


def test_norms_in_fp32_stay_fp32(tmp_path: Path) -> None:
    # Qwen3.5-0.8B-Base has them so in a BF16 model.
    tensors = tensors_of(source(tmp_path / "bf16"))
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    gamma = np.array([1.0, 0.1, 1e-8, -3.0, 0.99999994, 2.5, 0.0, 7.0], np.float32)
    for layer in range(3):
        tensors[NORM.format(layer)] = TensorSpec("F32", (8,)), gamma.tobytes()
    hf = write_hf(tmp_path / "hf", tensors, config)
    hf2mcore(hf, tmp_path / "mcore")
    assert stored(tmp_path / "mcore", 2) == (gamma - np.float32(1)).tobytes()
    mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
