"""hf2mcore, mcore2hf and roundtrip as commands."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import typer

from mtpconv.cli.afar import mirror_of, named
from mtpconv.cli.terminal import human, make_progress, say, write_json
from mtpconv.convert import Outcome, hf2mcore, mcore2hf
from mtpconv.errors import MtpconvError, RefusedError, UsageError, WriteError
from mtpconv.ranges import compress
from mtpconv.ranks import Ranks, ranks_of
from mtpconv.store.collector import no_collector
from mtpconv.store.other_files import other_files
from mtpconv.store.places import check_apart
from mtpconv.store.safetensors_header import plain
from mtpconv.store.source import FOLDER

#: Groups of changed tensors that are spelled out.
_SHOWN = 4


def run_hf2mcore(src: str, dst: Path, **options: Any) -> None:
    """Convert and say what was done."""
    if "://" not in src:
        _run(hf2mcore, src, str(dst), **options)
        return

    def convert(source: Path, target: Path, **rest: Any) -> Outcome:  # noqa: ARG001
        from mtpconv.store.afar import open_afar

        check_apart(str(target), src)
        with (
            tempfile.TemporaryDirectory(prefix="mtpconv-") as place,
            named((place, src.rstrip("/"))),
        ):
            opened = open_afar(src, Path(place))
            return hf2mcore(Path(place), target, opened=opened, **rest)

    _run(convert, src, str(dst), **options)


def run_mcore2hf(src: str, dst: str, *, like: str | None, resume: bool, **options: Any) -> None:
    """Convert and say what was done."""
    write: Callable[..., Outcome] = mcore2hf
    if "://" in dst:
        if resume:
            raise UsageError(f"{dst}: --resume needs a folder; an object store is written anew")
        write = _upload_to(dst)
    else:
        options["resume"] = resume
    if like is not None and "://" in like:
        write = _like_from(like, dst, write)
    else:
        options["like"] = None if like is None else Path(like)
    if "://" in src:
        write = _download(src, dst, write, source=like is None)
    _run(write, src, dst, **options)


def _like_from(like: str, dst: str, write: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """The conversion with config, other files and layout from a remote folder."""

    def convert(*words: Any, **rest: Any) -> Outcome:
        from mtpconv.store.afar_dist import open_source_afar

        if "://" not in dst:
            check_apart(dst, None, like)
        with mirror_of(like) as (url, place, renamed):
            done = write(*words, like=open_source_afar(url, place), **rest)
        return dataclasses.replace(done, notes=tuple(map(renamed, done.notes)))

    return convert


def _upload_to(dst: str) -> Callable[..., Outcome]:
    def convert(source: Path, target: Path, *, ranks: Ranks, **rest: Any) -> Outcome:  # noqa: ARG001
        from mtpconv.convert.to_afar import mcore2hf_afar

        if ranks.size > 1:
            raise UsageError(f"{dst}: an object store is written by one process, not by ranks")
        return mcore2hf_afar(source, dst, **rest)

    return convert


def _download(
    src: str, dst: str, write: Callable[..., Outcome], *, source: bool
) -> Callable[..., Outcome]:
    """The conversion of a remote Megatron checkpoint, without `source` not of its `hf_source`."""

    def convert(_: Path, target: Path, **rest: Any) -> Outcome:
        from mtpconv.store.afar_dist import open_dist_afar

        if "://" not in dst:
            check_apart(dst, src)
        with mirror_of(src) as (url, place, renamed):
            opened = open_dist_afar(url, place, source=source)
            done = write(opened.mirror.path, target, opened=opened, **rest)
        return dataclasses.replace(done, notes=tuple(map(renamed, done.notes)))

    return convert


@no_collector()
def _run(
    convert: Callable[..., Outcome],
    src: str,
    dst: str,
    *,
    quiet: bool,
    log_format: str,
    **options: Any,
) -> None:
    """One conversion, alone or as one of the ranks that a launcher started."""
    ranks = ranks_of(os.environ)
    progress = make_progress(quiet or not ranks.is_first, log_format)
    ranks.tell = progress.note
    try:
        done = convert(Path(src), Path(dst), ranks=ranks, progress=progress, **options)
    except MtpconvError as error:
        progress.end()
        if log_format != "json":
            raise
        write_json("error", message=str(error), exit_code=error.exit_code)
        raise typer.Exit(error.exit_code) from error
    finally:
        progress.end()
    if not quiet and ranks.is_first:
        done = dataclasses.replace(done, source=src, target=dst)  # a Path spoils URLs
        if log_format == "json":
            write_json("done", **_facts(done))
        else:
            _report(done)


def _report(done: Outcome) -> None:
    """Say what was done; if that cannot be said, that it was done all the same."""
    try:
        _say(done, quiet=False)
        sys.stdout.flush()
    except WriteError as error:
        if done.dry_run:
            raise
        raise WriteError(f"{error}; {done.target} is written and whole") from error


def _facts(done: Outcome) -> dict[str, Any]:
    """An outcome as JSON has it."""
    simple = (str, int, float, bool, type(None))
    facts = {f.name: getattr(done, f.name) for f in dataclasses.fields(done)}
    return {
        name: value if isinstance(value, simple)
        else [v if isinstance(v, simple) else dataclasses.asdict(v) for v in value]
        if isinstance(value, tuple) else str(value)
        for name, value in facts.items()
    }  # fmt: skip


def run_roundtrip(
    src: Path, *, layout: str | None, mapping: Path | None, workdir: Path | None, quiet: bool
) -> None:
    """Both ways in a temporary place; fails if one file differs."""
    from mtpconv.audit.sides import open_sides
    from mtpconv.cli.audit import EXIT, make_options, run_with_progress
    from mtpconv.report import text

    if workdir is not None and not workdir.is_dir():
        raise UsageError(f"--workdir {workdir}: is no folder; name one that exists")
    with tempfile.TemporaryDirectory(prefix="mtpconv-", dir=workdir) as temporary:
        there, back = Path(temporary) / "mcore", Path(temporary) / "hf"
        progress = make_progress(quiet)
        done = hf2mcore(src, there, layout=layout, mapping=mapping, progress=progress)
        _say(done, quiet)
        _say(mcore2hf(there, back, mapping=mapping, progress=progress), quiet)
        report = run_with_progress(open_sides(src, back, mapping=mapping), make_options(), progress)
        if not quiet:
            typer.echo(text.render(report), nl=False)
        if report.verdict != "pass":
            raise typer.Exit(EXIT[report.verdict])
        _require_same_files(src, back, done.left_behind, quiet)


def _require_same_files(src: Path, back: Path, left: Collection[str], quiet: bool) -> None:
    """Every file of the source came back as it was, apart from those named as left behind."""
    known = set(left)
    names = [n for n in other_files(src, (), FOLDER).travel if n not in known]
    here = set(names)
    lost = [n for n in names if not (back / n).is_file()]
    differ = [n for n in names if n not in lost and _sha256(src / n) != _sha256(back / n)]
    new = [n for n in other_files(back, ()).travel if n not in here]
    if lost or differ or new:
        raise RefusedError(
            f"{src}: {len(differ)} files differ after the round trip, {len(lost)} did not come "
            f"back and {len(new)} are new, first {plain((lost + differ + new)[0])}"
        )
    if not quiet:
        say(f"round trip: {len(names)} files, sha256 of every one equals the original's")
        if left:
            shown = compress(map(plain, left), 4)
            say(f"  without   {len(left)} that were left behind: {shown}")


def _say(done: Outcome, quiet: bool) -> None:
    if quiet:
        return
    mtp = (
        f"{done.mtp_depths} depth{'s' * (done.mtp_depths != 1)}, {done.mtp_tensors} tensors"
        if done.mtp_depths
        else "none"
    )
    would = "would write" if done.dry_run else "wrote"
    say(
        f"{done.direction}: {would} {done.tensors:,} tensors, {human(done.nbytes)} "
        f"({done.model_type}) to {done.target}"
    )
    say(f"  MTP       {mtp}")
    say(f"  layout    {done.layout}")
    if done.dry_run:
        say(f"  needs     {human(done.disk)} disk, about {human(done.memory)} memory")
    else:
        state = "every tensor read back and equal" if done.verified else "no (--no-verify)"
        say(f"  verified  {state}")
        if done.taken_over:
            files = f"{done.taken_over:,} file{'s' * (done.taken_over > 1)}"
            say(f"  resumed   {files} taken over from an earlier run")
        if done.unchanged is not None:
            say(f"  weights   {_unchanged(done)} tensors unchanged since hf2mcore")
            if done.not_compared:
                what = "written in another form than hf2mcore read, and not compared"
                say(f"  --fp8     {done.not_compared:,} tensors {what}")
            if done.changed:
                more = len(done.changed) - _SHOWN
                lines = ", ".join(done.changed[:_SHOWN])
                say(f"  changed   {lines}" + (f" and {more} more groups" * (more > 0)))
    for step in done.steps:
        claim = f"{step.tensors:,} tensors, level {step.level}"
        say(f"  step      {step.name}: {step.what} ({claim})")
    for note in done.notes:
        say(f"  note      {note}")


def _unchanged(done: Outcome) -> str:
    """How many of the tensors that the manifest tells something about."""
    total = done.tensors - done.not_compared
    if not done.mtp_tensors:
        return f"{done.unchanged:,} of {total:,}"
    mtp, mtp_total = done.unchanged_mtp or 0, done.mtp_tensors - done.not_compared_mtp
    trunk = f"{(done.unchanged or 0) - mtp:,} of {total - mtp_total:,} trunk"
    return f"{trunk} and {mtp:,} of {mtp_total:,} MTP"


def _sha256(path: Path) -> str:
    if not path.is_file():
        return "absent"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
