"""What a dry run says of disk and memory holds for the run itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import measure, model
from mtpconv.convert import Outcome, hf2mcore, mcore2hf
from mtpconv.convert.output import Output
from mtpconv.ranks import Ranks
from mtpconv.synth import shrink
from tests.convert.folders import make_hf
from tests.mapping.toy import config


def used(folder: Path) -> int:
    """Disk that a folder takes, in bytes."""
    return sum(p.lstat().st_blocks * 512 for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def peak(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, int]]:
    """Converts; gives the disk that was promised, and taken when all was written."""
    taken: list[int] = []
    real = Output.commit

    def commit(out: Output) -> None:
        taken.append(used(out.work))
        real(out)

    monkeypatch.setattr(Output, "commit", commit)

    def convert(
        run: Callable[..., Outcome], source: Path, target: Path, **options: Any
    ) -> tuple[int, int]:
        promised = run(source, target, dry_run=True, **options).disk
        run(source, target, **options)
        return promised, taken.pop()

    return convert


@pytest.mark.parametrize("fp8", ["keep", "bf16"])
def test_disk_that_is_promised_is_enough(
    tmp_path: Path, peak: Callable[..., tuple[int, int]], fp8: str
) -> None:
    quantised = {"quant_method": "fp8", "weight_block_size": [4, 4]}
    raw = config("deepseek_v3", quantization_config=quantised)
    hf = make_hf(tmp_path / "hf", raw, shards=7)
    for number in range(500):
        (hf / f"code_{number}.py").write_text("# small, and still a block of the disk\n")
    (hf / "tokenizer.json").write_bytes(b"{}" * 2_000_000)
    promised, taken = peak(hf2mcore, hf, tmp_path / "mcore", fp8=fp8)
    assert taken <= promised <= 1.5 * taken + (2 << 20)
    promised, taken = peak(mcore2hf, tmp_path / "mcore", tmp_path / "back")
    assert taken <= promised <= 1.5 * taken + (2 << 20)


def test_disk_of_many_tensors(tmp_path: Path, peak: Callable[..., tuple[int, int]]) -> None:
    make_hf(tmp_path / "hf", config(n_routed_experts=700, num_nextn_predict_layers=3))
    for run, source, target in ((hf2mcore, "hf", "mcore"), (mcore2hf, "mcore", "back")):
        promised, taken = peak(run, tmp_path / source, tmp_path / target)
        assert taken <= promised


def test_memory_grows_with_threads_and_ranks(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config())

    def said(**options: Any) -> int:
        return hf2mcore(hf, tmp_path / "mcore", dry_run=True, **options).memory

    assert said(jobs=1) < said(jobs=2) < said(jobs=8)
    assert said(jobs=1) < said(jobs=1, ranks=Ranks(0, 2))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["glm-5.2", "deepseek-r1"])
def test_memory_that_is_promised_is_enough(tmp_path: Path, name: str) -> None:
    raw = json.loads((model.CONFIGS / f"{name}.json").read_text())  # deepseek-r1 is in FP8
    model.make_model(tmp_path / "hf", shrink(raw), 8)
    for run, source, target in ((hf2mcore, "hf", "mcore"), (mcore2hf, "mcore", "back")):
        promised = run(tmp_path / source, tmp_path / target, dry_run=True, jobs=4).memory
        words = (run.__name__, tmp_path / source, tmp_path / target, "-q", "-j", "4")
        taken = measure.mtpconv(*words).resident
        assert taken <= promised <= 2 * taken
