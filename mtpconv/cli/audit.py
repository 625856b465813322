"""audit and inventory as commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import typer

from mtpconv.audit.audit import audit
from mtpconv.audit.beside import compare_beside
from mtpconv.audit.finding import Report, Tier
from mtpconv.audit.options import Options, Profile, Sample
from mtpconv.audit.sides import Sides, open_sides
from mtpconv.audit.subject import Subject
from mtpconv.audit.waivers import read_waivers
from mtpconv.cli.afar import mirror_of
from mtpconv.cli.files import require_file
from mtpconv.cli.terminal import make_progress, remark
from mtpconv.errors import RefusedError, UnreadableError, UsageError, WriteError
from mtpconv.progress import Progress
from mtpconv.ranks import READING, Ranks, ranks_of
from mtpconv.report import FORMATS, attest, github, parse_targets, write_file, write_reports
from mtpconv.store.collector import no_collector
from mtpconv.store.legacy import MegatronCheckpoint
from mtpconv.store.manifest import (
    read_manifest,
)
from mtpconv.store.places import is_remote, places_read
from mtpconv.store.snapshot import Snapshot, files_below

EXIT = {"pass": 0, "fail": 1, "error": 3}


@no_collector()
def run_audit(
    before: str | None,
    after: str,
    *,
    base: str | None = None,
    mapping: Path | None = None,
    report: Sequence[str] = (),
    form: str = "text",
    attestation: Path | None = None,
    manifest: Path | None = None,
    verbose: bool = False,
    quiet: bool = False,
    meet: Path | None = None,
    **options: Any,
) -> None:
    """Audit, report in every way asked for, and exit with what was found.

    Of the ranks that a launcher started the first one reports; all exit alike.
    """
    targets = parse_targets(report)  # a typo here must not cost an hour of reading
    if form not in FORMATS:
        raise UsageError(f"--format {form}: must be one of {', '.join(FORMATS)}")
    if attestation is not None and manifest is None:
        raise UsageError("--attest needs --manifest: the statement names the manifest it is about")
    if manifest is not None:
        if is_remote(after):
            raise UsageError(f"--manifest {manifest}: of {after} no digests can be taken")
        read_manifest(manifest)  # that it cannot be read must not cost an hour either
    chosen = make_options(**options)
    if before is None:
        _refuse_alone(chosen, after)
    ranks = ranks_of(os.environ, READING)
    progress = make_progress(quiet or not ranks.is_first)
    ranks.tell = progress.note
    with ExitStack() as stack:
        stack.enter_context(ranks.together(meet or Path.cwd(), "audit", before or "", after))
        afar = [t for t in (before, after) if t is not None and is_remote(t)]
        if afar and chosen.read_bytes:
            chosen = replace(chosen, read_bytes=False)
            if ranks.is_first:
                remark(f"mtpconv: of {afar[0]} only headers are read: tier L0")
        sides = _open(stack, before, after, base, mapping, headers_only=not chosen.read_bytes)
        writes = [("--report", path) for _, path in targets]
        writes += [("--attest", attestation)] if attestation is not None else []
        if writes:
            near = [Path(t) for t in (after, before, base) if t is not None and not is_remote(t)]
            reads = places_read(*near, mapping, manifest, options.get("waivers"))
            for option, file in writes:
                require_file(option, file, reads)
        _require_one_state(sides, chosen, ranks)
        done = run_with_progress(sides, chosen, progress, ranks=ranks)
        if manifest is not None:
            _require_its_manifest(manifest, Path(after), chosen, ranks)
        if ranks.is_first:
            write_reports(done, report)
            _attest(done, attestation, manifest)
            _show(done, form, verbose=verbose, quiet=quiet)
        _require_one_verdict(done, ranks)
    raise typer.Exit(EXIT[done.verdict])


def _refuse_alone(options: Options, after: str) -> None:
    """What says how two checkpoints are compared must not look as if it did something for one.

    Switches of --allow pass: a pipeline names them once for all its audits. Raises: UsageError.
    """
    for option, given in (
        ("--expect structure", options.expect == "structure"),
        ("--sample", options.sample is not None),
    ):
        if given:
            raise UsageError(
                f"{option}: says how two checkpoints are compared, and {after} is alone; name the "
                "reference before it, or leave the option out"
            )


def _attest(done: Report, attestation: Path | None, manifest: Path | None) -> None:
    if attestation is not None and manifest is not None:
        statement = attest.render(done, manifest=manifest.read_bytes(), name=manifest.name)
        write_file(attestation, statement)


def _require_one_state(sides: Sides, options: Options, ranks: Ranks) -> None:
    """All ranks look at the same files, and for the same things.

    Raises: UnreadableError if they do not.
    """
    if ranks.size == 1:
        return
    subjects = (s for s in (sides.before, sides.after, sides.base) if s is not None and not s.afar)
    states = [state_of(s.megatron, Path(s.path)) for s in subjects]
    require_one_view([*states, repr(replace(options, workers=None))], ranks)


def state_of(stored: MegatronCheckpoint | None, path: Path) -> str:
    """A digest over sizes and times of a checkpoint's files."""
    if stored is not None:
        files = [p for p in stored.folder.rglob("*") if p.is_file()]
    else:
        files = files_below(path) if path.is_dir() else [path]
    return Snapshot(files).digest


def require_one_view(mine: Sequence[str], ranks: Ranks) -> None:
    """All ranks see `mine`. Raises: UnreadableError naming the first that does not."""
    views = ranks.gather("view", list(mine))
    for rank, view in enumerate(views):
        if view != views[0]:
            raise UnreadableError(
                f"rank {rank} has other options than rank 0 or does not see the same files (copies "
                "must have the same times, as of cp -p); start all with one command"
            )


