"""Content that a dialect stores otherwise than the tables say.

Most dialects only have other keys. Some also keep a tensor as HuggingFace has it, or with its
rows in another order; the plan of such a checkpoint has other steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mtpconv.geometry import Geometry
from mtpconv.mapping.moves import Move, Op, ShapeError, rows_of, take
from mtpconv.mapping.ops import Copy, Qkv, SwapHalves
from mtpconv.mapping.plan import Plan, Step
from mtpconv.mapping.table import Row
from mtpconv.tensors import Box, Shape


@dataclass(frozen=True, slots=True)
class RopeLast(Op):
    """Rows in heads of `head` rows; the first `rope` rows of each come last.

    Source: slime slime_plugins/mbridge/deepseek_v32.py and
    slime/backends/megatron_utils/hf_to_megatron/deepseek.py, where the numbers are 128 and 64.
    """

    head: int
    rope: int
    name: ClassVar[str] = "rope_last"

    def _shape(self, operands: Sequence[Shape]) -> Shape:
        take(self, operands, 1)
        shape = operands[0]
        if not shape or not 0 < self.rope < self.head or shape[0] % self.head:
            raise ShapeError(f"rope_last: {shape} has no heads of {self.head} rows")
        return shape

    def _moves(self, operands: Sequence[Shape]) -> list[Move]:
        shape, rest = operands[0], self.head - self.rope
        found = []
        for first in range(0, shape[0], self.head):
            rope, others = rows_of(shape, first, self.rope), rows_of(shape, first + self.rope, rest)
            found.append(Move(0, rope, rows_of(shape, first + rest, self.rope)))
            found.append(Move(0, others, rows_of(shape, first, rest)))
        return found


@dataclass(frozen=True, slots=True)
class Transposed(Op):
    """The matrix that `op` makes, its two axes exchanged."""

    op: Op
    name: ClassVar[str] = "transposed"

    def _shape(self, operands: Sequence[Shape]) -> Shape:
        shape = self.op.shape(operands)
        if len(shape) != 2:
            raise ShapeError(f"transposed: {shape} is no matrix")
        return shape[::-1]

    def _moves(self, operands: Sequence[Shape]) -> list[Move]:
        return [
            Move(m.operand, m.hf, Box(m.mcore.offsets[::-1], m.mcore.sizes[::-1]), not m.swap)
            for m in self.op.moves(operands)
        ]


@dataclass(frozen=True, slots=True)
class Half(Op):
    """The first or the second half of the rows that `op` makes."""

    op: Op
    index: int
    name: ClassVar[str] = "half"
    partial: ClassVar[bool] = True

    def _shape(self, operands: Sequence[Shape]) -> Shape:
        shape = self.op.shape(operands)
        if not shape or shape[0] % 2:
            raise ShapeError(f"half: {shape} has no two halves")
        return (shape[0] // 2, *shape[1:])

    def _moves(self, operands: Sequence[Shape]) -> list[Move]:
        rows = self.shape(operands)[0]
        found = []
        for move in self.op.moves(operands):
            at = move.mcore.offsets[0] - self.index * rows
            first, end = max(at, 0), min(at + move.mcore.sizes[0], rows)
            if first < end:
                skip = first - at
                # Leading axes of size 1 stand on the HF side only: one expert of all.
                axis = len(move.hf.sizes) - len(move.mcore.sizes)
                hf = _stretch(move.hf, axis, move.hf.offsets[axis] + skip, end - first)
                found.append(Move(move.operand, hf, _stretch(move.mcore, 0, first, end - first)))
        return found


def _stretch(box: Box, axis: int, first: int, size: int) -> Box:
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[axis], sizes[axis] = first, size
    return Box(tuple(offsets), tuple(sizes))


@dataclass(frozen=True, slots=True)
class Halved:
    """Rows stored in two halves: how their keys end, and what follows for each half."""

    key: str
    ends: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Kept:
    """HF tensors stored as they are: how their names start in a layer, and the key there."""

    hf: str
    to: str


@dataclass(frozen=True, slots=True)
class Reordered:
    """A row of the tables whose content is stored in another order.

    `only` are the model types that are meant; none means all.
    """

    key: str
    op: str
    only: tuple[str, ...] = ()


#: How the op word of a dialect becomes an op, given the op of the tables.
REORDERINGS: Mapping[str, Callable[[Op, Geometry], Op]] = {
    "qkv": lambda op, g: Qkv(g.dim("num_key_value_heads")),
    "rope_last": lambda op, g: RopeLast(g.dim("index_head_dim"), g.dim("qk_rope_head_dim")),
    "swap_halves": lambda op, g: SwapHalves(),
    "transposed": lambda op, g: Transposed(op),
}


#: What makes a tensor of gate and up, halves that Megatron may store apart.
_GATED = ("concat", "slice")


def restored(
    plan: Plan,
    kept: Sequence[Kept],
    reordered: Sequence[Reordered],
    halved: Sequence[Halved] = (),
) -> Plan:
    """The plan of a checkpoint that stores content by these rules; `plan` itself without any.

    Law: the same HF names with the same specs.
    """
    model_type = plan.geometry.model_type
    orders = {r.key: r.op for r in reordered if not r.only or model_type in r.only}
    if not kept and not orders and not halved:
        return plan
    steps: list[Step] = []
    done: set[str] = set()
    ops: dict[tuple[str, int], Op] = {}
    copy = Copy()
    for step in plan.steps:
        rule = next((k for k in kept if step.row.hf[0].startswith(k.hf)), None)
        word = orders.get(step.row.key)
        cut = next((h for h in halved if step.row.key.endswith(h.key)), None)
        if rule is not None:
            # Several steps may share one HF tensor: each takes a part of it.
            steps += (s for s in _as_in_hf(step, rule, copy) if s.hf[0] not in done)
            done.update(step.hf)
        elif word is not None:
            at = (word, id(step.op))
            if at not in ops:
                ops[at] = REORDERINGS[word](step.op, plan.geometry)
            steps.append(step._replace(op=ops[at]))
        elif cut is not None and step.op.name in _GATED:
            steps += _halves(step, cut, copy, ops)
        else:
            steps.append(step)
    return replace(plan, steps=tuple(steps))


def _as_in_hf(step: Step, rule: Kept, copy: Op) -> Iterator[Step]:
    """One step for each HF tensor of a step."""
    prefix = step.key.removesuffix(step.row.key)
    for tail, name, spec in zip(step.row.hf, step.hf, step.specs, strict=True):
        key = rule.to + tail.removeprefix(rule.hf)
        row = Row(step.row.block, key, copy.name, (tail,), step.row.where)
        yield Step(prefix + key, copy, (name,), (spec,), step.region, row)


def _halves(step: Step, rule: Halved, copy: Op, ops: dict[tuple[str, int], Op]) -> Iterator[Step]:
    """Two steps for one: gate and up."""
    apart = step.op.name == "concat" and len(step.hf) == 2
    for index, end in enumerate(rule.ends):
        at = (end, id(step.op))
        if at not in ops:
            ops[at] = copy if apart else Half(step.op, index)
        mine = slice(index, index + 1) if apart else slice(None)
        op, key = ops[at], step.row.key + end
        row = Row(step.row.block, key, op.name, step.row.hf[mine], step.row.where)
        yield Step(step.key + end, op, step.hf[mine], step.specs[mine], step.region, row)
