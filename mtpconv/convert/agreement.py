"""Config and tensors must agree before anything is written; MTP above all.

Real converters lose MTP in silence because they ask one side only. Here the config says how
many depths there are, the tensors say which are there, and any difference stops the command.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping

from mtpconv.audit.promise import read_promise
from mtpconv.convert.drop import drop_hint, droppable
from mtpconv.errors import RefusedError
from mtpconv.geometry import Config, Geometry
from mtpconv.mapping.check import check_plan, is_left_out, layer_of, unmapped_message
from mtpconv.mapping.layouts import Layout
from mtpconv.mapping.plan import Plan, make_plan
from mtpconv.mapping.table import Table
from mtpconv.ranges import compress
from mtpconv.tensors import TensorSpec

_NO_FLOATS = ("I", "U", "BOOL", "C")


def agreed_plan(
    config: Config,
    table: Table,
    inventory: Mapping[str, TensorSpec],
    layout: Callable[[Plan], Layout],
    *,
    where: str,
    drop_mtp: bool = False,
) -> tuple[Plan, tuple[str, ...]]:
    """The plan of a checkpoint whose config and tensors agree, and the MTP names left out.

    Without `drop_mtp` the second value is empty. `layout` says how the plan will be written,
    `where` names the checkpoint in messages.

    Raises: RefusedError naming what is missing, unmapped or promised in vain.
    """
    plan = make_plan(config, table, inventory)
    if not drop_mtp:
        require_one_promise(plan.geometry, where)
    faults = check_plan(plan, layout(plan))
    if faults:
        raise RefusedError(str(faults[0]))
    dropped: tuple[str, ...] = ()
    if drop_mtp:
        known = droppable(config, table, inventory.keys(), where)
        dropped = tuple(n for n in inventory if n in known)
        plan = make_plan(config, table, inventory, depths=0)
        inventory = {n: s for n, s in inventory.items() if n not in known}
    else:
        require_mtp(plan, inventory, where)
    if table.discards and not drop_mtp:
        known = droppable(config, table, inventory.keys(), where)
        hidden = [n for n in known - plan.hf.keys() if is_left_out(table, n)]
        if hidden:
            raise RefusedError(
                f"{where}: {table.path.name} discards MTP: {compress(sorted(hidden), 3)}; "
                "correct the discard, MTP is left out by --drop-mtp alone"
            )
    unmapped = [n for n in inventory if n not in plan.hf and not is_left_out(table, n)]
    if unmapped:
        hint = "nothing is converted, so that nothing is lost"
        text = unmapped_message(plan, unmapped)
        if "MTP lives" in text and not drop_mtp:
            more = drop_hint(config, table, inventory, unmapped)
            hint = f"correct the config, {more}" if more else "correct the config"
        raise RefusedError(f"{where}: M05 {text}; {hint}")
    absent = [n for n in plan.hf if n not in inventory]
    if absent:
        raise RefusedError(
            f"{where}: M06 {len(absent)} tensors are missing: {compress(absent, 4)}; "
            "fetch the shards that hold them"
        )
    for name, spec in inventory.items():
        wanted = plan.hf.get(name)
        if wanted is not None and spec.shape != wanted.shape:
            raise RefusedError(
                f"{where}: M17 {name} has shape {list(spec.shape)}, "
                f"config.json makes it {list(wanted.shape)}; one of them is wrong"
            )
    ints = [n for n, s in inventory.items() if n in plan.hf and s.dtype.startswith(_NO_FLOATS)]
    ints = [n for n in ints if not plan.hf[n].dtype.startswith(_NO_FLOATS)]
    if ints:
        raise RefusedError(
            f"{where}: M17 {len(ints)} tensors have {inventory[ints[0]].dtype} where config and "
            f"table make it {plan.hf[ints[0]].dtype}: {compress(ints, 4)}; no model computes with "
            "that"
        )
    return plan, dropped


def dtype_notes(plan: Plan, tensors: Mapping[str, TensorSpec]) -> Iterator[str]:
    """Floats of another kind than config and table say; they are converted as they are."""
    kinds: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, wanted in plan.hf.items():
        if name in tensors and tensors[name].dtype != wanted.dtype:
            kinds[tensors[name].dtype, wanted.dtype].append(name)
    for (dtype, wanted_dtype), names in kinds.items():
        yield (
            f"warning: {len(names)} tensors are {dtype} where config and table say "
            f"{wanted_dtype}, and stay so: {compress(names, 4)}"
        )


def require_one_promise(geometry: Geometry, where: str) -> None:
    """All fields of the config that count MTP depths say the same, and the plan says so too.

    Loaders read different ones, and many take the part of the config that another one ignores.

    Raises: RefusedError.
    """
    promise = read_promise(geometry.config)
    for _, fault in promise.contradictions:
        raise RefusedError(f"{where}: config.json: {fault}; correct the config")
    if promise.depths in (None, geometry.depths) or promise.never_shipped:
        return
    said = ", ".join(f"{path} = {value}" for path, value in promise.fields)
    raise RefusedError(
        f"{where}: config.json: {said}, which is not how {geometry.model_type} counts MTP depths "
        f"({geometry.depths} of them are known); correct the config"
    )


def require_mtp(plan: Plan, names: Collection[str], where: str) -> None:
    """Every MTP depth that the config promises is there, whole.

    Raises: RefusedError.
    """
    geometry = plan.geometry
    field = geometry.mtp_field or "the family"
    for depth in range(geometry.depths):
        wanted = [n for n, r in plan.regions.items() if r.kind == "mtp" and r.index == depth]
        absent = [n for n in wanted if n not in names]
        if not absent:
            continue
        promise = f"{field} = {geometry.depths} promises MTP depth {depth}"
        hint = drop_hint(geometry.config, plan.table, names, ())
        if len(absent) == len(wanted):
            raise RefusedError(
                f"{where}: {promise}, and all of its {len(wanted)} tensors are missing: "
                f"{compress(absent, 2)}; fetch the shards that hold them, {hint}"
            )
        raise RefusedError(
            f"{where}: {promise}, and {len(absent)} of its {len(wanted)} tensors are missing: "
            f"{compress(absent, 4)}; fetch the shards that hold them, {hint}"
        )


def is_mtp_name(plan: Plan, name: str) -> bool:
    """True for the HF names of MTP, promised by the config or not."""
    region = plan.regions.get(name)
    if region is not None:
        return region.kind == "mtp"
    layer = layer_of(name)
    if layer is not None and name.startswith("model.layers."):
        return layer >= plan.geometry.layers
    return name.startswith(("mtp.", "model.mtp"))
