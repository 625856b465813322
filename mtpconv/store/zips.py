"""The stored (uncompressed) zip archives that `torch.save` writes, inside a range of a file.

Only what torch writes is read: no compression, no encryption, no comment, one archive with
one root folder, every entry inside the range. Zip64 is, for storages of 4 GiB and more.

Source: PKWARE APPNOTE 6.3.10 section 4.3, and archives written by torch 2.13 and 2.14.1.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from mtpconv.errors import UnreadableError

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")

#: Bytes read from the front and the back of an archive; a tensor record needs 300 to 1,500.
_HEAD = 1024
_TAIL = 1536
_MAX_DIRECTORY = 16 << 20

#: Up to so many bytes from a place of one file, as `os.pread` gives them for a descriptor.
Pread = Callable[[int, int], bytes]


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of an archive: its bytes start at `start`, counted from the archive's start.

    `crc` is the CRC-32 that the directory says they have; 0 if torch was told to leave it out.
    """

    start: int
    size: int
    crc: int


class Archive:
    """A stored zip in `length` bytes from `offset` of a file.

    Raises: UnreadableError, naming `where`, if it is not what `torch.save` writes.
    """

    __slots__ = ("_head", "_length", "_offset", "_read", "_tail", "_where", "entries")

    def __init__(self, read: Pread, offset: int, length: int, where: str, max_entries: int) -> None:
        self._read = read
        self._offset = offset
        self._length = length
        self._where = where
        self._head = b""
        if length <= _HEAD + _TAIL:
            self._tail = self._pread(0, length)
        else:
            self._tail = self._pread(length - _TAIL, _TAIL)
            self._head = self._pread(0, _HEAD)
        try:
            self.entries = self._directory(max_entries)
        except (struct.error, UnicodeDecodeError):
            raise self._bad("is cut short") from None

    def _bad(self, what: str) -> UnreadableError:
        return UnreadableError(f"{self._where} {what}; the file is corrupt, copy it again")

    def _pread(self, start: int, size: int) -> bytes:
        try:
            return self._read(size, self._offset + start)
        except (OSError, OverflowError) as error:
            raise self._bad(f"cannot be read ({error})") from None

    def read(self, start: int, size: int) -> bytes:
        """Bytes of the archive; fewer than asked for only if the file is shorter.

        Raises: UnreadableError if the range is not inside the archive.
        """
        if start < 0 or size < 0 or start + size > self._length:
            raise self._bad("points outside itself")
        if start + size <= len(self._head):
            return self._head[start : start + size]
        tail = start - (self._length - len(self._tail))
        if tail >= 0:
            return self._tail[tail : tail + size]
        return self._pread(start, size)

    def _end(self) -> tuple[int, int, int]:
        """Number of entries, start of the directory, and where it must end."""
        at = self._length - _END.size
        sign, disk, first, here, count, size, start, comment = _END.unpack(self.read(at, _END.size))
        if sign != b"PK\5\6" or comment:
            raise self._bad("is not a record that torch.save wrote")
        if at >= _LOCATOR.size:
            sign, _, end64, _ = _LOCATOR.unpack(self.read(at - _LOCATOR.size, _LOCATOR.size))
            if sign == b"PK\6\7":  # torch writes a zip64 end always
                at = end64
                sign, _, _, _, disk, first, here, count, size, start = _END64.unpack(
                    self.read(at, _END64.size)
                )
                if sign != b"PK\6\6":
                    raise self._bad("has a directory that contradicts itself")
        if disk or first or here != count or start + size != at or size > _MAX_DIRECTORY:
            raise self._bad("has a directory that contradicts itself")
        return count, start, at

    def _directory(self, max_entries: int) -> dict[str, Entry]:
        count, start, end = self._end()
        if count == 0 or count > (end - start) // _CENTRAL.size:
            raise self._bad("has a directory that contradicts itself")
        if count > max_entries:
            raise self._bad(f"holds {count:,} files, more than {max_entries:,}")
        data = self.read(start, end - start)
        entries: dict[str, Entry] = {}
        root = None
        at = 0
        for _ in range(count):
            sign, _, _, flags, method, _, _, crc, stored, size = _CENTRAL.unpack_from(data, at)[:10]
            name_size, extra_size, comment_size, *_, header = _CENTRAL.unpack_from(data, at)[10:]
            at += _CENTRAL.size
            raw_name = data[at : at + name_size]
            name = str(raw_name, "utf-8")
            at += name_size
            if sign != b"PK\1\2" or len(raw_name) != name_size:
                raise self._bad("has a directory that contradicts itself")
            if 0xFFFFFFFF in (stored, size, header):
                stored, size, header = self._wide(data[at : at + extra_size], stored, size, header)
            at += extra_size + comment_size
            if method or flags & 1 or stored != size:
                raise self._bad(f"holds {name[:80]!r} compressed; torch.save never compresses")
            sign, *_, local_name, local_extra = _LOCAL.unpack(self.read(header, _LOCAL.size))
            body = header + _LOCAL.size + local_name + local_extra
            if sign != b"PK\3\4" or local_name != name_size or body + size > start:
                raise self._bad(f"has no {name[:80]!r} where its directory says")
            if self.read(header + _LOCAL.size, name_size) != raw_name:
                raise self._bad(f"has no {name[:80]!r} where its directory says")
            folder, _, tail = name.partition("/")
            root = folder if root is None else root
            if folder != root or tail in entries:
                raise self._bad(f"holds {name[:80]!r}, which torch.save does not write")
            entries[tail] = Entry(body, size, crc)
        return entries

    def _wide(self, extra: bytes, *narrow: int) -> tuple[int, int, int]:
        """Sizes and offset of an entry, those that did not fit taken from its zip64 field."""
        at = 0
        while at + 4 <= len(extra):
            kind, length = struct.unpack_from("<2H", extra, at)
            if kind == 1:
                field = extra[at + 4 : at + 4 + length // 8 * 8]
                wide = [value for (value,) in struct.iter_unpack("<Q", field)]
                order = (1, 0, 2)  # the field holds size, stored size, offset
                values = list(narrow)
                for which in order:
                    if values[which] == 0xFFFFFFFF and wide:
                        values[which] = wide.pop(0)
                return values[0], values[1], values[2]
            at += 4 + length
        raise self._bad("has no zip64 sizes where it needs them")

    def content(self, name: str, limit: int) -> bytes | None:
        """All bytes of an entry, None if there is no such entry.

        Raises: UnreadableError if it is larger than `limit` or the file ends too early.
        """
        entry = self.entries.get(name)
        if entry is None:
            return None
        if entry.size > limit:
            raise self._bad(f"holds {name} of {entry.size:,} bytes, more than {limit:,}")
        data = self.read(entry.start, entry.size)
        if len(data) != entry.size:
            raise self._bad("is cut short")
        return data