def _require_one_verdict(done: Report, ranks: Ranks) -> None:
    """All ranks found the same, and the first one has said so."""
    sys.stdout.flush()
    verdicts = ranks.gather("verdict", done.verdict)
    if len(set(verdicts)) > 1:
        raise UnreadableError(
            f"the ranks do not agree ({', '.join(verdicts)}); every rank must read the same files"
        )


def _require_its_manifest(manifest: Path, after: Path, options: Options, ranks: Ranks) -> None:
    """A statement may name only a manifest that is really that of the audited checkpoint."""
    if manifest.resolve() == after.resolve():
        return
    sides = open_sides(manifest, after, headers_only=not options.read_bytes)
    same = Options(read_bytes=options.read_bytes, allow=frozenset({"config"}))
    found = audit(sides.before, sides.after, same, ranks=ranks)
    if found.verdict != "pass":
        wrong = sum(f.severity == "error" for f in found.findings)
        raise RefusedError(
            f"{manifest}: is not the manifest of {after}: {wrong} differences; "
            "take one with `mtpconv inventory`"
        )
    assert sides.before is not None
    beside = compare_beside(sides.before, sides.after)
    wrong_files = () if beside is None else (*beside.differing, *beside.missing)
    if wrong_files:
        raise RefusedError(
            f"{manifest}: is not the manifest of {after}: {wrong_files[0]} is not what it was; "
            "take one with `mtpconv inventory --files`"
        )


def _open(
    stack: ExitStack,
    before: str | None,
    after: str,
    base: str | None,
    mapping: Path | None,
    *,
    headers_only: bool,
) -> Sides:
    """The sides; of a URL a mirror of its headers, under the name that the user gave."""
    renaming: dict[str, Callable[[str], str]] = {}

    def local(text: str | None) -> Path | None:
        if text is None or not is_remote(text):
            return None if text is None else Path(text)
        from mtpconv.store.remote_dist import mirror_any  # brings in http and ssl

        url, place, renaming[text] = stack.enter_context(mirror_of(text))
        return mirror_any(url, place)

    def shown(subject: Subject | None, text: str | None) -> Subject | None:
        if subject is None or text not in renaming:
            return subject
        told = renaming[text]
        problems = [replace(p, message=told(p.message)) for p in subject.problems]
        notes = tuple(map(told, subject.notes))
        return replace(subject, path=text, afar=True, problems=problems, notes=notes)

    paths = [local(text) for text in (before, after, base)]
    assert paths[1] is not None
    sides = open_sides(
        paths[0], paths[1], base=paths[2], mapping=mapping, headers_only=headers_only
    )
    return Sides(
        shown(sides.before, before),
        shown(sides.after, after) or sides.after,
        shown(sides.base, base),
    )


def run_with_progress(
    sides: Sides, options: Options, progress: Progress, *, ranks: Ranks | None = None
) -> Report:
    """The audit with its bytes counted, about those that this rank reads."""
    ranks = ranks or Ranks()
    if options.read_bytes:
        tensors = sides.after.tensors
        regions = sides.after.naming.regions(tensors)
        # Without a reference only MTP is read: its values say whether it was trained.
        names = [n for n in tensors if sides.before is not None or regions[n].kind == "mtp"]
        progress.begin("audit", sum(tensors[n].nbytes for n in names) // ranks.size)
    try:
        return audit(
            sides.before, sides.after, options,
            base=sides.base, progress=progress.advance, ranks=ranks,
        )  # fmt: skip
    finally:
        progress.end()


def make_options(
    *,
    allow: Sequence[str] = (),
    expect: str = "bytes",
    headers_only: bool = False,
    sample: str | None = None,
    require: str | None = None,
    profile: str | None = None,
    waivers: Path | None = None,
    jobs: int | None = None,
) -> Options:
    """Options from words. Raises: UsageError."""
    if expect not in ("bytes", "structure"):
        raise UsageError(f"--expect {expect}: must be bytes or structure")
    if require not in (None, "L0", "L1", "L2"):
        raise UsageError(f"--require {require}: must be L0, L1 or L2")
    if profile not in (None, "vllm", "sglang", "transformers"):
        raise UsageError(f"--profile {profile}: must be vllm, sglang or transformers")
    return Options(
        read_bytes=not headers_only,
        expect="structure" if expect == "structure" else "bytes",
        allow=frozenset(allow),
        sample=Sample.parse(sample) if sample else None,
        require=cast(Tier, require or "none"),
        profile=cast("Profile | None", profile),
        waivers=read_waivers(waivers) if waivers is not None else (),
        today=datetime.now(tz=UTC).date() if waivers is not None else None,
        workers=jobs,
    )


def _show(done: Report, form: str, *, verbose: bool, quiet: bool) -> None:
    if form == "text":
        if not quiet:
            from mtpconv.report import text

            terminal = sys.stdout.isatty()
            size = os.get_terminal_size() if terminal else None
            sys.stdout.write(
                text.render(
                    done,
                    width=size.columns if size else None,
                    lines=size.lines if size and not verbose else None,
                    colour=terminal and "NO_COLOR" not in os.environ,
                )
            )
    else:
        sys.stdout.write(FORMATS[form](done))
    if github.active(os.environ):
        if form != "github":
            sys.stderr.write(github.render(done))
        try:
            github.write_summary(done)
        except WriteError as error:
            # The page is one more copy of what was said; the verdict must not hang on it.
            remark(f"mtpconv: warning: {error}")
