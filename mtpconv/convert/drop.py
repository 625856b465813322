"""What `--drop-mtp` may leave out: tensors that the table knows as MTP, and nothing else.

A wrong `num_hidden_layers` makes trunk layers look like MTP depths. They lack what every MTP
depth has of its own (norms of embedding and hidden state, their projection), and so are told
apart here: the switch that drops MTP must never drop a trunk layer.
"""

from __future__ import annotations

from collections.abc import Collection

from mtpconv.errors import RefusedError
from mtpconv.geometry import Config, read_geometry
from mtpconv.mapping.plan import make_plan
from mtpconv.mapping.table import Table
from mtpconv.ranges import compress

DROP_HINT = "or pass --drop-mtp to leave MTP out (the written config then says 0)"

#: More depths than any release has; a depth that is there and not promised is still MTP.
_MOST = 8


def droppable(config: Config, table: Table, names: Collection[str], where: str) -> frozenset[str]:
    """The HF names among `names` that are MTP, promised by the config or not.

    Raises: RefusedError if one of the depths has nothing that only MTP has.
    """
    promised = read_geometry(config, table.mtp_default).depths
    plan = make_plan(config, table, names, depths=max(promised, _MOST))
    shared = {s.row.block for s in plan.steps if s.region.kind != "mtp"}
    found: dict[int, list[str]] = {}
    own: dict[int, list[str]] = {}
    for step in plan.steps:
        if step.region.kind == "mtp":
            here = [n for n in step.hf if n in names]
            found.setdefault(step.region.index, []).extend(here)
            if step.row.block not in shared:
                own.setdefault(step.region.index, []).extend(here)
    for depth, held in found.items():
        if held and not own.get(depth):
            layers = plan.geometry.layers
            raise RefusedError(
                f"{where}: {compress(held, 2)} would be MTP depth {depth}, and nothing that only "
                f"MTP has is beside them: a trunk layer? --drop-mtp drops none; "
                f"is num_hidden_layers = {layers} right?"
            )
    copies = {c.hf for c in plan.copies if c.region.kind == "mtp" and c.hf in names}
    return frozenset(copies.union(*found.values()))


def drop_hint(config: Config, table: Table, names: Collection[str], lost: Collection[str]) -> str:
    """The advice to drop MTP, only where that would help and cost nothing but MTP; else none."""
    try:
        known = droppable(config, table, names, "")
    except RefusedError:
        return "is num_hidden_layers right?"
    return DROP_HINT if known.issuperset(lost) else ""
