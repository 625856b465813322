"""Static rules over a table, a plan and an inventory: coverage proven without any weights.

Each rule has a stable code; docs/mapping.md lists them with cause and cure.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from mtpconv.errors import MtpconvError, UsageError
from mtpconv.geometry import FACTS, Config, read_geometry
from mtpconv.mapping.layouts import DIALECTS, Layout, addresses, layout_of, training_layout
from mtpconv.mapping.ops import BUILDERS, ShapeError
from mtpconv.mapping.plan import Plan, Step, make_plan
from mtpconv.mapping.table import EACH, PLACEHOLDERS, Fault, Stack, Table
from mtpconv.mapping.table_reader import read_table
from mtpconv.ranges import compress
from mtpconv.tensors import Box, TensorSpec
from mtpconv.tiling import tiling_flaw

#: Code and meaning of every static rule.
RULES: Mapping[str, str] = {
    "M01": "unknown key or wrong form",
    "M02": "unknown op",
    "M03": "unknown fact",
    "M04": "unknown placeholder, or the two sides have different ones",
    "M05": "HF tensor that no row consumes",
    "M06": "row that names an HF tensor the inventory lacks",
    "M07": "block or group that no stack uses, or a use of one that does not exist",
    "M08": "Megatron tensor produced twice",
    "M09": "HF tensor consumed twice, or not whole",
    "M10": "shape law of an op broken",
    "M11": "layout that spells two tensors alike",
    "M12": "discard without a reason",
    "M13": "config promises MTP but no stack iterates it",
    "M14": "crossed leaf names",
    "M15": "HF name without dims in [shapes]",
    "M16": "block defined twice, or an include outside blocks/",
    "M17": "shape in the inventory differs from the plan",
}

#: Keys that a reader of torch_dist takes for optimizer state, as mtpconv.store.dist_metadata does.
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
_PLACEHOLDER = re.compile(r"\{(\w*)\}")


def own_table(path: Path) -> Table:
    """A table that a user brings: unlike the shipped ones nobody has tested it.

    Raises: UsageError that names the first broken rule of those that need nothing but the table,
    or as `read_table`.
    """
    table = read_table(path)
    for fault in check_table(table):
        raise UsageError(str(fault))
    return table


def check_table(table: Table) -> list[Fault]:
    """Rules that need nothing but the table."""
    faults = list(table.faults)
    used = {use.name for stack in table.stacks for use in table.uses(stack)}
    used |= {use.name for stack in table.stacks for use in stack.use}
    for name in used - set(table.blocks) - set(table.groups):
        faults.append(Fault("M07", f"{table.path.name}:1", f"no block or group is called {name!r}"))
    for name, rows in table.blocks.items():
        own = rows and rows[0].where.startswith(table.path.name + ":")
        if own and name not in used:
            faults.append(Fault("M07", rows[0].where, f"block {name!r} is used by no stack"))
    for stack in table.stacks:
        faults += _placeholders(table, stack)
        faults += _crossed(table, stack)
        faults += _unreadable(table, stack)
    names = {n for rows in table.blocks.values() for r in rows for n in r.hf}
    for rows in table.blocks.values():
        for row in rows:
            if row.block in used:
                faults += [
                    Fault("M15", row.where, f"{n} has no entry in [shapes]; add its dims")
                    for n in row.hf
                    if n not in table.shapes
                ]
    for name in table.dtypes:
        if name not in names:
            faults.append(Fault("M01", f"{table.path.name}:1", f"[dtypes] names no row: {name}"))
    if table.local_spec is not None and table.local_spec not in DIALECTS:
        message = f"local_spec {table.local_spec!r} is no layout; known: {', '.join(DIALECTS)}"
        faults.append(Fault("M01", f"{table.path.name}:1", message))
    return faults


def check_plan(plan: Plan, layout: Layout | None = None) -> list[Fault]:
    """Rules that need a geometry: uniqueness, shape laws, tiling, layouts, MTP."""
    faults: list[Fault] = []
    where = f"{plan.table.path.name}:1"
    for key, count in Counter(s.key for s in plan.steps).items():
        if count > 1:
            row = next(s.row for s in plan.steps if s.key == key)
            faults.append(Fault("M08", row.where, f"{key} is produced {count} times"))
    seen: set[tuple[str, str]] = set()
    for step in plan.steps:
        if (step.row.block, step.row.key) in seen:
            continue
        seen.add((step.row.block, step.row.key))
        try:
            _ = step.shape
        except ShapeError as error:
            faults.append(Fault("M10", step.row.where, f"{step.key}: {error}"))
    if not faults:
        faults += _consumption(plan)
    if not faults:
        for each in [layout] if layout is not None else _layouts(plan):
            spots = Counter(addresses(plan, each))
            twice = [a for a, n in spots.items() if n > 1]
            if twice:
                text = f"layout {each.name} spells {len(twice)} tensors alike, first {twice[0].key}"
                faults.append(Fault("M11", where, text))
    has_mtp = any(s.region.kind == "mtp" for s in plan.steps)
    if plan.geometry.depths and not has_mtp:
        text = (
            f"config promises {plan.geometry.depths} MTP depths and no stack iterates them; "
            'add stacks with each = "depth in mtp"'
        )
        faults.append(Fault("M13", where, text))
    return faults


def check_inventory(plan: Plan, inventory: Mapping[str, TensorSpec | None]) -> list[Fault]:
    """Coverage of a real checkpoint; a None spec (index only) leaves shapes unchecked."""
    where = plan.table.path.name
    faults = []
    unmapped = [n for n in inventory if n not in plan.hf and not is_left_out(plan.table, n)]
    if unmapped:
        faults.append(Fault("M05", f"{where}:1", unmapped_message(plan, unmapped)))
    absent = [n for n in plan.hf if n not in inventory]
    if absent:
        mtp = sum(plan.regions[n].kind == "mtp" for n in absent)
        faults.append(
            Fault(
                "M06",
                f"{where}:1",
                f"{len(absent)} tensors of the plan ({mtp} of them MTP) are not in the inventory: "
                + compress(absent, 4),
            )
        )
    for name, spec in inventory.items():
        wanted = plan.hf.get(name)
        if spec is not None and wanted is not None and spec.shape != wanted.shape:
            text = f"{name}: shape {list(spec.shape)}, config makes it {list(wanted.shape)}"
            faults.append(Fault("M17", f"{where}:1", text))
    return faults


def check(
    table: Table,
    config: Config | None = None,
    inventory: Mapping[str, TensorSpec | None] | None = None,
) -> list[Fault]:
    """All rules for which enough was given, each fault once."""
    faults = check_table(table)
    if faults or config is None:
        return faults
    try:
        plan = make_plan(config, table, inventory)
    except MtpconvError as error:
        return [Fault("M13" if "MTP" in str(error) else "M01", f"{table.path.name}:1", str(error))]
    faults = check_plan(plan)
    if not faults and inventory is not None:
        faults = check_inventory(plan, inventory)
    return faults


def unmapped_message(plan: Plan, names: Sequence[str]) -> str:
    """One line that says which HF tensors the table does not know, and what to do."""
    geometry = plan.geometry
    text = f"{len(names)} tensors are not in the table: {compress(names, 4)}"
    orphan = [n for n in names if (f := layer_of(n)) is not None and f >= geometry.layers]
    if orphan:
        field = geometry.mtp_field or "num_nextn_predict_layers"
        promised = geometry.config.get(field, geometry.text.get(field, "absent"))
        text += (
            f"; {len(orphan)} of them lie behind the trunk's {geometry.layers} layers, "
            f"where MTP lives, but config.json {field} is {promised}"
        )
    return text


_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """Layer number in a name, None if it has none."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def left_out(table: Table, names: Iterable[str]) -> dict[str, str]:
    """Those of the names that a table carries beside or discards, and which of the two."""
    found = {}
    for name in names:
        if is_carried(table, name):
            found[name] = "carried beside the table"
        elif (reason := discard_reason(table, name)) is not None:
            found[name] = f"discarded by the table ({reason})"
    return found


