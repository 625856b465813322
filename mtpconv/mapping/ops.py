"""Ops: the words of the mapping language that say how HF tensors become one Megatron tensor.

Each is a permutation written as moves, so that both directions follow from one place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from mtpconv.geometry import Geometry
from mtpconv.mapping.attention_ops import FusedQkv, GatedQkv, Part, Qkv, QkvGate
from mtpconv.mapping.moves import PADDING, Move, Op, ShapeError, Words, rows_of, same_tail, take
from mtpconv.tensors import Box, Shape

__all__ = [
    "BUILDERS", "PADDING", "Concat", "Copy", "FusedQkv", "GatedQkv", "MinusOne", "Move", "Op",
    "PadRows", "Part", "Qkv", "QkvGate", "ShapeError", "Site", "Slice", "Squeeze", "SwapHalves",
    "Transpose", "Words",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Copy(Op):
    """One tensor under another name."""

    name: ClassVar[str] = "copy"

    def _shape(self, operands: Sequence[Shape]) -> Shape:
        take(self, operands, 1)
        return operands[0]

    def _moves(self, operands: Sequence[Shape]) -> list[Move]:
        whole = Box.whole(operands[0])
        return [Move(0, whole, whole)]


@dataclass(frozen=True, slots=True)
class MinusOne(Copy):
    """A norm's gamma, centred on one in HF and on zero in Megatron: moved like a copy, less 1."""

    name: ClassVar[str] = "minus_one"
    arithmetic: ClassVar[str | None] = "minus_one"


@dataclass(frozen=True, slots=True)
class Concat(Op):
    """Operands one after another along axis 0 (gate, then up)."""

    name: ClassVar[str] = "concat"

    def _shape(self, operands: Sequence[Shape]) -> Shape:
        same_tail(self, operands)
        return (sum(o[0] for o in operands), *operands[0][1:])

    def _moves(self, operands: Sequence[Shape]) -> list[Move]:
        found, row = [], 0
        for i, shape in enumerate(operands):
            found.append(Move(i, Box.whole(shape), rows_of(shape, row, shape[0])))
            row += shape[0]
        return found


@dataclass(frozen=True, slots=True)
class Squeeze(Op):
    """A leading axis of size 1 dropped."""

    name: ClassVar[str] = "squeeze"

    def _shape(self, operands: Sequence[Shape]) -> Shape:
        take(self, operands, 1)
        if operands[0][:1] != (1,):
            raise ShapeError(f"squeeze: {operands[0]} does not begin with an axis of size 1")
        return operands[0][1:]

    def _moves(self, operands: Sequence[Shape]) -> list[Move]:
        return [Move(0, Box.whole(operands[0]), Box.whole(operands[0][1:]))]


