"""parity and args as commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from mtpconv.cli.afar import headers_of
from mtpconv.cli.files import require_file
from mtpconv.cli.plan import load_plan
from mtpconv.cli.terminal import remark
from mtpconv.errors import RefusedError, UnreadableError, UsageError
from mtpconv.mapping.plan import Plan
from mtpconv.store.places import places_read


def run_parity(
    hf: Path,
    mcore: Path,
    *,
    form: str,
    html: Path | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Run both forwards and compare; exit 1 if a head differs."""
    from mtpconv.parity.picture import render_html
    from mtpconv.parity.render import render_json, render_text
    from mtpconv.parity.report import ParityOptions
    from mtpconv.parity.run import run_parity as compare
    from mtpconv.report import write_file

    if form not in ("text", "json"):
        raise UsageError(f"--format {form}: must be text or json")
    if html is not None:
        require_file("--html", html, places_read(hf, mcore, options.get("prompts")))
    _hush()
    done = compare(hf, mcore, ParityOptions(**options))
    if html is not None:
        write_file(html, render_html(done))
    if form == "json":
        typer.echo(render_json(done))
    elif not quiet:
        typer.echo(render_text(done))
    raise typer.Exit(done.exit_code)


def _hush() -> None:
    """Megatron and transformers warn of what they lack for speed; here only the answer counts."""
    import os
    import warnings

    if not os.environ.get("MTPCONV_TRACEBACK"):
        warnings.simplefilter("ignore")


def run_args(model: str, *, form: str, mapping: Path | None) -> None:
    """Print Megatron's arguments for a model; nothing but the reasons (exit 3) if some have none.

    Those of a Megatron checkpoint have the vocabulary that its embedding is padded to.
    """
    import shlex

    from mtpconv.megatron_args import megatron_args, namespace_text, shell_flags, yaml_text

    if form not in ("flags", "yaml", "namespace"):
        raise UsageError(f"--format {form}: must be flags, yaml or namespace")
    gaps: list[str] = []
    with headers_of(model) as path:
        plan = load_plan(path, mapping)
        args = megatron_args(plan.geometry, _embedding_rows(path, plan), gaps)
    if gaps:  # the rest would be taken for the whole model
        for gap in gaps:
            remark(f"mtpconv: Megatron cannot be told: {gap}")
        raise typer.Exit(3)
    if form == "yaml":
        typer.echo(yaml_text(args), nl=False)
    elif form == "namespace":
        typer.echo(namespace_text(args), nl=False)
    else:
        lines: list[str] = []
        for word in shell_flags(args):
            if word.startswith("--") or not lines:
                lines.append(shlex.quote(word))
            else:
                lines[-1] += f" {shlex.quote(word)}"
        typer.echo(" \\\n".join(lines))


def _embedding_rows(model: Path, plan: Plan) -> int | None:
    """Rows of the embedding that a Megatron checkpoint stores; None for anything else.

    Raises: RefusedError if the checkpoint has no embedding.
    """
    from mtpconv.mapping.layouts import detect_layout
    from mtpconv.store.dist_folder import find_folder
    from mtpconv.store.legacy import open_megatron

    step = next((s for s in plan.steps if s.op.name == "pad_rows"), None)
    if step is None or not model.is_dir():
        return None
    try:
        find_folder(model)
    except UnreadableError:
        return None
    stored = open_megatron(model).tensors
    key = detect_layout(plan, stored.keys()).address(step.key, plan.geometry).key
    if key not in stored:
        raise RefusedError(
            f"{model}: has no {key}, whose rows are Megatron's vocabulary; name a whole checkpoint"
        )
    return stored[key].shape[0]


def run_acceptance(checkpoint: Path, *, form: str, quiet: bool, **options: Any) -> None:
    """Draft and verify; exit 1 if a gate was set and not met."""
    from mtpconv.parity.acceptance.render import render_json, render_text
    from mtpconv.parity.acceptance.report import AcceptanceOptions
    from mtpconv.parity.acceptance.run import run_acceptance as measure

    if form not in ("text", "json"):
        raise UsageError(f"--format {form}: must be text or json")
    _hush()
    done = measure(checkpoint, AcceptanceOptions(**options))
    if form == "json":
        typer.echo(render_json(done))
    elif not quiet:
        typer.echo(render_text(done))
    raise typer.Exit(0 if done.verdict == "pass" else 1)
