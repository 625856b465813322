"""A config.json as numbers: layers, depths, dims and per-layer facts.

The only place that knows how families spell their configs. The config is read as raw JSON:
transformers' AutoConfig invents `num_nextn_predict_layers = 1` for deepseek_v3 and glm4_moe
when the field is absent, and 0, null and absent must stay three different things here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mtpconv.errors import RefusedError, UnsupportedError

Config = Mapping[str, Any]

#: Config fields that promise MTP depths, in the order in which they are looked for.
#: Source: families.md section 1; transformers 5.24 `num_mtp_layers` is an alias.
MTP_FIELDS = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_modules",
    "num_mtp_layers",
    "mtp_num_layers",
)

#: Spellings of the number of routed experts.
EXPERT_FIELDS = (
    "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts",
)  # fmt: skip

#: transformers dtype names to safetensors ones.
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}


@dataclass(frozen=True)
class Geometry:
    """The numbers of one model.

    `layers` counts the trunk, `depths` the MTP modules; layer number of depth d is
    `layers + d`. `config` is the whole config, `text` the part that describes the decoder
    (`text_config` in multimodal wrappers, else the config itself).
    """

    model_type: str
    config: Config
    text: Config
    layers: int
    depths: int
    experts: int
    #: The field that promises `depths`, None if the config has none (the table's default).
    mtp_field: str | None

    @cached_property
    def dtype(self) -> str:
        """safetensors name of the dtype the config names; BF16 if it names none."""
        named = self.text.get("dtype", self.text.get("torch_dtype"))
        if named is None:
            named = self.config.get("dtype", self.config.get("torch_dtype", "bfloat16"))
        dtype = DTYPES.get(str(named).removeprefix("torch."))
        if dtype is None:
            raise UnsupportedError(
                f"config.json: dtype {named!r} is not one of {', '.join(DTYPES)}"
            )
        return dtype

    def dim(self, expression: str) -> int:
        """Value of a dim: a sum of products of integers, config fields and derived dims.

        Raises: RefusedError if the config lacks a field that the expression names.
        """
        cached = self._dims.get(expression)
        if cached is None:
            cached = 0
            for term in expression.split("+"):
                product = 1
                for name in term.split("*"):
                    product *= self._atom(name.strip())
                cached += product
            self._dims[expression] = cached
        return cached

    @cached_property
    def _dims(self) -> dict[str, int]:
        return {}

    def _atom(self, name: str) -> int:
        if name.isdigit():
            return int(name)
        derived = _DERIVED.get(name)
        if derived is not None:
            return derived(self)
        return require_int(self.text, name, self.model_type)

    def fact(self, name: str, layer: int) -> bool:
        """Truth of a named fact for a layer (a depth d is layer `layers + d`).

        Raises: KeyError if there is no such fact; the static rules report it before.
        """
        return FACTS[name](self, layer)

    def is_mtp(self, layer: int) -> bool:
        """True for the layer numbers of MTP depths."""
        return layer >= self.layers


def read_geometry(config: Config, mtp_default: int | None = None) -> Geometry:
    """The geometry of a raw config.

    `mtp_default` is the number of depths that a family ships although its config has no
    field for it; None means that an absent field promises none.

    Raises: RefusedError if a field the geometry needs is missing or not a number.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise RefusedError("config.json: no model_type; mtpconv cannot know the architecture")
    text = text_config(config)
    layers = require_int(text, "num_hidden_layers", model_type)
    field = next((f for f in MTP_FIELDS if f in text), None)
    if field is None:
        depths = mtp_default or 0
    else:
        depths = 0 if text[field] is None else require_int(text, field, model_type)
    experts = next((f for f in EXPERT_FIELDS if text.get(f) is not None), None)
    return Geometry(
        model_type=model_type,
        config=config,
        text=text,
        layers=layers,
        depths=depths,
        experts=require_int(text, experts, model_type) if experts else 0,
        mtp_field=field,
    )


