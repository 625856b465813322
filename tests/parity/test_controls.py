"""Negative controls: every fault that survives a byte round trip must fail here, and be named.

The first list are faults of an MTP depth: the trunk stays green. The second are faults of the
trunk. Each is made in a live Megatron model which Megatron then saves.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpconv.parity.report import ParityOptions, ParityReport
from mtpconv.parity.run import run_parity
from tests.parity import checkpoints, configs

pytestmark = pytest.mark.megatron

Tensors = dict[str, Any]
DEPTH = "mtp.layers.0."
BLOCK = "mtp.layers.0.transformer_layer."


def exchange(first: str, second: str) -> Callable[[Tensors], None]:
    def change(live: Tensors) -> None:
        kept = live[first].clone()
        live[first].copy_(live[second])
        live[second].copy_(kept)

    return change


def halves(name: str, axis: int) -> Callable[[Tensors], None]:
    def change(live: Tensors) -> None:
        live[name].copy_(live[name].roll(live[name].shape[axis] // 2, axis))

    return change


def experts_rotated(prefix: str) -> Callable[[Tensors], None]:
    def change(live: Tensors) -> None:
        for half in ("linear_fc1", "linear_fc2"):
            names = [f"{prefix}mlp.experts.local_experts.{e}.{half}.weight" for e in range(8)]
            kept = [live[name].clone() for name in names]
            for name, value in zip(names, kept[1:] + kept[:1], strict=True):
                live[name].copy_(value)

    return change


def random_depth(live: Tensors) -> None:
    import torch

    random = torch.Generator().manual_seed(1)
    for name, value in live.items():
        if name.startswith(DEPTH) and value.ndim == 2:
            value.copy_(torch.randn(value.shape, generator=random) * value.std())


def de_interleaved(name: str, heads: int, rows: int, first: int) -> Callable[[Tensors], None]:
    def change(live: Tensors) -> None:
        import torch

        split = live[name].clone().reshape(heads, rows, -1)
        rope = split[:, first:]
        changed = torch.cat([split[:, :first], rope[:, 0::2], rope[:, 1::2]], 1)
        live[name].copy_(changed.reshape(live[name].shape))

    return change


def plain_order(name: str) -> Callable[[Tensors], None]:
    """All queries, all keys, all values, instead of query group by query group."""

    def change(live: Tensors) -> None:
        import torch

        groups = live[name].clone().reshape(2, 4, 8, *live[name].shape[1:])
        parts = [groups[:, :2], groups[:, 2:3], groups[:, 3:]]
        live[name].copy_(torch.cat([part.flatten(0, 2) for part in parts]))

    return change


def gates_in_turn(name: str) -> Callable[[Tensors], None]:
    """Query and gate of each head in turn, instead of all queries of a group, then all gates."""

    def change(live: Tensors) -> None:
        import torch

        groups = live[name].clone().unflatten(0, (2, 6, 16))  # 2 queries, 2 gates, key, value
        heads = groups[:, :4].unflatten(1, (2, 2)).transpose(1, 2).flatten(1, 2)
        live[name].copy_(torch.cat([heads, groups[:, 4:]], 1).flatten(0, 2))

    return change


def delta_net(join: Callable[[list[Any]], Any]) -> Callable[[Tensors], None]:
    """Another order of in_proj, made from its [query, key, value, z, beta, alpha] rows."""

    def change(live: Tensors) -> None:
        weight = live["decoder.layers.1.self_attention.in_proj.weight"]
        weight.copy_(join(list(weight.clone().split([48, 48, 128, 128, 4, 4]))))

    return change


def by_key_head(parts: list[Any]) -> Any:
    """The rows of both key heads apart, in each of the two projections of Qwen3-Next."""
    import torch

    apart = [part.unflatten(0, (2, -1)) for part in parts]
    halves = (torch.cat(half, 1).flatten(0, 1) for half in (apart[:4], apart[4:]))
    return torch.cat(list(halves))


def reordered(*order: int) -> Callable[[list[Any]], Any]:
    def join(parts: list[Any]) -> Any:
        import torch

        return torch.cat([parts[i] for i in order])

    return join


DEPTH_FAULTS = {
    "eh_proj halves": (
        configs.DEEPSEEK_V3,
        halves(f"{DEPTH}eh_proj.weight", 1),
        "depth 0, after eh_proj: halves of eh_proj are swapped",
    ),
    "enorm and hnorm": (
        configs.DEEPSEEK_V3,
        exchange(f"{DEPTH}enorm.weight", f"{DEPTH}hnorm.weight"),
        "depth 0, after enorm: enorm and hnorm are swapped",
    ),
    "gate and up of the experts": (
        configs.DEEPSEEK_V3,
        halves(f"{BLOCK}mlp.experts.local_experts.3.linear_fc1.weight", 0),
        "depth 0, after MLP: gate and up of mlp.experts.expert 3.linear_fc1 are swapped",
    ),
    "gate and up of the shared experts": (
        configs.GLM4_MOE,
        halves(f"{BLOCK}mlp.shared_experts.linear_fc1.weight", 0),
        "depth 0, after shared experts: gate and up of mlp.shared_experts.linear_fc1 are swapped",
    ),
    "final norm": (
        configs.DEEPSEEK_V3,
        exchange(f"{DEPTH}final_layernorm.weight", f"{DEPTH}hnorm.weight"),
        "depth 0, after hnorm: final_layernorm and hnorm are swapped",
    ),
    "order of experts": (
        configs.DEEPSEEK_V3,
        experts_rotated(BLOCK),
        "depth 0, after MLP: experts are in another order: expert 0 holds expert 1's weights",
    ),
    "rope rows of the depth": (
        configs.DEEPSEEK_V3,
        de_interleaved(f"{BLOCK}self_attention.linear_q_up_proj.weight", 4, 24, 16),
        "depth 0, after attention: rope rows of linear_q_up_proj are de-interleaved",
    ),
    "order of query, key and value": (
        configs.GLM4_MOE,
        plain_order(f"{BLOCK}self_attention.linear_qkv.weight"),
        "depth 0, after query norm: linear_qkv holds all queries, then all keys",
    ),
    "random MTP": (
        configs.DEEPSEEK_V3,
        random_depth,
        "depth 0, after eh_proj: eh_proj is unrelated to its HF tensor",
    ),
    "second depth": (
        configs.DEEPSEEK_V3_TWO_DEPTHS,
        halves("mtp.layers.1.eh_proj.weight", 1),
        "depth 1, after eh_proj: halves of eh_proj are swapped",
    ),
    "MTP of sparse attention": (
        configs.GLM_MOE_DSA_SHARING,
        halves(f"{DEPTH}eh_proj.weight", 1),
        "depth 0, after eh_proj: halves of eh_proj are swapped",
    ),
    "indexer of the depth": (
        configs.GLM_MOE_DSA_SHARING,
        de_interleaved(
            f"{BLOCK}self_attention.core_attention.indexer.linear_wq_b.weight", 4, 16, 0
        ),
        "depth 0, after attention: rope rows of indexer.linear_wq_b are de-interleaved",
    ),
    "query and gate": (
        configs.QWEN3_5_MOE,
        gates_in_turn(f"{BLOCK}self_attention.linear_qkv.weight"),
        "depth 0, after query norm: query and gate of linear_qkv are each head's in turn",
    ),
    **{
        f"eh_proj halves of {config['model_type']}": (
            config,
            halves(f"{DEPTH}eh_proj.weight", 1),
            "depth 0, after eh_proj: halves of eh_proj are swapped",
        )
        for config in configs.HYBRIDS
    },
}

LAYER = "decoder.layers.1."
TRUNK_FAULTS = {
    "gate and up of a dense layer": (
        configs.DEEPSEEK_V3,
        halves("decoder.layers.0.mlp.linear_fc1.weight", 0),
        "layer 0, after MLP: gate and up of mlp.linear_fc1 are swapped",
    ),
    "norms of a layer": (
        configs.QWEN3,
        exchange(f"{LAYER}input_layernorm.weight", f"{LAYER}pre_mlp_layernorm.weight"),
        "layer 1, after input norm: input_layernorm and pre_mlp_layernorm are swapped",
    ),
    "query and key norm": (
        configs.QWEN3,
        exchange(
            f"{LAYER}self_attention.q_layernorm.weight",
            f"{LAYER}self_attention.k_layernorm.weight",
        ),
        "layer 1, after query norm: k_layernorm and q_layernorm are swapped",
    ),
    "rope rows of the keys": (
        configs.DEEPSEEK_V3,
        de_interleaved(f"{LAYER}self_attention.linear_kv_down_proj.weight", 1, 24, 16),
        "layer 1, after attention: rope rows of linear_kv_down_proj are de-interleaved",
    ),
    "router bias": (
        configs.DEEPSEEK_V3,
        lambda live: live[f"{LAYER}mlp.router.expert_bias"].zero_(),
        "layer 1, after router: mlp.router.expert_bias is all zero",
    ),
    "order of query, key and value": (
        configs.LLAMA,
        plain_order(f"{LAYER}self_attention.linear_qkv.weight"),
        "layer 1, after attention: linear_qkv holds all queries, then all keys, then all values",
    ),
    "LM head": (
        configs.LLAMA,
        lambda live: live["output_layer.weight"].copy_(live["output_layer.weight"].flip(0)),
        "trunk, after logits: output_layer is unrelated to its HF tensor",
    ),
    "zero-centred norms": (
        configs.QWEN3,
        lambda live: live["decoder.final_layernorm.weight"].sub_(1),
        "trunk, after final norm: decoder.final_layernorm is 1 too small",
    ),
    "in_proj of Qwen3-Next left as it is": (
        configs.QWEN3_NEXT,
        delta_net(by_key_head),
        "in_proj has the rows of each key head together, projection by projection",
    ),
    "in_proj of Qwen3.5 by key head": (
        configs.QWEN3_5_TEXT,
        delta_net(by_key_head),
        "layer 1, after attention: in_proj has the rows of each key head together",
    ),
    "in_proj as z, value, query, key, beta, alpha": (
        configs.QWEN3_5_MOE_TEXT,
        delta_net(reordered(3, 2, 0, 1, 4, 5)),
        "layer 1, after attention: in_proj holds all of z, value, query, key, beta, alpha",
    ),
    "beta and alpha": (
        configs.QWEN3_NEXT,
        delta_net(reordered(0, 1, 2, 3, 5, 4)),
        "layer 1, after attention: in_proj holds all of query, key, value, z, alpha, beta",
    ),
    "the norm of a delta net around 1": (
        configs.QWEN3_5,
        lambda live: live[f"{LAYER}self_attention.out_norm.weight"].add_(1),
        "layer 1, after attention: out_norm is 1 too large: its gamma must be stored around 0",
    ),
    "gate and up of a packed expert": (
        configs.QWEN3_5_MOE,
        halves(f"{LAYER}mlp.experts.local_experts.3.linear_fc1.weight", 0),
        "layer 1, after MLP: gate and up of mlp.experts.expert 3.linear_fc1 are swapped",
    ),
}


def parity(
    tmp_path: Path,
    config: configs.Config,
    change: Callable[[Tensors], None] | None = None,
    options: ParityOptions | None = None,
) -> ParityReport:
    checkpoints.need_megatron_for(config)
    checkpoints.write_hf(config, tmp_path / "hf")
    checkpoints.write_mcore(config, tmp_path / "hf", tmp_path / "mcore", change)
    return run_parity(tmp_path / "hf", tmp_path / "mcore", options)


@pytest.mark.parametrize("name", configs.WITH_MTP | configs.WITHOUT_MTP)
def test_a_right_checkpoint_passes(megatron_cpu: None, tmp_path: Path, name: str) -> None:
    report = parity(tmp_path, (configs.WITH_MTP | configs.WITHOUT_MTP)[name])
    assert report.verdict == "pass"
    assert report.exit_code == 0
    assert report.fault is None
    assert all(head.limits.source == "measured noise" for head in report.heads)


@pytest.mark.parametrize("name", DEPTH_FAULTS)
def test_a_fault_of_a_depth_leaves_the_trunk_green(
    megatron_cpu: None, tmp_path: Path, name: str
) -> None:
    config, change, message = DEPTH_FAULTS[name]
    report = parity(tmp_path, config, change)
    passed = {head.head: head.passed for head in report.heads}
    assert passed.pop("trunk")
    assert not passed[message.split(",")[0]]
    assert report.exit_code == 1
    assert report.fault is not None
    assert message in report.fault.message


@pytest.mark.parametrize("name", TRUNK_FAULTS)
def test_a_fault_of_the_trunk_turns_it_red(megatron_cpu: None, tmp_path: Path, name: str) -> None:
    config, change, message = TRUNK_FAULTS[name]
    report = parity(tmp_path, config, change)
    assert not report.heads[0].passed
    assert report.fault is not None
    assert message in report.fault.message


WRONG_SETTINGS: dict[str, tuple[configs.Config, dict[str, Any], str]] = {
    "epsilon 1e-5 instead of 1e-6": (
        configs.DEEPSEEK_V3,
        {"layernorm_epsilon": 1e-5},
        "layer 0, after input norm: the weights are right, so the epsilon of the norm differs",
    ),
    "norms not zero-centred": (
        configs.QWEN3_NEXT,
        {"layernorm_zero_centered_gamma": False},
        "layer 0, after input norm: the weights are right, so the epsilon of the norm differs",
    ),
    "layers without their windows": (
        configs.WITHOUT_MTP["exaone_moe"],
        {"window_attn_skip_freq": [0, 0, 0, 0]},
        "layer 0, after attention: the weights are right, so the attention differs",
    ),
    "rope where there is none": (
        configs.WITHOUT_MTP["exaone_moe"],
        {"no_rope_freq": [0, 0, 0, 0]},
        "layer 2, after attention: the weights are right, so the attention differs: rope",
    ),
    "rope interleaved": (
        configs.LLAMA,
        {"rotary_interleaved": True},
        "layer 0, after attention: the weights are right, so the attention differs: rope",
    ),
    "indexer rope not interleaved": (
        configs.GLM_MOE_DSA,
        {"dsa_indexer_rope_interleaved": False},
        "layer 0, after attention: the weights are right, so the attention differs: rope",
    ),
    "router scaling": (
        configs.DEEPSEEK_V3,
        {"moe_router_topk_scaling_factor": 1.0},
        "layer 1, after router: the weights are right, so the routing rule differs",
    ),
}


@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_wrong_arithmetic_is_told_from_wrong_weights(
    megatron_cpu: None, tmp_path: Path, name: str
) -> None:
    config, overrides, message = WRONG_SETTINGS[name]
    report = parity(tmp_path, config, options=ParityOptions(overrides=overrides))
    assert not report.heads[0].passed
    assert report.fault is not None
    assert report.fault.tensors == ()
    assert message in report.fault.message
    assert any("unlike the config" in note for note in report.notes)
