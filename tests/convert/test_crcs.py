"""Bit rot in a Megatron checkpoint: found by the CRC-32 of its records, never converted."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.options import Options, Sample
from mtpconv.audit.sides import open_sides
from mtpconv.convert import hf2mcore, mcore2hf
from mtpconv.errors import MtpconvError, UnreadableError, WriteError
from mtpconv.store.crc_check import CrcCheck
from mtpconv.store.manifest import take_manifest
from mtpconv.store.record_writer import tensor_frame
from mtpconv.store.torch_dist import TorchDistCheckpoint, open_torch_dist
from tests.convert.folders import file_hashes, make_hf, overwrite
from tests.convert.test_ranks import together
from tests.convert.test_resume import Stop
from tests.mapping.toy import config

#: A trunk tensor, MTP, one entry of stacked experts, an embedding with padding.
KEYS = (
    "decoder.layers.1.mlp.router.weight", "mtp.layers.0.eh_proj.weight",
    "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight",
    "embedding.word_embeddings.weight",
)  # fmt: skip


def rot(folder: Path, key: str, at: int = 0) -> Path:
    """Flip a bit of a stored tensor; nobody else changes. Gives the file."""
    chunk = open_torch_dist(folder).chunks(key)[-1]
    assert isinstance(chunk.file, Path)
    data = bytearray(chunk.file.read_bytes())
    data[chunk.start + at] ^= 16
    chunk.file.write_bytes(data)
    return chunk.file


@pytest.fixture
def mcore(tmp_path: Path) -> Path:
    hf2mcore(make_hf(tmp_path / "hf", config()), tmp_path / "mcore", pad_vocab=64)
    return tmp_path / "mcore"


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("jobs", [1, 3])
def test_a_flipped_bit_is_not_converted(tmp_path: Path, mcore: Path, key: str, jobs: int) -> None:
    file = rot(mcore, key)
    with pytest.raises(UnreadableError) as caught:
        mcore2hf(mcore, tmp_path / "back", jobs=jobs)
    for word in (str(file), key, "CRC-32", "--no-verify"):
        assert word in str(caught.value)
    assert not (tmp_path / "back").exists()
    assert not mcore2hf(mcore, tmp_path / "back", verify=False, jobs=jobs).verified


def test_a_flipped_bit_gets_no_digest(tmp_path: Path, mcore: Path) -> None:
    """A manifest would vouch for it."""
    opened = open_torch_dist(mcore)
    take_manifest(opened, mcore, "torch_dist")
    file = rot(mcore, KEYS[0])
    with pytest.raises(UnreadableError, match=f"{file}: the record of {KEYS[0]} .*CRC-32"):
        take_manifest(open_torch_dist(mcore), mcore, "torch_dist")


def test_several_are_counted(tmp_path: Path, mcore: Path) -> None:
    for key in KEYS[:3]:
        rot(mcore, key)
    with pytest.raises(UnreadableError, match=r"\(and 2 more records\)"):
        mcore2hf(mcore, tmp_path / "back")


def test_a_damaged_crc_is_as_bad_as_damaged_data(tmp_path: Path, mcore: Path) -> None:
    stored = open_torch_dist(mcore)
    spec, (chunk,) = stored.tensors[KEYS[3]], stored.chunks(KEYS[3])
    data = bytearray(chunk.file.read_bytes())
    data[chunk.start + spec.nbytes + tensor_frame(spec.dtype, spec.shape).crc_in_suffix] ^= 1
    chunk.file.write_bytes(data)
    with pytest.raises(UnreadableError, match=re.escape(KEYS[3])):
        mcore2hf(mcore, tmp_path / "back")


@pytest.mark.parametrize("key", KEYS)
def test_one_of_several_ranks_sees_it(tmp_path: Path, mcore: Path, key: str) -> None:
    rot(mcore, key)
    found = together(mcore2hf, mcore, tmp_path / "back", 3)
    assert [f for f in found if isinstance(f, UnreadableError) and key in str(f)]
    assert all(isinstance(f, MtpconvError) for f in found)
    assert not (tmp_path / "back").exists()


def test_shards_of_before_it_rotted_are_no_excuse(tmp_path: Path, mcore: Path) -> None:
    """What --resume takes over is not read again; its records are."""
    with pytest.raises(WriteError):
        mcore2hf(mcore, tmp_path / "back", resume=True, progress=Stop(12_000))
    files = list((mcore / "release").glob("*.distcp"))
    times = [(f, f.stat().st_mtime_ns) for f in files]
    rot(mcore, "embedding.word_embeddings.weight")
    for file, at in times:
        os.utime(file, ns=(at, at))  # a disk that rots tells nobody
    progress = Stop()
    with pytest.raises(UnreadableError, match="embedding"):
        mcore2hf(mcore, tmp_path / "back", resume=True, progress=progress)
    assert progress.taken


def test_trained_weights_have_crcs_of_their_own(tmp_path: Path, mcore: Path) -> None:
    overwrite(mcore, KEYS[1], bytes(open_torch_dist(mcore).tensors[KEYS[1]].nbytes))
    done = mcore2hf(mcore, tmp_path / "back")
    assert done.unchanged == done.tensors - 1


def test_every_byte_is_read_once(
    tmp_path: Path, mcore: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only records with padding are read for the sake of their CRC."""
    read: list[str] = []

    def spy(check: CrcCheck, numbers: list[int], jobs: int) -> None:
        read.extend(check.range(n).name for n in numbers)

    monkeypatch.setattr(CrcCheck, "read", spy)
    mcore2hf(mcore, tmp_path / "back")
    assert sorted(read) == ["embedding.word_embeddings.weight", "output_layer.weight"]


