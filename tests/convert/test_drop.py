"""--drop-mtp drops MTP and nothing but MTP, and the written config says 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.sides import open_sides
from mtpconv.convert import hf2mcore, mcore2hf
from mtpconv.errors import RefusedError
from mtpconv.mapping.table_reader import find_table
from mtpconv.store.content import blocks
from mtpconv.store.dist_metadata_writer import write_metadata
from mtpconv.store.torch_dist import open_torch_dist
from mtpconv.store.torch_dist_writer import TorchDistWriter
from mtpconv.tensors import Box, TensorSpec
from tests.convert.folders import make_hf, tensors_of, write_hf
from tests.convert.test_families import small_config
from tests.mapping.toy import config

Tensors = dict[str, tuple[TensorSpec, bytes]]


def rewritten(folder: Path, changes: Tensors) -> None:
    """The torch_dist folder with some tensors added or replaced."""
    stored = open_torch_dist(folder)
    tensors: Tensors = {
        k: (s, b"".join(bytes(b) for b in blocks(stored, k))) for k, s in stored.tensors.items()
    }
    tensors |= changes
    for path in folder.glob("*.distcp"):
        path.unlink()
    with TorchDistWriter(folder) as writer:
        for key, (spec, data) in tensors.items():
            writer.write(key, spec, Box.whole(spec.shape), iter([data]))
        write_metadata(folder, writer.close())


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    hf = make_hf(tmp_path / "hf", config("deepseek_v3"))
    hf2mcore(hf, tmp_path / "mcore", layout="canonical")
    return hf, tmp_path / "mcore"


def test_export_still_refuses_what_is_no_mtp(pair: tuple[Path, Path], tmp_path: Path) -> None:
    _, mcore = pair
    lora = (TensorSpec("BF16", (2,)), b"\1\2\3\4")
    rewritten(mcore / "release", {"decoder.layers.0.self_attention.secret_lora.weight": lora})
    for drop in (False, True):
        with pytest.raises(RefusedError, match=r"M05 .*secret_lora"):
            mcore2hf(mcore, tmp_path / "back", drop_mtp=drop)
    assert not (tmp_path / "back").exists()


def test_export_still_refuses_trained_padding_rows(pair: tuple[Path, Path], tmp_path: Path) -> None:
    hf, mcore = pair
    key = "embedding.word_embeddings.weight"
    stored = open_torch_dist(mcore)
    rows, width = stored.tensors[key].shape
    data = b"".join(bytes(b) for b in blocks(stored, key)) + np.ones(4 * width, "<u2").tobytes()
    rewritten(mcore / "release", {key: (TensorSpec("BF16", (rows + 4, width)), data)})
    for drop in (False, True):
        with pytest.raises(RefusedError, match="4 rows beyond the config's vocabulary"):
            mcore2hf(mcore, tmp_path / "back", drop_mtp=drop)
    for pair_of in ((hf, mcore), (mcore, hf), (None, mcore)):
        sides = open_sides(*pair_of)
        report = audit(sides.before, sides.after)
        assert report.verdict == "fail"
        wrong = [f for f in report.findings if f.severity == "error"]
        assert [(f.kind, f.tensor) for f in wrong] == [
            ("shape_mismatch", "model.embed_tokens.weight")
        ]


def test_export_still_refuses_another_dtype(pair: tuple[Path, Path], tmp_path: Path) -> None:
    hf, mcore = pair
    key = "decoder.final_layernorm.weight"
    spec, data = open_torch_dist(mcore).tensors[key], tensors_of(hf)["model.norm.weight"][1]
    rewritten(mcore / "release", {key: (TensorSpec("F16", spec.shape), data)})
    for drop in (False, True):
        with pytest.raises(RefusedError, match="does not cast"):
            mcore2hf(mcore, tmp_path / "back", drop_mtp=drop)


@pytest.mark.parametrize("model", ["deepseek_v3", "glm_moe_dsa"])
@pytest.mark.parametrize("short", [1, 2])
def test_a_config_that_lost_layers_does_not_turn_them_into_mtp(
    tmp_path: Path, model: str, short: int
) -> None:
    full = config(model, num_hidden_layers=5)
    tensors = tensors_of(make_hf(tmp_path / "plain", full))
    lies = write_hf(tmp_path / "lies", tensors, {**full, "num_hidden_layers": 5 - short})
    with pytest.raises(RefusedError) as plain:
        hf2mcore(lies, tmp_path / "mcore")
    assert "--drop-mtp" not in str(plain.value)
    assert "num_hidden_layers" in str(plain.value)
    with pytest.raises(RefusedError, match="a trunk layer"):
        hf2mcore(lies, tmp_path / "mcore", drop_mtp=True)
    assert not (tmp_path / "mcore").exists()


@pytest.mark.parametrize("promise", [1, 0, None, "absent"])
def test_the_written_config_says_0_even_where_the_field_was_absent(
    tmp_path: Path, promise: Any
) -> None:
    full = config("deepseek_v3")
    tensors = tensors_of(make_hf(tmp_path / "plain", full))
    raw = {**full, "num_nextn_predict_layers": promise}
    if promise == "absent":
        del raw["num_nextn_predict_layers"]
    hf = write_hf(tmp_path / "hf", tensors, raw)
    done = hf2mcore(hf, tmp_path / "mcore", drop_mtp=True)
    assert done.mtp_depths == 0
    mcore2hf(tmp_path / "mcore", tmp_path / "back")
    for path in (tmp_path / "mcore/hf_source/files", tmp_path / "back"):
        written = json.loads((path / "config.json").read_text())
        assert written["num_nextn_predict_layers"] == 0
    assert not [n for n in tensors_of(tmp_path / "back") if ".layers.3." in n]


def test_a_second_depth_that_is_not_promised_is_mtp_too(tmp_path: Path) -> None:
    two = config(num_nextn_predict_layers=2)
    tensors = tensors_of(make_hf(tmp_path / "plain", two))
    hf = write_hf(tmp_path / "hf", tensors, config(num_nextn_predict_layers=1))
    with pytest.raises(RefusedError, match=r"M05 .*--drop-mtp"):
        hf2mcore(hf, tmp_path / "mcore")
    hf2mcore(hf, tmp_path / "mcore", drop_mtp=True)
    assert not [k for k in open_torch_dist(tmp_path / "mcore").tensors if k.startswith("mtp")]


def own_table(tmp_path: Path, discard: str) -> Path:
    """The shipped table with one discard of the user's."""
    path = tmp_path / "own.toml"
    text = find_table("deepseek_v3").path.read_text()
    rule = f'discards = [{{ hf = "{discard}", reason = "not a weight" }}]\n'
    path.write_text(text.replace("groups.decoder", f"{rule}\ngroups.decoder", 1))
    return path


