"""A plan: a table expanded for one geometry, one step per Megatron tensor.

Everything else follows from it: the expected inventory, both conversions, the audit across
formats, fixtures and the tables in the docs.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

from mtpconv.errors import UsageError
from mtpconv.geometry import Config, Geometry, Kind, read_geometry
from mtpconv.mapping.ops import BUILDERS, Op, PadRows, Site
from mtpconv.mapping.table import MAX_DEPTHS, CopyRule, Row, Stack, Table
from mtpconv.tensors import ROOT, Region, Shape, TensorSpec


class Step(NamedTuple):
    """One Megatron tensor (per layer, per expert) and the HF tensors it is made of."""

    key: str
    op: Op
    hf: tuple[str, ...]
    specs: tuple[TensorSpec, ...]
    region: Region
    row: Row

    @property
    def shape(self) -> Shape:
        """Shape of the Megatron tensor. Raises: ShapeError if the op's shape law is broken."""
        return self.op.shape([s.shape for s in self.specs])

    @property
    def dtype(self) -> str:
        """The dtype of the Megatron tensor: that of its HF tensors."""
        return self.specs[0].dtype


@dataclass(frozen=True, slots=True)
class CopyStep:
    """An HF tensor that repeats another; Megatron has no place for it."""

    hf: str
    of: str
    spec: TensorSpec
    region: Region


@dataclass(frozen=True)
class Plan:
    """All steps of one model."""

    table: Table
    geometry: Geometry
    steps: tuple[Step, ...]
    copies: tuple[CopyStep, ...]

    @cached_property
    def hf(self) -> Mapping[str, TensorSpec]:
        """The HF inventory that the config promises."""
        found = {name: spec for s in self.steps for name, spec in zip(s.hf, s.specs, strict=True)}
        found.update((c.hf, c.spec) for c in self.copies)
        return found

    @cached_property
    def arithmetic(self) -> Mapping[str, str]:
        """HF names that Megatron holds changed, and the word of what was done to them."""
        return {n: s.op.arithmetic for s in self.steps for n in s.hf if s.op.arithmetic}

    @cached_property
    def regions(self) -> Mapping[str, Region]:
        """Region of every HF name."""
        found = {name: s.region for s in self.steps for name in s.hf}
        found.update((c.hf, c.region) for c in self.copies)
        return found


def make_plan(
    config: Config, table: Table, present: Collection[str] | None = None, depths: int | None = None
) -> Plan:
    """Expand a table for a config.

    `present` are the HF names of a real checkpoint: copies are then planned where they exist,
    else where the table says the releases ship them, and of `a or b` the block whose names
    exist is taken, else the first. `depths` overrides the promised number; where the config
    has no field for it, the checkpoint decides (Qwen3-Next ships one, Qwen3-Coder-Next none).

    Raises: RefusedError if the config lacks a field; UsageError if table and config differ.
    """
    geometry = _geometry(config, table, present, depths)
    steps = tuple(s for stack in table.stacks for s in _expand(table, geometry, stack, present))
    return Plan(table, geometry, steps, tuple(_copies(table, geometry, steps, present)))


def promised_names(
    config: Config, table: Table, present: Collection[str] | None = None
) -> Mapping[str, Region]:
    """The names of `make_plan(...).hf` with their regions, without dims.

    For a config that lacks what shapes are made of. Raises: as `make_plan`, for other fields.
    """
    geometry = _geometry(config, table, present, None)
    found: dict[str, Region] = {}
    for stack in table.stacks:
        for place in _places(table, geometry, stack, present):
            for row in table.blocks.get(place.block, ()):
                for expert in range(geometry.experts) if "{expert}" in row.key else (0,):
                    names = (place.hf + n.replace("{expert}", str(expert)) for n in row.hf)
                    found.update(dict.fromkeys(names, place.region))
    for rule in table.copies:
        for values, region in _copied(geometry, rule):
            name = rule.hf.format(**values)
            if (rule.ships if present is None else name in present) and rule.of in found:
                found.setdefault(name, region)
    return found


