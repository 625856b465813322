"""Laws of the piece engine: however the pieces lie, the bytes come out as numpy has them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mtpconv.errors import UnreadableError
from mtpconv.store.content import Files, Piece, blocks, blocks_of, pieces, reading_of, runs_of
from mtpconv.store.hf import open_hf
from mtpconv.tensors import Box, TensorSpec
from tests.convert.folders import write_hf

Words = NDArray[Any]
DTYPES = {"U8": "<u1", "BF16": "<u2", "F32": "<u4", "F64": "<u8"}


@dataclass
class Stored:
    """A tensor as numpy has it, and the pieces in which it lies on disk."""

    dtype: str
    array: Words
    parts: list[Piece]

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.dtype, self.array.shape)


class Disk:
    """Writes arrays into a few files, at odd places, with other bytes between them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def put(self, array: Words) -> tuple[Path, int]:
        path = self._folder / f"file{self._count % 3}"
        self._count += 1
        with path.open("ab") as file:
            file.write(b"\xaa" * (self._count % 5))
            start = file.tell()
            file.write(array.tobytes() + b"\xbb")
        return path, start


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as place:
        yield Path(place)


def random_words(shape: Sequence[int], dtype: str, seed: int) -> Words:
    word = np.dtype(DTYPES[dtype])
    count = int(np.prod(shape, dtype=int)) * word.itemsize
    return np.frombuffer(np.random.default_rng(seed).bytes(count), word).reshape(shape)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """An axis cut into stretches (offset, size)."""
    points = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
    return [(a, b - a) for a, b in pairwise(points)] or [(0, 0)]


@st.composite
def grids(draw: st.DrawFn, shape: Sequence[int]) -> list[Box]:
    """Boxes that tile a shape."""
    boxes = [Box((), ())]
    for size in shape:
        boxes = [
            Box((*box.offsets, at), (*box.sizes, n)) for box in boxes for at, n in draw(cuts(size))
        ]
    return draw(st.permutations(boxes))


def stored_part(draw: Any, disk: Disk, part: Words, box: Box) -> Piece:
    """One box of a tensor, inside a larger chunk, transposed or not, with axes of size 1."""
    kind = draw(st.sampled_from(["chunk", "inside", "swap", "ones"]))
    swap = kind == "swap" and part.ndim >= 2
    data = part.swapaxes(-1, -2) if swap else part
    if kind == "ones":
        at = draw(st.integers(0, part.ndim))
        data = np.expand_dims(data, at)
    if kind == "chunk" or not data.ndim:
        return Piece(box, *disk.put(data), data.shape, Box.whole(data.shape))
    before = [draw(st.integers(0, 2)) for _ in data.shape]
    after = [draw(st.integers(0, 2)) for _ in data.shape]
    chunk = np.pad(data, list(zip(before, after, strict=True)), constant_values=0x55)
    return Piece(box, *disk.put(chunk), chunk.shape, Box(tuple(before), data.shape), swap)


