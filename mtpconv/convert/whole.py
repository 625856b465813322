"""What must hold before a Megatron checkpoint becomes an HF folder: nothing would be lost."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from mtpconv.convert.agreement import is_mtp_name
from mtpconv.convert.drop import DROP_HINT
from mtpconv.errors import RefusedError, UnsupportedError, UsageError
from mtpconv.mapping.check import is_carried
from mtpconv.mapping.producers import is_vision
from mtpconv.ranges import compress
from mtpconv.store.content import Pieced
from mtpconv.store.safetensors_header import ShardHeader
from mtpconv.store.source import HfSource
from mtpconv.view import HfView, describe_missing


def carried_beside(view: HfView) -> list[str]:
    """HF names that Megatron has no place for and that travelled beside."""
    return [n for n in view.tensors if is_carried(view.plan.table, n)]


def require_two_towers(view: HfView, source: Path) -> tuple[str, ...]:
    """Megatron's keys of a vision tower in whose place another one is written.

    Raises: UsageError if there is none; RefusedError if there is no other.
    """
    keys = tuple(k for k in view.unmapped if is_vision(k))
    if not keys:
        raise UsageError(f"{source}: has no vision tower that --frozen-vision could leave out")
    if not carried_beside(view):
        raise RefusedError(
            f"{source}: no vision tower travelled beside it that could be written in place of its "
            "own; pass the hf_source folder that hf2mcore saved with --like"
        )
    return keys


def require_whole(view: HfView, source: Path, *, drop_mtp: bool, left_out: Collection[str]) -> None:
    """Both sides hold the same tensors, but for `left_out` and, with `drop_mtp`, MTP.

    Raises: RefusedError; UnsupportedError for tensors that only somebody else's model has.
    """
    unmapped = [k for k in view.unmapped if k not in left_out and not (drop_mtp and _is_mtp(k))]
    vision = [k for k in unmapped if is_vision(k)]
    if view.missing or len(vision) < len(unmapped):
        for line in view.remarks(ours=True):  # somebody else's tensors, by name
            raise UnsupportedError(line)
    if view.missing:
        mtp = [n for n in view.missing if is_mtp_name(view.plan, n)]
        hint = f"; the config promises MTP: take a checkpoint that has it, {DROP_HINT}"
        text = describe_missing(view, view.missing)
        raise RefusedError(
            text + (hint if mtp else "; the checkpoint is not whole or of another model")
        )
    if vision and len(vision) == len(unmapped):
        beside = len(carried_beside(view))
        cure = "export it with the tool that trained it"
        if beside:
            cure = (
                f"if it was frozen, --frozen-vision writes the {beside} HF tensors that travelled "
                f"beside instead; if it was trained, {cure}"
            )
        raise RefusedError(
            f"{source}: M05 {len(vision)} Megatron tensors are a vision tower, which no table "
            f"translates: {compress(vision, 4)}; nothing is converted, so that nothing is lost; "
            + cure
        )
    if unmapped:
        mtp = [k for k in unmapped if _is_mtp(k)]
        text = f"{source}: M05 {len(unmapped)} Megatron tensors are not in the table"
        if mtp and not view.plan.geometry.depths:
            text += ", MTP that config.json does not promise"
        raise RefusedError(
            f"{text}: {compress(unmapped, 4)}; nothing is converted, so that nothing is lost"
            + (f"; correct the config given with --like, {DROP_HINT}" if mtp else "")
        )
    padding = list(view.nonzero_padding())
    if padding:
        name, rows = padding[0]
        raise RefusedError(
            f"{source}: {name}: {rows} rows beyond the config's vocabulary are not zero; they "
            "were trained, and cutting them would lose them: correct vocab_size in the config; or "
            "they are damaged"
        )


def require_same_inventory(
    view: HfView,
    content: Pieced,
    headers: dict[str, ShardHeader],
    origin: HfSource,
    source: Path,
    dropped: Collection[str],
) -> None:
    """The shards to write hold what the checkpoint has, with the same dtypes and shapes.

    Raises: RefusedError.
    """
    wanted = {n: spec for h in headers.values() for n, spec in h.tensors.items()}
    table = view.plan.table
    unknown = [n for n in wanted if n not in content.tensors]
    if unknown:
        carried = [n for n in unknown if is_carried(table, n)]
        hint = "; pass the saved hf_source folder with --like, it has them" if carried else ""
        raise RefusedError(
            f"{origin.path}: {len(unknown)} tensors of its shards are not in the checkpoint: "
            f"{compress(unknown, 4)}{hint}"
        )
    extra = [n for n in content.tensors if n not in wanted and n not in dropped]
    if extra:
        raise RefusedError(
            f"{source}: {len(extra)} tensors have no place in the shards of {origin.path}: "
            f"{compress(extra, 4)}"
        )
    for name, spec in wanted.items():
        have = content.tensors[name]
        if have != spec:
            raise RefusedError(
                f"{source}: {name} is {have.dtype} {list(have.shape)}, in {origin.path} it is "
                f"{spec.dtype} {list(spec.shape)}; mtpconv does not cast"
            )


def _is_mtp(key: str) -> bool:
    return key.removeprefix("language_model.").startswith("mtp.")
