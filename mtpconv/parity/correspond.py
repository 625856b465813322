"""What each tensor of a live Megatron module should hold, said in HF tensors.

Written by hand from the two libraries' forward code and kept apart from the mapping tables on
purpose: when the forward differs, this says whether the weights or the arithmetic do, even
where the table itself is wrong.
Source: facts/megatron.md section 2, facts/families.md section 3; confirmed by forward parity.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mtpconv.parity.families import respelled
from mtpconv.parity.settings import Settings

#: Joins HF tensors into the Megatron tensor.
Join = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Expected:
    """A Megatron tensor: the HF names it is made of, and how they are joined."""

    name: str
    hf: tuple[str, ...]
    join: Join


def concatenated(parts: Sequence[Any]) -> Any:
    """The parts below each other."""
    import torch

    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def grouped_qkv(settings: Settings) -> Join:
    """Queries, key and value of each query group below each other.

    Shape: q [heads * d, ...], k and v [groups * d, ...]; result [(heads + 2 groups) * d, ...].
    """
    groups = settings.transformer["num_query_groups"]

    def join(parts: Sequence[Any]) -> Any:
        import torch

        blocks = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(blocks, 1).flatten(0, 1)

    return join


def gated_grouped_qkv(settings: Settings) -> Join:
    """Queries, their gates, key and value of each query group below each other.

    Shape: q [heads * 2 * d, ...], the gate of each head after its query; k and v
    [groups * d, ...]; result [(2 heads + 2 groups) * d, ...].
    """

    def join(parts: Sequence[Any]) -> Any:
        return grouped_qkv(settings)(ungated(settings, parts))

    return join


def ungated(settings: Settings, parts: Sequence[Any]) -> list[Any]:
    """Queries with gates, keys and values, all queries of a group before all its gates."""
    q, *others = parts
    groups = settings.transformer["num_query_groups"]
    heads = settings.transformer["num_attention_heads"] // groups
    apart = q.reshape(groups, heads, 2, -1, *q.shape[1:])
    return [apart.transpose(1, 2).reshape(q.shape), *others]


def delta_net_parts(settings: Settings, parts: Sequence[Any]) -> list[Any]:
    """Query, key, value, gate, beta and alpha rows of a delta net's input projections.

    Source: transformers 5.24 modeling_qwen3_next.py `fix_query_key_value_ordering`.

    Shape: Qwen3-Next qkvz and ba, each with the rows of a key head together; Qwen3.5 qkv, z, b
    and a. Each result [rows, ...].
    """
    t = settings.transformer
    heads, keys = t["linear_num_key_heads"], t["linear_key_head_dim"]
    values = t["linear_num_value_heads"] // heads
    wide = values * t["linear_value_head_dim"]
    if settings.family.by_key_head:
        qkvz, ba = (part.unflatten(0, (heads, -1)) for part in parts)
        found = [*qkvz.split([keys, keys, wide, wide], 1), *ba.split([values, values], 1)]
        return [part.flatten(0, 1) for part in found]
    qkv, *others = parts
    return [*qkv.split([heads * keys, heads * keys, heads * wide]), *others]


def delta_net_blocks(settings: Settings) -> Join:
    """All queries, then all keys, values, gates, betas and alphas."""

    def join(parts: Sequence[Any]) -> Any:
        return concatenated(delta_net_parts(settings, parts))

    return join


def minus_one(parts: Sequence[Any]) -> Any:
    """A norm around 1 as one around 0, in float32: bfloat16 may have no such number."""
    (gamma,) = parts
    return gamma.float() - 1


#: Module tensor of a Megatron layer -> HF tensors of the same layer.
_LAYER: dict[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
    "self_attention.linear_qkv.bias": tuple(f"self_attn.{x}_proj.bias" for x in "qkv"),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_q_proj.weight": ("self_attn.q_proj.weight",),
    "self_attention.linear_q_down_proj.weight": ("self_attn.q_a_proj.weight",),
    "self_attention.linear_q_up_proj.weight": ("self_attn.q_b_proj.weight",),
    "self_attention.linear_kv_down_proj.weight": ("self_attn.kv_a_proj_with_mqa.weight",),
    "self_attention.linear_kv_up_proj.weight": ("self_attn.kv_b_proj.weight",),
    "self_attention.kv_layernorm.weight": ("self_attn.kv_a_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
    "mlp.router.weight": ("mlp.gate.weight",),
    "mlp.router.expert_bias": ("mlp.gate.e_score_correction_bias",),
    "mlp.shared_experts.linear_fc1.weight": (
        "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight",
    ),
    "mlp.shared_experts.linear_fc2.weight": ("mlp.shared_experts.down_proj.weight",),
    "mlp.shared_experts.gate_weight": ("mlp.shared_expert_gate.weight",),
    "self_attention.in_proj.layer_norm_weight": ("input_layernorm.weight",),
    "self_attention.in_proj.weight": tuple(
        f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")
    ),
    "self_attention.conv1d.weight": ("linear_attn.conv1d.weight",),
    "self_attention.A_log": ("linear_attn.A_log",),
    "self_attention.dt_bias": ("linear_attn.dt_bias",),
    "self_attention.out_norm.weight": ("linear_attn.norm.weight",),
    "self_attention.out_proj.weight": ("linear_attn.out_proj.weight",),
    **{
        f"self_attention.core_attention.indexer.{mcore}": (f"self_attn.indexer.{hf}",)
        for mcore, hf in (
            ("linear_wq_b.weight", "wq_b.weight"),
            ("linear_wk.weight", "wk.weight"),
            ("k_norm.weight", "k_norm.weight"),
            ("k_norm.bias", "k_norm.bias"),
            ("linear_weights_proj.weight", "weights_proj.weight"),
        )
    },
}  # fmt: skip

#: With multi-latent attention.
_LATENT = {
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",
}

#: With the rows of each key head together.
_BY_KEY_HEAD = {
    "self_attention.in_proj.weight": tuple(
        f"linear_attn.in_proj_{part}.weight" for part in ("qkvz", "ba")
    ),
}

_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight$")
_GROUPED = re.compile(r"mlp\.experts\.linear_fc([12])\.weight(\d+)$")

_ROOT = {
    "embedding.word_embeddings.weight": "{trunk}embed_tokens.weight",
    "decoder.final_layernorm.weight": "{trunk}norm.weight",
    "output_layer.weight": "lm_head.weight",
}


def layer_expected(settings: Settings, name: str, prefix: str) -> Expected | None:
    """What `name` of a Megatron layer should hold, its HF tensors under `prefix`."""
    found = _EXPERT.match(name)
    grouped = _GROUPED.match(name)
    if found or grouped:
        number, half = found.groups() if found else grouped.group(2, 1)  # type: ignore[union-attr]
        parts = ("gate_proj", "up_proj") if half == "1" else ("down_proj",)
        tails = tuple(f"mlp.experts.{number}.{part}.weight" for part in parts)
    elif settings.mla and name in _LATENT:
        tails = (_LATENT[name],)
    elif settings.family.by_key_head and name in _BY_KEY_HEAD:
        tails = _BY_KEY_HEAD[name]
    elif name in _LAYER:
        tails = _LAYER[name]
    else:
        return None
    if "expert" in name or "router" in name:
        tails = tuple(respelled(tail, settings.family.spelled) for tail in tails)
    return Expected(name, tuple(prefix + tail for tail in tails), _join(settings, name))


def _join(settings: Settings, name: str) -> Join:
    if name.startswith("self_attention.linear_qkv.") and "norm" not in name:
        gated = settings.transformer.get("attention_output_gate")
        return gated_grouped_qkv(settings) if gated else grouped_qkv(settings)
    if name == "self_attention.in_proj.weight":
        return delta_net_blocks(settings)
    return minus_one if name == "self_attention.out_norm.weight" else concatenated


def expected(settings: Settings, name: str) -> Expected | None:
    """What a tensor of `mcore.module_tensors` should hold, None if HF has nothing like it."""
    if name in _ROOT:
        root = _ROOT[name].format(trunk=settings.family.trunk)
        return Expected(name, (root,), concatenated)
    layer = re.match(r"decoder\.layers\.(\d+)\.(.+)$", name)
    if layer:
        number, tail = layer.groups()
        prefix = f"{settings.family.trunk}layers.{number}."
        return _named(layer_expected(settings, tail, prefix), name)
    depth = re.match(r"mtp\.layers\.(\d+)\.(.+)$", name)
    if depth is None:
        return None
    number, tail = depth.groups()
    glue = settings.family
    prefix = glue.at(settings.geometry, int(number))
    inner = tail.removeprefix("transformer_layer.")
    if inner != tail:
        return _named(layer_expected(settings, inner, prefix), name)
    parts = {
        "enorm.weight": glue.enorm,
        "hnorm.weight": glue.hnorm,
        "eh_proj.weight": glue.eh_proj,
        "final_layernorm.weight": glue.final_norm,
    }
    if tail not in parts:
        return None
    join = swapped_halves if tail == "eh_proj.weight" and glue.hidden_first else concatenated
    prefix = glue.glue_at(settings.geometry, int(number))
    return Expected(name, (f"{prefix}{parts[tail]}.weight",), join)


def swapped_halves(parts: Sequence[Any]) -> Any:
    """The two halves of the columns exchanged."""
    (whole,) = parts
    return whole.roll(whole.shape[1] // 2, 1)


def _named(found: Expected | None, name: str) -> Expected | None:
    return None if found is None else Expected(name, found.hf, found.join)


def all_expected(settings: Settings, names: Iterable[str]) -> Iterator[Expected]:
    """`expected` for every name that has something like it in HF."""
    for name in names:
        found = expected(settings, name)
        if found is not None:
            yield found
