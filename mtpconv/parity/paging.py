"""One layer in memory at a time: modules that fetch their weights when they are called.

The model lies on the meta device, without weights. Hooks load a unit (a layer, a norm, the
embedding) before it runs and drop it after, so the forward pass is the model's own code and
gives what the whole model gives, while no more than one unit is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

#: Gives the state dict of a unit, on the device it will run on.
Load = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Unit:
    """A module that is called as one, and where its weights come from.

    `owner` is the module that holds the weights where that is another one: a tied LM head gets
    the embedding's weight as the argument `weight`.
    """

    module: Any
    load: Load
    owner: Any = None


class Pager:
    """Counts what is held; entered, it makes the units of a model fetch their weights.

    Units: bytes.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._held = 0
        self.peak = 0
        self.largest = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Load and drop units as they run."""
        with ExitStack() as stack:
            for unit in self._units:
                before = unit.module.register_forward_pre_hook(
                    self._before(unit), prepend=True, with_kwargs=True
                )
                after = unit.module.register_forward_hook(self._after(unit), always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    @contextmanager
    def loaded(self, unit: Unit) -> Iterator[None]:
        """Hold one unit while the body runs."""
        self._fetch(unit)
        try:
            yield
        finally:
            self._drop(unit)

    def _before(self, unit: Unit) -> Callable[..., Any]:
        def hook(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            self._fetch(unit)
            if unit.owner is not None:
                kwargs = kwargs | {"weight": unit.owner.weight}
            return args, kwargs

        return hook

    def _after(self, unit: Unit) -> Callable[..., None]:
        def hook(*_call: Any) -> None:
            self._drop(unit)

        return hook

    def _fetch(self, unit: Unit) -> None:
        state = unit.load()
        owner = unit.owner if unit.owner is not None else unit.module
        owner.load_state_dict(state, strict=True, assign=True)
        owner.requires_grad_(False)
        size = _size(state)
        self._held += size
        self.peak = max(self.peak, self._held)
        self.largest = max(self.largest, size)

    def _drop(self, unit: Unit) -> None:
        import torch

        owner = unit.owner if unit.owner is not None else unit.module
        state = owner.state_dict()
        size = _size(state)
        if size == 0:  # called after a failed load
            return
        empty = {
            name: torch.empty_like(value, device="meta") if hasattr(value, "is_meta") else value
            for name, value in state.items()
        }
        owner.load_state_dict(empty, strict=True, assign=True)
        self._held -= size


def _size(state: dict[str, Any]) -> int:
    return sum(
        value.numel() * value.element_size()
        for value in state.values()
        if hasattr(value, "is_meta") and not value.is_meta
    )
