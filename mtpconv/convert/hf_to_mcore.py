"""HF folder -> torch_dist checkpoint: plan first, then stream, then read back and compare."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mtpconv.convert import identity
from mtpconv.convert.agreement import dtype_notes
from mtpconv.convert.arithmetic import import_arithmetic, require_restored, undone
from mtpconv.convert.configs import changed_config, config_bytes
from mtpconv.convert.fp8 import fp8_weights, idle_notes, import_steps, shards_of, write_kept
from mtpconv.convert.hf_to_mcore_plan import HfToMcore, plan_hf2mcore
from mtpconv.convert.needs import TO_MCORE, memory_need
from mtpconv.convert.outcome import Outcome
from mtpconv.convert.output import Output
from mtpconv.convert.record_files import RecordFiles
from mtpconv.convert.remarks import file_notes, resume_notes
from mtpconv.convert.target import check_space, check_target
from mtpconv.convert.verify import require_zeros, verify_digests
from mtpconv.errors import UsageError
from mtpconv.mapping.plan import CopyStep
from mtpconv.progress import Progress
from mtpconv.ranges import compress
from mtpconv.ranks import Ranks
from mtpconv.store.content import Files, blocks
from mtpconv.store.crew import Crew
from mtpconv.store.digest import digest_tensors
from mtpconv.store.dist_folder import MAX_ITERATION, Iteration, folder_name
from mtpconv.store.dist_metadata_writer import write_common, write_config, write_tracker
from mtpconv.store.durable import write_bytes
from mtpconv.store.hf import open_hf
from mtpconv.store.hf_writer import index_bytes, make_header, write_shard
from mtpconv.store.manifest import Manifest
from mtpconv.store.places import places_read
from mtpconv.store.snapshot import Snapshot, files_below
from mtpconv.store.source import FOLDER, carried_folder, quantised_folder, write_source
from mtpconv.store.source_seal import seal_source
from mtpconv.store.torch_dist import open_torch_dist
from mtpconv.view import HfView

if TYPE_CHECKING:  # the network is imported by whoever needs it
    from mtpconv.store.afar import AfarCheckpoint


def hf2mcore(
    source: Path,
    target: Path,
    *,
    mapping: Path | None = None,
    layout: str | None = None,
    iteration: int | None = None,
    drop_mtp: bool = False,
    fp8: str = "keep",
    pad_vocab: int = 1,
    overwrite: bool = False,
    verify: bool = True,
    dry_run: bool = False,
    jobs: int | None = None,
    resume: bool = False,
    ranks: Ranks | None = None,
    opened: AfarCheckpoint | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Convert an HF folder to a torch_dist checkpoint.

    With several `ranks` all call this with the same arguments; each does its share.

    Law: every HF tensor is in exactly one Megatron tensor, carried beside, or (only with
    `drop_mtp`) named as dropped; the bytes read back are those that were read. The bytes
    written do not depend on `jobs`. Block FP8 becomes BF16; `fp8` says whether codes and scales
    travel beside (`keep`) or not (`requantise`: an export makes new ones, `bf16`: it writes BF16).
    Embedding and LM head get rows of zeros up to a multiple of `pad_vocab`, which exports cut.
    `opened` is `source` opened already: a remote folder, whose mirror `source` is.

    Raises: UnreadableError, RefusedError, UsageError, UnsupportedError, WriteError.
    """
    started = time.monotonic()
    progress, ranks = progress or Progress(), ranks or Ranks()
    if iteration is not None and not 0 <= iteration <= MAX_ITERATION:
        raise UsageError(f"--iteration {iteration}: must be from 0 to {MAX_ITERATION}")
    check_target(target, places_read(source, mapping, links=False), overwrite=overwrite)
    snapshot = Snapshot(files_below(source))
    work = plan_hf2mcore(
        source,
        mapping=mapping,
        layout=layout,
        drop_mtp=drop_mtp,
        fp8=fp8,
        pad_vocab=pad_vocab,
        opened=opened,
    )
    memory = memory_need(len(work.hf.tensors), TO_MCORE, jobs, ranks)
    memory += opened.memory if opened else 0
    reads = places_read(source, mapping)
    if dry_run:
        check_target(target, reads, overwrite=overwrite)
        check_space(target, work.disk)
        return _outcome(work, source, target, memory=memory, dry_run=True)

    def about() -> str:
        # Each rank has a mirror of its own, and each mirror times of its own.
        state = snapshot.digest if opened is None else ""
        names = (*work.names, *work.carried)
        return identity.of_plan(work.plan, work.layout, state, fp8, str(iteration), *names)

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
        Crew(jobs) as crew,
    ):
        saved_as: Iteration = "release" if iteration is None else iteration
        folder = out.folder / folder_name(saved_as)
        folder.mkdir(exist_ok=True)
        known = snapshot.strict_digest if opened is None else snapshot.digest
        writing = RecordFiles(work.changed, work.plan, work.layout, known)
        digests = writing.write(folder, out, crew, progress, keep=verify)
        saved = out.folder / FOLDER
        beside: tuple[str, ...] = ()
        if ranks.is_first:
            rest = [*(c.hf for c in work.plan.copies), *work.carried, *work.plan.arithmetic]
            digests.update(digest_tensors(work.content, rest, workers=crew.jobs))
            beside = _carried(work, digests)
            _write_saved(work, saved, beside, digests, crew, progress, verify=verify)
            write_common(folder, _common(work, iteration))
            write_config(folder)
        digests, beside = ranks.gather("described", (digests, beside))[0]
        if verify:
            carried = open_hf(carried_folder(saved)) if beside else None
            view = HfView(open_torch_dist(folder), work.plan, work.layout, carried)
            back = undone(view, carried)
            wanted = {n: work.content.tensors[n] for n in (*work.names, *work.carried)}
            verify_digests(back, wanted, digests, progress, ranks=ranks, jobs=crew.jobs)
            require_restored(back)
            require_zeros(view)
        snapshot.require_unchanged()
        if opened is not None:  # the snapshot is of its mirror
            opened.require_unchanged()
        taken_over = sum(ranks.gather("verified", out.taken_over))
        if ranks.is_first:
            write_tracker(out.folder, saved_as)
            out.commit()
    return _outcome(
        work, source, target, memory=memory, carried=tuple(beside), verified=verify,
        seconds=time.monotonic() - started, taken_over=taken_over, earlier=out.earlier,
    )  # fmt: skip


