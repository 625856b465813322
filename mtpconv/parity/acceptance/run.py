"""One acceptance run: drafts made and verified on a checkpoint, and what they gained."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpconv.errors import UnsupportedError, UsageError
from mtpconv.geometry import Geometry
from mtpconv.parity import runtime
from mtpconv.parity.acceptance.cost import Cost, measure_cost
from mtpconv.parity.acceptance.drafts import Drafter, ModelDrafter, MtpDrafter, NgramDrafter
from mtpconv.parity.acceptance.report import (
    AcceptanceOptions,
    AcceptanceReport,
    Divergence,
    Measurement,
)
from mtpconv.parity.acceptance.speakers import HfSpeaker, McoreSpeaker, Speaker
from mtpconv.parity.acceptance.verify import (
    Count,
    Greedy,
    Rule,
    Sampling,
    continue_drafting,
    continue_plainly,
)
from mtpconv.parity.families import geometry_of
from mtpconv.parity.settings import read_settings
from mtpconv.parity.tokens import Tokens, has_tokenizer, load_tokenizer, token_rows
from mtpconv.store.source import read_source

#: Drafts for each pass where the model has no MTP depth of its own to count.
USUAL_DEPTH = 4
#: Context at which the cost of a pass is measured.
COST_CONTEXT = 64


@dataclass(frozen=True)
class _Checkpoint:
    path: Path
    kind: str
    config: dict[str, Any]
    files: Path
    geometry: Geometry


def run_acceptance(checkpoint: Path, options: AcceptanceOptions | None = None) -> AcceptanceReport:
    """Draft and verify with a checkpoint, HF or torch_dist, and count what was kept.

    Raises: UnsupportedError, UnreadableError (exit 3) if it cannot be run; RefusedError (exit 1)
    if the checkpoint lacks what its config promises; UsageError.
    """
    options = options or AcceptanceOptions()
    started = time.monotonic()
    runtime.require("torch", "transformers")
    _check(options)
    found = _find(checkpoint, options.like)
    geometry = found.geometry
    if options.draft == "mtp" and not geometry.depths:
        raise UnsupportedError(
            f"{checkpoint}: the config promises no MTP depth, so there is nothing to draft with; "
            "use --draft ngram or --draft HF_DIR"
        )
    depth = options.depth or geometry.depths or USUAL_DEPTH
    prompts = token_rows(
        geometry, found.files, options.prompts, options.prompt_tokens, options.rows, options.seed
    )
    _check_room(prompts, options.tokens, geometry.dim("max_position_embeddings"))
    measured = _measure(found, options, prompts, depth)
    other = None
    if options.against is not None:
        other = _measure(_find(options.against, options.like), options, prompts, depth)
    cost = _cost(found, options, depth) if options.cost else None
    draft_cost = options.draft_cost
    if draft_cost is None and cost is not None and options.draft == "mtp":
        draft_cost = cost.draft
    reasons = _reasons(measured, other, options)
    return AcceptanceReport(
        verdict="fail" if reasons else "pass",
        measured=measured,
        against=other,
        prompts=prompts.source,
        tokens=options.tokens,
        temperature=options.temperature,
        cost=cost,
        draft_cost=0.0 if options.draft == "ngram" else draft_cost,
        speedup=_speedup(measured, cost, 0.0 if options.draft == "ngram" else draft_cost),
        reasons=reasons,
        notes=_notes(options, measured, geometry.depths),
        seconds=time.monotonic() - started,
    )


def _check(options: AcceptanceOptions) -> None:
    if options.depth is not None and not 1 <= options.depth <= 64:
        raise UsageError(f"--depth {options.depth}: not between 1 and 64")
    if options.tokens < 2:
        raise UsageError(f"--tokens {options.tokens}: at least 2 are needed")
    if not 0 <= options.temperature <= 10:
        raise UsageError(f"--temperature {options.temperature}: not between 0 and 10")
    if options.min_acceptance is not None and not 0 <= options.min_acceptance <= 1:
        raise UsageError(f"--min-acceptance {options.min_acceptance}: not between 0 and 1")


def _find(path: Path, like: Path | None) -> _Checkpoint:
    """Config and files of a checkpoint, whichever format it has."""
    shards = any(path.glob("*.safetensors")) if path.is_dir() else False
    source = read_source(path if shards or like is None else like)
    geometry = geometry_of(source.config, source.names)
    kind = "hf" if shards else "torch_dist"
    return _Checkpoint(path, kind, source.config, source.files_root, geometry)


def _check_room(prompts: Tokens, tokens: int, limit: int) -> None:
    if prompts.longest + tokens > limit:
        raise UsageError(
            f"a prompt of {prompts.longest} tokens and {tokens} more exceed the model's "
            f"max_position_embeddings of {limit}"
        )


@contextmanager
def open_speaker(found: _Checkpoint, options: AcceptanceOptions) -> Iterator[Speaker]:
    """The checkpoint, loaded and ready to continue text."""
    from mtpconv.parity import hf, mcore

    device = runtime.pick_device(options.device)
    dtype = options.dtype or ("float32" if device == "cpu" else "bfloat16")
    if found.kind == "hf":
        model = hf.load_hf(found.path, dtype, device)
        try:
            yield HfSpeaker(model)
        finally:
            model.close()
        return
    settings = read_settings(found.geometry)
    mcore.require_support(settings)
    with runtime.session(device):
        built = mcore.build(settings, dtype)
        mcore.load(built, found.path)
        yield McoreSpeaker(built)


def _measure(
    found: _Checkpoint, options: AcceptanceOptions, prompts: Tokens, depth: int
) -> Measurement:
    with ExitStack() as stack:
        speaker = stack.enter_context(open_speaker(found, options))
        drafter = _drafter(speaker, options, stack)
        count = Count()
        divergence = None
        first: list[int] = []
        for number, row in enumerate(prompts.rows):
            prompt = row.tolist()
            rule: Rule = Greedy()
            if options.temperature:
                rule = Sampling(options.temperature, options.seed + number)
            tokens, counted = continue_drafting(
                speaker, drafter, prompt, options.tokens, depth, rule
            )
            count.merge(counted)
            first = first or tokens
            if divergence is None and not options.temperature:
                plain = continue_plainly(speaker, prompt, options.tokens, rule)
                divergence = _divergence(speaker, number, plain, tokens)
    return Measurement(
        str(found.path),
        found.kind,
        str(found.config.get("model_type")),
        drafter.name,
        depth,
        count,
        divergence,
        _text(found.files, first),
    )


def _drafter(speaker: Speaker, options: AcceptanceOptions, stack: ExitStack) -> Drafter:
    if options.draft == "mtp":
        return MtpDrafter(speaker)
    if options.draft == "ngram":
        return NgramDrafter()
    folder = Path(options.draft)
    if not folder.is_dir():
        raise UsageError(f"--draft {options.draft}: neither mtp, ngram nor a folder")
    other = stack.enter_context(open_speaker(_find(folder, None), options))
    return ModelDrafter(other, str(folder))


def _divergence(
    speaker: Speaker, number: int, plain: Sequence[int], drafted: Sequence[int]
) -> Divergence | None:
    for position, (wanted, got) in enumerate(zip(plain, drafted, strict=True)):
        if wanted != got:
            _, logits = speaker.trunk(plain[:position], 1)
            best = logits[0].topk(2).values
            return Divergence(number, position, wanted, got, float(best[0] - best[1]))
    return None


def _cost(found: _Checkpoint, options: AcceptanceOptions, depth: int) -> Cost:
    """The cost of a wider pass; the weights do not matter to it, so random ones do."""
    import torch
    from transformers import AutoModelForCausalLM

    from mtpconv.parity import hf

    device = runtime.pick_device(options.device)
    dtype = options.dtype or ("float32" if device == "cpu" else "bfloat16")
    if found.kind == "hf":
        model = hf.load_hf(found.path, dtype, device)
    else:
        torch.manual_seed(0)
        trunk = AutoModelForCausalLM.from_config(
            hf.hf_config(found.config),
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            experts_implementation="eager",
        )
        model = hf.with_depths(trunk.to(device).eval(), found.geometry, dtype=dtype)
    room = model.geometry.dim("max_position_embeddings") - depth - 1
    with hf.quiet():
        return measure_cost(model, min(COST_CONTEXT, room), depth + 1)


def _speedup(measured: Measurement, cost: Cost | None, draft_cost: float | None) -> float | None:
    """Tokens per pass over what a pass with its drafts costs, in passes over one token."""
    if cost is None or draft_cost is None or not measured.count.passes:
        return None
    drafts = sum(measured.count.made) / measured.count.passes
    return measured.count.tokens_per_pass / (cost.wide + drafts * draft_cost)


def _reasons(
    measured: Measurement, other: Measurement | None, options: AcceptanceOptions
) -> list[str]:
    reasons = []
    rate = measured.acceptance
    if measured.divergence is not None:
        d = measured.divergence
        reasons.append(
            f"text differs from plain greedy decoding: prompt {d.prompt}, position {d.position}, "
            f"token {d.drafted} instead of {d.plain} (the trunk's two best are {d.gap:.2g} apart)"
        )
    if options.min_acceptance is not None and not (rate or 0.0) >= options.min_acceptance:
        reasons.append(
            f"acceptance of first drafts is {_percent(rate)}, below {options.min_acceptance:.0%}"
        )
    if other is not None and not (rate or 0.0) >= (other.acceptance or 0.0) - options.margin:
        reasons.append(
            f"acceptance of first drafts is {_percent(rate)}, {_percent(other.acceptance)} in "
            f"{other.checkpoint}: fell by more than {options.margin:.0%}"
        )
    return reasons


def _percent(rate: float | None) -> str:
    return "not measured (no draft was made)" if rate is None else f"{rate:.1%}"


def _notes(options: AcceptanceOptions, measured: Measurement, depths: int) -> list[str]:
    notes = []
    if options.prompts is None:
        notes.append("random prompts: the rate says little about real text; use --prompts")
    if options.draft == "mtp" and measured.depth > depths:
        notes.append(
            f"{measured.depth} drafts from {depths} MTP depth{'s' if depths > 1 else ''}: the last "
            "one went on from its own output"
        )
    if measured.acceptance is None:
        notes.append("no draft was made, so there is no acceptance")
    return notes


def _text(files: Path, tokens: Sequence[int]) -> str | None:
    """The first continuation as text, where there is a tokenizer."""
    return str(load_tokenizer(files).decode(list(tokens))) if has_tokenizer(files) else None
