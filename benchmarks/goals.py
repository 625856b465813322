"""What the figures should be, and whether they are."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cases import Figures
from benchmarks.measure import median

#: Tensors of the model that is measured, copies included.
TENSORS = 30_000
#: Units: MB. 100 MB and 1 KB for each tensor.
MEMORY = 100 + TENSORS / 1000


@dataclass(frozen=True)
class Goal:
    """One line of the table: a figure, and the least or the most it should be."""

    what: str
    figure: str
    limit: float
    at_most: bool = False
    unit: str = ""

    def shown(self) -> str:
        """The limit in words."""
        return f"{'at most' if self.at_most else 'at least'} {self.limit:g}{self.unit}"

    def met(self, values: list[float]) -> bool:
        """Whether the median is on the right side."""
        value = median(values)
        return value <= self.limit if self.at_most else value >= self.limit

    def score(self, value: float) -> float:
        """How far it is: 1 is the limit, more is better."""
        return self.limit / value if self.at_most else value / self.limit


def _both(what: str, figure: str, limit: float, unit: str, suffix: str = "") -> list[Goal]:
    return [
        Goal(f"{way}{suffix}: {what}", figure.format(way), limit, True, unit)
        for way in ("hf2mcore", "mcore2hf")
    ]


GOALS = [
    Goal("hf2mcore --no-verify, speed to cp", "hf2mcore_plain / cp", 0.9),
    Goal("mcore2hf --no-verify, speed to cp", "mcore2hf_plain / cp", 0.9),
    Goal("hf2mcore with verification, speed to cp", "hf2mcore / cp", 0.5),
    Goal("mcore2hf with verification, speed to cp", "mcore2hf / cp", 0.5),
    *_both("CPU", "{}_plain CPU s/GB", 1.0, " s/GB", " --no-verify"),
    *_both("anonymous memory", "{} anonymous MB", MEMORY, " MB"),
    *_both("resident memory", "{} resident MB", 512, " MB"),
    Goal("two jobs to one, hf2mcore --no-verify", "conversion two jobs / one", 1.1),
    Goal("digests of one side, cold, to reading", "audit cold / read", 0.85),
    Goal("digests, warm, one job, to reading", "audit warm / read, one job", 0.35),
    Goal("digests, warm, two jobs, to reading", "audit warm / read, two jobs", 0.6),
    Goal("two jobs to one, digests, warm", "audit two jobs / one", 1.5),
    Goal("audit HF HF, speed to digests of both", "audit bytes / digests of both", 1.2),
    Goal("audit HF torch_dist, speed to HF HF", "audit across / audit HF HF", 0.7),
    *_both("CPU, 44,544 expert chunks", "planning {} once CPU s", 10, " s"),
    *_both("CPU, twice the chunks to once", "planning {} twice / once", 2.3, ""),
    Goal("--help", "start --help ms", 300, True, " ms"),
    Goal("--version", "start --version ms", 300, True, " ms"),
    Goal("audit --help", "start audit --help ms", 300, True, " ms"),
    Goal("--help to import torch", "start --help / import torch", 0.25, True),
    Goal("audit --help to import torch", "start audit --help / import torch", 0.25, True),
    Goal("plan of GLM-5.2", "start plan GLM-5.2 ms", 1500, True, " ms"),
]


def known(figures: Figures) -> list[tuple[Goal, list[float]]]:
    """The goals whose figures were measured."""
    return [(goal, figures[goal.figure]) for goal in GOALS if goal.figure in figures]
