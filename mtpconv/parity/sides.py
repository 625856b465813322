"""The two sides behind one face: logits of a row, points to look at, weights in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mtpconv.parity import hf, mcore, mcore_forward, mcore_paging
from mtpconv.parity.compare import Logits
from mtpconv.parity.paging import Pager, Unit
from mtpconv.parity.settings import Settings
from mtpconv.parity.taps import Point, hf_points, mcore_points


class Side(Protocol):
    """A model that can be run."""

    @property
    def points(self) -> list[Point]:
        """Where hidden states can be seen."""

    @property
    def pager(self) -> Pager | None:
        """What holds the weights of a streamed side, None for a whole one."""

    def heads(self, row: Any) -> Logits:
        """Logits of every head for one row of tokens."""


@dataclass(frozen=True)
class HfSide:
    """The HuggingFace side."""

    model: hf.HfModel
    pager: Pager | None = None

    @property
    def points(self) -> list[Point]:
        """Where hidden states can be seen."""
        return hf_points(self.model)

    def heads(self, row: Any) -> Logits:
        """Logits of every head for one row of tokens."""
        with _active(self.pager):
            return hf.heads(self.model, row)


@dataclass(frozen=True)
class McoreSide:
    """The Megatron side."""

    model: mcore.McoreModel
    #: rows of the stored embedding, padding included
    stored_rows: int
    pager: Pager | None = None
    units: dict[str, Unit] | None = None

    @property
    def points(self) -> list[Point]:
        """Where hidden states can be seen."""
        return mcore_points(self.model)

    def heads(self, row: Any) -> Logits:
        """Logits of every head for one row of tokens."""
        with _active(self.pager):
            return mcore_forward.heads(self.model, row)

    @contextmanager
    def tensors(self, block: str) -> Iterator[dict[str, Any]]:
        """Weights of at least one block, by the names of `mcore.module_tensors`.

        `block` is that of a point: trunk, layer N, depth N.
        """
        if self.pager is None or self.units is None:
            yield mcore.module_tensors(self.model)
            return
        found: dict[str, Any] = {}
        for name, unit in self.units.items():
            if mcore_paging.in_block(name, block):
                with self.pager.loaded(unit):
                    found |= mcore.module_tensors(self.model, only_loaded=True)
        yield found


def _active(pager: Pager | None) -> AbstractContextManager[None]:
    return nullcontext() if pager is None else pager.active()


@contextmanager
def open_hf_side(folder: Path, dtype: str, device: str, stream: bool) -> Iterator[HfSide]:
    """The HuggingFace side, whole or streamed; its memory goes when the body ends."""
    if not stream:
        model = hf.load_hf(folder, dtype, device)
        try:
            yield HfSide(model)
        finally:
            model.close()
        return
    model = hf.empty_hf(folder, dtype, device)
    units = [
        Unit(module, hf.loader(model, module, prefix, device))
        for module, prefix in [*hf.trunk_units(model), *hf.depth_units(model)]
    ]
    try:
        yield HfSide(model, Pager(units))
    finally:
        model.close()


@contextmanager
def open_mcore_side(
    settings: Settings, folder: Path, dtype: str, te: bool | None, stream: bool
) -> Iterator[McoreSide]:
    """The Megatron side, whole or streamed, inside an open session."""
    stored = mcore.open_stored(folder)
    rows = stored.tensors["embedding.word_embeddings.weight"].shape[0]
    if not stream:
        model = mcore.build(settings, dtype, te)
        mcore.load(model, stored)
        yield McoreSide(model, rows)
        return
    model = mcore.build(settings, dtype, te, empty=True)
    units = mcore_paging.units(model, stored)
    yield McoreSide(model, rows, Pager(list(units.values())), units)
