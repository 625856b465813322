"""What a parity run says: a pure value, rendered elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mtpconv.parity.compare import HeadResult
from mtpconv.parity.explain import Fault
from mtpconv.parity.taps import PointResult

Verdict = Literal["pass", "fail"]


@dataclass(frozen=True)
class ParityOptions:
    """What to run and how strictly to compare.

    `dtype` None is float32 on the CPU and bfloat16 on CUDA. `noise` None measures it unless
    `stream` is set, where a measurement reads both checkpoints a second time. `max_abs` and
    `mean_abs` replace the limits from noise. `te` None takes Transformer Engine on CUDA where
    it is installed. `overrides` are megatron-core settings that differ from the config's.
    """

    device: str = "auto"
    dtype: str | None = None
    prompts: Path | None = None
    length: int | None = None
    rows: int = 1
    seed: int = 0
    max_abs: float | None = None
    mean_abs: float | None = None
    stream: bool = False
    noise: bool | None = None
    te: bool | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory:
    """Weights held at once by a streamed run, and the largest unit it had to hold.

    Units: bytes.
    """

    reference_peak: int
    reference_largest: int
    megatron_peak: int
    megatron_largest: int
    process_peak: int


@dataclass(frozen=True)
class ParityReport:
    """The outcome of one parity run."""

    verdict: Verdict
    hf: str
    mcore: str
    model_type: str
    device: str
    dtype: str
    versions: Mapping[str, str]
    #: what computed the MTP depths on the HF side, and whose modules the Megatron side
    reference: str
    modules: str
    tokens: str
    heads: Sequence[HeadResult]
    points: Sequence[PointResult]
    ties: int
    choices: int
    fault: Fault | None
    notes: Sequence[str]
    memory: Memory | None
    seconds: float

    @property
    def exit_code(self) -> int:
        """0 if every head passed, 1 otherwise; what could not be run raises instead."""
        return 0 if self.verdict == "pass" else 1
