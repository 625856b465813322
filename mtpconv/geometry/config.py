"""Reading fields of a raw config.json: numbers, patterns, the part that describes the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mtpconv.errors import RefusedError

if TYPE_CHECKING:
    from mtpconv.geometry.model import Geometry

Config = Mapping[str, Any]

#: Nemotron-H: one letter or word for each layer, of the trunk and of one MTP depth.
PATTERN_FIELDS = ("hybrid_override_pattern", "layers_block_type")
MTP_PATTERN_FIELDS = ("mtp_hybrid_override_pattern", "mtp_layers_block_type")


def text_config(config: Config) -> Config:
    """The part of a config that describes the decoder."""
    for name in ("text_config", "llm_config", "language_config"):
        inner = config.get(name)
        if isinstance(inner, Mapping) and ("num_hidden_layers" in inner or "num_layers" in inner):
            return inner
    return config


def require_int(config: Config, name: str, model_type: str) -> int:
    """A non-negative integer field of the config.

    Raises: RefusedError if it is absent or something else.
    """
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        shown = "missing" if name not in config else repr(value)
        raise RefusedError(
            f"config.json: {name} is {shown}; {model_type} needs it as a whole number"
        )
    if value > 1 << 32:
        raise RefusedError(f"config.json: {name} is {value}; no model is that large")
    return value


def number(g: Geometry, name: str, default: int) -> int:
    """A field that a config may leave out or set to null.

    Raises: RefusedError if it is something other than a whole number.
    """
    return default if g.text.get(name) is None else require_int(g.text, name, g.model_type)


def pattern(text: Config, fields: tuple[str, ...]) -> str | list[Any] | None:
    """The first of these fields that has a letter or word for each layer."""
    found = (text.get(f) for f in fields)
    return next((p for p in found if isinstance(p, str | list) and p), None)


def listed(g: Geometry, field: str, layer: int) -> Any:
    """Entry of a per-layer list in the config, None if there is no list or no entry."""
    value = g.text.get(field)
    if isinstance(value, list) and layer < len(value):
        return value[layer]
    return None
