"""torch_dist checkpoints as slime writes them, made with numpy from HF tensors.

Written after slime's own importers (see mappings/layouts/slime_*.toml), not with the layouts
that read them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from mtpconv.tensors import DTYPE_BITS, TensorSpec
from tests.convert.folders import tensors_of
from tests.store.respelled import Held, rewritten

#: What the layer's own linear attention holds in Megatron.
_DELTA_NET = re.compile(
    r"\.self_attention\.(in_proj\.weight|conv1d|A_log|dt_bias|out_proj|out_norm)\b"
)
_INDEXER = re.compile(r"\.self_attention\.core_attention\.indexer\.(?:linear_)?(.+)")


def linear_attention(hf: Path, mcore: Path, target: Path, *, swapped: bool) -> Path:
    """Linear attention as HF modules; `swapped`: the halves of eh_proj exchanged."""

    def change(key: str, held: Held) -> Iterator[tuple[str, Held]]:
        if _DELTA_NET.search(key):
            return
        if key.endswith("eh_proj.weight") and swapped:
            held = _columns_swapped(held)
        yield key.replace("in_proj.layer_norm_weight", "input_layernorm.weight"), held

    return rewritten(mcore, target, change, _hf_modules(tensors_of(hf)))


def _hf_modules(tensors: Mapping[str, Held]) -> dict[str, Held]:
    found = {}
    for name, held in tensors.items():
        at = re.search(r"layers\.(\d+)\.(linear_attn\..+)", name)
        if at is not None:
            found[f"decoder.layers.{at[1]}.self_attention.{at[2]}"] = held
    return found


def indexer(mcore: Path, target: Path, *, head: int, rope: int) -> Path:
    """The indexer beside the attention, rotary rows last; `rope` 0 keeps the order of rows."""

    def change(key: str, held: Held) -> Iterator[tuple[str, Held]]:
        for latent in ("q", "kv"):
            key = key.replace(
                f"self_attention.{latent}_layernorm.weight",
                f"self_attention.linear_{latent}_up_proj.layer_norm_weight",
            )
        found = _INDEXER.search(key)
        if found is not None:
            key = key[: found.start()] + ".self_attention." + found[1]
            if found[1] != "weights_proj.weight" and rope:
                held = _rope_last(held, head, rope)
        yield key, held

    return rewritten(mcore, target, change)


def _words(held: Held) -> np.ndarray:
    spec, data = held
    return np.frombuffer(data, f"u{DTYPE_BITS[spec.dtype] // 8}").reshape(spec.shape)


def _held(spec: TensorSpec, words: np.ndarray) -> Held:
    return TensorSpec(spec.dtype, words.shape), np.ascontiguousarray(words).tobytes()


def _columns_swapped(held: Held) -> Held:
    left, right = np.split(_words(held), 2, axis=1)
    return _held(held[0], np.concatenate([right, left], axis=1))


def _rope_last(held: Held, head: int, rope: int) -> Held:
    words = _words(held)
    heads = words.reshape(-1, head, *words.shape[1:])
    turned = np.concatenate([heads[:, rope:], heads[:, :rope]], axis=1)
    return _held(held[0], turned.reshape(words.shape))
