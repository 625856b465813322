"""Legacy checkpoints: ranks made here by hand from whole tensors, merged back, or refused."""

from __future__ import annotations

import argparse
import itertools
import pickle
import random
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtpconv.errors import MtpconvError, UnreadableError, UnsupportedError
from mtpconv.store.content import blocks
from mtpconv.store.legacy import LegacyCheckpoint, open_legacy, open_megatron
from mtpconv.store.legacy_file import NAME
from mtpconv.store.torch_dist import TorchDistCheckpoint

torch = pytest.importorskip("torch")

HIDDEN, FFN, HEADS, EXPERTS, VOCAB, LAYERS = 8, 12, 4, 4, 32, 4
SIZES = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "num_experts": EXPERTS, "swiglu": True,
    "q_lora_rank": 6, "kv_lora_rank": 6, "qk_pos_emb_head_dim": 2, "mtp_num_layers": 1,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip


def tensor(name: str, *shape: int, dtype: Any = torch.bfloat16) -> Any:
    seed = sum(map(ord, name)) + 31 * len(name)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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
    yield make("mlp.router.expert_bias", "whole", EXPERTS, dtype=torch.float32)
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


def save(
    folder: Path, *, tp: int = 1, pp: int = 1, ep: int = 1, virtual: int = 1,
    grouped: bool = False, split: list[list[int]] | None = None, tensors: Any = None,
    etp: int | None = None, **args: Any,
) -> Path:  # fmt: skip
    """A checkpoint as `--ckpt-format torch` writes it."""
    count = pp * virtual
    per_stage = LAYERS // count
    stages = split or [list(range(i * per_stage, (i + 1) * per_stage)) for i in range(count)]
    sizes = {
        "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep, **SIZES, **args,
    }  # fmt: skip
    if etp is not None:
        sizes["expert_tensor_parallel_size"] = etp
    tensors = tensors or whole()
    expert_ways = tp if etp is None else etp
    for t, p, e in itertools.product(range(tp), range(pp), range(ep)):
        models: list[Any] = [OrderedDict() for _ in range(virtual)]
        for key, value, how in tensors:
            at, name = stage_of(key, stages)
            rank, ways = t, tp
            if ".experts.experts." in key:
                renamed = expert_name(name, e, EXPERTS // ep, grouped)
                if renamed is None:
                    continue
                name, ways, rank = renamed, expert_ways, t if expert_ways == tp else 0
            for stage in [stage for stage in at if stage % pp == p]:
                models[stage // pp][name] = cut(value, how, rank, ways)
        name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "")
        rank_folder = folder / (name + (f"_{e:03d}" if ep > 1 else ""))
        rank_folder.mkdir(parents=True)
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


def state_of(models: list[Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """All that one rank saves."""
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


def bytes_of(value: Any) -> bytes:
    data: bytes = value.contiguous().view(torch.uint8).numpy().tobytes()
    return data


def assert_whole(found: LegacyCheckpoint, tensors: Any = None) -> None:
    wanted = {key: value for key, value, _ in tensors or whole()}
    assert found.problems == []
    assert {k: s.shape for k, s in found.tensors.items()} == {
        k: tuple(v.shape) for k, v in wanted.items()
    }
    different = [
        key
        for key, value in wanted.items()
        if b"".join(bytes(b) for b in blocks(found, key)) != bytes_of(value)
    ]
    assert different == []


LAYOUTS: list[dict[str, Any]] = [
    {}, {"tp": 2}, {"pp": 2}, {"ep": 2}, {"tp": 2, "pp": 2, "ep": 2}, {"tp": 4, "ep": 4},
    {"pp": 2, "virtual": 2}, {"pp": 2, "tp": 2, "virtual": 2, "grouped": True},
    {"ep": 2, "grouped": True}, {"tp": 2, "ep": 2, "etp": 1}, {"pp": 2, "split": [[0], [1, 2, 3]]},
]  # fmt: skip


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_ranks_are_merged(tmp_path: Path, parallel: dict[str, Any]) -> None:
    save(tmp_path / "iter_0000009", **parallel)
    found = open_megatron(tmp_path)
    assert isinstance(found, LegacyCheckpoint)
    assert_whole(found)
    assert found.iteration == 9
    assert found.common["args"]["mtp_num_layers"] == 1
    ranks = len(list((tmp_path / "iter_0000009").iterdir()))
    assert found.ignored == 2 * ranks


def test_the_newer_name_of_the_inner_block(tmp_path: Path) -> None:
    tensors = whole("mtp_model_layer")
    save(tmp_path / "release", tp=2, tensors=tensors)
    found = open_legacy(tmp_path / "release")
    assert_whole(found, tensors)
    assert found.iteration == "release"


def test_what_ranks_hold_alike_must_be_equal(tmp_path: Path) -> None:
    folder = save(tmp_path / "iter_0000001", tp=2)
    file = folder / "mp_rank_01" / NAME
    state = torch.load(file, weights_only=False)
    state["model"]["decoder.layers.2.input_layernorm.weight"][3] += 1
    torch.save(state, file)
    (problem,) = open_legacy(folder).problems
    assert problem.kind == "duplicate_tensor_conflict"
    assert problem.tensor == "decoder.layers.2.input_layernorm.weight"
    assert "mp_rank_00 and mp_rank_01" in problem.message


def test_the_copy_of_a_tied_embedding_on_the_last_stage(tmp_path: Path) -> None:
    tensors = [t for t in whole() if t[0] != "output_layer.weight"]
    embedding = next(t for t in tensors if t[0].startswith("embedding."))
    tied = [*tensors, ("output_layer.weight", embedding[1], "rows")]
    args: dict[str, Any] = {"untie_embeddings_and_output_weights": False}
    assert_whole(open_legacy(save(tmp_path / "iter_0000001", tp=2, tensors=tied, **args)), tensors)
    # Untied, equal bytes are a head of its own; tied but different is for the table to refuse.
    assert_whole(open_legacy(save(tmp_path / "iter_0000002", tp=2, tensors=tied)), tied)
    other = [*tensors, ("output_layer.weight", embedding[1] + 1, "rows")]
    assert_whole(open_legacy(save(tmp_path / "iter_0000003", tensors=other, **args)), other)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "iter_0000001", tp=2, pp=2, ep=2)
    for rank, name in (("tensor", "mp_rank_01_001_*"), ("expert", "mp_rank_*_001")):
        copy = save(tmp_path / rank / "iter_0000002", tp=2, pp=2, ep=2)
        for one in copy.glob(name):
            (one / NAME).unlink()
            one.rmdir()
        with pytest.raises(UnreadableError, match=rf"{rank}-parallel rank 1 of pipeline stage"):
            open_legacy(copy)
    (folder / "mp_rank_00_000_001" / NAME).unlink()
    with pytest.raises(UnreadableError, match="cannot be opened"):
        open_legacy(folder)


def refused(folder: Path, kind: type[MtpconvError], match: str) -> None:
    with pytest.raises(kind, match=match) as caught:
        open_legacy(folder)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_merged_is_refused_by_name(tmp_path: Path) -> None:
    extra = [*whole(), ("decoder.final.mystery.weight", tensor("m", 4, 4), "whole")]
    folder = save(tmp_path / "iter_0000001", tp=2, tensors=extra)
    refused(folder, UnsupportedError, r"how 2 tensor-parallel ranks share decoder\.final\.mystery")
    packed = [*whole(), ("decoder.layers.1.mlp.experts.weight1", tensor("w", 8, 8), "whole")]
    folder = save(tmp_path / "iter_0000002", tensors=packed)
    refused(folder, UnsupportedError, r"weight1 holds all experts of a rank transposed")
    folder = save(tmp_path / "iter_0000003", tp=4, etp=2)
    refused(folder, UnsupportedError, "expert_tensor_parallel_size 2")
    folder = save(tmp_path / "iter_0000004", tp=2, expert_model_parallel_size=2)
    refused(folder, UnreadableError, "do not fit together")


def test_models_from_before_core_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000001" / "mp_rank_00"
    folder.mkdir(parents=True)
    model = {"language_model": {"encoder": {"layers.0.weight": torch.ones(2)}}}
    torch.save({"model": model, "args": argparse.Namespace()}, folder / NAME)
    refused(tmp_path, UnsupportedError, "before Megatron-Core")


class Runs:
    def __reduce__(self) -> Any:
        return (print, ("executed",))


def test_hostile_files_are_refused_and_run_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "iter_0000001" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save({"model": {"a": Runs()}}, folder / NAME)
    refused(tmp_path, UnreadableError, r"calls __builtin__\.print")
    torch.save([1], folder / NAME)
    refused(tmp_path, UnreadableError, "holds no dict")
    torch.save({"iteration": 1}, folder / NAME)
    refused(tmp_path, UnreadableError, "holds no model")
    torch.save({"model": [torch.ones(2)]}, folder / NAME)
    refused(tmp_path, UnreadableError, "no dict")
    (folder / NAME).write_bytes(pickle.dumps({"model": {}}))
    refused(tmp_path, UnreadableError, "corrupt")
    save(tmp_path / "whole" / "iter_0000001")
    data = (tmp_path / "whole" / "iter_0000001" / "mp_rank_00" / NAME).read_bytes()
    for size in (0, 100, len(data) // 2, len(data) - 1):
        (folder / NAME).write_bytes(data[:size])
        refused(tmp_path, UnreadableError, "corrupt")
    assert capsys.readouterr().out == ""


def test_other_folders_are_opened_as_torch_dist(tmp_path: Path) -> None:
    from mtpconv.convert import hf2mcore
    from tests.convert.folders import make_hf
    from tests.mapping.toy import config

    hf2mcore(make_hf(tmp_path / "hf", config()), tmp_path / "mcore")
    assert isinstance(open_megatron(tmp_path / "mcore"), TorchDistCheckpoint)
