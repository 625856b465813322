"""The index of a sharded HuggingFace checkpoint: which file holds which tensor."""

from __future__ import annotations

import errno
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from mtpconv.errors import UnreadableError
from mtpconv.store.checkpoint import Problem
from mtpconv.store.json_text import JsonText
from mtpconv.store.safetensors_header import plain

INDEX_NAME = "model.safetensors.index.json"
_SUFFIX = ".safetensors.index.json"


@dataclass(frozen=True, slots=True)
class IndexFile:
    """A parsed index; everything empty if the folder has none."""

    name: str | None = None
    value: dict[str, Any] | None = None
    weight_map: Mapping[str, str] = field(default_factory=dict)
    #: as written, which may be a float or a string; None if the index has none
    total_size: object = None
    problems: Sequence[Problem] = ()


def find_index(path: Path) -> tuple[str | None, list[str]]:
    """The name of the index to read, and further candidates if the choice was arbitrary."""
    names = sorted(p.name for p in path.iterdir() if p.name.endswith(_SUFFIX) and p.name[0] != ".")
    if INDEX_NAME in names:
        return INDEX_NAME, []
    return (names[0], names[1:]) if names else (None, [])


def parse_index(read: JsonText, name: str) -> IndexFile:
    """Checks the form of an index.

    Raises: UnreadableError if it is no JSON object with a `weight_map` of strings.
    """
    value = read.value
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict) or not all(type(f) is str for f in weight_map.values()):
        raise UnreadableError(f"{name}: has no weight_map from tensor names to file names")
    problems = [
        Problem(
            "duplicate_key_in_index",
            f"{name}: has the key {plain(key)} twice; parsers keep the last one",
            file=name,
            tensor=key if key in weight_map else None,
        )
        for key in read.duplicate_keys
    ]
    # The headers have the same names, and a file name stands for thousands of tensors.
    weight_map = {sys.intern(name): sys.intern(file) for name, file in weight_map.items()}
    value["weight_map"] = weight_map
    if any("./" in file for file in weight_map.values()):
        weight_map = {name: _direct(file) for name, file in weight_map.items()}
    metadata = value.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return IndexFile(name, value, weight_map, total, tuple(problems))


def _direct(file: str) -> str:
    """A file name without steps that lead nowhere: `./a` is `a`."""
    return file if outside(file) else str(PurePosixPath(file))


def outside(file: str) -> bool:
    """Whether a file name in an index leads out of the checkpoint's folder."""
    path = PurePosixPath(file)
    return (
        not file or "\0" in file or "\\" in file or path.is_absolute() or ".." in path.parts
        or not path.name
    )  # fmt: skip


def has_file(folder: Path, file: str) -> bool:
    """Whether a folder holds a file; the name is anybody's, and may be longer than names can be."""
    try:
        return (folder / file).is_file()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False
