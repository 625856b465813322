"""HF folder -> torch_dist checkpoint: plan first, then stream, then read back and compare."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpconv.convert.agreement import agreed_plan
from mtpconv.convert.arithmetic import applied, import_arithmetic, require_restored, undone
from mtpconv.convert.configs import changed_config, config_bytes
from mtpconv.convert.fp8 import (
    Fp8,
    as_bf16,
    bf16_inventory,
    fp8_mode,
    fp8_weights,
    idle_notes,
    import_steps,
    shards_of,
    write_kept,
)
from mtpconv.convert.needs import TO_MCORE, files_need, memory_need, names_need
from mtpconv.convert.outcome import Outcome
from mtpconv.convert.output import Output
from mtpconv.convert.record_files import RecordFiles
from mtpconv.convert.remarks import file_notes, resume_notes
from mtpconv.convert.snapshot import Snapshot, files_below
from mtpconv.convert.target import check_space, check_target
from mtpconv.convert.verify import verify_digests
from mtpconv.errors import RefusedError, UnreadableError, UnsupportedError, UsageError
from mtpconv.mapping.check import discard_reason, is_carried
from mtpconv.mapping.layouts import Layout, first_hole, layout_of, training_layout
from mtpconv.mapping.plan import CopyStep, Plan, padded_plan
from mtpconv.mapping.table import Table, find_table, read_table
from mtpconv.megatron_args import megatron_args
from mtpconv.progress import Progress
from mtpconv.ranges import compress
from mtpconv.ranks import Ranks
from mtpconv.store.checkpoint import require_sound
from mtpconv.store.content import Files, blocks
from mtpconv.store.crew import Crew
from mtpconv.store.dequant import HfTensors
from mtpconv.store.digest import digest_tensors
from mtpconv.store.dist_folder import is_torch_dist
from mtpconv.store.dist_metadata_writer import (
    write_common,
    write_config,
    write_tracker,
)
from mtpconv.store.fp8_tensors import SCALE
from mtpconv.store.hf import HfCheckpoint, open_hf
from mtpconv.store.hf_writer import index_bytes, make_header, write_shard
from mtpconv.store.manifest import Manifest
from mtpconv.store.other_files import OtherFiles
from mtpconv.store.places import places_read
from mtpconv.store.source import (
    FOLDER,
    carried_folder,
    files_beside,
    quantised_folder,
    write_bytes,
    write_source,
)
from mtpconv.store.torch_dist import open_torch_dist
from mtpconv.tensors import TensorSpec
from mtpconv.view import HfView

if TYPE_CHECKING:  # the network is imported by whoever needs it
    from mtpconv.store.afar import AfarCheckpoint

#: Units: bytes. A record's zip overhead and its metadata entry, measured 1.1 KB and 0.4 KB.
RECORD_OVERHEAD = 2048


@dataclass(frozen=True)
class HfToMcore:
    """A conversion that was planned and found possible; nothing is written yet."""

    hf: HfCheckpoint
    #: the same tensors as Megatron gets them: FP8 weights as BF16, no scales
    content: HfTensors
    #: these after their arithmetic
    changed: HfTensors
    plan: Plan
    layout: Layout
    #: HF names converted, in plan order
    names: tuple[str, ...]
    #: MTP names left out because of --drop-mtp
    dropped: tuple[str, ...]
    #: names the table carries beside
    carried: tuple[str, ...]
    #: Megatron's arguments for the model, for `common.pt`
    args: Mapping[str, Any]
    #: what Megatron cannot be told about the model
    gaps: tuple[str, ...]
    #: files that travel, and those that stay behind
    others: OtherFiles
    fp8: Fp8 = "keep"

    @property
    def nbytes(self) -> int:
        """Payload bytes that go into the Megatron checkpoint."""
        copies = sum(self.content.tensors[c.hf].nbytes for c in self.plan.copies)
        return sum(self.content.tensors[n].nbytes for n in self.names) - copies

    @property
    def discarded(self) -> dict[str, str]:
        """Names that the table leaves out on purpose, each with its reason."""
        found = {}
        for name in self.hf.tensors:
            if name not in self.plan.hf and name not in self.dropped:
                reason = discard_reason(self.plan.table, name)
                if reason is not None:
                    found[name] = reason
        return found

    @property
    def kept(self) -> dict[str, TensorSpec]:
        """FP8 codes and scales, which travel beside."""
        gone = set(self.dropped)
        weights = [q for n, q in fp8_weights(self.content).items() if n not in gone]
        return {n: s for q in weights for n, s in q.specs.items()}

    @property
    def stored(self) -> dict[str, TensorSpec]:
        """The HF tensors that hf_source describes."""
        gone = {*self.dropped, *(n + SCALE for n in self.dropped), *self.discarded}
        left = {n: s for n, s in self.hf.tensors.items() if n not in gone}
        return bf16_inventory(left, fp8_weights(self.content)) if self.fp8 == "bf16" else left

    @property
    def disk(self) -> int:
        """Disk that the target needs, in bytes, rounded up."""
        carried = sum(
            self.content.tensors[n].nbytes for n in (*self.carried, *self.plan.arithmetic)
        )
        copies = sum(self.content.tensors[c.hf].nbytes for c in self.plan.copies)
        if self.fp8 == "keep":
            carried += sum(spec.nbytes for spec in self.kept.values())
        carried += files_need(self.hf.path, self.others.travel) + names_need(self.hf.tensors)
        padding = sum(
            self.content.tensors[s.hf[0]].nbytes * s.shape[0] // max(s.specs[0].shape[0], 1)
            - self.content.tensors[s.hf[0]].nbytes
            for s in self.plan.steps
            if s.op.name == "pad_rows"
        )
        records = 2 * len(self.plan.steps)  # tensors, and an _extra_state for most of them
        return self.nbytes + carried + copies + padding + RECORD_OVERHEAD * records + (1 << 20)


def plan_hf2mcore(
    source: Path,
    *,
    mapping: Path | None = None,
    layout: str | None = None,
    drop_mtp: bool = False,
    fp8: str = "keep",
    pad_vocab: int = 1,
    opened: HfCheckpoint | None = None,
) -> HfToMcore:
    """Open and check an HF folder; everything that can be refused is refused here.

    `opened` is `source` opened already, as remote folders are.

    Raises: UnreadableError, RefusedError, UsageError, UnsupportedError.
    """
    mode = fp8_mode(fp8)
    hf = opened or _open(source)
    require_sound(hf)
    if hf.config is None:
        raise UnreadableError(f"{source}: has no config.json; it says what the model is")
    table = table_for(hf.config, mapping)
    if not table.converts:
        raise UnsupportedError(
            f"{source}: {table.model_type} is not converted: Megatron-Core lacks "
            f"{table.needs or 'parts of it'}; inventory and audit work"
        )
    content = as_bf16(hf, table)
    tensors = content.tensors
    chosen: list[Layout] = []

    def choose(plan: Plan) -> Layout:
        chosen.append(layout_for(plan, layout))
        return chosen[-1]

    plan, dropped = agreed_plan(
        hf.config, table, tensors, choose, where=str(source), drop_mtp=drop_mtp
    )
    for step in plan.steps:
        kinds = {tensors[n].dtype for n in step.hf}
        if len(kinds) > 1:
            raise RefusedError(
                f"{source}: {' and '.join(step.hf)} become one Megatron tensor "
                f"but have dtypes {' and '.join(sorted(kinds))}"
            )
    gone = set(dropped)
    gaps: list[str] = []
    plan = padded_plan(plan, pad_vocab)
    args = megatron_args(plan.geometry, _rows(plan), gaps)
    return HfToMcore(
        hf,
        content,
        applied(content, plan),
        plan,
        layout_for(plan, layout) if drop_mtp else chosen[-1],
        tuple(n for n in plan.hf if n not in gone),
        dropped,
        tuple(n for n in tensors if n not in plan.hf and is_carried(table, n)),
        args,
        tuple(gaps),
        files_beside(hf),
        mode,
    )


def _open(source: Path) -> HfCheckpoint:
    try:
        return open_hf(source)
    except UnreadableError:
        if is_torch_dist(source):
            raise UsageError(
                f"{source}: is a Megatron checkpoint; mcore2hf converts it to HuggingFace"
            ) from None
        raise


def _rows(plan: Plan) -> int | None:
    """Rows of embedding and LM head, None if no table row may be padded."""
    return next((s.shape[0] for s in plan.steps if s.op.name == "pad_rows"), None)


def table_for(config: Mapping[str, object], mapping: Path | None) -> Table:
    """The table that the user named, else the shipped one of the config's model_type."""
    return read_table(mapping) if mapping is not None else find_table(str(config.get("model_type")))


