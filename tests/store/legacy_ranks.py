"""Legacy checkpoints made by hand: whole tensors cut into what each rank would have saved."""

from __future__ import annotations

import argparse
import itertools
import random
import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mtpconv.store.content import blocks
from mtpconv.store.legacy_file import NAME
from mtpconv.store.torch_dist import open_torch_dist

HIDDEN, FFN, HEADS, EXPERTS, VOCAB, LAYERS = 8, 12, 4, 4, 32, 4
SIZES = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "num_experts": EXPERTS, "swiglu": True,
    "q_lora_rank": 6, "kv_lora_rank": 6, "qk_pos_emb_head_dim": 2, "mtp_num_layers": 1,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip


def tensor(name: str, *shape: int, dtype: str = "bfloat16") -> Any:
    import torch

    seed = sum(map(ord, name)) + 31 * len(name)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(
        getattr(torch, dtype)
    )


def layer(prefix: str, moe: bool) -> Iterator[tuple[str, Any, str]]:
    """(sharded key, whole tensor, how tensor-parallel ranks cut it) of one layer."""

    def make(tail: str, cut: str, *shape: int, **more: Any) -> tuple[str, Any, str]:
        return prefix + tail, tensor(prefix + tail, *shape, **more), cut

    yield make("input_layernorm.weight", "whole", HIDDEN)
    yield make("self_attention.linear_q_down_proj.weight", "whole", 6, HIDDEN)
    yield make("self_attention.linear_q_up_proj.weight", "rows", 4 * HEADS, 6)
    yield make("self_attention.linear_kv_down_proj.weight", "rows", 8, HIDDEN)
    yield make("self_attention.linear_kv_up_proj.weight", "rows", 4 * HEADS, 6)
    yield make("self_attention.linear_proj.weight", "columns", HIDDEN, 4 * HEADS)
    yield make("self_attention.linear_proj.bias", "whole", HIDDEN)
    yield make("pre_mlp_layernorm.weight", "whole", HIDDEN)
    if not moe:
        yield make("mlp.linear_fc1.weight", "gated", 2 * FFN, HIDDEN)
        yield make("mlp.linear_fc1.bias", "gated", 2 * FFN)
        yield make("mlp.linear_fc2.weight", "columns", HIDDEN, FFN)
        return
    yield make("mlp.router.weight", "whole", EXPERTS, HIDDEN)
    yield make("mlp.router.expert_bias", "whole", EXPERTS, dtype="float32")
    yield make("mlp.shared_experts.linear_fc1.weight", "gated", 2 * FFN, HIDDEN)
    for expert in range(EXPERTS):
        at = f"mlp.experts.experts.{expert}."
        yield make(f"{at}linear_fc1.weight", "gated", 2 * FFN, HIDDEN)
        yield make(f"{at}linear_fc2.weight", "columns", HIDDEN, FFN)


def whole(inner: str = "transformer_layer") -> list[tuple[str, Any, str]]:
    """Every tensor of the model, under sharded keys."""
    root = [
        ("embedding.word_embeddings.weight", (VOCAB, HIDDEN), "rows"),
        ("decoder.final_layernorm.weight", (HIDDEN,), "whole"),
        ("output_layer.weight", (VOCAB, HIDDEN), "rows"),
        ("mtp.layers.0.enorm.weight", (HIDDEN,), "whole"),
        ("mtp.layers.0.eh_proj.weight", (HIDDEN, 2 * HIDDEN), "rows"),
    ]
    found = [(name, tensor(name, *shape), cut) for name, shape, cut in root]
    for number in range(LAYERS):
        found += layer(f"decoder.layers.{number}.", moe=number > 0)
    return found + list(layer(f"mtp.layers.0.{inner}.", moe=True))


def cut(value: Any, how: str, rank: int, ranks: int) -> Any:
    """What one tensor-parallel rank has."""
    if how == "whole" or ranks == 1:
        return value
    import torch

    if how == "gated":
        gate, up = value.chunk(2, 0)
        return torch.cat([gate.chunk(ranks, 0)[rank], up.chunk(ranks, 0)[rank]])
    part = value.chunk(ranks, 1 if how == "columns" else 0)[rank]
    return part if how == "rows" else part.contiguous()  # a view keeps the whole storage


def stage_of(key: str, stages: list[list[int]]) -> tuple[list[int], str]:
    """Numbers of the stages that have a tensor, and its name there; `stages` lists their layers."""
    if key.startswith("decoder.layers."):
        number = int(key.split(".")[2])
        at = next(i for i, layers in enumerate(stages) if number in layers)
        local = number - stages[at][0]
        return [at], key.replace(f"layers.{number}.", f"layers.{local}.", 1)
    if key.startswith("embedding."):  # MTP on the last stage embeds, too
        return sorted({0, len(stages) - 1}), key
    return [len(stages) - 1], key


def expert_of(key: str) -> int | None:
    """The expert that a key names."""
    _, found, tail = key.partition(".experts.experts.")
    return int(tail.split(".")[0]) if found else None


