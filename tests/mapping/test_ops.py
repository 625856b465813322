from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpconv.geometry import Geometry
from mtpconv.mapping.ops import (
    BUILDERS,
    PADDING,
    Concat,
    Copy,
    FusedQkv,
    GatedQkv,
    Op,
    PadRows,
    Part,
    Qkv,
    QkvGate,
    ShapeError,
    Site,
    Slice,
    Squeeze,
    SwapHalves,
    Transpose,
    Words,
)
from mtpconv.tensors import Box, Shape

small = st.integers(1, 4)
#: An op with shapes of operands that it takes.
Case = tuple[Op, list[Shape]]


@st.composite
def tails(draw: st.DrawFn) -> Shape:
    return tuple(draw(st.lists(small, max_size=2)))


@st.composite
def copies(draw: st.DrawFn) -> Case:
    return Copy(), [tuple(draw(st.lists(st.integers(0, 4), max_size=3)))]


@st.composite
def concats(draw: st.DrawFn) -> Case:
    tail = draw(tails())
    return Concat(), [(rows, *tail) for rows in draw(st.lists(small, min_size=1, max_size=4))]


@st.composite
def qkvs(draw: st.DrawFn) -> Case:
    # k and v of different widths too: MiMo-V2's values are narrower than its keys.
    groups, tail = draw(small), draw(tails())
    return Qkv(groups), [(groups * draw(small), *tail) for _ in range(3)]


@st.composite
def qkv_gates(draw: st.DrawFn) -> Case:
    groups, tail = draw(small), draw(tails())
    shapes: list[Shape] = [(groups * draw(small), *tail) for _ in range(3)]
    return QkvGate(groups), [*shapes, (draw(small), *tail)]


@st.composite
def gated_qkvs(draw: st.DrawFn) -> Case:
    groups, per_group, head, tail = draw(small), draw(small), draw(small), draw(tails())
    heads = groups * per_group
    rows = (2 * heads * head, groups * head, groups * draw(small))
    return GatedQkv(heads, groups), [(r, *tail) for r in rows]


@st.composite
def fused_qkvs(draw: st.DrawFn) -> Case:
    groups, per_group, head = draw(small), draw(small), draw(small)
    heads = groups * per_group
    return FusedQkv(heads, groups), [((heads + 2 * groups) * head, *draw(tails()))]


@st.composite
def squeezes(draw: st.DrawFn) -> Case:
    return Squeeze(), [(1, *draw(tails()))]


@st.composite
def swaps(draw: st.DrawFn) -> Case:
    return SwapHalves(), [(draw(small), 2 * draw(small))]


@st.composite
def transposes(draw: st.DrawFn) -> Case:
    return Transpose(), [(*draw(tails()), draw(small), draw(small))]


@st.composite
def pads(draw: st.DrawFn) -> Case:
    rows, extra = draw(small), draw(st.none() | st.integers(0, 3))
    return PadRows(None if extra is None else rows + extra), [(rows, *draw(tails()))]


@st.composite
def parts(draw: st.DrawFn) -> Case:
    repeats, rows = draw(small), tuple(draw(st.lists(small, min_size=1, max_size=5)))
    index = draw(st.integers(0, len(rows) - 1))
    return Part(repeats, rows, index), [(repeats * sum(rows), *draw(tails()))]


@st.composite
def slices(draw: st.DrawFn) -> Case:
    entries, tail = draw(small), draw(tails())
    count = draw(st.integers(1, 2))
    shapes: list[Shape] = [(entries, draw(small), *tail) for _ in range(count)]
    return Slice(draw(st.integers(0, entries - 1))), shapes


whole = st.one_of(
    copies(),
    concats(),
    qkvs(),
    qkv_gates(),
    gated_qkvs(),
    fused_qkvs(),
    squeezes(),
    swaps(),
    transposes(),
)
partial = st.one_of(parts(), slices())


def words(shape: Shape, seed: int) -> Words:
    """Random bit patterns: NaN payloads, -0.0 and all."""
    return np.random.default_rng(seed).integers(0, 1 << 16, shape, dtype=np.uint16)


def times_covered(boxes: list[Box], shape: Shape) -> Words:
    count = np.zeros(shape, np.int64)
    for box in boxes:
        count[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] += 1
    return count


