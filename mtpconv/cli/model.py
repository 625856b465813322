"""parity and args as commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from mtpconv.cli.files import require_file
from mtpconv.cli.plan import load_plan
from mtpconv.errors import UsageError
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


def run_args(model: Path, *, form: str, mapping: Path | None) -> None:
    """Print Megatron's arguments for a model."""
    import shlex

    from mtpconv.megatron_args import megatron_args, shell_flags, yaml_text

    gaps: list[str] = []
    args = megatron_args(load_plan(model, mapping).geometry, gaps=gaps)
    for gap in gaps:
        typer.echo(f"mtpconv: Megatron cannot be told: {gap}", err=True)
    code = 3 if gaps else 0  # what is printed is not the whole model
    if form == "flags":
        words = shell_flags(args)
        lines: list[str] = []
        for word in words:
            if word.startswith("--") or not lines:
                lines.append(shlex.quote(word))
            else:
                lines[-1] += f" {shlex.quote(word)}"
        typer.echo(" \\\n".join(lines))
    elif form == "yaml":
        typer.echo(yaml_text(args), nl=False)
    elif form == "namespace":
        for name, value in sorted(args.items()):
            typer.echo(f"args.{name} = {value!r}")
    else:
        raise UsageError(f"--format {form}: must be flags, yaml or namespace")
    raise typer.Exit(code)


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
