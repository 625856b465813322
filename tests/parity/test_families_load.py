"""What hf2mcore writes for every family that Megatron-Core can build, loaded by Megatron itself.

The model is built from the Megatron arguments of the family and loaded by Megatron's own
`dist_checkpointing.load`. What each of its tensors must hold is spelled by hand, in
`mtpconv.parity.correspond`, never through the mapping tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtpconv.convert import hf2mcore
from mtpconv.geometry import read_geometry
from mtpconv.mapping.table_reader import find_table, table_names
from mtpconv.megatron_args import megatron_args, transformer_fields
from mtpconv.parity import correspond, mcore, runtime
from mtpconv.parity.settings import Settings
from tests.convert.folders import make_hf, tensors_of
from tests.parity import configs
from tests.parity.configs import Config

pytestmark = pytest.mark.megatron

MODELS: dict[str, Config] = {
    "bailing_moe_v2": configs.BAILING_MOE_V2,
    "deepseek_v3": configs.DEEPSEEK_V3,
    "deepseek_v32": configs.DEEPSEEK_V32,
    "exaone_moe": configs.EXAONE_MOE,
    "glm4_moe": configs.GLM4_MOE,
    "glm4_moe_lite": configs.GLM4_MOE_LITE,
    # Which layers share indexers, as a list only: Megatron's arguments follow from it.
    "glm_moe_dsa": configs.GLM_MOE_DSA
    | {"num_hidden_layers": 4, "indexer_types": ["full", "full", "shared", "full"]},
    "hy_v3": configs.HY_V3,
    "kimi_k2": configs.DEEPSEEK_V3 | {"model_type": "kimi_k2", "num_nextn_predict_layers": 0},
    "llama": configs.LLAMA,
    "mimo": configs.QWEN2_TIED | {"model_type": "mimo", "num_nextn_predict_layers": 2},
    "mixtral": configs.MIXTRAL,
    "qwen2": configs.QWEN2_TIED,
    "qwen3": configs.QWEN3,
    "qwen3_5": configs.QWEN3_5,
    "qwen3_5_moe": configs.QWEN3_5_MOE,
    "qwen3_5_moe_text": configs.QWEN3_5_MOE_TEXT,
    "qwen3_5_text": configs.QWEN3_5_TEXT,
    "qwen3_moe": configs.QWEN3_MOE,
    "qwen3_next": configs.QWEN3_NEXT,
}

#: How families spell what `correspond` spells as DeepSeek does: (theirs, DeepSeek's), in order.
SPELLINGS: dict[str, tuple[tuple[str, str], ...]] = {
    "bailing_moe_v2": (
        ("word_embeddings.", "embed_tokens."), ("attention.dense.", "self_attn.o_proj."),
        ("attention.query_layernorm.", "self_attn.q_norm."),
        ("attention.key_layernorm.", "self_attn.k_norm."),
        ("mlp.gate.expert_bias", "mlp.gate.e_score_correction_bias"),
        (".final_layernorm.", ".shared_head.norm."),
    ),
    "exaone_moe": (
        ("mtp.layers.0.", "model.layers.4."), ("mtp.norm.", "model.layers.4.shared_head.norm."),
        ("mtp.fc.", "model.layers.4.eh_proj."),
        ("mtp.pre_fc_norm_embedding.", "model.layers.4.enorm."),
        ("mtp.pre_fc_norm_hidden.", "model.layers.4.hnorm."),
    ),
}  # fmt: skip


def test_every_converted_family_loads_or_says_why_not() -> None:
    untried = {n for n in table_names() if find_table(n).converts and find_table(n).untried}
    converted = {n for n in table_names() if find_table(n).converts}
    assert {*MODELS, "nemotron_h"} == converted - untried  # the latter in test_hybrid_load.py


def settings_of(config: Config) -> Settings:
    """The model as the Megatron arguments of its family describe it."""
    geometry = read_geometry(config)
    args = megatron_args(geometry, gaps=[])
    fused = ("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion")
    return Settings(
        geometry,
        transformer_fields(args) | dict.fromkeys((*fused, "persist_layer_norm"), False),
        mla=args["multi_latent_attention"],
        dsa=args["experimental_attention_variant"] == "dsa",
    )


def floats(folder: Path, config: Config) -> dict[str, Any]:
    """Every tensor of an F32 folder under the name that DeepSeek would give it."""
    import torch

    found = {}
    for name, (spec, data) in tensors_of(folder).items():
        for theirs, deepseeks in SPELLINGS.get(config["model_type"], ()):
            name = name.replace(theirs, deepseeks)
        value = torch.from_numpy(np.frombuffer(data, "<f4").reshape(spec.shape).copy())
        head, fused, tail = name.partition("attention.query_key_value.")
        if fused:  # all queries, then all keys, then all values
            groups = config["num_key_value_heads"] * config["head_dim"]
            rows = [value.shape[0] - 2 * groups, groups, groups]
            for word, part in zip("qkv", value.split(rows), strict=True):
                found[f"{head}self_attn.{word}_proj.{tail}"] = part
            continue
        head, packed, tail = name.rpartition("mlp.experts.")
        if packed and tail in ("gate_up_proj", "down_proj"):
            names = ("gate_proj", "up_proj") if tail == "gate_up_proj" else ("down_proj",)
            for expert, rows in enumerate(value):
                for word, part in zip(names, rows.chunk(len(names)), strict=True):
                    found[f"{head}{packed}{expert}.{word}.weight"] = part
            continue
        found[name] = value
    return found


def require_equal(
    live: Mapping[str, Any], tensors: Mapping[str, Any], settings: Settings
) -> set[str]:
    """Every tensor of the model has the bytes that HF has for it; the HF names that are in it."""
    used: set[str] = set()
    for name, value in live.items():
        found = correspond.expected(settings, name)
        assert found is not None, name
        want = found.join([tensors[n] for n in found.hf])
        assert want.shape == value.shape, name
        assert want.contiguous().numpy().tobytes() == value.contiguous().numpy().tobytes(), name
        used.update(found.hf)
    return used


@pytest.mark.parametrize("name", MODELS)
def test_megatron_loads_a_family(megatron_cpu: None, tmp_path: Path, name: str) -> None:
    config = {**MODELS[name], "dtype": "float32"}
    if name in configs.SPARSE and runtime.megatron_version() < (0, 19):
        pytest.skip("sparse attention needs megatron-core 0.19 or newer")
    hf = make_hf(tmp_path / "hf", config)
    hf2mcore(hf, tmp_path / "mcore")
    settings = settings_of(config)
    model = mcore.build(settings, seed=5)
    mcore.load(model, tmp_path / "mcore")
    tensors = floats(hf, config)
    used = require_equal(mcore.module_tensors(model), tensors, settings)
    copies = {n for n in tensors if n.endswith(("embed_tokens.weight", "shared_head.head.weight"))}
    assert tensors.keys() - used <= copies - {f"{settings.family.trunk}embed_tokens.weight"}


def test_megatron_loads_a_padded_vocabulary(megatron_cpu: None, tmp_path: Path) -> None:
    config = configs.LLAMA | {"vocab_size": 100, "dtype": "float32"}
    hf = make_hf(tmp_path / "hf", config)
    hf2mcore(hf, tmp_path / "mcore", pad_vocab=64)
    model = mcore.build(settings_of(config | {"vocab_size": 128}), seed=5)
    mcore.load(model, tmp_path / "mcore")
    tensors, live = floats(hf, config), mcore.module_tensors(model)
    for key, name in (
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("output_layer.weight", "lm_head.weight"),
    ):
        assert live[key][:100].numpy().tobytes() == tensors[name].numpy().tobytes()
        assert live[key].shape[0] == 128
        assert not live[key][100:].any()