def _carried(work: HfToMcore, digests: Mapping[str, str]) -> tuple[str, ...]:
    """Names kept beside.

    Those the table carries, copies that differ, and originals of what Megatron holds changed.
    """

    def differs(copy: CopyStep) -> bool:
        return digests[copy.hf] != digests[copy.of]

    copies = (c.hf for c in work.plan.copies if differs(c))
    return (*work.carried, *copies, *work.plan.arithmetic)


def _write_saved(
    work: HfToMcore,
    saved: Path,
    beside: tuple[str, ...],
    digests: Mapping[str, str],
    crew: Crew,
    progress: Progress,
    *,
    verify: bool,
) -> None:
    hf, content, stored = work.hf, work.content, work.stored
    known = {**digests, **_keep_fp8(work, quantised_folder(saved), crew, progress, verify=verify)}
    described = {n: s for n, s in stored.items() if n in known}
    config = changed_config(
        hf.config or {}, drop_mtp=work.unpromised, bf16=work.fp8 == "bf16",
        dropped=work.dropped, left=stored,
    )  # fmt: skip
    shards = shards_of(hf.shards, stored)
    write_source(hf, saved, shards, work.others, work.own_table)
    if config is not None:
        write_bytes(saved / "files" / "config.json", config_bytes(config))
    if hf.index_name is not None and dict(shards) != dict(hf.shards):
        write_bytes(saved / "files" / hf.index_name, index_bytes(shards))
    if beside:
        folder = carried_folder(saved)
        folder.mkdir()
        path = folder / "model.safetensors"
        header = make_header(path, {n: content.tensors[n] for n in beside}, {"format": "pt"})
        with Files() as files:
            write_shard(path, header, lambda n: blocks(content, n, files))
    seal_source(
        saved,
        Manifest(hf.path, "hf", described, {n: known[n] for n in described}, config or hf.config),
    )


