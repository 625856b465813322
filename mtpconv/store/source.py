"""What travels with a Megatron checkpoint so that the same HF files can come back.

The folder `hf_source` beside `release/` holds the files of the HF folder that are no shards,
byte for byte, and a list of those that stayed behind; the exact header bytes of every shard; a
manifest of all tensors; and tensors that have no place in Megatron. An HF folder itself can
stand in for it (`--like`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtpconv.errors import UnreadableError, WriteError
from mtpconv.store.checkpoint import require_sound
from mtpconv.store.dist_folder import find_folder, read_bounded
from mtpconv.store.hf import HfCheckpoint, open_hf
from mtpconv.store.hf_index import find_index, outside, parse_index
from mtpconv.store.json_text import read_json
from mtpconv.store.manifest import Manifest, read_manifest, write_manifest
from mtpconv.store.other_files import OtherFiles, other_files
from mtpconv.store.safetensors_header import MAX_HEADER_BYTES, ShardHeader, parse_header

FOLDER = "hf_source"
#: What lies in it.
_FILES, HEADERS, MANIFEST, CARRIED = "files", "headers", "manifest.json", "carried"
QUANTISED, _LEFT = "quantised", "left_behind.json"
#: Saved headers must not look like shards to anybody who searches for `*.safetensors`.
_HEADER = ".header"


@dataclass(frozen=True, slots=True)
class HfSource:
    """The HF side as it was: config, files, shard headers, carried tensors."""

    path: Path
    files_root: Path
    config: dict[str, Any]
    #: the files below `files_root` that are no shards, and what stayed behind
    others: OtherFiles
    #: parsed headers in shard order; their `file` need not exist
    headers: Mapping[str, ShardHeader]
    carried: HfCheckpoint | None = None
    manifest: Manifest | None = None
    index_name: str | None = None
    #: FP8 codes and scales as they were; None if they did not travel
    quantised: HfCheckpoint | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """Files that are no shards, by path below `files_root`."""
        return self.others.travel

    @property
    def files_read(self) -> tuple[Path, ...]:
        """Every file whose bytes an export may read."""
        tensors = (h.file for c in (self.carried, self.quantised) if c for h in c.shards.values())
        return (*(self.files_root / f for f in self.files), *tensors)

    @property
    def names(self) -> frozenset[str]:
        """HF names of all shards."""
        return frozenset(n for h in self.headers.values() for n in h.tensors)


def source_of_hf(hf: HfCheckpoint) -> HfSource:
    """An HF folder as its own source."""
    if hf.config is None:
        raise UnreadableError(f"{hf.path}: has no config.json; it says what the model is")
    return HfSource(
        hf.path, hf.path, hf.config, files_beside(hf), hf.shards,
        index_name=hf.index_name, quantised=hf,
    )  # fmt: skip


def read_source(path: Path) -> HfSource:
    """A saved `hf_source` folder, a folder that has one, or an HF folder (weights optional).

    Raises: UnreadableError or RefusedError if it is none of these or damaged.
    """
    for folder in (path, path / FOLDER):
        if (folder / HEADERS).is_dir():
            return _read_saved(folder)
    if not (path / "config.json").is_file():
        saved = find_source(path)
        if saved is not None:
            return saved
        raise UnreadableError(
            f"{path}: neither a HuggingFace folder nor a checkpoint with {FOLDER}/; "
            "pass the original HuggingFace folder with --like"
        )
    if _has_shards(path):
        hf = open_hf(path)
        require_sound(hf)
        return source_of_hf(hf)
    others = other_files(path, (), FOLDER)
    # Shards are laid out anew, and no index of others must come along.
    index, more = find_index(path)
    travel = (n for n in others.travel if n != index and n not in more)
    return HfSource(path, path, _config(path), replace(others, travel=tuple(travel)), {})


def find_source(path: Path) -> HfSource | None:
    """The `hf_source` of a Megatron checkpoint (parent or iteration folder), if it has one.

    It lies in the folder, beside it, or beside the iteration folder that is meant, which may be
    a link to elsewhere.
    """
    folder = _saved_folder(path)
    return None if folder is None else _read_saved(folder)


def has_source(path: Path) -> bool:
    """Whether `find_source` would find one."""
    return _saved_folder(path) is not None


def _saved_folder(path: Path) -> Path | None:
    places = (folder / FOLDER for folder in _places(path))
    return next((place for place in places if (place / HEADERS).is_dir()), None)


def _places(path: Path) -> Iterator[Path]:
    yield path
    try:
        iteration = find_folder(path)[0]
    except UnreadableError:
        iteration = path  # the source may be there without its checkpoint
    if iteration.name not in ("", ".."):  # the parent of `.` is `.`
        yield iteration.parent
    try:
        yield iteration.resolve().parent
    except (OSError, RuntimeError):
        return  # a link to itself


def files_beside(hf: HfCheckpoint) -> OtherFiles:
    """The files of an HF folder that are no shards. Raises: as `other_files`."""
    return other_files(hf.path, hf.shards, FOLDER)


def write_source(
    hf: HfCheckpoint,
    folder: Path,
    manifest: Manifest,
    shards: Mapping[str, ShardHeader],
    others: OtherFiles,
) -> None:
    """Save everything but the weights of an HF folder, and what stayed behind by name.

    Raises: WriteError.
    """
    (folder / HEADERS).mkdir(parents=True)
    for name, header in shards.items():
        write_bytes(folder / HEADERS / f"{name}{_HEADER}", header.raw)
    for name in others.travel:
        copy_file(hf.path / name, folder / _FILES / name)
    if others.left:
        text = json.dumps({"left_behind": others.left}, indent=1)
        write_bytes(folder / _LEFT, text.encode() + b"\n")
    write_manifest(manifest, folder / MANIFEST)


def carried_folder(folder: Path) -> Path:
    """Where tensors that Megatron has no place for are kept, as an HF folder."""
    return folder / CARRIED


def quantised_folder(folder: Path) -> Path:
    """Where FP8 codes and scales are kept, in files named like the shards they are from."""
    return folder / QUANTISED


def copy_file(source: Path, target: Path) -> None:
    """Copy one file, executable if it was, and fsync it. Raises: WriteError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        mode = target.stat().st_mode
        # As the umask has it: whoever may read may also run.
        runs = source.stat().st_mode & 0o111 & (mode & 0o444) >> 2
        if runs:
            target.chmod(mode | runs)
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


