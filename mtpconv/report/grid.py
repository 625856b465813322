"""All tensors with their states, small enough for a page: names templated, states run-length.

A name with its first two numbers taken out is a template; tensors of one template, part of
the model and first number form a block; inside a block, the second number (the expert) and the
state are stored as runs. GLM-5.2's 59,585 names take about 2,300 blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from mtpconv.audit.finding import Finding, Report
from mtpconv.audit.names import tail
from mtpconv.report.advice import next_step
from mtpconv.report.escape import plain
from mtpconv.report.groups import group_findings, tensors_of
from mtpconv.report.values import fields, plain_json
from mtpconv.tensors import ROOT, Region

#: Numbers of a name; with more digits a browser would not keep them exactly.
_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9]\d{0,8})(?=\.|$)")
_EVERY_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
#: Units: characters of a name, a message or a value that are shown.
_MAX_TEXT: Final = 1000
#: Units: bytes. Together under the 2 MB that a page may have.
MAX_TENSOR_BYTES: Final = 1_000_000
MAX_FINDING_BYTES: Final = 600_000
#: A table with more cells than this makes a browser slow.
MAX_CELLS: Final = 60_000
_OTHERS: Final = "(other names)"
#: States from harmless to bad; unknown ones stand between.
_HARMLESS: Final = (
    "identical",
    "present",
    "equal",
    "allowed",
    "waived",
    "not_read",
    "not_compared",
)
_BAD: Final = ("extra", "dtype", "shape", "changed", "unreadable", "missing")

#: Pieces of the name, part of the model, first number (-1: none).
Key = tuple[tuple[str, ...], Region, int]


@dataclass(slots=True)
class Grid:
    """What the page draws, and what had to be left out for its size."""

    data: dict[str, Any]
    hidden_tensors: int = 0
    hidden_findings: int = 0


@dataclass(slots=True)
class _Blocks:
    """Tensors by block, in the order in which they are numbered."""

    members: dict[Key, dict[int, str]] = field(default_factory=dict)
    names: dict[Key, dict[int, str]] = field(default_factory=dict)


def fit_grid(report: Report, room: int) -> tuple[Grid, str]:
    """The compact form in at most `room` bytes, and its text."""
    share = 1.0
    while True:
        grid = make_grid(report, share)
        text = encode(grid)
        if len(text) <= room or share < 1e-3:
            return grid, text
        share *= min(0.5, room / len(text))


def make_grid(report: Report, share: float = 1.0) -> Grid:
    """The compact form of a report's tensors and findings; `share` of what there is room for."""
    states, regions = _universe(report)
    order = _order_states(states)
    blocks = _Blocks()
    for name, state in states.items():
        region = regions.get(name, ROOT)
        pieces, numbers = _split(plain(name, _MAX_TEXT))
        key = (pieces, region, numbers[0] if numbers else -1)
        second = numbers[1] if len(numbers) > 1 else 0
        blocks.members.setdefault(key, {})[second] = state
        blocks.names.setdefault(key, {})[second] = name
    kept = _fit(blocks, order, share)
    ids = _number(kept, blocks)
    templates = list(dict.fromkeys(key[0] for key in kept))
    places = list(dict.fromkeys(key[1] for key in kept))
    rows = _rows(kept, len(places))
    labels = list(dict.fromkeys(rows.values()))
    template_of = {template: number for number, template in enumerate(templates)}
    place_of = {place: number for number, place in enumerate(places)}
    label_of = {label: number for number, label in enumerate(labels)}
    state_of = {state: number for number, state in enumerate(order)}
    findings, hidden_findings = _findings(report, ids, share)
    data = {
        "states": [plain(state, 100) for state in order],
        "counts": [sum(state == each for state in states.values()) for each in order],
        "regions": [[plain(place.kind, 100), place.index] for place in places],
        "rows": labels,
        "templates": [list(template) for template in templates],
        "blocks": [
            [
                template_of[key[0]],
                place_of[key[1]],
                key[2],
                label_of[rows[key[0], key[1]]],
                _runs(blocks.members[key], state_of),
            ]
            for key in kept
        ],
        "findings": findings,
    }
    return Grid(data, len(states) - len(ids), hidden_findings)


