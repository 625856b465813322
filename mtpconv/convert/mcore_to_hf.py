"""torch_dist checkpoint -> HF folder: the same files if the weights are unchanged."""

from __future__ import annotations

from pathlib import Path
from sys import intern
from typing import TYPE_CHECKING

from blake3 import blake3

from mtpconv import __version__
from mtpconv.convert import identity
from mtpconv.convert.export import Export, write_rest
from mtpconv.convert.journal import Done
from mtpconv.convert.mcore_to_hf_plan import (
    McoreToHf,
)
from mtpconv.convert.outcome import Outcome
from mtpconv.convert.output import Output
from mtpconv.convert.shards import Shard, shard_is_whole, write_shards
from mtpconv.convert.target import check_space, check_target
from mtpconv.convert.verify import require_accepted, require_crcs, verify_digests
from mtpconv.progress import Progress
from mtpconv.ranks import Ranks, deal
from mtpconv.store.checkpoint import require_sound
from mtpconv.store.crew import Crew
from mtpconv.store.digest import digest_by
from mtpconv.store.hf import open_hf
from mtpconv.store.places import places_read
from mtpconv.store.safetensors_header import ShardHeader

if TYPE_CHECKING:  # the network is imported by whoever needs it
    from mtpconv.store.afar_dist import AfarMegatron, AfarSource


def mcore2hf(
    source: Path,
    target: Path,
    *,
    like: Path | AfarSource | None = None,
    mapping: Path | None = None,
    drop_mtp: bool = False,
    frozen_vision: bool = False,
    fp8: str = "keep",
    overwrite: bool = False,
    verify: bool = True,
    dry_run: bool = False,
    jobs: int | None = None,
    resume: bool = False,
    ranks: Ranks | None = None,
    opened: AfarMegatron | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Convert a torch_dist checkpoint to an HF folder.

    With several `ranks` all call this with the same arguments; each writes its shards. Without
    `verify` nobody looks at the bytes, so `unchanged` is not known.

    `fp8` says what becomes of weights that the source has in block FP8: those that did not change
    get their kept codes and scales; those that did are quantised under kept scales (`keep`) or
    fresh ones (`requantise`); or all are written as BF16 (`bf16`).

    With `frozen_vision` a vision tower that travelled beside is written in place of Megatron's,
    which no table translates.

    `like` says where config, other files and shard layout come from, if not from the source's
    `hf_source`: an HF folder or a saved `hf_source`, on this machine or opened far away.

    `opened` is `source` opened already: a remote checkpoint, whose mirror `source` is.

    Law: with unchanged weights every file has the bytes of the original.

    Raises: UnreadableError, RefusedError, UsageError, UnsupportedError, WriteError.
    """
    progress, ranks = progress or Progress(), ranks or Ranks()
    near = like if isinstance(like, Path) else None
    check_target(target, places_read(source, near, mapping, links=False), overwrite=overwrite)
    export = Export(
        source, like=like, mapping=mapping, drop_mtp=drop_mtp, frozen_vision=frozen_vision,
        fp8=fp8, verify=verify, opened=opened,
    )  # fmt: skip
    work, memory = export.work, export.memory(jobs, ranks)
    reads = places_read(source, near, work.source.path, mapping)
    if dry_run:
        check_target(target, reads, overwrite=overwrite)
        check_space(target, work.disk)
        return export.outcome(target, memory)

    def about() -> str:
        # Each rank has a mirror of its own, and each mirror times of its own.
        states = (export.snapshot.digest, export.beside.digest) if not export.afar else ()
        headers = (f"{name} {header.size}" for name, header in work.headers.items())
        return identity.of_plan(work.view.plan, work.view.layout, *states, work.mode, *headers)

    with (
        Output(
            target,
            reads,
            overwrite=overwrite,
            need=work.disk,
            resume=resume,
            ranks=ranks,
            about=about,
        ) as out,
        Crew(jobs, on_read=export.crcs.saw) as crew,
    ):
        written_by = ranks.gather(
            "written",
            _write_shards(work, out, export.snapshot.digest, crew, progress, digest=verify),
        )
        digests = {name: digest for mine in written_by for name, digest in mine.items()}
        del written_by
        if verify:
            require_crcs(export.crcs, ranks, crew.jobs)
        if ranks.is_first:
            write_rest(work, out.folder)
        ranks.gather("described", None)
        if verify:
            specs = {n: work.content.tensors[n] for n in work.names}
            written = open_hf(out.folder, expected=work.headers)
            require_sound(written)
            require_accepted([h.file for h in written.shards.values()])
            verify_digests(written, specs, digests, progress, ranks=ranks, jobs=crew.jobs)
        export.require_unchanged()
        taken_over = sum(ranks.gather("verified", out.taken_over))
        if ranks.is_first:
            out.commit()
    return export.outcome(target, memory, digests, taken_over=taken_over, earlier=out.earlier)


def _write_shards(
    work: McoreToHf, out: Output, source: str, crew: Crew, progress: Progress, *, digest: bool
) -> dict[str, str]:
    """Write this rank's shards, or take them over; gives the digests of their tensors."""
    digests: dict[str, str] = {}
    names = deal({n: h.size for n, h in work.headers.items()}, out.ranks)
    progress.begin("convert", sum(work.headers[n].size for n in names))
    holds: dict[Path, tuple[str, str]] = {}
    todo = []
    for name in names:
        header = work.headers[name]
        made_of = f"{__version__} {source} {work.mode if work.fp8 else ''}\n"
        made = blake3(made_of.encode() + header.raw).hexdigest()
        found = out.finished(name, made) if digest else None
        if found is not None and _is_right(*found, header, work, crew):
            out.take_over(found[0], out.folder, found[1])
            digests.update(found[1].digests)
            progress.advance(header.size, "taken over")
            continue
        path = out.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        holds[path] = name, made
        todo.append(Shard(path, header))

    def done(shard: Shard) -> None:
        name, made = holds[shard.path]
        out.journal.add(name, Done(made, shard.digests))
        digests.update((n, intern(digest)) for n, digest in shard.digests.items())
        progress.advance(shard.header.data_start)

    write_shards(todo, work.content, crew, progress.advance, done, digest=digest)
    return digests


def _is_right(path: Path, done: Done, header: ShardHeader, work: McoreToHf, crew: Crew) -> bool:
    """Whether an earlier run's shard holds what it said, and that is what the source has now.

    Then it was also made with this table, these files beside and whole records.
    """
    if not shard_is_whole(path, header, done.digests, crew):
        return False
    return dict(digest_by(crew, work.content, list(header.payload_order))) == done.digests