def _has_shards(path: Path) -> bool:
    """Whether any shard is there, beside the config or where an index says."""
    if any(p.suffix == ".safetensors" for p in path.iterdir()):
        return True
    name, _ = find_index(path)
    if name is None:
        return False
    named = set(parse_index(read_json(path / name), name).weight_map.values())
    return any((path / file).is_file() for file in named if not outside(file))


def _config(root: Path) -> dict[str, Any]:
    value = read_json(root / "config.json").value
    if not isinstance(value, dict):
        raise UnreadableError(f"{root / 'config.json'}: is not a JSON object")
    return value


def _read_saved(folder: Path) -> HfSource:
    files_root = folder / _FILES
    others = replace(other_files(files_root, ()), left=_read_left(folder / _LEFT))
    manifest = folder / MANIFEST
    carried = _read_tensors(folder / CARRIED)
    if carried is not None:
        require_sound(carried)
    return HfSource(
        folder,
        files_root,
        _config(files_root),
        others,
        _read_headers(folder / HEADERS),
        carried,
        read_manifest(manifest) if os.path.lexists(manifest) else None,
        find_index(files_root)[0],
        _read_tensors(folder / QUANTISED),
    )


def _read_headers(folder: Path) -> dict[str, ShardHeader]:
    """Saved headers by the names of their shards."""
    found = {}
    names = other_files(folder, ())
    for name in sorted({*names.travel, *names.left}):
        path = folder / name
        if not name.endswith(_HEADER):
            raise UnreadableError(f"{path}: is no header of a shard; copy {folder.parent} again")
        try:
            raw = read_bounded(path, 8 + MAX_HEADER_BYTES)
        except UnreadableError as error:
            raise UnreadableError(f"{path.parent}: {error}") from None
        if len(raw) < 8 or int.from_bytes(raw[:8], "little") != len(raw) - 8:
            raise UnreadableError(f"{path}: does not have the length it says; copy it again")
        found[name.removesuffix(_HEADER)] = parse_header(raw, None, path)
    return found


def _read_tensors(folder: Path) -> HfCheckpoint | None:
    """Tensors that travelled, None if none did."""
    return open_hf(folder) if os.path.lexists(folder) else None


def _read_left(path: Path) -> Mapping[str, str]:
    if not os.path.lexists(path):
        return {}
    value = read_json(path).value
    left = value.get("left_behind") if isinstance(value, dict) else None
    if not isinstance(left, dict) or not all(type(reason) is str for reason in left.values()):
        raise UnreadableError(f"{path}: is no list of files with reasons; copy it again")
    return left
