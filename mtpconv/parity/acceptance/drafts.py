"""Where drafts come from: the checkpoint's MTP, the context, or another model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from mtpconv.parity.acceptance.speakers import Ids, Speaker

#: Turns logits [vocab] into a token and the distribution it was drawn from (None: no draw).
Pick = Callable[[Any], tuple[int, Any]]


@dataclass(frozen=True)
class Draft:
    """A token that is proposed, and the distribution it was drawn from.

    None stands for certainty: the source would always propose this token here.
    """

    token: int
    chances: Any = None


class Drafter(Protocol):
    """A source of drafts."""

    @property
    def name(self) -> str:
        """What the report calls it."""

    def draft(self, tokens: Ids, hidden: Any, count: int, pick: Pick) -> list[Draft]:
        """At most `count` tokens that might follow.

        `hidden` are the trunk's states of all tokens but the last, after the final norm.
        """


@dataclass(frozen=True)
class MtpDrafter:
    """The checkpoint's own MTP; beyond its depths the last one runs on its own output.

    Depth d stands at position i on the state of depth d - 1 there and the token i + 1 + d.
    Serving engines that draft more tokens than there are depths let the last depth go on: its
    own last state and draft become one more position of its context.
    """

    speaker: Speaker

    @property
    def name(self) -> str:
        """What the report calls it."""
        return "mtp"

    def draft(self, tokens: Ids, hidden: Any, count: int, pick: Pick) -> list[Draft]:
        """Tokens that the MTP depths predict."""
        import torch

        drafts: list[Draft] = []
        following = list(tokens[1:])
        out = hidden
        for step in range(count):
            number = min(step, self.speaker.depths - 1)
            if step >= self.speaker.depths:
                hidden = torch.cat([hidden, out[-1:]])
                following = [*following, drafts[-1].token]
            elif step:
                hidden = out
                following = [*following[1:], drafts[-1].token]
            out, logits = self.speaker.depth(number, hidden, following)
            drafts.append(Draft(*pick(logits)))
        return drafts


@dataclass(frozen=True)
class NgramDrafter:
    """What followed the last words the last time they stood in the context."""

    longest: int = 3

    @property
    def name(self) -> str:
        """What the report calls it."""
        return "ngram"

    def draft(self, tokens: Ids, _hidden: Any, count: int, _pick: Pick) -> list[Draft]:
        """The continuation of the latest match of the longest suffix; nothing without one."""
        row = list(tokens)
        for size in range(min(self.longest, len(row) - 1), 0, -1):
            suffix = row[-size:]
            for start in range(len(row) - size - 1, -1, -1):
                if row[start : start + size] == suffix:
                    found = row[start + size : start + size + count]
                    return [Draft(token) for token in found]
        return []


@dataclass(frozen=True)
class ModelDrafter:
    """A separate model with the same tokenizer."""

    speaker: Speaker
    label: str

    @property
    def name(self) -> str:
        """What the report calls it."""
        return self.label

    def draft(self, tokens: Ids, _hidden: Any, count: int, pick: Pick) -> list[Draft]:
        """Tokens that the other model would say."""
        row, drafts = list(tokens), list[Draft]()
        for _ in range(count):
            _, logits = self.speaker.trunk(row, 1)
            drafts.append(Draft(*pick(logits[0])))
            row.append(drafts[-1].token)
        return drafts
