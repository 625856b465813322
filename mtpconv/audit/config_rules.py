"""Comparing two configs as raw JSON: what loaders act on must be the same, the rest may differ."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mtpconv.audit.codes import finding
from mtpconv.audit.finding import Finding, Severity

Config = Mapping[str, Any]
Flat = dict[str, Any]


class Absent:
    """Stands for a field that is not there; 0 and null are something else."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = Absent()

#: Fields whose change changes what is loaded or computed, by the last part of their path.
#: Everything about MTP is strict: 0, null and absent are different things.
_MTP = re.compile(r"(^|_)mtp(_|$)|nextn")
_STRICT = re.compile(
    r"vocab_size|tie_(word_embeddings|encoder|embeddings)|^rope_|^rotary_|partial_rotary|"
    r"^model_type$|^architectures$|^auto_map$"
)
#: Fields that change the forward pass although every tensor still fits.
_ARCHITECTURE = frozenset((
    "num_hidden_layers", "hidden_size", "intermediate_size", "moe_intermediate_size",
    "num_attention_heads", "num_key_value_heads", "head_dim", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts", "num_experts",
    "num_local_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group",
    "first_k_dense_replace", "moe_layer_freq", "layer_types", "mlp_layer_types", "indexer_types",
    "index_topk", "index_n_heads", "index_head_dim", "index_topk_freq",
    "index_skip_topk_offset", "index_topk_pattern", "scoring_func", "topk_method",
    "norm_topk_prob", "routed_scaling_factor", "rms_norm_eps", "layer_norm_eps", "hidden_act",
    "attention_bias", "sliding_window", "full_attention_interval", "max_position_embeddings",
))  # fmt: skip
#: Never worth a word: what every save rewrites.
_COSMETIC = frozenset((
    "transformers_version", "_name_or_path", "_commit_hash", "use_cache", "_attn_implementation",
    "_attn_implementation_autoset", "return_dict", "output_attentions", "output_hidden_states",
    "gradient_checkpointing", "unsloth_version",
))  # fmt: skip
_QUANTISATION = ("quantization_config", "compression_config")
_ROPE_BAGS = ("rope_parameters", "rope_scaling")
_MAX_LEVELS = 8
_ROPE_TOP = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


def compare_configs(
    before: Config, after: Config, *, tensors_requantised: bool
) -> Iterator[Finding]:
    """Differences between two configs; cosmetic ones are left out.

    `tensors_requantised` says that the tensor findings already report quantised tensors that
    changed dtype; a changed quantisation config then follows from them and is a warning.
    """
    old, new = _flatten(before), _flatten(after)
    _open_quantisation(old, new)
    for path in sorted(old.keys() | new.keys()):
        a, b = old.get(path, ABSENT), new.get(path, ABSENT)
        severity = _severity(path, a, b, tensors_requantised)
        if severity is not None:
            yield _mismatch(path, a, b, severity)
    yield from _compare_rope(before, after)


def _severity(path: str, a: Any, b: Any, requantised: bool) -> Severity | None:
    field = path.rpartition(".")[2]
    parts = path.split(".")
    if _same(a, b) or field in _COSMETIC:
        return None
    if _MTP.search(field):
        return "error"
    if _is_nothing(a) and _is_nothing(b):
        return None
    if any(bag in parts for bag in _ROPE_BAGS) or field in _ROPE_TOP:
        return None  # compared by meaning below
    if any(q in parts for q in _QUANTISATION):
        return "warning" if requantised else "error"
    if field == "dtype":
        return None if _is_nothing(a) or _is_nothing(b) else "warning"
    if _STRICT.search(field) or field in _ARCHITECTURE:
        return "error"
    return "warning"


def _mismatch(path: str, a: Any, b: Any, severity: Severity) -> Finding:
    message = f"{path} was {_shown(a)} and is {_shown(b)}; restore it from the reference"
    before, after = (None if x is ABSENT else x for x in (a, b))
    return finding(
        "config_mismatch", severity, message, field=path, before=before, after=after,
        file="config.json",
    )  # fmt: skip


def _flatten(config: Config, prefix: str = "", depth: int = 0) -> Flat:
    out: Flat = {}
    for key, value in config.items():
        if key == "torch_dtype":
            key = "dtype"
        if key == "dtype" and isinstance(value, str):
            value = value.removeprefix("torch.")
        path = prefix + key
        whole = key in _QUANTISATION or not isinstance(value, dict) or depth > _MAX_LEVELS
        if whole or not value:
            out[path] = value
        else:
            out.update(_flatten(value, path + ".", depth + 1))
    return out


def _open_quantisation(old: Flat, new: Flat) -> None:
    """Where both sides have a quantisation config, compare its fields one by one."""
    for path in [p for p in old if p.rpartition(".")[2] in _QUANTISATION]:
        a, b = old[path], new.get(path)
        if isinstance(a, dict) and isinstance(b, dict):
            for flat, value in ((old, a), (new, b)):
                del flat[path]
                flat.update(_flatten(value, path + "."))


def _compare_rope(before: Config, after: Config) -> Iterator[Finding]:
    old, new = dict(_rope(before)), dict(_rope(after))
    for key in sorted(old.keys() | new.keys()):
        path_a, a = old.get(key, ("", ABSENT))
        path_b, b = new.get(key, ("", ABSENT))
        if not _same(a, b):
            yield _mismatch(path_a or path_b, a, b, "error")


def _rope(config: Config, prefix: str = "") -> Iterator[tuple[str, tuple[str, Any]]]:
    """Every rope parameter by meaning: (level and name) -> (path as written, value).

    transformers 5 moved rope_theta and rope_scaling into rope_parameters and renamed `type`
    to `rope_type`; the same numbers in either form are no difference.
    """
    inside: set[str] = set()
    for key in _ROPE_BAGS:
        bag = config.get(key)
        for path, leaf in _flatten(bag).items() if isinstance(bag, dict) else ():
            name = re.sub(r"(^|\.)type$", r"\1rope_type", path)
            if leaf is None or (name.endswith("rope_type") and leaf == "default"):
                continue
            inside.add(name)
            yield f"{prefix}{name}", (f"{prefix}{key}.{path}", leaf)
    for key, value in config.items():
        if key in _ROPE_TOP and value is not None:
            # Beside a bag that says it too, the one outside is something else.
            meaning = f"{key} outside" if key in inside else key
            yield f"{prefix}{meaning}", (f"{prefix}{key}", value)
        elif (
            isinstance(value, dict)
            and key not in (*_QUANTISATION, *_ROPE_BAGS)
            and prefix.count(".") < _MAX_LEVELS
        ):
            yield from _rope(value, f"{prefix}{key}.")


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, bool) != isinstance(b, bool):
        return False
    return a is b or bool(a == b)


def _is_nothing(value: Any) -> bool:
    return value is ABSENT or value is None


def _shown(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    if value is None:
        return "null"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
