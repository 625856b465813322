"""torch_dist checkpoint -> HF folder: the same files if the weights are unchanged."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from mtpconv import __version__
from mtpconv.convert.agreement import is_mtp_name
from mtpconv.convert.arithmetic import computed_names, export_arithmetic, originals_of, undone
from mtpconv.convert.configs import changed_config, config_bytes
from mtpconv.convert.drop import droppable
from mtpconv.convert.fp8 import (
    Fp8,
    bf16_inventory,
    export_steps,
    exported,
    fp8_mode,
    idle_notes,
    remade_names,
    shards_of,
    source_fp8,
)
from mtpconv.convert.hf_to_mcore import table_for
from mtpconv.convert.journal import Done
from mtpconv.convert.needs import TO_HF, files_need, memory_need, names_need
from mtpconv.convert.outcome import Outcome
from mtpconv.convert.output import Output
from mtpconv.convert.remarks import Since, carried_notes, file_notes, resume_notes, since
from mtpconv.convert.shards import Shard, shard_is_whole, write_shards
from mtpconv.convert.snapshot import Snapshot, files_of
from mtpconv.convert.target import check_space, check_target
from mtpconv.convert.verify import require_accepted, require_crcs, verify_digests
from mtpconv.convert.whole import (
    carried_beside,
    require_same_inventory,
    require_two_towers,
    require_whole,
)
from mtpconv.errors import RefusedError, UnreadableError, UsageError
from mtpconv.mapping.check import check_plan
from mtpconv.mapping.layouts import detect_layout
from mtpconv.mapping.plan import make_plan
from mtpconv.progress import Progress
from mtpconv.ranks import Ranks, deal
from mtpconv.store.arithmetic import Undone
from mtpconv.store.checkpoint import require_sound
from mtpconv.store.content import Pieced
from mtpconv.store.crc_check import CrcCheck
from mtpconv.store.crew import Crew
from mtpconv.store.dist_folder import COMMON, CONFIG, METADATA, find_folder
from mtpconv.store.fp8_tensors import SCALE, quantisation
from mtpconv.store.hf import open_hf
from mtpconv.store.hf_index import INDEX_NAME
from mtpconv.store.hf_writer import index_bytes, make_headers
from mtpconv.store.legacy import MegatronCheckpoint, open_megatron
from mtpconv.store.legacy_file import NAME as RANK_FILE
from mtpconv.store.places import places_read
from mtpconv.store.safetensors_header import ShardHeader
from mtpconv.store.source import (
    HfSource,
    copy_file,
    find_source,
    has_source,
    read_source,
    write_bytes,
)
from mtpconv.view import HfView

if TYPE_CHECKING:  # the network is imported by whoever needs it
    from mtpconv.store.afar_dist import AfarMegatron

#: Small files that say what a torch_dist folder holds.
DESCRIPTIONS = frozenset({METADATA, CONFIG, COMMON})


def checkpoint_files(source: Path) -> list[Path]:
    """The files of a Megatron checkpoint that are read.

    Raises: UnreadableError if there is none; UsageError if it is an HF folder.
    """
    try:
        folder, _, _ = find_folder(source)
    except UnreadableError:
        if any(p.name.endswith((".safetensors", INDEX_NAME)) for p in files_of(source)):
            raise UsageError(
                f"{source}: is a HuggingFace folder; hf2mcore converts it to Megatron"
            ) from None
        raise
    wanted = [p for p in files_of(folder) if p.suffix == ".distcp" or p.name in DESCRIPTIONS]
    return [*wanted, *sorted(folder.glob(f"mp_rank_*/{RANK_FILE}"))]


@dataclass(frozen=True)
class McoreToHf:
    """An export that was planned and found possible; nothing is written yet."""

    view: HfView
    #: the view with arithmetic undone
    undone: HfView | Undone
    #: what is written: that, or its weights seen as the source's FP8
    content: Pieced
    source: HfSource
    #: names of weights that the source has in FP8
    fp8: frozenset[str]
    mode: Fp8
    #: the config to write, None for the source's own bytes
    config: dict[str, Any] | None
    #: shards to write, by file name
    headers: dict[str, ShardHeader]
    drop_mtp: bool
    #: Megatron's tensors of a vision tower that was frozen, left out
    vision: tuple[str, ...]
    #: True if shards and index are those of the source, byte for byte
    same_files: bool

    @property
    def names(self) -> tuple[str, ...]:
        """HF names that are written."""
        return tuple(n for h in self.headers.values() for n in h.tensors)

    @property
    def disk(self) -> int:
        """Disk that the target needs, in bytes."""
        others = files_need(self.source.files_root, self.source.files) + names_need(self.names)
        return sum(h.size for h in self.headers.values()) + others + (1 << 20)


def plan_mcore2hf(
    source: Path,
    *,
    like: Path | None = None,
    mapping: Path | None = None,
    drop_mtp: bool = False,
    frozen_vision: bool = False,
    fp8: str = "keep",
    opened: AfarMegatron | None = None,
) -> McoreToHf:
    """Open and check a torch_dist checkpoint; everything that can be refused is refused here.

    `frozen_vision`, `opened`: as `mcore2hf`.

    Raises: UnreadableError, RefusedError, UsageError, UnsupportedError.
    """
    mode = fp8_mode(fp8)
    checkpoint = open_megatron(source) if opened is None else opened.checkpoint
    require_sound(checkpoint)
    if like is not None:
        origin: HfSource | None = read_source(like)
    else:
        origin = find_source(source) if opened is None else opened.source
    if origin is None:
        raise UsageError(
            f"{source}: has no hf_source folder beside it (Megatron saved it later?); "
            "pass the original HuggingFace folder, or the saved one, with --like"
        )
    table = table_for(origin.config, mapping)
    present = origin.names or None
    mtp: frozenset[str] = frozenset()
    if drop_mtp:
        mtp = droppable(origin.config, table, origin.names, str(origin.path))
    plan = make_plan(origin.config, table, present, depths=0 if drop_mtp else None)
    layout = detect_layout(plan, checkpoint.tensors.keys())
    faults = check_plan(plan, layout)
    if faults:
        raise RefusedError(str(faults[0]))
    view = HfView(checkpoint, plan, layout, origin.carried)
    require_sound(view)
    quantised = source_fp8(origin, table) if origin.headers or mode != "bf16" else {}
    back = undone(view, *originals_of(origin))
    content = exported(back, quantised, origin, mode, source)
    stored = {n: spec for h in origin.headers.values() for n, spec in h.tensors.items()}
    if mode == "bf16":
        stored = bf16_inventory(stored, quantised)
    gone = [n for n in stored if n.removesuffix(SCALE) in mtp]
    left = {n: spec for n, spec in stored.items() if n not in set(gone)}
    vision = require_two_towers(view, source) if frozen_vision else ()
    require_whole(view, source, drop_mtp=drop_mtp, left_out=frozenset(vision))
    if stored:
        headers = shards_of(origin.headers, left)
        require_same_inventory(view, content, headers, origin, source, gone)
    else:
        headers = make_headers(origin.path, {n: view.tensors[n] for n in plan.hf})
    config = changed_config(
        origin.config, drop_mtp=drop_mtp, bf16=mode == "bf16", dropped=gone, left=left
    )
    same = bool(stored) and headers == dict(origin.headers)
    return McoreToHf(
        view,
        back,
        content,
        origin,
        frozenset(quantised),
        mode,
        config,
        headers,
        drop_mtp,
        vision,
        same,
    )


def mcore2hf(
    source: Path,
    target: Path,
    *,
    like: Path | None = None,
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

    `opened` is `source` opened already: a remote checkpoint, whose mirror `source` is.

    Law: with unchanged weights every file has the bytes of the original.

    Raises: UnreadableError, RefusedError, UsageError, UnsupportedError, WriteError.
    """
    started = time.monotonic()
    progress, ranks = progress or Progress(), ranks or Ranks()
    check_target(target, places_read(source, like, mapping, links=False), overwrite=overwrite)
    snapshot = Snapshot(checkpoint_files(source))
    work = plan_mcore2hf(
        source, like=like, mapping=mapping, drop_mtp=drop_mtp, frozen_vision=frozen_vision,
        fp8=fp8, opened=opened,
    )  # fmt: skip
    beside = Snapshot(work.source.files_read)
    memory = memory_need(len(work.names), TO_HF, jobs, ranks) + (opened.memory if opened else 0)
    reads = places_read(source, like, work.source.path, mapping)
    if dry_run:
        check_target(target, reads, overwrite=overwrite)
        check_space(target, work.disk)
        return outcome_of(work, source, target, memory=memory, dry_run=True)
    stored = work.view.checkpoint
    crcs = CrcCheck(stored.sealed() if verify and isinstance(stored, MegatronCheckpoint) else {})
    with (
        Output(
            target, reads, overwrite=overwrite, need=work.disk, resume=resume, ranks=ranks
        ) as out,
        Crew(jobs, on_read=crcs.saw) as crew,
    ):
        mine = _write_shards(work, out, snapshot.digest, crew, progress, digest=verify)
        digests = {n: d for found in ranks.gather("written", mine) for n, d in found.items()}
        if verify:
            require_crcs(crcs, ranks, crew.jobs)
        if ranks.is_first:
            write_rest(work, out.folder)
        ranks.gather("described", None)
        if verify:
            specs = {n: work.content.tensors[n] for n in work.names}
            written = open_hf(out.folder, expected=work.headers)
            require_sound(written)
            require_accepted([h.file for h in written.shards.values()])
            verify_digests(written, specs, digests, progress, ranks=ranks, jobs=crew.jobs)
        snapshot.require_unchanged()
        beside.require_unchanged()
        if opened is not None:  # the snapshots are of its mirror
            opened.require_unchanged()
        taken_over = sum(ranks.gather("verified", out.taken_over))
        if ranks.is_first:
            out.commit()
    changes = None
    if work.source.manifest and verify:
        changes = since(
            work.source.manifest, digests, work.content.tensors, work.view.plan,
            computed_names(work.undone), remade_names(work.content),
        )  # fmt: skip
    return outcome_of(
        work, source, target, memory=memory, seconds=time.monotonic() - started, verified=verify,
        changes=changes, unsealed=crcs.unsealed, taken_over=taken_over, earlier=out.earlier,
    )  # fmt: skip


