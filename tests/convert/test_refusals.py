"""What must not be converted is refused before anything is written, with names."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpconv.convert import hf2mcore, mcore2hf
from mtpconv.errors import (
    MtpconvError,
    RefusedError,
    UnreadableError,
    UnsupportedError,
    UsageError,
    WriteError,
)
from mtpconv.store.torch_dist import open_torch_dist
from mtpconv.store.torch_dist_writer import TorchDistWriter
from mtpconv.tensors import TensorSpec
from tests.convert.folders import file_hashes, make_hf, tensors_of, write_hf
from tests.mapping.toy import config

Tensors = dict[str, tuple[TensorSpec, bytes]]


@pytest.fixture
def tensors(tmp_path: Path) -> Tensors:
    return tensors_of(make_hf(tmp_path / "plain", config()))


def refused(source: Path, root: Path, kind: type[MtpconvError], match: str, **options: Any) -> None:
    """The conversion is refused, and neither target nor leftovers exist afterwards."""
    before = sorted(p.name for p in root.iterdir())
    with pytest.raises(kind, match=match) as caught:
        hf2mcore(source, root / "target", **options)
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in root.iterdir()) == before


def test_config_promises_mtp_and_all_of_it_is_missing(tmp_path: Path, tensors: Tensors) -> None:
    left = {n: t for n, t in tensors.items() if ".layers.3." not in n}
    hf = write_hf(tmp_path / "hf", left, config())
    gone = len(tensors) - len(left)
    refused(hf, tmp_path, RefusedError, rf"promises MTP depth 0.* all of its {gone} tensors")


def test_every_single_mtp_tensor_is_missed_by_name(tmp_path: Path, tensors: Tensors) -> None:
    for name in [n for n in tensors if ".layers.3." in n]:
        left = {n: t for n, t in tensors.items() if n != name}
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)
        hf = write_hf(tmp_path / "hf", left, config())
        refused(hf, tmp_path, RefusedError, name.replace(".", r"\."))


@pytest.mark.parametrize("promise", [0, None, "absent"])
def test_tensors_that_the_config_does_not_promise(
    tmp_path: Path, tensors: Tensors, promise: Any
) -> None:
    raw = config(num_nextn_predict_layers=promise)
    if promise == "absent":
        del raw["num_nextn_predict_layers"]
    hf = write_hf(tmp_path / "hf", tensors, raw)
    refused(hf, tmp_path, RefusedError, "M05 .*where MTP lives.*--drop-mtp")


def test_trunk_tensor_missing_and_unknown_tensor(tmp_path: Path, tensors: Tensors) -> None:
    left = {n: t for n, t in tensors.items() if n != "model.layers.1.mlp.gate.weight"}
    hf = write_hf(tmp_path / "hf", left, config())
    refused(hf, tmp_path, RefusedError, r"M06 1 tensors are missing: model\.layers\.1\.mlp\.gate")
    spec, data = tensors["model.norm.weight"]
    extra = write_hf(tmp_path / "extra", {**tensors, "model.extra.weight": (spec, data)}, config())
    refused(extra, tmp_path, RefusedError, r"M05 1 tensors are not in the table: model\.extra")


def test_wrong_shape_and_mixed_dtypes(tmp_path: Path, tensors: Tensors) -> None:
    spec, data = tensors["model.norm.weight"]
    bent = {**tensors, "model.norm.weight": (TensorSpec(spec.dtype, (4, 2)), data)}
    hf = write_hf(tmp_path / "hf", bent, config())
    refused(hf, tmp_path, RefusedError, r"M17 model\.norm\.weight has shape \[4, 2\]")
    up = "model.layers.0.mlp.up_proj.weight"
    mixed = {**tensors, up: (TensorSpec("F16", tensors[up][0].shape), tensors[up][1])}
    other = write_hf(tmp_path / "other", mixed, config())
    refused(other, tmp_path, RefusedError, "have dtypes BF16 and F16")


def test_drop_mtp_is_the_only_way_to_lose_it_and_the_config_says_so(
    tmp_path: Path, tensors: Tensors
) -> None:
    hf = write_hf(tmp_path / "hf", tensors, config())
    done = hf2mcore(hf, tmp_path / "mcore", drop_mtp=True)
    assert done.mtp_depths == 0
    assert any("dropped as asked" in n for n in done.notes)
    assert not [k for k in open_torch_dist(tmp_path / "mcore").tensors if k.startswith("mtp")]
    mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text())["num_nextn_predict_layers"] == 0
    assert tensors_of(tmp_path / "back") == {
        n: t for n, t in tensors.items() if ".layers.3." not in n
    }


def test_drop_mtp_on_export(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config(), shards=4)
    hf2mcore(hf, tmp_path / "mcore")
    mcore2hf(tmp_path / "mcore", tmp_path / "back", drop_mtp=True)
    assert json.loads((tmp_path / "back/config.json").read_text())["num_nextn_predict_layers"] == 0
    assert not [n for n in tensors_of(tmp_path / "back") if ".layers.3." in n]
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors_of(tmp_path / "back"))


def test_export_of_a_checkpoint_without_the_promised_mtp(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config())
    hf2mcore(hf, tmp_path / "trunk", drop_mtp=True)
    with pytest.raises(RefusedError, match=r"of them MTP.*--drop-mtp"):
        mcore2hf(tmp_path / "trunk", tmp_path / "back", like=hf)
    assert not (tmp_path / "back").exists()
    mcore2hf(tmp_path / "trunk", tmp_path / "back", like=hf, drop_mtp=True)
    assert json.loads((tmp_path / "back/config.json").read_text())["num_nextn_predict_layers"] == 0


def test_export_of_mtp_that_the_config_does_not_promise(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config())
    hf2mcore(hf, tmp_path / "mcore")
    plain = make_hf(tmp_path / "plain_hf", config(num_nextn_predict_layers=0))
    with pytest.raises(RefusedError, match=r"M05 .*MTP that config\.json does not promise"):
        mcore2hf(tmp_path / "mcore", tmp_path / "back", like=plain)


def test_export_without_a_source_asks_for_like(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config())
    hf2mcore(hf, tmp_path / "mcore")
    shutil.rmtree(tmp_path / "mcore/hf_source")
    with pytest.raises(UsageError, match="--like"):
        mcore2hf(tmp_path / "mcore", tmp_path / "back")


def test_targets_that_would_lose_something(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config())
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious").write_text("keep")
    with pytest.raises(UsageError, match="--overwrite"):
        hf2mcore(hf, full)
    assert (full / "precious").read_text() == "keep"
    with pytest.raises(UsageError, match="inside the source"):
        hf2mcore(hf, hf / "mcore")
    with pytest.raises(UsageError, match="holds the source"):
        hf2mcore(hf, tmp_path, overwrite=True)
    with pytest.raises(UsageError, match="inside the source"):
        hf2mcore(hf, hf, overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        hf2mcore(hf, tmp_path / "file", overwrite=True)
    hf2mcore(hf, full, overwrite=True)
    assert not (full / "precious").exists()
    assert (full / "release/.metadata").is_file()


def test_too_little_space_is_said_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = make_hf(tmp_path / "hf", config())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    refused(hf, tmp_path, WriteError, "needs .* GB and the disk has 0.00 GB free")


def _fail_writes(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Every way of writing fails with ENOSPC once `after` bytes are written."""
    left = [after]

    def limited(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def write(fd: int, data: Any, *rest: Any) -> Any:
            size = sum(map(len, data)) if isinstance(data, list | tuple) else len(data)
            left[0] -= size
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(fd, data, *rest)

        return write

    for name in ("write", "pwrite", "writev", "pwritev"):
        monkeypatch.setattr(os, name, limited(name))


@pytest.mark.parametrize("after", [0, 3000, 8000])
def test_disk_full_while_writing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    hf = make_hf(tmp_path / "hf", config())
    before = file_hashes(hf)
    _fail_writes(monkeypatch, after)
    refused(hf, tmp_path, WriteError, "No space left on device.*nothing was left behind")
    monkeypatch.undo()
    assert file_hashes(hf) == before
    hf2mcore(hf, tmp_path / "mcore")
    _fail_writes(monkeypatch, after)
    with pytest.raises(WriteError, match="No space left"):
        mcore2hf(tmp_path / "mcore", tmp_path / "back")
    monkeypatch.undo()
    assert not (tmp_path / "back").exists()


def test_quantised_sources_are_named(tmp_path: Path, tensors: Tensors) -> None:
    raw = config(quantization_config={"quant_method": "compressed-tensors"})
    hf = write_hf(tmp_path / "hf", tensors, raw)
    refused(hf, tmp_path, UnsupportedError, "compressed-tensors")


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda f: os.truncate(f / "model.safetensors", 5000), "model.safetensors"),
        (lambda f: os.truncate(f / "model.safetensors", 4), "model.safetensors"),
        (lambda f: (f / "config.json").unlink(), "config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json"),
        (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
    ],
)
def test_damaged_sources_name_the_file(
    tmp_path: Path, tensors: Tensors, damage: Callable[[Path], Any], match: str
) -> None:
    hf = write_hf(tmp_path / "hf", tensors, config())
    damage(hf)
    refused(hf, tmp_path, UnreadableError, match)


