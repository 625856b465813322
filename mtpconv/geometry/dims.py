"""Dims that take more than a look at one field: heads by layer kind, widths by spelling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mtpconv.errors import RefusedError
from mtpconv.geometry.config import require_int
from mtpconv.geometry.kinds import compress_ratio, is_sliding

if TYPE_CHECKING:
    from mtpconv.geometry.model import Geometry

#: Spellings of the number of shared experts.
SHARED_FIELDS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


def _head_dim(g: Geometry, layer: int) -> int:
    explicit = _of_layer(g, layer, "head_dim")
    if explicit is not None:
        return explicit
    heads = require_int(g.text, "num_attention_heads", g.model_type)
    hidden = require_int(g.text, "hidden_size", g.model_type)
    if not heads or hidden % heads:
        raise RefusedError(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, "
            "and there is no head_dim"
        )
    return hidden // heads


#: Where configs say what sliding-window layers have of their own: MiMo-V2 in fields with a
#: prefix, Step-3.5 in a section.
_SLIDING_PREFIX = "swa_"
_SLIDING_SECTION = "attention_other_setting"


def _of_layer(g: Geometry, layer: int, *fields: str) -> int | None:
    """The first of these fields that the config sets, for this kind of layer; None if none."""
    if is_sliding(g, layer):
        other = g.text.get(_SLIDING_SECTION)
        for field in fields:
            if isinstance(other, Mapping) and field in other:
                return require_int(other, field, g.model_type)
            if g.text.get(_SLIDING_PREFIX + field) is not None:
                return require_int(g.text, _SLIDING_PREFIX + field, g.model_type)
    named = next((f for f in fields if g.text.get(f) is not None), None)
    return None if named is None else require_int(g.text, named, g.model_type)


def _heads(g: Geometry, layer: int) -> int:
    heads = _of_layer(g, layer, "num_attention_heads")
    return require_int(g.text, "num_attention_heads", g.model_type) if heads is None else heads


def _key_value_heads(g: Geometry, layer: int) -> int:
    """Query groups; a config without the field has one per head."""
    groups = _of_layer(g, layer, "num_key_value_heads", "num_attention_groups")
    return _heads(g, layer) if groups is None else groups


def _value_head_dim(g: Geometry, layer: int) -> int:
    explicit = _of_layer(g, layer, "v_head_dim")
    return _head_dim(g, layer) if explicit is None else explicit


def _shared_width(g: Geometry, layer: int) -> int:
    """Rows of the shared expert: all shared experts side by side."""
    width = _of_layer(
        g, layer, "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
        "share_expert_dim", "share_expert_dims",
    )  # fmt: skip
    if width is not None:
        return width
    count = next((f for f in SHARED_FIELDS if g.text.get(f) is not None), SHARED_FIELDS[0])
    return require_int(g.text, count, g.model_type) * require_int(
        g.text, "moe_intermediate_size", g.model_type
    )


def _expert_hidden_size(g: Geometry, layer: int) -> int:
    """What routed experts read and write: the hidden size, or Nemotron's latent one."""
    latent = _of_layer(g, layer, "moe_latent_size")
    return latent or require_int(g.text, "hidden_size", g.model_type)


def _values_per_key_head(g: Geometry) -> int:
    """Value heads for each key head of a gated delta net."""
    keys = require_int(g.text, "linear_num_key_heads", g.model_type)
    values = require_int(g.text, "linear_num_value_heads", g.model_type)
    if not keys or values % keys:
        raise RefusedError(
            f"config.json: linear_num_value_heads {values} is not a multiple of "
            f"linear_num_key_heads {keys}"
        )
    return values // keys


def _heads_per_output_group(g: Geometry, layer: int) -> int:
    groups = require_int(g.text, "o_groups", g.model_type)
    heads = _heads(g, layer)
    if not groups or heads % groups:
        raise RefusedError(f"config.json: {heads} heads are no multiple of o_groups {groups}")
    return heads // groups


#: Dims that are no field, or not always the same field. Law: pure functions of config and layer.
DERIVED: Mapping[str, Callable[[Geometry, int], int]] = {
    "head_dim": _head_dim,
    "v_head_dim": _value_head_dim,
    "num_attention_heads": _heads,
    "num_key_value_heads": _key_value_heads,
    "experts": lambda g, layer: g.experts,
    "shared_experts_width": _shared_width,
    "expert_hidden_size": _expert_hidden_size,
    "values_per_key_head": lambda g, layer: _values_per_key_head(g),
    "compress_ratio": compress_ratio,
    # Ratio 4 keeps two halves, of this window and of the one before.
    "compressor_parts": lambda g, layer: 2 if compress_ratio(g, layer) == 4 else 1,
    "heads_per_output_group": _heads_per_output_group,
}
