"""The Megatron side of parity: a real GPTModel with its MTP block, from a torch_dist folder.

Everything here runs inside `runtime.session`. The model is built from Megatron's own classes
(Transformer Engine's where it is installed on CUDA, else the local ones) and loaded with
Megatron's own `dist_checkpointing.load` at its default strictness.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mtpconv.errors import RefusedError, UnsupportedError
from mtpconv.geometry import Geometry, read_geometry
from mtpconv.parity import runtime
from mtpconv.parity.modules import Dialect, block_specs, key_map, mtp_attribute
from mtpconv.parity.settings import DSA_NEEDS, LayerKind, Settings, read_settings
from mtpconv.store.checkpoint import require_sound
from mtpconv.store.torch_dist import TorchDistCheckpoint, open_torch_dist

DIALECTS: tuple[Dialect, ...] = ("te", "local")


@dataclass(frozen=True)
class McoreModel:
    """A GPTModel and how it was built."""

    module: Any
    settings: Settings
    dtype: str
    te: bool

    @property
    def depths(self) -> int:
        """Number of MTP depths."""
        return self.settings.geometry.depths


def build(
    config: Mapping[str, Any] | Geometry | Settings,
    dtype: str = "float32",
    te: bool | None = None,
    seed: int = 0,
    *,
    empty: bool = False,
) -> McoreModel:
    """A model with seeded random weights, in eval mode, on the session's device.

    `te` chooses Transformer Engine's modules; None takes them on CUDA where installed. An
    `empty` model lies on the meta device and has no weights.

    Raises: UnsupportedError if this megatron-core cannot build the family.
    """
    device = runtime.require_session()
    settings = _settings(config)
    require_support(settings)
    te = (device == "cuda" and runtime.have_transformer_engine()) if te is None else te
    import torch
    from megatron.core.models.gpt import GPTModel

    torch_dtype = getattr(torch, dtype)
    torch.manual_seed(seed)
    with runtime.quiet(), torch.device("meta" if empty else device):
        transformer = _transformer_config(settings, torch_dtype, device, te)
        decoder, mtp = block_specs(settings, transformer, te)
        module = GPTModel(
            config=transformer,
            transformer_layer_spec=decoder,
            vocab_size=settings.geometry.dim("vocab_size"),
            max_sequence_length=settings.geometry.dim("max_position_embeddings"),
            parallel_output=False,
            share_embeddings_and_output_weights=settings.tied,
            position_embedding_type="rope",
            rotary_percent=settings.rotary_percent,
            rotary_base=settings.rotary_base,
            rope_scaling=settings.llama3_factor is not None,
            rope_scaling_factor=settings.llama3_factor or 8.0,
            mtp_block_spec=mtp,
        )
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch_dtype)
    if not empty:
        module.to(device)
    model = McoreModel(module.eval().requires_grad_(False), settings, dtype, te)
    _set_latent_eps(model)
    set_dialect(model, "te")
    return model


def require_support(settings: Settings) -> None:
    """Check that the installed megatron-core can build the family.

    Raises: UnsupportedError.
    """
    version = runtime.megatron_version()
    if settings.dsa and version < DSA_NEEDS:
        shown = ".".join(map(str, version))
        raise UnsupportedError(
            f"{settings.geometry.model_type} needs megatron-core 0.19 or newer; {shown} is "
            "installed, and its sparse attention differs from the model's"
        )


def load(model: McoreModel, folder: Path | TorchDistCheckpoint) -> None:
    """Load a torch_dist folder into the model, norm names and layer layout as stored.

    Raises: RefusedError if the model asks for keys that the checkpoint lacks, or the
    checkpoint holds weights that the model does not ask for; UnreadableError if it is corrupt.
    """
    runtime.require_session()
    from megatron.core import dist_checkpointing

    stored = open_stored(folder) if isinstance(folder, Path) else folder
    state = checked_state(model, stored)
    with runtime.quiet():
        loaded = dist_checkpointing.load(state, str(stored.folder))
    wanted = set(model.module.state_dict())
    model.module.load_state_dict({k: v for k, v in loaded.items() if k in wanted}, strict=True)


def save(
    model: McoreModel,
    folder: Path,
    *,
    dialect: Dialect = "te",
    stacked: bool = False,
    iteration: int = 1,
) -> Path:
    """Write the model with Megatron's own `dist_checkpointing.save`; the folder written.

    `stacked` asks for homogeneous layers stacked on a leading axis, which Megatron does only
    for models whose layers are all alike. megatron-core 0.19 and newer write no `common.pt`.
    """
    runtime.require_session()
    from megatron.core import dist_checkpointing

    target = folder / f"iter_{iteration:07d}"
    target.mkdir(parents=True)
    set_dialect(model, dialect)
    state = sharded_state(model, stacked)
    state |= {
        "args": argparse.Namespace(**_arguments(model)),
        "checkpoint_version": 3.0,
        "iteration": iteration,
    }
    with runtime.quiet():
        dist_checkpointing.save(
            state, str(target), content_metadata={"non_homogeneous_layers": not stacked}
        )
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return target


def module_tensors(model: McoreModel, *, only_loaded: bool = False) -> dict[str, Any]:
    """Every weight of the live model as a CPU tensor, by module name.

    Names are those of `state_dict()`: experts apart, norms under their module's name, MTP
    layers as `mtp.layers.J.transformer_layer` in every version. `only_loaded` leaves out what
    lies on the meta device.
    """
    prefix = re.compile(r"^(mtp\.layers\.\d+\.)" + re.escape(mtp_attribute()) + r"\.")
    return {
        prefix.sub(r"\1transformer_layer.", name): value.detach().cpu()
        for name, value in model.module.state_dict().items()
        if hasattr(value, "detach") and not (only_loaded and value.is_meta)
    }


def open_stored(folder: Path) -> TorchDistCheckpoint:
    """The checkpoint, found to be whole and to name nothing that runs code.

    Megatron unpickles `.metadata`, `common.pt` and every `_extra_state`; so all of them are
    parsed first by a reader that calls nothing.

    Raises: UnreadableError if a file is missing or corrupt, or a pickle names what it must not.
    """
    stored = open_torch_dist(folder)
    require_sound(stored)
    for name in stored.objects:
        stored.read_object(name)
    return stored


def set_dialect(model: McoreModel, dialect: Dialect) -> None:
    """Choose the norm names of the sharded keys; Transformer Engine modules have only one."""
    if model.te:
        return
    for layer, kind in _layers(model):
        layer.submodules_config = replace(
            layer.submodules_config,
            sharded_state_dict_keys_map=key_map(model.settings, kind, dialect),
        )


def sharded_state(model: McoreModel, stacked: bool) -> dict[str, Any]:
    """The model's sharded state dict, its layers stacked or one by one."""
    metadata = {"non_homogeneous_layers": not stacked, "singleton_local_shards": False}
    state: dict[str, Any] = model.module.sharded_state_dict(metadata=metadata)
    return state


