"""Checkpoints for parity tests, written without mtpconv's mapping tables or converters.

The HF side is written from the tensor names of transformers' own modules, the Megatron side by
Megatron's own `dist_checkpointing.save`; what goes where is `mtpconv.parity.correspond`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpconv.geometry import read_geometry, text_config
from mtpconv.parity import families, hf, mcore, runtime
from mtpconv.parity.correspond import all_expected
from mtpconv.parity.hf_weights import HfWeights
from mtpconv.parity.modules import mtp_attribute
from tests.parity import configs

Tensors = dict[str, Any]

#: Router biases on disk, which stay in float32.
BIASES = ("e_score_correction_bias", "expert_bias")


def need_megatron_for(config: dict[str, Any]) -> None:
    """Skip where megatron-core cannot build the family."""
    if config["model_type"] in configs.SPARSE and runtime.megatron_version() < (0, 19):
        pytest.skip("sparse attention needs megatron-core 0.19 or newer")


def write_hf(config: dict[str, Any], folder: Path, seed: int = 0, dtype: str = "float32") -> Path:
    """An HF folder with seeded weights for every tensor of the trunk and of the MTP depths."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    random = torch.Generator().manual_seed(seed)
    tensors = {
        name: _value(name, shape, random, zero_centred=_zero_centred(name, config)).to(
            torch.float32 if name.endswith(BIASES) else getattr(torch, dtype)
        )
        for name, shape in sorted(names_on_disk(config).items())
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def names_on_disk(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor an HF folder of this model holds, with its shape."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        trunk = AutoModelForCausalLM.from_config(hf.hf_config(config))
    model = hf.with_depths(trunk, read_geometry(config))
    shapes: dict[str, tuple[int, ...]] = {}
    units = [*hf.trunk_units(model), *(u for depth in model.depths for u in depth.units())]
    for module, prefix in units:
        for name, value in module.state_dict().items():
            shapes |= _unpacked(prefix + name, tuple(value.shape), config)
    if text_config(config).get("tie_word_embeddings"):
        del shapes["lm_head.weight"]
    return shapes


def _unpacked(name: str, shape: tuple[int, ...], config: dict[str, Any]) -> dict[str, Any]:
    """The tensors on disk that a module's tensor is made of."""
    family = families.FAMILIES[config["model_type"]]
    on_disk = families.respelled(name, family.loaded)
    head, packed, tail = on_disk.rpartition("experts.")
    if not packed or tail not in ("gate_up_proj", "down_proj"):
        return {on_disk: shape}
    if config["model_type"].startswith("qwen3_5_moe") and not name.startswith("mtp."):
        return {on_disk: shape}  # as Qwen3.5-35B-A3B has them
    parts = ("gate_proj", "up_proj") if tail == "gate_up_proj" else ("down_proj",)
    if config["model_type"] == "mixtral":
        parts = ("w1", "w3") if tail == "gate_up_proj" else ("w2",)
    one = (shape[1] // len(parts), *shape[2:])
    return {
        f"{head}experts.{expert}.{part}.weight": one for expert in range(shape[0]) for part in parts
    }


def _zero_centred(name: str, config: dict[str, Any]) -> bool:
    """Whether a norm's weight is stored around 0: all of Qwen's hybrids but those in delta nets."""
    hybrid = config["model_type"].startswith(("qwen3_next", "qwen3_5"))
    return hybrid and not name.endswith("linear_attn.norm.weight")


def _value(name: str, shape: tuple[int, ...], random: Any, *, zero_centred: bool = False) -> Any:
    """Weights of a size at which every part of the network matters to the logits."""
    import torch

    values = torch.randn(shape, generator=random)
    if name.endswith("linear_attn.norm.weight"):
        return (1 + 0.3 * values).clamp_min(0.5)  # less one, it is still a bfloat16
    if name.endswith("norm.weight") or ".pre_fc_norm_" in name:
        return 0.3 * values + (0 if zero_centred else 1)
    if name.endswith(BIASES):
        return 0.1 * values
    return values * (0.5 if "embed" in name else 1.2 * shape[-1] ** -0.5)


def fill(model: mcore.McoreModel, folder: Path) -> None:
    """Give a live Megatron model the weights of an HF folder."""
    weights = HfWeights(folder)
    live = live_tensors(model)
    filled = set()
    for found in all_expected(model.settings, live):
        value = found.join([weights.read(name) for name in found.hf])
        assert live[found.name].shape == value.shape, found.name
        live[found.name].copy_(value)
        filled.add(found.name)
    assert filled == set(live)


def live_tensors(model: mcore.McoreModel) -> Tensors:
    """The tensors themselves, not copies, by the names of `mcore.module_tensors`."""
    inner = mtp_attribute()
    return {
        name.replace(f".{inner}.", ".transformer_layer."): value
        for name, value in model.module.state_dict().items()
        if hasattr(value, "copy_")
    }


def write_mcore(
    config: dict[str, Any],
    hf_folder: Path,
    folder: Path,
    change: Callable[[Tensors], None] | None = None,
    **options: Any,
) -> Path:
    """A torch_dist folder with the weights of an HF folder, after `change` of the live ones."""
    model = mcore.build(config)
    fill(model, hf_folder)
    if change is not None:
        change(live_tensors(model))
    mcore.save(model, folder, **options)
    return folder
