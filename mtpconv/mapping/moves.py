"""Moves, and what every op is: how the words of HF tensors lie inside one Megatron tensor.

An op is a permutation written as moves: box of an operand <-> box of the Megatron tensor, the
same words in the same order. `forward` (HF -> Megatron) and `backward` both follow from the
moves, so nobody writes an inverse by hand, and an op is lossless exactly if its moves tile
both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from mtpconv.tensors import Box, Shape

if TYPE_CHECKING:  # plans are made of shapes; only whoever moves words here waits for numpy
    from numpy.typing import NDArray

Words: TypeAlias = "NDArray[Any]"

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

    A `partial` op takes only a part of each operand; the rows of a block that take the other
    parts together tile it.

    Law: backward(forward(x)) == x and forward(backward(y)) == y, on every bit pattern. They move
    words; `arithmetic` is left to whoever reads and writes files.
    """

    name: ClassVar[str]
    partial: ClassVar[bool] = False
    #: word of what is done to each element besides moving it (mtpconv.store.arithmetic)
    arithmetic: ClassVar[str | None] = None

    def shape(self, operands: Sequence[Shape]) -> Shape:
        """Shape of the Megatron tensor. Raises: ShapeError."""
        return self._shape(operands)

    def moves(self, operands: Sequence[Shape]) -> list[Move]:
        """Moves that tile the Megatron tensor and, unless partial, every operand."""
        return self._moves(operands)

    def _shape(self, operands: Sequence[Shape]) -> Shape:
        raise NotImplementedError

    def _moves(self, operands: Sequence[Shape]) -> list[Move]:
        raise NotImplementedError

    def forward(self, operands: Sequence[Words]) -> Words:
        """The Megatron tensor made of these HF tensors."""
        import numpy as np

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
        import numpy as np

        out = [np.zeros(shape, tensor.dtype) for shape in operands]
        for move in self.moves(operands):
            if move.operand != PADDING:
                part = tensor[_slices(move.mcore)]
                if move.swap:
                    part = part.swapaxes(-1, -2)
                out[move.operand][_slices(move.hf)] = part.reshape(move.hf.sizes)
        return out


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


def rows_of(shape: Shape, first: int, rows: int) -> Box:
    """The box of `rows` whole rows of a tensor, from row `first`."""
    return Box((first, *(0 for _ in shape[1:])), (rows, *shape[1:]))


def take(op: Op, operands: Sequence[Shape], wanted: int) -> None:
    """Law of arity. Raises: ShapeError."""
    if len(operands) != wanted:
        raise ShapeError(f"{op.name}: takes {wanted} tensor, got {len(operands)}")


def same_tail(op: Op, operands: Sequence[Shape]) -> None:
    """Law of tensors that are alike but for their number of rows. Raises: ShapeError."""
    if not operands or any(not o for o in operands):
        raise ShapeError(f"{op.name}: needs tensors with rows")
    if any(o[1:] != operands[0][1:] for o in operands):
        raise ShapeError(f"{op.name}: {list(operands)} differ beyond axis 0")
