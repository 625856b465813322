"""One rank of a training run of real Megatron code on the CPU: built, one step, both formats saved.

Run by `test_parallel.py`, one process per rank: `python -m tests.parity.ranks JOB.json RANK`.
Every weight is a function of its sharded key and its place in the whole tensor, so that runs of
any parallel sizes hold the same model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtpconv.geometry import read_geometry
from mtpconv.parity import runtime
from mtpconv.parity.modules import block_specs, key_map
from mtpconv.parity.settings import Settings, read_settings

ITERATION = 20


def main(job: dict[str, Any], rank: int) -> None:
    """Take part in one run and save its checkpoints."""
    import torch
    from megatron.core import parallel_state

    sizes = job["sizes"]
    for owner, name, value in runtime._cpu_patches():
        setattr(owner, name, value)
    torch.Tensor.cuda = lambda tensor, *_args, **_more: tensor
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{job['meeting']}", rank=rank, world_size=job["world"]
    )
    parallel_state.initialize_model_parallel(
        sizes["tensor_model_parallel_size"],
        sizes["pipeline_model_parallel_size"],
        expert_model_parallel_size=sizes["expert_model_parallel_size"],
        expert_tensor_parallel_size=sizes["expert_tensor_parallel_size"],
    )
    settings = read_settings(read_geometry(job["config"]))
    model = build(settings, sizes)
    fill(model)
    save_legacy(model, settings, sizes, Path(job["legacy"]))
    save_torch_dist(model, settings, sizes, Path(job["torch_dist"]))
    torch.distributed.barrier()


def build(settings: Settings, sizes: dict[str, int]) -> Any:
    """This rank's part of the model."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    kind = MLATransformerConfig if settings.mla else TransformerConfig
    wanted = settings.transformer | {
        **sizes,
        "activation_func": torch.nn.functional.silu,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
        "transformer_impl": "local",
        "moe_grouped_gemm": False,
    }
    config = kind(**wanted)
    decoder, mtp = block_specs(settings, config, False)
    first = get_transformer_layer_offset(config)
    specs = decoder.layer_specs[first : first + get_num_layers_to_build(config)]
    last = parallel_state.is_pipeline_last_stage()
    model = GPTModel(
        config=config,
        transformer_layer_spec=replace(decoder, layer_specs=specs),
        vocab_size=settings.geometry.dim("vocab_size"),
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=last,
        parallel_output=True,
        share_embeddings_and_output_weights=settings.tied,
        position_embedding_type="rope",
        mtp_block_spec=mtp if last else None,
    )
    kinds = settings.layers[first : first + len(specs)]
    layers = list(zip(model.decoder.layers, kinds, strict=True))
    if last and mtp is not None:
        name = "transformer_layer"
        inner = [getattr(d, name, None) or d.mtp_model_layer for d in model.mtp.layers]
        layers += [(layer, settings.depth) for layer in inner]
    for layer, kind in layers:
        names = key_map(settings, kind, "te")
        layer.submodules_config = replace(
            layer.submodules_config, sharded_state_dict_keys_map=names
        )
    return model


def tensors(state: Any) -> Iterator[Any]:
    """The sharded tensors of a state dict, fused ones in parts."""
    import copy

    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    flat = copy.copy(state)
    apply_factories(flat)
    return (v for v in nested_values(flat) if isinstance(v, ShardedTensor))


def fill(model: Any) -> None:
    """Give every parameter the values that its key and place say."""
    import torch

    metadata = {"non_homogeneous_layers": True, "singleton_local_shards": False}
    with torch.no_grad():
        for one in tensors(model.sharded_state_dict(metadata=metadata)):
            seed = int.from_bytes(hashlib.sha256(one.key.encode()).digest()[:4], "big")
            whole = torch.randn(one.global_shape, generator=torch.Generator().manual_seed(seed))
            place = tuple(
                slice(o, o + n) for o, n in zip(one.global_offset, _local(one), strict=True)
            )
            one.data.copy_(whole[place].reshape(one.data.shape))


def _local(one: Any) -> tuple[int, ...]:
    return (1,) * one.prepend_axis_num + tuple(one.local_shape)


def optimizer_of(model: Any) -> Any:
    """AdamW after one step with gradients of zero: weights stay, moments exist."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


def save_torch_dist(model: Any, settings: Settings, sizes: dict[str, int], folder: Path) -> None:
    """What Megatron's trainer saves: model, optimizer, args, under `iter_*`."""
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )

    target = folder / f"iter_{ITERATION:07d}"
    if torch.distributed.get_rank() == 0:
        target.mkdir(parents=True)
    torch.distributed.barrier()
    metadata = {"non_homogeneous_layers": True, "singleton_local_shards": False}
    state = model.sharded_state_dict(metadata=metadata)
    optimizer = optimizer_of(model)
    moments = optimizer.state_dict()
    for one in moments["state"].values():
        one.pop("step")
    ids = get_param_id_to_sharded_param_map(
        model.sharded_state_dict(metadata=metadata), model.parameters()
    )
    optim_state_to_sharding_state(moments, ids)
    state |= {
        "optimizer": moments,
        "args": argparse.Namespace(**arguments(settings, sizes)),
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
    }
    dist_checkpointing.save(state, str(target), content_metadata=metadata)
    if torch.distributed.get_rank() == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))


def save_legacy(model: Any, settings: Settings, sizes: dict[str, int], folder: Path) -> None:
    """What `--ckpt-format torch` saves: one file per rank that is the first of its replicas.

    Source: megatron-core 0.19.2 megatron/training/checkpointing.py get_checkpoint_name.
    """
    import torch
    from megatron.core import parallel_state as ranks

    name = f"mp_rank_{ranks.get_tensor_model_parallel_rank():02d}"
    if sizes["pipeline_model_parallel_size"] > 1:
        name += f"_{ranks.get_pipeline_model_parallel_rank():03d}"
    if sizes["expert_model_parallel_size"] > 1:
        name += f"_{ranks.get_expert_model_parallel_rank():03d}"
    if ranks.get_expert_data_parallel_rank():
        return
    target = folder / f"iter_{ITERATION:07d}" / name
    target.mkdir(parents=True)
    state = {
        "args": argparse.Namespace(**arguments(settings, sizes)),
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "model": model.state_dict_for_save_checkpoint(),
        "optimizer": {"optimizer": optimizer_of(model).state_dict()},
        "rng_state": [{"torch_rng_state": torch.get_rng_state()}],
    }
    torch.save(state, target / "model_optim_rng.pt")


def arguments(settings: Settings, sizes: dict[str, int]) -> dict[str, Any]:
    """The part of Megatron's args that a checkpoint needs."""
    plain = (bool, int, float, str, type(None))
    return {
        **{k: v for k, v in settings.transformer.items() if isinstance(v, plain)},
        "swiglu": True,
        "untie_embeddings_and_output_weights": not settings.tied,
        **sizes,
    }


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
    os._exit(0)  # gloo's threads may outlive the interpreter