@given(whole, st.integers(0, 1 << 32))
def test_backward_undoes_forward(case: Case, seed: int) -> None:
    op, shapes = case
    operands = [words(s, seed + i) for i, s in enumerate(shapes)]
    back = op.backward(op.forward(operands), shapes)
    assert all(np.array_equal(a, b) for a, b in zip(operands, back, strict=True))


@given(whole, st.integers(0, 1 << 32))
def test_forward_undoes_backward(case: Case, seed: int) -> None:
    op, shapes = case
    tensor = words(op.shape(shapes), seed)
    assert np.array_equal(op.forward(op.backward(tensor, shapes)), tensor)


@given(pads(), st.integers(0, 1 << 32))
def test_padding_is_zero_and_cut_again(case: Case, seed: int) -> None:
    op, shapes = case
    operand = words(shapes[0], seed)
    padded = op.forward([operand])
    assert padded.shape == op.shape(shapes)
    assert not padded[shapes[0][0] :].any()
    assert np.array_equal(op.backward(padded, shapes)[0], operand)


@given(st.one_of(whole, pads()))
def test_moves_tile_both_sides(case: Case) -> None:
    op, shapes = case
    moves = op.moves(shapes)
    assert (times_covered([m.mcore for m in moves], op.shape(shapes)) == 1).all()
    for i, shape in enumerate(shapes):
        assert (times_covered([m.hf for m in moves if m.operand == i], shape) == 1).all()
    assert all(m.hf.elements == m.mcore.elements for m in moves)


@given(partial)
def test_moves_of_a_part_tile_the_megatron_side(case: Case) -> None:
    op, shapes = case
    assert (times_covered([m.mcore for m in op.moves(shapes)], op.shape(shapes)) == 1).all()


@given(parts(), st.integers(0, 1 << 32))
def test_all_parts_together_tile_and_restore(case: Case, seed: int) -> None:
    op, (shape,) = case
    assert isinstance(op, Part)
    every = [Part(op.repeats, op.rows, i) for i in range(len(op.rows))]
    boxes = [m.hf for each in every for m in each.moves([shape])]
    assert (times_covered(boxes, shape) == 1).all()
    operand = words(shape, seed)
    back = sum(each.backward(each.forward([operand]), [shape])[0] for each in every)
    assert np.array_equal(back, operand)


@given(slices(), st.integers(0, 1 << 32))
def test_all_slices_together_tile_and_restore(case: Case, seed: int) -> None:
    _, shapes = case
    operands = [words(s, seed + i) for i, s in enumerate(shapes)]
    every = [Slice(i) for i in range(shapes[0][0])]
    for i, shape in enumerate(shapes):
        boxes = [m.hf for each in every for m in each.moves(shapes) if m.operand == i]
        assert (times_covered(boxes, shape) == 1).all()
        back = sum(each.backward(each.forward(operands), shapes)[i] for each in every)
        assert np.array_equal(back, operands[i])


def test_qkv_of_two_groups() -> None:
    q, k, v = np.arange(8), np.arange(10, 12), np.arange(20, 22)
    out = Qkv(2).forward([q, k, v])
    assert out.tolist() == [0, 1, 2, 3, 10, 20, 4, 5, 6, 7, 11, 21]


def test_qkv_gate_puts_the_gates_last() -> None:
    q, k, v, gate = np.arange(4), np.arange(10, 12), np.arange(20, 22), np.arange(30, 34)
    out = QkvGate(2).forward([q, k, v, gate])
    assert out.tolist() == [0, 1, 10, 20, 2, 3, 11, 21, 30, 31, 32, 33]


def test_gated_qkv_puts_all_gates_of_a_group_behind_its_queries() -> None:
    # Four heads of one row, in HF query and gate in turn: q0 g0 q1 g1 ...
    q, k, v = np.array([0, 100, 1, 101, 2, 102, 3, 103]), np.array([10, 11]), np.array([20, 21])
    out = GatedQkv(4, 2).forward([q, k, v])
    assert out.tolist() == [0, 1, 100, 101, 10, 20, 2, 3, 102, 103, 11, 21]


