"""An FP8 release and the Megatron checkpoint made of it compute the same, trunk and MTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpconv.convert import hf2mcore
from mtpconv.parity.report import ParityOptions
from mtpconv.parity.run import run_parity
from mtpconv.store.hf import open_hf
from tests.convert.folders import make_hf
from tests.parity import configs

pytestmark = pytest.mark.megatron


def test_fp8_release_against_its_megatron_checkpoint(megatron_cpu: None, tmp_path: Path) -> None:
    stated = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 8]}
    config = configs.DEEPSEEK_V3 | {
        "dtype": "bfloat16", "moe_layer_freq": 1, "quantization_config": stated
    }  # fmt: skip
    hf = make_hf(tmp_path / "hf", config)
    stored = open_hf(hf).tensors
    assert stored["model.layers.3.self_attn.o_proj.weight"].dtype == "F8_E4M3"
    assert stored["model.layers.3.eh_proj.weight"].dtype == "BF16"
    hf2mcore(hf, tmp_path / "mcore")
    report = run_parity(hf, tmp_path / "mcore", ParityOptions(dtype="float32"))
    assert report.verdict == "pass"
    assert [head.head for head in report.heads] == ["trunk", "depth 0"]
