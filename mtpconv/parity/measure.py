"""Running a side over all rows: once as it is, and once more to see its rounding noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from mtpconv.parity.choices import TIE, Choices, Record, Settle, Ties
from mtpconv.parity.compare import Logits
from mtpconv.parity.noise import Reordered
from mtpconv.parity.settings import Settings
from mtpconv.parity.sides import Side
from mtpconv.parity.taps import kept_positions, tapped

#: Opens the same side in float32.
Reopen = Callable[[], AbstractContextManager[Side]]


@dataclass
class Pass:
    """One run over all rows: logits of each, and the hidden states of all, point by point."""

    logits: list[Logits] = field(default_factory=list)
    states: dict[str, Any] = field(default_factory=dict)
    ties: Ties = field(default_factory=Ties)

    def add(self, logits: Logits, states: Mapping[str, Any], ties: Ties | None = None) -> None:
        """Take in one row."""
        import torch

        self.logits.append(logits)
        for name, value in states.items():
            known = self.states.get(name)
            self.states[name] = value if known is None else torch.cat([known, value])
        if ties is not None:
            self.ties.settled += ties.settled
            self.ties.rows += ties.rows


@dataclass(frozen=True)
class Measured:
    """A side's run, and a second one that differs from it only by rounding."""

    run: Pass
    again: Pass | None


@dataclass(frozen=True)
class Bench:
    """What both sides are run on."""

    rows: Sequence[Any]
    settings: Settings
    dtype: str
    noise: bool


def measure_reference(bench: Bench, side: Side, reopen: Reopen) -> tuple[Measured, list[Choices]]:
    """Run the reference and note its choices."""
    run, choices = Pass(), []
    for row, kept in _rows(bench):
        with Record(bench.settings) as record, tapped(side.points, kept) as states:
            logits = side.heads(row)
        run.add(logits, states)
        choices.append(record.choices)
    again = _again(bench, side, choices, reopen) if bench.noise else None
    return Measured(run, again), choices


def measure_follower(
    bench: Bench, side: Side, choices: Sequence[Choices], reopen: Reopen
) -> Measured:
    """Run the other side, its ties settled as the reference chose."""
    run = _follow(bench, side, choices)
    return Measured(run, _again(bench, side, choices, reopen) if bench.noise else None)


def _again(bench: Bench, side: Side, choices: Sequence[Choices], reopen: Reopen) -> Pass:
    if bench.dtype == "float32":
        return _follow(bench, side, choices, reorder=True)
    with reopen() as exact:
        return _follow(bench, exact, choices)


def _follow(bench: Bench, side: Side, choices: Sequence[Choices], *, reorder: bool = False) -> Pass:
    run = Pass()
    for (row, kept), chosen in zip(_rows(bench), choices, strict=True):
        settle = Settle(bench.settings, chosen, TIE[bench.dtype])
        with settle, tapped(side.points, kept) as states, _sums(reorder):
            logits = side.heads(row)
        run.add(logits, states, settle.ties)
    return run


@contextmanager
def _sums(reorder: bool) -> Iterator[None]:
    with Reordered() if reorder else nullcontext():
        yield


def _rows(bench: Bench) -> Iterator[tuple[Any, Any]]:
    for row in bench.rows:
        yield row, kept_positions(len(row), len(bench.rows))
