"""JSON files beside the weights: read with a size limit, duplicate keys noticed."""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpconv.errors import UnreadableError

#: Units: bytes. GLM-5.2's index is 5 MB, the largest config.json seen is under 1 MB.
MAX_JSON_BYTES = 100_000_000
_MAX_NESTING = 100


@dataclass(frozen=True, slots=True)
class JsonText:
    """A JSON document with its exact bytes."""

    text: bytes
    value: Any
    #: keys that stand twice in one object; the last one counts, as for every common parser
    duplicate_keys: tuple[str, ...]


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> JsonText:
    """Reads and parses a JSON file; never blocks on something that is no regular file.

    Raises: UnreadableError if it is not there, too large, not UTF-8 or not JSON.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableError(f"{path}: is not a regular file")
        if status.st_size > limit:
            raise UnreadableError(f"{path}: {status.st_size} bytes is too large for a JSON file")
        with path.open("rb") as file:
            text = file.read(limit)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UnreadableError(f"{path}: cannot be read: {why}") from error
    return parse_json(text, path)


def parse_json(text: bytes, path: Path) -> JsonText:
    """Parses JSON bytes; `path` is for messages.

    Raises: UnreadableError if they are not UTF-8 or not JSON.
    """
    doubled: list[str] = []

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    doubled.append(key)
                seen.add(key)
        return out

    try:
        value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=collect)
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{path}: is not UTF-8; download it again") from error
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{path}: is not JSON: {str(error)[:120]}") from error
    if text.count(b"{") + text.count(b"[") > _MAX_NESTING and _is_deep(value):
        raise UnreadableError(f"{path}: nests deeper than {_MAX_NESTING} levels")
    return JsonText(text, value, tuple(dict.fromkeys(doubled)))


def _is_deep(value: Any) -> bool:
    """Whether comparing or printing the value could exhaust the stack."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(_MAX_NESTING):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True
