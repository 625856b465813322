"""The header of one safetensors file: parsed strictly, bounded, without touching the payload."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from mtpconv.errors import UnreadableError
from mtpconv.tensors import DTYPE_BITS, TensorSpec, are_dims

#: Largest header that is read.
#: Source: safetensors/src/tensor.rs, MAX_HEADER_SIZE, version 0.8, read 2026-11-29.
MAX_HEADER_BYTES = 100_000_000
#: The shortest real entry is about 50 bytes and opens 3 brackets; a header with more brackets
#: than this per byte is an attempt to use up memory, not a list of tensors.
_BYTES_PER_BRACKET = 12
_ENTRY = {"dtype", "shape", "data_offsets"}
_MAX_RANK = 64

_LFS_POINTER = b"version https://git-lfs"
_MAX_LINK_TEXT = 4096


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """What one safetensors file says about itself."""

    file: Path
    #: the 8-byte length and the JSON after it, as stored, padding included
    raw: bytes
    #: bytes of the whole file
    size: int
    metadata: Mapping[str, str] | None
    #: in header order
    tensors: Mapping[str, TensorSpec]
    #: begin and end inside the payload, in header order
    offsets: Mapping[str, tuple[int, int]]
    #: names in the order of their bytes
    payload_order: tuple[str, ...]

    @property
    def data_start(self) -> int:
        """Where the payload starts in the file."""
        return len(self.raw)

    def start(self, name: str) -> int:
        """Where the bytes of a tensor start in the file."""
        return self.data_start + self.offsets[name][0]


def read_header(path: Path, expected: ShardHeader | None = None) -> ShardHeader:
    """Reads the header of a safetensors file; reads no payload and never blocks.

    If it is the `expected` one, byte for byte, that one's tensors are given, not parsed again.

    Raises: UnreadableError if the file is not a whole, consistent safetensors file.
    """
    raw, size = _raw_header(path)
    if expected is not None and (expected.raw, expected.size) == (raw, size):
        return replace(expected, file=path)
    return parse_header(raw, size, path)


def parse_header(raw: bytes, size: int | None, path: Path) -> ShardHeader:
    """Parses a header; `raw` is the 8-byte length with the JSON, `size` the file's length.

    Without `size` the payload is as long as the header says: its file is elsewhere.

    Raises: UnreadableError if the header is malformed or does not tile the payload.
    """
    entries = _parse_json(raw[8:], path)
    metadata = _metadata(entries.pop("__metadata__", None), path)
    tensors: dict[str, TensorSpec] = {}
    offsets: dict[str, tuple[int, int]] = {}
    # Names stand in headers, index and plan; few tensors differ in dtype and shape. Said once
    # each, a model with 60,000 tensors takes 20 MB less.
    specs: dict[TensorSpec, TensorSpec] = {}
    for name, entry in entries.items():
        spec, span = _entry(name, entry, path)
        name = sys.intern(name)
        tensors[name], offsets[name] = specs.setdefault(spec, spec), span
    order = tuple(sorted(offsets, key=offsets.__getitem__))
    if size is None:
        size = len(raw) + max((end for _, end in offsets.values()), default=0)
    _check_tiling(order, offsets, size - len(raw), path)
    return ShardHeader(path, raw, size, metadata, tensors, offsets, order)


def link_target(path: Path) -> str | None:
    """Where a symlink leads; None for anything else, names that no file can have among them."""
    try:
        return str(path.readlink())
    except (OSError, ValueError):
        return None


def link_text(path: Path) -> str | None:
    """The target in a small text file that stands for a symlink, else None.

    Git without symlink support, and some copy tools, write a symlink as a file that holds
    only its target.
    """
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _MAX_LINK_TEXT:
            return None
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    looks_like_a_path = "/" in text and text.isprintable() and " " not in text
    return text if looks_like_a_path else None


def _raw_header(path: Path) -> tuple[bytes, int]:
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        if (target := link_target(path)) is not None:
            _refuse(path, f"is a symlink to {plain(target)}, which is not there; download it")
        _refuse(path, f"cannot be read: {_reason(error)}")
    if not stat.S_ISREG(status.st_mode):
        _refuse(path, f"is a {_file_type(status.st_mode)}, not a safetensors file")
    size = status.st_size
    try:
        # O_NONBLOCK: should the file be swapped for a FIFO after stat, open must not hang.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        _refuse(path, f"cannot be read: {_reason(error)}")
    with os.fdopen(descriptor, "rb") as file:
        start = file.read(8)
        _check_start(start + file.read(56), size, path)
        length = int.from_bytes(start, "little")
        if length > size - 8:
            _refuse(
                path,
                f"header says {length} bytes but the file has {size} in all: it is truncated "
                "or no safetensors file; copy it again",
            )
        if length > MAX_HEADER_BYTES:
            _refuse(path, f"header of {length} bytes is larger than {MAX_HEADER_BYTES}")
        file.seek(8)
        text = file.read(length)
    if len(text) != length:
        _refuse(path, "ends inside its header: it is truncated; copy it again")
    return start + text, size


def _check_start(start: bytes, size: int, path: Path) -> None:
    if size == 0:
        _refuse(path, "is empty (0 bytes): it was not downloaded or the disk was full")
    if start.startswith(_LFS_POINTER):
        _refuse(path, "is a git-lfs pointer, not the weights; run `git lfs pull`")
    if (target := link_text(path)) is not None:
        _refuse(path, f"is a text file that stands for a symlink to {target}; copy the file itself")
    if size < 8:
        _refuse(path, f"has {size} bytes, too few for a safetensors header")
    if start.lstrip()[:5].lower() in (b"<!doc", b"<html"):
        _refuse(path, "is a web page, not the weights; download it again")


def _parse_json(text: bytes, path: Path) -> dict[str, Any]:
    if not text.startswith(b"{"):
        _refuse(path, "header does not start with '{': it is no safetensors file")
    brackets = text.count(b"[") + text.count(b"{")
    if brackets > 16 + len(text) // _BYTES_PER_BRACKET:
        _refuse(path, "header is not a list of tensors: it nests too much")
    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except UnicodeDecodeError:
        _refuse(path, "header is not UTF-8")
    except _DuplicateKeyError as error:
        _refuse(path, f"header has the key {plain(str(error))} twice")
    except (ValueError, RecursionError) as error:
        _refuse(path, f"header is not JSON: {str(error)[:120]}")
    if not isinstance(entries, dict):
        _refuse(path, "header is not a JSON object")
    return entries


class _DuplicateKeyError(ValueError):
    pass


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key)
            seen.add(key)
    return out


def _metadata(value: object, path: Path) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not all(type(v) is str for v in value.values()):
        _refuse(path, "__metadata__ is not a table of strings")
    if not all(map(is_unicode, (*value, *value.values()))):
        _refuse(path, "__metadata__ is not valid Unicode")
    return value


def _entry(name: str, entry: object, path: Path) -> tuple[TensorSpec, tuple[int, int]]:
    if not name.isascii() and not is_unicode(name):
        _refuse(path, f"tensor name {name!a} is not valid Unicode")
    if not isinstance(entry, dict) or entry.keys() != _ENTRY:
        _refuse(path, f"{plain(name)} must have exactly dtype, shape and data_offsets")
    dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in DTYPE_BITS:
        _refuse(path, f"{plain(name)} has the unknown dtype {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or len(shape) > _MAX_RANK or not are_dims(shape):
        _refuse(path, f"{plain(name)} has no valid shape")
    if not isinstance(span, list) or len(span) != 2 or not are_dims(span):
        _refuse(path, f"{plain(name)} has no valid data_offsets")
    begin, end = span
    bits = prod(shape) * DTYPE_BITS[dtype]
    if end < begin or (end - begin) * 8 != bits:
        _refuse(
            path,
            f"{plain(name)} takes {end - begin} bytes but {dtype} {shape} needs {bits / 8:g}",
        )
    return TensorSpec(dtype, tuple(shape)), (begin, end)


def _check_tiling(
    order: tuple[str, ...], offsets: Mapping[str, tuple[int, int]], payload: int, path: Path
) -> None:
    at = 0
    for name in order:
        begin, end = offsets[name]
        if begin != at:
            what = "overlaps the tensor before it" if begin < at else "leaves a gap before it"
            _refuse(path, f"{plain(name)} at payload byte {begin} {what} (expected {at})")
        at = end
    if at > payload:
        _refuse(
            path,
            f"is truncated: its tensors need {at} payload bytes, it has {payload}; copy it again",
        )
    if at < payload:
        _refuse(path, f"has {payload - at} bytes after its last tensor")


def is_unicode(name: str) -> bool:
    """Whether UTF-8 can hold a name."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _file_type(mode: int) -> str:
    for test, word in (
        (stat.S_ISDIR, "folder"),
        (stat.S_ISFIFO, "FIFO"),
        (stat.S_ISSOCK, "socket"),
    ):
        if test(mode):
            return word
    return "device"


def plain(name: str) -> str:
    """A name from a file as it can stand in one line of a message."""
    shown = name if name.isprintable() else ascii(name)
    return shown if len(shown) <= 200 else shown[:197] + "..."


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _refuse(path: Path, what: str) -> NoReturn:
    raise UnreadableError(f"{plain(str(path))}: {what}")