def _geometry(
    config: Config, table: Table, present: Collection[str] | None, depths: int | None
) -> Geometry:
    geometry = read_geometry(config, table.mtp_default)
    if geometry.model_type != table.model_type:
        raise UsageError(
            f"{table.path.name}: is for model_type {table.model_type!r}, "
            f"config.json says {geometry.model_type!r}"
        )
    if depths is None and geometry.mtp_field is None and geometry.depths and present is not None:
        depths = _depths_found(table, geometry, present)
    if depths is not None and depths != geometry.depths:
        geometry = replace(geometry, depths=depths)
    return geometry


def instances(geometry: Geometry, each: str) -> Iterator[tuple[dict[str, int], Region]]:
    """Placeholder values and region of every place where a stack is instantiated."""
    if each == "once":
        yield {}, ROOT
    elif each == "layer in trunk":
        for layer in range(geometry.layers):
            yield {"layer": layer}, Region("trunk", layer)
    elif each == "depth in mtp":
        for depth in range(geometry.depths):
            yield {"layer": geometry.layers + depth, "depth": depth}, Region("mtp", depth)
    else:
        for flat in range(geometry.depths * geometry.mtp_inner):
            depth, inner = divmod(flat, geometry.mtp_inner)
            values = {"depth": depth, "inner": inner, "flat": flat}
            yield {**values, "layer": geometry.layers + flat}, Region("mtp", depth)


@dataclass(frozen=True, slots=True)
class _Place:
    """One block in one layer, with the prefixes of its names."""

    block: str
    layer: int
    region: Region
    mcore: str
    hf: str


def _places(
    table: Table, geometry: Geometry, stack: Stack, present: Collection[str] | None
) -> Iterator[_Place]:
    uses = list(table.uses(stack))
    for values, region in instances(geometry, stack.each):
        layer = values.get("layer", 0)
        mcore, hf = stack.mcore.format(**values), stack.hf.format(**values)
        for use in uses:
            if not all(geometry.fact(f, layer) is wanted for f, wanted in use.facts):
                continue
            if use.rivals and use.name != _spelling(table, use.rivals, hf, present):
                continue
            yield _Place(use.name, layer, region, mcore, hf)


def _expand(
    table: Table, geometry: Geometry, stack: Stack, present: Collection[str] | None
) -> Iterator[Step]:
    # Layers of one kind share their specs and ops; so do experts, save that slices number them.
    specs: dict[tuple[str, str, Kind], tuple[TensorSpec, ...]] = {}
    ops: dict[tuple[str, str, Kind, int | None], Op] = {}
    for place in _places(table, geometry, stack, present):
        layer = place.layer
        kind = geometry.kind(layer)
        for row in table.blocks.get(place.block, ()):
            shaped = specs.get((row.block, row.key, kind))
            if shaped is None:
                shaped = tuple(_spec(table, geometry, row, name, layer) for name in row.hf)
                specs[row.block, row.key, kind] = shaped
            for expert in range(geometry.experts) if "{expert}" in row.key else (None,):
                at = (row.block, row.key, kind, expert if row.op == "slice" else None)
                op = ops.get(at)
                if op is None:
                    site = Site(geometry, layer, at[3], _part(table, geometry, row, layer))
                    op = ops[at] = BUILDERS[row.op](site)
                if expert is None:
                    key, names = row.key, row.hf
                else:
                    number = str(expert)
                    key = row.key.replace("{expert}", number)
                    names = tuple(n.replace("{expert}", number) for n in row.hf)
                # The checkpoint has the same names: they are held once.
                held = tuple(sys.intern(place.hf + n) for n in names)
                yield Step(place.mcore + key, op, held, shaped, place.region, row)


