"""hf2mcore, mcore2hf and roundtrip as commands."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import typer

from mtpconv.audit.sides import open_sides
from mtpconv.cli.audit import EXIT, make_options, run_with_progress
from mtpconv.cli.terminal import human, make_progress
from mtpconv.convert import Outcome, hf2mcore, mcore2hf
from mtpconv.errors import RefusedError
from mtpconv.report import text


def run_hf2mcore(src: Path, dst: Path, *, quiet: bool, **options: Any) -> None:
    """Convert and say what was done."""
    _say(hf2mcore(src, dst, progress=make_progress(quiet), **options), quiet)


def run_mcore2hf(src: Path, dst: Path, *, quiet: bool, **options: Any) -> None:
    """Convert and say what was done."""
    _say(mcore2hf(src, dst, progress=make_progress(quiet), **options), quiet)


def run_roundtrip(
    src: Path, *, layout: str | None, mapping: Path | None, workdir: Path | None, quiet: bool
) -> None:
    """Both ways in a temporary place; fails if one file differs."""
    with tempfile.TemporaryDirectory(prefix="mtpconv-", dir=workdir) as temporary:
        there, back = Path(temporary) / "mcore", Path(temporary) / "hf"
        progress = make_progress(quiet)
        _say(hf2mcore(src, there, layout=layout, mapping=mapping, progress=progress), quiet)
        _say(mcore2hf(there, back, mapping=mapping, progress=progress), quiet)
        report = run_with_progress(open_sides(src, back, mapping=mapping), make_options(), progress)
        if not quiet:
            typer.echo(text.render(report), nl=False)
        if report.verdict != "pass":
            raise typer.Exit(EXIT[report.verdict])
        names = sorted(str(p.relative_to(back)) for p in back.rglob("*") if p.is_file())
        differ = [n for n in names if _sha256(src / n) != _sha256(back / n)]
        lost = [p.name for p in src.glob("*.safetensors") if not (back / p.name).is_file()]
        if differ or lost:
            raise RefusedError(
                f"{src}: {len(differ)} files differ after the round trip and {len(lost)} are "
                f"missing, first {(differ + lost)[0]}"
            )
        if not quiet:
            typer.echo(f"round trip: {len(names)} files, sha256 of every one equals the original's")


def _say(done: Outcome, quiet: bool) -> None:
    if quiet:
        return
    mtp = (
        f"{done.mtp_depths} depth{'s' * (done.mtp_depths != 1)}, {done.mtp_tensors} tensors"
        if done.mtp_depths
        else "none"
    )
    would = "would write" if done.dry_run else "wrote"
    typer.echo(
        f"{done.direction}: {would} {done.tensors:,} tensors, {human(done.nbytes)} "
        f"({done.model_type}) to {done.target}"
    )
    typer.echo(f"  MTP       {mtp}")
    typer.echo(f"  layout    {done.layout}")
    if done.dry_run:
        typer.echo(f"  needs     {human(done.disk)} disk, about {human(done.memory)} memory")
    else:
        state = "every tensor read back and equal" if done.verified else "no (--no-verify)"
        typer.echo(f"  verified  {state}")
        if done.unchanged is not None:
            same = f"{done.unchanged:,} of {done.tensors:,} tensors"
            typer.echo(f"  weights   {same} unchanged since hf2mcore")
    for step in done.steps:
        claim = f"{step.tensors:,} tensors, level {step.level}"
        typer.echo(f"  step      {step.name}: {step.what} ({claim})")
    for note in done.notes:
        typer.echo(f"  note      {note}")


def _sha256(path: Path) -> str:
    if not path.is_file():
        return "absent"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
