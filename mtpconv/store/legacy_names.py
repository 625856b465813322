"""Module names of a live Megatron model as sharded keys, and how ranks cut each tensor.

Source: megatron-core 0.16.1 and 0.19.2, the `sharded_state_dict` of the modules that are named
here (their `ShardedTensor` axes), read 2026-11-29.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mtpconv.errors import UnsupportedError

#: Which part of the whole tensor one tensor-parallel rank holds. `gated`: rows of the gate, then
#: as many rows of the up projection.
Cut = Literal["whole", "rows", "columns", "gated"]

_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.")
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<apart>\d{1,6})\.(?P<leaf>linear_fc[12]\.(?:weight|bias))"
    r"|(?P<grouped>linear_fc[12]\.(?:weight|bias))(?P<number>\d{1,6})"
    r"|(?P<packed>weight[12])\.(?P<entry>\d{1,6}))$"  # see legacy_experts
)
_ROWS = (
    "word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias",
    "linear_q_proj.weight", "linear_q_up_proj.weight", "linear_kv_up_proj.weight",
    "core_attention.softmax_offset",
)  # fmt: skip
_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
_GATED = ("linear_fc1.weight", "linear_fc1.bias")
_WHOLE = re.compile(
    r"(layer_?norm|norm)(_weight|_bias|\.weight|\.bias)$|\.router\.\w+$|\.indexer\.[\w.]+$"
    r"|linear_(proj|fc2)\.bias$|shared_experts\.gate_weight$"
    # slime: HF modules, and an indexer that is not parallel (layouts/slime_*.toml)
    r"|self_attention\.(linear_attn\.|(wq_b|wk|weights_proj)\.)"
)
#: Cut by rows in some versions and kept whole in others; their full size tells.
_EITHER: Mapping[str, tuple[str, ...]] = {
    "eh_proj.weight": ("hidden_size",),
    "linear_q_down_proj.weight": ("q_lora_rank",),
    "linear_kv_down_proj.weight": ("kv_lora_rank", "qk_pos_emb_head_dim"),
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module's tensor belongs: a key with the layer number left open, and an expert."""

    key: str
    layer: int | None
    expert: int | None

    def sharded_key(self, first_layer: int, first_expert: int) -> str:
        """The key, counted through all ranks."""
        key = self.key
        if self.layer is not None:
            key = key.replace("{layer}", str(first_layer + self.layer))
        if self.expert is not None:
            key = key.replace("{expert}", str(first_expert + self.expert))
        return key


def place_of(name: str) -> Place:
    """The place of a module name."""
    layer = expert = None
    found = _LAYER.search(name)
    if found is not None:
        layer = int(found[1])
        name = name[: found.start(1)] + "{layer}" + name[found.end(1) :]
    inner = _EXPERT.search(name)
    if inner is not None:
        expert = int(inner["apart"] or inner["number"] or inner["entry"])
        leaf = inner["leaf"] or inner["grouped"] or inner["packed"]
        name = f"{name[: inner.start()]}mlp.experts.experts.{{expert}}.{leaf}"
    return Place(name, layer, expert)


def cut_of(key: str, rows: int, ranks: int, args: Mapping[str, Any], where: str) -> Cut:
    """How `ranks` tensor-parallel ranks share a tensor of which one holds `rows` rows.

    Raises: UnsupportedError for a tensor that is not known.
    """
    if ranks == 1 or _WHOLE.search(key):
        return "whole"
    if key.endswith(_ROWS):
        return "rows"
    if key.endswith(_COLUMNS):
        return "columns"
    if key.endswith(_GATED):
        gated = args.get("swiglu") or args.get("gated_linear_unit")
        return "gated" if gated else "rows"
    for tail, sizes in _EITHER.items():
        if key.endswith(tail):
            full = [args.get(size) for size in sizes]
            if all(isinstance(n, int) for n in full):
                total = sum(n for n in full if isinstance(n, int))
                if rows in (total, total // ranks):
                    return "whole" if rows == total else "rows"
    raise UnsupportedError(
        f"{where}: how {ranks} tensor-parallel ranks share {key} is not known; save the "
        "checkpoint again with --ckpt-format torch_dist"
    )
