"""On which line of a JSON file a key stands, so that a report can point at it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from mtpconv.errors import UnreadableError
from mtpconv.store.json_text import parse_json, read_small

#: Keys deeper than this are not looked for: no config field that is compared lies so deep.
_MAX_DEPTH: Final = 8
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"|[{}\[\]:,\n]', re.DOTALL)

Lines = Mapping[str, int]


def read_lines(path: Path) -> Lines:
    """Line (from 1) of the first key of each path, `text_config.hidden_size`; empty if unreadable.

    A report is about a checkpoint that may be broken, so a file that cannot be read is no error.
    """
    try:
        text = read_small(path)
        parse_json(text, path)
    except UnreadableError:
        return {}
    return find_lines(text.decode("utf-8-sig"))


def find_lines(text: str) -> dict[str, int]:
    """Lines of all keys of a valid JSON document."""
    found: dict[str, int] = {}
    # One entry for each open bracket: the path of its keys, or None inside a list.
    open_paths: list[str | None] = []
    line = 1
    last = ""
    name: str | None = None
    for token in _TOKEN.finditer(text):
        what = token[0]
        if what == "\n":
            line += 1
        elif what == ":" and last:
            name = _key(open_paths, last)
            if name is not None:
                found.setdefault(name, line)
            last = ""
        elif what in ("{", "["):
            open_paths.append(_inside(open_paths, name) if what == "{" else None)
            name = None
        elif what in ("}", "]"):
            del open_paths[-1:]
            name = None
        elif what == ",":
            name = None
        elif what.startswith('"'):
            last = what
    return found


def _inside(open_paths: list[str | None], name: str | None) -> str | None:
    if not open_paths:
        return ""
    return None if name is None or len(open_paths) >= _MAX_DEPTH else f"{name}."


def _key(open_paths: list[str | None], token: str) -> str | None:
    inside = open_paths[-1] if open_paths else None
    if inside is None:
        return None
    return inside + (json.loads(token) if "\\" in token else token[1:-1])
