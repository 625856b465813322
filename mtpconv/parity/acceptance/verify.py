"""Draft and verify: exact by construction, whatever the drafts are worth.

One pass of the trunk over the text and k drafts gives its own choice at each of the k + 1
places. Greedy: drafts are kept while they equal that choice, then the choice itself is added.
Sampling: a draft x with chance q(x) is kept with probability min(1, p(x) / q(x)); the first
one refused is replaced by a draw from max(p - q, 0), normalised. Both leave the text, or its
distribution, exactly as the trunk alone would make it.
Source: Leviathan et al. 2023, arXiv 2211.17192, algorithm 1 and appendix A.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mtpconv.parity.acceptance.drafts import Draft, Drafter, Pick
from mtpconv.parity.acceptance.speakers import Ids, Speaker


@dataclass
class Count:
    """Drafts by their place after the text: how many were made, reached, and kept.

    A draft is reached if all drafts before it were kept.
    """

    made: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    passes: int = 0
    tokens: int = 0

    def add(self, made: int, kept: int) -> None:
        """One pass with so many drafts, of which the first so many were kept."""
        for known in (self.made, self.reached, self.kept):
            known.extend([0] * (made - len(known)))
        for place in range(made):
            self.made[place] += 1
            self.reached[place] += place <= kept
            self.kept[place] += place < kept
        self.passes += 1
        self.tokens += kept + 1

    @property
    def tokens_per_pass(self) -> float:
        """Tokens gained by one pass of the trunk."""
        return self.tokens / self.passes if self.passes else 0.0

    def rate(self, place: int) -> float | None:
        """Share of the drafts at a place that were kept, of those reached; None if none was."""
        if place >= len(self.reached) or not self.reached[place]:
            return None
        return self.kept[place] / self.reached[place]

    def merge(self, other: Count) -> None:
        """Take in the counts of another text."""
        size = max(len(self.made), len(other.made))
        for mine, theirs in (
            (self.made, other.made), (self.reached, other.reached), (self.kept, other.kept),
        ):  # fmt: skip
            mine.extend([0] * (size - len(mine)))
            for place, value in enumerate(theirs):
                mine[place] += value
        self.passes += other.passes
        self.tokens += other.tokens


class Greedy:
    """The most likely token; the first of equals."""

    def pick(self, logits: Any) -> tuple[int, Any]:
        """The choice, and no distribution: it is certain."""
        return int(logits.argmax()), None

    def keep(self, logits: Any, drafts: Sequence[Draft]) -> tuple[int, int]:
        """How many drafts are kept, and the token after them.

        Shape: logits [drafts + 1, vocab].
        """
        choices = logits.argmax(-1).tolist()
        kept = 0
        while kept < len(drafts) and drafts[kept].token == choices[kept]:
            kept += 1
        return kept, choices[kept]


class Sampling:
    """Draws from the softmax at a temperature, seeded."""

    def __init__(self, temperature: float, seed: int) -> None:
        import torch

        self._temperature = temperature
        self._random = torch.Generator().manual_seed(seed)

    def pick(self, logits: Any) -> tuple[int, Any]:
        """A draw, and the distribution it was drawn from."""
        chances = self._chances(logits)
        return self._draw(chances), chances

    def keep(self, logits: Any, drafts: Sequence[Draft]) -> tuple[int, int]:
        """How many drafts are kept, and the token after them.

        Shape: logits [drafts + 1, vocab].
        """
        import torch

        wanted = self._chances(logits)
        for place, draft in enumerate(drafts):
            p = wanted[place]
            q = draft.chances
            if q is None:
                q = torch.zeros_like(p)
                q[draft.token] = 1
            ratio = float(p[draft.token] / q[draft.token])
            if float(torch.rand((), generator=self._random)) < ratio:
                continue
            rest = (p - q).clamp_min(0)
            # Rounding can leave nothing where p equals q; then the draw is from p.
            return place, self._draw(rest if float(rest.sum()) > 0 else p)
        return len(drafts), self._draw(wanted[len(drafts)])

    def _chances(self, logits: Any) -> Any:
        return (logits.double() / self._temperature).softmax(-1)

    def _draw(self, chances: Any) -> int:
        import torch

        return int(torch.multinomial(chances, 1, generator=self._random))


Rule = Greedy | Sampling


def continue_plainly(speaker: Speaker, prompt: Ids, length: int, rule: Rule) -> list[int]:
    """The prompt and `length` more tokens, one pass of the trunk for each."""
    tokens = list(prompt)
    for _ in range(length):
        _, logits = speaker.trunk(tokens, 1)
        tokens.append(rule.pick(logits[0])[0])
    return tokens


def continue_drafting(
    speaker: Speaker, drafter: Drafter, prompt: Ids, length: int, depth: int, rule: Rule
) -> tuple[list[int], Count]:
    """The prompt and `length` more tokens, at most `depth` drafts for each pass."""
    pick: Pick = rule.pick
    tokens, count = list(prompt), Count()
    hidden, logits = speaker.trunk(tokens, 1)
    tokens.append(pick(logits[0])[0])
    goal = len(prompt) + length
    while len(tokens) < goal:
        room = min(depth, goal - len(tokens) - 1)
        drafts = drafter.draft(tokens, hidden, room, pick) if room else []
        tried = [*tokens, *(draft.token for draft in drafts)]
        hidden, logits = speaker.trunk(tried, len(drafts) + 1)
        kept, after = rule.keep(logits, drafts)
        count.add(len(drafts), kept)
        tokens = [*tried[: len(tokens) + kept], after]
        # The states of drafts that were refused go with them.
        hidden = hidden[: len(tokens) - 1]
    return tokens, count