@dataclass(frozen=True, slots=True)
class SwapHalves(Op):
    """The two halves of axis 1 exchanged (MiMo's eh_proj: [hidden, embedding])."""

    name: ClassVar[str] = "swap_halves"

    def _shape(self, operands: Sequence[Shape]) -> Shape:
        take(self, operands, 1)
        if len(operands[0]) != 2 or operands[0][1] % 2:
            raise ShapeError(f"swap_halves: {operands[0]} has no two halves along axis 1")
        return operands[0]

    def _moves(self, operands: Sequence[Shape]) -> list[Move]:
        rows, columns = operands[0]
        left, right = (
            Box((0, 0), (rows, columns // 2)),
            Box((0, columns // 2), (rows, columns // 2)),
        )
        return [Move(0, left, right), Move(0, right, left)]


@dataclass(frozen=True, slots=True)
class Slice(Op):
    """Entry `index` of axis 0 of packed tensors (one expert of all experts), gate then up.

    A packed tensor is an operand of one step per entry; together they tile it.
    """

    index: int
    name: ClassVar[str] = "slice"
    partial: ClassVar[bool] = True

    def _shape(self, operands: Sequence[Shape]) -> Shape:
        for shape in operands:
            if len(shape) < 2 or self.index >= shape[0]:
                raise ShapeError(f"slice: {shape} has no entry {self.index}")
        if len(operands) == 1:
            return operands[0][1:]
        return Concat().shape([o[1:] for o in operands])

    def _moves(self, operands: Sequence[Shape]) -> list[Move]:
        found, row = [], 0
        for i, (_, *axes) in enumerate(operands):
            tail = tuple(axes)
            entry = Box((self.index, *(0 for _ in tail)), (1, *tail))
            found.append(Move(i, entry, rows_of(tail, row, tail[0])))
            row += tail[0]
        return found


@dataclass(frozen=True, slots=True)
class Transpose(Op):
    """The last two axes exchanged."""

    name: ClassVar[str] = "transpose"

    def _shape(self, operands: Sequence[Shape]) -> Shape:
        take(self, operands, 1)
        if len(operands[0]) < 2:
            raise ShapeError(f"transpose: {operands[0]} has no two axes")
        *lead, rows, columns = operands[0]
        return (*lead, columns, rows)

    def _moves(self, operands: Sequence[Shape]) -> list[Move]:
        return [Move(0, Box.whole(operands[0]), Box.whole(self.shape(operands)), swap=True)]


@dataclass(frozen=True, slots=True)
class PadRows(Op):
    """A tensor whose Megatron side may have more rows; the extra ones are zero.

    `rows` None means no padding. Only rows proven to be zero are cut on the way back: whoever
    reads the Megatron side checks them.
    """

    rows: int | None = None
    name: ClassVar[str] = "pad_rows"

    def _shape(self, operands: Sequence[Shape]) -> Shape:
        take(self, operands, 1)
        if not operands[0]:
            raise ShapeError("pad_rows: a scalar has no rows")
        rows = operands[0][0] if self.rows is None else self.rows
        if rows < operands[0][0]:
            raise ShapeError(f"pad_rows: {operands[0][0]} rows do not fit in {rows}")
        return (rows, *operands[0][1:])

    def _moves(self, operands: Sequence[Shape]) -> list[Move]:
        shape = operands[0]
        found = [Move(0, Box.whole(shape), Box.whole(shape))]
        extra = self.shape(operands)[0] - shape[0]
        if extra:
            padding = rows_of(shape, shape[0], extra)
            found.append(Move(PADDING, padding, padding))
        return found


@dataclass(frozen=True, slots=True)
class Site:
    """Where a row is instantiated: all that an op may depend on.

    `part` is what the table's [parts] says of the operand: repeats, rows of each part, and which.
    """

    geometry: Geometry
    layer: int
    expert: int | None = None
    part: tuple[int, tuple[int, ...], int] | None = None

    def dim(self, name: str) -> int:
        """A dim of the geometry at this layer."""
        return self.geometry.dim(name, self.layer)


def _part(site: Site) -> Op:
    if site.part is None:
        raise ShapeError("part: the table's [parts] does not name the operand and this part of it")
    return Part(*site.part)


#: How a table's op word becomes an op.
BUILDERS: Mapping[str, Callable[[Site], Op]] = {
    "copy": lambda s: Copy(),
    "minus_one": lambda s: MinusOne(),
    "concat": lambda s: Concat(),
    "qkv": lambda s: Qkv(s.dim("num_key_value_heads")),
    "qkv_gate": lambda s: QkvGate(s.dim("num_key_value_heads")),
    "gated_qkv": lambda s: GatedQkv(s.dim("num_attention_heads"), s.dim("num_key_value_heads")),
    "fused_qkv": lambda s: FusedQkv(s.dim("num_attention_heads"), s.dim("num_key_value_heads")),
    "part": _part,
    "squeeze": lambda s: Squeeze(),
    "swap_halves": lambda s: SwapHalves(),
    "slice": lambda s: Slice(s.expert or 0),
    "transpose": lambda s: Transpose(),
    "pad_rows": lambda s: PadRows(),
}