def is_left_out(table: Table, name: str) -> bool:
    """True for names that a table carries beside or discards with a reason."""
    return is_carried(table, name) or discard_reason(table, name) is not None


def discard_reason(table: Table, name: str) -> str | None:
    """Why a table leaves a name out on purpose, None if it does not."""
    if is_carried(table, name):
        return None
    return next((d.reason for d in table.discards if _glob(d.hf, name)), None)


def is_carried(table: Table, name: str) -> bool:
    """True for names that a table carries beside the Megatron checkpoint."""
    return any(_glob(p, name) for p in table.carried)


def _glob(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name) is not None


def _layouts(plan: Plan) -> Iterator[Layout]:
    yield Layout()
    yield training_layout(plan)
    if plan.table.local_spec is not None:
        names = [d.name for d in training_layout(plan).dialects]
        yield layout_of([*names, plan.table.local_spec])


def _placeholders(table: Table, stack: Stack) -> Iterator[Fault]:
    if stack.each != "once" and not (
        {"layer", "depth", "inner"} & set(_PLACEHOLDER.findall(stack.mcore))
    ):
        yield Fault("M04", stack.where, f"{stack.mcore!r} does not depend on {stack.each!r}")
    for use in table.uses(stack):
        for row in table.blocks.get(use.name, ()):
            left = set(_PLACEHOLDER.findall(row.key))
            right = set().union(*(_PLACEHOLDER.findall(n) for n in row.hf))
            sliced = {"expert"} if row.op == "slice" else set()
            if left - PLACEHOLDERS or right - PLACEHOLDERS:
                odd = sorted((left | right) - PLACEHOLDERS)[0]
                yield Fault("M04", row.where, f"unknown placeholder {{{odd}}}")
            elif left != right | sliced:
                yield Fault(
                    "M04", row.where, f"{row.key}: left has {sorted(left)}, right {sorted(right)}"
                )


