"""What hf2mcore writes for every family that Megatron-Core can build, loaded by Megatron itself.

The model is built from the Megatron arguments of the family and loaded by Megatron's own
`dist_checkpointing.load`. What each of its tensors must hold is spelled by hand, in
`mtpconv.parity.correspond` or below, never through the mapping tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtpconv.convert import hf2mcore
from mtpconv.geometry import read_geometry
from mtpconv.mapping.table import find_table, table_names
from mtpconv.megatron_args import megatron_args, transformer_fields
from mtpconv.parity import correspond, mcore, modules, runtime
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
    "qwen3_5": {"model_type": "qwen3_5", "text_config": configs.QWEN3_5_TEXT},
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "text_config": configs.QWEN3_NEXT | {"model_type": "qwen3_5_moe_text"},
    },
    "qwen3_5_moe_text": configs.QWEN3_NEXT | {"model_type": "qwen3_5_moe_text"},
    "qwen3_5_text": configs.QWEN3_5_TEXT,
    "qwen3_moe": configs.QWEN3_MOE,
    "qwen3_next": configs.QWEN3_NEXT,
}

QWEN_HYBRIDS = [n for n in MODELS if n.startswith("qwen3_5") or n == "qwen3_next"]

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
        ("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
        ("mtp.layers.0.", "model.layers.4."), ("mtp.norm.", "model.layers.4.shared_head.norm."),
        ("mtp.fc.", "model.layers.4.eh_proj."),
        ("mtp.pre_fc_norm_embedding.", "model.layers.4.enorm."),
        ("mtp.pre_fc_norm_hidden.", "model.layers.4.hnorm."),
    ),
    **dict.fromkeys(QWEN_HYBRIDS, (
        ("model.language_model.", "model."), ("mlp.shared_expert.", "mlp.shared_experts."),
        ("mtp.layers.0.", "model.layers.8."), ("mtp.norm.", "model.layers.8.shared_head.norm."),
        ("mtp.fc.", "model.layers.8.eh_proj."),
        ("mtp.pre_fc_norm_embedding.", "model.layers.8.enorm."),
        ("mtp.pre_fc_norm_hidden.", "model.layers.8.hnorm."),
    )),
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


@pytest.mark.parametrize("name", [n for n in MODELS if n not in QWEN_HYBRIDS])
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
    assert tensors.keys() - used <= copies - {"model.embed_tokens.weight"}


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


def gated(part: Any, other: int) -> Any:
    """Queries (0) or gates (1) of all heads, of q_proj rows that hold both of each head in turn."""
    return part.unflatten(0, (4, 2, -1))[:, other].flatten(0, 1)


def regrouped(tensors: Mapping[str, Any], at: str) -> Any:
    """in_proj of a gated delta net, [Q; K; V; Z; B; A], of two key heads with two value heads."""
    import torch

    names = [f"{at}linear_attn.in_proj_{x}.weight" for x in ("qkv", "z", "b", "a")]
    if names[0] in tensors:  # Qwen3.5: four projections, which are these parts already
        return torch.cat([tensors[n] for n in names])
    qkvz = tensors[f"{at}linear_attn.in_proj_qkvz.weight"].unflatten(0, (2, -1))
    ba = tensors[f"{at}linear_attn.in_proj_ba.weight"].unflatten(0, (2, -1))
    parts = [*qkvz.split([8, 8, 32, 32], 1), *ba.split([2, 2], 1)]
    return torch.cat([part.flatten(0, 1) for part in parts])


def expected_hybrid(tensors: Mapping[str, Any], name: str) -> Any:
    """What a tensor of a Qwen hybrid must hold; None: as in every other family."""
    import torch

    _, _, tail = name.partition(".self_attention.")
    layer = 8 if name.startswith("mtp.") else int(name.split(".")[2]) if tail else 0
    at = f"model.layers.{layer}."
    if tail == "linear_qkv.weight":
        q, k, v = (tensors[f"{at}self_attn.{x}_proj.weight"] for x in "qkv")
        parts = [gated(q, 0), gated(q, 1), k, v]
        return torch.cat([p.unflatten(0, (2, -1)) for p in parts], 1).flatten(0, 1)
    if tail == "in_proj.weight":
        return regrouped(tensors, at)
    if tail == "out_norm.weight":
        return tensors[f"{at}linear_attn.norm.weight"] - 1
    if tail in ("conv1d.weight", "A_log", "dt_bias", "out_proj.weight"):
        return tensors[f"{at}linear_attn.{tail}"]
    head, gate, _ = name.partition("mlp.shared_experts.gate_weight")
    if gate:
        layer = 8 if head.startswith("mtp.") else int(head.split(".")[2])
        return tensors[f"model.layers.{layer}.mlp.shared_expert_gate.weight"]
    return None


@pytest.fixture
def linear_attention(megatron_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """GatedDeltaNet in Megatron's local layers; its kernels, which need CUDA, are never called."""
    from megatron.core.ssm import gated_delta_net as gdn
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    for module in (gdn, getattr(gdn, "common", gdn), getattr(gdn, "gdn", gdn)):
        for kernel in ("chunk_gated_delta_rule", "l2norm", "causal_conv1d"):
            monkeypatch.setattr(module, kernel, lambda *a, **k: None, raising=False)
        monkeypatch.setattr(module, "HAVE_FLA", True, raising=False)
    submodules = gdn.GatedDeltaNetSubmodules(
        ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear
    )
    plain_specs, plain_dialect = modules.block_specs, mcore.set_dialect

    def specs(settings: Settings, config: Any, te: bool) -> tuple[Any, Any]:
        decoder, mtp = plain_specs(settings, config, te)
        for layer, spec in enumerate(decoder.layer_specs):
            if settings.geometry.fact("is_linear", layer):
                spec.submodules.self_attention = ModuleSpec(
                    gdn.GatedDeltaNet, submodules=submodules
                )
        return decoder, mtp

    def dialect(model: mcore.McoreModel, named: str) -> None:
        plain_dialect(model, named)
        for layer in model.module.decoder.layers:
            if isinstance(layer.self_attention, gdn.GatedDeltaNet):
                keys = dict(layer.submodules_config.sharded_state_dict_keys_map)
                keys["input_layernorm."] = "self_attention.in_proj.layer_norm_"
                layer.submodules_config = replace(
                    layer.submodules_config, sharded_state_dict_keys_map=keys
                )

    monkeypatch.setattr(mcore, "block_specs", specs)
    monkeypatch.setattr(mcore, "set_dialect", dialect)


