"""Writing safetensors shards and their index, from headers that exist or are made here."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mtpconv.store.safetensors_header import ShardHeader, parse_header
from mtpconv.tensors import TensorSpec

#: Units: bytes. transformers' default shard size.
SHARD_LIMIT = 5_000_000_000

Blocks = Callable[[str], Iterator[memoryview]]


def header_bytes(tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None) -> bytes:
    """Header of a shard with these tensors in this order, as the safetensors library pads it.

    Source: safetensors 0.8 README, "Format": 8-byte little-endian length, JSON, spaces.
    """
    entries: dict[str, Any] = {}
    if metadata is not None:
        entries["__metadata__"] = dict(metadata)
    at = 0
    for name, spec in tensors.items():
        entries[name] = {
            "dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, at + spec.nbytes],
        }  # fmt: skip
        at += spec.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def make_header(
    path: Path, tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None
) -> ShardHeader:
    """A parsed header of a shard that is still to be written."""
    raw = header_bytes(tensors, metadata)
    return parse_header(raw, len(raw) + sum(s.nbytes for s in tensors.values()), path)


def without(header: ShardHeader, names: Iterable[str]) -> ShardHeader | None:
    """The header without some tensors, None if nothing is left; bytes move up."""
    gone = set(names)
    if not gone & set(header.tensors):
        return header
    kept = {n: header.tensors[n] for n in header.payload_order if n not in gone}
    return make_header(header.file, kept, header.metadata) if kept else None


def make_headers(folder: Path, tensors: Mapping[str, TensorSpec]) -> dict[str, ShardHeader]:
    """Headers for tensors that were never in shards: in order, at most `SHARD_LIMIT` each."""
    groups: list[dict[str, TensorSpec]] = [{}]
    size = 0
    for name, spec in tensors.items():
        if size and size + spec.nbytes > SHARD_LIMIT:
            groups.append({})
            size = 0
        groups[-1][name] = spec
        size += spec.nbytes
    count = len(groups)
    names = (
        ["model.safetensors"]
        if count == 1
        else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    )
    metadata = {"format": "pt"}
    return {n: make_header(folder / n, g, metadata) for n, g in zip(names, groups, strict=True)}


def write_shard(path: Path, header: ShardHeader, blocks: Blocks) -> None:
    """Write one shard: its header bytes, then every tensor where the header says; fsynced."""
    with path.open("xb", buffering=0) as out:
        write_all(out.fileno(), memoryview(header.raw))
        for name in header.payload_order:
            for block in blocks(name):
                write_all(out.fileno(), block)
        os.fsync(out.fileno())


def write_all(fd: int, data: memoryview) -> None:
    """Write a whole block."""
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:])


def index_bytes(headers: Mapping[str, ShardHeader]) -> bytes:
    """The index of these shards, as transformers writes it."""
    where = {n: file for file, h in headers.items() for n in h.tensors}
    total = sum(s.nbytes for h in headers.values() for s in h.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
