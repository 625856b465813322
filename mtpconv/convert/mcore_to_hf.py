"""torch_dist checkpoint -> HF folder: the same files if the weights are unchanged."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from mtpconv import __version__
from mtpconv.convert.agreement import DROP_HINT, config_without_mtp, is_mtp_name
from mtpconv.convert.hf_to_mcore import BASE_MEMORY, MEMORY_PER_TENSOR, table_for
from mtpconv.convert.journal import Done
from mtpconv.convert.outcome import Outcome
from mtpconv.convert.output import Output, check_space, check_target
from mtpconv.convert.ranks import Ranks, deal
from mtpconv.convert.shards import shard_is_whole, write_shard
from mtpconv.convert.snapshot import Snapshot, files_of
from mtpconv.convert.verify import require_accepted, verify_digests
from mtpconv.errors import RefusedError, UsageError
from mtpconv.mapping.check import check_plan, is_carried
from mtpconv.mapping.plan import make_plan
from mtpconv.progress import Progress
from mtpconv.ranges import compress
from mtpconv.store.checkpoint import require_sound
from mtpconv.store.crew import Crew
from mtpconv.store.dist_folder import COMMON, CONFIG, METADATA, find_folder
from mtpconv.store.hf import open_hf
from mtpconv.store.hf_writer import index_bytes, make_headers, without
from mtpconv.store.safetensors_header import ShardHeader
from mtpconv.store.source import HfSource, copy_file, find_source, read_source, write_bytes
from mtpconv.store.torch_dist import open_torch_dist
from mtpconv.view import HfView, describe_missing

#: Small files that say what a torch_dist folder holds.
DESCRIPTIONS = frozenset({METADATA, CONFIG, COMMON})


def checkpoint_files(source: Path) -> list[Path]:
    """The files of a torch_dist checkpoint that are read."""
    folder, _, _ = find_folder(source)
    return [p for p in files_of(folder) if p.suffix == ".distcp" or p.name in DESCRIPTIONS]


@dataclass(frozen=True)
class McoreToHf:
    """An export that was planned and found possible; nothing is written yet."""

    view: HfView
    source: HfSource
    #: shards to write, by file name
    headers: dict[str, ShardHeader]
    drop_mtp: bool
    #: True if shards and index are those of the source, byte for byte
    same_files: bool

    @property
    def names(self) -> tuple[str, ...]:
        """HF names that are written."""
        return tuple(n for h in self.headers.values() for n in h.tensors)

    @property
    def disk(self) -> int:
        """Disk that the target needs, in bytes."""
        others = sum((self.source.files_root / f).stat().st_size for f in self.source.files)
        return sum(h.size for h in self.headers.values()) + others + (1 << 20)


def plan_mcore2hf(
    source: Path,
    *,
    like: Path | None = None,
    mapping: Path | None = None,
    drop_mtp: bool = False,
) -> McoreToHf:
    """Open and check a torch_dist checkpoint; everything that can be refused is refused here.

    Raises: UnreadableError, RefusedError, UsageError, UnsupportedError.
    """
    checkpoint = open_torch_dist(source)
    require_sound(checkpoint)
    origin = read_source(like) if like is not None else find_source(source)
    if origin is None:
        raise UsageError(
            f"{source}: has no hf_source folder beside it (Megatron saved it later?); "
            "pass the original HuggingFace folder, or the saved one, with --like"
        )
    table = table_for(origin.config, mapping)
    present = origin.names or None
    plan = make_plan(origin.config, table, present)
    faults = check_plan(plan)
    if faults:
        raise RefusedError(str(faults[0]))
    view = HfView(checkpoint, plan, carried=origin.carried)
    require_sound(view)
    if drop_mtp:
        return _without_mtp(view, origin)
    _require_whole(view, source)
    headers = dict(origin.headers)
    if headers:
        _require_same_inventory(view, headers, origin, source)
    else:
        headers = make_headers(origin.path, {n: view.tensors[n] for n in plan.hf})
    return McoreToHf(view, origin, headers, False, bool(origin.headers))


def mcore2hf(
    source: Path,
    target: Path,
    *,
    like: Path | None = None,
    mapping: Path | None = None,
    drop_mtp: bool = False,
    overwrite: bool = False,
    verify: bool = True,
    dry_run: bool = False,
    jobs: int | None = None,
    resume: bool = False,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Convert a torch_dist checkpoint to an HF folder.

    With several `ranks` all call this with the same arguments; each writes its shards. Without
    `verify` nobody looks at the bytes, so `unchanged` is not known.

    Law: with unchanged weights every file has the bytes of the original.

    Raises: UnreadableError, RefusedError, UsageError, UnsupportedError, WriteError.
    """
    started = time.monotonic()
    progress, ranks = progress or Progress(), ranks or Ranks()
    snapshot = Snapshot(checkpoint_files(source))
    work = plan_mcore2hf(source, like=like, mapping=mapping, drop_mtp=drop_mtp)
    if dry_run:
        check_target(target, source, overwrite=overwrite)
        check_space(target, work.disk)
        return _outcome(work, source, target, dry_run=True)
    with (
        Output(
            target, source, overwrite=overwrite, need=work.disk, resume=resume, ranks=ranks
        ) as out,
        Crew(jobs) as crew,
    ):
        mine = _write_shards(work, out, snapshot.digest, crew, progress, digest=verify)
        digests = {n: d for found in ranks.gather("written", mine) for n, d in found.items()}
        if ranks.is_first:
            _write_rest(work, out.folder)
        ranks.gather("described", None)
        if verify:
            specs = {n: work.view.tensors[n] for n in work.names}
            written = open_hf(out.folder)
            require_sound(written)
            require_accepted([h.file for h in written.shards.values()])
            verify_digests(written, specs, digests, progress, ranks=ranks, jobs=crew.jobs)
        snapshot.require_unchanged()
        ranks.gather("verified", None)
        if ranks.is_first:
            out.commit()
    known = work.source.manifest
    unchanged = (
        sum(known.digests.get(n) == d for n, d in digests.items()) if known and verify else None
    )
    return _outcome(
        work,
        source,
        target,
        seconds=time.monotonic() - started,
        verified=verify,
        unchanged=unchanged,
    )


