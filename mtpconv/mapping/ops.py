"""Ops: how the words of HF tensors lie inside one Megatron tensor.

An op is a permutation written as moves: box of an operand <-> box of the Megatron tensor, the
same words in the same order. `forward` (HF -> Megatron) and `backward` both follow from the
moves, so nobody writes an inverse by hand, and an op is lossless exactly if its moves tile
both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mtpconv.geometry import Geometry
from mtpconv.tensors import Box, Shape

Words = NDArray[Any]

#: Operand number of a move that has no operand: rows of zeros on the Megatron side.
PADDING = -1


class ShapeError(ValueError):
    """Operand shapes break an op's shape law."""


@dataclass(frozen=True, slots=True)
class Move:
    """`hf` of operand number `operand` is `mcore` of the Megatron tensor.

    The boxes have equal sizes once axes of size 1 are left out; with `swap` the last two axes
    are exchanged.
    """

    operand: int
    hf: Box
    mcore: Box
    swap: bool = False


@dataclass(frozen=True, slots=True)
class Op:
    """Base of all ops; subclasses give a shape law and the moves.

    Law: backward(forward(x)) == x and forward(backward(y)) == y, on every bit pattern.
    """

    name: ClassVar[str]

    def shape(self, operands: Sequence[Shape]) -> Shape:
        """Shape of the Megatron tensor. Raises: ShapeError."""
        raise NotImplementedError

    def moves(self, operands: Sequence[Shape]) -> list[Move]:
        """Moves that tile every operand and the Megatron tensor."""
        raise NotImplementedError

    def forward(self, operands: Sequence[Words]) -> Words:
        """The Megatron tensor made of these HF tensors."""
        shapes = [o.shape for o in operands]
        out = np.zeros(self.shape(shapes), operands[0].dtype)
        for move in self.moves(shapes):
            if move.operand != PADDING:
                part = operands[move.operand][_slices(move.hf)]
                if move.swap:
                    part = part.swapaxes(-1, -2)
                out[_slices(move.mcore)] = part.reshape(move.mcore.sizes)
        return out

    def backward(self, tensor: Words, operands: Sequence[Shape]) -> list[Words]:
        """The HF tensors of these shapes that the Megatron tensor is made of."""
        out = [np.zeros(shape, tensor.dtype) for shape in operands]
        for move in self.moves(operands):
            if move.operand != PADDING:
                part = tensor[_slices(move.mcore)]
                if move.swap:
                    part = part.swapaxes(-1, -2)
                out[move.operand][_slices(move.hf)] = part.reshape(move.hf.sizes)
        return out


@dataclass(frozen=True, slots=True)
class Copy(Op):
    """One tensor under another name."""

    name: ClassVar[str] = "copy"

    def shape(self, operands: Sequence[Shape]) -> Shape:
        _arity(self, operands, 1)
        return operands[0]

    def moves(self, operands: Sequence[Shape]) -> list[Move]:
        whole = Box.whole(operands[0])
        return [Move(0, whole, whole)]


@dataclass(frozen=True, slots=True)
class Concat(Op):
    """Operands one after another along axis 0 (gate, then up)."""

    name: ClassVar[str] = "concat"

    def shape(self, operands: Sequence[Shape]) -> Shape:
        _same_tail(self, operands)
        return (sum(o[0] for o in operands), *operands[0][1:])

    def moves(self, operands: Sequence[Shape]) -> list[Move]:
        found, row = [], 0
        for i, shape in enumerate(operands):
            found.append(Move(i, Box.whole(shape), _rows(shape, row, shape[0])))
            row += shape[0]
        return found


@dataclass(frozen=True, slots=True)
class Qkv(Op):
    """Operands cut into `groups` blocks of rows and interleaved: q, k, v of group 0, of group 1, ...

    Weights and biases alike. Source: Megatron-Core SelfAttention.get_query_key_value_tensors
    (megatron-core 0.16.1 and 0.19.2).
    """

    groups: int
    name: ClassVar[str] = "qkv"

    def shape(self, operands: Sequence[Shape]) -> Shape:
        _same_tail(self, operands)
        for shape in operands:
            if not self.groups or shape[0] % self.groups:
                raise ShapeError(f"qkv: {shape[0]} rows are no multiple of {self.groups} groups")
        return (sum(o[0] for o in operands), *operands[0][1:])

    def moves(self, operands: Sequence[Shape]) -> list[Move]:
        found, row = [], 0
        for group in range(self.groups):
            for i, shape in enumerate(operands):
                rows = shape[0] // self.groups
                found.append(Move(i, _rows(shape, group * rows, rows), _rows(shape, row, rows)))
                row += rows
        return found