def sharded_keys(state: Mapping[str, Any]) -> set[str]:
    """Keys that a sharded state dict reads or writes, as torch_dist spells them."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import (
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
        apply_factories,
    )

    plain = dict(state)
    if any(isinstance(value, ShardedTensorFactory) for value in nested_values(plain)):
        apply_factories(plain)
    keys = set()
    for value in nested_values(plain):
        if isinstance(value, ShardedTensor):
            keys.add(value.key)
        elif isinstance(value, ShardedObject):
            keys.add(value.unique_key)
    return keys


def _settings(config: Mapping[str, Any] | Geometry | Settings) -> Settings:
    if isinstance(config, Settings):
        return config
    return read_settings(config if isinstance(config, Geometry) else read_geometry(config))


def _transformer_config(settings: Settings, dtype: Any, device: str, te: bool) -> Any:
    import torch
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    kind = MLATransformerConfig if settings.mla else TransformerConfig
    known = {f.name for f in fields(kind)}
    wanted = settings.transformer | {
        "activation_func": torch.nn.functional.silu,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": device == "cpu",
        "transformer_impl": "transformer_engine" if te else "local",
        "moe_grouped_gemm": te and "num_moe_experts" in settings.transformer,
        # Plain torch in place of flash-linear-attention's kernels.
        "deterministic_mode": settings.delta_nets and not te,
    }
    unknown = sorted(set(wanted) - known)
    if unknown:
        raise UnsupportedError(
            f"this megatron-core has no setting {unknown[0]}; {settings.geometry.model_type} "
            "needs a newer one"
        )
    return kind(**wanted)


def _layers(model: McoreModel) -> Sequence[tuple[Any, LayerKind]]:
    """Every transformer layer of the trunk and of the depths, with its kind."""
    trunk = zip(model.module.decoder.layers, model.settings.layers, strict=True)
    depths = model.module.mtp.layers if model.depths else ()
    inner = mtp_attribute()
    return [*trunk, *((getattr(depth, inner), model.settings.depth) for depth in depths)]


def _set_latent_eps(model: McoreModel) -> None:
    """Give the norms of the MLA latents the epsilon that the family's reference uses."""
    eps = model.settings.latent_norm_eps
    if eps is None:
        return
    for layer, _ in _layers(model):
        attention = layer.self_attention
        for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
            norm = getattr(attention, name, None)
            if norm is not None and hasattr(norm, "eps"):
                norm.eps = eps


def checked_state(model: McoreModel, stored: TorchDistCheckpoint) -> dict[str, Any]:
    """The model's sharded state dict in the checkpoint's layout and norm names.

    Raises: RefusedError if the two do not hold the same tensors.
    """
    state = _best_match(model, {*stored.tensors, *stored.objects})
    _refuse_difference(sharded_keys(state), stored)
    return state


def _best_match(model: McoreModel, stored: set[str]) -> dict[str, Any]:
    """The sharded state dict whose keys are nearest to those stored."""
    stacked = not any(re.match(r"decoder\.layers\.\d+\.", key) for key in stored)
    best: tuple[int, dict[str, Any]] | None = None
    for dialect in DIALECTS:
        set_dialect(model, dialect)
        state = sharded_state(model, stacked)
        wrong = len(sharded_keys(state) ^ stored)
        if best is None or wrong < best[0]:
            best = (wrong, state)
    assert best is not None
    return best[1]


def _refuse_difference(asked: set[str], stored: TorchDistCheckpoint) -> None:
    missing = sorted(asked - {*stored.tensors, *stored.objects})
    if missing:
        raise RefusedError(
            f"{stored.folder}: {len(missing)} keys that Megatron asks for are not stored, "
            f"first {missing[0]}"
        )
    extra = sorted(set(stored.tensors) - asked)
    if extra:
        raise RefusedError(
            f"{stored.folder}: {len(extra)} stored tensors are not part of the model that the "
            f"config describes, first {extra[0]}"
        )


def _arguments(model: McoreModel) -> dict[str, Any]:
    """Plain values of the transformer config, as Megatron's trainer keeps in `args`."""
    plain = (bool, int, float, str, type(None))
    return {k: v for k, v in model.settings.transformer.items() if isinstance(v, plain)}
