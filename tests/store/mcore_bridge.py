"""torch_dist checkpoints as mcore-bridge writes them, made with numpy from HF tensors.

Written after its gpt_bridge.py and gated_delta_net.py, not with the layouts that read them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mtpconv.tensors import DTYPE_BITS, TensorSpec
from tests.convert.folders import tensors_of
from tests.store.respelled import Held, rewritten

_DELTA_NET = re.compile(
    r"\.self_attention\.(in_proj\.weight|conv1d|A_log|dt_bias|out_proj|out_norm)\b"
)
_NORMS = {
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def modules(hf: Path, mcore: Path, target: Path, config: Mapping[str, Any]) -> Path:
    """Linear attention as HuggingFace's module."""
    tensors = tensors_of(hf)
    own = {}
    for name, held in tensors.items():
        at = re.search(r"layers\.(\d+)\.linear_attn\.(.+)", name)
        if at is not None:
            own[f"decoder.layers.{at[1]}.self_attention.{at[2]}"] = held

    def change(key: str, held: Held) -> Iterator[tuple[str, Held]]:
        if _DELTA_NET.search(key):
            return
        for old, new in _NORMS.items():
            key = key.replace(old, new)
        yield key, _qkv(key, held, tensors, config)

    return rewritten(mcore, target, change, own)


def interleaved(hf: Path, mcore: Path, target: Path, config: Mapping[str, Any]) -> Path:
    """Megatron's own linear attention and keys, rows by key head and cut where Megatron cuts."""
    tensors = tensors_of(hf)

    def change(key: str, held: Held) -> Iterator[tuple[str, Held]]:
        at = re.search(r"layers\.(\d+)\.self_attention\.(.+)", key)
        if at is not None and not key.startswith("mtp."):
            prefix = f"model.layers.{at[1]}.linear_attn."
            if at[2] == "out_norm.weight":
                held = tensors[prefix + "norm.weight"]
            elif (part := re.fullmatch(r"(in_proj|conv1d)\.weight\.(\w+)", at[2])) is not None:
                held = _cut(_by_head(tensors, prefix, part[1], config), held, part[2], config)
        yield key, _qkv(key, held, tensors, config)

    return rewritten(mcore, target, change)


def _qkv(key: str, held: Held, tensors: Mapping[str, Held], config: Mapping[str, Any]) -> Held:
    """Per query group: query and gate of each head in turn, as q_proj has them; key; value."""
    at = re.search(r"(decoder|mtp)\.layers\.(\d+)\..*self_attention\.linear_qkv\.weight", key)
    if at is None:
        return held
    prefix = "mtp" if at[1] == "mtp" else "model"
    groups = config["num_key_value_heads"]
    parts = []
    for part in "qkv":
        words = _words(tensors[f"{prefix}.layers.{at[2]}.self_attn.{part}_proj.weight"])
        parts.append(words.reshape(groups, -1, words.shape[-1]))
    return _held(held[0], np.concatenate(parts, axis=1).reshape(held[0].shape))


def _by_head(
    tensors: Mapping[str, Held], prefix: str, name: str, config: Mapping[str, Any]
) -> np.ndarray:
    heads = config["linear_num_key_heads"]
    if name == "in_proj":
        both = [_words(tensors[f"{prefix}in_proj_{part}.weight"]) for part in ("qkvz", "ba")]
    else:
        keys = heads * config["linear_key_head_dim"]
        both = np.split(_words(tensors[f"{prefix}conv1d.weight"]), [keys, 2 * keys])
    by_head = [w.reshape(heads, -1, *w.shape[1:]) for w in both]
    return np.concatenate(by_head, axis=1).reshape(-1, *both[0].shape[1:])


def _cut(words: np.ndarray, held: Held, part: str, config: Mapping[str, Any]) -> Held:
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    heads = config["linear_num_value_heads"]
    sizes = {
        "query": keys,
        "key": keys,
        "value": values,
        "z": values,
        "beta": heads,
        "alpha": heads,
    }
    ends = np.cumsum(list(sizes.values())).tolist()
    at = list(sizes).index(part)
    return _held(held[0], words[ends[at] - sizes[part] : ends[at]])


def _words(held: Held) -> np.ndarray:
    spec, data = held
    return np.frombuffer(data, f"u{DTYPE_BITS[spec.dtype] // 8}").reshape(spec.shape)


def _held(spec: TensorSpec, words: np.ndarray) -> Held:
    return TensorSpec(spec.dtype, words.shape), np.ascontiguousarray(words).tobytes()
