from __future__ import annotations

import argparse
import errno
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpconv.errors import UnreadableError, UnsupportedError
from mtpconv.store.dist_folder import is_torch_dist
from mtpconv.store.dist_metadata_writer import (
    write_common,
    write_config,
    write_metadata,
    write_tracker,
)
from mtpconv.store.pickles import Global, Instance
from mtpconv.store.torch_dist import TorchDistCheckpoint, open_torch_dist
from mtpconv.store.torch_dist_writer import TorchDistWriter, Written
from mtpconv.store.torch_names import TORCH_DTYPES
from mtpconv.tensors import Box, Shape, TensorSpec
from tests.store.dist import grids, random_tensors, stored_bytes, write


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return write(tmp_path, random_tensors(), ["a._extra_state/shard_0_1"])


# --- what a sound checkpoint gives --------------------------------------------------------------


def test_a_written_checkpoint_is_read_back(sound: Path) -> None:
    checkpoint = open_torch_dist(sound.parent)
    assert not checkpoint.problems
    assert not checkpoint.check_records()
    assert (checkpoint.path, checkpoint.folder) == (sound.parent, sound)
    assert (checkpoint.format, checkpoint.iteration, checkpoint.ignored) == ("torch_dist", 3, 0)
    assert checkpoint.common == {"args": {"num_layers": 2}, "iteration": 3}
    assert checkpoint.objects == ("a._extra_state/shard_0_1",)
    assert checkpoint.read_object("a._extra_state/shard_0_1") == [None]
    tensors = random_tensors()
    assert dict(checkpoint.tensors) == {key: spec for key, (spec, _) in tensors.items()}
    for key, (_, chunks) in tensors.items():
        assert stored_bytes(checkpoint, key) == {at: data for at, (_, data) in chunks.items()}
    with pytest.raises(KeyError):
        checkpoint.chunks("absent")


@settings(max_examples=40)
@given(st.lists(grids(), min_size=1, max_size=4), st.integers(0, 999))
def test_any_grid_of_chunks_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[tuple[TensorSpec, list[Box]]], seed: int
) -> None:
    source = random.Random(seed)

    def chunk(spec: TensorSpec, box: Box) -> tuple[Shape, bytes]:
        return box.sizes, source.randbytes(TensorSpec(spec.dtype, box.sizes).nbytes)

    wanted = {
        f"t{n}": (spec, {box.offsets: chunk(spec, box) for box in boxes})
        for n, (spec, boxes) in enumerate(tensors)
    }
    parent = tmp_path_factory.mktemp("grid")
    checkpoint = open_torch_dist(write(parent, wanted))
    assert not checkpoint.problems
    for key, (spec, chunks) in wanted.items():
        assert checkpoint.tensors[key] == spec
        assert stored_bytes(checkpoint, key) == {at: data for at, (_, data) in chunks.items()}
    shutil.rmtree(parent)


@pytest.mark.parametrize("name", ["iter_0000000", "iter_0000007", "iter_12345678", "release"])
@pytest.mark.parametrize("tracker", [True, False])
def test_parent_and_folder_open_the_same(sound: Path, name: str, tracker: bool) -> None:
    folder = sound.rename(sound.parent / name)
    iteration = "release" if name == "release" else int(name[5:])
    (sound.parent / "latest_checkpointed_iteration.txt").unlink()
    if tracker:
        write_tracker(sound.parent, iteration)  # type: ignore[arg-type]
    for path in (sound.parent, folder):
        checkpoint = open_torch_dist(path)
        assert (checkpoint.folder, checkpoint.iteration) == (folder, iteration)
        assert not checkpoint.problems
        assert is_torch_dist(path)


def test_a_folder_of_any_name_takes_its_iteration_from_the_common_state(sound: Path) -> None:
    assert open_torch_dist(sound.rename(sound.parent / "mine")).iteration == 3


