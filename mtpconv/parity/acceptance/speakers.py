"""A checkpoint as something that continues text: its trunk, and its MTP depths one by one.

Every call runs the whole row again: no cache, nothing shared between passes, so that what is
measured is the model and not a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mtpconv.parity import hf, mcore_forward
from mtpconv.parity.mcore import McoreModel

Ids = Sequence[int]


class Speaker(Protocol):
    """What draft and verify need of a model."""

    @property
    def depths(self) -> int:
        """Number of MTP depths."""

    def trunk(self, tokens: Ids, last: int) -> tuple[Any, Any]:
        """Hidden states after the final norm, and logits of the last positions.

        Shape: hidden [s, h]; logits [last, vocab], float32 on the CPU.
        """

    def depth(self, number: int, hidden: Any, following: Ids) -> tuple[Any, Any]:
        """Hidden states of an MTP depth after its final norm, and logits of the last position.

        Shape: hidden [n, h] with n tokens that follow; result [n, h] and [vocab].
        """


@dataclass(frozen=True)
class HfSpeaker:
    """An HF folder, run by transformers."""

    model: hf.HfModel

    @property
    def depths(self) -> int:
        """Number of MTP depths."""
        return len(self.model.depths)

    def trunk(self, tokens: Ids, last: int) -> tuple[Any, Any]:
        """Hidden states, and logits of the last positions."""
        import torch

        with torch.no_grad(), hf.quiet():
            row = _row(tokens, self._device)
            hidden = self.model.decoder(row, use_cache=False).last_hidden_state
            return hidden[0], self.model.trunk.lm_head(hidden[0, -last:]).float().cpu()

    def depth(self, number: int, hidden: Any, following: Ids) -> tuple[Any, Any]:
        """Hidden states of a depth, and logits of the last position."""
        import torch

        with torch.no_grad(), hf.quiet():
            row = _row(following, self._device)
            out = hf.depth_hidden(self.model, number, hidden[None], row)[0]
            return out, self.model.trunk.lm_head(out[-1]).float().cpu()

    @property
    def _device(self) -> Any:
        return self.model.trunk.get_input_embeddings().weight.device


@dataclass(frozen=True)
class McoreSpeaker:
    """A torch_dist folder, run by megatron-core inside an open session."""

    model: McoreModel

    @property
    def depths(self) -> int:
        """Number of MTP depths."""
        return self.model.depths

    def trunk(self, tokens: Ids, last: int) -> tuple[Any, Any]:
        """Hidden states, and logits of the last positions."""
        hidden = mcore_forward.trunk_hidden(self.model, _row(tokens, None)[0])
        return hidden, mcore_forward.logits(self.model, hidden[-last:])

    def depth(self, number: int, hidden: Any, following: Ids) -> tuple[Any, Any]:
        """Hidden states of a depth, and logits of the last position."""
        row = _row(following, None)[0]
        out = mcore_forward.depth_hidden(self.model, number, hidden, row)
        return out, mcore_forward.logits(self.model, out[-1:])[0]


def _row(tokens: Ids, device: Any) -> Any:
    import torch

    return torch.tensor(list(tokens), device=device)[None]