def test_damaged_megatron_checkpoints_name_the_file(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config())
    hf2mcore(hf, tmp_path / "mcore")
    distcp = next((tmp_path / "mcore/release").glob("*.distcp"))
    os.truncate(distcp, distcp.stat().st_size // 2)
    with pytest.raises(UnreadableError, match=distcp.name):
        mcore2hf(tmp_path / "mcore", tmp_path / "back")
    distcp.unlink()
    with pytest.raises(UnreadableError, match=distcp.name):
        mcore2hf(tmp_path / "mcore", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_unknown_model_type_and_missing_geometry(tmp_path: Path, tensors: Tensors) -> None:
    hf = write_hf(tmp_path / "hf", tensors, config(model_type="brand_new"))
    refused(hf, tmp_path, UsageError, "no mapping table; known: .*glm_moe_dsa")
    raw = config()
    del raw["kv_lora_rank"]
    other = write_hf(tmp_path / "other", tensors, raw)
    refused(other, tmp_path, RefusedError, "kv_lora_rank is missing")


def test_verification_catches_a_bit_flipped_between_read_and_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = make_hf(tmp_path / "hf", config())
    needle = tensors_of(hf)["model.layers.3.eh_proj.weight"][1]
    real = TorchDistWriter.close

    def flip(writer: TorchDistWriter) -> Any:
        done = real(writer)
        distcp = writer.path.with_name("__0_0.distcp")
        at = distcp.read_bytes().find(needle)
        if at < 0:  # flipped already; the second file holds no tensors
            return done
        with distcp.open("r+b") as file:
            file.seek(at)
            file.write(bytes([needle[0] ^ 1]))
        return done

    monkeypatch.setattr(TorchDistWriter, "close", flip)
    with pytest.raises(RefusedError, match=r"verification: 1 tensors.*model\.layers\.3\.eh_proj"):
        hf2mcore(hf, tmp_path / "target")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize(
    ("layout", "match"),
    [
        ("stacked_layers", "would have holes, as not all layers are alike"),
        ("stacked_layers,stacked_experts", "would have holes"),
        ("local_spec_gqa", "its local spec is local_spec_mla"),
        ("sideways", "unknown"),
    ],
)
def test_layouts_that_do_not_fit_the_model(tmp_path: Path, layout: str, match: str) -> None:
    hf = make_hf(tmp_path / "hf", config())
    refused(hf, tmp_path, UsageError, match, layout=layout)


def test_floats_that_became_integers_are_refused_and_other_floats_said(tmp_path: Path) -> None:
    raw = config("deepseek_v3")
    tensors = tensors_of(make_hf(tmp_path / "plain", raw))
    name = "model.layers.3.enorm.weight"
    spec, data = tensors[name]
    odd = write_hf(tmp_path / "odd", {**tensors, name: (TensorSpec("I16", spec.shape), data)}, raw)
    with pytest.raises(RefusedError, match=rf"M17 1 tensors have I16 .* make it BF16: {name}"):
        hf2mcore(odd, tmp_path / "mcore")
    half = write_hf(
        tmp_path / "half", {**tensors, name: (TensorSpec("F16", spec.shape), data)}, raw
    )
    said = f"warning: 1 tensors are F16 where config and table say BF16, and stay so: {name}"
    assert said in hf2mcore(half, tmp_path / "mcore").notes
    assert mcore2hf(tmp_path / "mcore", tmp_path / "back").verified
    assert file_hashes(tmp_path / "back") == file_hashes(half)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"num_mtp_layers": 1, "num_nextn_predict_layers": 0}, "contradict each other"),
        ({"num_nextn_predict_layers": None, "mtp_num_layers": 1}, "contradict each other"),
        ({"num_nextn_predict_layers": 0, "speculative": {"mtp_num_layers": 1}}, "contradict"),
        ({"num_nextn_predict_layers": 1, "text_config": {"num_nextn_predict_layers": 0}}, "contra"),
        ({"num_mtp_modules": 1}, "num_mtp_modules = 1, which is not how glm_moe_dsa counts"),
    ],
)
@pytest.mark.parametrize("like", [False, True])
def test_fields_that_disagree_about_mtp(
    tmp_path: Path, tensors: Tensors, fields: dict[str, Any], match: str, like: bool
) -> None:
    """Loaders read different ones: what one calls MTP, another one drops."""
    left = {n: t for n, t in tensors.items() if ".layers.3." not in n}
    plain = {k: v for k, v in config().items() if k != "num_nextn_predict_layers"}
    said = {**plain, "num_nextn_predict_layers": 0, **fields}
    if "num_mtp_modules" in fields:
        del said["num_nextn_predict_layers"]
    if "text_config" in fields:  # all that a part of its own needs, so that it is read
        said["text_config"] = {**plain, **fields["text_config"]}
    hf = write_hf(tmp_path / "hf", left, said)
    if not like:
        refused(hf, tmp_path, RefusedError, match)
        return
    sound = write_hf(tmp_path / "sound", left, {**plain, "num_nextn_predict_layers": 0})
    hf2mcore(sound, tmp_path / "mcore")
    with pytest.raises(RefusedError, match=match):
        mcore2hf(tmp_path / "mcore", tmp_path / "back", like=hf)
    assert not (tmp_path / "back").exists()
    hf2mcore(hf, tmp_path / "without", drop_mtp=True)
