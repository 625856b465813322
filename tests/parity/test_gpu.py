"""The same comparison on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpconv.parity import runtime
from mtpconv.parity.report import ParityOptions
from mtpconv.parity.run import run_parity
from tests.parity import checkpoints, configs

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.megatron,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture(scope="module", params=["deepseek_v3", "glm_moe_dsa, index sharing", "glm4_moe"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A model on both sides, the Megatron side written by mtpconv's converter."""
    pytest.importorskip("megatron.core")
    from mtpconv.convert import hf2mcore

    config = configs.WITH_MTP[request.param]
    checkpoints.need_megatron_for(config)
    base = tmp_path_factory.mktemp("pair")
    checkpoints.write_hf(config, base / "hf", dtype="bfloat16")
    hf2mcore(base / "hf", base / "mcore")
    return base / "hf", base / "mcore"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_sides_agree_on_cuda(pair: tuple[Path, Path], dtype: str, stream: bool) -> None:
    options = ParityOptions(device="cuda", dtype=dtype, stream=stream, te=False)
    report = run_parity(*pair, options)
    assert report.verdict == "pass", report.fault


def test_transformer_engine_agrees_where_it_is_installed(pair: tuple[Path, Path]) -> None:
    if not runtime.have_transformer_engine():
        pytest.skip("Transformer Engine is not installed")
    report = run_parity(*pair, ParityOptions(device="cuda", te=True))
    assert report.modules == "Transformer Engine"
    assert report.verdict == "pass", report.fault
