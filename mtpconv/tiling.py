"""Whether boxes cover a tensor, each element once: chunks of a checkpoint, parts that rows take."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from mtpconv.tensors import Box, Shape


def tiling_flaw(shape: Shape, boxes: Sequence[Box]) -> str | None:
    """What is wrong if boxes do not cover every element of `shape` exactly once, else None.

    Law: linear in the number of boxes. A sum of boxes is known by its corners, each with the
        sign of the number of its upper bounds: boxes tile the whole exactly when their signed
        corners sum up to those of the whole.
    """
    if len(boxes) == 1 and boxes[0].sizes == shape and not any(boxes[0].offsets):
        return None
    boxes = [box for box in boxes if box.elements]  # empty ones cover nothing
    for box in boxes:
        ends = zip(box.offsets, box.sizes, shape, strict=True)
        if any(at + n > size for at, n, size in ends):
            return f"reach beyond its shape {list(shape)}"
    cut = [a for a, n in enumerate(shape) if any(b.offsets[a] or b.sizes[a] != n for b in boxes)]
    if len(cut) > 8:
        return f"are cut along {len(cut)} axes, more than can be checked"
    corners: dict[Shape, int] = {}
    whole = [Box.whole(shape)] if prod(shape) else []
    for sign, parts in [(-1, whole), (1, boxes)]:
        for box in parts:
            signed: list[tuple[int, Shape]] = [(sign, ())]
            for axis in cut:
                low = box.offsets[axis]
                high = low + box.sizes[axis]
                signed = [
                    (s * t, (*point, x)) for s, point in signed for t, x in ((1, low), (-1, high))
                ]
            for s, point in signed:
                corners[point] = corners.get(point, 0) + s
    if not any(corners.values()):
        return None
    have, want = sum(box.elements for box in boxes), prod(shape)
    if have < want:
        return f"leave {want - have:,} of {want:,} elements uncovered"
    return f"overlap: they hold {have:,} elements for {want:,}"