@dataclass(frozen=True, slots=True)
class SwapHalves(Op):
    """The two halves of axis 1 exchanged (MiMo's eh_proj: [hidden, embedding])."""

    name: ClassVar[str] = "swap_halves"

    def shape(self, operands: Sequence[Shape]) -> Shape:
        _arity(self, operands, 1)
        if len(operands[0]) != 2 or operands[0][1] % 2:
            raise ShapeError(f"swap_halves: {operands[0]} has no two halves along axis 1")
        return operands[0]

    def moves(self, operands: Sequence[Shape]) -> list[Move]:
        rows, columns = operands[0]
        left, right = Box((0, 0), (rows, columns // 2)), Box((0, columns // 2), (rows, columns // 2))
        return [Move(0, left, right), Move(0, right, left)]


@dataclass(frozen=True, slots=True)
class Slice(Op):
    """Entry `index` of axis 0 of a packed tensor (one expert of all experts).

    The packed tensor is an operand of one step per entry; together they tile it.
    """

    index: int
    name: ClassVar[str] = "slice"

    def shape(self, operands: Sequence[Shape]) -> Shape:
        _arity(self, operands, 1)
        if len(operands[0]) < 2 or self.index >= operands[0][0]:
            raise ShapeError(f"slice: {operands[0]} has no entry {self.index}")
        return operands[0][1:]

    def moves(self, operands: Sequence[Shape]) -> list[Move]:
        tail = operands[0][1:]
        entry = Box((self.index, *(0 for _ in tail)), (1, *tail))
        return [Move(0, entry, Box.whole(tail))]


@dataclass(frozen=True, slots=True)
class Transpose(Op):
    """The last two axes exchanged."""

    name: ClassVar[str] = "transpose"

    def shape(self, operands: Sequence[Shape]) -> Shape:
        _arity(self, operands, 1)
        if len(operands[0]) < 2:
            raise ShapeError(f"transpose: {operands[0]} has no two axes")
        *lead, rows, columns = operands[0]
        return (*lead, columns, rows)

    def moves(self, operands: Sequence[Shape]) -> list[Move]:
        return [Move(0, Box.whole(operands[0]), Box.whole(self.shape(operands)), swap=True)]


@dataclass(frozen=True, slots=True)
class PadRows(Op):
    """A tensor whose Megatron side may have more rows; the extra ones are zero.

    `rows` None means no padding. Only rows proven to be zero are cut on the way back: whoever
    reads the Megatron side checks them.
    """

    rows: int | None = None
    name: ClassVar[str] = "pad_rows"

    def shape(self, operands: Sequence[Shape]) -> Shape:
        _arity(self, operands, 1)
        if not operands[0]:
            raise ShapeError("pad_rows: a scalar has no rows")
        rows = operands[0][0] if self.rows is None else self.rows
        if rows < operands[0][0]:
            raise ShapeError(f"pad_rows: {operands[0][0]} rows do not fit in {rows}")
        return (rows, *operands[0][1:])

    def moves(self, operands: Sequence[Shape]) -> list[Move]:
        shape = operands[0]
        found = [Move(0, Box.whole(shape), Box.whole(shape))]
        extra = self.shape(operands)[0] - shape[0]
        if extra:
            padding = _rows(shape, shape[0], extra)
            found.append(Move(PADDING, padding, padding))
        return found


#: How a table's op word becomes an op for one geometry and one expert (or None).
BUILDERS: Mapping[str, Callable[[Geometry, int | None], Op]] = {
    "copy": lambda g, e: Copy(),
    "concat": lambda g, e: Concat(),
    "qkv": lambda g, e: Qkv(g.dim("num_key_value_heads")),
    "swap_halves": lambda g, e: SwapHalves(),
    "slice": lambda g, e: Slice(e or 0),
    "transpose": lambda g, e: Transpose(),
    "pad_rows": lambda g, e: PadRows(),
}


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


def _rows(shape: Shape, first: int, rows: int) -> Box:
    return Box((first, *(0 for _ in shape[1:])), (rows, *shape[1:]))


def _arity(op: Op, operands: Sequence[Shape], wanted: int) -> None:
    if len(operands) != wanted:
        raise ShapeError(f"{op.name}: takes {wanted} tensor, got {len(operands)}")


def _same_tail(op: Op, operands: Sequence[Shape]) -> None:
    if not operands or any(not o for o in operands):
        raise ShapeError(f"{op.name}: needs tensors with rows")
    if any(o[1:] != operands[0][1:] for o in operands):
        raise ShapeError(f"{op.name}: {list(operands)} differ beyond axis 0")
