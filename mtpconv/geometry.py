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
#: Source: families.md section 1; transformers 5.24 `num_mtp_layers` is an alias. MiniMax's
#: `num_mtp_modules` is left out: its releases say 3 and ship no MTP tensor.
MTP_FIELDS = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_layers",
    "mtp_num_layers",
)

#: Spellings of the number of routed experts.
EXPERT_FIELDS = (
    "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts",
)  # fmt: skip

#: Spellings of the number of shared experts.
SHARED_FIELDS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")

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
        """The safetensors name of the dtype the config names; BF16 if it names none."""
        named = self.text.get("dtype", self.text.get("torch_dtype"))
        if named is None:
            named = self.config.get("dtype", self.config.get("torch_dtype", "bfloat16"))
        dtype = DTYPES.get(str(named).removeprefix("torch."))
        if dtype is None:
            raise UnsupportedError(
                f"config.json: dtype {named!r} is not one of {', '.join(DTYPES)}"
            )
        return dtype

    def dim(self, expression: str, layer: int = 0) -> int:
        """Value of a dim: a sum of products of integers, config fields and derived dims.

        Depends on the layer only through `is_sliding`: sliding-window layers may have heads of
        their own. Raises: RefusedError if the config lacks a field that the expression names.
        """
        key = (expression, self.is_sliding(layer))
        cached = self._dims.get(key)
        if cached is None:
            cached = 0
            for term in expression.split("+"):
                product = 1
                for name in term.split("*"):
                    product *= self._atom(name.strip(), layer)
                cached += product
            self._dims[key] = cached
        return cached

    @cached_property
    def _dims(self) -> dict[tuple[str, bool], int]:
        return {}

    def _atom(self, name: str, layer: int) -> int:
        if name.isdigit():
            return int(name)
        derived = _DERIVED.get(name)
        if derived is not None:
            return derived(self, layer)
        return require_int(self.text, name, self.model_type)

    def fact(self, name: str, layer: int) -> bool:
        """Truth of a named fact for a layer (a depth d is layer `layers + d`).

        Raises: KeyError if there is no such fact; the static rules report it before.
        """
        return FACTS[name](self, layer)

    @cached_property
    def mtp_inner(self) -> int:
        """Layers within one MTP depth: 1, or the length of Nemotron-H's MTP pattern."""
        return max(1, len(_pattern(self.text, MTP_PATTERN_FIELDS) or ()))

    def is_mtp(self, layer: int) -> bool:
        """True for the layer numbers of MTP depths."""
        return layer >= self.layers

    def is_sliding(self, layer: int) -> bool:
        """True for layers with sliding-window attention."""
        pattern = self.text.get("hybrid_layer_pattern")
        if isinstance(pattern, list):  # MiMo-V2: 1 is sliding; all its MTP depths are
            return self.is_mtp(layer) or (layer < len(pattern) and pattern[layer] == 1)
        return bool(_listed(self, "layer_types", layer) == "sliding_attention")


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
    layers = _layers(text, model_type)
    field = next((f for f in MTP_FIELDS if f in text), None)
    if field is None:
        depths = mtp_default or 0
    else:
        depths = 0 if text[field] is None else require_int(text, field, model_type)
        if text.get("mtp_use_repeated_layer"):  # one physical block, used again and again
            depths = min(depths, 1)
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


#: Nemotron-H: one letter or word for each layer, of the trunk and of one MTP depth.
PATTERN_FIELDS = ("hybrid_override_pattern", "layers_block_type")
MTP_PATTERN_FIELDS = ("mtp_hybrid_override_pattern", "mtp_layers_block_type")


def _pattern(text: Config, fields: tuple[str, ...]) -> str | list[Any] | None:
    found = (text.get(f) for f in fields)
    return next((p for p in found if isinstance(p, str | list) and p), None)


def _layers(text: Config, model_type: str) -> int:
    pattern = _pattern(text, PATTERN_FIELDS)
    if pattern is not None:
        return len(pattern)
    only = "num_layers" in text and "num_hidden_layers" not in text  # LongCat
    named = "num_layers" if only else "num_hidden_layers"
    return require_int(text, named, model_type)


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
    # A count that no model has would make the expansion run out of memory.
    if value > 1 << 32:
        raise RefusedError(f"config.json: {name} is {value}; no model is that large")
    return value


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
    if g.is_sliding(layer):
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


def _values_per_key_head(g: Geometry, layer: int) -> int:
    """Value heads for each key head of a gated delta net."""
    keys = require_int(g.text, "linear_num_key_heads", g.model_type)
    values = require_int(g.text, "linear_num_value_heads", g.model_type)
    if not keys or values % keys:
        raise RefusedError(
            f"config.json: linear_num_value_heads {values} is not a multiple of "
            f"linear_num_key_heads {keys}"
        )
    return values // keys


