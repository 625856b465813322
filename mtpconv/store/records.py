"""Where the bytes of a tensor lie inside its record in a `.distcp` file.

A record is what `torch.save` wrote for one chunk: a stored zip whose `data.pkl` describes a
view of the storage in `data/<key>`. The view must be C-contiguous; then a chunk is a range of
bytes and nothing needs to be decoded.

Source: torch 2.14.1 torch/serialization.py `_save`, torch/_utils.py `_rebuild_tensor_v2` and
`_rebuild_tensor_v3`; records written by torch 2.13 and 2.14.1; read 2026-11-29.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from mtpconv.errors import UnreadableError, UnsupportedError
from mtpconv.store.dist_metadata import Place
from mtpconv.store.pickles import PERSISTENT, Global, Instance, load_pickle
from mtpconv.store.record_writer import tensor_frame
from mtpconv.store.torch_names import STORAGES, TORCH_DTYPES, allow_tensor
from mtpconv.store.zips import Archive, Pread
from mtpconv.tensors import Shape, TensorSpec

#: Bytes of a tensor's pickle (300 as a rule, 1,000 with 64 axes) and files in its archive.
_MAX_HEAD = 4 << 10
_MAX_ENTRIES = 64
_REBUILD = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a record's pickle says: a contiguous view of one storage."""

    dtype: str
    shape: Shape
    storage: str
    storage_bytes: int
    view_start: int
    view_bytes: int


@dataclass(frozen=True, slots=True)
class Record:
    """A tensor record: its bytes are `nbytes` from `start` of the file.

    They may be a part of what is stored: `stored` bytes from `stored_start`, with CRC-32 `crc`.
    """

    dtype: str
    shape: Shape
    start: int
    nbytes: int
    stored_start: int
    stored: int
    crc: int


class Located(NamedTuple):
    """Where a tensor's bytes start in a file; `stored` and `crc` as in `Record`."""

    start: int
    stored_start: int
    stored: int
    crc: int


class RecordReader:
    """Finds records; remembers the pickles it has seen, which repeat from chunk to chunk."""

    def __init__(self) -> None:
        self._seen: dict[bytes, StoredTensor] = {}

    def find(self, read: Pread, place: Place, name: str, spec: TensorSpec, shown: str) -> Located:
        """The bytes of the record at `place` of a file, which must hold a `spec`.

        Raises: as `locate`, about `name` in the file `shown`; UnreadableError if it holds
            something else.
        """
        # A record as this package writes it is known at sight: 5 us against 40.
        frame = tensor_frame(spec.dtype, spec.shape)
        if frame.length == place.length:
            crc = frame.crc_of(read, place.offset)
            if crc is not None:
                start = place.offset + len(frame.prefix)
                return Located(start, start, frame.nbytes, crc)
        where = f"{shown}: the record of {name} at byte {place.offset:,}"
        record = self.locate(read, place.offset, place.length, where)
        if record.dtype != spec.dtype or record.shape != spec.shape:
            raise UnreadableError(
                f"{where} holds {record.dtype} {list(record.shape)} and .metadata says "
                f"{spec.dtype} {list(spec.shape)}; one of the two files is from another save"
            )
        return Located(record.start, record.stored_start, record.stored, record.crc)

    def locate(self, read: Pread, offset: int, length: int, where: str) -> Record:
        """The tensor in the record at `offset` of a file.

        Raises: UnreadableError if it is damaged or names code; UnsupportedError if it is sound
            but not a little-endian contiguous tensor of a known dtype.
        """
        archive = Archive(read, offset, length, where, _MAX_ENTRIES)
        head = archive.content("data.pkl", _MAX_HEAD)
        if head is None:
            raise UnreadableError(f"{where} has no data.pkl; the file is corrupt, copy it again")
        order = archive.content("byteorder", 16)
        if order not in (None, b"little"):
            raise UnsupportedError(
                f"{where} is not little-endian; save it again on another machine"
            )
        stored = self._seen.get(head)
        if stored is None:
            stored = read_tensor_pickle(head, where)
            if len(self._seen) < 4096:
                self._seen[head] = stored
        entry = archive.entries.get(f"data/{stored.storage}")
        if entry is None or entry.size != stored.storage_bytes:
            raise UnreadableError(
                f"{where} should hold {stored.storage_bytes:,} bytes of data and holds "
                f"{entry.size if entry else 0:,}; the file is corrupt, copy it again"
            )
        start = offset + entry.start
        return Record(
            stored.dtype, stored.shape, start + stored.view_start, stored.view_bytes,
            start, entry.size, entry.crc,
        )  # fmt: skip


