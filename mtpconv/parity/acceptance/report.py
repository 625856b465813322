"""What an acceptance run says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mtpconv.parity.acceptance.cost import Cost
from mtpconv.parity.acceptance.verify import Count


@dataclass(frozen=True)
class AcceptanceOptions:
    """What to run, and what must be reached.

    `depth` is the number of drafts for each pass; None takes as many as there are MTP depths.
    `draft` is `mtp`, `ngram` or an HF folder. `temperature` 0 is greedy. `draft_cost` is the
    cost of one draft relative to a pass, where it is not to be measured. `like` gives config
    and tokenizer of a torch_dist folder that has no `hf_source`.
    """

    prompts: Path | None = None
    depth: int | None = None
    tokens: int = 48
    rows: int = 4
    prompt_tokens: int = 16
    seed: int = 0
    temperature: float = 0.0
    draft: str = "mtp"
    draft_cost: float | None = None
    min_acceptance: float | None = None
    against: Path | None = None
    margin: float = 0.02
    device: str = "auto"
    dtype: str | None = None
    like: Path | None = None
    cost: bool = True


@dataclass(frozen=True)
class Divergence:
    """Where drafting gave another token than plain greedy decoding, and how near a tie it was."""

    prompt: int
    position: int
    plain: int
    drafted: int
    #: distance of the two best logits of the trunk there
    gap: float


@dataclass(frozen=True)
class Measurement:
    """What drafting gave on one checkpoint."""

    checkpoint: str
    kind: str
    model_type: str
    draft: str
    depth: int
    count: Count
    #: None when sampling: there is nothing to be equal to
    divergence: Divergence | None
    sample: str | None

    @property
    def acceptance(self) -> float | None:
        """Share of first drafts that were kept; None if there were none."""
        return self.count.rate(0)


@dataclass(frozen=True)
class AcceptanceReport:
    """The outcome of one run."""

    verdict: Literal["pass", "fail"]
    measured: Measurement
    against: Measurement | None
    prompts: str
    tokens: int
    temperature: float
    cost: Cost | None
    draft_cost: float | None
    speedup: float | None
    reasons: Sequence[str]
    notes: Sequence[str]
    seconds: float

    @property
    def exit_code(self) -> int:
        """0 if every demand was met, 1 otherwise."""
        return 0 if self.verdict == "pass" else 1