def even_stages(tensors: list[tuple[str, Any, str]], count: int) -> list[list[int]]:
    """The layers of each stage if all have the same number."""
    layers = {int(k.split(".")[2]) for k, *_ in tensors if k.startswith("decoder.layers.")}
    size = len(layers) // count
    return [list(range(i * size, (i + 1) * size)) for i in range(count)]


def save(
    folder: Path, *, tp: int = 1, pp: int = 1, ep: int = 1, virtual: int = 1,
    grouped: bool = False, split: list[list[int]] | None = None, tensors: Any = None,
    etp: int | None = None, packed: bool = False, **args: Any,
) -> Path:  # fmt: skip
    """A checkpoint as `--ckpt-format torch` writes it; `packed`: by the first grouped GEMM."""
    import torch

    tensors = tensors or whole()
    count = pp * virtual
    stages = split or even_stages(tensors, count)
    sizes = {
        "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep, **SIZES, **args,
    }  # fmt: skip
    if etp is not None:
        sizes["expert_tensor_parallel_size"] = etp
    experts = 1 + max((e for key, *_ in tensors if (e := expert_of(key)) is not None), default=0)
    expert_ways = tp if etp is None else etp
    for t, p, e in itertools.product(range(tp), range(pp), range(ep)):
        models: list[Any] = [OrderedDict() for _ in range(virtual)]
        for key, value, how in tensors:
            at, name = stage_of(key, stages)
            rank, ways = t, tp
            if ".experts.experts." in key:
                renamed = expert_name(name, e, experts // ep, grouped)
                if renamed is None:
                    continue
                name, ways, rank = renamed, expert_ways, t if expert_ways == tp else 0
            for stage in [stage for stage in at if stage % pp == p]:
                models[stage // pp][name] = cut(value, how, rank, ways)
        name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "")
        rank_folder = folder / (name + (f"_{e:03d}" if ep > 1 else ""))
        rank_folder.mkdir(parents=True)
        if packed:
            models = [pack(model) for model in models]
        torch.save(state_of(models, sizes), rank_folder / NAME)
    return folder


def expert_name(name: str, rank: int, local: int, grouped: bool) -> str | None:
    """The module name of an expert on an expert-parallel rank, None if it is on another."""
    head, tail = name.split("experts.experts.")
    number, leaf = tail.split(".", 1)
    index = int(number) - rank * local
    if not 0 <= index < local:
        return None
    return (
        f"{head}experts.{leaf}{index}" if grouped else f"{head}experts.local_experts.{index}.{leaf}"
    )


def pack(model: Any) -> Any:
    """All experts in two tensors, transposed, as GroupedMLP of megatron-core 0.16.1 has them."""
    import torch

    found: Any = OrderedDict()
    apart: dict[tuple[str, str], list[Any]] = {}
    for name, value in model.items():
        at = re.fullmatch(r"(.+\.experts)\.local_experts\.\d+\.linear_fc([12])\.weight", name)
        if at is None:
            found[name] = value
        else:
            apart.setdefault((at[1], at[2]), []).append(value.T)
    for (head, number), values in apart.items():
        whole = torch.stack(values)  # [experts, hidden, ffn] or [experts, ffn, hidden]
        rows, columns = values[0].shape
        shape = (rows, -1) if number == "1" else (-1, columns)
        found[f"{head}.weight{number}"] = whole.reshape(shape)
    return found


def state_of(models: list[Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """All that one rank saves."""
    import torch

    for model in models:
        model["decoder.layers.0.self_attention.linear_proj._extra_state"] = None
    state = {
        "args": argparse.Namespace(**sizes, nested=argparse.Namespace(a=[1])),
        "checkpoint_version": 3.0,
        "iteration": 9,
        "optimizer": {
            "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": []},
            "fp32_from_fp16_params": [[torch.ones(3)]],
        },
        "rng_state": [
            {
                "random_rng_state": random.getstate(),
                "np_rng_state": np.random.get_state(),
                "torch_rng_state": torch.get_rng_state(),
            }
        ],
        "num_floating_point_operations_so_far": 1.5,
    }
    names = ["model"] if len(models) == 1 else [f"model{i}" for i in range(len(models))]
    return state | dict(zip(names, models, strict=True))


#: How tensor-parallel ranks cut a tensor, by its key; others they all have whole.
_CUTS = {
    "gated": r"linear_fc1\.weight$", "columns": r"linear_(proj|fc2)\.weight$",
    "rows": r"(word_embeddings|output_layer|eh_proj|linear_\w+_up_proj|linear_qkv)\.(weight|bias)$",
}  # fmt: skip


def as_tensors(mcore: Path, rename: dict[str, str]) -> list[tuple[str, Any, str]]:
    """All tensors of a torch_dist checkpoint that has one layer and one expert per key."""
    import torch

    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}
    found = []
    checkpoint = open_torch_dist(mcore)
    for key, spec in checkpoint.tensors.items():
        data = bytearray(b"".join(bytes(b) for b in blocks(checkpoint, key)))
        value = torch.frombuffer(data, dtype=dtypes[spec.dtype]).reshape(spec.shape)
        cut = next((c for c, pattern in _CUTS.items() if re.search(pattern, key)), "whole")
        for old, new in rename.items():
            key = key.replace(old, new)
        found.append((key, value, cut))
    return found
