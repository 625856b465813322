"""Ops for fused projections: attention with query groups, and tensors stored in named parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mtpconv.mapping.moves import Move, Op, ShapeError, rows_of, same_tail, take
from mtpconv.tensors import Shape

#: Query heads, groups of them or repeated parts of one tensor; released models have up to 128.
_MOST_HEADS = 1 << 14


@dataclass(frozen=True, slots=True)
class Qkv(Op):
    """Operands cut into `groups` blocks of rows and interleaved: q, k, v of each group in turn.

    Weights and biases alike. Source: Megatron-Core SelfAttention.get_query_key_value_tensors
    (megatron-core 0.16.1 and 0.19.2).
    """

    groups: int
    name: ClassVar[str] = "qkv"

    def _shape(self, operands: Sequence[Shape]) -> Shape:
        same_tail(self, operands)
        _require_few(self, self.groups)
        for shape in operands:
            if not self.groups or shape[0] % self.groups:
                raise ShapeError(f"qkv: {shape[0]} rows are no multiple of {self.groups} groups")
        return (sum(o[0] for o in operands), *operands[0][1:])

    def _moves(self, operands: Sequence[Shape]) -> list[Move]:
        found, row = [], 0
        for group in range(self.groups):
            for i, shape in enumerate(operands):
                rows = shape[0] // self.groups
                found.append(Move(i, rows_of(shape, group * rows, rows), rows_of(shape, row, rows)))
                row += rows
        return found


@dataclass(frozen=True, slots=True)
class QkvGate(Op):
    """q, k, v as in qkv, and behind all groups one row of output gate for each head (Step-3.5).

    Source: Megatron-Bridge param_mapping.py `QKVGMapping`.
    """

    groups: int
    name: ClassVar[str] = "qkv_gate"

    def _shape(self, operands: Sequence[Shape]) -> Shape:
        take(self, operands, 4)
        same_tail(self, operands)
        rows, *tail = Qkv(self.groups).shape(operands[:3])
        return (rows + operands[3][0], *tail)

    def _moves(self, operands: Sequence[Shape]) -> list[Move]:
        gate, qkv = operands[3], operands[:3]
        behind = sum(o[0] for o in qkv)
        last = Move(3, rows_of(gate, 0, gate[0]), rows_of(gate, behind, gate[0]))
        return [*Qkv(self.groups).moves(qkv), last]


@dataclass(frozen=True, slots=True)
class GatedQkv(Op):
    """q, k, v of attention with an output gate, q holding query and gate of each head in turn.

    Per query group: queries of its heads, gates of its heads, k, v. Source: Megatron-Core
    SelfAttention.get_query_key_value_tensors, `output_gate` (megatron-core 0.16.1 and 0.19.2);
    transformers 5.24 modeling_qwen3_next.py. mcore-bridge keeps the pairs of each head instead.
    """

    heads: int
    groups: int
    name: ClassVar[str] = "gated_qkv"

    def _shape(self, operands: Sequence[Shape]) -> Shape:
        take(self, operands, 3)
        same_tail(self, operands)
        _require_few(self, self.heads)
        if not self.groups or not self.heads or self.heads % self.groups:
            raise ShapeError(
                f"gated_qkv: {self.heads} heads are no multiple of {self.groups} groups"
            )
        parts_of = (2 * self.heads, self.groups, self.groups)
        for rows, parts in zip((o[0] for o in operands), parts_of, strict=True):
            if rows % parts:
                raise ShapeError(f"gated_qkv: {rows} rows are no multiple of {parts}")
        return (sum(o[0] for o in operands), *operands[0][1:])

    def _moves(self, operands: Sequence[Shape]) -> list[Move]:
        q, k, v = operands
        of_head, per_group = q[0] // (2 * self.heads), self.heads // self.groups
        found, row = [], 0
        for group in range(self.groups):
            for half in (0, 1):
                for head in range(group * per_group, (group + 1) * per_group):
                    from_row = (2 * head + half) * of_head
                    found.append(Move(0, rows_of(q, from_row, of_head), rows_of(q, row, of_head)))
                    row += of_head
            for i, shape in ((1, k), (2, v)):
                rows = shape[0] // self.groups
                found.append(Move(i, rows_of(shape, group * rows, rows), rows_of(shape, row, rows)))
                row += rows
        return found


@dataclass(frozen=True, slots=True)
class FusedQkv(Op):
    """One tensor of all queries, then keys, then values; in Megatron q, k, v of each group."""

    heads: int
    groups: int
    name: ClassVar[str] = "fused_qkv"

    def _shape(self, operands: Sequence[Shape]) -> Shape:
        take(self, operands, 1)
        same_tail(self, operands)
        _require_few(self, self.heads)
        parts = self.heads + 2 * self.groups
        if not self.groups or self.heads % self.groups or operands[0][0] % parts:
            raise ShapeError(
                f"fused_qkv: {operands[0][0]} rows are not {self.heads} heads "
                f"and twice {self.groups} groups"
            )
        return operands[0]

    def _moves(self, operands: Sequence[Shape]) -> list[Move]:
        shape = operands[0]
        of_head = shape[0] // (self.heads + 2 * self.groups)
        queries = self.heads // self.groups * of_head
        starts = (0, self.heads * of_head, (self.heads + self.groups) * of_head)
        found, row = [], 0
        for group in range(self.groups):
            for start, rows in zip(starts, (queries, of_head, of_head), strict=True):
                from_row = start + group * rows
                found.append(Move(0, rows_of(shape, from_row, rows), rows_of(shape, row, rows)))
                row += rows
        return found


@dataclass(frozen=True, slots=True)
class Part(Op):
    """Part `index` of a tensor whose rows are cut into parts, `repeats` times over.

    Megatron stores such tensors in pieces, `in_proj.weight.query` and so on. Source:
    Megatron-Core ssm/utils.py `_split_tensor_factory` (0.19.2; 0.16.1 in gated_delta_net.py).
    """

    repeats: int
    rows: tuple[int, ...]
    index: int
    name: ClassVar[str] = "part"
    partial: ClassVar[bool] = True

    def _shape(self, operands: Sequence[Shape]) -> Shape:
        take(self, operands, 1)
        same_tail(self, operands)
        _require_few(self, self.repeats)
        if operands[0][0] != self.repeats * sum(self.rows):
            raise ShapeError(
                f"part: {operands[0][0]} rows are not {self.repeats} times {list(self.rows)}"
            )
        return (self.repeats * self.rows[self.index], *operands[0][1:])

    def _moves(self, operands: Sequence[Shape]) -> list[Move]:
        shape, rows = operands[0], self.rows[self.index]
        before, stride = sum(self.rows[: self.index]), sum(self.rows)
        return [
            Move(0, rows_of(shape, i * stride + before, rows), rows_of(shape, i * rows, rows))
            for i in range(self.repeats)
        ]


def _require_few(op: Op, count: int) -> None:
    """A config may say any number of heads; there is a move for each. Raises: ShapeError."""
    if count > _MOST_HEADS:
        raise ShapeError(f"{op.name}: {count} heads; no model has so many")
