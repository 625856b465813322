"""The numbers of one model, read from its raw config.json."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mtpconv.errors import RefusedError, UnsupportedError
from mtpconv.geometry.config import (
    MTP_PATTERN_FIELDS,
    PATTERN_FIELDS,
    Config,
    pattern,
    require_int,
    text_config,
)
from mtpconv.geometry.dims import DERIVED
from mtpconv.geometry.facts import FACTS
from mtpconv.geometry.kinds import Kind, kind

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

#: More experts, over all layers, than any model has (GLM-5.2: 20,224): a config that says more
#: would make its expansion run out of memory.
MOST_EXPERTS = 1 << 20

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

        Depends on the layer only through its `kind`. Raises: RefusedError if the config lacks a
        field that the expression names.
        """
        key = (expression, self.kind(layer))
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
    def _dims(self) -> dict[tuple[str, Kind], int]:
        return {}

    def _atom(self, name: str, layer: int) -> int:
        if name.isdigit():
            return int(name)
        derived = DERIVED.get(name)
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
        return max(1, len(pattern(self.text, MTP_PATTERN_FIELDS) or ()))

    def is_mtp(self, layer: int) -> bool:
        """True for the layer numbers of MTP depths."""
        return layer >= self.layers

    def kind(self, layer: int) -> Kind:
        """What dims may depend on."""
        return kind(self, layer)


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
    named = next((f for f in EXPERT_FIELDS if text.get(f) is not None), None)
    experts = require_int(text, named, model_type) if named else 0
    if (layers + depths) * max(experts, 1) > MOST_EXPERTS:
        raise RefusedError(
            f"config.json: {layers} layers, {depths} MTP depths and {experts} experts; "
            "no model is that large"
        )
    return Geometry(
        model_type=model_type,
        config=config,
        text=text,
        layers=layers,
        depths=depths,
        experts=experts,
        mtp_field=field,
    )


def _layers(text: Config, model_type: str) -> int:
    kinds = pattern(text, PATTERN_FIELDS)
    if kinds is not None:
        return len(kinds)
    only = "num_layers" in text and "num_hidden_layers" not in text  # LongCat
    named = "num_layers" if only else "num_hidden_layers"
    return require_int(text, named, model_type)
