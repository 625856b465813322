"""Legacy checkpoints: ranks made here by hand from whole tensors, merged back, or refused."""

from __future__ import annotations

import argparse
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtpconv.errors import MtpconvError, UnreadableError, UnsupportedError
from mtpconv.store.content import blocks
from mtpconv.store.legacy import LegacyCheckpoint, open_legacy, open_megatron
from mtpconv.store.legacy_file import NAME
from mtpconv.store.torch_dist import TorchDistCheckpoint
from tests.store.legacy_ranks import save, tensor, whole

torch = pytest.importorskip("torch")


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
    folder = save(tmp_path / "iter_0000002", tp=2, packed=True)
    refused(folder, UnsupportedError, r"how 2 tensor-parallel ranks share .*experts\.0\.weight1")
    folder = save(tmp_path / "iter_0000003", tp=4, etp=2)
    refused(folder, UnsupportedError, "expert_tensor_parallel_size 2")
    folder = save(tmp_path / "iter_0000004", tp=2, expert_model_parallel_size=2)
    refused(folder, UnreadableError, "do not fit together")


@pytest.mark.parametrize(
    ("args", "kind", "match"),
    [
        ({"num_experts": None}, UnsupportedError, "args do not say how many of what size"),
        ({"hidden_size": True}, UnsupportedError, "args do not say how many of what size"),
        ({"num_experts": 5}, UnreadableError, r"has shape \[8, 96\]; args say 5 experts"),
        ({"num_experts": 1 << 40}, UnreadableError, "args say 1099511627776 experts"),
        ({"hidden_size": 4}, UnreadableError, r"has shape \[8, 96\]; .* hidden_size 4"),
    ],
    ids=str,
)
def test_packed_experts_must_fit_their_args(
    tmp_path: Path, args: dict[str, Any], kind: type[MtpconvError], match: str
) -> None:
    refused(save(tmp_path / "iter_0000001", packed=True, **args), kind, match)


def words(found: LegacyCheckpoint, key: str) -> Any:
    data = b"".join(bytes(b) for b in blocks(found, key))
    return np.frombuffer(data, "u2").reshape(found.tensors[key].shape)


def test_packed_experts_are_taken_apart(tmp_path: Path) -> None:
    """Each is the transposed of what sequential experts hold, wherever its rank keeps it."""
    apart = open_legacy(save(tmp_path / "a/iter_0000001"))
    packed = open_legacy(save(tmp_path / "b/iter_0000001", pp=2, ep=2, packed=True))
    checked = 0
    for key, spec in packed.tensors.items():
        at = re.fullmatch(r"(.+experts\.experts\.\d+)\.weight([12])", key)
        if at is None:
            continue
        other = f"{at[1]}.linear_fc{at[2]}.weight"
        assert spec.shape == apart.tensors[other].shape[::-1]
        mine, theirs = words(packed, key), words(apart, other)
        np.testing.assert_array_equal(mine, theirs.T)
        checked += 1
    assert checked == sum(".experts.experts." in key for key in apart.tensors)


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