def layout_for(plan: Plan, named: str | None) -> Layout:
    """The layout to write: `training` (default), `local`, dialect names, joined by commas."""
    training = [d.name for d in training_layout(plan).dialects]
    local = [plan.table.local_spec] if plan.table.local_spec else []
    short = {"training": training, "local": [*training, *local], "canonical": []}
    layout = layout_of(
        n for word in (named or "training").split(",") for n in short.get(word, [word])
    )
    for dialect in layout.dialects:
        if dialect.read_only:
            raise UsageError(f"--layout {named}: {dialect.name} is read, never written")
        if dialect.name.startswith("local_spec") and dialect.name not in local:
            raise UsageError(
                f"--layout {named}: {dialect.name} is not how {plan.table.model_type} is spelled; "
                f"its local spec is {', '.join(local) or 'not known'}"
            )
    hole = first_hole(plan, layout)
    if hole is not None:
        raise UsageError(
            f"--layout {named}: {hole} would have holes, as not all layers are alike; "
            "leave stacked_layers out"
        )
    return layout


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
    with (
        Output(
            target, reads, overwrite=overwrite, need=work.disk, resume=resume, ranks=ranks
        ) as out,
        Crew(jobs) as crew,
    ):
        folder = out.folder / ("release" if iteration is None else f"iter_{iteration:07d}")
        folder.mkdir(exist_ok=True)
        writing = RecordFiles(work.changed, work.plan, work.layout, snapshot.digest)
        digests = writing.write(folder, out, crew, progress)
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
        snapshot.require_unchanged()
        if opened is not None:  # the snapshot is of its mirror
            opened.require_unchanged()
        taken_over = sum(ranks.gather("verified", out.taken_over))
        if ranks.is_first:
            write_tracker(out.folder, "release" if iteration is None else iteration)
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
        hf.config or {}, drop_mtp=bool(work.dropped), bf16=work.fp8 == "bf16",
        dropped=work.dropped, left=stored,
    )  # fmt: skip
    shards = shards_of(hf.shards, stored)
    manifest = Manifest(
        hf.path, "hf", described, {n: known[n] for n in described}, config or hf.config
    )
    write_source(hf, saved, manifest, shards, work.others)
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
    if work.plan.table.needs:
        notes.append(f"to load it, Megatron-Core needs {work.plan.table.needs}")
    discarded = work.discarded
    for reason in dict.fromkeys(discarded.values()):
        names = [n for n, why in discarded.items() if why == reason]
        notes.append(f"{len(names)} tensors discarded ({reason}): {compress(names, 3)}")
    if work.dropped:
        notes.append(f"{len(work.dropped)} MTP tensors dropped as asked; the config now says 0")
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
