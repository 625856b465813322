"""fsdp_dtensor and torch_dcp: written by torch itself as Megatron's trainer does, and refused."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpconv.audit.sides import open_any
from mtpconv.convert import mcore2hf
from mtpconv.errors import UnsupportedError
from mtpconv.store.legacy import open_megatron
from mtpconv.store.torch_dist import open_torch_dist


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """As `save_checkpoint` with `--ckpt-format fsdp_dtensor`: no metadata.json, args as an object.

    Source: megatron-core 0.19.2 megatron/training/checkpointing.py, read 2026-11-29.
    """
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    weight = {"module.mtp.layers.0.eh_proj.weight": torch.ones(4, 8)}
    state = {
        "args": argparse.Namespace(num_layers=3, mtp_num_layers=1),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": weight,
        "optimizer": {"state": {n: {"exp_avg": t} for n, t in weight.items()}},
    }
    folder = tmp_path / "checkpoint" / "iter_0000007"
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("7")
    return folder.parent


@pytest.mark.parametrize(
    "read",
    [
        open_torch_dist, open_megatron, open_any,
        lambda path: mcore2hf(path, path.with_name("out")),
    ],
)  # fmt: skip
def test_it_is_named_and_refused(checkpoint: Path, read: Callable[[Path], Any]) -> None:
    for path in (checkpoint, checkpoint / "iter_0000007"):
        with pytest.raises(UnsupportedError, match="torch_dcp or fsdp_dtensor; save it again") as e:
            read(path)
        assert "\n" not in str(e.value)
    assert [p.name for p in checkpoint.parent.iterdir()] == ["checkpoint"]
    assert not (checkpoint / "out").exists()
