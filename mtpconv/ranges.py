"""Long lists of names in one line: `model.layers.78.mlp.experts.{0..255}.gate_proj.weight`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"(?<=\.)[0-9]{1,9}(?=\.|$)")


def compress_names(names: Iterable[str]) -> list[str]:
    """Names with runs of numbers written as ranges, in order of first appearance.

    Names that differ in one number are joined; then names that differ in another one, so a
    whole block of experts over layers becomes one line. Law: expanding gives the same set.
    """
    lines = list(dict.fromkeys(names))
    # Innermost numbers (experts) first, then the outer ones (layers).
    for position in (2, 1, 0):
        lines = _join(lines, position)
    return lines


def _join(lines: Sequence[str], position: int) -> list[str]:
    groups: dict[tuple[str, str], list[int]] = {}
    order: list[tuple[str, str] | str] = []
    for line in lines:
        numbers = list(_NUMBER.finditer(line))
        if position >= len(numbers):
            order.append(line)
            continue
        at = numbers[position]
        key = (line[: at.start()], line[at.end() :])
        if key not in groups:
            groups[key] = []
            order.append(key)
        groups[key].append(int(at[0]))
    found = []
    for entry in order:
        if isinstance(entry, str):
            found.append(entry)
        else:
            found.append(f"{entry[0]}{_numbers(sorted(groups[entry]))}{entry[1]}")
    return found


def _numbers(values: Sequence[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return "{" + ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs) + "}"


def compress(names: Iterable[str], limit: int) -> str:
    """The first `limit` compressed names in one line, and how many lines more there are."""
    lines = compress_names(names)
    text = ", ".join(lines[:limit])
    if len(lines) > limit:
        text += f" and {len(lines) - limit} more groups"
    return text
