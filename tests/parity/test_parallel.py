"""Training runs with TP, PP and EP > 1, by real Megatron code in several gloo processes.

Both formats that Megatron saves, optimizer state included, must export to the very files that a
run on a single rank gives.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.sides import open_sides
from mtpconv.convert import mcore2hf
from mtpconv.store.legacy import open_megatron
from tests.conftest import ROOT
from tests.convert.folders import file_hashes, make_hf
from tests.parity import configs

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(900)]

SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)  # fmt: skip
ONE = (1, 1, 1, 1)
#: config, (TP, PP, EP, expert TP), ranks, layouts of the two formats
RUNS: dict[str, tuple[configs.Config, tuple[int, ...], int, tuple[str, str]]] = {
    "mla": (configs.DEEPSEEK_V3, (2, 2, 2, 1), 4, ("stacked_experts", "local_spec_mla")),
    "gqa": (configs.GLM4_MOE, (2, 1, 2, 2), 4, ("stacked_experts", "local_modules_gqa")),
}

Train = Callable[[configs.Config, tuple[int, ...], int], Path]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Run a training job; gives the folder with `torch_dist` and `legacy`."""
    pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    pytest.importorskip("psutil")

    def run(config: configs.Config, sizes: tuple[int, ...], world: int) -> Path:
        place = tmp_path / "x".join(map(str, sizes))
        place.mkdir()
        job = {
            "config": config,
            "sizes": dict(zip(SIZES, sizes, strict=True)),
            "world": world,
            "meeting": str(place / "meeting"),
            "torch_dist": str(place / "torch_dist"),
            "legacy": str(place / "legacy"),
        }
        (place / "job.json").write_text(json.dumps(job))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.parity.ranks", str(place / "job.json")]
        logs = [(place / f"rank{rank}.log").open("w+") for rank in range(world)]
        # Not pipes: Megatron's writers may outlive their rank and hold them open.
        ranks = [
            subprocess.Popen([*command, str(rank)], env=environment, stdout=log, stderr=log)
            for rank, log in enumerate(logs)
        ]
        try:
            states = [rank.wait(timeout=400) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        for log in logs:
            log.seek(0)
        assert states == [0] * world, "\n".join(log.read()[-2000:] for log in logs)
        return place

    return run


@pytest.mark.parametrize("name", RUNS)
def test_every_run_exports_to_the_files_of_a_single_rank(
    train: Train, tmp_path: Path, name: str
) -> None:
    raw, sizes, world, layouts = RUNS[name]
    config: dict[str, Any] = {
        **raw, "num_hidden_layers": 4, "dtype": "float32", "moe_layer_freq": 1
    }  # fmt: skip
    like = make_hf(tmp_path / "like", config)  # names, shards, files; its bytes must not matter
    single, parallel = train(config, ONE, 1), train(config, sizes, world)
    mcore2hf(single / "torch_dist", tmp_path / "hf", like=like)
    wanted = file_hashes(tmp_path / "hf")
    assert wanted != file_hashes(like)
    for place in (single, parallel):
        for form, layout in zip(("torch_dist", "legacy"), layouts, strict=True):
            done = mcore2hf(place / form, tmp_path / "out", like=like, overwrite=True)
            assert file_hashes(tmp_path / "out") == wanted, (place.name, form)
            assert done.layout.removesuffix("+mtp_model_layer") == layout
            assert any(note.startswith("optimizer state (") for note in done.notes)
            sides = open_sides(tmp_path / "hf", place / form)
            assert audit(sides.before, sides.after).verdict == "pass"
    spread = open_megatron(parallel / "torch_dist")
    assert len({c.file for n in spread.tensors for c in spread.chunks(n)}) >= world
    assert len(list((parallel / "legacy").glob("*/mp_rank_*"))) == world
