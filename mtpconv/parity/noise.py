"""How much a side differs from itself when its sums are taken in another order.

That is the rounding noise of the model at hand, and the yardstick for the difference between
the two sides: a real fault is far above it, two correct implementations are near it.
"""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Reordered(TorchDispatchMode):
    """Every matrix product sums over its inner axis in a random, seeded order."""

    def __init__(self, seed: int = 0) -> None:
        import torch

        super().__init__()
        self._random = torch.Generator().manual_seed(seed)
        aten = torch.ops.aten
        #: position of the first factor among the arguments
        self._factors = {
            aten.mm.default: 0, aten.bmm.default: 0,
            aten.addmm.default: 1, aten.baddbmm.default: 1,
        }  # fmt: skip

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import torch

        first = self._factors.get(func)
        if first is not None:
            left, right = args[first], args[first + 1]
            order = torch.randperm(left.shape[-1], generator=self._random).to(left.device)
            swapped = (left.index_select(-1, order), right.index_select(-2, order))
            args = (*args[:first], *swapped, *args[first + 2 :])
        return func(*args, **(kwargs or {}))
