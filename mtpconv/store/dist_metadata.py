"""What a `.metadata` file says: which tensors there are, which chunks, and where they lie.

Source: torch 2.14.1 torch/distributed/checkpoint/metadata.py and filesystem.py, read
2026-11-29; field names have not changed since torch 2.1.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeGuard

from mtpconv.errors import UnreadableError
from mtpconv.store.checkpoint import Problem
from mtpconv.store.dist_folder import METADATA
from mtpconv.store.pickles import Global, Instance, load_pickle
from mtpconv.store.torch_names import TORCH_DTYPES, allow_metadata
from mtpconv.tensors import Box, TensorSpec, are_dims
from mtpconv.tiling import tiling_flaw

_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
_METADATA_CLASSES = ("Metadata", "MCoreMetadata")
_LIMIT = 1 << 63
_NONE = (None,) * 4
_INFO = ("relative_path", "offset", "length", "transform_descriptors")


class Place(NamedTuple):
    """A record: `length` bytes from `offset` of a `.distcp` file."""

    file: str
    offset: int
    length: int


class StoredChunk(NamedTuple):
    """A box of a tensor and the record that holds it."""

    box: Box
    place: Place


@dataclass(slots=True)
class DistMetadata:
    """The contents of a `.metadata`; optimizer state is counted, not kept."""

    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    chunks: dict[str, list[StoredChunk]] = field(default_factory=dict)
    objects: dict[str, Place] = field(default_factory=dict)
    ignored: int = 0
    problems: list[Problem] = field(default_factory=list)
    #: every record named, whatever it holds, in the order of files and offsets
    places: list[Place] = field(default_factory=list)

    def bad(self, message: str, tensor: str | None = None) -> None:
        """Note a contradiction inside `.metadata`."""
        self.problems.append(Problem("unreadable_file", message, file=METADATA, tensor=tensor))


#: Record places by key and chunk offset, the offset as text (empty for bytes entries): the hash
#: of a text has a secret, that of a tuple of numbers can be made to collide.
_Places = dict[tuple[str, str], Place]


def read_metadata(data: bytes) -> DistMetadata:
    """What the bytes of a `.metadata` say, contradictions noted in `problems`.

    Law: time and memory are linear in `len(data)`, whatever it holds.
    Raises: UnreadableError if it is not a `.metadata` at all or names code.
    """
    value = load_pickle(data, METADATA, allow_metadata, fold=_read_place)
    if type(value) is not Instance or value.of.name not in _METADATA_CLASSES:
        raise UnreadableError(".metadata holds no torch checkpoint metadata; it is corrupt")
    entries, places = value.field("state_dict_metadata"), value.field("storage_data")
    if type(entries) is not dict or not _are_places(places):
        raise UnreadableError(".metadata lists no tensors or no records; it is corrupt")
    result = DistMetadata(places=sorted(places.values()))
    for key, entry in entries.items():
        kind = entry.of.name if type(entry) is Instance else None
        if not _is_name(key) or kind not in ("TensorStorageMetadata", "BytesStorageMetadata"):
            raise UnreadableError(".metadata has an entry that is neither tensor nor bytes")
        key = sys.intern(key)
        if _OPTIMIZER.match(key):
            result.ignored += 1
        elif kind == "BytesStorageMetadata":
            place = places.pop((key, ""), None)
            if place is None:
                result.bad(f".metadata names no record of {key}; it is corrupt", key)
            else:
                result.objects[key] = place
        else:
            _read_tensor(key, entry, places, result)
    strange = [key for key, _ in places if not _OPTIMIZER.match(key)]
    if strange:
        result.bad(f".metadata has a record of {strange[0]!r} that no chunk needs; it is corrupt")
    _check_overlaps(result)
    return result


def _read_place(index: Any, info: Any) -> tuple[tuple[str, str], Place]:
    """A pair of `storage_data`, checked and made small."""
    if type(index) is not Instance or type(info) is not Instance:
        raise UnreadableError(".metadata has a record without name or place; it is corrupt")
    key, at = _values(index, ("fqn", "offset"))
    file, offset, length, transforms = _values(info, _INFO)
    if (
        not _is_name(key)
        or not (at is None or _is_shape(at))
        or type(offset) is not int
        or type(length) is not int
        or not 0 <= offset <= offset + length < _LIMIT
    ):
        raise UnreadableError(".metadata has a record without name or place; it is corrupt")
    if not _is_plain_name(file):
        raise UnreadableError(
            f".metadata puts {key} into {str(file)[:80]!r}, outside the checkpoint folder"
        )
    if transforms:
        raise UnreadableError(
            f".metadata says that {key} was stored through an extension (compression?); "
            "save the checkpoint again without it"
        )
    return (key, "" if at is None else repr(at)), Place(file, offset, length)


def _values(of: Instance, names: Sequence[str]) -> Sequence[Any]:
    """The first values of an object, None where there is none.

    torch writes them by name; they are the arguments of the class in this order, too.
    """
    if of.new:
        return [of.field(name) for name in names]
    return (of.args + _NONE)[: len(names)]


def _are_places(value: Any) -> TypeGuard[_Places]:
    return type(value) is dict and all(type(place) is Place for place in value.values())


def _is_shape(value: Any) -> bool:
    return type(value) is tuple and len(value) <= 64 and are_dims(value)


def _is_name(name: Any) -> bool:
    """Text that fits into one line of a message."""
    return type(name) is str and 0 < len(name) <= 1024 and name.isprintable()


def _is_plain_name(name: Any) -> bool:
    """The name of a file in the folder itself."""
    return _is_name(name) and name not in (".", "..") and "/" not in name and "\\" not in name


def _read_tensor(key: str, entry: Instance, places: _Places, result: DistMetadata) -> None:
    shape, chunks, properties = (entry.field(n) for n in ("size", "chunks", "properties"))
    dtype = _dtype(properties)
    if not _is_shape(shape) or prod(shape) >= _LIMIT or type(chunks) is not list or dtype is None:
        raise UnreadableError(f".metadata says nothing usable about {key}; it is corrupt")
    if dtype.name not in TORCH_DTYPES:
        result.bad(f"{key} has dtype {dtype}, which safetensors does not have", key)
        return
    boxes: list[Box] = []
    stored: list[StoredChunk] = []
    for chunk in chunks:
        if type(chunk) is not Instance:
            raise UnreadableError(f".metadata has an impossible chunk of {key}; it is corrupt")
        at, sizes = _values(chunk, ("offsets", "sizes"))
        if not _is_shape(at) or not _is_shape(sizes) or not len(at) == len(sizes) == len(shape):
            raise UnreadableError(f".metadata has an impossible chunk of {key}; it is corrupt")
        box = Box(at, sizes)
        boxes.append(box)
        place = places.pop((key, repr(at)), None)
        if place is not None:
            stored.append(StoredChunk(box, place))
    result.tensors[key] = TensorSpec(TORCH_DTYPES[dtype.name][0], shape)
    result.chunks[key] = stored
    if len(stored) != len(boxes):
        missing = len(boxes) - len(stored)
        result.bad(f".metadata names no record for {missing} chunks of {key}; it is corrupt", key)
    flaw = tiling_flaw(shape, boxes)
    if flaw:
        result.bad(f"the chunks of {key} {flaw}; .metadata is corrupt or a rank is missing", key)


def _dtype(properties: Any) -> Global | None:
    state = properties.state if type(properties) is Instance else None
    dtype = state[0] if type(state) is tuple and state else None
    return dtype if type(dtype) is Global and dtype.module == "torch" else None


def _check_overlaps(result: DistMetadata) -> None:
    """Two records in the same bytes: one tensor would be read in place of another."""
    for one, next_one in pairwise(result.places):
        if one.file == next_one.file and one.offset + one.length > next_one.offset:
            where = f"byte {next_one.offset:,} of {one.file}"
            result.bad(f".metadata puts two records at {where}; it is corrupt")
            return