@pytest.mark.parametrize("name", QWEN_HYBRIDS)
def test_megatron_loads_a_qwen_hybrid(linear_attention: None, tmp_path: Path, name: str) -> None:
    config = {**MODELS[name], "dtype": "float32"}
    hf = make_hf(tmp_path / "hf", config)
    hf2mcore(hf, tmp_path / "mcore")
    settings = settings_of(config)
    # torch's norm knows no zero-centred gamma; only its weight matters here.
    settings.transformer |= {
        "perform_initialization": False,
        "layernorm_zero_centered_gamma": False,
    }
    model = mcore.build(settings, seed=5)
    mcore.load(model, tmp_path / "mcore")
    tensors, live = floats(hf, config), mcore.module_tensors(model)
    own = {n: want for n in live if (want := expected_hybrid(tensors, n)) is not None}
    for key, want in own.items():
        assert want.shape == live[key].shape, key
        assert want.contiguous().numpy().tobytes() == live[key].contiguous().numpy().tobytes(), key
    used = require_equal({n: v for n, v in live.items() if n not in own}, tensors, settings)
    left = {n.partition(".layers.")[2].partition(".")[2] for n in tensors.keys() - used}
    assert all("linear_attn." in n or "self_attn." in n or "gate.weight" in n for n in left)
