"""The difference between two sides' logits, head by head, and what it is measured against.

A head passes when its difference is of the size of rounding noise. The noise is measured on
the model at hand: how much each side differs from itself when its sums are taken in another
order (float32), or from its own float32 run (bfloat16). Two right implementations differ by
about as much from each other: mean ratios of at most 0.8 (float32) and 1.4 (bfloat16), maximum
ratios of at most 1.8 and 1.8.
Source: benchmarks/parity_noise.py: 23 small models, two rows of tokens, megatron-core 0.16.1
and 0.19.2, CPU, 2026-11-29. A GLM-5.2-shaped model with all 78 layers: 0.9 and 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: A difference may be this many times the noise: its mean, and its largest element.
MEAN_FACTOR = 3.0
MAX_FACTOR = 8.0

#: Noise relative to the standard deviation of the reference's logits, used where it is not
#: measured; a tenth of it is the least that a measurement counts as. Mean, maximum. It grows
#: with the square root of the number of layers.
#: Source: as above, rounded up, for models of four layers.
USUAL_NOISE: Mapping[str, tuple[float, float]] = {
    "float32": (1e-6, 1e-5),
    "bfloat16": (2e-2, 3e-1),
}

#: How much more it is in models with gated delta nets, whose norm divides by states that may be
#: next to nothing: mean, maximum. Where it is measured this does not matter.
#: Source: the noise of tests/parity/configs.py `HYBRIDS`, two seeds, 0.16.1, 2026-11-29.
DELTA_NETS = (2.0, 8.0)


@dataclass(frozen=True)
class Limits:
    """What a head's mean and largest absolute difference may be, and where that comes from."""

    mean: float
    largest: float
    source: str


@dataclass(frozen=True)
class Worst:
    """Where a head differs most."""

    row: int
    position: int
    token: int
    logit: int
    reference: float
    megatron: float


@dataclass(frozen=True)
class HeadResult:
    """One head of the comparison.

    Differences are absolute, in logits. `cosine` is the smallest of all positions, `kl` the
    Kullback-Leibler divergence from the reference in nats. `per_position` is the largest
    difference at each position, one list per row of tokens.
    """

    head: str
    passed: bool
    positions: int
    scale: float
    max_abs: float
    mean_abs: float
    worst: Worst
    cosine: float
    kl_mean: float
    kl_max: float
    top1: float
    top5: float
    limits: Limits
    noise: Mapping[str, tuple[float, float]]
    per_position: Sequence[Sequence[float]]


Logits = Mapping[str, Any]


def differences(left: Sequence[Logits], right: Sequence[Logits], head: str) -> tuple[float, float]:
    """Mean and largest absolute difference of a head over all rows."""
    import torch

    flat = torch.cat(
        [(a[head] - b[head]).abs().flatten() for a, b in zip(left, right, strict=True)]
    )
    return float(flat.double().mean()), float(flat.max())


def limits(
    scale: float,
    dtype: str,
    layers: int,
    noise: Mapping[str, tuple[float, float]],
    max_abs: float | None = None,
    mean_abs: float | None = None,
    *,
    delta_nets: bool = False,
) -> Limits:
    """Limits of a head from the noise of each side; explicit numbers take precedence."""
    growth = max(1.0, layers / 4) ** 0.5
    mean, largest = (scale * growth * part for part in USUAL_NOISE[dtype])
    if delta_nets and not noise:
        mean, largest = mean * DELTA_NETS[0], largest * DELTA_NETS[1]
    source = f"usual noise of {dtype}"
    if noise:
        # A measurement can come out as zero, on a model that rounds to the same either way.
        mean = max(mean / 10, *(side[0] for side in noise.values()))
        largest = max(largest / 10, *(side[1] for side in noise.values()))
        source = "measured noise"
    given = max_abs is not None or mean_abs is not None
    return Limits(
        mean_abs if mean_abs is not None else MEAN_FACTOR * mean if not given else float("inf"),
        max_abs if max_abs is not None else MAX_FACTOR * largest if not given else float("inf"),
        "given" if given else source,
    )


def compare_head(
    head: str,
    tokens: Sequence[Any],
    reference: Sequence[Logits],
    megatron: Sequence[Logits],
    noise: Mapping[str, tuple[float, float]],
    dtype: str,
    layers: int,
    max_abs: float | None = None,
    mean_abs: float | None = None,
    *,
    delta_nets: bool = False,
) -> HeadResult:
    """Compare one head over all rows of tokens.

    A difference that is not a number fails: no limit is above it.

    Shape: tokens [s] each; logits [s or less, vocab] each.
    """
    import torch

    left = torch.cat([row[head] for row in reference])
    right = torch.cat([row[head] for row in megatron])
    scale = float(left.double().std())
    allowed = limits(scale, dtype, layers, noise, max_abs, mean_abs, delta_nets=delta_nets)
    mean, largest = differences(reference, megatron, head)
    gap = (left - right).abs()
    spots = gap.amax(-1)
    log_left, log_right = left.log_softmax(-1), right.log_softmax(-1)
    kl = (log_left.exp() * (log_left - log_right)).sum(-1).clamp_min(0)
    count = min(5, left.shape[1])
    best_left, best_right = left.topk(count).indices, right.topk(count).indices
    shared = (best_left[:, :, None] == best_right[:, None, :]).any(-1).float().mean()
    lengths = [len(row[head]) for row in reference]
    return HeadResult(
        head=head,
        passed=mean <= allowed.mean and largest <= allowed.largest,
        positions=len(left),
        scale=scale,
        max_abs=largest,
        mean_abs=mean,
        worst=_worst(tokens, lengths, left, right, spots),
        cosine=float(torch.nn.functional.cosine_similarity(left, right, -1).min()),
        kl_mean=float(kl.mean()),
        kl_max=float(kl.max()),
        top1=float((best_left[:, 0] == best_right[:, 0]).float().mean()),
        top5=float(shared),
        limits=allowed,
        noise=noise,
        per_position=[part.tolist() for part in spots.split(lengths)],
    )


def _worst(
    tokens: Sequence[Any], lengths: Sequence[int], left: Any, right: Any, spots: Any
) -> Worst:
    place = int(spots.nan_to_num(nan=float("inf")).argmax())
    logit = int((left[place] - right[place]).abs().nan_to_num(nan=float("inf")).argmax())
    row, position = 0, place
    while position >= lengths[row]:
        position -= lengths[row]
        row += 1
    return Worst(
        row,
        position,
        int(tokens[row][position]),
        logit,
        float(left[place, logit]),
        float(right[place, logit]),
    )
