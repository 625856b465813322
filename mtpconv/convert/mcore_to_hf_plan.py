"""What mcore2hf will do: a Megatron checkpoint opened and checked, nothing written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpconv.convert import identity
from mtpconv.convert.agreement import require_one_promise
from mtpconv.convert.arithmetic import originals_of, undone
from mtpconv.convert.configs import changed_config
from mtpconv.convert.drop import droppable
from mtpconv.convert.fp8 import Fp8, bf16_inventory, exported, shards_of, source_fp8
from mtpconv.convert.hf_to_mcore_plan import own_table_of, table_for
from mtpconv.convert.needs import files_need, names_need
from mtpconv.convert.whole import require_same_inventory, require_two_towers, require_whole
from mtpconv.errors import RefusedError, UnreadableError, UsageError
from mtpconv.mapping.check import check_plan
from mtpconv.mapping.layouts import detect_layout
from mtpconv.mapping.plan import make_plan
from mtpconv.mapping.table import Table
from mtpconv.mapping.table_reader import table_names
from mtpconv.store.arithmetic import Undone
from mtpconv.store.checkpoint import Checkpoint, require_sound
from mtpconv.store.content import Pieced
from mtpconv.store.dist_folder import COMMON, CONFIG, METADATA, find_folder
from mtpconv.store.fp8_tensors import SCALE
from mtpconv.store.hf_index import INDEX_NAME
from mtpconv.store.hf_writer import make_headers
from mtpconv.store.legacy import MegatronCheckpoint
from mtpconv.store.legacy_file import NAME as RANK_FILE
from mtpconv.store.safetensors_header import ShardHeader
from mtpconv.store.snapshot import files_of
from mtpconv.store.source import HfSource, OwnTable, find_source, read_source
from mtpconv.view import HfView

if TYPE_CHECKING:  # the network is imported by whoever needs it
    from mtpconv.store.afar_dist import AfarMegatron, AfarSource

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


def require_one_iteration(work: McoreToHf, files: Sequence[Path]) -> None:
    """The `files` looked up first are those of the checkpoint that was opened.

    Raises: UnreadableError if another iteration became the latest one meanwhile.
    """
    opened = work.view.checkpoint
    folder = opened.folder if isinstance(opened, MegatronCheckpoint) else None
    if folder is not None and not any(folder in file.parents for file in files):
        raise UnreadableError(
            f"{folder}: became the latest iteration while another one was opened; name the "
            "iteration's folder"
        )


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
        return tuple(dict.fromkeys(n for h in self.headers.values() for n in h.tensors))

    @property
    def disk(self) -> int:
        """Disk that the target needs, in bytes."""
        others = files_need(self.source.files_root, self.source.files) + names_need(self.names)
        return sum(h.size for h in self.headers.values()) + others + (1 << 20)


def origin_of(
    source: Path, like: Path | AfarSource | None = None, opened: AfarMegatron | None = None
) -> HfSource:
    """Where config, files and shard layout come from; arguments as of `mcore2hf`.

    Raises: UsageError if there is none; UnreadableError, RefusedError.
    """
    if isinstance(like, Path):
        return read_source(like)
    if like is not None:
        return like.source
    if opened is None:
        found = find_source(source)
    else:
        found = None if opened.source is None else opened.source.source
    if found is None:
        raise UsageError(
            f"{source}: has no hf_source folder beside it (Megatron saved it later?); "
            "pass the original HuggingFace folder, or the saved one, with --like"
        )
    return found


def require_its_table(
    table: Table, mapping: Path | None, saved: Path, own: OwnTable | None
) -> None:
    """A checkpoint goes back through the table it was made with, which `saved` knows.

    Rows of another one would give tensors of the same shapes other names.

    Raises: UsageError.
    """
    if own is None:
        if mapping is None or table.model_type not in table_names():
            return
        if own_table_of(table, mapping) is not None:
            raise UsageError(
                f"{saved}: hf2mcore used the table that mtpconv ships, and {mapping} says "
                "something else; leave --mapping out"
            )
    elif identity.of_table(table) != own.digest:
        other = "" if mapping is None else f", and {mapping} says something else"
        raise UsageError(
            f"{saved}: hf2mcore used a mapping table of your own, {own.name}{other}; name it "
            "with --mapping"
        )


def plan_mcore2hf(
    source: Path,
    checkpoint: Checkpoint,
    origin: HfSource,
    *,
    mapping: Path | None = None,
    drop_mtp: bool = False,
    frozen_vision: bool = False,
    mode: Fp8 = "keep",
    beside: tuple[Path, OwnTable | None] | None = None,
) -> McoreToHf:
    """Plan an export of a sound checkpoint; everything that can be refused is refused here.

    `source`: its name for messages. `origin`: from `origin_of`. `beside`: from `table_beside`, as
    the origin may be another one. The others: as `mcore2hf`.

    Raises: UnreadableError, RefusedError, UsageError, UnsupportedError.
    """
    table = table_for(origin.config, mapping)
    made_with = {origin.path: origin.table} if origin.is_saved else {}
    if beside is not None:  # mostly the same
        made_with[beside[0]] = beside[1]
    for saved, own in made_with.items():
        require_its_table(table, mapping, saved, own)
    present = origin.names or None
    mtp: frozenset[str] = frozenset()
    if drop_mtp:
        mtp = droppable(origin.config, table, origin.names, str(origin.path))
    plan = make_plan(origin.config, table, present, depths=0 if drop_mtp else None)
    if not drop_mtp:
        require_one_promise(plan.geometry, str(origin.path))
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
    left = {n: spec for n, spec in stored.items() if n.removesuffix(SCALE) not in mtp}
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
