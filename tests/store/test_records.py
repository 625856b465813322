from __future__ import annotations

import io
import os
import random
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpconv.errors import UnreadableError, UnsupportedError
from mtpconv.store.objects import read_object
from mtpconv.store.record_writer import ALIGNMENT, object_record, tensor_frame
from mtpconv.store.records import Record, RecordReader
from mtpconv.store.torch_names import TORCH_DTYPES
from mtpconv.store.zips import Pread
from mtpconv.tensors import TensorSpec

DTYPES = sorted(name for name, _ in TORCH_DTYPES.values())
SHAPES = [(), (0,), (3, 0), (1,), (5,), (2, 3, 4), (1, 1, 7)]

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


def record_of(dtype: str, shape: tuple[int, ...], data: bytes) -> bytes:
    frame = tensor_frame(dtype, shape)
    prefix, suffix = frame.sealed(zlib.crc32(data))
    record = prefix + data + suffix
    assert len(record) == frame.length
    assert len(data) == frame.nbytes
    return record


@contextmanager
def on_disk(folder: Path, data: bytes) -> Iterator[Pread]:
    file = folder / "__0_0.distcp"
    file.write_bytes(data)
    fd = os.open(file, os.O_RDONLY)
    try:
        yield partial(os.pread, fd)
    finally:
        os.close(fd)


def locate(folder: Path, data: bytes, offset: int = 0, length: int | None = None) -> Record:
    with on_disk(folder, data) as read:
        reader = RecordReader()
        size = len(data) - offset if length is None else length
        found = reader.locate(read, offset, size, "x")
        assert reader.locate(read, offset, size, "x") == found  # the second time from memory
        return found


@given(st.sampled_from(DTYPES), shapes, st.integers(0, 200))
def test_a_written_record_is_found(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, shape: tuple[int, ...], before: int
) -> None:
    spec = TensorSpec(dtype, shape)
    data = random.Random(before).randbytes(spec.nbytes)
    record = record_of(dtype, shape, data)
    whole = b"?" * before + record + b"?" * 9
    found = locate(tmp_path_factory.getbasetemp(), whole, before, len(record))
    assert (found.dtype, found.shape, found.nbytes) == (dtype, shape, spec.nbytes)
    assert whole[found.start : found.start + found.nbytes] == data
    assert (found.start - before) % ALIGNMENT == 0


@given(st.sampled_from(DTYPES), shapes)
def test_a_written_record_is_a_sound_zip(dtype: str, shape: tuple[int, ...]) -> None:
    data = os.urandom(TensorSpec(dtype, shape).nbytes)
    with zipfile.ZipFile(io.BytesIO(record_of(dtype, shape, data))) as archive:
        assert archive.testzip() is None
        assert archive.read("archive/data/0") == data
        assert all(e.compress_type == zipfile.ZIP_STORED for e in archive.infolist())
        names = {e.filename.partition("/")[2] for e in archive.infolist()}
    assert names == {"data.pkl", "byteorder", "version", "data/0"}


def test_a_dtype_that_torch_lacks_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="F6_E2M3"):
        tensor_frame("F6_E2M3", (4,))


# --- against torch -----------------------------------------------------------------------------


