"""Units of a Megatron model that are loaded from a torch_dist folder one at a time.

Each is loaded with Megatron's own `dist_checkpointing.load`, asked for the entries of that
unit alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from mtpconv.parity import runtime
from mtpconv.parity.mcore import McoreModel, checked_state
from mtpconv.parity.modules import mtp_attribute
from mtpconv.parity.paging import Load, Unit
from mtpconv.store.torch_dist import TorchDistCheckpoint


def units(model: McoreModel, stored: TorchDistCheckpoint) -> dict[str, Unit]:
    """Every unit of the model by the prefix of its tensors.

    Raises: RefusedError if checkpoint and model do not hold the same keys.
    """
    state = checked_state(model, stored)
    found = {}
    for name, module in _modules(model):
        entries = {key: value for key, value in state.items() if key.startswith(f"{name}.")}
        load = _loader(entries, f"{name}.", str(stored.folder))
        found[name] = Unit(module, load)
    if model.settings.tied:
        embedding = found["embedding.word_embeddings"]
        head = model.module.output_layer
        found["output_layer"] = Unit(head, embedding.load, embedding.module)
    return found


def in_block(name: str, block: str) -> bool:
    """Whether a unit belongs to the block of a point: trunk, layer N, depth N."""
    kind, _, number = block.partition(" ")
    if kind == "layer":
        return name == f"decoder.layers.{number}"
    if kind == "depth":
        return name.startswith(f"mtp.layers.{number}.")
    return "layers." not in name


def _modules(model: McoreModel) -> Iterator[tuple[str, Any]]:
    module = model.module
    yield "embedding.word_embeddings", module.embedding.word_embeddings
    for number, layer in enumerate(module.decoder.layers):
        yield f"decoder.layers.{number}", layer
    yield "decoder.final_layernorm", module.decoder.final_layernorm
    for number, depth in enumerate(module.mtp.layers if model.depths else ()):
        for part in ("enorm", "hnorm", "eh_proj", mtp_attribute(), "final_layernorm"):
            yield f"mtp.layers.{number}.{part}", getattr(depth, part)
    if not model.settings.tied:
        yield "output_layer", module.output_layer


def _loader(entries: Mapping[str, Any], prefix: str, folder: str) -> Load:
    def load() -> dict[str, Any]:
        from megatron.core import dist_checkpointing

        asked = {key: _with_room(entry) for key, entry in entries.items()}
        with runtime.quiet():
            loaded = dist_checkpointing.load(asked, folder, validate_access_integrity=False)
        device = runtime.require_session()
        return {
            key.removeprefix(prefix): value.to(device) if hasattr(value, "to") else value
            for key, value in loaded.items()
            if key in entries
        }

    return load


def _with_room(entry: Any) -> Any:
    """The entry with memory in place of its meta tensor."""
    import torch

    found = copy.copy(entry)
    if isinstance(getattr(found, "data", None), torch.Tensor):
        found.data = torch.empty_like(found.data, device="cpu")
    return found
