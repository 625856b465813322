"""Layouts: how one and the same model is spelled on the Megatron side.

Tables name every Megatron tensor per layer and per expert, with the names of a training run.
A layout respells these keys: other norm names, an expert axis in place of an expert number, a
layer axis in place of a layer number. A few also store content otherwise (`as_stored`). A reader
picks the layout from the keys it finds.
"""

from __future__ import annotations

import itertools
import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod

from mtpconv.errors import UsageError
from mtpconv.geometry import Geometry
from mtpconv.mapping.plan import Plan, Step
from mtpconv.mapping.stored import Halved, Kept, Reordered, restored
from mtpconv.mapping.table_reader import mappings_folder
from mtpconv.tensors import Shape


@dataclass(frozen=True, slots=True)
class Address:
    """Where a step's tensor lies: entry `index` of the leading axes `lead` of tensor `key`."""

    key: str
    index: Shape = ()
    lead: Shape = ()


@dataclass(frozen=True, slots=True)
class Respelling:
    """One rule: a stretch of a key, by pattern, and what stands there instead.

    With `number` = (a, b), `{n}` in `to` is a times the layer or expert number plus b.
    """

    pattern: re.Pattern[str]
    to: str
    axis: str | None
    number: tuple[int, int] | None
    #: text of every key that the pattern matches; most keys lack it, and this is seen faster
    needle: str


@dataclass(frozen=True)
class Dialect:
    """One file of `mappings/layouts`: respellings that always come together."""

    name: str
    about: str
    excludes: tuple[str, ...]
    rules: tuple[Respelling, ...]
    #: only ever found, never written: no Megatron was seen to load it as torch_dist
    read_only: bool = False
    #: what is stored as HF has it, what in another order, and what in halves
    kept: tuple[Kept, ...] = ()
    reordered: tuple[Reordered, ...] = ()
    halved: tuple[Halved, ...] = ()


@dataclass(frozen=True)
class Layout:
    """Dialects applied in the order of `DIALECTS`; none at all is the tables' own spelling."""

    dialects: tuple[Dialect, ...] = ()
    #: addresses by numbers of layers and experts: checks, readers and writers all ask for them
    _known: dict[Shape, dict[str, Address]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def name(self) -> str:
        """Names of the dialects, joined."""
        return (
            "+".join(d.name for d in self.dialects) or "transformer_engine, per layer, per expert"
        )

    def address(self, key: str, geometry: Geometry) -> Address:
        """Where the tensor that tables call `key` lies."""
        known = self._known.setdefault((geometry.layers, geometry.experts), {})
        found = known.get(key)
        if found is None:
            found = known[key] = self._spell(key, geometry)
        return found

    def _spell(self, key: str, geometry: Geometry) -> Address:
        index: list[int] = []
        lead: Shape = ()
        for dialect in self.dialects:
            for rule in dialect.rules:
                if rule.needle not in key:
                    continue
                found = rule.pattern.search(key)
                if found is None:
                    continue
                to = rule.to
                if rule.number is not None:
                    to = to.replace("{n}", str(rule.number[0] * int(found[1]) + rule.number[1]))
                key = key[: found.start()] + to + key[found.end() :]
                if rule.axis is not None:
                    index.append(int(found[1]))
                    lead = _longer(
                        lead, geometry.layers if rule.axis == "layer" else geometry.experts
                    )
        return Address(sys.intern(key), tuple(index), lead)  # a checkpoint has the same keys


@cache
def _longer(lead: Shape, size: int) -> Shape:
    """Leading axes and one more; of the few there are, each is held once."""
    return (*lead, size)


#: Order matters: a layer axis comes before an expert axis. All of `mappings/layouts`.
DIALECTS = (
    "stacked_layers", "stacked_experts", "grouped_gemm", "singleton_local_shards",
    "local_spec_mla", "local_spec_gqa", "local_modules_gqa", "mtp_model_layer", "hybrid_layers",
    "slime_linear_attention", "slime_indexer", "mcore_bridge_modules", "language_model",
)  # fmt: skip
_NUMBER = re.compile(r"\{(\d+)\*(?:layer|expert)(?:\+(\d+))?\}")


@cache
def read_dialect(name: str) -> Dialect:
    """A shipped dialect.

    Raises: UsageError if there is none of that name.
    """
    path = mappings_folder() / "layouts" / f"{name}.toml"
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"layout {name!r}: unknown; known: {', '.join(DIALECTS)}") from error
    return Dialect(
        name,
        raw["about"],
        tuple(raw.get("excludes", ())),
        tuple(_rule(r) for r in raw.get("respell", ())),
        raw.get("read_only") is True,
        tuple(Kept(r["hf"], r["to"]) for r in raw.get("kept", ())),
        tuple(
            Reordered(r["key"], r["op"], tuple(r.get("only", ()))) for r in raw.get("reordered", ())
        ),
        tuple(Halved(r["key"], tuple(r["ends"])) for r in raw.get("halved", ())),
    )


