from __future__ import annotations

import errno
import io
import os
import pickle
import random
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpconv.errors import UnsupportedError, WriteError
from mtpconv.store.dist_folder import find_folder
from mtpconv.store.dist_metadata_writer import (
    write_common,
    write_config,
    write_metadata,
    write_tracker,
)
from mtpconv.store.objects import read_common
from mtpconv.store.torch_dist import open_torch_dist
from mtpconv.store.torch_dist_writer import TorchDistWriter, Written
from mtpconv.store.torch_names import TORCH_DTYPES
from mtpconv.tensors import Box, Shape, TensorSpec
from tests.store.dist import random_tensors, stored_bytes, write


def finish(folder: Path, records: Any) -> Path:
    write_metadata(folder, records)
    write_common(folder, {"args": {}})
    write_config(folder)
    return folder


def sound_archives(folder: Path, records: tuple[Written, ...]) -> bool:
    """Whether every record is a zip whose checksums are right."""
    for record in records:
        with (folder / record.file).open("rb") as stream:
            stream.seek(record.offset)
            blob = io.BytesIO(stream.read(record.length))
        with zipfile.ZipFile(blob) as archive:
            if archive.testzip() is not None:
                return False
    return True


@settings(max_examples=40)
@given(st.integers(0, 700_000), st.lists(st.integers(0, 700_000), max_size=4))
def test_blocks_of_any_size_make_the_same_record(
    tmp_path_factory: pytest.TempPathFactory, count: int, cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("blocks")
    data = random.Random(count).randbytes(count)
    spec, box = TensorSpec("U8", (count,)), Box((0,), (count,))
    ends = sorted(min(c, count) for c in cuts)
    blocks = [data[a:b] for a, b in zip([0, *ends], [*ends, count], strict=True)]
    with TorchDistWriter(folder) as writer:
        writer.write("one", spec, box, [data])
        writer.write("many", spec, box, (memoryview(b) for b in blocks))
        records = writer.close()
    assert sound_archives(folder, records)
    one, many = ((folder / r.file).read_bytes()[r.offset : r.offset + r.length] for r in records)
    assert one == many
    assert data in one


def test_arrays_of_words_are_blocks_too(tmp_path: Path) -> None:
    import numpy as np

    words = np.arange(6, dtype=np.uint16).reshape(2, 3)
    with TorchDistWriter(tmp_path) as writer:
        writer.write("t", TensorSpec("BF16", (2, 3)), Box.whole((2, 3)), [words])
        finish(tmp_path, writer.close())
    assert stored_bytes(open_torch_dist(tmp_path), "t") == {(0, 0): words.tobytes()}


def test_a_file_is_named_after_its_rank_and_number(tmp_path: Path) -> None:
    records: list[Written] = []
    for number in range(2):
        with TorchDistWriter(tmp_path, 3, number) as writer:
            for n in range(4):
                spec = TensorSpec("U8", (4000,))
                writer.write(f"t{number}{n}", spec, Box.whole(spec.shape), [bytes([n]) * 4000])
            records += writer.close()
    finish(tmp_path, records)
    assert sorted(p.name for p in tmp_path.glob("*.distcp")) == ["__3_0.distcp", "__3_1.distcp"]
    checkpoint = open_torch_dist(tmp_path)
    assert not checkpoint.problems
    assert stored_bytes(checkpoint, "t13") == {(0,): b"\3" * 4000}
    assert {
        chunk.start % 64 for name in checkpoint.tensors for chunk in checkpoint.chunks(name)
    } == {0}


def test_reserved_room_may_be_filled_by_others_in_any_order(tmp_path: Path) -> None:
    spec = TensorSpec("F32", (4, 100))
    data = [random.Random(n).randbytes(400) for n in range(4)]
    with TorchDistWriter(tmp_path) as writer:
        rooms = [writer.reserve("t", spec, Box((n, 0), (1, 100))) for n in range(4)]
        for n in (2, 0, 3, 1):
            room = rooms[n]
            assert (room.nbytes, room.start % 64) == (400, 0)
            writer.file.write(room.start, data[n])
            room.seal(writer.file, zlib.crc32(data[n]))
        records = writer.close()
        finish(tmp_path, records)
    assert sound_archives(tmp_path, records)
    assert stored_bytes(open_torch_dist(tmp_path), "t") == {(n, 0): data[n] for n in range(4)}


def test_threads_write_one_file(tmp_path: Path) -> None:
    spec = TensorSpec("U8", (64, 5000))

    def job(n: int) -> None:
        writer.write("t", spec, Box((n, 0), (1, 5000)), [bytes([n]) * 2500] * 2)

    with TorchDistWriter(tmp_path) as writer:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(job, range(64)))
        finish(tmp_path, writer.close())
    checkpoint = open_torch_dist(tmp_path)
    assert not checkpoint.problems
    assert stored_bytes(checkpoint, "t") == {(n, 0): bytes([n]) * 5000 for n in range(64)}


