"""What a pass over several tokens costs, relative to a pass over one, on the device at hand.

A decoding pass reads every weight once, for one token or for five: while the device waits for
memory, more tokens cost almost nothing. How much is measured here with transformers and its
cache, and so is a draft by one MTP depth.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from mtpconv.parity import hf

REPEATS = 9


@dataclass(frozen=True)
class Cost:
    """Times of one decoding step after `context` tokens.

    Units: seconds; `wide` and `draft` relative to a pass over one token.
    """

    device: str
    context: int
    tokens: int
    one: float
    wide: float
    #: one draft by an MTP depth, None for a model without
    draft: float | None


def measure_cost(model: hf.HfModel, context: int, tokens: int) -> Cost:
    """Medians of interleaved runs, so that a busy machine slows all alike."""
    import torch

    device = model.trunk.get_input_embeddings().weight.device
    random = torch.Generator().manual_seed(0)
    vocabulary = model.geometry.dim("vocab_size")
    row = torch.randint(vocabulary, (1, context + tokens), generator=random).to(device)
    with torch.no_grad():
        out = model.decoder(row[:, :context], use_cache=True)
        cache, hidden = _cache_of(out), out.last_hidden_state[:, -1:]
        runs: list[Callable[[], Any]] = [
            _step(model, row[:, context : context + 1], cache),
            _step(model, row[:, context : context + tokens], cache),
        ]
        if model.depths:
            runs.append(_draft(model, hidden, row[:, -1:]))
        times = _interleaved(runs, str(device).startswith("cuda"))
    one = times[0]
    draft = times[2] / one if model.depths else None
    return Cost(str(device), context, tokens, one, times[1] / one, draft)


def _step(model: hf.HfModel, row: Any, cache: Any) -> Callable[[], Any]:
    """A pass over new tokens; the cache is copied before the clock starts."""
    name = (
        "cache"
        if "cache" in inspect.signature(model.decoder.forward).parameters
        else ("past_key_values")
    )

    def prepare() -> Callable[[], Any]:
        fresh = copy.deepcopy(cache)
        return lambda: model.trunk.lm_head(
            model.decoder(row, use_cache=True, **{name: fresh}).last_hidden_state
        )

    return prepare


def _draft(model: hf.HfModel, hidden: Any, following: Any) -> Callable[[], Any]:
    def prepare() -> Callable[[], Any]:
        return lambda: model.trunk.lm_head(hf.depth_hidden(model, 0, hidden, following))

    return prepare


def _cache_of(out: Any) -> Any:
    found = getattr(out, "cache", None)
    return found if found is not None else out.past_key_values


def _interleaved(prepare: Sequence[Callable[[], Any]], cuda: bool) -> list[float]:
    import torch

    times: list[list[float]] = [[] for _ in prepare]
    for repeat in range(REPEATS + 1):
        for number, make in enumerate(prepare):
            run = make()
            if cuda:
                torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            if cuda:
                torch.cuda.synchronize()
            if repeat:  # the first round warms up
                times[number].append(time.perf_counter() - began)
    return [median(found) for found in times]
