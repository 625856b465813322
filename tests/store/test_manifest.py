"""Manifests: deterministic, checked when read, and true to the bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from mtpconv.errors import UnreadableError, UnsupportedError, WriteError
from mtpconv.store.hf import open_hf
from mtpconv.store.manifest import (
    Manifest,
    hash_files,
    manifest_text,
    read_manifest,
    root_digest,
    take_manifest,
    write_manifest,
)
from mtpconv.tensors import TensorSpec
from tests.store.test_hf import ENTRIES, two_shards, write_folder


def take(folder: Path, **options: Any) -> Manifest:
    checkpoint = open_hf(folder)
    return take_manifest(checkpoint, folder, "hf", config=checkpoint.config, **options)


def test_digests_are_those_of_the_bytes(tmp_path: Path) -> None:
    done: list[int] = []
    manifest = take(two_shards(tmp_path), progress=done.append)
    assert manifest.digests == {n: blake3(e[2]).hexdigest() for n, e in ENTRIES.items()}
    assert sum(done) == sum(len(e[2]) for e in ENTRIES.values())


def test_shards_and_order_do_not_matter(tmp_path: Path) -> None:
    sharded = take(two_shards(tmp_path / "a"))
    backwards = dict(reversed(ENTRIES.items()))
    single = take(write_folder(tmp_path / "b", {"m.safetensors": backwards}, index=False))
    assert manifest_text(sharded) == manifest_text(single)


def test_written_file_reads_back_the_same(tmp_path: Path) -> None:
    folder = two_shards(tmp_path / "ckpt")
    manifest = take(folder, files=hash_files(folder))
    write_manifest(manifest, tmp_path / "m.json")
    again = read_manifest(tmp_path / "m.json")
    assert (again.tensors, again.digests, again.config) == (
        dict(sorted(manifest.tensors.items())),
        manifest.digests,
        {"model_type": "x"},
    )
    assert again.root == manifest.root
    assert manifest_text(again) == (tmp_path / "m.json").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt", "m.json"]
    shard = (folder / "a.safetensors").read_bytes()
    assert again.files["a.safetensors"] == hashlib.sha256(shard).hexdigest()


def test_every_part_of_a_tensor_changes_the_root() -> None:
    spec, digest = TensorSpec("U8", (2, 3)), "0" * 64
    root = root_digest({"a": spec}, {"a": digest})
    for tensors, digests in (
        ({"b": spec}, {"b": digest}),
        ({"a": TensorSpec("I8", (2, 3))}, {"a": digest}),
        ({"a": TensorSpec("U8", (3, 2))}, {"a": digest}),
        ({"a": spec}, {"a": "1" * 64}),
        ({"a": spec, "b": spec}, {"a": digest, "b": digest}),
        ({}, {}),
    ):
        assert root_digest(tensors, digests) != root


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=4, unique=True))
def test_names_of_any_kind_survive(names: list[str]) -> None:
    tensors = {n: TensorSpec("U8", ()) for n in names}
    digests = {n: blake3(n.encode()).hexdigest() for n in names}
    text = manifest_text(Manifest(Path("x"), "hf", tensors, digests))
    rows = json.loads(text)["tensors"]
    assert [r["name"] for r in rows] == sorted(names)
    assert {r["name"]: r["blake3"] for r in rows} == digests


def test_config_with_infinity_stays_json(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path, "hf", {}, {}, {"a": [float("inf")], "b": float("nan")})
    text = manifest_text(manifest)

    def never(name: str) -> None:
        raise AssertionError(name)

    assert json.loads(text, parse_constant=never)["config"] == {"a": ["inf"], "b": "nan"}


def _change(value: dict[str, Any], how: str) -> None:
    row = value["tensors"][0]
    changes: dict[str, Any] = {
        "digest": lambda: row.update(blake3="0" * 64),
        "short digest": lambda: row.update(blake3="0"),
        "dtype": lambda: row.update(dtype="BF17"),
        "shape": lambda: row.update(shape=[-1]),
        "row lost": lambda: value["tensors"].pop(),
        "row twice": lambda: value["tensors"].append(row),
        "row is a list": lambda: value["tensors"].append([]),
        "format": lambda: value.update(format="x"),
        "version": lambda: value.update(version=99),
        "root": lambda: value.update(root="0" * 64),
        "config": lambda: value.update(config=[]),
        "files": lambda: value.update(files={"a": 1}),
        "source": lambda: value.update(source_format="x"),
        "tensors": lambda: value.update(tensors={}),
    }
    changes[how]()


@pytest.mark.parametrize(
    "how",
    [
        "digest", "short digest", "dtype", "shape", "row lost", "row twice", "row is a list",
        "format", "version", "root", "config", "files", "source", "tensors",
    ],
)  # fmt: skip
def test_damaged_manifest_is_refused(tmp_path: Path, how: str) -> None:
    write_manifest(take(two_shards(tmp_path / "ckpt")), tmp_path / "m.json")
    value = json.loads((tmp_path / "m.json").read_text())
    _change(value, how)
    (tmp_path / "m.json").write_text(json.dumps(value))
    with pytest.raises(UnreadableError, match=r"m\.json"):
        read_manifest(tmp_path / "m.json")


@given(st.one_of(st.binary(max_size=60), st.just(b"[[[" * 50_000)))
def test_any_bytes_only_raise_the_documented_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(data)
    with pytest.raises(UnreadableError):
        read_manifest(path)


def test_bytes_are_refused_and_failed_writes_leave_nothing(tmp_path: Path) -> None:
    manifest = take(two_shards(tmp_path / "ckpt"))
    with pytest.raises(UnsupportedError, match="holds no bytes"):
        manifest.chunks("lm_head.weight")
    with pytest.raises(WriteError):
        write_manifest(manifest, tmp_path / "no such folder" / "m.json")


def test_file_that_vanished_while_hashing(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="gone"):
        hash_files(tmp_path, ["gone"])
