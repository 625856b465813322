"""Comparing two configs as raw JSON: what loaders act on must be the same, the rest may differ."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mtpconv.audit.codes import finding
from mtpconv.audit.finding import Finding, Severity

Config = Mapping[str, Any]
#: Keys from the outside in; a key may hold a dot, so they are joined for show only.
Path = tuple[str, ...]
Flat = dict[Path, Any]


class Absent:
    """Stands for a field that is not there; 0 and null are something else."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = Absent()

#: Fields whose change changes what is loaded or computed, by the last part of their path.
#: Everything about MTP is strict: 0, null and absent are different things.
_MTP = re.compile(r"(^|[._])mtp([._]|$)|nextn")
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
    yield from _compare_rope(old, new)


def _severity(path: Path, a: Any, b: Any, requantised: bool) -> Severity | None:
    field = path[-1]
    if any(map(_MTP.search, path)):
        return None if same_json(a, b, exact=True) else "error"
    if same_json(a, b) or field in _COSMETIC or (_is_nothing(a) and _is_nothing(b)):
        return None
    if any(q in path for q in _QUANTISATION):
        return "warning" if requantised else "error"
    if _rope_place(path) is not None:
        return None  # compared by meaning below
    if field == "dtype":
        return None if _is_nothing(a) or _is_nothing(b) else "warning"
    if _STRICT.search(field) or field in _ARCHITECTURE:
        return "error"
    return "warning"


def _mismatch(path: Path, a: Any, b: Any, severity: Severity) -> Finding:
    name = _dotted(path)
    message = f"{name} was {shown(a)} and is {shown(b)}; restore it from the reference"
    before, after = (None if x is ABSENT else x for x in (a, b))
    return finding(
        "config_mismatch", severity, message, field=name, before=before, after=after,
        file="config.json",
    )  # fmt: skip


def _dotted(path: Path) -> str:
    return ".".join(f'"{key}"' if "." in key else key for key in path)


def _flatten(config: Config, outer: Path = ()) -> Flat:
    out: Flat = {}
    for key, value in config.items():
        if key == "torch_dtype":
            key = "dtype"
        if key == "dtype" and isinstance(value, str):
            value = value.removeprefix("torch.")
        path = (*outer, key)
        whole = key in _QUANTISATION or not isinstance(value, dict) or len(outer) > _MAX_LEVELS
        if whole or not value:
            out[path] = value
        else:
            out.update(_flatten(value, path))
    return out


def _open_quantisation(old: Flat, new: Flat) -> None:
    """Where both sides have a quantisation config, compare its fields one by one."""
    for path in [p for p in old if p[-1] in _QUANTISATION]:
        a, b = old[path], new.get(path)
        if isinstance(a, dict) and isinstance(b, dict):
            for flat, value in ((old, a), (new, b)):
                del flat[path]
                flat.update(_flatten(value, path))


def _compare_rope(old: Flat, new: Flat) -> Iterator[Finding]:
    """Every rope parameter by meaning.

    transformers 5 moved rope_theta and rope_scaling into rope_parameters and renamed `type`
    to `rope_type`; the same numbers in either form are no difference. Where one side says a
    parameter several times and not the same, loaders take different ones: then it is
    compared as written.
    """
    before, after = _rope(old), _rope(new)
    for place in sorted(before.keys() | after.keys()):
        there, here = before.get(place, {}), after.get(place, {})
        a, b = _meaning(place, there), _meaning(place, here)
        if not same_json(a, b):
            paths = [p for p in (*there, *here) if not same_json(there.get(p), here.get(p))]
            yield _mismatch(paths[0], a, b, "error")


def _rope(flat: Flat) -> dict[Path, Flat]:
    """What is said about each rope parameter, by level and new name: path as written -> value."""
    found: dict[Path, Flat] = {}
    for path, value in flat.items():
        place = _rope_place(path)
        if place is None or any(q in path for q in _QUANTISATION) or any(map(_MTP.search, path)):
            continue
        if place[-1] == "rope_type" and value is None:
            value = "default"
        if value is not None and value != {}:
            found.setdefault(place, {})[path] = value
    return found


def _rope_place(path: Path) -> Path | None:
    """Level and new name of a rope parameter; None for other fields."""
    bag = next((i for i, key in enumerate(path) if key in _ROPE_BAGS), None)
    if bag is None:
        return path if path[-1] in _ROPE_TOP else None
    if bag == len(path) - 1:
        return path  # a word or a list where the parameters should be
    *inside, last = path[bag + 1 :]
    return (*path[:bag], *inside, "rope_type" if last == "type" else last)


def _meaning(place: Path, said: Flat) -> Any:
    """The value on which all places agree; all of them as written if they do not."""
    values = list(said.values())
    if not all(same_json(values[0], v) for v in values):
        return {_dotted(path): value for path, value in said.items()}
    is_default = place[-1] == "rope_type" and values[:1] == ["default"]
    return values[0] if values and not is_default else ABSENT


def same_json(a: Any, b: Any, *, exact: bool = False) -> bool:
    """Whether two JSON values are equal; `true` is never 1, and `exact` keeps 1 and 1.0 apart."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_json(a[k], b[k], exact=exact) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(
            same_json(x, y, exact=exact) for x, y in zip(a, b, strict=True)
        )
    if type(a) is not type(b) and (exact or bool in (type(a), type(b))):
        return False
    return a is b or bool(a == b) or bool(a != a and b != b)


def _is_nothing(value: Any) -> bool:
    return value is ABSENT or value is None


def shown(value: Any) -> str:
    """A value of a config in a message."""
    if value is ABSENT:
        return "absent"
    if value is None:
        return "null"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