def test_a_discard_is_said_and_the_rest_comes_back(tmp_path: Path) -> None:
    full = config("deepseek_v3")
    tensors = tensors_of(make_hf(tmp_path / "plain", full))
    junk = {"model.layers.0.rotary.inv_freq": (TensorSpec("F32", (2,)), b"12345678")}
    where = {n: f"part-{len(n) % 2}.safetensors" for n in (*tensors, *junk)}
    hf = write_hf(tmp_path / "hf", {**tensors, **junk}, full, shard_of=where)
    table = own_table(tmp_path, "*.inv_freq")
    done = hf2mcore(hf, tmp_path / "mcore", mapping=table)
    assert any("1 tensors discarded (not a weight): model.layers.0.rotary" in n for n in done.notes)
    mcore2hf(tmp_path / "mcore", tmp_path / "back", mapping=table)
    assert tensors_of(tmp_path / "back") == tensors


def test_a_discard_cannot_hide_mtp(tmp_path: Path) -> None:
    full = config("deepseek_v3")
    tensors = tensors_of(make_hf(tmp_path / "plain", full))
    hf = write_hf(tmp_path / "hf", tensors, {**full, "num_nextn_predict_layers": 0})
    with pytest.raises(RefusedError, match=r"own\.toml discards MTP"):
        hf2mcore(hf, tmp_path / "mcore", mapping=own_table(tmp_path, "*"))


def test_every_field_that_promises_says_no(tmp_path: Path) -> None:
    """MiniMax's own spelling too, whether there were tensors to drop or not."""
    raw = small_config("minimax_m2") | {"num_mtp_modules": 3, "use_mtp": True}
    hf = make_hf(tmp_path / "hf", raw)
    done = hf2mcore(hf, tmp_path / "mcore", drop_mtp=True)
    assert "no MTP tensors to drop; the config, which promised them" in " ".join(done.notes)
    mcore2hf(tmp_path / "mcore", tmp_path / "back")
    hf2mcore(hf, tmp_path / "plain")
    mcore2hf(tmp_path / "plain", tmp_path / "other", drop_mtp=True)
    for folder in ("back", "other"):
        written = json.loads((tmp_path / folder / "config.json").read_text())
        assert written == raw | {"num_mtp_modules": 0, "use_mtp": False}


def test_half_a_surrogate_pair_in_the_config(tmp_path: Path) -> None:
    """JSON can say it, UTF-8 cannot hold it."""
    raw = config("deepseek_v3")
    hf = write_hf(tmp_path / "hf", tensors_of(make_hf(tmp_path / "plain", raw)), raw)
    text = json.dumps(raw | {"note": "\ud800 \u4e2d"})
    (hf / "config.json").write_text(text)
    hf2mcore(hf, tmp_path / "mcore", drop_mtp=True)
    mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text())["note"] == "\ud800 \u4e2d"