def test_fused_qkv_interleaves_like_qkv() -> None:
    q, k, v = np.arange(8), np.arange(10, 12), np.arange(20, 22)
    fused = FusedQkv(8, 2).forward([np.concatenate([q, k, v])])
    assert np.array_equal(fused, Qkv(2).forward([q, k, v]))


def test_part_of_repeated_blocks() -> None:
    # Qwen3-Next: rows of each key head in turn, [q; k; v; v; z; z].
    rows = np.array([0, 10, 20, 21, 30, 31, 1, 11, 22, 23, 32, 33])
    taken = [Part(2, (1, 1, 2, 2), i).forward([rows]).tolist() for i in range(4)]
    assert taken == [[0, 1], [10, 11], [20, 21, 22, 23], [30, 31, 32, 33]]


def test_slice_of_two_packed_tensors_is_gate_then_up() -> None:
    gate, up = np.arange(4).reshape(2, 2, 1), np.arange(10, 14).reshape(2, 2, 1)
    assert Slice(1).forward([gate, up]).ravel().tolist() == [2, 3, 12, 13]


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        (Copy(), [(2,), (2,)]),
        (Concat(), []),
        (Concat(), [()]),
        (Concat(), [(2, 3), (2, 4)]),
        (Qkv(0), [(4, 2), (2, 2), (2, 2)]),
        (Qkv(4), [(4, 2), (2, 2), (2, 2)]),
        (QkvGate(2), [(4, 2), (2, 2), (2, 2)]),
        (GatedQkv(4, 2), [(8, 2), (2, 2)]),
        (GatedQkv(4, 3), [(8, 2), (3, 2), (3, 2)]),
        (GatedQkv(4, 2), [(4, 2), (2, 2), (2, 2)]),
        (GatedQkv(4, 2), [(8, 2), (3, 2), (2, 2)]),
        (FusedQkv(4, 2), [(9, 2)]),
        (FusedQkv(4, 0), [(4, 2)]),
        (FusedQkv(4, 3), [(10, 2)]),
        (Part(2, (1, 2), 0), [(7,)]),
        (Part(2, (1, 2), 0), [()]),
        (Squeeze(), [(2, 3)]),
        (Squeeze(), [()]),
        (SwapHalves(), [(2, 3)]),
        (SwapHalves(), [(2,)]),
        (Slice(2), [(2, 3)]),
        (Slice(0), [(2,)]),
        (Slice(0), []),
        (Slice(0), [(2, 3, 1), (2, 3, 2)]),
        (Transpose(), [(2,)]),
        (PadRows(1), [(2, 3)]),
        (PadRows(), [()]),
    ],
)
def test_shape_law_is_refused(op: Op, shapes: list[Shape]) -> None:
    with pytest.raises(ShapeError, match=f"^{op.name}|^concat"):
        op.shape(shapes)


def test_every_word_builds_its_op() -> None:
    config = {"num_attention_heads": 4, "num_key_value_heads": 2}
    site = Site(Geometry("x", config, config, 1, 0, 0, None), 0, 0, (1, (2, 3), 1))
    for word, build in BUILDERS.items():
        assert build(site).name == word


def test_a_part_without_an_entry_is_refused() -> None:
    site = Site(Geometry("x", {}, {}, 1, 0, 0, None), 0)
    with pytest.raises(ShapeError, match=r"\[parts\]"):
        BUILDERS["part"](site)


@pytest.mark.parametrize("build", [lambda: PadRows(5), lambda: PadRows()])
def test_only_padding_has_no_operand(build: Callable[[], Op]) -> None:
    moves = build().moves([(3, 2)])
    assert [m.operand for m in moves] == ([0, PADDING] if len(moves) == 2 else [0])


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        (Qkv(1 << 30), [(1 << 30, 2)] * 3),
        (GatedQkv(1 << 30, 1), [(1 << 31, 2), (1, 2), (1, 2)]),
        (FusedQkv(1 << 30, 1 << 30), [(3 << 30, 2)]),
        (Part(1 << 30, (1,), 0), [(1 << 30, 2)]),
    ],
)
def test_more_heads_than_any_model_has(op: Op, shapes: list[Shape]) -> None:
    """A config may say any number, and there would be a move for each."""
    with pytest.raises(ShapeError, match=r"heads; no model has so many"):
        op.shape(shapes)