def _rule(raw: Mapping[str, str]) -> Respelling:
    parts = re.split(r"\{(layer|expert)\}", raw["from"])
    pattern = "".join(re.escape(p) if i % 2 == 0 else r"(\d+)" for i, p in enumerate(parts))
    needle = max(parts[::2], key=len)
    found = _NUMBER.search(raw["to"])
    number = (int(found[1]), int(found[2] or 0)) if found else None
    to = _NUMBER.sub("{n}", raw["to"])
    return Respelling(re.compile(pattern), to, raw.get("axis"), number, needle)


def layout_of(names: Iterable[str]) -> Layout:
    """The layout made of these dialects.

    Raises: UsageError for one that does not exist, and for two that exclude each other.
    """
    wanted = set(names)
    unknown = wanted - set(DIALECTS)
    if unknown:
        raise UsageError(f"layout {sorted(unknown)[0]!r}: unknown; known: {', '.join(DIALECTS)}")
    layout = Layout(tuple(read_dialect(n) for n in DIALECTS if n in wanted))
    for dialect in layout.dialects:
        for other in dialect.excludes:
            if other in wanted:
                raise UsageError(f"layout: {dialect.name} and {other} exclude each other")
    return layout


def training_layout(plan: Plan) -> Layout:
    """The layout in which a training run with Transformer Engine writes this model.

    Layers are stacked exactly if all are alike. Source: megatron-core 0.16.1
    transformer_block.py `sharded_state_dict` (`non_homogeneous_layers`).
    """
    names = ["stacked_experts"]
    kinds = {
        tuple(sorted({s.row.key for s in steps}))
        for _, steps in itertools.groupby(
            (s for s in plan.steps if s.region.kind == "trunk"), key=lambda s: s.region
        )
    }
    if len(kinds) == 1:
        names.append("stacked_layers")
    return layout_of(names)


def detect_layout(plan: Plan, keys: Collection[str]) -> Layout:
    """The layout under which most of the plan's tensors are found among `keys`.

    Decided on one step per row and kind of region, so the cost does not grow with the model.
    """
    samples: dict[tuple[str, str, str], Step] = {}
    for step in plan.steps:
        samples.setdefault((step.row.block, step.row.key, step.region.kind), step)
    few = replace(plan, steps=tuple(samples.values()), copies=())
    plain = addresses(few, Layout())
    # One that respells nothing here would only double the work.
    able = [n for n in DIALECTS if _spelled(few, layout_of([n])) != plain]
    best, best_score = Layout(), (-1, 0)
    for size in range(len(able) + 1):
        for names in itertools.combinations(able, size):
            if any(n in read_dialect(d).excludes for d in names for n in names):
                continue
            layout = layout_of(names)
            hits = sum(spot.key in keys for spot in _spelled(few, layout))
            if (hits, -size) > best_score:
                best, best_score = layout, (hits, -size)
    return best


def as_stored(plan: Plan, layout: Layout) -> Plan:
    """The plan of a checkpoint in this layout: other steps where content is stored otherwise."""
    return restored(
        plan,
        [rule for dialect in layout.dialects for rule in dialect.kept],
        [rule for dialect in layout.dialects for rule in dialect.reordered],
        [rule for dialect in layout.dialects for rule in dialect.halved],
    )


def _spelled(plan: Plan, layout: Layout) -> Sequence[Address]:
    return addresses(as_stored(plan, layout), layout)


def addresses(plan: Plan, layout: Layout) -> Sequence[Address]:
    """Address of every step, in order."""
    return [layout.address(s.key, plan.geometry) for s in plan.steps]


def first_hole(plan: Plan, layout: Layout) -> str | None:
    """The first stacked tensor that the plan does not fill, None if all are whole."""
    filled: dict[tuple[str, Shape], int] = {}
    for spot in addresses(plan, layout):
        filled[spot.key, spot.lead] = filled.get((spot.key, spot.lead), 0) + 1
    return next((key for (key, lead), n in filled.items() if n != prod(lead)), None)
