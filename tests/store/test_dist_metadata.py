from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpconv.errors import MtpconvError, UnreadableError, WriteError
from mtpconv.store.dist_metadata import read_metadata
from mtpconv.store.dist_metadata_writer import metadata_pickle
from mtpconv.store.pickle_writer import dump_pickle
from mtpconv.store.pickles import Global, Instance
from mtpconv.store.torch_dist_writer import Written
from mtpconv.tensors import Shape, TensorSpec


def written(key: str = "t", shape: Shape = (4,), **changes: Any) -> Written:
    good = Written(key, "F32", shape, (0,) * len(shape), shape, "__0_0.distcp", 0, 64)
    return good._replace(**changes)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([written(sizes=(3,))], "leave 1 of 4 elements uncovered"),
        ([written(sizes=(5,))], "reach beyond its shape"),
        ([written(), written(offsets=(1,), sizes=(1,))], "overlap"),
        ([written(dtype="BF16"), written(offsets=(1,))], "different dtypes"),
        ([written(dtype=None, shape=(), offsets=(), sizes=())] * 2, "written twice"),
    ],
)
def test_contradictions_are_not_written(records: list[Written], message: str) -> None:
    with pytest.raises(WriteError, match=rf"^t: its chunks .*{message}"):
        metadata_pickle(records)


def test_metadata_does_not_depend_on_the_order_of_records() -> None:
    records = [
        written(f"k{k}", (4,), offsets=(o,), sizes=(2,), offset=64 * k + 1000 * o)
        for k in range(3)
        for o in (0, 2)
    ]
    pickled = metadata_pickle(records)
    assert pickled == metadata_pickle(reversed(records))
    assert not read_metadata(pickled).problems


def cls(name: str, **state: Any) -> Instance:
    module = "filesystem" if name == "_StorageInfo" else "metadata"
    full = Global(f"torch.distributed.checkpoint.{module}", name)
    return Instance(full, state=state or None, new=True)


def size(*values: Any) -> Instance:
    return Instance(Global("torch", "Size"), (values,))


def metadata(
    entry: Any = None, info: Any = None, key: Any = "t", more: Any = (), **index: Any
) -> bytes:
    """A `.metadata` with one tensor of 4 float32, some part of it replaced."""
    dtype = Global("torch", "float32")
    properties = Instance(
        Global("torch.distributed.checkpoint.metadata", "TensorProperties"),
        state=(dtype, None, False, None, False),
        new=True,
    )
    chunk = cls("ChunkStorageMetadata", offsets=size(0), sizes=size(4))
    tensor = cls("TensorStorageMetadata", properties=properties, size=size(4), chunks=[chunk])
    place = cls("_StorageInfo", relative_path="__0_0.distcp", offset=0, length=9)
    place = place if info is None else info
    which = cls("MetadataIndex", **{"fqn": "t", "offset": size(0), "index": 0} | index)
    return dump_pickle(
        cls(
            "Metadata",
            state_dict_metadata={key: tensor if entry is None else entry},
            storage_data=dict([(which, place), *more]),
        )
    )


def test_the_hand_made_metadata_is_sound() -> None:
    found = read_metadata(metadata())
    assert not found.problems
    assert found.tensors == {"t": TensorSpec("F32", (4,))}


def info(path: Any, offset: Any = 0, length: Any = 9, **more: Any) -> Instance:
    return cls("_StorageInfo", relative_path=path, offset=offset, length=length, **more)


def tensor(
    sizes: Any = (4,), offsets: Any = (0,), chunks: Any = None, dtype: str = "float32"
) -> Any:
    state = (Global("torch", dtype), None, False, None, False)
    made = cls("ChunkStorageMetadata", offsets=offsets, sizes=sizes)
    properties = cls("TensorProperties")
    properties.state = state
    return cls(
        "TensorStorageMetadata",
        properties=properties,
        size=(4,),
        chunks=[made] if chunks is None else chunks,
    )


