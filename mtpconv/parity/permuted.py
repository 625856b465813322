"""Known ways to get a Megatron tensor wrong, each worked out in full.

Only an exact match of one of these is ever named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mtpconv.parity.correspond import (
    Expected,
    concatenated,
    delta_net_parts,
    grouped_qkv,
    ungated,
)
from mtpconv.parity.settings import Settings

#: Gives an HF tensor by name.
Read = Callable[[str], Any]


def permuted(
    settings: Settings, read: Read, found: Expected, value: Any
) -> Iterator[tuple[str, Any]]:
    """Ways to get a tensor wrong, each with what the tensor would then hold."""
    name = found.name
    if name.endswith("eh_proj.weight"):
        yield "halves of {} are swapped", value.roll(value.shape[1] // 2, 1)
    if "linear_fc1" in name:
        yield "gate and up of {} are swapped", value.roll(value.shape[0] // 2, 0)
        gate, up = value.chunk(2)
        yield "gate and up of {} are interleaved", _interleaved(gate, up)
    if name.endswith(("linear_qkv.weight", "linear_qkv.bias")):
        parts = [read(hf) for hf in found.hf]
        if settings.transformer.get("attention_output_gate"):
            yield "query and gate of {} are each head's in turn", grouped_qkv(settings)(parts)
            parts = ungated(settings, parts)
        yield from _other_qkv(settings, parts)
    if name.endswith("self_attention.in_proj.weight"):
        yield from _other_in_proj(settings, [read(hf) for hf in found.hf])
    for rows in _rope_rows(settings, name):
        yield from _other_rope(value, *rows)
    if value.ndim == 1:
        less, more = "converted for a zero-centred norm", "converted from a zero-centred norm"
        if settings.zero_centred:
            less, more = "it is around 0 already", "its gamma must be stored around 0"
        yield f"{{}} is 1 too small: {less}", value - 1
        yield f"{{}} is 1 too large: {more}", value + 1
    if value.ndim == 2 and value.shape[0] == value.shape[1]:
        yield "{} is transposed", value.T
    import torch

    yield "{} was rounded to bfloat16", value.to(torch.bfloat16)
    yield "{} is all zero", torch.zeros_like(value)


def _interleaved(first: Any, second: Any) -> Any:
    import torch

    return torch.stack((first, second), 1).flatten(0, 1)


def _other_qkv(settings: Settings, parts: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Orders of query, key and value other than by query group."""
    import torch

    groups = settings.transformer["num_query_groups"]
    q, k, v = parts
    yield "{} holds all queries, then all keys, then all values", concatenated(parts)
    blocks = {n: p.reshape(groups, -1, *p.shape[1:]) for n, p in zip("qkv", parts, strict=True)}
    words = {"q": "query", "k": "key", "v": "value"}
    for order in ("qvk", "kqv", "kvq", "vqk", "vkq"):
        text = "each group of {} holds " + ", ".join(words[n] for n in order)
        yield text, torch.cat([blocks[n] for n in order], 1).flatten(0, 1)
    for order in ("qvk", "kqv", "kvq", "vqk", "vkq"):
        text = "{} holds all of " + ", ".join(words[n] for n in order)
        yield text, torch.cat([dict(zip("qkv", (q, k, v), strict=True))[n] for n in order])


def _other_in_proj(settings: Settings, stored: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Orders of a delta net's input projection other than queries, keys, values, z, beta, alpha."""
    import torch

    heads = settings.transformer["linear_num_key_heads"]
    blocks = delta_net_parts(settings, stored)
    rows = [part.unflatten(0, (heads, -1)) for part in blocks]
    yield "{} has the rows of each key head together", torch.cat(rows, 1).flatten(0, 1)
    halves = [torch.cat(rows[:4], 1), torch.cat(rows[4:], 1)]
    text = "{} has the rows of each key head together, projection by projection"
    yield text, torch.cat([half.flatten(0, 1) for half in halves])
    words = ("query", "key", "value", "z", "beta", "alpha")
    for order in ((0, 1, 2, 3, 5, 4), (0, 1, 3, 2, 4, 5), (1, 0, 2, 3, 4, 5), (3, 2, 0, 1, 4, 5)):
        text = "{} holds all of " + ", ".join(words[i] for i in order)
        yield text, torch.cat([blocks[i] for i in order])


def _rope_rows(settings: Settings, name: str) -> Iterator[tuple[int, int, int]]:
    """(heads, rows of a head, first row of its rope part) of tensors that carry rope rows."""
    t = settings.transformer
    if settings.mla:
        nope, rope = t["qk_head_dim"], t["qk_pos_emb_head_dim"]
        if name.endswith(("linear_q_up_proj.weight", "linear_q_proj.weight")):
            yield t["num_attention_heads"], nope + rope, nope
        elif name.endswith("linear_kv_down_proj.weight"):
            yield 1, t["kv_lora_rank"] + rope, t["kv_lora_rank"]
    if "linear_wq_b" in name:
        yield t["dsa_indexer_n_heads"], t["dsa_indexer_head_dim"], 0
    elif "indexer.linear_wk." in name:
        yield 1, t["dsa_indexer_head_dim"], 0


def _other_rope(value: Any, heads: int, rows: int, first: int) -> Iterator[tuple[str, Any]]:
    """The rope rows of every head split into even and odd, or the other way round."""
    import torch

    split = value.reshape(heads, rows, *value.shape[1:])
    for last in {rows, first + (rows - first) // 2 if first == 0 else rows}:
        head, rope, rest = split[:, :first], split[:, first:last], split[:, last:]
        if rope.shape[1] % 2:
            continue
        apart = torch.cat((rope[:, 0::2], rope[:, 1::2]), 1)
        woven = torch.stack(rope.chunk(2, 1), 2).flatten(1, 2)
        for text, changed in (
            ("rope rows of {} are de-interleaved (even rows, then odd)", apart),
            ("rope rows of {} are interleaved once more", woven),
        ):
            yield text, torch.cat((head, changed, rest), 1).reshape(value.shape)