def _depths_found(table: Table, geometry: Geometry, present: Collection[str]) -> int:
    """How many depths in a row have any tensor."""
    most = replace(geometry, depths=MAX_DEPTHS)
    prefixes: dict[int, set[str]] = {}
    for stack in table.stacks:
        if stack.each.endswith("in mtp") and "{" in stack.hf:
            for values, region in instances(most, stack.each):
                prefixes.setdefault(region.index, set()).add(stack.hf.format(**values))
    for depth in range(MAX_DEPTHS):
        starts = tuple(prefixes.get(depth, ()))
        if not starts or not any(name.startswith(starts) for name in present):
            return depth
    return MAX_DEPTHS


def _spelling(table: Table, rivals: Sequence[str], hf: str, present: Collection[str] | None) -> str:
    """The block of `a or b` whose first HF name exists under the prefix `hf`, else the first."""
    for name in rivals if present else ():
        rows = table.blocks.get(name, ())
        if rows and hf + rows[0].hf[0].replace("{expert}", "0") in (present or ()):
            return name
    return rivals[0]


def _part(
    table: Table, geometry: Geometry, row: Row, layer: int
) -> tuple[int, tuple[int, ...], int] | None:
    parts = table.parts.get(row.hf[0]) if row.op == "part" else None
    index = parts.index(row.key) if parts is not None else None
    if parts is None or index is None:
        return None
    rows = tuple(geometry.dim(dim, layer) for _, dim in parts.rows)
    return geometry.dim(parts.repeats, layer), rows, index


def _spec(table: Table, geometry: Geometry, row: Row, name: str, layer: int) -> TensorSpec:
    dims = table.shapes.get(name)
    if dims is None:
        raise UsageError(f"{row.where}: M15 {name} has no entry in [shapes]; add its dims")
    shape = tuple(geometry.dim(d, layer) for d in dims)
    if prod(shape) >= 1 << 63:
        raise UsageError(f"{row.where}: {name} has more elements than any file can hold")
    return TensorSpec(table.dtypes.get(name, geometry.dtype), shape)


def _copied(geometry: Geometry, rule: CopyRule) -> Iterator[tuple[dict[str, int], Region]]:
    """Where a rule of copies holds, as `instances` does for stacks."""
    for values, region in instances(geometry, rule.each):
        if all(geometry.fact(f, values.get("layer", 0)) is wanted for f, wanted in rule.facts):
            yield values, region


def _copies(
    table: Table, geometry: Geometry, steps: tuple[Step, ...], present: Collection[str] | None
) -> Iterator[CopyStep]:
    if not table.copies:
        return
    known = {n: spec for s in steps for n, spec in zip(s.hf, s.specs, strict=True)}
    taken = set(known)
    for rule in table.copies:
        for values, region in _copied(geometry, rule):
            name = rule.hf.format(**values)
            wanted = rule.ships if present is None else name in present
            spec = known.get(rule.of)
            # Several rules may name one copy (tied embeddings): the first whose `of` exists wins.
            if wanted and spec is not None and name not in taken:
                taken.add(name)
                yield CopyStep(name, rule.of, spec, region)


def padded_plan(plan: Plan, multiple: int) -> Plan:
    """The plan with embedding and LM head padded to a multiple of so many rows.

    Source: megatron-core 0.19.2 core/tokenizers/utils/build_tokenizer.py
    `vocab_size_with_padding`: the multiple is make_vocab_size_divisible_by times the
    tensor-parallel size.
    """

    def grown(step: Step) -> Step:
        if step.op.name != "pad_rows":
            return step
        return padded(step, -(-step.specs[0].shape[0] // multiple) * multiple)

    return replace(plan, steps=tuple(map(grown, plan.steps)))


def padded(step: Step, rows: int) -> Step:
    """The step with its Megatron tensor padded to `rows` rows; only for pad_rows."""
    return Step(step.key, PadRows(rows), step.hf, step.specs, step.region, step.row)
