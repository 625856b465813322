"""What a config promises about MTP, read as raw JSON at every nesting level.

0, null and absent are kept apart: loaders disagree on an absent field (transformers invents 1
for some families), while 0 and null say "none" to all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mtpconv.audit.names import PROMISED_BY_FAMILY, Naming
from mtpconv.geometry import MTP_FIELDS, text_config

Config = Mapping[str, Any]

#: Fields that count MTP depths. The last one is MiniMax's own spelling: its M2 releases say 3 and
#: ship no MTP tensor (MiniMax-M2.5 issue 8), which is why the converters do not count it; here it
#: is a promise like any other, and one that is known to be broken for that family.
COUNT_FIELDS = (*MTP_FIELDS, "num_mtp_modules")
_NEVER_SHIPPED = ("minimax_m2",)
#: Parts of a config that describe something other than the language model.
_ELSEWHERE = ("vision", "audio", "quantization", "speech", "generation", "draft")
_MAX_DEPTH = 6
_LAYER_FIELDS = ("num_hidden_layers", "num_layers", "n_layer")


@dataclass(frozen=True, slots=True)
class Promise:
    """What one config says about MTP."""

    model_type: str | None
    #: promised depths; None if no field says anything (or there is no config)
    depths: int | None
    #: every MTP count field found, by dotted path, with its raw value
    fields: tuple[tuple[str, Any], ...]
    #: num_hidden_layers; None if absent
    layers: int | None
    #: the family ships MTP although its config has no field for it
    by_family: bool
    #: the family's releases are known not to keep this promise
    never_shipped: bool = False
    #: faults of the fields themselves, one line each
    contradictions: tuple[tuple[str, str], ...] = ()

    @property
    def none_promised(self) -> bool:
        """Whether MTP tensors would be orphans."""
        return not self.depths and not self.by_family


def read_promise(config: Config | None) -> Promise:
    """What the config promises; a promise of nothing for an absent config."""
    if config is None:
        return Promise(None, None, (), None, False)
    model_type = config.get("model_type")
    kind = model_type if isinstance(model_type, str) else None
    fields = tuple(_count_fields(config, "", 0))
    faults: list[tuple[str, str]] = []
    counts: dict[str, int] = {}
    for path, value in fields:
        if value is None:
            counts[path] = 0
        elif type(value) is int and 0 <= value < 1000:
            counts[path] = value
        else:
            faults.append((path, f"{path} is {value!r}, not a number of MTP depths"))
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{p} = {n}" for p, n in counts.items())
        faults.append((next(iter(counts)), f"MTP count fields contradict each other: {shown}"))
    layers = _layers(config)
    by_family = not fields and kind is not None and kind.startswith(PROMISED_BY_FAMILY)
    depths = max(counts.values()) if counts else None
    if depths and text_config(config).get("mtp_use_repeated_layer"):
        depths = 1  # one physical block, used again and again
    never = kind is not None and kind.startswith(_NEVER_SHIPPED)
    return Promise(kind, depths, fields, layers, by_family, never, tuple(faults))


def unkept_promise(config: Config | None) -> str | None:
    """One line for a config that counts MTP depths that no release of its family ships."""
    promise = read_promise(config)
    if config is None or not (promise.never_shipped and promise.depths):
        return None
    said = [f"{path} = {value}" for path, value in promise.fields if value]
    said += [f"use_mtp = {json.dumps(config['use_mtp'])}"] if "use_mtp" in config else []
    return (
        f"config.json says {', '.join(said)}, and no release of {promise.model_type} ships MTP"
        " tensors: none are asked for"
    )


def naming_of(config: Config | None) -> Naming:
    """How names map to regions under this config."""
    if config is None:
        return Naming()
    pattern = text_config(config).get("mtp_hybrid_override_pattern")
    period = len(pattern) if isinstance(pattern, str) and pattern else 1
    return Naming(_layers(config), period)


def _layers(config: Config) -> int | None:
    for part in (text_config(config), config):
        for field in _LAYER_FIELDS:
            value = part.get(field)
            if type(value) is int and value >= 0:
                return value
    return None


def _count_fields(config: Config, prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if key in COUNT_FIELDS:
            yield prefix + key, value
        elif (
            isinstance(value, dict)
            and depth < _MAX_DEPTH
            and not any(word in key for word in _ELSEWHERE)
        ):
            yield from _count_fields(value, f"{prefix}{key}.", depth + 1)