def test_the_tracker_chooses_among_several(sound: Path) -> None:
    shutil.copytree(sound, sound.parent / "iter_0000009")
    assert open_torch_dist(sound.parent).iteration == 3
    (sound.parent / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(UnreadableError, match=r"iter_0000003, iter_0000009 and no latest_.*; name"):
        open_torch_dist(sound.parent)
    assert not is_torch_dist(sound.parent)


@pytest.mark.parametrize("text", ["8", "iter_0000003", "release", "-3", "", "3 4", "9" * 30])
def test_a_tracker_that_names_no_folder_is_a_problem(sound: Path, text: str) -> None:
    tracker = sound.parent / "latest_checkpointed_iteration.txt"
    tracker.write_text(text)
    checkpoint = open_torch_dist(sound.parent)
    assert not checkpoint.tensors
    (problem,) = checkpoint.problems
    assert (problem.kind, problem.file) == ("unreadable_file", tracker.name)


def test_what_is_no_checkpoint_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="holds no torch_dist checkpoint"):
        open_torch_dist(tmp_path)
    with pytest.raises(UnreadableError, match="is not a folder"):
        open_torch_dist(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metadata.json").write_text('{"title": "of another tool"}')
    assert not is_torch_dist(tmp_path)


def test_optimizer_state_is_counted_and_left_out(tmp_path: Path) -> None:
    tensor = random_tensors()["a.weight"]
    names = [
        "optimizer.state.exp_avg.a.weight",
        "chained_0.optimizer.state.fp32_param.a.weight",
        "chained_12.optimizer.state.exp_avg_sq.a.weight",
    ]
    folder = write(tmp_path, dict.fromkeys([*names, "a.weight"], tensor), ["optimizer.x/shard_0_1"])
    checkpoint = open_torch_dist(folder)
    assert not checkpoint.problems
    assert list(checkpoint.tensors) == ["a.weight"]
    assert not checkpoint.objects
    assert checkpoint.ignored == 4


def test_the_common_state_may_be_a_bytes_entry(sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "release"
    folder.mkdir()
    state = {"args": Instance(Global("argparse", "Namespace"), state={"a": 1}, new=True)}
    with TorchDistWriter(folder) as writer:
        writer.write_object("common_state/shard_0_1", [state])
        write_metadata(folder, writer.close())
    write_config(folder)
    checkpoint = open_torch_dist(folder)
    assert not checkpoint.problems
    assert checkpoint.common == {"args": {"a": 1}}


# --- other formats ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["zarr", "fsdp_dtensor", "torch_dcp"])
def test_other_backends_are_named(sound: Path, backend: str) -> None:
    (sound / "metadata.json").write_text(json.dumps({"sharded_backend": backend}))
    with pytest.raises(UnsupportedError, match=f"format '{backend}'; save it again with"):
        open_torch_dist(sound)


def test_native_torch_checkpoints_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path, random_tensors(), ["args", "iteration"])
    (folder / "metadata.json").unlink()
    with pytest.raises(UnsupportedError, match="torch_dcp or fsdp_dtensor"):
        open_torch_dist(folder)


def test_legacy_checkpoints_are_named(tmp_path: Path) -> None:
    (tmp_path / "iter_0000005" / "mp_rank_00_000").mkdir(parents=True)
    for path in (tmp_path, tmp_path / "iter_0000005"):
        with pytest.raises(UnsupportedError, match=r"legacy checkpoint \(mp_rank_\* folders\)"):
            open_torch_dist(path)


# --- damage -------------------------------------------------------------------------------------


def files_of(checkpoint: TorchDistCheckpoint) -> list[str | None]:
    assert all(p.kind == "unreadable_file" and not p.warning for p in checkpoint.problems)
    assert all("\n" not in p.message for p in checkpoint.problems)
    return [p.file for p in checkpoint.problems]


@pytest.mark.parametrize("name", [".metadata", "metadata.json", "common.pt", "__0_0.distcp"])
def test_a_missing_file_is_one_problem(sound: Path, name: str) -> None:
    (sound / name).unlink()
    checkpoint = open_torch_dist(sound)
    assert files_of(checkpoint) == [name]
    if name == "__0_0.distcp":
        assert set(checkpoint.problems[0].tensors) == set(checkpoint.tensors)
        with pytest.raises(UnreadableError, match=r"^__0_0\.distcp: cannot be opened"):
            checkpoint.chunks("a.weight")


@pytest.mark.parametrize("name", [".metadata", "metadata.json", "common.pt", "__0_0.distcp"])
@pytest.mark.parametrize("damage", ["empty", "half", "lfs", "folder", "pipe"])
def test_a_damaged_file_is_one_problem(sound: Path, name: str, damage: str) -> None:
    file = sound / name
    data = file.read_bytes()
    file.unlink()
    if damage == "folder":
        file.mkdir()
    elif damage == "pipe":
        os.mkfifo(file)
    else:
        lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
        file.write_bytes({"empty": b"", "half": data[: len(data) // 2], "lfs": lfs}[damage])
    checkpoint = open_torch_dist(sound)
    found = checkpoint.problems or checkpoint.check_records()
    assert [p.file for p in found] == [name]


def test_files_that_metadata_does_not_name_are_a_warning(sound: Path) -> None:
    for name in ("__1_0.distcp", "__1_1.distcp"):
        shutil.copy(sound / "__0_0.distcp", sound / name)
    (problem,) = open_torch_dist(sound).problems
    assert problem.warning
    assert problem.kind == "tensor_not_in_index"
    assert problem.files == ("__1_0.distcp", "__1_1.distcp")
    assert problem.message == "'__1_0.distcp' and 1 more are not named in .metadata and not read"


def test_a_record_of_other_shape_or_dtype_is_refused(sound: Path) -> None:
    data = (sound / ".metadata").read_bytes()
    (sound / ".metadata").write_bytes(data.replace(b"bfloat16", b"int16"))
    checkpoint = open_torch_dist(sound)
    assert not checkpoint.problems
    with pytest.raises(UnreadableError, match=r"holds BF16 \[4, 6\] and \.metadata says I16"):
        checkpoint.chunks("a.weight")
    (problem,) = checkpoint.check_records()
    assert (problem.file, problem.tensor) == ("__0_0.distcp", "a.weight")


def test_damage_inside_a_file_is_found_when_records_are_checked(sound: Path) -> None:
    file = sound / "__0_0.distcp"
    file.write_bytes(b"\0" * file.stat().st_size)
    checkpoint = open_torch_dist(sound)
    assert not checkpoint.problems
    assert [p.file for p in checkpoint.check_records()] == ["__0_0.distcp"]


def test_metadata_that_calls_something_is_refused(sound: Path, tmp_path: Path) -> None:
    witness = tmp_path / "ran"

    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(witness),)

    for name, data in ((".metadata", pickle.dumps(Bomb())), ("common.pt", b"")):
        copy = shutil.copytree(sound, tmp_path / name.strip("."))
        if name == ".metadata":
            (copy / name).write_bytes(data)
        else:
            torch_like = Instance(Global("posix", "mkdir"), (str(witness),))
            write_common(copy, {"args": {"x": torch_like}})
        (problem,) = open_torch_dist(copy).problems
        assert problem.file == name
        assert (
            "mkdir, which no checkpoint needs; do not load it with torch either" in problem.message
        )
    assert not witness.exists()


def test_metadata_larger_than_any_checkpoint_needs_is_not_read(sound: Path) -> None:
    os.truncate(sound / ".metadata", 1 << 40)  # a hole
    (problem,) = open_torch_dist(sound).problems
    assert "more than 268,435,456; not read" in problem.message


# --- checkpoints that torch and Megatron wrote --------------------------------------------------


def same_as_torch(folder: Path, checkpoint: TorchDistCheckpoint) -> int:
    """Compare every record with what torch loads; how many tensors there were."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader

    records = FileSystemReader(folder).read_metadata().storage_data
    compared = 0
    found = {key: stored_bytes(checkpoint, key) for key in checkpoint.tensors}
    files = {
        name: (folder / name).read_bytes() for name in {p.relative_path for p in records.values()}
    }
    for index, place in records.items():
        if index.offset is None or index.fqn.startswith("optimizer."):
            continue
        blob = files[place.relative_path][place.offset : place.offset + place.length]
        tensor = torch.load(io.BytesIO(blob), weights_only=True)
        raw = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        assert found[index.fqn].pop(tuple(index.offset)) == raw
        compared += 1
    assert not any(found.values())
    return compared


def test_the_shared_cases_are_read_like_torch_does(shared: Path) -> None:
    pytest.importorskip("torch")
    compared = 0
    for tracker in sorted(shared.glob("cases/*/*/latest_checkpointed_iteration.txt")):
        checkpoint = open_torch_dist(tracker.parent)
        expected = json.loads((tracker.parent.parent / "expect.json").read_text())
        if expected["kind"] == "td_single":
            assert files_of(checkpoint) == [f["file"] for f in expected["findings"]]
            continue
        assert not checkpoint.problems
        assert not checkpoint.check_records()
        assert checkpoint.common["args"]["num_layers"] == 3
        assert all(checkpoint.read_object(o) == [None] for o in checkpoint.objects)
        compared += same_as_torch(checkpoint.folder, checkpoint)
    assert compared > 500


@pytest.mark.megatron
def test_what_megatron_saves_is_read_like_torch_does(megatron_cpu: None, tmp_path: Path) -> None:
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
    from megatron.core.transformer.enums import AttnBackend

    def bits(name: str, *shape: int) -> Any:
        dtype = getattr(torch, name)
        count = TensorSpec("U8", shape).elements * dtype.itemsize
        high = 2 if name == "bool" else 256
        raw = torch.randint(0, high, (count,), dtype=torch.uint8).view(dtype)
        return raw.reshape(shape)

    part = ShardedTensor.from_rank_offsets
    state: dict[str, Any] = {
        f"dtype.{name}": part(f"dtype.{name}", bits(name, 4, 3)) for name in TORCH_DTYPES
    }
    for n in range(3):
        stack = (0, n, 3)
        state |= {
            f"s{n}": part("decoder.layers.w", bits("bfloat16", 3, 5), stack, prepend_axis_num=1),
            f"g{n}": part("fc1", bits("bfloat16", 2, 5), stack, (1, 0, 2), prepend_axis_num=1),
            f"u{n}": part("fc1", bits("bfloat16", 2, 5), stack, (1, 1, 2), prepend_axis_num=1),
            f"o{n}": ShardedObject("decoder.layers.w._extra_state", None, (3,), (n,)),
        }
    state |= {
        "scalar": part("scalar", torch.tensor(3.5)),
        "optimizer": part("optimizer.state.exp_avg.decoder.layers.w", bits("float32", 3, 5)),
        "rng": ShardedObject(
            "rng_state", [{"r": random.getstate(), "t": torch.get_rng_state()}], (1, 1), (0, 0)
        ),
        "args": argparse.Namespace(
            mtp_num_layers=1, betas=(0.9, 0.95), attention_backend=AttnBackend.auto,
            params_dtype=torch.bfloat16, save=Path("/x"), exit_signal=signal.SIGTERM,
        ),
        "iteration": 7,
        "checkpoint_version": 3.0,
    }  # fmt: skip
    folder = tmp_path / "iter_0000007"
    folder.mkdir()
    dist_checkpointing.save(state, str(folder), content_metadata={"singleton_local_shards": False})
    checkpoint = open_torch_dist(tmp_path)
    assert not checkpoint.problems
    assert not checkpoint.check_records()
    assert same_as_torch(folder, checkpoint) == len(TORCH_DTYPES) + 3 + 6 + 1
    assert checkpoint.ignored == 1
    assert checkpoint.tensors["fc1"] == TensorSpec("BF16", (3, 4, 5))
    assert len(checkpoint.chunks("fc1")) == 6
    assert {dtype for dtype, _ in TORCH_DTYPES.values()} <= {
        spec.dtype for spec in checkpoint.tensors.values()
    }
    assert checkpoint.read_object("decoder.layers.w._extra_state/shard_2_3") == [None]
    assert checkpoint.read_object("rng_state/shard_0.0_1.1")[0][0]["r"] == random.getstate()
    args = checkpoint.common["args"]
    assert (args["mtp_num_layers"], args["betas"]) == (1, (0.9, 0.95))
    assert str(args["attention_backend"].of) == "megatron.core.transformer.enums.AttnBackend"
    assert str(args["params_dtype"]) == "torch.bfloat16"
    assert checkpoint.common["iteration"] == checkpoint.iteration == 7


def test_a_checkpoint_that_torch_saved_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    state = {
        "w": torch.randn(5, 7).bfloat16(),
        "f8": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "u16": torch.arange(9).to(torch.uint16),
        "scalar": torch.tensor(2.5),
        "nested": {"x": torch.ones(3, dtype=torch.bool)},
        "note": "text",
    }
    writer = dcp.FileSystemWriter(tmp_path, thread_count=3)
    dcp.save(state, storage_writer=writer, no_dist=True)
    checkpoint = open_torch_dist(tmp_path)
    assert files_of(checkpoint) == ["metadata.json", "common.pt"]  # torch alone writes neither
    assert checkpoint.tensors["w"] == TensorSpec("BF16", (5, 7))
    assert set(checkpoint.objects) == {"note"}
    assert same_as_torch(tmp_path, checkpoint) == 5


# --- more files than a process may open ---------------------------------------------------------


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """How many files may be open, and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + 20, hard))
    yield held + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_tensor_in_more_files_than_may_be_open(tmp_path: Path, few_descriptors: int) -> None:
    folder, count = tmp_path / "iter_0000003", few_descriptors + 30
    written: list[Written] = []
    folder.mkdir()
    for rank in range(count):
        with TorchDistWriter(folder, rank) as writer:
            box = Box((count - 1 - rank, 0), (1, 2))
            writer.write("w", TensorSpec("U8", (count, 2)), box, [bytes(divmod(rank, 256))])
            written += writer.close()
    write_metadata(folder, written)
    write_common(folder, {"args": {}, "iteration": 3})
    write_config(folder)
    checkpoint = open_torch_dist(folder)
    assert list(checkpoint.check_records()) == []
    assert stored_bytes(checkpoint, "w") == {
        (count - 1 - rank, 0): bytes(divmod(rank, 256)) for rank in range(count)
    }


def test_a_lack_of_descriptors_is_no_damage(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    checkpoint = open_torch_dist(sound)
    monkeypatch.setattr(os, "open", full)
    with pytest.raises(UnreadableError, match=r"Too many open files; raise `ulimit -n`$"):
        checkpoint.chunks("a.weight")