def test_records_without_a_crc_are_said(
    tmp_path: Path, mcore: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TorchDistCheckpoint.sealed

    def without(checkpoint: TorchDistCheckpoint) -> object:
        found = real(checkpoint)
        for one in found.values():
            one.crcs = type(one.crcs)("I", [0] * len(one.crcs))
        return found

    monkeypatch.setattr(TorchDistCheckpoint, "sealed", without)
    done = mcore2hf(mcore, tmp_path / "back")
    count = CrcCheck(open_torch_dist(mcore).sealed()).unsealed
    assert f"{count} records were saved without a CRC-32" in done.notes[0]
    assert file_hashes(tmp_path / "back") == file_hashes(tmp_path / "hf")
    sides = open_sides(tmp_path / "hf", mcore)
    report = audit(sides.before, sides.after)
    assert report.verdict == "pass"
    assert [n for n in report.compared.notes if "records have no CRC-32" in n]


@pytest.mark.parametrize("key", KEYS)
def test_the_audit_names_file_and_tensors(tmp_path: Path, mcore: Path, key: str) -> None:
    file = rot(mcore, key)
    for before, after in ((tmp_path / "hf", mcore), (mcore, tmp_path / "hf")):
        sides = open_sides(before, after)
        report = audit(sides.before, sides.after)
        (found,) = [f for f in report.findings if f.kind == "unreadable_file"]
        assert (found.severity, found.file) == ("error", file.name)
        assert "CRC-32" in found.message
        assert report.verdict == "fail"
        assert report.tier == "L2"
        assert {f.tensor for f in report.findings if f.kind == "value_mismatch"} <= {*found.tensors}
        assert found.message.startswith("reference: ") == (before == mcore)


def test_rot_that_is_alike_on_both_sides_is_seen(mcore: Path) -> None:
    rot(mcore, KEYS[0])
    sides = open_sides(mcore, mcore)
    report = audit(sides.before, sides.after)
    assert {f.kind for f in report.findings} == {"unreadable_file"}
    assert report.verdict != "pass"


def options(**changes: object) -> Options:
    return Options(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("alone", "chosen", "key", "found"),
    [
        (True, options(), KEYS[1], True),
        (True, options(), KEYS[0], False),  # alone, only MTP is read
        (True, options(read_bytes=False), KEYS[1], False),
        (False, options(read_bytes=False), KEYS[0], False),
        (False, options(sample=Sample(1, 1000)), KEYS[1], True),
        (False, options(sample=Sample(1, 1000)), KEYS[0], False),
        (False, options(expect="structure"), KEYS[0], True),
    ],
)
def test_what_is_not_read_is_not_checked(
    tmp_path: Path, mcore: Path, alone: bool, chosen: Options, key: str, found: bool
) -> None:
    rot(mcore, key)
    sides = open_sides(None if alone else tmp_path / "hf", mcore)
    report = audit(sides.before, sides.after, chosen)
    assert ("unreadable_file" in {f.kind for f in report.findings}) == found


def test_a_manifest_as_reference(tmp_path: Path, mcore: Path) -> None:
    rot(mcore, KEYS[0])
    sides = open_sides(mcore / "hf_source/manifest.json", mcore)
    assert "unreadable_file" in {f.kind for f in audit(sides.before, sides.after).findings}


def test_legacy_checkpoints_have_crcs_too(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests.convert.test_legacy import legacy

    hf = legacy(tmp_path, "deepseek_v3", {"tp": 2}, {})
    assert mcore2hf(tmp_path / "old", tmp_path / "back", like=hf).verified
    file = tmp_path / "old/iter_0000009/mp_rank_01/model_optim_rng.pt"
    from mtpconv.store.legacy import open_legacy

    stored = open_legacy(tmp_path / "old")
    key = "decoder.layers.0.self_attention.linear_q_up_proj.weight"
    chunk = stored.chunks(key)[1]
    assert chunk.file == file
    data = bytearray(file.read_bytes())
    data[chunk.start] ^= 1
    file.write_bytes(data)
    with pytest.raises(UnreadableError, match=rf"mp_rank_01.*{re.escape(key)}.*CRC-32"):
        mcore2hf(tmp_path / "old", tmp_path / "again", like=hf)