def text_config(config: Config) -> Config:
    """The part of a config that describes the decoder."""
    for name in ("text_config", "llm_config", "language_config"):
        inner = config.get(name)
        if isinstance(inner, Mapping) and "num_hidden_layers" in inner:
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
    # A count that no model has would make the expansion run out of memory.
    if value > 1 << 32:
        raise RefusedError(f"config.json: {name} is {value}; no model is that large")
    return value


def _head_dim(g: Geometry) -> int:
    explicit = g.text.get("head_dim")
    if explicit is not None:
        return require_int(g.text, "head_dim", g.model_type)
    heads = require_int(g.text, "num_attention_heads", g.model_type)
    hidden = require_int(g.text, "hidden_size", g.model_type)
    if not heads or hidden % heads:
        raise RefusedError(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, "
            "and there is no head_dim"
        )
    return hidden // heads


def _key_value_heads(g: Geometry) -> int:
    """Query groups; a config without the field has one per head."""
    named = "num_key_value_heads" if g.text.get("num_key_value_heads") else "num_attention_heads"
    return require_int(g.text, named, g.model_type)


_DERIVED: Mapping[str, Callable[[Geometry], int]] = {
    "head_dim": _head_dim,
    "num_key_value_heads": _key_value_heads,
    "experts": lambda g: g.experts,
}


def _listed(g: Geometry, field: str, layer: int) -> Any:
    """Entry of a per-layer list in the config, None if there is no list or no entry."""
    value = g.text.get(field)
    if isinstance(value, list) and layer < len(value):
        return value[layer]
    return None


def _is_moe(g: Geometry, layer: int) -> bool:
    if not g.experts:
        return False
    kind = _listed(g, "mlp_layer_types", layer)
    if kind is not None:
        return bool(kind != "dense")
    dense = g.text.get("first_k_dense_replace") or 0
    frequency = g.text.get("moe_layer_freq") or 1
    if isinstance(frequency, list):
        return bool(frequency[layer]) if layer < len(frequency) else True
    if g.is_mtp(layer):
        return True
    return layer >= dense and layer % frequency == 0


def _has_indexer(g: Geometry, layer: int) -> bool:
    if "index_topk" not in g.text:
        return False
    if g.is_mtp(layer):
        return True
    kind = _listed(g, "indexer_types", layer)
    if kind is not None:
        return bool(kind != "shared")
    # Source: transformers 5.24 configuration_glm_moe_dsa.py; the offset's default is 2 there.
    pattern = g.text.get("index_topk_pattern")
    if isinstance(pattern, str) and layer < len(pattern):
        return pattern[layer] == "F"
    frequency = max(g.text.get("index_topk_freq") or 1, 1)
    offset = g.text.get("index_skip_topk_offset", 2)
    return bool(max(layer - offset + 1, 0) % frequency == 0)


def _says(*fields: str) -> Callable[[Geometry, int], bool]:
    """True where the config sets one of these fields to something true."""
    return lambda g, layer: any(bool(g.text.get(f)) for f in fields)


def _is_tied(g: Geometry, layer: int) -> bool:
    del layer
    return bool(g.config.get("tie_word_embeddings", g.text.get("tie_word_embeddings", False)))


#: The closed list of facts a table may name. Law: a pure function of config and layer.
FACTS: Mapping[str, Callable[[Geometry, int], bool]] = {
    "is_moe": _is_moe,
    "is_dense": lambda g, layer: not _is_moe(g, layer),
    "has_indexer": _has_indexer,
    "is_tied": _is_tied,
    "has_shared_experts": _says("n_shared_experts", "num_shared_experts"),
    "has_qk_norm": _says("use_qk_norm"),
    "has_qkv_bias": _says("attention_bias", "use_qkv_bias", "qkv_bias"),
    "is_mtp": lambda g, layer: g.is_mtp(layer),
}