@pytest.mark.parametrize(
    "data",
    [
        dump_pickle(None),
        dump_pickle({"a": 1}),
        dump_pickle(cls("Metadata")),
        dump_pickle(cls("Metadata", state_dict_metadata={}, storage_data={"a": 1})),
        dump_pickle(cls("SavePlan")),
        metadata(entry=5),
        metadata(entry=cls("StorageMeta")),
        metadata(key=5),
        metadata(fqn=5),
        metadata(offset=[0]),
        metadata(offset=(-1,)),
        metadata(offset=(1.5,)),
        metadata(offset=(0,) * 65),
        metadata(info=5),
        *(metadata(info=info(path)) for path in ("/etc/passwd", "../x", "a/b", "..", "", 5)),
        metadata(info=info("a\0b")),
        metadata(info=info("x", offset=1 << 62, length=1 << 62)),
        metadata(fqn="two\nlines"),
        metadata(key="\x1b[31mred"),
        metadata(key="x" * 2000),
        metadata(key=""),
        metadata(info=info("x", offset=-1)),
        metadata(info=info("x", length=None)),
        metadata(info=info("x", length=2**63)),
        metadata(info=info("x", transform_descriptors=["zstd"])),
        metadata(entry=tensor(chunks=5)),
        metadata(entry=tensor(chunks=[5])),
        metadata(entry=tensor(sizes=(4, 1))),
        metadata(entry=tensor(sizes=(-4,))),
        metadata(entry=tensor(sizes=(True,))),
        metadata(entry=tensor(offsets=None)),
    ],
)  # fmt: skip
def test_metadata_that_makes_no_sense_is_refused(data: bytes) -> None:
    with pytest.raises(UnreadableError, match=r"^\.metadata ") as caught:
        read_metadata(data)
    assert "\n" not in str(caught.value)


def other(byte: int, **state: Any) -> tuple[Instance, Instance]:
    return cls("MetadataIndex", **state), info("__0_0.distcp", offset=byte)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (metadata(offset=size(1)), "names no record for 1 chunks of t"),
        (metadata(entry=tensor(sizes=(3,))), "leave 1 of 4 elements uncovered"),
        (metadata(entry=tensor(sizes=(5,))), "reach beyond its shape"),
        (metadata(entry=tensor(chunks=[])), "leave 4 of 4 elements uncovered"),
        (metadata(entry=tensor(dtype="complex128")), "complex128, which safetensors"),
        (metadata(entry=cls("BytesStorageMetadata")), "names no record of t"),
        (metadata(more=[other(64, fqn="u", offset=size(0))]), "record of 'u' that no chunk needs"),
        (metadata(more=[other(8, fqn="t", offset=size(2))]), "records at byte 8 of __0_0.distcp"),
    ],
)  # fmt: skip
def test_contradictions_in_metadata_are_problems(data: bytes, message: str) -> None:
    problems = read_metadata(data).problems
    assert any(message in p.message for p in problems)
    assert all(p.file == ".metadata" for p in problems)


@given(st.data())
def test_metadata_with_a_changed_byte_gives_documented_errors(data: st.DataObject) -> None:
    good = bytearray(metadata())
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    with suppress(MtpconvError):
        read_metadata(bytes(good))


def test_planning_is_linear_in_the_number_of_chunks() -> None:
    """Counted in calls: time says more about the machine."""

    def work(count: int) -> int:
        records = [
            Written(
                f"l{n // 256}", "BF16", (256, 8, 8), (n % 256, 0, 0), (1, 8, 8), "f", n * 999, 9
            )
            for n in range(count)
        ]
        pickle = metadata_pickle(records)
        calls = 0

        def count_one(*_: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count_one)
        try:
            found = read_metadata(pickle)
        finally:
            sys.setprofile(None)
        assert not found.problems
        return calls

    assert work(10240) < 5 * work(2560)
