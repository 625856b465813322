"""The converters against real Megatron: what they write it loads, what it saves they read.

What each module must hold is spelled out here by hand from the HF tensors, not through the
mapping tables, so that a wrong table cannot agree with itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtpconv.convert import hf2mcore, mcore2hf
from mtpconv.errors import RefusedError
from mtpconv.parity import mcore, runtime
from tests.convert.folders import make_hf, tensors_of
from tests.parity import configs

pytestmark = pytest.mark.megatron

Bytes = Mapping[str, bytes]
LAYOUTS = ("training", "local")
MODELS = {
    "deepseek_v3": configs.DEEPSEEK_V3,
    "deepseek_v3_alike": configs.DEEPSEEK_V3_ALIKE,
    "deepseek_v3_two_depths": configs.DEEPSEEK_V3_TWO_DEPTHS,
    "glm_moe_dsa": configs.GLM_MOE_DSA,
    "glm_moe_dsa_sharing": configs.GLM_MOE_DSA_SHARING,
}


def buildable(config: configs.Config) -> configs.Config:
    if config["model_type"] == "glm_moe_dsa" and runtime.megatron_version() < (0, 19):
        pytest.skip("sparse attention needs megatron-core 0.19 or newer")
    return {**config, "dtype": "float32", "moe_layer_freq": 1}


def raw(tensor: Any) -> bytes:
    data: bytes = tensor.contiguous().numpy().tobytes()
    return data


def block(
    hf: Bytes, config: configs.Config, layer: int, module: str
) -> Iterator[tuple[str, bytes]]:
    """Module tensors of one transformer layer, by hand."""
    at = f"model.layers.{layer}."
    yield f"{module}input_layernorm.weight", hf[f"{at}input_layernorm.weight"]
    yield f"{module}pre_mlp_layernorm.weight", hf[f"{at}post_attention_layernorm.weight"]
    attention = {
        "linear_q_down_proj": "q_a_proj", "q_layernorm": "q_a_layernorm",
        "linear_q_up_proj": "q_b_proj", "linear_kv_down_proj": "kv_a_proj_with_mqa",
        "kv_layernorm": "kv_a_layernorm", "linear_kv_up_proj": "kv_b_proj",
        "linear_proj": "o_proj",
    }  # fmt: skip
    for mine, theirs in attention.items():
        yield f"{module}self_attention.{mine}.weight", hf[f"{at}self_attn.{theirs}.weight"]
    indexer = {
        "linear_wq_b.weight": "wq_b.weight", "linear_wk.weight": "wk.weight",
        "linear_weights_proj.weight": "weights_proj.weight", "k_norm.weight": "k_norm.weight",
        "k_norm.bias": "k_norm.bias",
    }  # fmt: skip
    for mine, theirs in indexer.items():
        if f"{at}self_attn.indexer.{theirs}" in hf:
            key = f"{module}self_attention.core_attention.indexer.{mine}"
            yield key, hf[f"{at}self_attn.indexer.{theirs}"]

    def mlp(mine: str, theirs: str) -> Iterator[tuple[str, bytes]]:
        gate, up = hf[f"{at}{theirs}.gate_proj.weight"], hf[f"{at}{theirs}.up_proj.weight"]
        yield f"{module}{mine}.linear_fc1.weight", gate + up
        yield f"{module}{mine}.linear_fc2.weight", hf[f"{at}{theirs}.down_proj.weight"]

    if layer < config["first_k_dense_replace"]:
        yield from mlp("mlp", "mlp")
        return
    yield f"{module}mlp.router.weight", hf[f"{at}mlp.gate.weight"]
    yield f"{module}mlp.router.expert_bias", hf[f"{at}mlp.gate.e_score_correction_bias"]
    yield from mlp("mlp.shared_experts", "mlp.shared_experts")
    for expert in range(config["n_routed_experts"]):
        yield from mlp(f"mlp.experts.local_experts.{expert}", f"mlp.experts.{expert}")


def expected_modules(hf: Bytes, config: configs.Config) -> dict[str, bytes]:
    """What the live model must hold, by hand."""
    layers = config["num_hidden_layers"]
    found = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": hf["lm_head.weight"],
    }
    for layer in range(layers):
        found.update(block(hf, config, layer, f"decoder.layers.{layer}."))
    for depth in range(config["num_nextn_predict_layers"]):
        module, at = f"mtp.layers.{depth}.", f"model.layers.{layers + depth}."
        for mine, theirs in {
            "enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj",
            "final_layernorm": "shared_head.norm",
        }.items():  # fmt: skip
            found[f"{module}{mine}.weight"] = hf[f"{at}{theirs}.weight"]
        found.update(block(hf, config, layers + depth, f"{module}transformer_layer."))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_megatron_loads_what_hf2mcore_writes(
    megatron_cpu: None, tmp_path: Path, name: str, layout: str
) -> None:
    config = buildable(MODELS[name])
    hf = make_hf(tmp_path / "hf", config)
    hf2mcore(hf, tmp_path / "mcore", layout=layout)
    model = mcore.build(config, seed=5)
    mcore.load(model, tmp_path / "mcore")
    want = expected_modules({n: data for n, (_, data) in tensors_of(hf).items()}, config)
    have = {n: raw(t) for n, t in mcore.module_tensors(model).items()}
    assert have.keys() == want.keys()
    assert [n for n in want if have[n] != want[n]] == []


@pytest.mark.parametrize("stacked", [False, True], ids=["per_layer", "stacked"])
@pytest.mark.parametrize("dialect", mcore.DIALECTS)
@pytest.mark.parametrize("name", MODELS)
def test_mcore2hf_reads_what_megatron_saves(
    megatron_cpu: None, tmp_path: Path, name: str, dialect: str, stacked: bool
) -> None:
    config = buildable(MODELS[name])
    if stacked and config["first_k_dense_replace"]:
        pytest.skip("Megatron stacks layers only if all are alike")
    model = mcore.build(config, seed=6)
    mcore.save(model, tmp_path / "mcore", dialect=dialect, stacked=stacked, iteration=3)
    like = make_hf(tmp_path / "like", config)  # names, shards, files; its bytes must not matter
    mcore2hf(tmp_path / "mcore", tmp_path / "hf", like=like)
    hf = {n: data for n, (_, data) in tensors_of(tmp_path / "hf").items()}
    want = {n: raw(t) for n, t in mcore.module_tensors(model).items()}
    have = expected_modules(hf, config)
    assert have.keys() == want.keys()
    assert [n for n in want if have[n] != want[n]] == []
    copies = [n for n in hf if n.endswith(("3.embed_tokens.weight", "3.shared_head.head.weight"))]
    if config["model_type"] == "deepseek_v3":
        assert len(copies) == 2
        assert hf["model.layers.3.embed_tokens.weight"] == hf["model.embed_tokens.weight"]


def test_bfloat16_with_an_f32_router_bias(megatron_cpu: None, tmp_path: Path) -> None:
    """The bias has bits that BF16 would round away; they must be there in the live model."""
    config = {**buildable(configs.DEEPSEEK_V3), "dtype": "bfloat16"}
    hf = make_hf(tmp_path / "hf", config)
    hf2mcore(hf, tmp_path / "mcore")
    model = mcore.build(config, dtype="bfloat16", seed=5)
    mcore.load(model, tmp_path / "mcore")
    stored = {n: (spec, data) for n, (spec, data) in tensors_of(hf).items()}
    live = mcore.module_tensors(model)
    for module, name in (
        ("decoder.layers.1.", "model.layers.1."),
        ("mtp.layers.0.transformer_layer.", "model.layers.3."),
    ):
        spec, data = stored[f"{name}mlp.gate.e_score_correction_bias"]
        assert spec.dtype == "F32"
        assert (np.frombuffer(data, "<u4") & 0xFFFF).any()
        assert raw(live[f"{module}mlp.router.expert_bias"]) == data
        weight = live[f"{module}mlp.router.weight"]
        assert str(weight.dtype) == "torch.bfloat16"


def test_a_checkpoint_that_megatron_saved_without_mtp_is_refused(
    megatron_cpu: None, tmp_path: Path
) -> None:
    config = buildable(configs.DEEPSEEK_V3)
    model = mcore.build({**config, "num_nextn_predict_layers": 0}, seed=6)
    mcore.save(model, tmp_path / "mcore")
    like = make_hf(tmp_path / "like", config)
    with pytest.raises(RefusedError, match=r"of them MTP.*--drop-mtp"):
        mcore2hf(tmp_path / "mcore", tmp_path / "hf", like=like)
    assert not (tmp_path / "hf").exists()
