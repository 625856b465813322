"""Block FP8 through both conversions and the audit: bytes where they are kept, else named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.sides import expected_inventory, open_sides
from mtpconv.convert import hf2mcore, mcore2hf
from mtpconv.errors import MtpconvError, RefusedError, UnreadableError, UnsupportedError, UsageError
from mtpconv.mapping.plan import make_plan
from mtpconv.mapping.table_reader import find_table
from mtpconv.store import fp8
from mtpconv.store.fp8_tensors import SCALE, Quantised
from mtpconv.store.hf import open_hf
from mtpconv.store.manifest import take_manifest, write_manifest
from mtpconv.store.safetensors_header import read_header
from mtpconv.synth import released, shrink
from mtpconv.tensors import TensorSpec
from tests.convert.folders import file_hashes, make_hf, tensors_of, write_empty_shard, write_hf
from tests.mapping.toy import config

Tensors = Mapping[str, tuple[TensorSpec, bytes]]
CONFIGS = Path(__file__).resolve().parents[2] / "fixtures" / "configs"
BLOCK = (4, 3)


def is_quantised(name: str) -> bool:
    """What DeepSeek's FP8 releases quantise: the projections of all layers, MTP's too."""
    return "proj" in name and name.endswith(".weight") and "eh_proj" not in name


def stated(**more: Any) -> dict[str, Any]:
    return {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK),
        "modules_to_not_convert": ["lm_head", "model.layers.3.eh_proj", "model.layers.1.mlp.gate"],
        **more,
    }  # fmt: skip


def quantise(tensors: Tensors, dtype: str = "F32") -> dict[str, tuple[TensorSpec, bytes]]:
    """The same model as an FP8 release; in its shards the scales come first, as in real ones."""
    scales: dict[str, tuple[TensorSpec, bytes]] = {}
    rest: dict[str, tuple[TensorSpec, bytes]] = {}
    for name, (spec, data) in tensors.items():
        if not is_quantised(name):
            rest[name] = (spec, data)
            continue
        random = np.random.default_rng(len(name) + sum(data[:64]))
        grid = fp8.Grid(spec.shape, BLOCK)
        codes = random.integers(0, 256, spec.shape, np.uint8)  # all codes, NaN among them
        numbers = np.exp2(random.uniform(-12, -4, grid.scale_shape)).astype(np.float32)
        specs = Quantised(name, name + SCALE, grid, dtype).specs
        rest[name] = (specs[name], codes.tobytes())
        scales[name + SCALE] = (specs[name + SCALE], fp8.write_scales(dtype, numbers))
    return scales | rest


def dequantise(tensors: Tensors) -> dict[str, tuple[TensorSpec, bytes]]:
    """What the definition makes of it, tensor by tensor and whole."""
    found = {}
    for name, (spec, data) in tensors.items():
        if name.endswith(SCALE):
            continue
        scale = tensors.get(name + SCALE)
        if scale is not None:
            rows, columns = spec.shape
            codes = np.frombuffer(data, "u1").reshape(spec.shape)
            numbers = fp8.read_scales(scale[0].dtype, scale[1]).reshape(scale[0].shape)
            wide = np.repeat(np.repeat(numbers, BLOCK[0], 0), BLOCK[1], 1)[:rows, :columns]
            words = fp8.to_bf16(fp8.e4m3_values()[codes] * wide)
            spec, data = TensorSpec("BF16", spec.shape), words.tobytes()
        found[name] = (spec, data)
    return found


def release(
    folder: Path, raw: dict[str, Any], dtype: str = "F32", **more: Any
) -> tuple[Path, Path]:
    """A seeded FP8 release in two shards, and the same model in BF16."""
    plain = tensors_of(make_hf(folder / "seed", raw))
    tensors = quantise(plain, dtype)
    shards = {n: f"part-{i % 2}.safetensors" for i, n in enumerate(tensors)}
    made = write_hf(
        folder / "fp8", tensors, raw | {"quantization_config": stated(**more)}, shard_of=shards,
        metadata={"format": "pt", "note": "fp8"},
    )  # fmt: skip
    bf16 = write_hf(folder / "bf16", dequantise(tensors), raw)
    shutil.rmtree(folder / "seed")
    return made, bf16


MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": config("deepseek_v3"),
    "glm_moe_dsa": config(),
    "stacked": config("deepseek_v3", first_k_dense_replace=0),
    "qwen3": {
        "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 32,
        "dtype": "bfloat16", "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "hidden_act": "silu", "max_position_embeddings": 64,
        "attention_bias": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", fp8.SCALE_DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_the_same_files_come_back(tmp_path: Path, model: str, dtype: str) -> None:
    hf, bf16 = release(tmp_path, MODELS[model], dtype)
    write_empty_shard(hf)
    done = hf2mcore(hf, tmp_path / "mcore")
    assert not (tmp_path / "mcore/hf_source/quantised/empty.safetensors").exists()
    count = sum(map(is_quantised, tensors_of(bf16)))
    assert [(s.name, s.level, s.tensors) for s in done.steps] == [
        ("dequantise", "values", count), ("keep", "bytes", 2 * count),
    ]  # fmt: skip
    back = mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
    assert [(s.name, s.level, s.tensors) for s in back.steps] == [("restore", "bytes", count)]
    assert back.unchanged == back.tensors == len(open_hf(hf).tensors)


@pytest.mark.parametrize("model", MODELS)
def test_megatron_gets_what_the_bf16_release_would_give(tmp_path: Path, model: str) -> None:
    """Every record file has the bytes of a conversion from BF16, dequantised here whole."""
    hf, bf16 = release(tmp_path, MODELS[model])
    hf2mcore(hf, tmp_path / "a", jobs=2)
    hf2mcore(bf16, tmp_path / "b", jobs=1)
    assert file_hashes(tmp_path / "a/release") == file_hashes(tmp_path / "b/release")


def trained(tmp_path: Path, bf16: Path, name: str, change: Callable[[Any], Any]) -> Path:
    """A Megatron checkpoint in which one HF tensor has other values."""
    tensors = tensors_of(bf16)
    spec, data = tensors[name]
    words = np.frombuffer(data, "<u2").reshape(spec.shape)
    values = change(fp8.from_bf16(words).copy())
    raw = json.loads((bf16 / "config.json").read_text())
    tensors[name] = (spec, fp8.to_bf16(np.ascontiguousarray(values)).tobytes())
    new = write_hf(tmp_path / "trained_hf", tensors, raw)
    hf2mcore(new, tmp_path / "trained", overwrite=True)
    shutil.rmtree(tmp_path / "trained" / "hf_source")
    shutil.rmtree(new)
    return tmp_path / "trained"


CHANGED = "model.layers.3.mlp.experts.1.up_proj.weight"  # 4 x 8: one row of blocks, three columns


@pytest.mark.parametrize("mode", ["keep", "requantise"])
def test_only_what_changed_is_requantised(tmp_path: Path, mode: str) -> None:
    hf, bf16 = release(tmp_path, MODELS["deepseek_v3"])
    hf2mcore(hf, tmp_path / "mcore")

    def change(values: Any) -> Any:
        values[:, 3:6] = np.linspace(-2, 2, 12).reshape(4, 3)  # larger than 448 times the scale
        values[:, 6:8] = 0.0012  # fits under the kept scale
        return values

    later = trained(tmp_path, bf16, CHANGED, change)
    for like in (hf, tmp_path / "mcore"):  # codes come from either
        done = mcore2hf(later, tmp_path / "out", like=like, fp8=mode, overwrite=True)
        levels = {s.name: (s.level, s.tensors) for s in done.steps}
        count = sum(map(is_quantised, tensors_of(bf16)))
        assert levels == {"restore": ("bytes", count - 1), "requantise": ("structure", 1)}
        fresh = 2 if mode == "requantise" else 1
        assert f"2 blocks that changed: {fresh} under a fresh scale" in done.steps[1].what
        old, new = tensors_of(hf), tensors_of(tmp_path / "out")
        assert {n for n in old if old[n] != new[n]} == {CHANGED, CHANGED + SCALE}
        assert (tmp_path / "out/config.json").read_bytes() == (hf / "config.json").read_bytes()
        wanted = np.frombuffer(tensors_of_trained(later, bf16)[CHANGED], "<u2")
        have = np.frombuffer(dequantise(new)[CHANGED][1], "<u2")
        a, b = fp8.from_bf16(wanted), fp8.from_bf16(have)
        same = np.isnan(a)
        assert np.array_equal(same, np.isnan(b))
        assert np.allclose(a[~same], b[~same], rtol=0.0664, atol=2e-4)


def tensors_of_trained(mcore: Path, bf16: Path) -> dict[str, bytes]:
    """HF tensors of a Megatron checkpoint, through a BF16 export."""
    out = mcore.parent / "as_bf16"
    mcore2hf(mcore, out, like=bf16, overwrite=True)
    return {n: data for n, (_, data) in tensors_of(out).items()}


def test_weights_that_cannot_be_quantised_are_refused(tmp_path: Path) -> None:
    hf, bf16 = release(tmp_path, MODELS["deepseek_v3"])
    later = trained(tmp_path, bf16, CHANGED, lambda v: v * np.inf)
    with pytest.raises(RefusedError, match=r"experts\.1\.up_proj.* NaN or infinity.*--fp8 bf16"):
        mcore2hf(later, tmp_path / "out", like=hf)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lost", ["file", "folder", "bytes", "list"])
def test_lost_codes_are_found_before_they_are_needed(tmp_path: Path, lost: str) -> None:
    hf, _ = release(tmp_path, MODELS["deepseek_v3"])
    hf2mcore(hf, tmp_path / "mcore")
    folder = tmp_path / "mcore/hf_source/quantised"
    if lost == "folder":
        shutil.rmtree(folder)
    elif lost == "file":
        (folder / "part-0.safetensors").unlink()
    elif lost == "list":
        (folder.parent / "quantised.json").unlink()
    else:
        part = folder / "part-0.safetensors"
        os.truncate(part, part.stat().st_size - 3)
    for before in (None, hf):
        sides = open_sides(before, tmp_path / "mcore")
        kinds = {f.kind for f in audit(sides.before, sides.after).findings if f.severity == "error"}
        assert kinds == {"source_damaged"}
    with pytest.raises(MtpconvError, match=r"quantised|FP8"):
        mcore2hf(tmp_path / "mcore", tmp_path / "back")


@pytest.mark.parametrize("there", ["keep", "bf16"])
def test_bf16_export(tmp_path: Path, there: str) -> None:
    hf, bf16 = release(tmp_path, MODELS["deepseek_v3"])
    hf2mcore(hf, tmp_path / "mcore", fp8=there)
    done = mcore2hf(tmp_path / "mcore", tmp_path / "out", fp8="keep" if there == "bf16" else "bf16")
    assert tensors_of(tmp_path / "out") == tensors_of(bf16)
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert raw == json.loads((bf16 / "config.json").read_text())
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == open_hf(bf16).tensors.keys()
    assert not open_hf(tmp_path / "out").problems
    if there == "keep":
        assert [(s.name, s.level) for s in done.steps] == [("write_bf16", "values")]
        # Nothing was trained: what is not FP8 is unchanged, and of the rest nobody can tell.
        recast = [n for n in tensors_of(bf16) if is_quantised(n)]
        assert done.not_compared == len(recast) > done.not_compared_mtp > 0
        assert done.unchanged == done.tensors - len(recast)
        assert done.unchanged_mtp == done.mtp_tensors - done.not_compared_mtp
        assert done.changed == ()
        assert any("laid out anew" in n for n in done.notes)
    else:
        assert not (tmp_path / "mcore/hf_source/quantised").exists()
        assert done.unchanged == done.tensors


@pytest.mark.parametrize("mode", ["requantise", "bf16"])
def test_a_switch_with_nothing_to_do_says_so(tmp_path: Path, mode: str) -> None:
    hf, bf16 = release(tmp_path, MODELS["deepseek_v3"])
    said = f"--fp8 {mode} had nothing to do: "
    assert any(n.startswith(said) for n in hf2mcore(bf16, tmp_path / "a", fp8=mode).notes)
    told = hf2mcore(hf, tmp_path / "mcore", fp8="bf16").notes
    assert not any("nothing to do" in n for n in told)
    assert any(
        n.startswith(said) for n in mcore2hf(tmp_path / "mcore", tmp_path / "b", fp8=mode).notes
    )
    assert not any("nothing to do" in n for n in mcore2hf(tmp_path / "mcore", tmp_path / "c").notes)


def test_without_kept_codes_fresh_ones_are_made_on_request(tmp_path: Path) -> None:
    hf, _ = release(tmp_path, MODELS["deepseek_v3"], "F8_E8M0")
    done = hf2mcore(hf, tmp_path / "mcore", fp8="requantise")
    assert [s.name for s in done.steps] == ["dequantise", "forget"]
    assert not (tmp_path / "mcore/hf_source/quantised").exists()
    with pytest.raises(UsageError, match=r"codes of \d+ weights did not travel.*--like"):
        mcore2hf(tmp_path / "mcore", tmp_path / "out")
    mcore2hf(tmp_path / "mcore", tmp_path / "kept", like=hf)
    assert file_hashes(tmp_path / "kept") == file_hashes(hf)


def test_requantising_all_keeps_names_shapes_and_config(tmp_path: Path) -> None:
    raw = MODELS["deepseek_v3"]
    hf, _ = release(tmp_path, raw)
    finite = {
        n: (s, np.where(c & 127 == 127, c ^ 1, c).astype("u1").tobytes())
        if s.dtype == "F8_E4M3" and (c := np.frombuffer(d, "u1")) is not None
        else (s, d)
        for n, (s, d) in tensors_of(hf).items()
    }  # fmt: skip
    sane = write_hf(tmp_path / "sane", finite, raw | {"quantization_config": stated()})
    hf2mcore(sane, tmp_path / "mcore", fp8="requantise")
    done = mcore2hf(tmp_path / "mcore", tmp_path / "out", fp8="requantise")
    new = tensors_of(tmp_path / "out")
    assert {n: s for n, (s, _) in new.items()} == {n: s for n, (s, _) in finite.items()}
    assert [s.level for s in done.steps] == ["structure"]
    assert done.changed == ()  # all codes are new, and nothing was trained
    assert (done.unchanged or 0) + done.not_compared == done.tensors
    for name, (_, data) in dequantise(finite).items():
        if is_quantised(name):
            a = fp8.from_bf16(np.frombuffer(data, "<u2"))
            b = fp8.from_bf16(np.frombuffer(dequantise(new)[name][1], "<u2"))
            assert np.allclose(a, b, rtol=0.07, atol=2e-4), name


def test_drop_mtp_takes_scales_and_list_entries_along(tmp_path: Path) -> None:
    hf, _ = release(tmp_path, MODELS["deepseek_v3"])
    hf2mcore(hf, tmp_path / "mcore")
    mcore2hf(tmp_path / "mcore", tmp_path / "a", drop_mtp=True)
    there = hf2mcore(hf, tmp_path / "trunk", drop_mtp=True)
    count = sum(s.dtype == "F8_E4M3" for s, _ in tensors_of(tmp_path / "a").values())
    assert [s.tensors for s in there.steps] == [count, 2 * count]
    as_bf16 = mcore2hf(tmp_path / "mcore", tmp_path / "c", drop_mtp=True, fp8="bf16")
    assert [s.tensors for s in as_bf16.steps] == [count]
    mcore2hf(tmp_path / "trunk", tmp_path / "b")
    left = {n: t for n, t in tensors_of(hf).items() if ".layers.3." not in n}
    for out in (tmp_path / "a", tmp_path / "b"):
        assert tensors_of(out) == left
        raw = json.loads((out / "config.json").read_text())
        assert raw["num_nextn_predict_layers"] == 0
        listed = raw["quantization_config"]["modules_to_not_convert"]
        assert listed == ["lm_head", "model.layers.1.mlp.gate"]


def test_fp8_comes_from_bf16_only(tmp_path: Path) -> None:
    hf, bf16 = release(tmp_path, MODELS["deepseek_v3"])
    raw = json.loads((bf16 / "config.json").read_text())
    wide = {
        n: (TensorSpec("F32", s.shape), (np.frombuffer(d, "<u2").astype("<u4") << 16).tobytes())
        if s.dtype == "BF16" else (s, d)
        for n, (s, d) in tensors_of(bf16).items()
    }  # fmt: skip
    hf2mcore(write_hf(tmp_path / "wide", wide, raw), tmp_path / "mcore")
    with pytest.raises(RefusedError, match=r"is F32 .* FP8 is made of BF16 .*does not cast"):
        mcore2hf(tmp_path / "mcore", tmp_path / "out", like=hf)


def test_damaged_sources_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    raw = MODELS["deepseek_v3"] | {"quantization_config": stated()}
    hf, _ = release(tmp_path, MODELS["deepseek_v3"])
    whole = tensors_of(hf)
    for name, match in ((CHANGED, "1 scales have no FP8"), (CHANGED + SCALE, "is missing")):
        broken = {n: t for n, t in whole.items() if n != name}
        source = write_hf(tmp_path / f"without_{len(name)}", broken, raw)
        with pytest.raises(RefusedError, match=match):
            hf2mcore(source, tmp_path / "mcore")
    hf2mcore(hf, tmp_path / "mcore")
    kept = tmp_path / "mcore/hf_source/quantised/part-0.safetensors"
    right = kept.read_bytes()
    header = read_header(kept)
    scale = next(n for n in header.tensors if n.endswith(SCALE))
    at = header.start(scale)
    kept.write_bytes(right[:at] + bytes([right[at] ^ 1]) + right[at + 1 :])
    with pytest.raises(UnreadableError, match=rf"quantised: {scale} is not what hf2mcore saved"):
        mcore2hf(tmp_path / "mcore", tmp_path / "out")
    kept.write_bytes(right[:-1])
    with pytest.raises(UnreadableError, match=r"part-0\.safetensors: does not have the size"):
        mcore2hf(tmp_path / "mcore", tmp_path / "out")
    with pytest.raises(RefusedError, match=r"kept FP8 tensors are missing.*--like"):
        mcore2hf(tmp_path / "mcore", tmp_path / "out", verify=False)
    with pytest.raises(UsageError, match="--fp8 half: must be keep, requantise, bf16"):
        mcore2hf(tmp_path / "mcore", tmp_path / "out", fp8="half")
    truncated = next(hf.glob("part-1*"))
    truncated.write_bytes(truncated.read_bytes()[:-1])
    with pytest.raises(UnreadableError, match="part-1"):
        mcore2hf(tmp_path / "mcore", tmp_path / "out", like=hf)


# -- the audit -----------------------------------------------------------------------------------


def test_fp8_against_megatron_is_compared_by_value_and_says_so(tmp_path: Path) -> None:
    hf, bf16 = release(tmp_path, MODELS["deepseek_v3"])
    hf2mcore(hf, tmp_path / "mcore")
    count = sum(map(is_quantised, tensors_of(bf16)))
    for sides in ((hf, tmp_path / "mcore"), (tmp_path / "mcore", hf)):
        report = audit(*_both(*sides))
        assert report.verdict == "pass"
        assert report.compared.tensors == len(tensors_of(bf16))
        (note,) = report.compared.notes
        assert note.startswith(f"{count} FP8 weights of {hf} were compared by value")
        assert "block FP8 seen as BF16" in (report.before.dialect, report.after.dialect)  # type: ignore[union-attr]
    changed = trained(tmp_path, bf16, CHANGED, lambda v: v + 1)
    report = audit(*_both(hf, changed))
    assert report.verdict == "fail"
    assert {f.tensor for f in report.findings if f.severity == "error"} == {CHANGED}


def _both(before: Path, after: Path) -> tuple[Any, Any]:
    sides = open_sides(before, after)
    return sides.before, sides.after


def test_a_manifest_of_codes_says_nothing_about_bf16(tmp_path: Path) -> None:
    hf, _ = release(tmp_path, MODELS["deepseek_v3"])
    hf2mcore(hf, tmp_path / "mcore")
    opened = open_hf(hf)
    taken = take_manifest(opened, hf, "hf", config=opened.config)
    write_manifest(taken, tmp_path / "manifest.json")
    with pytest.raises(UnsupportedError, match="is a manifest of FP8 codes"):
        open_sides(tmp_path / "manifest.json", tmp_path / "mcore")
    report = audit(*_both(tmp_path / "manifest.json", hf))
    assert report.verdict == "pass"


def test_alone_every_scale_counts(tmp_path: Path) -> None:
    raw = MODELS["deepseek_v3"] | {"quantization_config": stated()}
    hf, _ = release(tmp_path, MODELS["deepseek_v3"])
    sides = open_sides(None, hf)
    report = audit(None, sides.after)
    assert report.verdict == "pass", report.findings
    assert report.compared.tensors == len(open_hf(hf).tensors)
    whole = tensors_of(hf)
    gone = write_hf(
        tmp_path / "gone", {n: t for n, t in whole.items() if n != CHANGED + SCALE}, raw
    )
    report = audit(None, open_sides(None, gone).after)
    assert report.verdict == "fail"
    assert [f.tensor for f in report.findings if f.kind == "missing_tensor"] == [CHANGED + SCALE]
    spec, data = whole[CHANGED + SCALE]
    bent = {**whole, CHANGED + SCALE: (TensorSpec(spec.dtype, spec.shape[::-1]), data)}
    report = audit(None, open_sides(None, write_hf(tmp_path / "bent", bent, raw)).after)
    assert [f.tensor for f in report.findings if f.kind == "shape_mismatch"] == [CHANGED + SCALE]


def test_deepseek_r1_has_its_published_totals_with_scales() -> None:
    """91,991 tensors and 684,531,386,000 elements, scales included (published header listing)."""
    raw = json.loads((CONFIGS / "deepseek-r1.json").read_text())
    plan = make_plan(raw, find_table("deepseek_v3"))
    held = released(plan)
    assert len(held) - len(plan.hf) == 45_808
    assert (len(held), sum(s.elements for s in held.values())) == (91_991, 684_531_386_000)
    assert sum(s.nbytes for s in held.values()) == 688_574_839_360
    mtp = {n for n in held if n.startswith("model.layers.61.")}
    assert {n for n in mtp if n + SCALE in mtp} == set(filter(is_quantised, mtp))
    expected = expected_inventory(raw, None, held)
    assert expected is not None
    assert expected.tensors.keys() == {n for n in held if not n.endswith(SCALE)}


@pytest.mark.parametrize("name", ["deepseek-r1.json", "deepseek-v3.1.json", "kimi-k2.json"])
def test_a_published_fp8_config_gives_fp8_files_that_come_back(tmp_path: Path, name: str) -> None:
    raw = shrink(json.loads((CONFIGS / name).read_text()))
    raw |= {"num_hidden_layers": 3, "n_routed_experts": 2, "first_k_dense_replace": 1}
    hf = make_hf(tmp_path / "hf", raw)
    done = hf2mcore(hf, tmp_path / "mcore")
    assert done.steps[0].name == "dequantise"
    mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
    assert audit(None, open_sides(None, hf).after).verdict == "pass"
