"""Arguments in the making, and reading numbers for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mtpconv.errors import RefusedError
from mtpconv.geometry import Config, Geometry

Args = dict[str, Any]

#: Bases of rotary embeddings where transformers has another default than 10,000.
ROPE_THETA = {"hy_v3": 11_158_840.0, "minimax_m2": 5e6, "mixtral": 1e6}


@dataclass
class Draft:
    """Arguments in the making: `gaps` is what Megatron cannot be told, a line each."""

    geometry: Geometry
    args: Args
    gaps: list[str] = field(default_factory=list)

    @property
    def config(self) -> Config:
        """The part of the HF config that describes the decoder."""
        return self.geometry.text

    def dim(self, name: str) -> int:
        """A whole number of the config. Raises: RefusedError."""
        return self.geometry.dim(name)

    def named(self, *names: str) -> str:
        """The first of these spellings that the config sets, else the first of them."""
        return next((n for n in names if self.config.get(n) is not None), names[0])

    def only(self, name: str, known: Any, config: Config | None = None) -> None:
        """Note a field that has another value than Megatron can build."""
        value = (self.config if config is None else config).get(name)
        if value is not None and value != known:
            self.gaps.append(
                f"config.json: {name} = {value!r}: Megatron can build {self.geometry.model_type} "
                f"only with {known!r}"
            )


Part = Callable[[Draft], None]


def rope(d: Draft) -> Args:
    """Rope parameters as transformers 5 spells them, whichever spelling the config has."""
    c = d.config
    found = {n: c[n] for n in ("rope_theta", "partial_rotary_factor") if c.get(n) is not None}
    for name in ("rope_scaling", "rope_parameters"):
        block = c.get(name)
        if isinstance(block, Mapping):
            found |= {k: v for k, v in block.items() if v is not None}
    found.setdefault("rope_theta", ROPE_THETA.get(d.geometry.model_type, 1e4))
    found.setdefault("rope_type", found.get("type", "default"))
    for name in ("rope_theta", "partial_rotary_factor"):
        if isinstance(found.get(name), list):  # Step-3.5
            gap = f"config.json: {name} differs by layer; Megatron has one for all"
            d.gaps += [gap] if gap not in d.gaps else []
            found[name] = next(iter(found[name]), None)
    return found


def number(config: Config, name: str, default: float | None = None) -> float:
    """A field as a float. Raises: RefusedError if it is absent or no finite number."""
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        shown = "missing" if value is None else repr(value)
        raise RefusedError(f"config.json: {name} is {shown}; Megatron needs it as a number")
    return float(value)