def make(draw: Any, folder: Path) -> Stored:
    """A random tensor in random pieces, some of them zeros that lie nowhere."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    array = random_words(shape, dtype, draw(st.integers(0, 99))).copy()
    disk = Disk(Path(tempfile.mkdtemp(dir=folder)))
    parts = []
    for box in draw(grids(shape)):
        if draw(st.integers(0, 5)) == 5:
            array[slices(box)] = 0
            parts.append(Piece(box, None, 0, box.sizes, Box.whole(box.sizes)))
        else:
            parts.append(stored_part(draw, disk, array[slices(box)], box))
    return Stored(dtype, array, parts)


@given(data=st.data(), size=st.integers(8, 64))
def test_blocks_are_the_bytes_whatever_the_pieces(folder: Path, data: Any, size: int) -> None:
    stored = make(data.draw, folder)
    with Files(limit=2) as files:
        found = [bytes(b) for b in blocks_of(stored.spec, stored.parts, files, size)]
        whole = bytearray(b"\xcc" * stored.spec.nbytes)
        reading_of(stored.spec, stored.parts).fill(files, memoryview(whole))
    assert b"".join(found) == stored.array.tobytes()
    assert bytes(whole) == stored.array.tobytes()
    assert all(0 < len(b) <= size for b in found)


@given(data=st.data())
def test_a_missing_or_doubled_piece_is_no_tensor(folder: Path, data: Any) -> None:
    stored = make(data.draw, folder)
    full = [p for p in stored.parts if p.box.elements]
    if not full:
        return
    odd = data.draw(st.sampled_from(full))
    for parts in ([p for p in full if p is not odd], [*full, odd]):
        with Files() as files, pytest.raises(UnreadableError, match="do not tile"):
            list(blocks_of(stored.spec, parts, files))


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from(sorted(DTYPES)), st.integers(8, 99))
def test_tensor_parallel_rows_and_columns(
    folder: Path, rows: int, columns: int, dtype: str, size: int
) -> None:
    """Ranks hold rows (column-parallel) or columns (row-parallel), each in a file of its own."""
    array = random_words((rows, columns), dtype, rows)
    for axis in (0, 1):
        disk = Disk(Path(tempfile.mkdtemp(dir=folder)))
        parts, at = [], 0
        for shard in np.array_split(array, 4, axis=axis):
            offsets = (at, 0) if axis == 0 else (0, at)
            parts.append(
                Piece(Box(offsets, shard.shape), *disk.put(shard), shard.shape,
                      Box.whole(shard.shape))
            )  # fmt: skip
            at += shard.shape[axis]
        with Files() as files:
            found = b"".join(
                bytes(b) for b in blocks_of(TensorSpec(dtype, array.shape), parts, files, size)
            )
        assert found == array.tobytes()


@pytest.mark.parametrize("size", [100, 5000, 4 << 20])
def test_a_transpose_larger_than_a_block(tmp_path: Path, size: int) -> None:
    array = random_words((3, 130, 210), "BF16", 1)
    path, start = Disk(tmp_path).put(array)
    piece = Piece(Box.whole((210, 130)), path, start, array.shape,
                  Box((1, 0, 0), (1, 130, 210)), swap=True)  # fmt: skip
    with Files() as files:
        found = b"".join(bytes(b) for b in blocks_of(
            TensorSpec("BF16", (210, 130)), [piece], files, size))  # fmt: skip
    assert found == array[1].T.tobytes()


def test_columns_of_a_wide_chunk_are_read_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A narrow column of a huge matrix must not cost reading all of it."""
    array = random_words((20, 60_000), "BF16", 1)
    path, start = Disk(tmp_path).put(array)
    piece = Piece(Box.whole((20, 3)), path, start, array.shape, Box((0, 500), (20, 3)))
    read = []
    real = Files.read_into

    def counted(files: Files, path: Path, start: int, view: memoryview) -> None:
        read.append(len(view))
        real(files, path, start, view)

    monkeypatch.setattr(Files, "read_into", counted)
    with Files() as files:
        (block,) = blocks_of(TensorSpec("BF16", (20, 3)), [piece], files)
        assert bytes(block) == array[:, 500:503].tobytes()
    assert sum(read) <= 20 * 64 * 1024


