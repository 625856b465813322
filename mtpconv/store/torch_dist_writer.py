"""Writing torch_dist checkpoints: records into `__R_N.distcp` files, streamed.

Every rank writes its chunks with a `TorchDistWriter` of its own and hands on the list of what
it wrote; one rank then writes `.metadata` from all lists (`dist_metadata_writer`).

Source: docs/torch_dist.md.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from zlib import crc32

from mtpconv.errors import WriteError
from mtpconv.store.record_writer import ALIGNMENT, Frame, object_record, tensor_frame
from mtpconv.tensors import Box, Shape, TensorSpec

#: A new file is begun when the current one has this many bytes.
FILE_LIMIT = 2 << 30

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


class Reservation(NamedTuple):
    """Room for the bytes of a chunk: put `nbytes` at `start` of `fd`, then call `commit`.

    Whoever has `turn` writes: the kernel lets one thread into a file, and the others spin.
    """

    fd: int
    file: Path
    start: int
    nbytes: int
    frame: Frame
    turn: threading.Lock

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Put bytes into the file. Raises: WriteError."""
        with self.turn:
            write_at(self.fd, self.file, at, data)


class TorchDistWriter:
    """Writes one rank's records into a folder that exists.

    Chunks may be written from several threads; each goes where the file ended when it was
    reserved. Nothing is readable before `.metadata` is written.
    """

    def __init__(
        self,
        folder: Path,
        rank: int = 0,
        *,
        first: int = 0,
        file_limit: int = FILE_LIMIT,
        existing: bool = False,
    ) -> None:
        """`first` numbers the first file; `existing` files are opened, not created."""
        self.folder = folder
        self.rank = rank
        self._first = first
        self._limit = file_limit
        self._flags = os.O_RDWR if existing else _NEW
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._files: list[tuple[Path, int]] = []
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

    def reserve(self, key: str, spec: TensorSpec, box: Box) -> Reservation:
        """Room for a box of the tensor `key`, whose data the caller puts into the file.

        Law: `start` is a multiple of 64.
        Raises: UnsupportedError for a dtype that torch does not have; WriteError.
        """
        frame = tensor_frame(spec.dtype, box.sizes)
        fd, file, offset = self._place(key, frame.length, spec.dtype, spec.shape, box)
        start = offset + len(frame.prefix)
        return Reservation(fd, file, start, frame.nbytes, frame, self._turn)

    def commit(self, reservation: Reservation, crc: int) -> None:
        """Complete the record around data that are in place; `crc` is their CRC-32.

        Raises: WriteError.
        """
        prefix, suffix = reservation.frame.sealed(crc)
        start = reservation.start
        reservation.write(start - len(prefix), prefix)
        reservation.write(start + reservation.nbytes, suffix)

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
                room.write(at, view)
            at += len(view)
        if at != room.start + room.nbytes:
            raise WriteError(
                f"{key}: {at - room.start:,} of {room.nbytes:,} bytes came for one chunk; "
                "the source changed while it was read"
            )
        if room.nbytes <= _SMALL:
            prefix, suffix = room.frame.sealed(crc)
            record = b"".join((prefix, *small, suffix))
            room.write(room.start - len(prefix), record)
        else:
            self.commit(room, crc)

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
        padded = record + bytes(-len(record) % ALIGNMENT)
        together: list[tuple[int, Path, int]] = []
        for key in keys:
            place = self._place(key, len(record), None, (), Box((), ()))
            if together:
                fd, file, at = together[-1]
                full = len(together) * len(padded) >= _SMALL
                if full or place != (fd, file, at + len(padded)):
                    write_at(*together[0], padded * (len(together) - 1) + record)
                    together = []
            together.append(place)
        if together:
            write_at(*together[0], padded * (len(together) - 1) + record)

    def close(self) -> tuple[Written, ...]:
        """Bring everything to disk and say what was written.

        Raises: WriteError.
        """
        try:
            for file, fd in self._files:
                try:
                    os.fsync(fd)
                except OSError as error:
                    raise _failed(file, error) from None
        finally:
            self.release()
        sync_folder(self.folder)
        return tuple(self._written)

    def release(self) -> None:
        """Close the files, whatever is in them."""
        for _, fd in self._files:
            os.close(fd)
        self._files = []

    def _place(
        self, key: str, length: int, dtype: str | None, shape: Shape, box: Box
    ) -> tuple[int, Path, int]:
        """Reserve the next `length` bytes for a record and remember it."""
        with self._lock:
            if not self._files or self._end >= self._limit:
                number = self._first + len(self._files)
                file = self.folder / f"__{self.rank}_{number}.distcp"
                try:
                    self._files.append((file, os.open(file, self._flags, 0o644)))
                except OSError as error:
                    raise _failed(file, error) from None
                self._end = 0
            file, fd = self._files[-1]
            offset = -(-self._end // ALIGNMENT) * ALIGNMENT
            self._end = offset + length
            self._written.append(
                Written(key, dtype, shape, box.offsets, box.sizes, file.name, offset, length)
            )
        return fd, file, offset


_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL


def write_at(fd: int, file: Path, offset: int, data: bytes | memoryview) -> None:
    """Write a whole block into an open file.

    Raises: WriteError.
    """
    try:
        done = os.pwrite(fd, data, offset)
        while done < len(data):  # more than 2 GiB at once, or a signal
            done += os.pwrite(fd, memoryview(data)[done:], offset + done)
    except OSError as error:
        raise _failed(file, error) from None


def _failed(file: Path, error: OSError) -> WriteError:
    what = f"{file}: cannot be written: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what += "; free some space or choose another disk"
    return WriteError(what)


def write_file(file: Path, data: bytes) -> None:
    """Write a small file and bring it to disk.

    Raises: WriteError.
    """
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    except OSError as error:
        raise _failed(file, error) from None
    try:
        write_at(fd, file, 0, data)
        os.fsync(fd)
    except OSError as error:
        raise _failed(file, error) from None
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to disk.

    Raises: WriteError.
    """
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise _failed(folder, error) from None
    try:
        os.fsync(fd)
    except OSError as error:
        raise _failed(folder, error) from None
    finally:
        os.close(fd)
