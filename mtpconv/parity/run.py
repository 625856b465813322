"""One parity run: the same tokens through both sides, one side in memory after the other."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtpconv.errors import UnreadableError, UsageError
from mtpconv.parity import runtime
from mtpconv.parity.compare import HeadResult, compare_head, differences
from mtpconv.parity.explain import Fault, explain
from mtpconv.parity.families import geometry_of
from mtpconv.parity.hf_weights import HfWeights
from mtpconv.parity.report import Memory, ParityOptions, ParityReport
from mtpconv.parity.settings import Settings, read_settings
from mtpconv.parity.taps import Point, PointResult, compare_points
from mtpconv.parity.tokens import Tokens, choose_tokens, coverage_notes
from mtpconv.store.hf import open_hf

if TYPE_CHECKING:
    from mtpconv.parity.measure import Measured
    from mtpconv.parity.paging import Pager
    from mtpconv.parity.sides import HfSide, McoreSide

DTYPES = ("float32", "bfloat16")

#: Hidden states at a point differ if they are this many times further apart than noise, and
#: further than the least that counts, both relative to their size. The second least is for
#: runs without measured noise.
POINT_FACTOR = 10.0
POINT_LEAST: Mapping[str, tuple[float, float]] = {
    "float32": (3e-6, 3e-5),
    "bfloat16": (3e-2, 6e-2),
}


@dataclass(frozen=True)
class _Job:
    hf: Path
    mcore: Path
    options: ParityOptions
    settings: Settings
    device: str
    dtype: str
    tokens: Tokens

    def open_hf(self, dtype: str) -> AbstractContextManager[HfSide]:
        from mtpconv.parity.sides import open_hf_side

        return open_hf_side(self.hf, dtype, self.device, self.options.stream)

    def open_mcore(self, dtype: str) -> AbstractContextManager[McoreSide]:
        from mtpconv.parity.sides import open_mcore_side

        return open_mcore_side(
            self.settings, self.mcore, dtype, self.options.te, self.options.stream
        )


def run_parity(
    hf_folder: Path, mcore_folder: Path, options: ParityOptions | None = None
) -> ParityReport:
    """Compare an HF folder with a torch_dist folder, forward, head by head.

    Raises: UnsupportedError, UnreadableError (exit 3) if the comparison cannot be run;
    RefusedError (exit 1) if a checkpoint lacks what its config promises; UsageError.
    """
    started = time.monotonic()
    job = _prepare(hf_folder, mcore_folder, options or ParityOptions())
    from mtpconv.parity.measure import Bench, measure_follower, measure_reference

    measured = job.options.noise if job.options.noise is not None else not job.options.stream
    bench = Bench(job.tokens.rows, job.settings, job.dtype, measured)
    with runtime.session(job.device):
        with job.open_hf(job.dtype) as hf_side:
            reference, choices = measure_reference(bench, hf_side, lambda: job.open_hf("float32"))
            points = hf_side.points
            described, hf_pager = hf_side.model.reference, hf_side.pager
        with job.open_mcore(job.dtype) as side:
            megatron = measure_follower(bench, side, choices, lambda: job.open_mcore("float32"))
            modules = "Transformer Engine" if side.model.te else "megatron-core, local spec"
            stored_rows, pager = side.stored_rows, side.pager
        heads = _compare_heads(job, reference, megatron)
        states = _compare_points(points, reference, megatron)
        passed = all(head.passed for head in heads)
        fault = None if passed else _locate(job, heads, states)
    return ParityReport(
        verdict="pass" if passed else "fail",
        hf=str(hf_folder),
        mcore=str(mcore_folder),
        model_type=job.settings.geometry.model_type,
        device=job.device,
        dtype=job.dtype,
        versions=_versions(),
        reference=described,
        modules=modules,
        tokens=job.tokens.source,
        heads=heads,
        points=states,
        ties=megatron.run.ties.settled,
        choices=megatron.run.ties.rows,
        fault=fault,
        notes=[
            *job.settings.notes,
            *coverage_notes(job.settings, job.tokens, stored_rows),
            *_weak(heads),
        ],
        memory=_memory(hf_pager, pager),
        seconds=time.monotonic() - started,
    )


def _prepare(hf_folder: Path, mcore_folder: Path, options: ParityOptions) -> _Job:
    """Everything that can be refused before a model is loaded."""
    runtime.require("torch", "transformers", "megatron-core", "psutil")
    stored = open_hf(hf_folder, compare_duplicates=False)
    if stored.config is None:
        raise UnreadableError(f"{hf_folder}: no readable config.json; it says what the model is")
    settings = read_settings(geometry_of(stored.config, stored.tensors))
    settings.transformer |= options.overrides
    if options.overrides:
        changed = ", ".join(f"{k}={v}" for k, v in options.overrides.items())
        settings.notes.append(f"Megatron was built with {changed}, unlike the config")
    device = runtime.pick_device(options.device)
    dtype = options.dtype or ("float32" if device == "cpu" else "bfloat16")
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: not one of {', '.join(DTYPES)}")
    from mtpconv.parity.mcore import require_support

    require_support(settings)
    tokens = choose_tokens(
        settings, hf_folder, options.prompts, options.length, options.rows, options.seed
    )
    return _Job(hf_folder, mcore_folder, options, settings, device, dtype, tokens)


def _compare_heads(job: _Job, reference: Measured, megatron: Measured) -> list[HeadResult]:
    found = []
    for head in reference.run.logits[0]:
        noise = {
            name: differences(side.run.logits, side.again.logits, head)
            for name, side in (("transformers", reference), ("megatron-core", megatron))
            if side.again is not None
        }
        found.append(
            compare_head(
                head,
                job.tokens.rows,
                reference.run.logits,
                megatron.run.logits,
                noise,
                job.dtype,
                job.settings.geometry.layers,
                job.options.max_abs,
                job.options.mean_abs,
                delta_nets=job.settings.delta_nets,
            )
        )
    return found


#: Limits wider than this share of the logits' spread leave room for a fault.
WEAK = 0.2


def _weak(heads: Sequence[HeadResult]) -> list[str]:
    """Heads whose rounding is so large that a small fault would hide in it."""
    found = [head for head in heads if head.limits.mean > WEAK * head.scale]
    return [
        f"{head.head}: rounding alone moves the logits by {head.limits.mean / head.scale:.0%} of "
        "their spread, so a small fault would not show; compare in float32"
        for head in found
    ]


def _compare_points(
    points: Sequence[Point], reference: Measured, megatron: Measured
) -> list[PointResult]:
    repeats = [
        (side.run.states, side.again.states)
        for side in (reference, megatron)
        if side.again is not None
    ]
    return compare_points(points, reference.run.states, megatron.run.states, repeats)


def _differs(result: PointResult, dtype: str) -> bool:
    least, unmeasured = POINT_LEAST[dtype]
    if result.noise is None:
        return not result.difference <= unmeasured
    return not result.difference <= max(least, POINT_FACTOR * result.noise)


def _locate(job: _Job, heads: Sequence[HeadResult], states: Sequence[PointResult]) -> Fault:
    """The first point where the sides part, and why."""
    first = next((point for point in states if _differs(point, job.dtype)), None)
    if first is not None:
        block, place, difference = first.block, first.place, first.difference
    else:
        failed = next(head for head in heads if not head.passed)
        block, place, difference = "trunk", "logits", failed.max_abs
    weights = HfWeights(job.hf)
    try:
        with job.open_mcore("float32") as side, side.tensors(block) as live:
            return explain(job.settings, live, weights.read, block, place, difference)
    finally:
        weights.close()


def _memory(reference: Pager | None, megatron: Pager | None) -> Memory | None:
    if reference is None or megatron is None:
        return None
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return Memory(reference.peak, reference.largest, megatron.peak, megatron.largest, held)


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "megatron-core", "transformer-engine")
    found = {name: runtime.version_of(name) for name in names}
    return {name: ".".join(map(str, v)) for name, v in found.items() if v is not None}