_DERIVED: Mapping[str, Callable[[Geometry, int], int]] = {
    "head_dim": _head_dim,
    "v_head_dim": _value_head_dim,
    "num_attention_heads": _heads,
    "num_key_value_heads": _key_value_heads,
    "experts": lambda g, layer: g.experts,
    "shared_experts_width": _shared_width,
    "expert_hidden_size": _expert_hidden_size,
    "values_per_key_head": _values_per_key_head,
}


def _listed(g: Geometry, field: str, layer: int) -> Any:
    """Entry of a per-layer list in the config, None if there is no list or no entry."""
    value = g.text.get(field)
    if isinstance(value, list) and layer < len(value):
        return value[layer]
    return None


def _is_moe(g: Geometry, layer: int) -> bool:
    """MoE or dense; for MTP layers meant for families whose MTP block is like the trunk's."""
    if not g.experts:
        return False
    kind = _listed(g, "mlp_layer_types", layer)
    if kind is not None:
        return bool(kind != "dense")
    frequency = g.text.get("moe_layer_freq") or 1
    if isinstance(frequency, list):
        return bool(frequency[layer]) if layer < len(frequency) else True
    if g.is_mtp(layer):
        return True
    for rule in (_moe_by_enumeration, _moe_by_sparse_step, _moe_by_range):
        known = rule(g, layer)
        if known is not None:
            return known
    return layer >= (g.text.get("first_k_dense_replace") or 0) and layer % frequency == 0


def _moe_by_enumeration(g: Geometry, layer: int) -> bool | None:
    named = g.text.get("moe_layers_enum")  # Step-3.5: "3,4,5,..."
    if named is None:
        return None
    return str(layer) in (named.split(",") if isinstance(named, str) else map(str, named))


def _moe_by_sparse_step(g: Geometry, layer: int) -> bool | None:
    if "decoder_sparse_step" not in g.text and "mlp_only_layers" not in g.text:  # Qwen
        return None
    step = g.text.get("decoder_sparse_step") or 1
    return layer not in (g.text.get("mlp_only_layers") or ()) and (layer + 1) % step == 0


def _moe_by_range(g: Geometry, layer: int) -> bool | None:
    if "moe_layer_start_index" not in g.text:  # ERNIE; transformers 5.24 modeling_ernie4_5_moe.py
        return None
    start, end = g.text["moe_layer_start_index"], g.text.get("moe_layer_end_index", -1)
    interval = g.text.get("moe_layer_interval") or 1
    inside = start <= layer <= (g.layers - 1 if end == -1 else end)
    return bool(inside and (layer + 1) % interval == 0)


def _is_linear(g: Geometry, layer: int) -> bool:
    """Linear attention (gated delta net); MTP blocks never have it."""
    if g.is_mtp(layer):
        return False
    kind = _listed(g, "layer_types", layer)
    if kind is not None:
        return bool(kind == "linear_attention")
    interval = g.text.get("full_attention_interval")
    return isinstance(interval, int) and interval > 0 and (layer + 1) % interval != 0


def _has_sink(g: Geometry, layer: int) -> bool:
    """A learned softmax offset for each head (MiMo-V2: in its sliding layers)."""
    kind = "swa" if g.is_sliding(layer) else "full"
    return bool(g.text.get(f"add_{kind}_attention_sink_bias"))


#: Nemotron-H layer kinds: letter of the pattern, words of `layers_block_type`.
_HYBRID_KINDS: Mapping[str, tuple[str, ...]] = {
    "mamba": ("M", "mamba", "linear_attention"),
    "attention": ("*", "attention", "full_attention"),
    "mlp": ("-", "mlp"),
    "moe": ("E", "moe"),
}


def _hybrid(kind: str) -> Callable[[Geometry, int], bool]:
    def holds(g: Geometry, layer: int) -> bool:
        fields = MTP_PATTERN_FIELDS if g.is_mtp(layer) else PATTERN_FIELDS
        pattern = _pattern(g.text, fields)
        if pattern is None:
            return False
        return pattern[(layer - g.layers) % len(pattern)] in _HYBRID_KINDS[kind]

    return holds


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
    "is_linear": _is_linear,
    "is_sliding": lambda g, layer: g.is_sliding(layer),
    "has_sink": _has_sink,
    "is_hybrid_mamba": _hybrid("mamba"),
    "is_hybrid_attention": _hybrid("attention"),
    "is_hybrid_mlp": _hybrid("mlp"),
    "is_hybrid_moe": _hybrid("moe"),
    "has_shared_experts": _says(*SHARED_FIELDS),
    "has_latent_experts": _says("moe_latent_size"),
    "has_q_lora": _says("q_lora_rank"),
    "has_qk_norm": _says("use_qk_norm"),
    "has_qkv_bias": _says("attention_bias", "use_qkv_bias", "qkv_bias"),
    "is_mtp": lambda g, layer: g.is_mtp(layer),
    "is_first_inner": lambda g, layer: (layer - g.layers) % g.mtp_inner == 0,
    "is_last_inner": lambda g, layer: (layer - g.layers) % g.mtp_inner == g.mtp_inner - 1,
}
