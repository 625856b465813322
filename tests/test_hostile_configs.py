"""Any number in a config.json: refused, or converted and audited; never a crash or a hang."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.sides import open_sides
from mtpconv.convert import hf2mcore, mcore2hf
from mtpconv.errors import MtpconvError
from tests.families import CONVERTED, distinct, fewest_layers, small

#: Nothing, a number that divides nothing, and more than there is of anything.
VALUES = (0, 7, 10**9)
#: One with delta nets, whose ops repeat by config, and one with what Megatron cannot be told.
FAST = ("qwen3_next", "minimax_m2")


def numbers(config: Mapping[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where a config holds whole numbers."""
    for key, value in config.items():
        if type(value) is int:
            yield (*at, key)
        elif isinstance(value, dict) and key == "text_config":
            yield from numbers(value, (*at, key))


def changed(config: Mapping[str, Any], at: tuple[str, ...], value: int) -> str:
    """The config as text, with another number in one place."""
    found = inner = copy.deepcopy(dict(config))
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return json.dumps(found)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "family",
    [f if f in FAST else pytest.param(f, marks=pytest.mark.slow) for f in CONVERTED],
)
def test_any_number_is_refused_or_read(tmp_path: Path, family: str) -> None:
    hf, mcore = tmp_path / "hf", tmp_path / "mcore"
    fewest_layers(small(distinct(family)[0])).write(hf)
    hf2mcore(hf, mcore)
    config = json.loads((hf / "config.json").read_text())

    def across(before: Path | None, after: Path) -> None:
        sides = open_sides(before, after)
        audit(sides.before, sides.after)

    tries: list[Callable[[], object]] = [
        lambda: hf2mcore(hf, tmp_path / "out", dry_run=True),
        lambda: mcore2hf(mcore, tmp_path / "out", like=hf, dry_run=True),
        lambda: across(hf, mcore),
        lambda: across(mcore, hf),
        lambda: across(None, hf),
    ]
    places = list(numbers(config))
    assert len(places) > 8
    for at in places:
        for value in VALUES:
            (hf / "config.json").write_text(changed(config, at, value))
            for attempt in tries:
                with suppress(MtpconvError):
                    attempt()