def write_rest(work: McoreToHf, folder: Path) -> None:
    """Every file that is no shard; the index comes last."""
    index = work.source.index_name
    if not work.source.headers and len(work.headers) > 1:
        index = INDEX_NAME
    for name in work.source.files:
        if name not in ("config.json", index):
            copy_file(work.source.files_root / name, folder / name)
    if work.config is not None:
        write_bytes(folder / "config.json", config_bytes(work.config))
    else:
        copy_file(work.source.files_root / "config.json", folder / "config.json")
    if index is not None:
        # Without it loaders do not take the folder for a model.
        if work.same_files and work.source.index_name:
            copy_file(work.source.files_root / index, folder / index)
        else:
            write_bytes(folder / index, index_bytes(work.headers))


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
        if found is not None and shard_is_whole(found[0], header, found[1].digests, crew):
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
        digests.update(shard.digests)
        progress.advance(shard.header.data_start)

    write_shards(todo, work.content, crew, progress.advance, done, digest=digest)
    return digests


def outcome_of(
    work: McoreToHf,
    source: Path,
    target: Path | str,
    *,
    memory: int,
    seconds: float = 0.0,
    verified: bool = False,
    dry_run: bool = False,
    changes: Since | None = None,
    unsealed: int = 0,
    taken_over: int = 0,
    earlier: int = 0,
) -> Outcome:
    """What was done, or with `dry_run` would be."""
    plan = work.view.plan
    names = work.names
    notes = [*file_notes(work.source.others), *resume_notes(earlier, taken_over)]
    if not quantisation(work.source.config):
        notes += idle_notes(work.mode, work.fp8, work.source.path)
    if work.drop_mtp:
        notes.append("MTP was left out as asked; the config now says 0")
    if work.vision:
        notes.append(
            f"warning: {len(work.vision)} tensors of Megatron's vision tower were left out as "
            f"asked; the {len(carried_beside(work.view))} written are those of before training"
        )
    stored = work.view.checkpoint
    if isinstance(stored, MegatronCheckpoint) and stored.ignored:
        notes.append(f"optimizer state ({stored.ignored} entries) has no place in HF: left out")
    notes += work.view.remarks(ours=has_source(work.view.path))
    if not work.same_files:
        notes.append("shards were laid out anew; file hashes differ from the original's")
    if unsealed:
        notes.append(
            f"{unsealed} records were saved without a CRC-32 of their own: flipped bits in them "
            "cannot be seen"
        )
    if changes and changes.stale:
        notes.append(changes.stale)
    notes += carried_notes(work.source.carried, work.view.plan, names, changes)
    return Outcome(
        direction="mcore2hf",
        source=source,
        target=target,
        model_type=plan.geometry.model_type,
        tensors=len(names),
        nbytes=sum(work.content.tensors[n].nbytes for n in names),
        mtp_depths=0 if work.drop_mtp else plan.geometry.depths,
        mtp_tensors=sum(is_mtp_name(plan, n.removesuffix(SCALE)) for n in names),
        layout=work.view.dialect,
        disk=work.disk,
        memory=memory,
        seconds=seconds,
        verified=verified,
        dry_run=dry_run,
        unchanged=changes.unchanged if changes else None,
        unchanged_mtp=changes.unchanged_mtp if changes else None,
        not_compared=changes.not_compared if changes else 0,
        not_compared_mtp=changes.not_compared_mtp if changes else 0,
        changed=changes.changed if changes else (),
        taken_over=taken_over,
        left_behind=tuple(work.source.others.left),
        notes=tuple(notes),
        steps=(
            *export_steps(work.content, work.fp8.intersection(names)),
            *export_arithmetic(plan, work.undone),
        ),
    )