def _write_rest(work: McoreToHf, folder: Path) -> None:
    """Every file that is no shard; the index comes last."""
    index = work.source.index_name
    if index is None and len(work.headers) > 1:
        index = "model.safetensors.index.json"
    for name in work.source.files:
        if name not in ("config.json", index):
            copy_file(work.source.files_root / name, folder / name)
    if work.drop_mtp:
        write_bytes(folder / "config.json", config_without_mtp(work.source.config))
    else:
        copy_file(work.source.files_root / "config.json", folder / "config.json")
    if index is not None:
        # Without it loaders do not take the folder for a model.
        if work.same_files and work.source.index_name:
            copy_file(work.source.files_root / index, folder / index)
        else:
            write_bytes(folder / index, index_bytes(work.headers))


def _without_mtp(view: HfView, origin: HfSource) -> McoreToHf:
    plan = view.plan
    trunk = make_plan(plan.geometry.config, plan.table, origin.names or None, depths=0)
    absent = [n for n in trunk.hf if n not in view.tensors]
    if absent:
        raise RefusedError(f"{describe_missing(view, absent)}; the trunk itself is not whole")
    if origin.headers:
        gone = [n for n in origin.names if is_mtp_name(plan, n)]
        headers = {
            name: header
            for name, old in origin.headers.items()
            if (header := without(old, gone)) is not None
        }
    else:
        headers = make_headers(origin.path, {n: view.tensors[n] for n in trunk.hf})
    return McoreToHf(view, origin, headers, True, False)


