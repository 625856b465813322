"""JSON files beside the weights: read with a size limit, duplicate keys noticed."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpconv.errors import UnreadableError

#: Units: bytes. GLM-5.2's index is 5 MB, the largest config.json seen is under 1 MB.
MAX_JSON_BYTES = 100_000_000
_MAX_NESTING = 100


@dataclass(frozen=True, slots=True)
class JsonText:
    """A JSON document."""

    value: Any
    #: keys that stand twice in one object; the last one counts, as for every common parser
    duplicate_keys: tuple[str, ...]


def read_json(
    path: Path, limit: int = MAX_JSON_BYTES, each: Callable[[dict[str, Any]], Any] | None = None
) -> JsonText:
    """Reads and parses a JSON file; never blocks on something that is no regular file.

    `each`: as `parse_json`.

    Raises: UnreadableError if it is not there, too large, not UTF-8 or not JSON.
    """
    return parse_json(read_small(path, limit), path, each)


def read_small(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """The bytes of a JSON file, whatever they are. Raises: UnreadableError as `read_json`."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableError(f"{path}: is not a regular file")
        if status.st_size > limit:
            raise UnreadableError(f"{path}: {status.st_size} bytes is too large for a JSON file")
        with path.open("rb") as file:
            # A larger count would take address space that nobody needs.
            return file.read(status.st_size)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UnreadableError(f"{path}: cannot be read: {why}") from error


def parse_json(
    text: bytes, path: Path, each: Callable[[dict[str, Any]], Any] | None = None
) -> JsonText:
    """Parses JSON bytes; `path` is for messages.

    What `each` makes of an object stands in its place, from the inside out: rows of a long list
    need not all be in memory.

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
        return out if each is None else each(out)

    brackets = text.count(b"{") + text.count(b"[")
    try:
        document = text.decode("utf-8-sig")
        del text  # several MB that nobody else holds
        value = json.loads(document, object_pairs_hook=collect)
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{path}: is not UTF-8; download it again") from error
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{path}: is not JSON: {str(error)[:120]}") from error
    if brackets > _MAX_NESTING and _is_deep(value):
        raise UnreadableError(f"{path}: nests deeper than {_MAX_NESTING} levels")
    return JsonText(value, tuple(dict.fromkeys(doubled)))


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