def _unreadable(table: Table, stack: Stack) -> Iterator[Fault]:
    """Rows whose tensor no reader of the Megatron checkpoint would find."""
    for use in table.uses(stack):
        for row in table.blocks.get(use.name, ()):
            key = _PLACEHOLDER.sub("0", stack.mcore + row.key)
            if _OPTIMIZER.match(key):
                yield Fault("M01", row.where, f"{key} would be read back as optimizer state")
            elif not key:
                yield Fault("M01", row.where, f"{list(row.hf)} has an empty key")


def _stem(name: str) -> str:
    return name.rsplit(".", 1)[0]


def _leaf(name: str) -> str:
    """The module a tensor belongs to, numbers left out."""
    module = name.rpartition(".")[0]
    return next((w for w in reversed(module.split(".")) if not w.isdecimal()), "")


def _crossed(table: Table, stack: Stack) -> Iterator[Fault]:
    """Rows that pair a name that stands on both sides with another one.

    Within a block the last word of a name counts, across the blocks of a stack the whole tail.
    """
    blocks = {use.name: table.blocks.get(use.name, ()) for use in table.uses(stack)}
    every = [r for rows in blocks.values() for r in rows]
    left = {_stem(r.key) for r in every}
    right = {_stem(n) for r in every for n in r.hf}
    for rows in blocks.values():
        words_left = {_leaf(r.key) for r in rows} - {""}  # a name without a dot has no module
        words_right = {_leaf(n) for r in rows for n in r.hf} - {""}
        for row in rows:
            if row.op not in ("copy", "pad_rows") or len(row.hf) != 1:
                continue
            if row.key.endswith(".layer_norm_weight"):  # fused, under its projection's name
                continue
            key, name = row.key, row.hf[0]
            if {key.rpartition(".")[2], name.rpartition(".")[2]} == {"weight", "bias"}:
                crossed = "weight"
            elif _leaf(key) == _leaf(name):
                continue
            elif _leaf(key) in words_right or _stem(key) in right:
                crossed = _leaf(key)
            elif _leaf(name) in words_left or _stem(name) in left:
                crossed = _leaf(name)
            else:
                continue
            yield Fault(
                "M14",
                row.where,
                f"{key} is paired with {name}, though {crossed} exists on both sides; "
                "a swap here survives every round trip",
            )


def _consumption(plan: Plan) -> Iterator[Fault]:
    """Every HF tensor is tiled exactly once; whole consumption is the fast, common case."""
    whole = Counter(n for s in plan.steps if not s.op.partial for n in s.hf)
    boxes: dict[str, list[tuple[Box, Step]]] = defaultdict(list)
    for step in plan.steps:
        if step.op.partial:
            shapes = [s.shape for s in step.specs]
            for move in step.op.moves(shapes):
                boxes[step.hf[move.operand]].append((move.hf, step))
    for name, count in whole.items():
        if count > 1 or name in boxes:
            row = next(s.row for s in plan.steps if name in s.hf)
            yield Fault("M09", row.where, f"{name} is consumed {count + (name in boxes)} times")
    for name, parts in boxes.items():
        flaw = tiling_flaw(plan.hf[name].shape, [box for box, _ in parts])
        if flaw:
            text = f"{name} is not consumed exactly once: the parts that rows take {flaw}"
            yield Fault("M09", parts[0][1].row.where, text)


def known_words() -> Mapping[str, Collection[str]]:
    """The closed vocabularies of the language, for the docs."""
    return {"op": list(BUILDERS), "fact": list(FACTS), "each": list(EACH)}


def promised_depths(config: Config, table: Table | None = None) -> int:
    """MTP depths that a config promises."""
    return read_geometry(config, table.mtp_default if table else None).depths
