"""inventory as a command."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from mtpconv.audit.sides import Opened, open_any
from mtpconv.cli.afar import mirror_of
from mtpconv.cli.audit import require_one_view, state_of
from mtpconv.cli.files import require_file
from mtpconv.cli.terminal import make_progress, say
from mtpconv.errors import UsageError
from mtpconv.progress import Progress
from mtpconv.ranks import READING, Ranks, ranks_of
from mtpconv.store.checkpoint import require_sound
from mtpconv.store.collector import no_collector
from mtpconv.store.legacy import MegatronCheckpoint
from mtpconv.store.manifest import (
    Manifest,
    hash_files,
    manifest_text,
    take_manifest,
    write_manifest,
)
from mtpconv.store.places import is_remote, places_read


@no_collector()
def run_inventory(
    checkpoint: str,
    *,
    output: Path | None,
    files: bool,
    quiet: bool,
    jobs: int | None = None,
    meet: Path | None = None,
) -> None:
    """Hash every tensor of a checkpoint; the first of several ranks writes the manifest."""
    ranks = ranks_of(os.environ, READING)
    progress = make_progress(quiet or output is None or not ranks.is_first)
    ranks.tell = progress.note
    take = _inventory_afar if is_remote(checkpoint) else _inventory
    with ranks.together(meet or Path.cwd(), "inventory", checkpoint):
        taken = take(checkpoint, output, progress, files=files, jobs=jobs, ranks=ranks)
        if ranks.is_first:
            _hand_out(taken, output, quiet=quiet)
        ranks.gather("written", None)


def _inventory(
    checkpoint: str,
    output: Path | None,
    progress: Progress,
    *,
    files: bool,
    jobs: int | None,
    ranks: Ranks,
) -> Manifest:
    path = Path(checkpoint)
    opened = open_any(path)
    if opened.format == "manifest":
        raise UsageError(f"{checkpoint}: is a manifest already; name a checkpoint")
    require_sound(opened)
    if output is not None:
        require_file("--output", output, places_read(path))
    if ranks.size > 1:
        stored = opened if isinstance(opened, MegatronCheckpoint) else None
        require_one_view([state_of(stored, path), str(files)], ranks)
    taken = _hashed(opened, path, progress, jobs, ranks)
    return replace(taken, files=hash_files(path, ranks=ranks)) if files else taken


def _inventory_afar(
    checkpoint: str,
    output: Path | None,
    progress: Progress,
    *,
    files: bool,
    jobs: int | None,
    ranks: Ranks,
) -> Manifest:
    """The same of a URL: every byte is fetched once and none of it kept."""
    if files:
        raise UsageError(f"--files: of {checkpoint} only tensors are read; leave it out")
    if output is not None:
        require_file("--output", output, places_read())
    from mtpconv.store.afar_dist import AfarMegatron, open_any_afar

    with mirror_of(checkpoint) as (url, place, _):
        found = open_any_afar(url, place)
        opened = found.checkpoint if isinstance(found, AfarMegatron) else found
        require_sound(opened)
        marks = found.mirror.marks if isinstance(found, AfarMegatron) else found.marks
        if ranks.size > 1:
            require_one_view([f"{file} {mark}" for file, mark in marks.items()], ranks)
        taken = _hashed(opened, opened.path, progress, jobs, ranks)
        found.require_unchanged()
    return taken


def _hashed(
    opened: Opened, path: Path, progress: Progress, jobs: int | None, ranks: Ranks
) -> Manifest:
    progress.begin("inventory", sum(s.nbytes for s in opened.tensors.values()) // ranks.size)
    try:
        return take_manifest(
            opened,
            path,
            opened.format,
            config=getattr(opened, "config", None),
            progress=progress.advance,
            workers=jobs,
            ranks=ranks,
        )
    finally:
        progress.end()


def _hand_out(taken: Manifest, output: Path | None, *, quiet: bool) -> None:
    if output is None:
        sys.stdout.write(manifest_text(taken))
        sys.stdout.flush()
        return
    write_manifest(taken, output)
    if not quiet:
        say(f"inventory: {len(taken.tensors):,} tensors, root {taken.root} to {output}")
