"""torch_dist from afar: the same bytes, few requests, one clear line for what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpconv.convert import hf2mcore
from mtpconv.convert.mcore_to_hf_plan import checkpoint_files
from mtpconv.errors import UnreadableError, UnsupportedError, UsageError
from mtpconv.store import afar
from mtpconv.store.afar_dist import AfarMegatron, open_dist_afar
from mtpconv.store.checkpoint import require_sound
from mtpconv.store.content import blocks
from mtpconv.store.crc_check import CrcCheck
from mtpconv.store.dist_folder import METADATA, TRACKER
from mtpconv.store.dist_metadata_writer import write_common, write_config, write_metadata
from mtpconv.store.files import Files
from mtpconv.store.snapshot import Snapshot
from mtpconv.store.torch_dist import COMMON_STATE, TorchDistCheckpoint, open_torch_dist
from mtpconv.store.torch_dist_writer import TorchDistWriter
from mtpconv.store.upload import Upload
from mtpconv.tensors import Box, Shape, TensorSpec
from tests.convert import test_afar as hf_afar
from tests.convert.folders import make_hf
from tests.mapping.toy import config
from tests.store.dist import Tensors, grids, random_tensors, write
from tests.store.test_records import saved
from tests.store.test_remote import Server

pytest.importorskip("fsspec")
store, impatient = hf_afar.store, hf_afar.impatient


def contents(checkpoint: TorchDistCheckpoint) -> dict[str, bytes]:
    with Files() as files:
        return {
            name: b"".join(bytes(b) for b in blocks(checkpoint, name, files))
            for name in checkpoint.tensors
        }


@contextmanager
def served(folder: Path, ranges: bool = True) -> Iterator[Server]:
    server = Server(folder, ranges)
    try:
        yield server
    finally:
        server.server.shutdown()


def opened(url: str, place: Path) -> AfarMegatron:
    place.mkdir()
    return open_dist_afar(url, place)


@pytest.mark.parametrize("below", ["", "/iter_0000003"])
def test_what_lies_in_a_store_is_what_lies_here(store: str, tmp_path: Path, below: str) -> None:
    folder = write(tmp_path / "here", random_tensors(), ["a._extra_state/shard_0_1"])
    hf_afar.fill(store, folder.parent)
    here, found = open_torch_dist(folder), opened(store + below, tmp_path / "mirror")
    there = found.checkpoint
    require_sound(there)
    assert (there.tensors, there.common, there.iteration) == (here.tensors, here.common, 3)
    assert contents(there) == contents(here)
    assert there.read_object("a._extra_state/shard_0_1") == [None]
    assert not there.check_records()
    assert found.source is None
    found.require_unchanged()


@settings(max_examples=15, deadline=None)
@given(
    st.lists(grids(), min_size=1, max_size=4), st.integers(1, 3), st.sampled_from([64, 300, 8192])
)
def test_any_grid_in_stretches_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[Any], kept: int, span: int
) -> None:

    def chunk(spec: TensorSpec, box: Box) -> tuple[Shape, bytes]:
        return box.sizes, bytes(i % 251 for i in range(TensorSpec(spec.dtype, box.sizes).nbytes))

    wanted: Tensors = {
        f"t{n}": (spec, {b.offsets: chunk(spec, b) for b in boxes})
        for n, (spec, boxes) in enumerate(tensors)
    }
    place = tmp_path_factory.mktemp("grid")
    write(place / "here", wanted)
    with pytest.MonkeyPatch.context() as patch, served(place / "here") as server:
        patch.setattr(afar, "SPAN", span)
        patch.setattr(afar, "KEPT", kept)
        there = opened(server.url, place / "mirror").checkpoint
        assert contents(there) == contents(open_torch_dist(place / "here"))
    shutil.rmtree(place)


def test_records_that_torch_wrote(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    wanted = {f"t{n}": torch.randn(3, n).bfloat16() for n in range(1, 40)}
    wanted["f8"] = torch.randn(4, 4).to(torch.float8_e4m3fn)
    wanted["scalar"] = torch.tensor(2.5)
    writer = dcp.FileSystemWriter(tmp_path / "here", thread_count=2)
    dcp.save(wanted, storage_writer=writer, no_dist=True)
    write_config(tmp_path / "here")
    write_common(tmp_path / "here", {"args": {}, "iteration": 3})
    with served(tmp_path / "here") as server:
        there = opened(server.url, tmp_path / "mirror").checkpoint
        require_sound(there)
        assert contents(there) == contents(open_torch_dist(tmp_path / "here"))
        check = CrcCheck(there.sealed())
        check.read(check.rest, 2)
    assert (check.rest, check.broken, check.unsealed) == ([], [], 0)


@pytest.mark.megatron
def test_what_megatron_saved(megatron_cpu: None, tmp_path: Path) -> None:
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    part = ShardedTensor.from_rank_offsets
    state: dict[str, Any] = {
        f"{n}": part("layers.w", torch.randn(40, 5).bfloat16(), (0, n, 9), prepend_axis_num=1)
        for n in range(9)
    }
    state |= {"s": part("scalar", torch.tensor(3.5)), "iteration": 7, "args": {"num_layers": 9}}
    folder = tmp_path / "here/iter_0000007"
    folder.mkdir(parents=True)
    dist_checkpointing.save(state, str(folder), content_metadata={"singleton_local_shards": False})
    with served(folder) as server:
        there = opened(server.url, tmp_path / "mirror").checkpoint
        require_sound(there)
        here = open_torch_dist(folder)
        assert (there.common, contents(there)) == (here.common, contents(here))
        check = CrcCheck(there.sealed())
        check.read(check.rest)
    assert (check.rest, check.broken, check.unsealed) == ([], [], 0)


def test_a_common_state_among_the_records(store: str, tmp_path: Path) -> None:
    """As megatron-core 0.19 has it."""
    folder = tmp_path / "here" / "iter_0000003"
    folder.mkdir(parents=True)
    common = {"args": {"num_layers": 2}, "iteration": 3}
    spec = TensorSpec("U8", (5,))
    with TorchDistWriter(folder) as writer:
        writer.write("a", spec, Box.whole(spec.shape), [b"abcde"])
        writer.write_object(COMMON_STATE, [common])
        write_metadata(folder, writer.close())
    write_config(folder)
    hf_afar.fill(f"{store}/iter_0000003", folder)
    there = opened(f"{store}/iter_0000003", tmp_path / "mirror").checkpoint
    require_sound(there)
    assert there.common == common
    assert contents(there) == {"a": b"abcde"}


def test_few_requests_and_no_byte_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding the records of a file costs no request of its own."""
    monkeypatch.setattr(afar, "SPAN", 4096)
    data = bytes(range(256)) * 4
    wanted: Tensors = {
        f"t{n:03}": (TensorSpec("U8", (1024,)), {(0,): ((1024,), data)}) for n in range(300)
    }
    folder = write(tmp_path / "here", wanted)
    size = sum(p.stat().st_size for p in folder.glob("*.distcp"))
    with served(tmp_path / "here") as server:
        there = opened(server.url, tmp_path / "mirror").checkpoint
        planned = len(server.requests)
        sealed = there.sealed()
        for name in there.tensors:
            there.chunks(name)
        assert len(server.requests) == planned < 25
        server.sent = 0
        check = CrcCheck(sealed)
        with Files(on_read=check.saw) as files:
            for name in there.tensors:
                assert b"".join(map(bytes, blocks(there, name, files))) == data
        assert (check.rest, check.broken) == ([], [])
        assert len(server.requests) - planned == -(-size // 4096)
        assert server.sent == size


def test_a_flipped_bit_is_seen_where_it_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "here", random_tensors())
    (chunk,) = open_torch_dist(folder).chunks("a.weight")
    data = bytearray(chunk.file.read_bytes())
    data[chunk.start] ^= 1
    chunk.file.write_bytes(data)
    with served(tmp_path / "here") as server:
        there = opened(server.url, tmp_path / "mirror").checkpoint
        check = CrcCheck(there.sealed())
        check.read(check.rest)
        (broken,) = check.broken
        assert broken.fault.startswith(f"{server.url}/iter_0000003/__0_0.distcp: the record of a.w")


