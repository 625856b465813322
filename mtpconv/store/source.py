"""What travels with a Megatron checkpoint so that the same HF files can come back.

The folder `hf_source` beside `release/` holds every file of the HF folder that is no weights,
byte for byte; the exact header bytes of every shard; a manifest of all tensors; and tensors
that have no place in Megatron. An HF folder itself can stand in for it (`--like`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpconv.errors import UnreadableError, WriteError
from mtpconv.store.checkpoint import require_sound
from mtpconv.store.hf import HfCheckpoint, open_hf
from mtpconv.store.json_text import read_json
from mtpconv.store.manifest import Manifest, read_manifest, write_manifest
from mtpconv.store.safetensors_header import ShardHeader, parse_header

FOLDER = "hf_source"
_FILES, _HEADERS, _MANIFEST, _CARRIED = "files", "headers", "manifest.json", "carried"
_QUANTISED = "quantised"
#: Saved headers must not look like shards to anybody who searches for `*.safetensors`.
_HEADER = ".header"
#: Weights in other formats: large, not converted, and named in the report when left behind.
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack", ".onnx", ".npz")
_SKIPPED_FOLDERS = frozenset({".git", ".cache", "__pycache__"})


@dataclass(frozen=True, slots=True)
class HfSource:
    """The HF side as it was: config, files, shard headers, carried tensors."""

    path: Path
    files_root: Path
    config: dict[str, Any]
    #: files that are no weights, by path below `files_root`
    files: tuple[str, ...]
    #: parsed headers in shard order; their `file` need not exist
    headers: Mapping[str, ShardHeader]
    carried: HfCheckpoint | None = None
    manifest: Manifest | None = None
    index_name: str | None = None
    #: FP8 codes and scales as they were; None if they did not travel
    quantised: HfCheckpoint | None = None

    @property
    def names(self) -> frozenset[str]:
        """HF names of all shards."""
        return frozenset(n for h in self.headers.values() for n in h.tensors)


def source_of_hf(hf: HfCheckpoint) -> HfSource:
    """An HF folder as its own source."""
    if hf.config is None:
        raise UnreadableError(f"{hf.path}: has no config.json; it says what the model is")
    return HfSource(
        hf.path, hf.path, hf.config, tuple(other_files(hf.path)), hf.shards,
        index_name=hf.index_name, quantised=hf,
    )  # fmt: skip


def read_source(path: Path) -> HfSource:
    """A saved `hf_source` folder, a folder that has one, or an HF folder (weights optional).

    Raises: UnreadableError or RefusedError if it is none of these or damaged.
    """
    for folder in (path, path / FOLDER, path.parent / FOLDER):
        if (folder / _HEADERS).is_dir():
            return _read_saved(folder)
    if not (path / "config.json").is_file():
        raise UnreadableError(
            f"{path}: neither a HuggingFace folder nor a checkpoint with {FOLDER}/; "
            "pass the original HuggingFace folder with --like"
        )
    if any(p.suffix == ".safetensors" for p in path.iterdir()):
        hf = open_hf(path)
        require_sound(hf)
        return source_of_hf(hf)
    return HfSource(path, path, _config(path), tuple(other_files(path)), {})


def find_source(path: Path) -> HfSource | None:
    """The `hf_source` of a torch_dist checkpoint (parent or iteration folder), if it has one."""
    for folder in (path / FOLDER, path.parent / FOLDER):
        if (folder / _HEADERS).is_dir():
            return _read_saved(folder)
    return None


def write_source(
    hf: HfCheckpoint, folder: Path, manifest: Manifest, shards: Mapping[str, ShardHeader]
) -> list[str]:
    """Save everything but the weights of an HF folder; returns names of weights left behind.

    Raises: WriteError.
    """
    (folder / _HEADERS).mkdir(parents=True)
    for name, header in shards.items():
        write_bytes(folder / _HEADERS / f"{name}{_HEADER}", header.raw)
    for name in other_files(hf.path):
        copy_file(hf.path / name, folder / _FILES / name)
    write_manifest(manifest, folder / _MANIFEST)
    return [n for n in _walk(hf.path) if n.endswith(OTHER_WEIGHTS)]


def carried_folder(folder: Path) -> Path:
    """Where tensors that Megatron has no place for are kept, as an HF folder."""
    return folder / _CARRIED


def quantised_folder(folder: Path) -> Path:
    """Where FP8 codes and scales are kept, in files named like the shards they are from."""
    return folder / _QUANTISED


def other_files(path: Path) -> Iterator[str]:
    """Files of an HF folder that are no weights, sorted, as paths below it."""
    for name in _walk(path):
        if not name.endswith((".safetensors", *OTHER_WEIGHTS)):
            yield name


def copy_file(source: Path, target: Path) -> None:
    """Copy one file and fsync it. Raises: WriteError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        sync(target)
    except OSError as error:
        raise WriteError(f"{target}: cannot be written: {error.strerror}") from error


def write_bytes(target: Path, data: bytes) -> None:
    """Write one small file and fsync it. Raises: WriteError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        sync(target)
    except OSError as error:
        raise WriteError(f"{target}: cannot be written: {error.strerror}") from error


def sync(path: Path) -> None:
    """Force a file or folder to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _walk(path: Path) -> Iterator[str]:
    found = []
    for root, folders, names in os.walk(path, followlinks=False):
        folders[:] = [f for f in folders if f not in _SKIPPED_FOLDERS and f != FOLDER]
        found += [str((Path(root) / n).relative_to(path)) for n in names]
    yield from sorted(n for n in found if (path / n).is_file())


def _config(root: Path) -> dict[str, Any]:
    value = read_json(root / "config.json").value
    if not isinstance(value, dict):
        raise UnreadableError(f"{root / 'config.json'}: is not a JSON object")
    return value


def _read_saved(folder: Path) -> HfSource:
    files_root = folder / _FILES
    headers = {}
    for entry in sorted((folder / _HEADERS).iterdir()):
        raw = entry.read_bytes()
        name = entry.name.removesuffix(_HEADER)
        headers[name] = parse_header(raw, len(raw) + _payload(raw), entry)
    carried = open_hf(folder / _CARRIED) if (folder / _CARRIED).is_dir() else None
    names = tuple(_walk(files_root))
    return HfSource(
        folder,
        files_root,
        _config(files_root),
        names,
        headers,
        carried,
        read_manifest(folder / _MANIFEST) if (folder / _MANIFEST).is_file() else None,
        next((n for n in names if n.endswith(".safetensors.index.json") and "/" not in n), None),
        open_hf(folder / _QUANTISED) if (folder / _QUANTISED).is_dir() else None,
    )


def _payload(raw: bytes) -> int:
    """Payload bytes that a saved header describes, without its shard."""
    try:
        entries = json.loads(raw[8:])
        ends = (e["data_offsets"][1] for n, e in entries.items() if n != "__metadata__")
        return max(ends, default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return 0  # parse_header says what is wrong
