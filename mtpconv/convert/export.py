"""What exports to a folder and to an object store have in common: what is read, and the outcome."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from mtpconv.audit.args_rules import contradictions
from mtpconv.audit.config_rules import shown
from mtpconv.convert.agreement import is_mtp_name
from mtpconv.convert.arithmetic import computed_names, export_arithmetic
from mtpconv.convert.configs import config_bytes
from mtpconv.convert.fp8 import export_steps, fp8_mode, idle_notes, remade_names
from mtpconv.convert.mcore_to_hf_plan import (
    McoreToHf,
    checkpoint_files,
    origin_of,
    plan_mcore2hf,
    require_one_iteration,
)
from mtpconv.convert.needs import TO_HF, memory_need
from mtpconv.convert.outcome import Outcome
from mtpconv.convert.remarks import (
    Since,
    carried_notes,
    file_notes,
    resume_notes,
    since,
    unsealed_notes,
)  # fmt: skip
from mtpconv.convert.whole import carried_beside
from mtpconv.ranks import Ranks
from mtpconv.store.checkpoint import require_sound
from mtpconv.store.crc_check import CrcCheck
from mtpconv.store.durable import copy_file, write_bytes
from mtpconv.store.fp8_tensors import SCALE, quantisation
from mtpconv.store.hf_index import INDEX_NAME
from mtpconv.store.hf_writer import index_bytes
from mtpconv.store.legacy import MegatronCheckpoint, open_megatron
from mtpconv.store.snapshot import Snapshot
from mtpconv.store.source import has_source, table_beside
from mtpconv.store.source_seal import check_source

if TYPE_CHECKING:  # the network is imported by whoever needs it
    from mtpconv.store.afar_dist import AfarMegatron, AfarSource


class Export:
    """A Megatron checkpoint opened, planned and found possible to export.

    What was read is remembered, so that the end can ask whether it is still the same. Raises: as
    `mcore2hf`, before anything is written.
    """

    def __init__(
        self,
        source: Path,
        *,
        like: Path | AfarSource | None,
        mapping: Path | None,
        drop_mtp: bool,
        frozen_vision: bool,
        fp8: str,
        verify: bool,
        opened: AfarMegatron | None,
    ) -> None:
        self._started = time.monotonic()
        mode = fp8_mode(fp8)
        self._source, self._verify = source, verify
        given = (opened, like if not isinstance(like, Path) else None)
        #: what is read of other machines; what stands for it here is a mirror
        self.afar = [one for one in given if one is not None]
        files = checkpoint_files(source)
        self.snapshot = Snapshot(files)
        stored = open_megatron(source) if opened is None else opened.checkpoint
        require_sound(stored)
        origin = origin_of(source, like, opened)
        beside = table_beside(source)
        self.beside = Snapshot(origin.files_read)
        # Of a remote source only what is needed was fetched. Reading the digests takes memory for
        # a moment, so it comes before there is a plan.
        whole = isinstance(like, Path) or not self.afar
        self._manifest = check_source(origin, whole=whole) if verify else None
        self.work: McoreToHf = plan_mcore2hf(
            source, stored, origin, mapping=mapping, drop_mtp=drop_mtp,
            frozen_vision=frozen_vision, mode=mode, beside=beside,
        )  # fmt: skip
        require_one_iteration(self.work, files)

    @cached_property
    def crcs(self) -> CrcCheck:
        """The CRC-32 of every record, to be told what is read; without `verify` of none."""
        stored = self.work.view.checkpoint
        if self._verify and isinstance(stored, MegatronCheckpoint):
            return CrcCheck(stored.sealed())
        return CrcCheck({})

    def memory(self, jobs: int | None, ranks: Ranks) -> int:
        """Bytes of memory that it takes."""
        need = memory_need(len(self.work.names), TO_HF, jobs, ranks)
        return need + sum(one.memory for one in self.afar)

    def require_unchanged(self) -> None:
        """Raises: UnreadableError if something that was read is not what it was."""
        self.snapshot.require_unchanged()
        self.beside.require_unchanged()
        for one in self.afar:  # the snapshots are of its mirror
            one.require_unchanged()

    def _changes(self, digests: Mapping[str, str]) -> Since | None:
        """What training changed, by the digests that travelled; None without them."""
        if self._manifest is None:
            return None
        return since(
            self._manifest, digests, self.work.content.tensors, self.work.view.plan,
            computed_names(self.work.undone), remade_names(self.work.content),
        )  # fmt: skip

    def outcome(
        self,
        target: Path | str,
        memory: int,
        digests: Mapping[str, str] | None = None,
        *,
        taken_over: int = 0,
        earlier: int = 0,
    ) -> Outcome:
        """What was done, by the digests of what was written; without them, what would be."""
        work, plan, names = self.work, self.work.view.plan, self.work.names
        dry = digests is None
        changes = None if digests is None else self._changes(digests)
        return Outcome(
            direction="mcore2hf",
            source=self._source,
            target=target,
            model_type=plan.geometry.model_type,
            tensors=len(names),
            nbytes=sum(work.content.tensors[n].nbytes for n in names),
            mtp_depths=0 if work.drop_mtp else plan.geometry.depths,
            mtp_tensors=sum(is_mtp_name(plan, n.removesuffix(SCALE)) for n in names),
            layout=work.view.dialect,
            disk=work.disk,
            memory=memory,
            seconds=0.0 if dry else time.monotonic() - self._started,
            verified=self._verify and not dry,
            dry_run=dry,
            unchanged=changes.unchanged if changes else None,
            unchanged_mtp=changes.unchanged_mtp if changes else None,
            not_compared=changes.not_compared if changes else 0,
            not_compared_mtp=changes.not_compared_mtp if changes else 0,
            changed=changes.changed if changes else (),
            taken_over=taken_over,
            left_behind=tuple(work.source.others.left),
            notes=(
                *file_notes(work.source.others),
                *resume_notes(earlier, taken_over),
                *_plan_notes(work),
                *unsealed_notes(0 if dry else self.crcs.unsealed),
                *([changes.stale] if changes and changes.stale else ()),
                *carried_notes(work.source.carried, plan, names, changes),
            ),
            steps=(
                *export_steps(work.content, work.fp8.intersection(names)),
                *export_arithmetic(plan, work.undone),
            ),
        )


def _plan_notes(work: McoreToHf) -> Iterator[str]:
    """What was decided before anything was read, and the user should know."""
    if not quantisation(work.source.config):
        yield from idle_notes(work.mode, work.fp8, work.source.path)
    if work.drop_mtp:
        yield "MTP was left out as asked; the config now says 0"
    if work.vision:
        yield (
            f"warning: {len(work.vision)} tensors of Megatron's vision tower were left out as "
            f"asked; the {len(carried_beside(work.view))} written are those of before training"
        )
    stored = work.view.checkpoint
    if isinstance(stored, MegatronCheckpoint) and stored.ignored:
        yield f"optimizer state ({stored.ignored} entries) has no place in HF: left out"
    yield from work.view.remarks(ours=has_source(work.view.path))
    yield from _args_notes(work)
    if not work.same_files:
        yield "shards were laid out anew; file hashes differ from the original's"


def _args_notes(work: McoreToHf) -> Iterator[str]:
    """Args of the checkpoint that the config to be written contradicts; training may change some.

    Where MTP is left out they may be those of a run with or without it.
    """
    stored = work.view.checkpoint
    if not isinstance(stored, MegatronCheckpoint):
        return
    found = {f.field: f for f in contradictions(stored, work.source.config)}
    if found and work.drop_mtp and work.config is not None:
        differ = {f.field for f in contradictions(stored, work.config)}
        found = {field: f for field, f in found.items() if field in differ}
    for field, one in found.items():
        yield (
            f"warning: {field} is {shown(one.before)} in Megatron's args and {shown(one.after)} by "
            "the config.json that is written; the weights then mean something else: see `mtpconv "
            "audit`, and correct the config.json or name another folder with --like"
        )


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