def _require_whole(view: HfView, source: Path) -> None:
    if view.missing:
        mtp = [n for n in view.missing if is_mtp_name(view.plan, n)]
        hint = f"; the config promises MTP: take a checkpoint that has it, {DROP_HINT}"
        text = describe_missing(view, view.missing)
        raise RefusedError(
            text + (hint if mtp else "; the checkpoint is not whole or of another model")
        )
    if view.unmapped:
        mtp = [k for k in view.unmapped if k.startswith("mtp.")]
        text = f"{source}: M05 {len(view.unmapped)} Megatron tensors are not in the table"
        if mtp and not view.plan.geometry.depths:
            text += ", MTP that config.json does not promise"
        raise RefusedError(
            f"{text}: {compress(view.unmapped, 4)}; nothing is converted, so that nothing is lost"
            + (f"; correct the config given with --like, {DROP_HINT}" if mtp else "")
        )
    padding = list(view.nonzero_padding())
    if padding:
        name, rows = padding[0]
        raise RefusedError(
            f"{source}: {name}: {rows} rows beyond the config's vocabulary are not zero; they were "
            "trained, and cutting them would lose them; correct vocab_size in the config"
        )


def _require_same_inventory(
    view: HfView, headers: dict[str, ShardHeader], origin: HfSource, source: Path
) -> None:
    wanted = {n: spec for h in headers.values() for n, spec in h.tensors.items()}
    table = view.plan.table
    unknown = [n for n in wanted if n not in view.tensors]
    if unknown:
        carried = [n for n in unknown if is_carried(table, n)]
        hint = "; pass the saved hf_source folder with --like, it has them" if carried else ""
        raise RefusedError(
            f"{origin.path}: {len(unknown)} tensors of its shards are not in the checkpoint: "
            f"{compress(unknown, 4)}{hint}"
        )
    extra = [n for n in view.tensors if n not in wanted]
    if extra:
        raise RefusedError(
            f"{source}: {len(extra)} tensors have no place in the shards of {origin.path}: "
            f"{compress(extra, 4)}"
        )
    for name, spec in wanted.items():
        have = view.tensors[name]
        if have != spec:
            raise RefusedError(
                f"{source}: {name} is {have.dtype} {list(have.shape)}, in {origin.path} it is "
                f"{spec.dtype} {list(spec.shape)}; mtpconv does not cast"
            )


def _write_shards(
    work: McoreToHf, out: Output, source: str, crew: Crew, progress: Progress, *, digest: bool
) -> dict[str, str]:
    """Write this rank's shards, or take them over; gives the digests of their tensors."""
    digests: dict[str, str] = {}
    names = deal({n: h.size for n, h in work.headers.items()}, out.ranks)
    progress.begin("convert", sum(work.headers[n].size for n in names))
    for name in names:
        header = work.headers[name]
        holds = blake3(f"{__version__} {source}\n".encode() + header.raw).hexdigest()
        found = out.finished(name, holds) if digest else None
        if found is not None and shard_is_whole(found[0], header, found[1].digests, crew):
            out.take_over(found[0], out.folder, found[1])
            digests.update(found[1].digests)
            progress.advance(header.size, "taken over")
            continue
        progress.advance(header.data_start)
        path = out.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        made = write_shard(path, header, work.view, crew, progress.advance, digest=digest)
        out.journal.add(name, Done(holds, made))
        digests.update(made)
    return digests


def _outcome(
    work: McoreToHf,
    source: Path,
    target: Path,
    *,
    seconds: float = 0.0,
    verified: bool = False,
    dry_run: bool = False,
    unchanged: int | None = None,
) -> Outcome:
    plan = work.view.plan
    names = work.names
    notes = []
    if work.drop_mtp:
        notes.append("MTP was left out as asked; the config now says 0")
    if not work.same_files:
        notes.append("shards were laid out anew; file hashes differ from the original's")
    return Outcome(
        direction="mcore2hf",
        source=source,
        target=target,
        model_type=plan.geometry.model_type,
        tensors=len(names),
        nbytes=sum(work.view.tensors[n].nbytes for n in names),
        mtp_depths=0 if work.drop_mtp else plan.geometry.depths,
        mtp_tensors=sum(is_mtp_name(plan, n) for n in names),
        layout=work.view.layout.name,
        disk=work.disk,
        memory=BASE_MEMORY + MEMORY_PER_TENSOR * len(names),
        seconds=seconds,
        verified=verified,
        dry_run=dry_run,
        unchanged=unchanged,
        notes=tuple(notes),
    )
