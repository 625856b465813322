"""Opening paths as the sides of an audit: folders of either kind, or saved manifests.

Two sides of different formats are brought under HF names through the mapping table; nothing
is converted to disk.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtpconv.audit.arithmetic import as_hf, as_megatron
from mtpconv.audit.companions import weight_names
from mtpconv.audit.promise import unkept_promise
from mtpconv.audit.quantised import with_fp8_scales
from mtpconv.audit.subject import (
    Expected,
    Subject,
    hf_subject,
    manifest_subject,
    torch_dist_subject,
    view_subject,
)
from mtpconv.audit.tablefree import is_invented
from mtpconv.errors import (
    RefusedError,
    UnreadableError,
    UnsupportedError,
    UsageError,
)
from mtpconv.geometry import read_geometry
from mtpconv.mapping.check import is_carried, left_out, own_table
from mtpconv.mapping.layouts import as_stored, detect_layout
from mtpconv.mapping.plan import Plan, make_plan, promised_names
from mtpconv.mapping.table import Table
from mtpconv.mapping.table_reader import find_table
from mtpconv.store.checkpoint import Problem
from mtpconv.store.dequant import Dequantised
from mtpconv.store.dist_folder import is_parent, is_torch_dist
from mtpconv.store.fp8_tensors import find_fp8, quantisation, refuse_others
from mtpconv.store.hf import CONFIG_NAME, HfCheckpoint, open_hf
from mtpconv.store.legacy import MegatronCheckpoint, open_megatron
from mtpconv.store.manifest import Manifest, read_manifest
from mtpconv.store.source import HfSource, find_source
from mtpconv.view import HfView

Opened = HfCheckpoint | MegatronCheckpoint | Manifest
_Promise = tuple[Expected | None, tuple[Problem, ...]]


@dataclass(frozen=True, slots=True)
class Sides:
    """What an audit compares."""

    before: Subject | None
    after: Subject
    base: Subject | None = None


def open_any(path: Path, *, headers_only: bool = False, like: Opened | None = None) -> Opened:
    """A checkpoint or manifest, by what it is; `headers_only` reads no tensor bytes.

    `like` is one that probably has the same headers: those are not parsed again.

    Raises: UnreadableError if it is neither.
    """
    if path.is_file():
        return read_manifest(path)
    # A folder with shards is HF whatever else it holds; Megatron's never have any.
    if next(path.glob("*.safetensors*"), None) is None and (
        is_torch_dist(path) or is_parent(path)  # of several: opening says what to name
    ):
        return open_megatron(path)
    expected = like.shards if isinstance(like, HfCheckpoint) else None
    return open_hf(path, compare_duplicates=not headers_only, expected=expected)


def open_sides(
    before: Path | None,
    after: Path,
    *,
    base: Path | None = None,
    mapping: Path | None = None,
    headers_only: bool = False,
) -> Sides:
    """Open what the command line names; `headers_only` reads no tensor bytes.

    Raises: UnreadableError; UsageError, also for a table that nobody needs; UnsupportedError if
    two formats meet and no table translates between them.
    """
    if mapping is not None:
        own_table(mapping)  # a typo must not pass where no table is needed
    right = open_any(after, headers_only=headers_only)
    left = None
    if before is not None:
        left = open_any(before, headers_only=headers_only, like=right)
    # What is wrong with the base itself is nobody's question.
    origin = open_any(base, headers_only=True) if base is not None else None
    formats = {_names_of(o) for o in (left, right, origin) if o is not None}
    if left is None and len(formats) == 1:
        return Sides(None, _alone(right, mapping), _plain(origin))
    if len(formats) == 1:
        new_side = _must(_plain(right))
        if isinstance(right, MegatronCheckpoint):
            new_side = _travelling(new_side, *_source_of(right))
        return Sides(_plain(left), new_side, _plain(origin))
    sides = [o for o in (left, right, origin) if o is not None]
    plan = _shared_plan(sides, mapping)
    held = _held(plan, sides)
    digests = any(isinstance(o, Manifest) for o in sides)
    old, new, base_seen = (
        None
        if o is None
        else _asking_for_table(_seen(o, plan, held, sides, digests=digests), mapping)
        for o in (left, right, origin)
    )
    if old is None:
        new = _must(new)
        new = replace(new, expected=_expected(plan, new.tensors))
    return Sides(old, _must(new), base_seen)


def _shared_plan(opened: Sequence[Opened], mapping: Path | None) -> Plan:
    """The plan through which sides of several formats are compared."""
    for one in opened:
        if not isinstance(one, MegatronCheckpoint) and _names_of(one) == "hf":
            if one.config is None:
                raise UnreadableError(
                    f"{one.path}: has no config.json; it says which table translates"
                )
            return _plan(one.config, mapping, one.tensors.keys())
    for one in opened:  # torch_dist against legacy
        source = _source_of(one)[0]
        if source is not None:
            return _plan(source.config, mapping, source.names)
    raise UnsupportedError(
        f"{opened[0].path}: Megatron checkpoints of two formats are compared through HF names, and "
        "neither has an hf_source folder; compare each with the HuggingFace folder"
    )


def _held(plan: Plan, opened: Sequence[Opened]) -> Plan:
    """The plan as the Megatron sides store it: what becomes of HF tensors there.

    Raises: UnsupportedError if one holds a tensor changed and another does not.
    """
    found = [
        as_stored(plan, detect_layout(plan, one.tensors.keys()))
        for one in opened
        if isinstance(one, MegatronCheckpoint)
    ]
    if any(each.arithmetic != found[0].arithmetic for each in found):
        raise UnsupportedError(
            f"{opened[0].path}: one Megatron checkpoint holds tensors as HuggingFace has them that "
            "another holds changed; compare each with the HuggingFace folder"
        )
    return found[0] if found else plan


def expected_inventory(
    config: Mapping[str, Any] | None, mapping: Path | None, present: Collection[str]
) -> Expected | None:
    """What a table promises for a config; None without a config or a table.

    Raises: RefusedError, UnsupportedError if there is a table and the config is no model of it.
    """
    if config is None:
        return None
    try:
        table = _table(config, mapping)
    except UnsupportedError:
        return None
    return _expected(_planned(config, table, present), present)


def _expected(plan: Plan, present: Collection[str]) -> Expected:
    """What a plan promises, and what of the names present its table leaves out on purpose."""
    return Expected(plan.hf, plan.regions, _left_out(plan.table, plan.hf, present))


def _left_out(table: Table, known: Collection[str], present: Collection[str]) -> Mapping[str, str]:
    return left_out(table, [n for n in present if n not in known])


def _promise(opened: HfCheckpoint | Manifest, mapping: Path | None) -> _Promise:
    """What the table promises, and what is wrong with a config that does not say all of it.

    A config without the dims of a shape still says which names there are.
    """
    config, present = opened.config, weight_names(opened.tensors)
    try:
        expected = expected_inventory(config, mapping, present)
    except (RefusedError, UnsupportedError) as error:
        fault = Problem("config_contradiction", str(error), file=CONFIG_NAME)
    else:
        if expected is None:
            return None, ()
        return _with_scales(expected, opened), ()
    assert config is not None  # None promises nothing, and breaks nothing
    try:
        _refuse_invented_counts(config, len(present))
        table = _table(config, mapping)
        names = promised_names(config, table, present)
    except (RefusedError, UnsupportedError):
        return None, (fault,)
    expected = Expected(dict.fromkeys(names), names, _left_out(table, names, present))
    return _with_scales(expected, opened), (fault,)


def _with_scales(expected: Expected, opened: HfCheckpoint | Manifest) -> Expected:
    return with_fp8_scales(expected, opened.tensors, opened.config)


def _names_of(opened: Opened) -> str:
    if isinstance(opened, Manifest):
        return opened.source_format
    return opened.format


def _plan(config: Mapping[str, Any], mapping: Path | None, present: Collection[str]) -> Plan:
    return _planned(config, _table(config, mapping), present)


def _table(config: Mapping[str, Any], mapping: Path | None) -> Table:
    if mapping is not None:
        return own_table(mapping)
    try:
        return find_table(str(config.get("model_type")))
    except UsageError as error:
        raise UnsupportedError(str(error)) from error


def _planned(config: Mapping[str, Any], table: Table, present: Collection[str]) -> Plan:
    _refuse_invented_counts(config, len(present))
    return make_plan(config, table, present)


def _refuse_invented_counts(config: Mapping[str, Any], tensors: int) -> None:
    """A plan has a row for every tensor; an invented count must not use up the memory."""
    geometry = read_geometry(config)
    if is_invented(geometry.layers + geometry.depths, geometry.experts, tensors):
        raise RefusedError(
            f"config.json: {geometry.layers} layers and {geometry.depths} MTP depths of"
            f" {geometry.experts} experts; no model is that large"
        )


def _alone(opened: Opened, mapping: Path | None) -> Subject:
    """One checkpoint against its own config, as far as a table knows it."""
    if not isinstance(opened, MegatronCheckpoint):
        if _names_of(opened) != "hf":
            return _must(_plain(opened))
        expected, faults = _promise(opened, mapping)
        subject = _must(_plain(opened))
        problems = (*subject.problems, *faults)
        return _promising(replace(subject, expected=expected, problems=problems), opened.config)
    source, fault = _source_of(opened)
    if source is None:
        return _travelling(torch_dist_subject(opened), None, fault)
    try:
        plan = _plan(source.config, mapping, source.names)
    except UnsupportedError:
        return _travelling(torch_dist_subject(opened), source)
    view = HfView(opened, plan, carried=source.carried)
    subject = _travelling(view_subject(view, _expected(plan, view.tensors)), source)
    return _promising(subject, source.config)


def _source_of(
    opened: Opened, others: Sequence[Opened] = ()
) -> tuple[HfSource | None, Problem | None]:
    """What travelled with a checkpoint, or what is wrong with it; one of `others` may be alike."""
    known = next((o.shards for o in others if isinstance(o, HfCheckpoint)), {})
    try:
        return find_source(opened.path, known), None
    except UnreadableError as error:
        return None, Problem("source_damaged", str(error))


def _travelling(subject: Subject, source: HfSource | None, fault: Problem | None = None) -> Subject:
    """The side with what travelled with it."""
    faults = () if fault is None else (fault,)
    return replace(subject, source=source, problems=(*subject.problems, *faults))


def _asking_for_table(subject: Subject, mapping: Path | None) -> Subject:
    """The side with a note if it was made with a table that nobody named."""
    own = subject.source.table if subject.source is not None else None
    if own is None or mapping is not None:
        return subject
    note = (
        f"warning: hf2mcore made {subject.path} with a mapping table of your own, {own.name}; name "
        "it with --mapping, through the shipped one tensors may have each other's names"
    )
    return replace(subject, notes=(*subject.notes, note))


def _promising(subject: Subject, config: Mapping[str, Any] | None) -> Subject:
    """The side with a note on depths that its config counts and its family never ships."""
    note = unkept_promise(config)
    return subject if note is None else replace(subject, notes=(*subject.notes, note))


def _plain(opened: Opened | None) -> Subject | None:
    """A side under its own names."""
    if opened is None:
        return None
    if isinstance(opened, Manifest):
        return manifest_subject(opened)
    if isinstance(opened, HfCheckpoint):
        return hf_subject(opened)
    return torch_dist_subject(opened)


def _seen(
    opened: Opened, plan: Plan, held: Plan, sides: Sequence[Opened], *, digests: bool
) -> Subject:
    """A side under HF names; `held`: as `_held`, `digests`: some other side has no bytes."""
    if not isinstance(opened, MegatronCheckpoint):
        if isinstance(opened, Manifest) and opened.source_format != "hf":
            raise UnsupportedError(
                f"{opened.path}: is a manifest of Megatron tensors; without their bytes they "
                "cannot be compared with HF tensors, give the checkpoint itself"
            )
        # By value codes are compared for block FP8 only.
        refuse_others(opened.tensors, quantisation(opened.config or {}), str(opened.path))
        subject = _seen_fp8(opened, plan) if _has_fp8(opened) else _must(_plain(opened))
        return subject if digests else as_megatron(subject, held)
    source, fault = _source_of(opened, sides)
    carried = source.carried if source else None
    view = HfView(opened, plan, carried=carried)
    ours = source is not None or fault is not None
    subject = as_hf(view, carried) if digests else view_subject(view, ours=ours)
    return _travelling(subject, source, fault)


def _has_fp8(opened: Manifest | HfCheckpoint) -> bool:
    return any(spec.dtype == "F8_E4M3" for spec in opened.tensors.values())


def _seen_fp8(opened: Manifest | HfCheckpoint, plan: Plan) -> Subject:
    """Block FP8 as what Megatron holds of it. Raises: as `find_fp8`."""
    if isinstance(opened, Manifest):
        raise UnsupportedError(
            f"{opened.path}: is a manifest of FP8 codes; Megatron holds BF16, and without the "
            "codes it cannot be told which, give the checkpoint itself"
        )
    found = find_fp8(
        opened.tensors, opened.config or {}, str(opened.path), lambda n: is_carried(plan.table, n)
    )
    said = (
        f"{len(found)} FP8 weights of {opened.path} were compared by value: code times scale in "
        "fp32, rounded once to BF16; their codes and scales have no bytes on the other side"
    )
    return replace(
        hf_subject(opened), content=Dequantised(opened, found), dialect="block FP8 seen as BF16",
        notes=(said,), by_value=frozenset(found),
    )  # fmt: skip


def _must(subject: Subject | None) -> Subject:
    assert subject is not None
    return subject
