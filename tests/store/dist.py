"""Small torch_dist checkpoints to test with."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from itertools import pairwise, product
from pathlib import Path

from hypothesis import strategies as st

from mtpconv.store.dist_metadata_writer import (
    write_common,
    write_config,
    write_metadata,
    write_tracker,
)
from mtpconv.store.torch_dist import TorchDistCheckpoint
from mtpconv.store.torch_dist_writer import TorchDistWriter
from mtpconv.tensors import Box, Shape, TensorSpec

#: A tensor and its chunks: offsets -> (sizes, bytes).
Tensors = Mapping[str, tuple[TensorSpec, Mapping[Shape, tuple[Shape, bytes]]]]


def stored_bytes(checkpoint: TorchDistCheckpoint, name: str) -> dict[Shape, bytes]:
    """The bytes of each chunk, by its offsets."""
    found = {}
    for chunk in checkpoint.chunks(name):
        size = TensorSpec(checkpoint.tensors[name].dtype, chunk.box.sizes).nbytes
        with chunk.file.open("rb") as stream:
            stream.seek(chunk.start)
            found[chunk.box.offsets] = stream.read(size)
    return found


def write(parent: Path, tensors: Tensors, objects: Iterable[str] = ()) -> Path:
    folder = parent / "iter_0000003"
    folder.mkdir(parents=True)
    with TorchDistWriter(folder) as writer:
        for key, (spec, chunks) in tensors.items():
            for offsets, (sizes, data) in chunks.items():
                writer.write(key, spec, Box(offsets, sizes), [data])
        for key in objects:
            writer.write_object(key, [None])
        write_metadata(folder, writer.close())
    write_common(folder, {"args": {"num_layers": 2}, "iteration": 3})
    write_config(folder)
    write_tracker(parent, 3)
    return folder


def random_tensors(seed: int = 0) -> Tensors:
    bits = random.Random(seed).randbytes
    return {
        "a.weight": (TensorSpec("BF16", (4, 6)), {(0, 0): ((4, 6), bits(48))}),
        "experts.weight": (
            TensorSpec("F32", (3, 4, 2)),
            {(e, h, 0): ((1, 2, 2), bits(16)) for e in range(3) for h in (0, 2)},
        ),
        "scalar": (TensorSpec("F32", ()), {(): ((), bits(4))}),
        "nothing": (TensorSpec("U8", (0, 16)), {(0, 0): ((0, 16), b"")}),
    }


@st.composite
def grids(draw: st.DrawFn) -> tuple[TensorSpec, list[Box]]:
    """A tensor and an uneven grid of boxes that tiles it."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    spans = [list(pairwise(c)) or [(0, 0)] for c in cuts]
    boxes = [Box(tuple(a for a, _ in p), tuple(b - a for a, b in p)) for p in product(*spans)]
    return TensorSpec(draw(st.sampled_from(["BF16", "F32", "U8", "I64"])), shape), boxes
