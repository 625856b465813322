"""HF folders for conversion tests, and what to ask of them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtpconv.mapping.plan import make_plan
from mtpconv.mapping.table_reader import find_table, mappings_folder
from mtpconv.store.content import blocks
from mtpconv.store.crc import crc32
from mtpconv.store.hf import open_hf
from mtpconv.store.hf_writer import index_bytes, make_header, write_shard
from mtpconv.store.record_writer import tensor_frame
from mtpconv.store.torch_dist import open_torch_dist
from mtpconv.synth import synth
from mtpconv.tensors import TensorSpec


def make_hf(folder: Path, config: Mapping[str, Any], *, seed: int = 0, shards: int = 3) -> Path:
    """A seeded HF folder that holds what the config promises."""
    synth(make_plan(config, find_table(config["model_type"])), folder, seed=seed, shards=shards)
    return folder


def file_hashes(folder: Path) -> dict[str, str]:
    """sha256 of every file below a folder."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def tensors_of(folder: Path) -> dict[str, tuple[TensorSpec, bytes]]:
    """Every tensor with its bytes."""
    hf = open_hf(folder)
    return {n: (hf.tensors[n], b"".join(bytes(b) for b in blocks(hf, n))) for n in hf.tensors}


def write_hf(
    folder: Path,
    tensors: Mapping[str, tuple[TensorSpec, bytes]],
    config: Mapping[str, Any],
    *,
    shard_of: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """An HF folder with exactly these tensors; one file unless `shard_of` says otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    groups: dict[str, dict[str, TensorSpec]] = {}
    for name, (spec, _) in tensors.items():
        shard = shard_of[name] if shard_of else "model.safetensors"
        groups.setdefault(shard, {})[name] = spec
    headers = {f: make_header(folder / f, g, metadata) for f, g in groups.items()}
    for file, header in headers.items():
        write_shard(folder / file, header, lambda n: iter([memoryview(tensors[n][1])]))
    if shard_of:
        (folder / "model.safetensors.index.json").write_bytes(index_bytes(headers))
    (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder


def write_empty_shard(folder: Path, name: str = "empty.safetensors") -> None:
    """A shard without any tensor, as a saver leaves it whose tensors went elsewhere."""
    header = make_header(folder / name, {}, {"note": "empty"})
    write_shard(folder / name, header, lambda _: iter(()))


def exchanged_table(folder: Path) -> Path:
    """A mapping table for `config()` that takes gate and up of experts for each other."""
    shutil.copytree(mappings_folder(), folder)
    rows = folder / "blocks/decoder.toml"
    gate, up = (f'"mlp.experts.{{expert}}.{name}_proj.weight"' for name in ("gate", "up"))
    text = rows.read_text()
    assert f"[{gate}, {up}]" in text
    rows.write_text(text.replace(f"[{gate}, {up}]", f"[{up}, {gate}]"))
    return folder / "glm_moe_dsa.toml"


def overwrite(checkpoint: Path, key: str, data: bytes) -> None:
    """Other bytes in a stored tensor of one chunk, its CRC too, as if it had been trained."""
    stored = open_torch_dist(checkpoint)
    (chunk,) = stored.chunks(key)
    prefix, suffix = tensor_frame(stored.tensors[key].dtype, chunk.box.sizes).sealed(crc32(data))
    assert len(data) == stored.tensors[key].nbytes
    assert isinstance(chunk.file, Path)
    raw = bytearray(chunk.file.read_bytes())
    begin = chunk.start - len(prefix)
    raw[begin : chunk.start + len(data) + len(suffix)] = prefix + data + suffix
    chunk.file.write_bytes(raw)
