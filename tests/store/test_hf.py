"""HF folders: what a sound one looks like, and every fault a file, header or index can have."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from mtpconv.errors import RefusedError, UnreadableError
from mtpconv.store.checkpoint import require_sound
from mtpconv.store.content import blocks
from mtpconv.store.hf import HfCheckpoint, open_hf
from mtpconv.store.hf_index import INDEX_NAME, has_file
from mtpconv.store.safetensors_header import parse_header, read_header
from mtpconv.tensors import TensorSpec

Entries = dict[str, tuple[str, list[int], bytes]]

ENTRIES: Entries = {
    "model.embed_tokens.weight": ("BF16", [4, 2], bytes(range(16))),
    "model.layers.0.mlp.gate.e_score_correction_bias": ("F32", [2], bytes(range(8))),
    "model.layers.1.eh_proj.weight": ("BF16", [2, 4], bytes(range(100, 116))),
    "lm_head.weight": ("F8_E4M3", [3], b"abc"),
}


def shard_bytes(entries: Entries, *, trailing: bytes = b"", pad: int = 0) -> bytes:
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape, data) in entries.items():
        offsets = [at, at + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        at += len(data)
    return with_header(header, b"".join(e[2] for e in entries.values()) + trailing, pad)


def with_header(header: object, payload: bytes, pad: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * pad
    return len(text).to_bytes(8, "little") + text + payload


def write_folder(
    path: Path, shards: dict[str, Entries], *, index: bool = True, config: object = None
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for file, entries in shards.items():
        (path / file).write_bytes(shard_bytes(entries))
    (path / "config.json").write_text(json.dumps(config or {"model_type": "x"}))
    if index:
        weight_map = {n: f for f, entries in shards.items() for n in entries}
        total = sum(len(e[2]) for entries in shards.values() for e in entries.values())
        write_index(path, weight_map, total)
    return path


def write_index(path: Path, weight_map: dict[str, str], total: object = None) -> None:
    value: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / INDEX_NAME).write_text(json.dumps(value))


def pick(*names: str) -> Entries:
    return {n: ENTRIES[n] for n in names}


def two_shards(path: Path) -> Path:
    names = list(ENTRIES)
    return write_folder(
        path, {"a.safetensors": pick(*names[:2]), "b.safetensors": pick(*names[2:])}
    )


def kinds(checkpoint: HfCheckpoint, *, warnings: bool = False) -> list[str]:
    return [p.kind for p in checkpoint.problems if p.warning == warnings]


def content(checkpoint: HfCheckpoint, name: str) -> bytes:
    return b"".join(bytes(b) for b in blocks(checkpoint, name))


def test_sound_folder(tmp_path: Path) -> None:
    checkpoint = open_hf(two_shards(tmp_path))
    assert not checkpoint.problems
    assert set(checkpoint.tensors) == set(ENTRIES)
    for name, (dtype, shape, data) in ENTRIES.items():
        assert checkpoint.tensors[name] == TensorSpec(dtype, tuple(shape))
        assert content(checkpoint, name) == data
    assert checkpoint.config == {"model_type": "x"}
    require_sound(checkpoint)


def test_header_bytes_are_kept_exactly(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {}, index=False)
    text = shard_bytes(ENTRIES, pad=7)
    (folder / "model.safetensors").write_bytes(text)
    header = open_hf(folder).shards["model.safetensors"]
    assert text.startswith(header.raw)
    assert header.raw.endswith(b"       ")
    assert header.data_start == len(text) - sum(len(e[2]) for e in ENTRIES.values())


def test_an_expected_header_is_believed_only_if_it_is_there(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(shard_bytes(ENTRIES))
    first = read_header(file)
    copy = tmp_path / "b.safetensors"
    copy.write_bytes(file.read_bytes())
    again = read_header(copy, first)
    assert again == read_header(copy)
    assert again.tensors is first.tensors
    other = {**ENTRIES, "lm_head.weight": ("F8_E5M2", [3], b"abc")}
    copy.write_bytes(shard_bytes(other))
    assert read_header(copy, first).tensors["lm_head.weight"].dtype == "F8_E5M2"
    copy.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UnreadableError, match="truncated"):
        read_header(copy, first)


def test_payload_order_may_differ_from_header_order(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "z": {"dtype": "U8", "shape": [2], "data_offsets": [3, 5]},
        "empty": {"dtype": "F32", "shape": [0, 4], "data_offsets": [3, 3]},
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
    }
    folder = write_folder(tmp_path, {}, index=False)
    (folder / "x.safetensors").write_bytes(with_header(header, b"aaazz"))
    checkpoint = open_hf(folder)
    shard = checkpoint.shards["x.safetensors"]
    assert list(shard.tensors) == ["z", "empty", "a"]
    assert shard.payload_order == ("a", "empty", "z")
    assert shard.metadata == {"format": "pt"}
    assert content(checkpoint, "z") == b"zz"
    assert content(checkpoint, "empty") == b""
    assert not checkpoint.problems


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
            lambda s: s != "__metadata__"
        ),
        st.tuples(
            st.sampled_from(["float32", "int64", "uint8", "float16", "bool"]),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        max_size=6,
    )
)
@settings(deadline=None, max_examples=60)
def test_reads_what_the_safetensors_library_writes(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, tuple[str, list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("st") / "x.safetensors"
    save_file({n: np.ones(shape, dtype) for n, (dtype, shape) in tensors.items()}, path)
    header = read_header(path)
    assert {n: s.shape for n, s in header.tensors.items()} == {
        n: tuple(shape) for n, (_, shape) in tensors.items()
    }
    assert header.size == path.stat().st_size


ENTRY: dict[str, Any] = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


def _text(body: str) -> bytes:
    return with_header(body.encode(), b"ab")


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "zero bytes": (b"", "empty"),
    "seven bytes": (b"1234567", "too few"),
    "truncated header": (shard_bytes(ENTRIES)[:40], "truncated"),
    "truncated payload": (shard_bytes(ENTRIES)[:-1], "truncated"),
    "trailing bytes": (shard_bytes(ENTRIES, trailing=b"x"), "after its last tensor"),
    "length beyond file": ((2**63).to_bytes(8, "little") + b"{}", "truncated"),
    "lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "git-lfs",
    ),
    "web page": (b"<!DOCTYPE html><html>" + b" " * 200, "web page"),
    "not json": (_text("{nope"), "not JSON"),
    "not an object": (_text("[1]"), "does not start"),
    "not utf-8": (with_header(b'{"\xff":1}', b""), "UTF-8"),
    "lone surrogate": (with_header({"\ud800": ENTRY}, b"ab"), "Unicode"),
    "lone surrogate beside": (
        with_header({"__metadata__": {"a": "\ud800"}, "a": ENTRY}, b"ab"),
        "Unicode",
    ),
    "deep nesting": (_text("{" + '"a":{' * 5000), "nests"),
    "deep lists": (_text('{"a":' + "[" * 90_000), "nests"),
    "duplicate name": (
        _text('{"a":' + json.dumps(ENTRY) + ',"a":' + json.dumps(ENTRY) + "}"),
        "twice",
    ),
    "duplicate field": (
        _text('{"a":{"dtype":"U8","dtype":"I8","shape":[2],"data_offsets":[0,2]}}'),
        "twice",
    ),
    "unknown dtype": (with_header({"a": {**ENTRY, "dtype": "BF17"}}, b"ab"), "unknown dtype"),
    "negative dim": (with_header({"a": {**ENTRY, "shape": [-2]}}, b"ab"), "shape"),
    "boolean dim": (with_header({"a": {**ENTRY, "shape": [True, 2]}}, b"ab"), "shape"),
    "float dim": (with_header({"a": {**ENTRY, "shape": [2.0]}}, b"ab"), "shape"),
    "huge dims": (with_header({"a": {**ENTRY, "shape": [2**62, 2**62]}}, b"ab"), "needs"),
    "empty tensor that claims bytes": (
        with_header({"a": {**ENTRY, "shape": [2**33, 2**31, 0]}}, b"ab"),
        "needs",
    ),
    "too many axes": (with_header({"a": {**ENTRY, "shape": [1] * 65}}, b"ab"), "shape"),
    "shape too large": (with_header({"a": {**ENTRY, "shape": [3]}}, b"ab"), "needs"),
    "half a byte": (
        with_header({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, b"a"),
        "needs",
    ),
    "end before begin": (with_header({"a": {**ENTRY, "data_offsets": [2, 0]}}, b"ab"), "needs"),
    "one offset": (with_header({"a": {**ENTRY, "data_offsets": [0]}}, b"ab"), "data_offsets"),
    "extra field": (with_header({"a": {**ENTRY, "x": 1}}, b"ab"), "exactly"),
    "entry is a list": (with_header({"a": [1]}, b"ab"), "exactly"),
    "metadata not strings": (with_header({"__metadata__": {"a": 1}}, b""), "__metadata__"),
    "overlap": (
        with_header({"a": ENTRY, "b": {**ENTRY, "data_offsets": [1, 3]}}, b"abc"),
        "overlaps",
    ),
    "same place": (with_header({"a": ENTRY, "b": ENTRY}, b"ab"), "overlaps"),
    "gap": (with_header({"a": ENTRY, "b": {**ENTRY, "data_offsets": [3, 5]}}, b"abcde"), "gap"),
    "gap at start": (with_header({"a": {**ENTRY, "data_offsets": [1, 3]}}, b"abc"), "gap"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file_is_one_problem_and_one_line(tmp_path: Path, name: str) -> None:
    data, words = BAD_FILES[name]
    folder = write_folder(tmp_path, {"good.safetensors": pick("lm_head.weight")}, index=False)
    (folder / "bad.safetensors").write_bytes(data)
    checkpoint = open_hf(folder)
    (problem,) = checkpoint.problems
    assert (problem.kind, problem.file) == ("unreadable_file", "bad.safetensors")
    assert words in problem.message
    assert "\n" not in problem.message
    assert list(checkpoint.tensors) == ["lm_head.weight"]
    assert checkpoint.unread == {"bad.safetensors": ()}
    with pytest.raises(UnreadableError, match=r"bad\.safetensors"):
        require_sound(checkpoint)


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_random_bytes_only_raise_the_documented_error(data: bytes) -> None:
    for raw in (data, len(data).to_bytes(8, "little") + data):
        try:
            parse_header(raw, len(raw), Path("x"))
        except UnreadableError:
            continue
        assert raw[8:9] == b"{"


@given(st.integers(0, 10**6), st.integers(0, 255))
@settings(deadline=None, max_examples=200)
def test_one_damaged_byte_never_escapes(position: int, value: int) -> None:
    data = bytearray(shard_bytes(ENTRIES))
    data[position % len(data)] = value
    length = 8 + int.from_bytes(data[:8], "little")
    try:
        header = parse_header(bytes(data[:length]), len(data), Path("x"))
    except UnreadableError:
        return
    held = sum(s.nbytes for s in header.tensors.values())
    assert header.data_start + held == len(data)


def test_sixty_thousand_tensors_are_fast() -> None:
    entries: Entries = {
        f"model.layers.{i // 800}.mlp.experts.{i % 256}.gate_proj.weight{i}": ("BF16", [1], b"ab")
        for i in range(60_000)
    }
    data = shard_bytes(entries)
    length = 8 + int.from_bytes(data[:8], "little")
    began = time.process_time()
    header = parse_header(data[:length], len(data), Path("x"))
    took = time.process_time() - began
    assert len(header.tensors) == 60_000
    assert took < 5, f"{took:.1f} s; about 0.5 s is normal"


def test_missing_folder_file_and_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="no such folder"):
        open_hf(tmp_path / "nope")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UnreadableError, match="is a file"):
        open_hf(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnreadableError, match="holds no safetensors file"):
        open_hf(tmp_path / "empty")


@pytest.mark.parametrize(
    ("name", "words"),
    [("pytorch_model.bin", "pickled weights"), ("m.gguf", "GGUF"), ("snapshots", "cache folder")],
)
def test_folder_without_safetensors_says_what_it_holds(
    tmp_path: Path, name: str, words: str
) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UnreadableError, match=words):
        open_hf(tmp_path)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [_fifo, _directory])
@pytest.mark.timeout(10)
def test_shard_that_is_no_regular_file_never_blocks(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    folder = two_shards(tmp_path)
    (folder / "b.safetensors").unlink()
    make(folder / "b.safetensors")
    checkpoint = open_hf(folder)
    assert kinds(checkpoint) == ["unreadable_file"]
    assert checkpoint.problems[0].tensors == ("lm_head.weight", "model.layers.1.eh_proj.weight")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", ["config.json", INDEX_NAME])
def test_json_that_is_a_fifo_never_blocks(tmp_path: Path, name: str) -> None:
    folder = two_shards(tmp_path)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert kinds(open_hf(folder)) == ["unreadable_file"]


def test_symlinks_as_in_the_hub_cache_are_fine(tmp_path: Path) -> None:
    real = two_shards(tmp_path / "blobs")
    view = tmp_path / "snapshot"
    view.mkdir()
    for file in real.iterdir():
        (view / file.name).symlink_to(Path("..") / "blobs" / file.name)
    checkpoint = open_hf(view)
    assert not checkpoint.problems
    assert content(checkpoint, "lm_head.weight") == b"abc"


def _remove(path: Path) -> None:
    path.unlink()


def _dangle(path: Path) -> None:
    path.unlink()
    path.symlink_to("../blobs/gone")


def _link_as_text(path: Path) -> None:
    path.write_text("../blobs/gone")


@pytest.mark.parametrize("fault", [_remove, _dangle, _link_as_text])
def test_indexed_shard_that_is_not_there(tmp_path: Path, fault: Callable[[Path], None]) -> None:
    folder = two_shards(tmp_path)
    fault(folder / "b.safetensors")
    checkpoint = open_hf(folder)
    (problem,) = checkpoint.problems
    assert (problem.kind, problem.file) == ("index_missing_file", "b.safetensors")
    assert problem.tensors == ("lm_head.weight", "model.layers.1.eh_proj.weight")
    assert checkpoint.unread == {"b.safetensors": problem.tensors}


@pytest.mark.parametrize(
    "name", ["a" * 300 + ".safetensors", "a/" * 3000 + "b", "config.json/b", "\ud800", "a\0b"]
)
def test_names_that_no_file_can_have_are_not_there(tmp_path: Path, name: str) -> None:
    """Whatever else is wrong is still found."""
    folder = two_shards(tmp_path)
    index = dict.fromkeys(ENTRIES, "a.safetensors")
    write_index(folder, {**index, "one": name, "other": "gone.safetensors"})
    found = [p for p in open_hf(folder).problems if p.kind == "index_missing_file"]
    assert {(p.file, p.tensors) for p in found} == {
        (name, ("one",)), ("gone.safetensors", ("other",)),
    }  # fmt: skip
    assert all("\n" not in p.message and len(p.message) < 300 for p in found)
    assert not has_file(folder, name)
    assert has_file(folder, "a.safetensors")


def test_a_symlink_to_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    folder = two_shards(tmp_path)
    (folder / "b.safetensors").unlink()
    (folder / "b.safetensors").symlink_to("a" * 300)
    (problem,) = open_hf(folder).problems
    assert problem.kind == "index_missing_file"
    assert "(a symlink to aaa" in problem.message


def test_dangling_symlink_outside_the_index_is_unreadable(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {}, index=False)
    (folder / "model.safetensors").symlink_to("gone")
    assert kinds(open_hf(folder)) == ["unreadable_file"]


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/x.safetensors", "a\0b", "", ".."])
def test_index_never_leads_outside(tmp_path: Path, file: str) -> None:
    folder = two_shards(tmp_path / "ckpt")
    shutil.copy(folder / "a.safetensors", tmp_path / "secret.safetensors")
    write_index(folder, {**dict.fromkeys(ENTRIES, "a.safetensors"), "stolen": file})
    checkpoint = open_hf(folder)
    assert "stolen" not in checkpoint.tensors
    problem = next(p for p in checkpoint.problems if p.kind == "index_missing_file")
    assert problem.tensors == ("stolen",)


def test_steps_that_lead_nowhere_name_the_same_file(tmp_path: Path) -> None:
    folder = two_shards(tmp_path)
    plainly = open_hf(folder)
    written = {n: f"./{f}" if n == "lm_head.weight" else f"././{f}"
               for n, f in plainly.weight_map.items()}  # fmt: skip
    write_index(folder, written)
    checkpoint = open_hf(folder)
    assert kinds(checkpoint) == []
    assert checkpoint.weight_map == plainly.weight_map
    assert checkpoint.index is not None
    assert checkpoint.index["weight_map"] == written  # a copy of the index says what it said


def test_ghost_entry(tmp_path: Path) -> None:
    folder = two_shards(tmp_path)
    write_index(folder, dict.fromkeys(ENTRIES, "a.safetensors") | {"ghost": "b.safetensors"})
    found = {(p.kind, p.tensor, p.file) for p in open_hf(folder).problems}
    assert ("index_entry_not_in_file", "ghost", "b.safetensors") in found
    assert ("index_entry_not_in_file", "lm_head.weight", "a.safetensors") in found


def test_mtp_file_outside_the_index(tmp_path: Path) -> None:
    folder = two_shards(tmp_path)
    (folder / "mtp.safetensors").write_bytes(shard_bytes({"mtp.fc.weight": ("U8", [1], b"x")}))
    checkpoint = open_hf(folder)
    (problem,) = checkpoint.problems
    assert problem.kind == "tensor_not_in_index"
    assert (problem.tensor, problem.file) == ("mtp.fc.weight", "mtp.safetensors")
    assert content(checkpoint, "mtp.fc.weight") == b"x"
    with pytest.raises(RefusedError, match=r"mtp\.fc\.weight"):
        require_sound(checkpoint)


def test_shards_without_index_are_all_read(tmp_path: Path) -> None:
    folder = two_shards(tmp_path)
    (folder / INDEX_NAME).unlink()
    checkpoint = open_hf(folder)
    assert not checkpoint.problems
    assert set(checkpoint.tensors) == set(ENTRIES)


def _copy_with(folder: Path, data: bytes, dtype: str = "F8_E4M3") -> HfCheckpoint:
    shard = shard_bytes({"lm_head.weight": (dtype, [3], data)})
    (folder / "a_copy.safetensors").write_bytes(shard)
    return open_hf(folder)


def test_copies_of_a_tensor_in_two_files(tmp_path: Path) -> None:
    folder = two_shards(tmp_path)
    same = _copy_with(folder, b"abc")
    assert kinds(same) == []
    assert kinds(same, warnings=True) == ["duplicate_tensor"]
    other = _copy_with(folder, b"abx")
    assert kinds(other) == ["duplicate_tensor_conflict"]
    assert other.problems[0].files == ("a_copy.safetensors", "b.safetensors")
    assert content(other, "lm_head.weight") == b"abc", "the index decides which copy is read"
    assert kinds(_copy_with(folder, b"abc", "U8")) == ["duplicate_tensor_conflict"]
    headers_only = open_hf(folder, compare_duplicates=False)
    assert kinds(headers_only) == ["duplicate_tensor_conflict"], "dtypes differ in the headers"


def test_header_only_opening_does_not_compare_copies(tmp_path: Path) -> None:
    folder = two_shards(tmp_path)
    _copy_with(folder, b"abx")
    checkpoint = open_hf(folder, compare_duplicates=False)
    (problem,) = checkpoint.problems
    assert problem.warning
    assert "not compared" in problem.message


def test_duplicate_keys_in_index_and_config(tmp_path: Path) -> None:
    folder = two_shards(tmp_path)
    text = (folder / INDEX_NAME).read_text()
    key = '"lm_head.weight": "b.safetensors"'
    (folder / INDEX_NAME).write_text(text.replace(key, f'{key}, "lm_head.weight": "b.safetensors"'))
    (folder / "config.json").write_text('{"num_hidden_layers": 1, "num_hidden_layers": 2}')
    checkpoint = open_hf(folder)
    assert sorted(kinds(checkpoint)) == ["duplicate_key_in_config", "duplicate_key_in_index"]
    assert {p.tensor for p in checkpoint.problems} == {"lm_head.weight", None}
    assert checkpoint.config == {"num_hidden_layers": 2}


@pytest.mark.parametrize(("total", "fine"), [(43, True), (43.0, True), (42, False), ("43", False)])
def test_total_size(tmp_path: Path, total: object, fine: bool) -> None:
    folder = two_shards(tmp_path)
    weight_map = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    write_index(folder, weight_map, total)
    assert kinds(open_hf(folder), warnings=True) == ([] if fine else ["index_total_size"])


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": {"a": 1}}', "[" * 100_000, "\xff"]
)
def test_broken_index(tmp_path: Path, text: str) -> None:
    folder = two_shards(tmp_path)
    (folder / INDEX_NAME).write_bytes(text.encode("latin-1"))
    checkpoint = open_hf(folder)
    assert [(p.kind, p.file) for p in checkpoint.problems] == [("unreadable_file", INDEX_NAME)]
    assert set(checkpoint.tensors) == set(ENTRIES)


def test_config_absent_or_broken(tmp_path: Path) -> None:
    folder = two_shards(tmp_path)
    (folder / "config.json").write_text("[]")
    assert kinds(open_hf(folder)) == ["unreadable_file"]
    (folder / "config.json").unlink()
    checkpoint = open_hf(folder)
    assert checkpoint.config is None
    assert kinds(checkpoint, warnings=True) == ["config_missing"]
    require_sound(checkpoint)


def test_index_under_another_name(tmp_path: Path) -> None:
    folder = two_shards(tmp_path)
    (folder / INDEX_NAME).rename(folder / "model.fp16.safetensors.index.json")
    checkpoint = open_hf(folder)
    assert checkpoint.index_name == "model.fp16.safetensors.index.json"
    assert not checkpoint.problems
    shutil.copy(folder / checkpoint.index_name, folder / "other.safetensors.index.json")
    assert kinds(open_hf(folder), warnings=True) == ["index_ambiguous"]


def test_opening_twice_says_the_same(tmp_path: Path) -> None:
    folder = two_shards(tmp_path)
    _copy_with(folder, b"abx")
    (folder / "mtp.safetensors").write_bytes(b"")
    first, second = open_hf(folder), open_hf(folder)
    assert first.problems == second.problems
    assert list(_names(first)) == list(_names(second))


def _names(checkpoint: HfCheckpoint) -> Iterable[str]:
    return checkpoint.tensors
