"""MTP that is gone but for copies of root tensors, which stay as long as those do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.finding import Report
from mtpconv.audit.options import Options
from mtpconv.audit.sides import open_sides
from mtpconv.convert import hf2mcore
from mtpconv.synth import fewer, shrink
from tests.audit.models import shown
from tests.convert.folders import make_hf, tensors_of, write_hf

CONFIGS = Path(__file__).resolve().parents[2] / "fixtures" / "configs"
COPIES = ("embed_tokens.weight", "shared_head.head.weight")


def against(before: Path, after: Path) -> Report:
    sides = open_sides(before, after)
    return audit(sides.before, sides.after, Options(workers=1))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-R1 with both copies in its MTP layer."""
    raw = json.loads((CONFIGS / "deepseek-r1.json").read_text())
    small = fewer(shrink(raw), layers=4, experts=2)
    return make_hf(tmp_path_factory.mktemp("r1") / "hf", small)


def depth_layer(folder: Path) -> str:
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    return f"model.layers.{layers}."


def test_a_result_of_drop_mtp_is_dropped_not_partial(original: Path, tmp_path: Path) -> None:
    hf2mcore(original, tmp_path / "mcore", drop_mtp=True)
    report = against(original, tmp_path / "mcore")
    (depth,) = report.mtp.depths
    mtp = [n for n in tensors_of(original) if n.startswith(depth_layer(original))]
    assert {n.removeprefix(depth_layer(original)) for n in mtp} >= set(COPIES)
    stored = [n for n in mtp if not n.endswith("_scale_inv")]  # seen as BF16
    assert report.mtp.status == "dropped", shown(report)
    assert (depth.status, depth.tensors, depth.expected) == ("dropped", 0, len(stored))


def test_one_tensor_more_than_the_copies_is_partial(original: Path, tmp_path: Path) -> None:
    layer, held = depth_layer(original), tensors_of(original)
    config = json.loads((original / "config.json").read_text())
    gone = {n for n in held if n.startswith(layer) and not n.endswith(COPIES)}
    only_copies = write_hf(
        tmp_path / "copies", {n: t for n, t in held.items() if n not in gone}, config
    )
    assert against(original, only_copies).mtp.status == "dropped"
    gone.remove(f"{layer}enorm.weight")
    more = write_hf(tmp_path / "more", {n: t for n, t in held.items() if n not in gone}, config)
    report = against(original, more)
    assert report.mtp.status == "partial"
    assert report.mtp.depths[0].tensors == len(COPIES) + 1