def encode(grid: Grid) -> str:
    """The data as JSON that can stand inside a script element."""
    text = json.dumps(grid.data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    # No `<` at all, so no `</script>` and no `<!--`.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _universe(report: Report) -> tuple[dict[str, str], dict[str, Region]]:
    """States and regions; a tensor that is there but has a fault is in the state of its fault."""
    states = dict(report.states)
    regions = dict(report.regions)
    for one in report.findings:
        faulty = one.waived is None and (
            one.severity == "error" or (one.severity == "warning" and one.code.startswith("V"))
        )
        for name in tensors_of(one):
            state = states.get(name)
            if state is None or (faulty and state in _HARMLESS):
                states[name] = one.kind
                if one.region is not None:
                    regions.setdefault(name, one.region)
    return states, regions


def _order_states(states: Mapping[str, str]) -> list[str]:
    def rank(state: str) -> tuple[int, int, str]:
        if state in _HARMLESS:
            return 0, _HARMLESS.index(state), state
        return (2, _BAD.index(state), state) if state in _BAD else (1, 0, state)

    return sorted(set(states.values()), key=rank)


def _split(name: str) -> tuple[tuple[str, ...], list[int]]:
    """The pieces around the first two numbers of a name, and the numbers."""
    numbers = list(_NUMBER.finditer(name))[:2]
    pieces = []
    start = 0
    for number in numbers:
        pieces.append(name[start : number.start()])
        start = number.end()
    return (*pieces, name[start:]), [int(number[0]) for number in numbers]


def _runs(members: Mapping[int, str], state_of: Mapping[str, int]) -> list[int]:
    """Flat triples: first number, how many, state."""
    flat: list[int] = []
    for number in sorted(members):
        state = state_of[members[number]]
        if flat and flat[-3] + flat[-2] == number and flat[-1] == state:
            flat[-2] += 1
        else:
            flat += (number, 1, state)
    return flat


def _cost(value: object) -> int:
    """Bytes of a value inside the page."""
    text = json.dumps(value)
    return len(text) + 5 * (text.count("<") + text.count(">") + text.count("&"))


def _fit(blocks: _Blocks, order: Sequence[str], share: float) -> list[Key]:
    """The blocks that fit into the page, the worst first if not all do; in model order."""
    position = {state: number for number, state in enumerate(order)}
    seen: set[tuple[str, ...]] = set()
    places: set[Region] = set()
    sizes: dict[Key, int] = {}
    names: dict[tuple[str, ...], int] = {}
    for key, members in blocks.members.items():
        runs = len(_runs(members, position)) // 3
        if key[0] not in names:  # once as template and once as row label
            names[key[0]] = 2 * _cost(key[0]) + 20
        sizes[key] = 20 + 12 * runs + (0 if key[0] in seen else names[key[0]])
        sizes[key] += 0 if key[1] in places else 24
        seen.add(key[0])
        places.add(key[1])
    keys = list(sizes)
    room = int(MAX_TENSOR_BYTES * share)
    if sum(sizes.values()) > room:
        worst = {k: max(position[s] for s in m.values()) for k, m in blocks.members.items()}
        fitting = []
        for key in sorted(keys, key=lambda k: -worst[k]):
            room -= max(sizes[key], names[key[0]] + 32)
            if room < 0:
                break
            fitting.append(key)
        keys = fitting
    return sorted(keys, key=lambda key: (_place(key[1]), key[0], key[2]))


def _place(region: Region) -> tuple[int, str, int]:
    order = {"root": 0, "trunk": 1, "mtp": 2}
    return order.get(region.kind, 3), region.kind, region.index


def _number(kept: Sequence[Key], blocks: _Blocks) -> dict[str, int]:
    """A number for each tensor in the order in which the page counts them."""
    ids: dict[str, int] = {}
    for key in kept:
        for second in sorted(blocks.names[key]):
            ids[blocks.names[key][second]] = len(ids)
    return ids


def _rows(kept: Sequence[Key], columns: int) -> dict[tuple[tuple[str, ...], Region], str]:
    """Row label of each template in each part: what is left without layer and expert numbers."""
    rows = {}
    kinds: dict[str, set[str]] = {}
    for pieces, region, first in kept:
        name = pieces[0] + "".join(f"{first if n == 0 else 0}{p}" for n, p in enumerate(pieces[1:]))
        label = _EVERY_NUMBER.sub("*", tail(name))
        for block in ("transformer_layer.", "mtp_model_layer."):
            label = label.removeprefix(block)
        rows[pieces, region] = label
        kinds.setdefault(label, set()).add(region.kind)
    # What only MTP has (the glue) on top; the rest by name.
    labels = sorted(kinds, key=lambda label: (kinds[label] != {"mtp"}, label))
    most = max(MAX_CELLS // max(columns, 1), 8)
    cut = set(labels[most:])
    named = {at: _OTHERS if label in cut else label for at, label in rows.items()}
    rank = {label: number for number, label in enumerate(labels)}
    return dict(sorted(named.items(), key=lambda entry: rank.get(entry[1], len(rank))))


def _findings(
    report: Report, ids: Mapping[str, int], share: float
) -> tuple[list[dict[str, Any]], int]:
    """Findings that say the same of several tensors as one, with the numbers of the tensors."""
    said: dict[str, tuple[dict[str, Any], list[int]]] = {}
    left = int(MAX_FINDING_BYTES * share)
    hidden = 0
    for group in group_findings(report.findings):
        for one in group.findings:
            what = _finding(one, group.label)
            key = json.dumps(what)
            numbers = [ids[name] for name in tensors_of(one) if name in ids]
            cost = 14 * len(numbers) + (0 if key in said else _cost(what) + 20)
            left -= cost
            if left < 0:
                hidden += 1
                left += cost
                continue
            said.setdefault(key, (what, []))[1].extend(numbers)
    return [{**what, "ids": _id_runs(numbers)} for what, numbers in said.values()], hidden


def _finding(one: Finding, label: str) -> dict[str, Any]:
    message = plain(one.message, _MAX_TEXT)
    if one.tensor is not None and len(one.tensor) > 1:
        # The page knows the name; without it, findings of many tensors are one.
        message = message.removeprefix(f"{plain(one.tensor, _MAX_TEXT)}: ")

    def short(value: Any) -> str | None:
        if value is None:
            return None
        shown = value if isinstance(value, str) else json.dumps(plain_json(value))
        return plain(shown, _MAX_TEXT)

    step = None if one.waived is not None else next_step(one.kind)
    return {
        "rule": plain(f"{one.code} {one.kind}", 200),
        "label": label,
        "message": message,
        **fields(
            file=short(one.file),
            field=short(one.field),
            before=short(one.before),
            after=short(one.after),
            hint=short(one.hint),
            do=step,
            waived=short(one.waived),
        ),
    }


def _id_runs(numbers: Sequence[int]) -> list[int]:
    """Flat pairs: first number, how many."""
    flat: list[int] = []
    for number in sorted(set(numbers)):
        if flat and flat[-2] + flat[-1] == number:
            flat[-1] += 1
        else:
            flat += (number, 1)
    return flat
