"""torch_dist checkpoints: against HF, against each other, alone."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.options import Options
from mtpconv.audit.sides import open_sides
from mtpconv.audit.subject import Subject, torch_dist_subject
from mtpconv.convert import hf2mcore
from mtpconv.store.checkpoint import Checkpoint
from mtpconv.store.content import Piece, Pieced, blocks, pieces
from mtpconv.store.manifest import take_manifest, write_manifest
from mtpconv.store.torch_dist import open_torch_dist
from tests.audit.models import Model, base_model, errors, said, shown
from tests.convert.folders import overwrite

FAMILY = {"glm-5.2.json": "glm", "glm-4.5.json": "glm45", "mimo-7b.json": "mimo"}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path, Model]]:
    place = tmp_path_factory.mktemp("converted")
    out = {}
    for family, short in FAMILY.items():
        model = base_model(family)
        hf = model.write(place / short / "hf")
        hf2mcore(hf, place / short / "mcore")
        out[family] = (hf, place / short / "mcore", model)
    return out


families = pytest.mark.parametrize("family", FAMILY)
Converted = dict[str, tuple[Path, Path, Model]]


def flip(folder: Path, key: str, at: int = 0) -> None:
    """Flip a bit of one tensor on disk, as whoever writes another value does."""
    data = bytearray(b"".join(map(bytes, blocks(open_torch_dist(folder), key))))
    data[at] ^= 1
    overwrite(folder, key, bytes(data))


@families
def test_hf_against_megatron_in_both_directions(family: str, converted: Converted) -> None:
    hf, mcore, model = converted[family]
    for before, after in ((hf, mcore), (mcore, hf)):
        sides = open_sides(before, after)
        report = audit(sides.before, sides.after)
        assert report.verdict == "pass", shown(report)
        assert (report.tier, report.mtp.status) == ("L2", "preserved")
        assert report.compared.tensors == len(model.tensors)


@families
def test_megatron_alone_and_against_itself(family: str, converted: Converted) -> None:
    _, mcore, _ = converted[family]
    alone = audit(None, open_sides(None, mcore).after)
    assert alone.verdict == "pass", shown(alone)
    assert "completeness_not_checked" not in {f.kind for f in alone.findings}
    plain = torch_dist_subject(open_torch_dist(mcore))
    assert audit(plain, plain).verdict == "pass"
    assert audit(plain, plain).mtp.status == "preserved"
    assert audit(None, plain).verdict == "pass"


@families
def test_one_bit_of_megatron_names_the_hf_tensor(
    family: str, converted: Converted, tmp_path: Path
) -> None:
    hf, mcore, _ = converted[family]
    damaged = shutil.copytree(mcore, tmp_path / "damaged")
    key = "mtp.layers.0.eh_proj.weight"
    flip(damaged, key)
    sides = open_sides(hf, damaged)
    (one,) = errors(audit(sides.before, sides.after))
    assert one.kind == "value_mismatch"
    assert (one.tensor or "").endswith(("eh_proj.weight", "input_proj.weight"))
    assert one.region is not None
    assert str(one.region) == "mtp.0"
    before, after = (torch_dist_subject(open_torch_dist(p)) for p in (mcore, damaged))
    assert said(audit(before, after)) == [("value_mismatch", key)]


class Fewer:
    """A checkpoint without the tensors whose names start in some way."""

    def __init__(self, whole: Checkpoint | Pieced, start: str) -> None:
        self.whole = whole
        self.tensors = {n: s for n, s in whole.tensors.items() if not n.startswith(start)}

    def pieces(self, name: str) -> Sequence[Piece]:
        return pieces(self.whole, name)


def _without(subject: Subject, start: str) -> Subject:
    return replace(subject, content=Fewer(subject.content, start))


def test_megatron_args_are_its_promise(converted: Converted) -> None:
    whole = torch_dist_subject(open_torch_dist(converted["glm-5.2.json"][1]))
    assert whole.config is not None
    assert whole.config["mtp_num_layers"] == 1
    silent = replace(whole, config={**whole.config, "mtp_num_layers": None})
    (one,) = errors(audit(None, silent))
    assert (one.kind, one.prefix) == ("mtp_orphan", "mtp.layers.0.")
    (one,) = errors(audit(None, _without(whole, "mtp.")))
    assert (one.kind, one.prefix, one.layer) == ("mtp_missing", "mtp.layers.0.", None)
    # Tensors equal, promise gone: Megatron would ignore MTP.
    assert said(audit(whole, silent)) == [("config_mismatch", "mtp_num_layers")]
    # Tensors gone too: their findings say so, the args follow from it.
    dropped = _without(silent, "mtp.")
    assert {k for k, _ in said(audit(whole, dropped))} == {"missing_tensor"}


def test_hf_config_against_megatron_args(converted: Converted) -> None:
    hf, mcore, _ = converted["glm-5.2.json"]
    sides = open_sides(hf, mcore)
    assert sides.after.config is not None
    after = replace(sides.after, config={**sides.after.config, "mtp_num_layers": 0})
    assert said(audit(sides.before, after)) == [("config_mismatch", "mtp_num_layers")]


def test_a_lost_file_is_one_finding(converted: Converted, tmp_path: Path) -> None:
    hf, mcore, _ = converted["glm-5.2.json"]
    damaged = shutil.copytree(mcore, tmp_path / "damaged")
    file = next(damaged.rglob("*.distcp"))
    file.unlink()
    sides = open_sides(hf, damaged)
    report = audit(sides.before, sides.after)
    assert said(report) == [("unreadable_file", file.name)], shown(report)
    assert report.mtp.status == "unreadable"
    report = audit(None, torch_dist_subject(open_torch_dist(damaged)))
    assert said(report) == [("unreadable_file", file.name)], shown(report)


def test_corrupt_records_are_found_when_bytes_are_read(
    converted: Converted, tmp_path: Path
) -> None:
    hf, mcore, _ = converted["glm-5.2.json"]
    damaged = shutil.copytree(mcore, tmp_path / "damaged")
    for file in damaged.rglob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    for sides in (open_sides(hf, damaged), open_sides(None, damaged)):
        report = audit(sides.before, sides.after)
        assert report.verdict == "fail"
        assert {f.kind for f in errors(report)} == {"unreadable_file"}
    headers = audit(None, open_sides(None, damaged).after, Options(read_bytes=False))
    assert headers.verdict == "pass"
    assert headers.tier == "L0"


def test_a_manifest_of_megatron_tensors(converted: Converted, tmp_path: Path) -> None:
    _, mcore, _ = converted["glm-4.5.json"]
    checkpoint = open_torch_dist(mcore)
    write_manifest(take_manifest(checkpoint, mcore, "torch_dist"), tmp_path / "m.json")
    sides = open_sides(tmp_path / "m.json", mcore)
    report = audit(sides.before, sides.after)
    assert (report.verdict, report.tier) == ("pass", "L1")
