"""The HuggingFace side of parity: transformers' own trunk, and an MTP reference beside it.

transformers drops MTP layers at load. Where its `MtpModel` can be built (deepseek_v3,
glm4_moe) that is the reference; elsewhere the MTP layer is assembled here from the model's own
decoder layer class, norm class and embedding. The weights of either come straight from the
safetensors files. Nothing here is shared with the Megatron side.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpconv.errors import RefusedError, UnreadableError, UnsupportedError
from mtpconv.geometry import Geometry, text_config
from mtpconv.parity import runtime
from mtpconv.parity.families import FAMILIES, Family, family_of, geometry_of
from mtpconv.parity.hf_weights import HfWeights, module_state

#: What the constructors of transformers raise for a config that does not fit together.
_BAD_CONFIG = (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Depth:
    """One MTP depth of the reference: its modules, and the names of their weights on disk."""

    enorm: Any
    hnorm: Any
    eh_proj: Any
    block: Any
    final_norm: Any
    prefix: str
    glue: str
    family: Family

    def units(self) -> Iterator[tuple[Any, str]]:
        """Each module with its prefix on disk."""
        yield self.enorm, f"{self.glue}{self.family.enorm}."
        yield self.hnorm, f"{self.glue}{self.family.hnorm}."
        yield self.eh_proj, f"{self.glue}{self.family.eh_proj}."
        yield self.block, self.prefix
        yield self.final_norm, f"{self.glue}{self.family.final_norm}."


@dataclass(frozen=True)
class HfModel:
    """transformers' causal LM with the MTP depths of the same checkpoint."""

    trunk: Any
    depths: Sequence[Depth]
    geometry: Geometry
    #: what computes the MTP depths: `transformers MtpModel` or the class it is assembled from
    reference: str
    dtype: str
    #: where the weights come from, None for a model made from a config alone
    weights: HfWeights | None
    #: transformers' own MTP model where it can be built, else None
    mtp_model: Any = None

    @property
    def decoder(self) -> Any:
        """The module that holds embedding, layers and final norm."""
        return self.trunk.get_decoder()

    def close(self) -> None:
        """Close the files of the weights."""
        if self.weights is not None:
            self.weights.close()


def hf_config(config: Mapping[str, Any]) -> Any:
    """Transformers' config object; a family it does not know runs as the one that equals it.

    Raises: UnsupportedError if transformers has no such model.
    """
    from transformers import AutoConfig

    name = str(config["model_type"])
    runs_as = FAMILIES[name].runs_as if name in FAMILIES else None
    fields = {key: value for key, value in text_config(config).items() if key != "model_type"}
    try:
        return AutoConfig.for_model(runs_as or name, **fields)
    except ValueError as error:
        raise UnsupportedError(f"transformers does not know {name}: {error}") from error


