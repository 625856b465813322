"""Whether stored bytes have their CRC-32, found out along with whatever reads them.

torch's own reader does not look, so a bit that flipped on disk is loaded without a word. Here
everything that is read from a file comes by; the CRC of a range is put together from the parts
that were read, in whatever order, and only what nobody read is read for its own sake.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from mtpconv.store.content import Run, run_blocks
from mtpconv.store.crc import LATE, Sealed, SealedFile, crc32
from mtpconv.store.crew import Crew
from mtpconv.store.files import Files, Store

_OPEN, _SOUND, _BROKEN, _UNSEALED = range(4)
#: Parts of one range that are remembered; one that is read in a wilder order is read again.
_MOST_PARTS = 64
#: The polynomial of CRC-32, its coefficients from x^0 in the highest bit.
_POLYNOMIAL = 0xEDB88320


class Range(NamedTuple):
    """Stored bytes of one tensor that have a CRC-32."""

    name: str
    file: Path
    start: int
    nbytes: int

    @property
    def fault(self) -> str:
        """What is wrong with one that does not have it, and what to do, in one line."""
        return (
            f"{self.file}: the record of {self.name} at byte {self.start:,} does not have the "
            "CRC-32 stored with it: bits flipped on disk or on the way; copy the file again"
        )


def crc_of(file: Store, start: int, nbytes: int, files: Files) -> int:
    """The CRC-32 of a stretch of a file. Raises: UnreadableError if the file ends early."""
    crc = 0
    for block in run_blocks([Run(0, nbytes, file, start)], files):
        crc = crc32(block, crc)
    return crc


class CrcCheck:
    """The ranges of a checkpoint; `saw` takes what is read, of any file, from any thread."""

    def __init__(self, sealed: Sealed) -> None:
        #: ranges are numbered through all files; each file with the number of its first
        self._files: dict[Store, tuple[int, SealedFile]] = {}
        self._firsts: list[int] = []
        self._order = sorted(sealed, key=str)
        count = 0
        for file in self._order:
            ordered = sealed[file].ordered()
            self._files[file] = (count, ordered)
            self._firsts.append(count)
            count += len(ordered.names)
        self._state = bytearray(count)
        self._parts: dict[int, list[tuple[int, int, int]]] = {}
        self._lock = threading.Lock()
        for first, one in self._files.values():
            for i, (size, crc) in enumerate(zip(one.sizes, one.crcs, strict=True)):
                if not crc:
                    self._state[first + i] = _UNSEALED if size else _SOUND

    def saw(self, file: Store, start: int, view: memoryview) -> None:
        """Take note of bytes that were read."""
        found = self._files.get(file)
        if found is None or not len(view):
            return
        first, one = found
        i = bisect_right(one.starts, start) - 1
        if i < 0 or self._state[first + i]:
            return
        begin = start - one.starts[i]
        end, size = begin + len(view), one.sizes[i]
        if end > size:
            return
        if end - begin == size:
            self._settle(first + i, crc32(view), one.crcs[i])
            return
        self._add(first + i, begin, end, view, one.crcs[i], size)

    def _add(self, at: int, begin: int, end: int, view: memoryview, crc: int, size: int) -> None:
        with self._lock:
            parts = self._parts.setdefault(at, [])
            if any(b < end and begin < e for b, e, _ in parts):
                return  # read before
            before = next((part for part in parts if part[1] == begin), None)
            if before is not None:
                parts.remove(before)
        # Whoever reads in order carries on; nothing needs to be combined.
        found = crc32(view, before[2] if before is not None else 0)
        begin = before[0] if before is not None else begin
        with self._lock:
            after = next((part for part in parts if part[0] == end), None)
            if after is not None:
                parts.remove(after)
                found = combined(found, after[2], after[1] - end)
                end = after[1]
            if end - begin == size:
                self._settle(at, found, crc)
                self._parts.pop(at, None)
            elif len(parts) < _MOST_PARTS:
                parts.append((begin, end, found))

    def _settle(self, at: int, found: int, stored: int) -> None:
        if stored != LATE:  # nobody here read it; only the pool of several processes can tell
            state = _SOUND if found == stored else _BROKEN
            self._state[at] = state if stored else _UNSEALED

    @property
    def rest(self) -> list[int]:
        """Numbers of the ranges that were not read whole; the same ones in every process."""
        return [i for i, state in enumerate(self._state) if state == _OPEN]

    @property
    def unsealed(self) -> int:
        """How many ranges have no CRC-32: nobody can tell whether they are whole."""
        return self._state.count(_UNSEALED)

    @property
    def broken(self) -> list[Range]:
        """The ranges that do not have their CRC-32, in the order of files and places."""
        return [self.range(i) for i, state in enumerate(self._state) if state == _BROKEN]

    def known(self) -> list[Any]:
        """What was found out so far, as JSON: a state per range, and the parts of open ones."""
        with self._lock:
            parts = [[at, *part] for at, found in self._parts.items() for part in found]
            return [self._state.hex(), parts]

    def pool(self, known: Sequence[list[Any]]) -> None:
        """Know what several processes know together: that of each, this one's among them.

        Law: then all know the same, and a range that they read in turns is settled.
        """
        with self._lock:
            states = [bytes.fromhex(state) for state, _ in known]
            self._state = bytearray(map(max, *states) if len(states) > 1 else states[0])
            self._parts = {}
            parts = sorted({tuple(part) for _, found in known for part in found})
            for at, found in groupby(parts, key=lambda part: part[0]):
                if self._state[at]:
                    continue
                joined = self._parts[at] = _joined([part[1:] for part in found])
                whole = self.range(at)
                begin, end, crc = joined[0]
                if end - begin == whole.nbytes:
                    first, one = self._files[whole.file]
                    self._settle(at, crc, one.crcs[at - first])
                    del self._parts[at]

    def nbytes(self, number: int) -> int:
        """Size of a range."""
        return self.range(number).nbytes

    def read(self, numbers: Iterable[int], jobs: int | None = None) -> None:
        """Read ranges for their own sake. Raises: UnreadableError if a file ends early."""
        with Crew(jobs) as crew:
            for number, crc in crew.map(self._crc, numbers):
                first, one = self._files[self.range(number).file]
                self._settle(number, crc, one.crcs[number - first])

    def _crc(self, number: int, files: Files) -> tuple[int, int]:
        found = self.range(number)
        return number, crc_of(found.file, found.start, found.nbytes, files)

    def range(self, number: int) -> Range:
        """A range by its number."""
        file = self._order[bisect_right(self._firsts, number) - 1]
        first, one = self._files[file]
        i = number - first
        return Range(one.names[i], file, one.starts[i], one.sizes[i])


def _joined(parts: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Parts in their order; neighbours as one, without those that overlap one before."""
    joined: list[tuple[int, int, int]] = []
    for begin, end, crc in parts:
        if joined and begin < joined[-1][1]:
            continue
        if joined and begin == joined[-1][1]:
            start, _, before = joined.pop()
            joined.append((start, end, combined(before, crc, end - begin)))
        else:
            joined.append((begin, end, crc))
    return joined


def combined(first: int, second: int, nbytes: int) -> int:
    """The CRC-32 of two stretches, from those of both and the length of the second.

    Source: the linearity of CRC: `first` is moved by x^(8 nbytes) modulo the polynomial.
    """
    return _times(_power(nbytes), first) ^ second


@lru_cache(maxsize=1024)
def _power(nbytes: int) -> int:
    """x^(8 nbytes) modulo the polynomial."""
    result, square, left = 1 << 31, 1 << 30, 8 * nbytes
    while left:
        if left & 1:
            result = _times(result, square)
        square = _times(square, square)
        left >>= 1
    return result


def _times(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo that of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product