def _keep_fp8(
    work: HfToMcore, folder: Path, crew: Crew, progress: Progress, *, verify: bool
) -> dict[str, str]:
    """Digests of codes and scales, which are written to `folder` if they shall travel."""
    kept = work.kept
    if not kept or work.fp8 == "bf16":
        return {}
    progress.begin("keep FP8", sum(spec.nbytes for spec in kept.values()))
    if work.fp8 == "requantise":
        return dict(digest_tensors(work.hf, list(kept), progress.advance, crew.jobs))
    folder.parent.mkdir(exist_ok=True)
    digests = write_kept(work.hf, kept, folder, crew, progress.advance)
    if verify:
        verify_digests(open_hf(folder), kept, digests, progress, jobs=crew.jobs)
    return digests


def _common(work: HfToMcore, iteration: int | None) -> dict[str, object]:
    return {
        "args": work.args, "checkpoint_version": 3.0, "iteration": iteration or 0,
    }  # fmt: skip


def _outcome(
    work: HfToMcore,
    source: Path,
    target: Path,
    *,
    memory: int,
    carried: tuple[str, ...] = (),
    seconds: float = 0.0,
    verified: bool = False,
    dry_run: bool = False,
    taken_over: int = 0,
    earlier: int = 0,
) -> Outcome:
    notes = [f"Megatron cannot be told: {gap}" for gap in work.gaps]
    notes += file_notes(work.others)
    notes += resume_notes(earlier, taken_over)
    notes += idle_notes(work.fp8, fp8_weights(work.content).keys(), source)
    rows, padded = work.args.get("vocab_size"), work.args.get("padded_vocab_size")
    if padded != rows:
        notes.append(
            f"embedding and LM head have {padded:,} rows for {rows:,} tokens; those beyond are "
            "zeros, exports cut them"
        )
    if work.plan.table.needs:
        notes.append(f"to load it, Megatron-Core needs {work.plan.table.needs}")
    notes += dtype_notes(work.plan, work.content.tensors)
    discarded = work.discarded
    for reason in dict.fromkeys(discarded.values()):
        names = [n for n, why in discarded.items() if why == reason]
        notes.append(f"{len(names)} tensors discarded ({reason}): {compress(names, 3)}")
    if work.dropped:
        notes.append(f"{len(work.dropped)} MTP tensors dropped as asked; the config now says 0")
    elif work.unpromised:
        notes.append(
            "there were no MTP tensors to drop; the config, which promised them, now says 0"
        )
    homeless = sum(n not in work.plan.arithmetic for n in carried)
    if homeless:
        notes.append(f"{homeless} tensors have no place in Megatron and are carried beside")
    return Outcome(
        direction="hf2mcore",
        source=source,
        target=target,
        model_type=work.plan.geometry.model_type,
        tensors=len(work.names),
        nbytes=sum(work.content.tensors[n].nbytes for n in work.names),
        mtp_depths=work.plan.geometry.depths,
        mtp_tensors=sum(r.kind == "mtp" for r in work.plan.regions.values()),
        layout=work.layout.name,
        disk=work.disk,
        memory=memory,
        seconds=seconds,
        verified=verified,
        dry_run=dry_run,
        carried=carried,
        taken_over=taken_over,
        left_behind=tuple(work.others.left),
        notes=tuple(notes),
        steps=(*import_steps(work.content, work.fp8, work.dropped), *import_arithmetic(work.plan)),
    )