def test_a_view_of_a_larger_storage_is_counted_as_not_checked(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    folder = tmp_path / "here"
    folder.mkdir()
    record = saved(torch.arange(100, dtype=torch.bfloat16)[10:34].reshape(4, 6))
    spec = TensorSpec("BF16", (4, 6))
    with TorchDistWriter(folder) as writer:
        writer.write("a", spec, Box.whole(spec.shape), [bytes(48)])
        (written,) = writer.close()
    write_metadata(folder, [written._replace(length=len(record))])
    (folder / written.file).write_bytes(bytes(written.offset) + record)
    write_config(folder)
    write_common(folder, {"args": {}, "iteration": 3})
    with served(folder) as server:
        there = opened(server.url, tmp_path / "mirror").checkpoint
        assert contents(there) == contents(open_torch_dist(folder))
        check = CrcCheck(there.sealed())
        check.read(check.rest)
    assert (check.rest, check.broken, check.unsealed) == ([], [], 1)


def test_a_model_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its listing names `hf_source`; without one that is refused."""
    hf2mcore(make_hf(tmp_path / "hf", config()), tmp_path / "site")
    with served(tmp_path / "site") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with pytest.raises(UnsupportedError, match=r"hf://org/model/hf_source: .* no listing"):
            opened("hf://org/model", tmp_path / "mirror")
        files = [p.relative_to(tmp_path / "site") for p in (tmp_path / "site").rglob("*.*")]
        about = tmp_path / "site/api/models/org/model/revision/main"
        about.parent.mkdir(parents=True)
        about.write_text(json.dumps({"siblings": [{"rfilename": str(f)} for f in files]}))
        found = opened("hf://org/model", tmp_path / "listed")
        require_sound(found.checkpoint)
        assert contents(found.checkpoint) == contents(open_torch_dist(tmp_path / "site"))
        assert found.source is not None
        assert found.source.source.names


def test_mirrors_of_one_state_look_the_same(store: str, tmp_path: Path) -> None:
    """So that --resume takes over what was made of it, and nothing that was not."""
    folder = write(tmp_path / "here", random_tensors())
    hf_afar.fill(store, folder.parent)

    def state(name: str) -> str:
        return Snapshot(checkpoint_files(opened(store, tmp_path / name).mirror.path)).digest

    before = state("one")
    assert state("two") == before
    data = (folder / "__0_0.distcp").read_bytes()
    Upload(store).write("iter_0000003/__0_0.distcp", [data[:-1] + b"\x55"])
    if store.startswith("s3"):  # in memory a file has no tag, and its time a coarse clock
        assert state("three") != before


# --- what is wrong is one line -------------------------------------------------------------------


def test_what_is_not_there(store: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "here", random_tensors())
    with pytest.raises(UnreadableError, match=r"/model: neither \.metadata nor latest"):
        opened(store, tmp_path / "none")
    (folder / METADATA).rename(folder / "kept")
    hf_afar.fill(store, folder.parent)
    with pytest.raises(UnreadableError, match=r"says '3', and there is no \.metadata"):
        opened(store, tmp_path / "no_metadata")
    with pytest.raises(UnreadableError, match=r"iter_0000003: neither \.metadata nor"):
        opened(f"{store}/iter_0000003", tmp_path / "nor_there")
    hf = make_hf(tmp_path / "hf", config())
    hf_afar.fill(f"{store}_hf", hf)
    with pytest.raises(UsageError, match="is a HuggingFace folder; hf2mcore converts"):
        opened(f"{store}_hf", tmp_path / "an_hf_folder")


@pytest.mark.parametrize("text", ["../other", "-1", "release/../..", ""])
def test_a_tracker_cannot_lead_elsewhere(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path / "here", random_tensors())
    (folder.parent / TRACKER).write_text(text)
    with served(tmp_path / "here") as server:
        with pytest.raises(UnreadableError, match=r"latest_checkpointed_iteration\.txt says"):
            opened(server.url, tmp_path / "mirror")
        assert not [path for path, _ in server.requests if ".." in path]


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("__0_0.distcp", "cut", r"ends at byte [\d,]+ and \.metadata needs"),
        ("__0_0.distcp", "gone", r"__0_0\.distcp is named in \.metadata and cannot be read"),
        (".metadata", "garbage", r"\.metadata"),
        ("metadata.json", "gone", r"metadata\.json: cannot be opened"),
        ("common.pt", "garbage", "common.pt"),
    ],
)
def test_damage_is_found_as_in_a_folder(
    store: str, tmp_path: Path, file: str, damage: str, said: str
) -> None:
    folder = write(tmp_path / "here", random_tensors())
    path = folder / file
    data = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(data[: len(data) - 40] if damage == "cut" else b"garbage")
    hf_afar.fill(store, folder.parent)
    there = opened(store, tmp_path / "mirror").checkpoint
    assert [p.message for p in there.problems] == [
        p.message for p in open_torch_dist(folder.parent).problems
    ]
    with pytest.raises(UnreadableError, match=said):
        require_sound(there)


def test_a_record_of_another_save(tmp_path: Path) -> None:
    folder = write(tmp_path / "here", random_tensors())
    other = write(
        tmp_path / "other",
        {n: (TensorSpec("F16", s.shape) if s.dtype == "BF16" else s, c)
         for n, (s, c) in random_tensors().items()},
    )  # fmt: skip
    shutil.copy(other / "__0_0.distcp", folder / "__0_0.distcp")
    with served(tmp_path / "here") as server:
        there = opened(server.url, tmp_path / "mirror").checkpoint
        with pytest.raises(UnreadableError, match=r"^http.*distcp: the record of a\.weight .* F16"):
            contents(there)


def test_a_file_that_changes(store: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "here", random_tensors())
    hf_afar.fill(store, folder.parent)
    for name in (METADATA, "__0_0.distcp"):
        found = opened(store, tmp_path / f"mirror{name}")
        path = folder / name
        Upload(f"{store}/iter_0000003").write(name, [path.read_bytes()[:-1] + b"\x55"])
        with pytest.raises(UnreadableError, match=rf"{name}: changed while it was read"):
            found.require_unchanged()
        Upload(f"{store}/iter_0000003").write(name, [path.read_bytes()])


def test_a_server_that_sends_whole_files_only(tmp_path: Path) -> None:
    write(tmp_path / "here", random_tensors())
    with (
        served(tmp_path / "here", ranges=False) as server,
        pytest.raises(UnsupportedError, match="sends whole files only; download them"),
    ):
        opened(server.url, tmp_path / "mirror")


def test_other_formats_are_refused_by_name(store: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "here", random_tensors())
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    hf_afar.fill(store, folder.parent)
    with pytest.raises(UnsupportedError, match="format 'zarr'"):
        opened(store, tmp_path / "mirror")


def test_a_pickle_that_names_code_is_not_run(tmp_path: Path) -> None:
    folder = write(tmp_path / "here", random_tensors())
    (folder / METADATA).write_bytes(b"cposix\nsystem\n(S'touch ran'\ntR.")
    with served(tmp_path / "here") as server:
        there = opened(server.url, tmp_path / "mirror").checkpoint
        with pytest.raises(UnreadableError, match=r"posix\.system"):
            require_sound(there)


def test_what_it_keeps_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(afar, "SPAN", 64)
    monkeypatch.setattr(afar, "KEPT", 5)
    folder = write(tmp_path / "here", random_tensors())
    write_common(folder, {"args": {}, "iteration": 3})
    with served(tmp_path / "here") as server:
        there = opened(server.url, tmp_path / "mirror").checkpoint
        contents(there)
        kept = [file._stretches for file in there._files.values()]
    assert all(one is kept[0] for one in kept)
    assert 0 < len(kept[0]._kept) <= afar.KEPT
