"""What travels with a Megatron checkpoint so that the same HF files can come back.

The folder `hf_source` beside `release/` holds the files of the HF folder that are no shards,
byte for byte, and a list of those that stayed behind; the exact header bytes of every shard; a
manifest of all tensors; and tensors that have no place in Megatron. An HF folder itself can
stand in for it (`--like`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from mtpconv.errors import UnreadableError
from mtpconv.store.checkpoint import require_sound
from mtpconv.store.dist_folder import find_folder, read_bounded
from mtpconv.store.durable import copy_file, write_bytes
from mtpconv.store.hf import HfCheckpoint, open_hf
from mtpconv.store.hf_index import find_index, has_file, outside, parse_index
from mtpconv.store.json_text import read_json
from mtpconv.store.other_files import OtherFiles, other_files
from mtpconv.store.safetensors_header import MAX_HEADER_BYTES, ShardHeader, parse_header, plain

FOLDER = "hf_source"
#: What lies in it.
_FILES, HEADERS, MANIFEST, CARRIED = "files", "headers", "manifest.json", "carried"
QUANTISED, _LEFT, _TABLE = "quantised", "left_behind.json", "mapping.json"
#: Saved headers must not look like shards to anybody who searches for `*.safetensors`.
_HEADER = ".header"


class OwnTable(NamedTuple):
    """A mapping table that mtpconv does not ship: its file's name, a digest of what it says."""

    name: str
    digest: str


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
    index_name: str | None = None
    #: FP8 codes and scales as they were; None if they did not travel
    quantised: HfCheckpoint | None = None
    #: the user's own table that it was converted with, None for a shipped one
    table: OwnTable | None = None

    @property
    def is_saved(self) -> bool:
        """Whether hf2mcore saved it; else it is an HF folder itself."""
        return self.files_root != self.path

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
        if _is_saved(folder):
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


def find_source(
    path: Path, known: Mapping[str, ShardHeader] = MappingProxyType({})
) -> HfSource | None:
    """The `hf_source` of a Megatron checkpoint (parent or iteration folder), if it has one.

    It lies in the folder, beside it, or beside the iteration folder that is meant, which may be
    a link to elsewhere. Headers that are `known`, byte for byte, are not parsed again.
    """
    folder = _saved_folder(path)
    return None if folder is None else _read_saved(folder, known)


def table_beside(path: Path) -> tuple[Path, OwnTable | None] | None:
    """The `hf_source` of a Megatron checkpoint, and the user's own table it was made with, if any.

    None if it has no `hf_source`.
    """
    folder = _saved_folder(path)
    return None if folder is None else (folder, _read_table(folder / _TABLE))


def has_source(path: Path) -> bool:
    """Whether `find_source` would find one."""
    return _saved_folder(path) is not None


def _saved_folder(path: Path) -> Path | None:
    places = (folder / FOLDER for folder in _places(path))
    return next((place for place in places if _is_saved(place)), None)


def _is_saved(folder: Path) -> bool:
    """Whether hf2mcore saved it, even if a part of it was lost since."""
    rest = (_FILES, MANIFEST) if folder.name == FOLDER else ()
    return (folder / HEADERS).is_dir() or any(os.path.lexists(folder / name) for name in rest)


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
    return replace(other_files(hf.path, hf.shards, FOLDER), listed=hf.listed)


def write_source(
    hf: HfCheckpoint,
    folder: Path,
    shards: Mapping[str, ShardHeader],
    others: OtherFiles,
    table: OwnTable | None = None,
) -> None:
    """Save everything but the weights of an HF folder, and what stayed behind by name.

    `seal_source` comes last, when all else is in the folder.

    Raises: WriteError.
    """
    (folder / HEADERS).mkdir(parents=True)
    for name, header in shards.items():
        write_bytes(folder / HEADERS / f"{name}{_HEADER}", header.raw)
    for name in others.travel:
        copy_file(hf.path / name, folder / _FILES / name)
    if table is not None:
        write_bytes(folder / _TABLE, json.dumps(table._asdict(), indent=1).encode() + b"\n")
    if others.left:
        text = json.dumps({"left_behind": others.left}, indent=1)
        write_bytes(folder / _LEFT, text.encode() + b"\n")


def carried_folder(folder: Path) -> Path:
    """Where tensors that Megatron has no place for are kept, as an HF folder."""
    return folder / CARRIED


def quantised_folder(folder: Path) -> Path:
    """Where FP8 codes and scales are kept, in files named like the shards they are from."""
    return folder / QUANTISED


def _has_shards(path: Path) -> bool:
    """Whether any shard is there, beside the config or where an index says."""
    if any(p.suffix == ".safetensors" for p in path.iterdir()):
        return True
    name, _ = find_index(path)
    if name is None:
        return False
    named = set(parse_index(read_json(path / name), name).weight_map.values())
    return any(has_file(path, file) for file in named if not outside(file))


def _config(root: Path) -> dict[str, Any]:
    value = read_json(root / "config.json").value
    if not isinstance(value, dict):
        raise UnreadableError(f"{root / 'config.json'}: is not a JSON object")
    return value


def _read_saved(folder: Path, known: Mapping[str, ShardHeader] = MappingProxyType({})) -> HfSource:
    files_root = folder / _FILES
    others = replace(other_files(files_root, ()), left=_read_left(folder / _LEFT))
    headers = _read_headers(folder / HEADERS, known)
    for name in others.travel:
        if name in headers or ("/" not in name and name.endswith(".safetensors")):
            raise UnreadableError(
                f"{files_root / name}: would become a shard and is none of those saved; remove it"
            )
    carried = _read_tensors(folder / CARRIED)
    if carried is not None:
        require_sound(carried)
    return HfSource(
        folder,
        files_root,
        _config(files_root),
        others,
        headers,
        carried,
        find_index(files_root)[0],
        _read_tensors(folder / QUANTISED),
        _read_table(folder / _TABLE),
    )


def _read_headers(folder: Path, known: Mapping[str, ShardHeader]) -> dict[str, ShardHeader]:
    """Saved headers by the names of their shards."""
    found = {}
    if not folder.is_dir():
        raise UnreadableError(
            f"{folder}: is missing, hf2mcore saved it; copy {folder.parent} again, or name a "
            "HuggingFace folder with --like"
        )
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
        shard = name.removesuffix(_HEADER)
        same = known.get(shard)
        if same is not None and same.raw == raw:
            found[shard] = replace(same, file=path)
        else:
            found[shard] = parse_header(raw, None, path)
    return found


def _read_tensors(folder: Path) -> HfCheckpoint | None:
    """Tensors that travelled, None if none did."""
    return open_hf(folder) if os.path.lexists(folder) else None


def _read_table(path: Path) -> OwnTable | None:
    if not os.path.lexists(path):
        return None
    value = read_json(path).value
    if not isinstance(value, dict) or set(map(type, value.values())) != {str}:
        raise UnreadableError(f"{path}: does not name a mapping table; copy it again")
    return OwnTable(plain(value.get("name", "")), value.get("digest", ""))


def _read_left(path: Path) -> Mapping[str, str]:
    if not os.path.lexists(path):
        return {}
    value = read_json(path).value
    left = value.get("left_behind") if isinstance(value, dict) else None
    if not isinstance(left, dict) or not all(type(reason) is str for reason in left.values()):
        raise UnreadableError(f"{path}: is no list of files with reasons; copy it again")
    return left