def test_a_transposed_piece_of_one_element(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abcd")
    whole = Box.whole((1, 1))
    piece = Piece(whole, tmp_path / "f", 1, (1, 1), whole, swap=True)
    with Files() as files:
        found = b"".join(map(bytes, blocks_of(TensorSpec("BF16", (1, 1)), [piece], files)))
    assert found == b"bc"


def test_empty_and_zero_dimensional_tensors(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    scalar = random_words((), "F32", 3)
    at = Piece(Box((), ()), *disk.put(scalar), (), Box((), ()))
    with Files() as files:
        assert [bytes(b) for b in blocks_of(TensorSpec("F32", ()), [at], files)] == [
            scalar.tobytes()
        ]
        for shape in [(0,), (0, 16), (16, 0)]:
            box = Box.whole(shape)
            empty = Piece(box, tmp_path / "never opened", 0, shape, box)
            assert list(blocks_of(TensorSpec("F32", shape), [empty], files)) == []
            reading_of(TensorSpec("F32", shape), [empty]).fill(files, memoryview(bytearray()))


def test_words_below_a_byte_are_moved_whole_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(16)))
    spec = TensorSpec("F4", (2, 4))
    halves = [Piece(Box((i, 0), (1, 4)), path, 2 * (1 - i), (1, 4), Box.whole((1, 4)))
              for i in (0, 1)]  # fmt: skip
    with Files() as files:
        assert b"".join(bytes(b) for b in blocks_of(spec, halves, files)) == bytes([2, 3, 0, 1])
    odd = TensorSpec("F4", (2, 3))
    third = [Piece(Box((i, 0), (1, 3)), path, 0, (1, 3), Box.whole((1, 3))) for i in (0, 1)]
    with pytest.raises(UnreadableError, match="inside a byte"):
        runs_of(odd, third)
    columns = [Piece(Box((0, i), (2, 2)), path, 0, (2, 2), Box.whole((2, 2))) for i in (0, 2)]
    with Files() as files, pytest.raises(UnreadableError, match="cannot be cut"):
        list(blocks_of(spec, columns, files))


def test_a_checkpoint_gives_one_piece_per_chunk(tmp_path: Path) -> None:
    array = random_words((5, 3), "BF16", 2)
    spec = TensorSpec("BF16", (5, 3))
    source = open_hf(write_hf(tmp_path, {"t": (spec, array.tobytes())}, {}))
    (piece,) = pieces(source, "t")
    assert piece.chunk_shape == (5, 3)
    assert b"".join(bytes(b) for b in blocks(source, "t", size=4)) == array.tobytes()
    assert b"".join(bytes(b) for b in blocks(source, "t")) == array.tobytes()


def _placed(folder: Path, array: Words) -> tuple[Path, TensorSpec]:
    path = folder / "file"
    path.write_bytes(b"\0" * 7 + array.tobytes())
    return path, TensorSpec("BF16", array.shape)


@pytest.mark.parametrize("columns", [6, 3])
def test_a_file_that_ends_early_is_named(tmp_path: Path, columns: int) -> None:
    """Whole tensors and cut ones alike; at the open and while blocks are under way."""
    array = random_words((40, 6), "BF16", 2)
    path, _ = _placed(tmp_path, array)
    piece = Piece(Box.whole((40, columns)), path, 7, (40, 6), Box((0, 0), (40, columns)))
    spec = TensorSpec("BF16", (40, columns))
    with Files() as files:
        stream = blocks_of(spec, [piece], files, 48)
        next(stream)
        os.truncate(path, 300)
        with pytest.raises(UnreadableError, match=rf"{path}: ends at byte 300, .* short"):
            list(stream)
        path.unlink()
    with Files() as files, pytest.raises(UnreadableError, match="No such file"):
        list(blocks_of(spec, [piece], files))


def test_descriptors_stay_bounded(tmp_path: Path) -> None:
    with Files(limit=3) as files:
        for i in range(20):
            (tmp_path / str(i)).write_bytes(b"x")
            files.fd(tmp_path / str(i))
        inside = [p for p in Path("/proc/self/fd").iterdir()
                  if p.is_symlink() and str(tmp_path) in str(p.readlink())]  # fmt: skip
        assert len(inside) == 3


def test_streams_of_one_pool_do_not_share_a_buffer(tmp_path: Path) -> None:
    first, second = random_words((8,), "U8", 1), random_words((8,), "U8", 2)
    disk = Disk(tmp_path)
    at = [Piece(Box.whole((8,)), *disk.put(a), (8,), Box.whole((8,))) for a in (first, second)]
    with Files() as files:
        streams = [blocks_of(TensorSpec("U8", (8,)), [p], files, 4) for p in at]
        pairs = [(bytes(a), bytes(b)) for a, b in zip(*streams, strict=True)]
    assert b"".join(a for a, _ in pairs) == first.tobytes()
    assert b"".join(b for _, b in pairs) == second.tobytes()
