"""Tilings: decided as by counting every element, and fast."""

from __future__ import annotations

from itertools import pairwise, product

from hypothesis import given
from hypothesis import strategies as st

from mtpconv.tensors import Box, Shape, TensorSpec
from mtpconv.tiling import tiling_flaw
from tests.store.dist import grids


def covered_once(shape: Shape, boxes: list[Box]) -> bool:
    """The definition, by counting every element."""
    counts: dict[Shape, int] = {}
    for box in boxes:
        spans = [range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)]
        for index in product(*spans):
            counts[index] = counts.get(index, 0) + 1
    return counts == dict.fromkeys(product(*map(range, shape)), 1)


@given(st.data())
def test_tiling_is_decided_as_by_counting(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 3), max_size=3)))
    axis = st.tuples(st.integers(0, 3), st.integers(0, 3))
    box = st.lists(axis, min_size=len(shape), max_size=len(shape)).map(
        lambda p: Box(tuple(a for a, _ in p), tuple(b for _, b in p))
    )
    boxes = data.draw(st.lists(box, max_size=5))
    assert (tiling_flaw(shape, boxes) is None) == covered_once(shape, boxes)


@given(grids(), st.data())
def test_a_tiling_loses_it_with_any_box_missing_or_twice(
    grid: tuple[TensorSpec, list[Box]], data: st.DataObject
) -> None:
    spec, boxes = grid
    assert tiling_flaw(spec.shape, boxes) is None
    box = data.draw(st.sampled_from(boxes))
    if box.elements:
        rest = list(boxes)
        rest.remove(box)
        assert "uncovered" in (tiling_flaw(spec.shape, rest) or "")
        assert "overlap" in (tiling_flaw(spec.shape, [*boxes, box]) or "")


def test_a_tensor_cut_along_too_many_axes_is_not_trusted() -> None:
    shape = (2,) * 9
    boxes = [Box(at, (1,) * 9) for at in product(range(2), repeat=9)]
    assert "along 9 axes" in (tiling_flaw(shape, boxes) or "")


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor cut into a grid, then perhaps a few boxes moved, doubled or lost."""
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=0, max_size=3)))
    spans = []
    for size in shape:
        ends = [0, *sorted(draw(st.sets(st.integers(1, max(size, 1) - 1 or 1)))), size]
        spans.append([(a, b - a) for a, b in pairwise(ends) if a <= b])
    boxes = [Box(tuple(a for a, _ in c), tuple(n for _, n in c)) for c in product(*spans)]
    for _ in range(draw(st.integers(0, 2)) if boxes and shape else 0):
        at = draw(st.integers(0, len(boxes) - 1))
        axis = draw(st.integers(0, len(shape) - 1))
        offsets = list(boxes[at].offsets)
        offsets[axis] += draw(st.integers(-2, 2))
        boxes[at] = Box(tuple(offsets), boxes[at].sizes)
    return shape, draw(st.permutations(boxes))


@given(cuts())
def test_boxes_tile_a_tensor_if_each_element_is_in_one(
    case: tuple[tuple[int, ...], list[Box]],
) -> None:
    shape, boxes = case
    inside = list(product(*map(range, shape)))
    held = [
        index
        for box in boxes
        for index in product(
            *(range(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
        )
    ]
    assert (tiling_flaw(shape, boxes) is None) == (sorted(held) == sorted(inside))


def test_a_tensor_of_very_many_slices_is_checked_fast() -> None:
    boxes = [Box((i, 0), (1, 2)) for i in range(100_000)]  # two by two it would take hours
    assert tiling_flaw((100_000, 2), boxes) is None
    assert tiling_flaw((2, 100_000), [Box(b.offsets[::-1], b.sizes[::-1]) for b in boxes]) is None