def bits(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def random_tensor(torch_name: str, shape: tuple[int, ...]) -> Any:
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, torch_name)
    count = TensorSpec("U8", shape).elements * dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=dtype)
    raw = torch.randint(0, 2 if torch_name == "bool" else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def saved(value: Any) -> bytes:
    import torch

    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("torch_name", TORCH_DTYPES)
def test_torch_and_we_read_each_other(
    tmp_path: Path, torch_name: str, shape: tuple[int, ...]
) -> None:
    torch = pytest.importorskip("torch")
    tensor = random_tensor(torch_name, shape)
    theirs = saved(tensor)
    found = locate(tmp_path, theirs)
    assert (found.dtype, found.shape) == (TORCH_DTYPES[torch_name][0], shape)
    assert theirs[found.start : found.start + found.nbytes] == bits(tensor)
    ours = torch.load(io.BytesIO(record_of(found.dtype, shape, bits(tensor))), weights_only=True)
    assert (ours.dtype, ours.shape, ours.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert bits(ours) == bits(tensor)


def test_a_contiguous_view_of_a_larger_storage_is_found(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    whole = torch.arange(40, dtype=torch.int32).reshape(10, 4)
    data = saved(whole[3:7])
    found = locate(tmp_path, data)
    assert data[found.start : found.start + found.nbytes] == bits(whole[3:7])
    assert found.nbytes == 4 * 4 * 4


def test_a_parameter_is_a_tensor(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    assert locate(tmp_path, saved(torch.nn.Parameter(torch.ones(3)))).shape == (3,)


def test_an_axis_of_size_one_may_have_any_stride(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    column = torch.arange(6.0).reshape(6, 1).t()
    assert locate(tmp_path, saved(column)).shape == (1, 6)


def test_what_is_not_one_range_of_bytes_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    square = torch.arange(9.0).reshape(3, 3)
    for tensor in (square.t(), square[:, :2], torch.ones(1).expand(4), square[::2]):
        with pytest.raises(UnsupportedError, match=r"^x has shape .* not contiguous; save"):
            locate(tmp_path, saved(tensor))


def test_what_is_not_a_plain_tensor_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(UnsupportedError, match="not a plain tensor"):
        locate(tmp_path, saved([torch.ones(2)]))
    with pytest.raises(UnsupportedError, match="ComplexDouble"):
        locate(tmp_path, saved(torch.ones(2, dtype=torch.complex128)))
    with pytest.raises(UnreadableError, match="calls torch"):
        locate(tmp_path, saved(torch.eye(2).to_sparse()))


def test_an_archive_of_an_older_torch_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    stream = io.BytesIO(saved(torch.arange(5.0)))
    older = io.BytesIO()
    with zipfile.ZipFile(stream) as source, zipfile.ZipFile(older, "w") as target:
        for part in ("data.pkl", "data/0", "version"):
            target.writestr(f"archive/{part}", source.read(f"archive/{part}"))
    data = older.getvalue()
    found = locate(tmp_path, data)
    assert data[found.start : found.start + found.nbytes] == bits(torch.arange(5.0))
    assert torch.equal(torch.load(io.BytesIO(data), weights_only=True), torch.arange(5.0))


# --- damage and lies ---------------------------------------------------------------------------

GOOD = record_of("BF16", (3, 5), bytes(range(30)))


def rebuilt(changes: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """GOOD with some entries replaced, written by zipfile."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(GOOD)) as source, zipfile.ZipFile(out, "w") as target:
        for entry in source.namelist():
            tail = entry.partition("/")[2]
            target.writestr(entry, changes.get(tail, source.read(entry)), compression)
    return out.getvalue()


def pickle_of(dtype: str, shape: tuple[int, ...]) -> bytes:
    frame = tensor_frame(dtype, shape)
    data = frame.prefix + b"\0" * frame.nbytes + frame.suffix
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read("archive/data.pkl")


def test_a_record_cut_anywhere_is_damage(tmp_path: Path) -> None:
    for end in range(len(GOOD)):
        with pytest.raises(UnreadableError, match=r"^x .*; the file is corrupt"):
            locate(tmp_path, GOOD[:end])


def test_a_record_that_reaches_beyond_the_file_is_damage(tmp_path: Path) -> None:
    for more in (1, 100, 10_000, 1 << 40):
        with pytest.raises(UnreadableError, match=r"^x "):
            locate(tmp_path, GOOD, 0, len(GOOD) + more)


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_a_changed_byte_never_leads_outside(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int
) -> None:
    data = bytearray(GOOD)
    data[at] = value
    with suppress(UnreadableError, UnsupportedError):
        found = locate(tmp_path_factory.getbasetemp(), bytes(data))
        assert 0 <= found.start <= found.start + found.nbytes <= len(GOOD)
        assert found.nbytes == TensorSpec(found.dtype, found.shape).nbytes


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    with pytest.raises(UnreadableError):
        locate(tmp_path_factory.getbasetemp(), data)


PICKLE = pickle_of("BF16", (3, 5))


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (pickle_of("BF16", (4, 5)), "should hold 40 bytes of data and holds 30"),
        (pickle_of("F64", (3, 5)), "should hold 120 bytes"),
        (PICKLE.replace(b"K\x00K\x03", b"K\x01K\x03"), "impossible tensor"),
        (PICKLE.replace(b"K\x00K\x03", b"J\xff\xff\xff\xffK\x03"), "impossible tensor"),
        (PICKLE.replace(b"K\x03K\x05\x86", b"K\x03K\x05K\x00\x87", 1), "impossible tensor"),
        (PICKLE.replace(b"storage", b"garbage", 1), "impossible tensor"),
        (PICKLE.replace(b"BFloat16Storage", b"nothing"), "calls torch.nothing"),
        (b"\x80\x02cos\nsystem\nX\x02\0\0\0ls\x85R.", "calls os.system"),
        (b"\x80\x02ctorch\nload\n)R.", "calls torch.load"),
        (b"\x80\x02N.", "not a plain tensor"),
        (b"", "not a whole pickle"),
        (b"N" * 5000, "holds data.pkl of 5,000 bytes"),
    ],
)
def test_a_lying_pickle_is_refused(tmp_path: Path, pickled: bytes, message: str) -> None:
    with pytest.raises((UnreadableError, UnsupportedError), match=message):
        locate(tmp_path, rebuilt({"data.pkl": pickled}))


def test_compressed_entries_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="compressed; torch"):
        locate(tmp_path, rebuilt({"data.pkl": b"\0" * 10_000_000}, zipfile.ZIP_DEFLATED))


def test_big_endian_records_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="not little-endian"):
        locate(tmp_path, rebuilt({"byteorder": b"big"}))


def test_two_entries_of_one_name_are_refused(tmp_path: Path) -> None:
    out = io.BytesIO(GOOD)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(out, "a") as archive:
        archive.writestr("archive/data/0", b"\1" * 30)
    with pytest.raises(UnreadableError, match="does not write"):
        locate(tmp_path, out.getvalue())


def test_a_comment_and_an_empty_archive_are_refused(tmp_path: Path) -> None:
    out = io.BytesIO(GOOD)
    with zipfile.ZipFile(out, "a") as archive:
        archive.comment = b"PK\5\6"
    with pytest.raises(UnreadableError, match=r"not a record|contradicts|outside"):
        locate(tmp_path, out.getvalue())
    empty = io.BytesIO()
    zipfile.ZipFile(empty, "w").close()
    with pytest.raises(UnreadableError, match="contradicts itself"):
        locate(tmp_path, empty.getvalue())


def test_a_directory_of_a_million_entries_costs_nothing(tmp_path: Path) -> None:
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0xFFFE, 0xFFFE, 46, len(GOOD), 0)
    with pytest.raises(UnreadableError, match="contradicts itself"):
        locate(tmp_path, GOOD + b"\0" * 46 + end)


def test_an_archive_of_many_files_is_refused(tmp_path: Path) -> None:
    out = io.BytesIO(GOOD)
    with zipfile.ZipFile(out, "a") as archive:
        for n in range(70):
            archive.writestr(f"archive/{n}", b"")
    with pytest.raises(UnreadableError, match="holds 74 files, more than 64"):
        locate(tmp_path, out.getvalue())


@pytest.mark.parametrize(
    ("offset", "length"), [(1 << 62, 1 << 62), ((1 << 63) - 1, 9), (0, 1 << 62)]
)
def test_places_that_no_file_has_are_damage(tmp_path: Path, offset: int, length: int) -> None:
    with on_disk(tmp_path, GOOD) as read, pytest.raises(UnreadableError, match=r"^x "):
        RecordReader().locate(read, offset, length, "x")


# --- objects -----------------------------------------------------------------------------------


def test_objects_are_read_back(tmp_path: Path) -> None:
    value = {"args": {"a": [1, (2, 3.5)]}, "n": None}
    file = tmp_path / "x.pt"
    file.write_bytes(b"???" + object_record(value))
    assert read_object(file, 3, file.stat().st_size - 3, "x") == value


def test_torch_reads_our_objects_and_we_read_its_objects(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    value = {"a": [1, (2, 3.5)], "n": None, "s": "é", "b": True, "big": 2**40, "neg": -3}
    assert torch.load(io.BytesIO(object_record([value])), weights_only=True) == [value]
    file = tmp_path / "x.pt"
    file.write_bytes(saved([value, {"t": torch.ones(2), "d": torch.bfloat16}]))
    found = read_object(file, 0, file.stat().st_size, "x")
    assert found[0] == value
    assert str(found[1]["d"]) == "torch.bfloat16"
    assert str(found[1]["t"].of) == "torch._utils._rebuild_tensor_v2"


@pytest.mark.slow
def test_records_of_more_than_4_gib(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    spec = TensorSpec("U8", (2, (1 << 31) + 5))
    frame = tensor_frame(spec.dtype, spec.shape)
    crc = 0
    block = bytes(1 << 24)
    for _ in range(spec.nbytes // len(block)):
        crc = zlib.crc32(block, crc)
    crc = zlib.crc32(bytes(spec.nbytes % len(block)), crc)
    prefix, suffix = frame.sealed(crc)
    file = tmp_path / "big.distcp"
    fd = os.open(file, os.O_RDWR | os.O_CREAT)
    try:
        os.pwrite(fd, prefix, 0)  # the zeros between are a hole
        os.pwrite(fd, suffix, len(prefix) + spec.nbytes)
        found = RecordReader().locate(partial(os.pread, fd), 0, frame.length, "x")
    finally:
        os.close(fd)
    assert (found.start, found.nbytes, found.shape) == (len(prefix), spec.nbytes, spec.shape)
    with zipfile.ZipFile(file) as archive:
        assert archive.getinfo("archive/data/0").file_size == spec.nbytes
        assert crc == archive.getinfo("archive/data/0").CRC
    loaded = torch.load(file, mmap=True, weights_only=True)
    assert tuple(loaded.shape) == spec.shape
    assert int(loaded[1, -1]) == 0
