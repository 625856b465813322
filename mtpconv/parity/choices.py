"""Top-k choices of routers and indexers: recorded on one side, ties settled alike on the other.

Two correct implementations round differently, so where two experts (or two keys) score the
same to within rounding they may choose differently, and one flipped choice moves the logits of
that position, and of later ones that attend to it, far more than rounding does. A choice that
differs is therefore checked: if everything that only one of the two chose scores within
`tolerance` of what this side chose last, it is a tie and the reference's choice is taken; else
the side keeps its own choice and the difference shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.overrides import TorchFunctionMode

from mtpconv.parity.settings import Settings

#: How near two scores must be, relative to the largest in their row, to count as a tie.
#: fp32: a hundred times the rounding of a dot product of a few thousand terms; bf16: the
#: rounding of its 8-bit mantissa, a few times over.
TIE: dict[str, float] = {"float32": 1e-5, "bfloat16": 3e-2}


@dataclass
class Choices:
    """What one run chose, call by call, for each kind of choice."""

    calls: dict[str, list[Any]] = field(
        default_factory=lambda: {"router": [], "groups": [], "indexer": []}
    )


@dataclass
class Ties:
    """How many choices of a run were settled: rows with a tie, out of rows seen."""

    settled: int = 0
    rows: int = 0


class _TopkMode(TorchFunctionMode):
    """Sees every `topk` of a forward pass; subclasses decide what to do with the known ones."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._experts = settings.transformer.get("num_moe_experts")
        self._chosen = settings.transformer.get("moe_router_topk")
        self._groups = settings.transformer.get("moe_router_num_groups")
        self._groups_chosen = settings.transformer.get("moe_router_group_topk")
        self._keys = settings.transformer.get("dsa_indexer_topk")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "topk":
            return result
        scores = args[0]
        kind = self._kind(scores, result.indices.shape[-1])
        return result if kind is None else self.seen(kind, scores, result)

    def _kind(self, scores: Any, k: int) -> str | None:
        if scores.ndim == 2 and scores.shape[1] == self._experts and k == self._chosen:
            return "router"
        if scores.ndim == 2 and scores.shape[1] == self._groups and k == self._groups_chosen:
            return "groups"
        if self._keys and scores.ndim == 3 and k == min(self._keys, scores.shape[2]):
            # [rows, groups, experts of a group] has three axes too, but is not square.
            return "indexer" if scores.shape[1] == scores.shape[2] else None
        return None

    def seen(self, kind: str, scores: Any, result: Any) -> Any:
        """What the forward pass gets for this choice."""
        raise NotImplementedError


class Record(_TopkMode):
    """Notes every choice of a run."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.choices = Choices()

    def seen(self, kind: str, _scores: Any, result: Any) -> Any:
        """Note the choice and leave it alone."""
        self.choices.calls[kind].append(
            result.indices.reshape(-1, result.indices.shape[-1]).clone()
        )
        return result


class Settle(_TopkMode):
    """Follows the choices of another run wherever they are ties."""

    def __init__(self, settings: Settings, reference: Choices, tolerance: float) -> None:
        super().__init__(settings)
        self._reference = reference
        self._tolerance = tolerance
        self._at = dict.fromkeys(reference.calls, 0)
        self.ties = Ties()

    def seen(self, kind: str, scores: Any, result: Any) -> Any:
        """The reference's choice in tied rows, the side's own elsewhere."""
        import torch

        at = self._at[kind]
        self._at[kind] += 1
        if at >= len(self._reference.calls[kind]):
            return result
        wanted = self._reference.calls[kind][at].to(scores.device, torch.int64)
        flat = scores.reshape(-1, scores.shape[-1]).float()
        own = result.indices.reshape(-1, result.indices.shape[-1])
        if wanted.shape[1] != own.shape[1]:
            return result
        # The Megatron side has rows of made-up tokens at the end that the reference lacks.
        rows = min(len(wanted), len(own))
        wanted, mine, flat = wanted[:rows], own[:rows], flat[:rows]
        ours = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, mine, True)
        theirs = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, wanted, True)
        last = flat.gather(1, mine).amin(1, keepdim=True)
        finite = flat.isfinite()
        size = flat.masked_fill(~finite, 0).abs().amax(1, keepdim=True)
        # Whatever only one of the two chose must score like what this side chose last.
        off = (flat - last).abs() > self._tolerance * size
        differ = ours ^ theirs
        settle = differ.any(1) & ~(differ & off & finite).any(1)
        self.ties.rows += rows
        self.ties.settled += int((settle & last.isfinite()[:, 0]).sum())
        if not settle.any():
            return result
        indices = own.clone()
        indices[:rows] = torch.where(settle[:, None], wanted, mine)
        indices = indices.reshape(result.indices.shape)
        return type(result)((scores.gather(-1, indices), indices))
