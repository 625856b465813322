"""config.json as it is written where it had to change: without MTP, without quantisation."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from mtpconv.audit.promise import COUNT_FIELDS
from mtpconv.geometry import MTP_FIELDS, text_config
from mtpconv.store.fp8_tensors import SCALE, quantisation, without_quantisation

#: Lists in a quantisation config that name modules left unquantised.
#: Source: transformers 5.24 FineGrainedFP8Config; vLLM and compressed-tensors spellings.
_LISTS = ("modules_to_not_convert", "ignored_layers", "ignore")


def changed_config(
    config: Mapping[str, Any],
    *,
    drop_mtp: bool,
    bf16: bool,
    dropped: Iterable[str] = (),
    left: Iterable[str] = (),
) -> dict[str, Any] | None:
    """The config of what is written; None if that is the source's, byte for byte.

    With `drop_mtp` every field that promises MTP is 0 (one is added if there is none: loaders take
    an absent field for 1), and modules that had only `dropped`
    tensors, none that is `left`, leave the list of unquantised modules. With `bf16` the
    quantisation config is gone.
    """
    new = dict(config)
    if drop_mtp:
        new = _without_modules(_without_promise(new), _modules(dropped) - _modules(left))
    if bf16 and quantisation(config):
        new = without_quantisation(new)
    return new if drop_mtp or new != config else None


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """A changed config as a file."""
    text = json.dumps(config, indent=2, ensure_ascii=False)
    try:
        return f"{text}\n".encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can hold
        return f"{json.dumps(config, indent=2)}\n".encode()


def _without_promise(config: Mapping[str, Any]) -> dict[str, Any]:
    said = {**dict.fromkeys(COUNT_FIELDS, 0), "use_mtp": False}

    def cleared(value: Mapping[str, Any]) -> dict[str, Any]:
        return {
            k: said[k] if k in said else cleared(v) if isinstance(v, Mapping) else v
            for k, v in value.items()
        }

    text = text_config(config)
    if any(f in text for f in COUNT_FIELDS):
        return cleared(config)
    counted = {**text, MTP_FIELDS[0]: 0}
    if text is config:
        return cleared(counted)
    return cleared({k: counted if v is text else v for k, v in config.items()})


def _modules(names: Iterable[str]) -> set[str]:
    """Every module that holds one of these tensors."""
    parts = (n.removesuffix(SCALE).split(".") for n in names)
    return {".".join(p[:i]) for p in parts for i in range(1, len(p) + 1)}


def _without_modules(config: Mapping[str, Any], gone: Collection[str]) -> dict[str, Any]:
    def cleared(value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, inner in value.items():
            if isinstance(inner, Mapping):
                yield key, dict(cleared(inner))
            elif key in _LISTS and isinstance(inner, list):
                yield key, [m for m in inner if m not in gone]
            else:
                yield key, inner

    return dict(cleared(config))
