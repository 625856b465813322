"""HF folder -> torch_dist checkpoint: plan first, then stream, then read back and compare."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from mtpconv.convert.agreement import agreed_plan, config_without_mtp
from mtpconv.convert.outcome import Outcome
from mtpconv.convert.output import Output, check_space, check_target
from mtpconv.convert.verify import verify_digests
from mtpconv.errors import RefusedError, UnreadableError, UnsupportedError
from mtpconv.mapping.check import is_carried
from mtpconv.mapping.layouts import Layout, layout_of, training_layout
from mtpconv.mapping.ops import PADDING
from mtpconv.mapping.plan import CopyStep, Plan, Step
from mtpconv.mapping.table import Table, find_table, read_table
from mtpconv.megatron_args import megatron_args
from mtpconv.progress import Progress
from mtpconv.store.checkpoint import require_sound
from mtpconv.store.content import Files, Piece, blocks_of, pieces
from mtpconv.store.digest import digest_tensor
from mtpconv.store.dist_metadata_writer import (
    write_common,
    write_config,
    write_metadata,
    write_tracker,
)
from mtpconv.store.extra_state import extra_state_keys
from mtpconv.store.hf import HfCheckpoint, open_hf
from mtpconv.store.hf_writer import index_bytes, make_header, without, write_shard
from mtpconv.store.manifest import Manifest
from mtpconv.store.source import FOLDER, carried_folder, write_bytes, write_source
from mtpconv.store.torch_dist import open_torch_dist
from mtpconv.store.torch_dist_writer import TorchDistWriter
from mtpconv.tensors import Box, TensorSpec
from mtpconv.view import HfView

#: Units: bytes. A record's zip overhead and its metadata entry, measured 1.1 KB and 0.4 KB.
RECORD_OVERHEAD = 2048
#: Units: bytes. Interpreter, numpy, one block in flight and one record per chunk.
BASE_MEMORY = 90_000_000
MEMORY_PER_TENSOR = 1500


@dataclass(frozen=True)
class HfToMcore:
    """A conversion that was planned and found possible; nothing is written yet."""

    hf: HfCheckpoint
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

    @property
    def nbytes(self) -> int:
        """Payload bytes that go into the Megatron checkpoint."""
        return sum(self.hf.tensors[n].nbytes for s in self.plan.steps for n in s.hf)

    @property
    def disk(self) -> int:
        """Disk that the target needs, in bytes, rounded up."""
        carried = sum(self.hf.tensors[n].nbytes for n in self.carried)
        copies = sum(self.hf.tensors[c.hf].nbytes for c in self.plan.copies)
        return self.nbytes + carried + copies + RECORD_OVERHEAD * len(self.plan.steps) + (1 << 20)

    @property
    def memory(self) -> int:
        """Peak anonymous memory to expect, in bytes."""
        return BASE_MEMORY + MEMORY_PER_TENSOR * len(self.hf.tensors)


def plan_hf2mcore(
    source: Path,
    *,
    mapping: Path | None = None,
    layout: str | None = None,
    drop_mtp: bool = False,
) -> HfToMcore:
    """Open and check an HF folder; everything that can be refused is refused here.

    Raises: UnreadableError, RefusedError, UsageError, UnsupportedError.
    """
    hf = open_hf(source)
    require_sound(hf)
    if hf.config is None:
        raise UnreadableError(f"{source}: has no config.json; it says what the model is")
    table = table_for(hf.config, mapping)
    if not table.converts:
        raise UnsupportedError(
            f"{source}: {table.model_type} is not converted: Megatron-Core lacks "
            f"{table.needs or 'parts of it'}; inventory and audit work"
        )
    plan, dropped = agreed_plan(
        hf.config, table, hf.tensors, where=str(source), drop_mtp=drop_mtp
    )
    for step in plan.steps:
        kinds = {hf.tensors[n].dtype for n in step.hf}
        if len(kinds) > 1:
            raise RefusedError(
                f"{source}: {' and '.join(step.hf)} become one Megatron tensor "
                f"but have dtypes {' and '.join(sorted(kinds))}"
            )
    gone = set(dropped)
    gaps: list[str] = []
    args = megatron_args(plan.geometry, gaps=gaps)
    return HfToMcore(
        hf,
        plan,
        layout_for(plan, layout),
        tuple(n for n in plan.hf if n not in gone),
        dropped,
        tuple(n for n in hf.tensors if n not in plan.hf and is_carried(table, n)),
        args,
        tuple(gaps),
    )


def table_for(config: Mapping[str, object], mapping: Path | None) -> Table:
    """The table that the user named, else the shipped one of the config's model_type."""
    return read_table(mapping) if mapping is not None else find_table(str(config.get("model_type")))