def load_hf(folder: Path, dtype: str = "float32", device: str = "cpu") -> HfModel:
    """The whole model with its weights.

    Raises: UnreadableError if transformers cannot load the folder; RefusedError if the trunk or
    a promised depth lacks a tensor.
    """
    runtime.require("torch", "transformers")
    import torch
    from transformers import AutoModelForCausalLM

    weights, geometry = _open(folder)
    if weights.has_fp8:  # transformers would take codes for numbers
        return _loaded(empty_hf(folder, dtype, device), device)
    with quiet():
        try:
            trunk, info = AutoModelForCausalLM.from_pretrained(
                folder,
                config=hf_config(geometry.config),
                dtype=getattr(torch, dtype),
                attn_implementation="eager",
                experts_implementation="eager",
                output_loading_info=True,
                local_files_only=True,
            )
        except (OSError, *_BAD_CONFIG) as error:
            raise UnreadableError(f"{folder}: transformers cannot load it: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise RefusedError(f"{folder}: {len(missing)} tensors are missing, first {missing[0]}")
    trunk = trunk.to(device).eval().requires_grad_(False)
    model = with_depths(trunk, geometry, weights, dtype)
    for depth in model.depths:
        for module, prefix in depth.units():
            state = unit_state(model, module, prefix)
            module.load_state_dict(state, strict=True)
            module.to(device)
    return model


def _loaded(model: HfModel, device: str) -> HfModel:
    """An empty model with the weights of its folder."""
    for module, prefix in (*trunk_units(model), *depth_units(model)):
        state = {n: t.to(device) for n, t in unit_state(model, module, prefix).items()}
        module.load_state_dict(state, strict=True, assign=True)
    return model


def empty_hf(folder: Path, dtype: str = "float32", device: str = "cpu") -> HfModel:
    """The model without any weights, on the meta device, for reading a layer at a time."""
    runtime.require("torch", "transformers")
    import torch
    from transformers import AutoModelForCausalLM

    weights, geometry = _open(folder)
    with quiet():
        config = hf_config(geometry.config)
        with torch.device("meta"):
            trunk = AutoModelForCausalLM.from_config(
                config,
                dtype=getattr(torch, dtype),
                attn_implementation="eager",
                experts_implementation="eager",
            )
    decoder = trunk.get_decoder()
    # Rope frequencies are computed, not stored: they are the only buffers outside the units.
    decoder.rotary_emb = type(decoder.rotary_emb)(config=decoder.config).to(device)
    keep = set(getattr(trunk, "_keep_in_fp32_modules_strict", None) or ())
    for name, parameter in trunk.named_parameters():
        if any(pattern in name for pattern in keep):
            parameter.data = parameter.data.float()
    return with_depths(trunk.eval().requires_grad_(False), geometry, weights, dtype)


def unit_state(model: HfModel, module: Any, prefix: str) -> dict[str, Any]:
    """State dict of a module that lies under `prefix` on disk."""
    assert model.weights is not None
    family = family_of(model.geometry)
    if prefix == "lm_head." and "lm_head.weight" not in model.weights:
        prefix = f"{family.trunk}embed_tokens."
    return module_state(module, model.weights, prefix, family.loaded)


def trunk_units(model: HfModel) -> Iterator[tuple[Any, str]]:
    """Embedding, layers, final norm and head of the trunk, each with its prefix on disk."""
    decoder, at = model.decoder, family_of(model.geometry).trunk
    yield decoder.embed_tokens, f"{at}embed_tokens."
    for number, layer in enumerate(decoder.layers):
        yield layer, f"{at}layers.{number}."
    yield decoder.norm, f"{at}norm."
    yield model.trunk.lm_head, "lm_head."


def depth_units(model: HfModel) -> Iterator[tuple[Any, str]]:
    """The parts of every MTP depth, each with its prefix on disk."""
    for depth in model.depths:
        yield from depth.units()


def loader(model: HfModel, module: Any, prefix: str, device: str) -> Callable[[], dict[str, Any]]:
    """Reads the state dict of a module from disk when called."""

    def load() -> dict[str, Any]:
        state = unit_state(model, module, prefix)
        return {name: value.to(device) for name, value in state.items()}

    return load


def heads(model: HfModel, tokens: Any) -> dict[str, Any]:
    """Logits of every head for one row of tokens, in float32 on the CPU.

    Depth d stands at position t on the hidden state of t and the embedding of token t + 1 + d,
    so it has d + 1 positions fewer than the trunk.

    Shape: tokens [s]; each head [s or less, vocab].
    """
    import torch

    with torch.no_grad(), quiet():
        row = tokens[None].to(next(iter(model.decoder.rotary_emb.buffers())).device)
        hidden = model.decoder(row, use_cache=False).last_hidden_state
        logits = {"trunk": model.trunk.lm_head(hidden)}
        for number in range(len(model.depths)):
            hidden = depth_hidden(model, number, hidden[:, :-1], row[:, 1 + number :])
            logits[f"depth {number}"] = model.trunk.lm_head(hidden)
    return {head: value[0].float().cpu() for head, value in logits.items()}


def depth_hidden(model: HfModel, number: int, hidden: Any, following: Any) -> Any:
    """Hidden states of an MTP depth after its final norm.

    `hidden` is what the depth before (or the trunk) gave, `following` the tokens to embed.

    Shape: hidden [b, s, h], following [b, s]; result [b, s, h].
    """
    import torch

    # The block stands at the positions of the tokens it embeds.
    positions = torch.arange(following.shape[1], device=hidden.device)[None] + number + 1
    if model.mtp_model is not None:
        return model.mtp_model.forward_layer(number, hidden, positions, None, input_ids=following)
    depth = model.depths[number]
    halves = [depth.enorm(model.decoder.embed_tokens(following)), depth.hnorm(hidden)]
    if depth.family.hidden_first:
        halves.reverse()
    x = depth.eh_proj(torch.cat(halves, -1))
    out = depth.block(
        x,
        attention_mask=_causal_mask(x),
        position_ids=positions,
        position_embeddings=model.decoder.rotary_emb(x, position_ids=positions),
    )
    return depth.final_norm(out[0] if isinstance(out, tuple) else out)


def _causal_mask(x: Any) -> Any:
    """An additive causal mask in the dtype of the scores, as eager attention wants it."""
    import torch

    size = x.shape[1]
    mask = torch.full((size, size), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device)
    return mask.triu(1)[None, None]


def _open(folder: Path) -> tuple[HfWeights, Geometry]:
    weights = HfWeights(folder)
    config = weights.config
    if config is None:
        raise UnreadableError(f"{folder}: no readable config.json; parity cannot build the model")
    return weights, geometry_of(config, weights.names)


def with_depths(
    trunk: Any, geometry: Geometry, weights: HfWeights | None = None, dtype: str = "float32"
) -> HfModel:
    """The trunk with MTP depths whose weights are as their classes initialise them."""
    count = geometry.depths
    family = family_of(geometry)
    mtp_model = _transformers_mtp(trunk, count) if count else None
    depths = []
    for number in range(count):
        if mtp_model is not None:
            layer = mtp_model.layers[number]
            modules = (layer.enorm, layer.hnorm, layer.eh_proj, layer.mtp_block, layer.post_norm)
        else:
            modules = _assemble(trunk, geometry, number)
        depths.append(
            Depth(*modules, family.at(geometry, number), family.glue_at(geometry, number), family)
        )
    layer_class = type(trunk.get_decoder().layers[-1]).__name__
    reference = "transformers MtpModel" if mtp_model is not None else f"own, of {layer_class}"
    return HfModel(
        trunk, depths, geometry, reference if count else "none", dtype, weights, mtp_model
    )


def _transformers_mtp(trunk: Any, count: int) -> Any:
    """Transformers' own MTP model with empty weights, None where it cannot be built."""
    try:
        from transformers.modeling_layers import MtpModel

        trunk.config.get_mtp_config()
    except (ImportError, AttributeError, ValueError):
        return None
    with _like(trunk), quiet():
        model = MtpModel(trunk, count)
    return model.eval().requires_grad_(False)


def _assemble(trunk: Any, geometry: Geometry, number: int) -> tuple[Any, ...]:
    """Modules of one depth from the classes of the trunk, with empty weights."""
    import torch

    decoder = trunk.get_decoder()
    config = copy.deepcopy(decoder.config)
    index = geometry.layers + number
    config.num_hidden_layers = index + 1
    kinds = getattr(config, "layer_types", None) or ()
    for name, kind in (
        ("mlp_layer_types", "sparse" if geometry.fact("is_moe", index) else "dense"),
        ("indexer_types", "full"),
        # Where other layers are gated delta nets, depths have attention all the same.
        ("layer_types", "full_attention" if "linear_attention" in kinds else None),
    ):
        listed = getattr(config, name, None)
        if listed is not None:
            padding = kind or listed[-1]
            setattr(config, name, [*listed, *[padding] * (index + 1 - len(listed))])
    size, norm = config.hidden_size, type(decoder.norm)
    with _like(trunk):
        return (
            norm(size, eps=config.rms_norm_eps),
            norm(size, eps=config.rms_norm_eps),
            torch.nn.Linear(2 * size, size, bias=False),
            type(decoder.layers[-1])(config, index).eval(),
            norm(size, eps=config.rms_norm_eps),
        )


@contextmanager
def _like(trunk: Any) -> Iterator[None]:
    """New modules get the dtype and, on the meta device, the device of the trunk."""
    import torch

    weight = trunk.get_input_embeddings().weight
    before = torch.get_default_dtype()
    torch.set_default_dtype(weight.dtype)
    try:
        with torch.device("meta" if weight.is_meta else "cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def quiet() -> Iterator[None]:
    """Transformers prints load reports and progress bars; parity reports what matters itself."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
