"""The records of a `.distcp` file: stored zips that `torch.load(weights_only=True)` reads.

A tensor record is a frame around raw bytes: `prefix`, data, `suffix`. Both depend only on
dtype and shape, apart from the CRC of the data, which is filled in at three known places. So
a record's size is known before its data, and the data can be put there by anyone.

Source: PKWARE APPNOTE 6.3.10 sections 4.3 and 4.5.3; torch 2.14.1 torch/serialization.py
`_save`; read 2026-11-29.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from zlib import crc32

from mtpconv.errors import UnsupportedError
from mtpconv.store.pickle_writer import dump_pickle
from mtpconv.store.pickles import PERSISTENT, Global, Instance
from mtpconv.store.torch_names import STORAGES, TORCH_DTYPES
from mtpconv.store.zips import Pread
from mtpconv.tensors import Shape, TensorSpec

#: Data start at multiples of this, counted from the start of the record.
ALIGNMENT = 64

_WIDE = 0xFFFFFFFF
_TORCH_NAMES = {name: torch_name for torch_name, (name, _) in TORCH_DTYPES.items()}
_STORAGE_OF = {torch_name: storage for storage, torch_name in STORAGES.items()}
_MANTLE = ((b"byteorder", b"little"), (b"version", b"3\n"))


@dataclass(frozen=True, slots=True)
class Frame:
    """What surrounds the data of a tensor record; the CRC of the data is still 0."""

    prefix: bytes
    suffix: bytes
    nbytes: int
    crc_in_prefix: int
    crc_in_suffix: int

    @property
    def length(self) -> int:
        """Bytes of the whole record."""
        return len(self.prefix) + self.nbytes + len(self.suffix)

    def crc_of(self, read: Pread, offset: int) -> int | None:
        """The CRC-32 in the record at `offset` of a file; None if it is another record.

        Law: a record is this one whatever its data.
        """
        start, end = offset + len(self.prefix), offset + self.length - len(self.suffix)
        if not _is_same(read(start - offset, offset), self.prefix, self.crc_in_prefix):
            return None
        suffix = read(len(self.suffix), end)
        if not _is_same(suffix, self.suffix, self.crc_in_suffix):
            return None
        return int.from_bytes(suffix[self.crc_in_suffix : self.crc_in_suffix + 4], "little")

    def sealed(self, crc: int) -> tuple[bytes, bytes]:
        """Prefix and suffix with the CRC-32 of the data filled in."""
        return (
            _put(self.prefix, self.crc_in_prefix, crc),
            _put(self.suffix, self.crc_in_suffix, crc),
        )


def _put(data: bytes, at: int, crc: int) -> bytes:
    return b"".join((data[:at], struct.pack("<I", crc), data[at + 4 :]))


def _is_same(found: bytes, wanted: bytes, crc_at: int) -> bool:
    """Equality but for a CRC."""
    after = crc_at + 4
    return found[:crc_at] == wanted[:crc_at] and found[after:] == wanted[after:]


def _local(name: bytes, crc: int, size: int, extra: bytes = b"") -> bytes:
    wide = min(size, _WIDE)
    version = 45 if size >= _WIDE else 0
    head = struct.pack(
        "<4s5H3I2H", b"PK\3\4", version, 0, 0, 0, 0, crc, wide, wide, len(name), len(extra)
    )
    return head + name + extra


def _central(name: bytes, crc: int, size: int, header: int) -> bytes:
    wide = min(size, _WIDE)
    extra = struct.pack("<2H2Q", 1, 16, size, size) if size >= _WIDE else b""
    version = 45 if extra else 0
    head = struct.pack(
        "<4s6H3I5H2I", b"PK\1\2", version, version, 0, 0, 0, 0, crc, wide, wide,
        len(name), len(extra), 0, 0, 0, 0, header,
    )  # fmt: skip
    return head + name + extra


def _end(count: int, size: int, start: int) -> bytes:
    """The end of the directory; zip64 where its start does not fit in 32 bits."""
    wide = b""
    if start >= _WIDE:
        wide = struct.pack(
            "<4sQ2H2I4Q4sIQI", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start,
            b"PK\6\7", 0, start + size, 1,
        )  # fmt: skip
    last = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, size, min(start, _WIDE), 0)
    return wide + last


def _small_entries(entries: Sequence[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """Local parts and directory of entries at the start of an archive."""
    body = b""
    directory = b""
    for name, data in entries:
        name = b"archive/" + name
        directory += _central(name, crc32(data), len(data), len(body))
        body += _local(name, crc32(data), len(data)) + data
    return body, directory


@lru_cache(maxsize=4096)
def tensor_frame(dtype: str, shape: Shape) -> Frame:
    """The frame of a record that holds one contiguous tensor.

    Law: `len(prefix)` is a multiple of `ALIGNMENT`.
    Raises: UnsupportedError for a dtype that torch does not have.
    """
    if dtype not in _TORCH_NAMES:
        raise UnsupportedError(f"torch has no dtype for {dtype}; it cannot be stored in torch_dist")
    nbytes = TensorSpec(dtype, shape).nbytes
    body, directory = _small_entries(((b"data.pkl", _tensor_pickle(dtype, shape)), *_MANTLE))
    name = b"archive/data/0"
    wide = struct.pack("<2H2Q", 1, 16, nbytes, nbytes) if nbytes >= _WIDE else b""
    unpadded = len(body) + len(_local(name, 0, nbytes, wide)) + 4
    padding = -unpadded % ALIGNMENT
    extra = wide + struct.pack("<2sH", b"FB", padding) + b"Z" * padding  # as torch pads
    prefix = body + _local(name, 0, nbytes, extra)
    entry = _central(name, 0, nbytes, len(body))
    end = _end(2 + len(_MANTLE), len(directory) + len(entry), len(prefix) + nbytes)
    suffix = directory + entry + end
    return Frame(prefix, suffix, nbytes, len(body) + 14, len(directory) + 16)


def _tensor_pickle(dtype: str, shape: Shape) -> bytes:
    """The `data.pkl` of a contiguous tensor, as `torch.save` describes it."""
    name = _TORCH_NAMES[dtype]
    spec = TensorSpec(dtype, shape)
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    hooks = Instance(Global("collections", "OrderedDict"))
    if name in _STORAGE_OF:
        storage, count = Global("torch", _STORAGE_OF[name]), spec.elements
    else:  # younger dtypes have no storage class of their own
        storage, count = Global("torch.storage", "UntypedStorage"), spec.nbytes
    reference = Instance(PERSISTENT, ("storage", storage, "0", "cpu", count))
    args: tuple[Any, ...] = (reference, 0, shape, tuple(strides), False, hooks)
    call = Global("torch._utils", "_rebuild_tensor_v2")
    if name not in _STORAGE_OF:
        call = Global("torch._utils", "_rebuild_tensor_v3")
        args = (*args, Global("torch", name))
    return dump_pickle(Instance(call, args))


def object_record(value: Any) -> bytes:
    """A whole archive with one pickled value and no tensors, as `torch.save` writes it."""
    body, directory = _small_entries(((b"data.pkl", dump_pickle(value)), *_MANTLE))
    return body + directory + _end(1 + len(_MANTLE), len(directory), len(body))