def layout_for(plan: Plan, named: str | None) -> Layout:
    """The layout to write: `training` (default), `local`, or dialect names joined by commas."""
    if named in (None, "training"):
        return training_layout(plan)
    if named == "local":
        local = [plan.table.local_spec] if plan.table.local_spec else []
        return layout_of([*(d.name for d in training_layout(plan).dialects), *local])
    return layout_of(n for n in str(named).split(",") if n != "canonical")


def hf2mcore(
    source: Path,
    target: Path,
    *,
    mapping: Path | None = None,
    layout: str | None = None,
    iteration: int | None = None,
    drop_mtp: bool = False,
    overwrite: bool = False,
    verify: bool = True,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Convert an HF folder to a torch_dist checkpoint.

    Law: every HF tensor is in exactly one Megatron tensor, carried beside, or (only with
    `drop_mtp`) named as dropped; the bytes read back are those that were read.

    Raises: UnreadableError, RefusedError, UsageError, UnsupportedError, WriteError.
    """
    started = time.monotonic()
    progress = progress or Progress()
    work = plan_hf2mcore(source, mapping=mapping, layout=layout, drop_mtp=drop_mtp)
    if dry_run:
        check_target(target, source, overwrite=overwrite)
        check_space(target, work.disk)
        return _outcome(work, source, target, dry_run=True)
    with Output(target, source, overwrite=overwrite, need=work.disk) as out, Files() as files:
        name = "release" if iteration is None else f"iter_{iteration:07d}"
        folder = out.folder / name
        folder.mkdir()
        digests = _write_tensors(work, folder, files, progress)
        beside = _carried(work, files, digests)
        saved = out.folder / FOLDER
        _write_saved(work, saved, beside, digests, files)
        write_common(folder, _common(work, iteration))
        write_config(folder)
        if verify:
            carried = open_hf(carried_folder(saved)) if beside else None
            view = HfView(open_torch_dist(folder), work.plan, work.layout, carried)
            wanted = {n: digests[n] for n in (*work.names, *beside)}
            verify_digests(view, {n: work.hf.tensors[n] for n in wanted}, wanted, progress)
        write_tracker(out.folder, "release" if iteration is None else iteration)
        out.commit()
    return _outcome(
        work, source, target, carried=beside, seconds=time.monotonic() - started, verified=verify
    )


def megatron_pieces(hf: HfCheckpoint, step: Step) -> list[Piece]:
    """Where the bytes of a step's Megatron tensor lie in the HF folder."""
    found = []
    for move in step.op.moves([hf.tensors[n].shape for n in step.hf]):
        if move.operand == PADDING:
            found.append(Piece(move.mcore, None, 0, move.mcore.sizes, Box.whole(move.mcore.sizes)))
            continue
        (stored,) = pieces(hf, step.hf[move.operand])
        found.append(
            Piece(move.mcore, stored.file, stored.start, stored.chunk_shape, move.hf, move.swap)
        )
    return found


def _write_tensors(
    work: HfToMcore, folder: Path, files: Files, progress: Progress
) -> dict[str, str]:
    hf, digests = work.hf, {}
    progress.begin("convert", work.nbytes)
    stored: dict[str, TensorSpec] = {}
    with TorchDistWriter(folder) as writer:
        for step in work.plan.steps:
            address = work.layout.address(step.key, work.plan.geometry)
            dtype = hf.tensors[step.hf[0]].dtype
            inner = TensorSpec(dtype, step.op.shape([hf.tensors[n].shape for n in step.hf]))
            whole = TensorSpec(dtype, (*address.lead, *inner.shape))
            box = Box(
                (*address.index, *(0 for _ in inner.shape)),
                (*(1 for _ in address.lead), *inner.shape),
            )
            stream = blocks_of(inner, megatron_pieces(hf, step), files)
            if step.op.name in ("copy", "concat", "pad_rows"):
                stream = _hashed(stream, step, hf, digests)
            else:
                for name in step.hf:
                    if name not in digests:
                        digests[name] = digest_tensor(hf, name, files)
            writer.write(address.key, whole, box, stream)
            stored[address.key] = whole
            progress.advance(inner.nbytes, str(step.region))
        for key in extra_state_keys(stored):
            writer.write_object(key, [None])
        write_metadata(folder, writer.close())
    for copy in work.plan.copies:
        digests[copy.hf] = digest_tensor(hf, copy.hf, files)
    for name in work.carried:
        digests[name] = digest_tensor(hf, name, files)
    return digests


def _hashed(
    stream: Iterator[memoryview], step: Step, hf: HfCheckpoint, digests: dict[str, str]
) -> Iterator[memoryview]:
    """Pass blocks on and digest the operands, which lie one after another in them."""
    names = list(step.hf)
    left, hasher = hf.tensors[names[0]].nbytes, blake3()
    for block in stream:
        at = 0
        while at < len(block) and names:
            part = block[at : at + left]
            hasher.update(part)
            at += len(part)
            left -= len(part)
            while not left and names:
                digests[names.pop(0)] = hasher.hexdigest()
                hasher = blake3()
                left = hf.tensors[names[0]].nbytes if names else 0
        yield block
    for name in names:  # empty tensors have no blocks
        digests[name] = hasher.hexdigest()


def _carried(work: HfToMcore, files: Files, digests: Mapping[str, str]) -> tuple[str, ...]:
    """Names kept beside: those the table carries, and copies that differ from their original."""

    def differs(copy: CopyStep) -> bool:
        return digests[copy.hf] != digests[copy.of]

    return (*work.carried, *(c.hf for c in work.plan.copies if differs(c)))


def _write_saved(
    work: HfToMcore, saved: Path, beside: tuple[str, ...], digests: Mapping[str, str], files: Files
) -> None:
    hf = work.hf
    kept = {n: s for n, s in hf.tensors.items() if n in digests}
    manifest = Manifest(hf.path, "hf", kept, dict(digests), hf.config)
    if work.dropped:
        shards = {
            name: header
            for name, old in hf.shards.items()
            if (header := without(old, work.dropped)) is not None
        }
        write_source(hf, saved, manifest, shards)
        assert hf.config is not None
        write_bytes(saved / "files" / "config.json", config_without_mtp(hf.config))
        if hf.index_name is not None:
            write_bytes(saved / "files" / hf.index_name, index_bytes(shards))
    else:
        write_source(hf, saved, manifest, hf.shards)
    if beside:
        from mtpconv.store.content import blocks

        folder = carried_folder(saved)
        folder.mkdir()
        path = folder / "model.safetensors"
        header = make_header(path, {n: hf.tensors[n] for n in beside}, {"format": "pt"})
        write_shard(path, header, lambda n: blocks(hf, n, files))


def _common(work: HfToMcore, iteration: int | None) -> dict[str, object]:
    return {
        "args": work.args, "checkpoint_version": 3.0, "iteration": iteration or 0,
    }  # fmt: skip


def _outcome(
    work: HfToMcore,
    source: Path,
    target: Path,
    *,
    carried: tuple[str, ...] = (),
    seconds: float = 0.0,
    verified: bool = False,
    dry_run: bool = False,
) -> Outcome:
    notes = [f"Megatron cannot be told: {gap}" for gap in work.gaps]
    if work.plan.table.needs:
        notes.append(f"to load it, Megatron-Core needs {work.plan.table.needs}")
    if work.dropped:
        notes.append(f"{len(work.dropped)} MTP tensors dropped as asked; the config now says 0")
    if carried:
        notes.append(f"{len(carried)} tensors have no place in Megatron and are carried beside")
    return Outcome(
        direction="hf2mcore",
        source=source,
        target=target,
        model_type=work.plan.geometry.model_type,
        tensors=len(work.names),
        nbytes=sum(work.hf.tensors[n].nbytes for n in work.names),
        mtp_depths=work.plan.geometry.depths,
        mtp_tensors=sum(r.kind == "mtp" for r in work.plan.regions.values()),
        layout=work.layout.name,
        disk=work.disk,
        memory=work.memory,
        seconds=seconds,
        verified=verified,
        dry_run=dry_run,
        carried=carried,
        notes=tuple(notes),
    )
