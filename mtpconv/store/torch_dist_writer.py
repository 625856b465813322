"""Writing torch_dist checkpoints: records into `__R_N.distcp` files, streamed.

Every file has a `TorchDistWriter` of its own, which says in the end what was written; one rank
then writes `.metadata` from all of that (`dist_metadata_writer`).

Source: docs/torch_dist.md.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from zlib import crc32

from mtpconv.errors import WriteError
from mtpconv.store.new_file import NewFile, cannot_write, write_at
from mtpconv.store.record_writer import ALIGNMENT, Frame, object_record, tensor_frame
from mtpconv.tensors import Box, Shape, TensorSpec

#: Records up to this size are written in one call.
_SMALL = 256 << 10


class Written(NamedTuple):
    """One record as `.metadata` needs it; bytes entries have `dtype` None and empty shapes."""

    key: str
    dtype: str | None
    shape: Shape
    offsets: Shape
    sizes: Shape
    file: str
    offset: int
    length: int


class Room(NamedTuple):
    """Where a record goes in its file: a frame around `nbytes` of data from `start` on.

    It begins at `begin`, where the one before ended: zeros up to its frame belong to it.
    """

    begin: int
    start: int
    frame: Frame

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return self.frame.nbytes

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.start + self.frame.nbytes + len(self.frame.suffix)

    def sealed(self, crc: int) -> tuple[bytes, bytes]:
        """All that comes before the data, and after them; `crc` is their CRC-32."""
        prefix, suffix = self.frame.sealed(crc)
        return prefix.rjust(self.start - self.begin, b"\0"), suffix

    def seal(self, file: NewFile, crc: int) -> None:
        """Complete a record around data that are in the file. Raises: WriteError."""
        prefix, suffix = self.sealed(crc)
        file.write(self.begin, prefix)
        file.write(self.start + self.nbytes, suffix)


class TorchDistWriter:
    """Writes one file into a folder that exists.

    Records may be written from several threads; each goes where the file ended when it was
    reserved. Nothing is readable before `.metadata` is written.
    """

    def __init__(self, folder: Path, rank: int = 0, number: int = 0) -> None:
        self.path = folder / f"__{rank}_{number}.distcp"
        self._lock = threading.Lock()
        self._file: NewFile | None = None
        self._end = 0
        self._written: list[Written] = []

    def __enter__(self) -> TorchDistWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def written(self) -> tuple[Written, ...]:
        """What there is room for."""
        return tuple(self._written)

    @property
    def file(self) -> NewFile:
        """The file, created when first asked for. Raises: WriteError."""
        with self._lock:
            if self._file is None:
                try:
                    self._file = NewFile(self.path)
                except OSError as error:
                    raise cannot_write(self.path, error) from None
            return self._file

    def reserve(self, key: str, spec: TensorSpec, box: Box) -> Room:
        """Room for a box of the tensor `key`, which the caller puts into the file.

        Law: `start` is a multiple of 64.
        Raises: UnsupportedError for a dtype that torch does not have.
        """
        frame = tensor_frame(spec.dtype, box.sizes)
        begin, offset = self._place(key, frame.length, spec.dtype, spec.shape, box)
        return Room(begin, offset + len(frame.prefix), frame)

    def write(self, key: str, spec: TensorSpec, box: Box, blocks: Iterable[Any]) -> None:
        """Write a box of the tensor `key` from blocks of bytes, in C order.

        Raises: as `reserve`; WriteError too if the blocks hold more or fewer bytes than the box.
        """
        room = self.reserve(key, spec, box)
        at = room.start
        crc = 0
        small: list[bytes] = []
        for block in blocks:
            view = memoryview(block).cast("B")
            crc = crc32(view, crc)
            if at + len(view) > room.start + room.nbytes:
                raise WriteError(f"{key}: more than {room.nbytes:,} bytes came for one chunk")
            if room.nbytes <= _SMALL:
                small.append(bytes(view))
            else:
                self.file.write(at, view)
            at += len(view)
        if at != room.start + room.nbytes:
            raise WriteError(
                f"{key}: {at - room.start:,} of {room.nbytes:,} bytes came for one chunk; "
                "the source changed while it was read"
            )
        if room.nbytes <= _SMALL:
            prefix, suffix = room.sealed(crc)
            self.file.write(room.begin, b"".join((prefix, *small, suffix)))
        else:
            room.seal(self.file, crc)

    def write_object(self, key: str, value: Any) -> None:
        """Write a bytes entry: `[None]` for an `_extra_state` that holds nothing.

        Raises: WriteError; TypeError for values that `PickleWriter.save` does not know.
        """
        self.write_objects((key,), value)

    def write_objects(self, keys: Iterable[str], value: Any) -> None:
        """Write a bytes entry with the same value for each key, many of them at once.

        Raises: as `write_object`.
        """
        record = object_record(value)
        at, together = 0, bytearray()
        for key in keys:
            begin, offset = self._place(key, len(record), None, (), Box((), ()))
            if together and (len(together) >= _SMALL or begin != at + len(together)):
                self.file.write(at, bytes(together))
                together.clear()
            if not together:
                at = begin
            together += record.rjust(offset - begin + len(record), b"\0")
        if together:
            self.file.write(at, bytes(together))

    def close(self) -> tuple[Written, ...]:
        """Bring everything to disk and say what was written.

        Raises: WriteError.
        """
        try:
            if self._file is not None:
                self._file.sync()
        except OSError as error:
            raise cannot_write(self.path, error) from None
        finally:
            self.release()
        sync_folder(self.path.parent)
        return self.written

    def release(self) -> None:
        """Close the file, whatever is in it."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _place(
        self, key: str, length: int, dtype: str | None, shape: Shape, box: Box
    ) -> tuple[int, int]:
        """The next `length` bytes for a record, which is remembered: room from where, and where."""
        with self._lock:
            begin = self._end
            offset = -(-begin // ALIGNMENT) * ALIGNMENT
            self._end = offset + length
            self._written.append(
                Written(key, dtype, shape, box.offsets, box.sizes, self.path.name, offset, length)
            )
        return begin, offset


def write_file(file: Path, data: bytes) -> None:
    """Write a small file and bring it to disk.

    Raises: WriteError.
    """
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    except OSError as error:
        raise cannot_write(file, error) from None
    try:
        write_at(fd, file, 0, data)
        os.fsync(fd)
    except OSError as error:
        raise cannot_write(file, error) from None
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to disk.

    Raises: WriteError.
    """
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise cannot_write(folder, error) from None
    try:
        os.fsync(fd)
    except OSError as error:
        raise cannot_write(folder, error) from None
    finally:
        os.close(fd)