def read_tensor_pickle(data: bytes, where: str) -> StoredTensor:
    """What the `data.pkl` of a tensor record describes.

    Raises: as `RecordReader.locate`.
    """
    return stored_tensor(load_pickle(data, where, allow_tensor, persistent=True), where)


def stored_tensor(value: Any, where: str) -> StoredTensor:
    """What a pickle says about one tensor.

    Raises: as `RecordReader.locate`.
    """
    if type(value) is Instance and str(value.of) == "torch._utils._rebuild_parameter":
        value = value.args[0] if value.args else None
    if type(value) is not Instance or str(value.of) not in _REBUILD:
        raise UnsupportedError(f"{where} is not a plain tensor; save it again as one")
    args = value.args
    typed = args[6] if value.of.name == "_rebuild_tensor_v3" and len(args) > 6 else None
    if len(args) < 6 or not _is_storage(args[0]) or not _are_counts((args[1],), args[2], args[3]):
        raise _corrupt(where)
    _, storage_type, key, _, count = args[0].args
    dtype, width = _dtype(storage_type, typed, where)
    storage_bytes = count if storage_type.name == "UntypedStorage" else count * width
    skip, shape, strides = args[1], args[2], args[3]
    if len(strides) != len(shape):
        raise _corrupt(where)
    if not _is_contiguous(shape, strides):
        raise UnsupportedError(
            f"{where} has shape {list(shape)} and strides {list(strides)}, which is not "
            "contiguous; save it again from contiguous tensors"
        )
    elements = prod(shape)
    if elements and (skip + elements) * width > storage_bytes:
        raise _corrupt(where)
    return StoredTensor(dtype, shape, key, storage_bytes, skip * width, elements * width)


def _corrupt(where: str) -> UnreadableError:
    return UnreadableError(f"{where} describes an impossible tensor; the file is corrupt")


def _is_storage(value: Any) -> bool:
    """`('storage', class, key, location, count)`, as a persistent id."""
    return (
        type(value) is Instance
        and value.of is PERSISTENT
        and len(value.args) == 5
        and value.args[0] == "storage"
        and type(value.args[1]) is Global
        and type(value.args[2]) is str
        and _are_counts((value.args[4],))
    )


def _are_counts(*groups: Any) -> bool:
    """True if every group is a tuple of at most 64 whole numbers that fit in 63 bits."""
    return all(
        type(group) is tuple
        and len(group) <= 64
        and all(type(n) is int and 0 <= n < 1 << 63 for n in group)
        for group in groups
    )


def _dtype(storage: Global, typed: Any, where: str) -> tuple[str, int]:
    """A dtype's safetensors name and element size; `typed` is what an untyped storage holds."""
    if storage.name == "UntypedStorage":
        name = typed.name if type(typed) is Global and typed.module == "torch" else ""
    else:
        name = STORAGES.get(storage.name, "") if storage.module == "torch" else ""
    known = TORCH_DTYPES.get(name)
    if known is None:
        shown = typed if typed is not None else storage
        raise UnsupportedError(f"{where} has dtype {shown}, which safetensors does not have")
    return known


def _is_contiguous(shape: Shape, strides: Shape) -> bool:
    """Whether elements lie in C order without gaps; strides of axes of size 1 do not matter."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 0:
            return True
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
