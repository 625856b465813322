"""HuggingFace folders: safetensors shards, the index and config.json.

Opening reads every header, not only the index, and records what is wrong instead of raising,
so that the auditor can name all faults at once. Converters call `require_sound`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtpconv.errors import UnreadableError
from mtpconv.store.checkpoint import Chunk, Problem
from mtpconv.store.content import Run
from mtpconv.store.hf_index import INDEX_NAME, IndexFile, find_index, outside, parse_index
from mtpconv.store.json_text import read_json
from mtpconv.store.safetensors_header import (
    ShardHeader,
    link_target,
    link_text,
    plain,
    read_header,
)
from mtpconv.tensors import Box, TensorSpec

CONFIG_NAME = "config.json"
#: What modelopt writes beside config.json, which older exports leave without a
#: quantization_config. Source: NVIDIA/TensorRT-Model-Optimizer modelopt/torch/export
#: unified_export_hf.py and convert_hf_config.py, read 2026-11-29.
QUANT_CONFIG_NAME = "hf_quant_config.json"
_SUFFIX = ".safetensors"
_COMPARE_BLOCK = 4 << 20


@dataclass(frozen=True, slots=True)
class HfCheckpoint:
    """A HuggingFace folder as it lies on disk; see `mtpconv.store.checkpoint.Checkpoint`."""

    path: Path
    tensors: Mapping[str, TensorSpec]
    problems: Sequence[Problem]
    #: config.json as parsed; None if it is absent or unreadable
    config: dict[str, Any] | None
    #: readable shards by file name
    shards: Mapping[str, ShardHeader]
    #: the index as parsed; None without one
    index: dict[str, Any] | None
    index_name: str | None
    weight_map: Mapping[str, str]
    #: which shard a tensor is read from
    where: Mapping[str, str]
    #: absent or unreadable files, each with the tensors the index puts there
    unread: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: what hf_quant_config.json says, in the words of a quantization_config; None without one
    quant_config: dict[str, Any] | None = None
    #: whether all files beside the shards are known; a web server does not say
    listed: bool = True

    @property
    def format(self) -> str:
        """Always `hf`."""
        return "hf"

    def chunks(self, name: str) -> Sequence[Chunk]:
        """The one chunk of a tensor."""
        header = self.shards[self.where[name]]
        return (Chunk(header.file, header.start(name), Box.whole(self.tensors[name].shape)),)

    def runs(self, name: str) -> Sequence[Run]:
        """The one run of a tensor: what its chunk says, at a fifth of the cost."""
        header = self.shards[self.where[name]]
        begin, end = header.offsets[name]
        return (Run(0, end - begin, header.file, header.data_start + begin),)


def open_hf(
    path: Path,
    *,
    compare_duplicates: bool = True,
    expected: Mapping[str, ShardHeader] | None = None,
) -> HfCheckpoint:
    """Opens a HuggingFace folder; faults of single files become problems.

    `expected` are headers that shards probably have: those are not parsed again.

    `compare_duplicates=False` reads headers only; a tensor that stands in two files with the
    same dtype and shape is then a warning that says its bytes were not compared.

    Raises: UnreadableError if there is no such folder or it holds no safetensors checkpoint.
    """
    path = Path(path)
    found = _shard_names(path)
    problems: list[Problem] = []
    index = _index(path, problems)
    config = _config(path, problems)
    quant_config = _quant_config(path, problems)
    if not found and not index.weight_map and index.name is None:
        raise UnreadableError(_nothing_here(path))
    wanted = _indexed_files(index.weight_map, problems)
    shards, unread = _read_shards(path, sorted({*found, *wanted}), wanted, expected or {}, problems)
    where = _locate(shards, index, problems, compare_duplicates)
    if not unread:
        _check_total_size(index, shards, where, problems)
    tensors = {name: shards[file].tensors[name] for name, file in where.items()}
    return HfCheckpoint(
        path, tensors, tuple(problems), config, shards, index.value, index.name,
        index.weight_map, where, unread, quant_config,
    )  # fmt: skip


def _shard_names(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(
                e.name for e in entries if e.name.endswith(_SUFFIX) and not e.name.startswith(".")
            )
    except FileNotFoundError as error:
        raise UnreadableError(f"{path}: there is no such folder") from error
    except NotADirectoryError as error:
        raise UnreadableError(f"{path}: is a file; name the folder it lies in") from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UnreadableError(f"{path}: cannot be read: {why}") from error


def _nothing_here(path: Path) -> str:
    names = sorted(p.name for p in path.iterdir())
    pickles = [n for n in names if n.endswith((".bin", ".pt", ".pth"))]
    if pickles:
        return (
            f"{path}: holds pickled weights ({plain(pickles[0])}) and no safetensors file; "
            "save the model as safetensors first"
        )
    if any(n.endswith(".gguf") for n in names):
        return f"{path}: holds GGUF weights and no safetensors file; use the original checkpoint"
    if "snapshots" in names:
        return f"{path}: is a hub cache folder; name one of the folders under snapshots/"
    return f"{path}: holds no safetensors file; name the folder of a checkpoint"


def _index(path: Path, problems: list[Problem]) -> IndexFile:
    name, others = find_index(path)
    if others:
        problems.append(
            Problem(
                "index_ambiguous",
                f"{len(others) + 1} index files and no {INDEX_NAME}; {plain(name or '')} was read",
                file=name,
                files=tuple(others),
                warning=True,
            )
        )
    if name is None:
        return IndexFile()
    try:
        index = parse_index(read_json(path / name), name)
    except UnreadableError as error:
        problems.append(Problem("unreadable_file", str(error), file=name))
        return IndexFile(name=name)
    problems.extend(index.problems)
    return index


def _config(path: Path, problems: list[Problem]) -> dict[str, Any] | None:
    if not os.path.lexists(path / CONFIG_NAME):
        message = f"{path}: has no {CONFIG_NAME}; nothing says what the checkpoint should hold"
        problems.append(Problem("config_missing", message, file=CONFIG_NAME, warning=True))
        return None
    try:
        read = read_json(path / CONFIG_NAME)
    except UnreadableError as error:
        problems.append(Problem("unreadable_file", str(error), file=CONFIG_NAME))
        return None
    if not isinstance(read.value, dict):
        message = f"{path / CONFIG_NAME}: is not a JSON object"
        problems.append(Problem("unreadable_file", message, file=CONFIG_NAME))
        return None
    for key in read.duplicate_keys:
        message = f"{CONFIG_NAME}: has the key {plain(key)} twice; parsers keep the last one"
        problems.append(Problem("duplicate_key_in_config", message, file=CONFIG_NAME))
    config: dict[str, Any] = read.value
    return config


def _quant_config(path: Path, problems: list[Problem]) -> dict[str, Any] | None:
    if not os.path.lexists(path / QUANT_CONFIG_NAME):
        return None
    try:
        value = read_json(path / QUANT_CONFIG_NAME).value
    except UnreadableError as error:
        problems.append(Problem("unreadable_file", str(error), file=QUANT_CONFIG_NAME))
        return None
    stated = value.get("quantization") if isinstance(value, dict) else None
    return {"quant_method": "modelopt", **stated} if isinstance(stated, dict) else None


def _indexed_files(weight_map: Mapping[str, str], problems: list[Problem]) -> dict[str, list[str]]:
    wanted: dict[str, list[str]] = {}
    for tensor, file in weight_map.items():
        wanted.setdefault(file, []).append(tensor)
    for file in [f for f in wanted if outside(f)]:
        problems.append(
            Problem(
                "index_missing_file",
                f"index names {plain(file)}, which is outside the folder and is not read",
                file=file,
                tensors=tuple(sorted(wanted[file])),
            )
        )
    return wanted


def _read_shards(
    path: Path,
    files: Sequence[str],
    wanted: Mapping[str, list[str]],
    expected: Mapping[str, ShardHeader],
    problems: list[Problem],
) -> tuple[dict[str, ShardHeader], dict[str, tuple[str, ...]]]:
    shards: dict[str, ShardHeader] = {}
    unread: dict[str, tuple[str, ...]] = {}
    for file in files:
        inside = tuple(sorted(wanted.get(file, ())))
        if not outside(file):
            try:
                shards[file] = read_header(path / file, expected.get(file))
                continue
            except UnreadableError as error:
                problems.append(_unreadable(path / file, file, inside, str(error)))
        unread[file] = inside
    return shards, unread


def _unreadable(full: Path, file: str, inside: tuple[str, ...], message: str) -> Problem:
    if inside and _is_absent(full):
        what = f"index puts {len(inside)} tensors into {plain(file)}, which is not there"
        if (target := link_target(full)) is not None:
            what += f" (a symlink to {plain(target)})"
        elif (target := link_text(full)) is not None:
            what += f" (a text file that stands for a symlink to {plain(target)})"
        return Problem("index_missing_file", what + "; fetch it", file=file, tensors=inside)
    return Problem("unreadable_file", message, file=file, tensors=inside)


def _is_absent(full: Path) -> bool:
    """No file, a name none can have, a symlink to nothing or a text file that stands for one."""
    try:
        if not full.exists():
            return True
        target = link_text(full)
        return target is not None and not (full.parent / target).exists()
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG
    except ValueError:
        return False


def _locate(
    shards: Mapping[str, ShardHeader],
    index: IndexFile,
    problems: list[Problem],
    compare_bytes: bool,
) -> dict[str, str]:
    where: dict[str, str] = {}
    several: dict[str, list[str]] = {}
    for file, header in shards.items():
        for tensor in header.tensors:
            if where.setdefault(tensor, file) != file:
                several.setdefault(tensor, [where[tensor]]).append(file)
    weight_map = index.weight_map

    def holders(tensor: str) -> Sequence[str]:
        return several.get(tensor) or ([where[tensor]] if tensor in where else [])

    for tensor, file in weight_map.items():
        if file in shards and tensor not in shards[file].tensors:
            problems.append(_ghost(tensor, file, holders(tensor)))
    indexed = set(weight_map.values())
    for tensor in where:
        files = holders(tensor)
        said = weight_map.get(tensor)
        known = [f for f in files if f in indexed] or files
        where[tensor] = said if said is not None and said in files else known[0]
        if len(files) > 1:
            problems.append(_duplicate(tensor, files, shards, compare_bytes))
        elif said is None and index.value is not None:
            message = f"{plain(tensor)}: is in {plain(files[0])} but not in the index"
            problems.append(Problem("tensor_not_in_index", message, file=files[0], tensor=tensor))
    return where


def _ghost(tensor: str, file: str, elsewhere: Sequence[str]) -> Problem:
    message = f"{plain(tensor)}: the index puts it into {plain(file)}, which does not hold it"
    if elsewhere:
        message += f"; it is in {plain(elsewhere[0])}"
    return Problem(
        "index_entry_not_in_file", message, file=file, tensor=tensor, files=tuple(elsewhere)
    )


def _duplicate(
    tensor: str, files: Sequence[str], shards: Mapping[str, ShardHeader], compare_bytes: bool
) -> Problem:
    first = shards[files[0]]
    others = [shards[f] for f in files[1:]]
    shown = ", ".join(map(plain, files))
    if any(h.tensors[tensor] != first.tensors[tensor] for h in others):
        how = "with different dtype or shape"
    elif not compare_bytes:
        message = f"{plain(tensor)}: is in {shown}; the bytes were not compared"
        return Problem("duplicate_tensor", message, tensor=tensor, files=tuple(files), warning=True)
    elif all(_same_bytes(tensor, first, h) for h in others):
        message = f"{plain(tensor)}: is in {shown} with the same bytes"
        return Problem("duplicate_tensor", message, tensor=tensor, files=tuple(files), warning=True)
    else:
        how = "with different bytes"
    message = f"{plain(tensor)}: is in {shown} {how}; delete the file that does not belong here"
    return Problem("duplicate_tensor_conflict", message, tensor=tensor, files=tuple(files))


def _same_bytes(tensor: str, a: ShardHeader, b: ShardHeader) -> bool:
    left = a.tensors[tensor].nbytes
    try:
        with a.file.open("rb") as x, b.file.open("rb") as y:
            x.seek(a.start(tensor))
            y.seek(b.start(tensor))
            while left:
                block = x.read(min(left, _COMPARE_BLOCK))
                if not block or block != y.read(len(block)):
                    return False
                left -= len(block)
    except OSError:
        return False
    return True


def _check_total_size(
    index: IndexFile,
    shards: Mapping[str, ShardHeader],
    where: Mapping[str, str],
    problems: list[Problem],
) -> None:
    if index.total_size is None:
        return
    held = sum(shards[where[t]].tensors[t].nbytes for t in index.weight_map if t in where)
    if index.total_size != held:
        message = (
            f"index total_size is {plain(str(index.total_size))} but its tensors take {held} bytes;"
            " loaders ignore it"
        )
        problems.append(Problem("index_total_size", message, file=index.name, warning=True))