def test_the_records_of_all_ranks_make_one_checkpoint(tmp_path: Path) -> None:
    spec = TensorSpec("U8", (6, 10))
    everything: list[Written] = []
    for rank in range(3):
        with TorchDistWriter(tmp_path, rank) as writer:
            for n in (rank, rank + 3):
                writer.write("t", spec, Box((n, 0), (1, 10)), [bytes([n]) * 10])
            everything += pickle.loads(pickle.dumps(writer.close()))  # as ranks send it
    finish(tmp_path, everything)
    checkpoint = open_torch_dist(tmp_path)
    assert not checkpoint.problems
    assert stored_bytes(checkpoint, "t") == {(n, 0): bytes([n]) * 10 for n in range(6)}
    with pytest.raises(WriteError, match=r"^t: its chunks leave 20 of 60 .* rank missing\?"):
        write_metadata(tmp_path, everything[:4])


@pytest.mark.parametrize("size", [100, 1_000_000])
@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_source_that_changes_its_size_is_noticed(tmp_path: Path, size: int, wrong: int) -> None:
    spec = TensorSpec("U8", (size,))
    with TorchDistWriter(tmp_path) as writer, pytest.raises(WriteError, match=r"^t: .* one chunk"):
        writer.write("t", spec, Box.whole((size,)), [b"x" * (size + wrong)])


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"mine")
    spec = TensorSpec("U8", (1,))
    with TorchDistWriter(tmp_path) as writer, pytest.raises(WriteError, match="File exists"):
        writer.write("t", spec, Box.whole((1,)), [b"x"])
    assert (tmp_path / "__0_0.distcp").read_bytes() == b"mine"


@pytest.mark.parametrize("size", [100, 1_000_000])
def test_a_full_disk_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    spec = TensorSpec("U8", (size,))
    with TorchDistWriter(tmp_path) as writer:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(WriteError, match=r"__0_0\.distcp: .*No space left.*; free some space"):
            writer.write("t", spec, Box.whole((size,)), [b"x" * size])
        with pytest.raises(WriteError, match=r"common\.pt: cannot be written"):
            write_common(tmp_path, {})


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, bytes(data[:7]), at))
    with TorchDistWriter(tmp_path) as writer:
        writer.write("t", TensorSpec("U8", (100,)), Box.whole((100,)), [bytes(range(100))])
        finish(tmp_path, writer.close())
    monkeypatch.undo()
    assert stored_bytes(open_torch_dist(tmp_path), "t") == {(0,): bytes(range(100))}


def test_everything_reaches_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[str] = set()
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.add(Path(f"/proc/self/fd/{fd}").resolve().name)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    folder = write(tmp_path, random_tensors())
    assert synced == {
        folder.name, tmp_path.name, "__0_0.distcp", ".metadata", "common.pt", "metadata.json",
        "latest_checkpointed_iteration.txt",
    }  # fmt: skip


def test_a_dtype_that_torch_lacks_leaves_nothing_behind(tmp_path: Path) -> None:
    with TorchDistWriter(tmp_path) as writer:
        with pytest.raises(UnsupportedError, match="F4"):
            writer.reserve("t", TensorSpec("F4", (2,)), Box.whole((2,)))
        assert writer.close() == ()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("iteration", [0, 12, 12345678, "release"])
def test_the_tracker_is_found_again(tmp_path: Path, iteration: Any) -> None:
    name = "release" if iteration == "release" else f"iter_{iteration:07d}"
    (tmp_path / name).mkdir()
    write_tracker(tmp_path, iteration)
    assert find_folder(tmp_path) == (tmp_path / name, iteration, None)


# --- what torch and Megatron make of it ----------------------------------------------------------


def every_dtype() -> dict[str, tuple[TensorSpec, dict[Shape, tuple[Shape, bytes]]]]:
    source = random.Random(5)
    found: dict[str, tuple[TensorSpec, dict[Shape, tuple[Shape, bytes]]]] = {}
    for torch_name, (dtype, _) in TORCH_DTYPES.items():
        for shape in ((), (0, 3), (4, 6)):
            spec = TensorSpec(dtype, shape)
            data = source.randbytes(spec.nbytes)
            if torch_name == "bool":
                data = bytes(b & 1 for b in data)
            at = (0,) * len(shape)
            found[f"{torch_name}/{len(shape)}/{spec.elements}"] = (spec, {at: (shape, data)})
    spec = TensorSpec("BF16", (3, 4, 5))
    parts: dict[Shape, tuple[Shape, bytes]]
    parts = {(e, h, 0): ((1, 2, 5), source.randbytes(20)) for e in range(3) for h in (0, 2)}
    return found | {"experts": (spec, parts)}


def whole_bytes(spec: TensorSpec, parts: dict[Shape, tuple[Shape, bytes]]) -> bytes:
    """The bytes of the tensor that these chunks make up (cut along the outer axes only)."""
    return b"".join(data for _, (_, data) in sorted(parts.items()))


def raw(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def test_torch_loads_what_we_write(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    tensors = every_dtype()
    folder = write(tmp_path, tensors, ["a._extra_state/shard_0_1"])
    state = {
        key: torch.empty(spec.shape, dtype=getattr(torch, key.partition("/")[0], torch.bfloat16))
        for key, (spec, _) in tensors.items()
    }
    reader = dcp.FileSystemReader(folder)
    dcp.load(state, storage_reader=reader, no_dist=True)
    for key, (spec, parts) in tensors.items():
        assert raw(state[key]) == whole_bytes(spec, parts), key


def test_torch_reads_our_metadata_like_its_own(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint import FileSystemReader, metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    spec = TensorSpec("BF16", (2, 3))
    with TorchDistWriter(tmp_path) as writer:
        for n in range(2):
            writer.write("t", spec, Box((n, 0), (1, 3)), [b"abcdef"])
        writer.write_object("o/shard_0_1", [None])
        records = writer.close()
        write_metadata(tmp_path, records)
    found = FileSystemReader(tmp_path).read_metadata()
    index = metadata.MetadataIndex
    wanted = {
        index("t", (0, 0), 0): records[0],
        index("t", (1, 0), 1): records[1],
        index("o/shard_0_1"): records[2],
    }
    assert found.storage_data == {
        key: _StorageInfo(r.file, r.offset, r.length) for key, r in wanted.items()
    }
    assert [key.index for key in found.storage_data] == [None, 0, 1]
    chunk = metadata.ChunkStorageMetadata
    chunks = [chunk(torch.Size((n, 0)), torch.Size((1, 3))) for n in range(2)]
    properties = metadata.TensorProperties(dtype=torch.bfloat16)
    size = torch.Size((2, 3))
    assert found.state_dict_metadata == {
        "o/shard_0_1": metadata.BytesStorageMetadata(),
        "t": metadata.TensorStorageMetadata(properties, size, chunks),
    }


def test_torch_loads_our_common_state(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from argparse import Namespace

    args = {
        "num_layers": 2,
        "mtp_num_layers": None,
        "betas": (0.9, 0.95),
        "names": ["a"],
        "b": True,
    }
    common = {"args": args, "iteration": 0, "checkpoint_version": 3.0, "content_metadata": {}}
    write_common(tmp_path, common)
    assert read_common(tmp_path) == common
    torch.serialization.add_safe_globals([Namespace])  # as megatron-core does on import
    loaded = torch.load(tmp_path / "common.pt", weights_only=True)
    assert loaded == common | {"args": Namespace(**args)}


@pytest.mark.megatron
def test_megatron_loads_what_we_write(megatron_cpu: None, tmp_path: Path) -> None:
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    # Megatron divides by the sizes of a chunk, so it has no empty tensors.
    tensors = {k: (spec, parts) for k, (spec, parts) in every_dtype().items() if spec.elements}
    keys = ["rank._extra_state/shard_0_1", *(f"layers._extra_state/shard_{n}_2" for n in range(2))]
    folder = write(tmp_path, tensors, keys)
    part = ShardedTensor.from_rank_offsets
    state: dict[str, Any] = {}
    for key, (spec, _) in tensors.items():
        if key != "experts":
            dtype = getattr(torch, key.partition("/")[0])
            state[key] = part(key, torch.empty(spec.shape, dtype=dtype))
    for n in range(3):  # another layout than the one that was written
        one = torch.empty((4, 5), dtype=torch.bfloat16)
        state[f"experts {n}"] = part("experts", one, (0, n, 3), prepend_axis_num=1)
    state["rank"] = ShardedObject("rank._extra_state", None, (1,), (0,))
    state |= {
        f"layer {n}": ShardedObject("layers._extra_state", None, (2,), (n,)) for n in range(2)
    }
    loaded = dist_checkpointing.load(state, str(folder))
    for key, (spec, parts) in tensors.items():
        if key != "experts":
            assert raw(loaded[key]) == whole_bytes(spec, parts), key
    spec, parts = tensors["experts"]
    assert b"".join(raw(loaded[f"experts {n}"]) for n in range(3)) == whole_bytes(spec, parts)
    assert loaded["rank"] is loaded["layer 0"] is loaded["layer 1"] is None
    assert loaded["args"].num_layers == 2
    assert loaded["iteration"] == 3
    listed = dist_checkpointing.load_tensors_metadata(str(folder))
    assert {key: tuple(t.global_shape) for key, t in listed.items()} == {
        key: spec.shape for key, (spec, _) in tensors.items()
    }
