"""The CRC-32 of zip records, by the fastest means installed, and where which one is stored.

zlib takes 0.23 CPU s/GB, isal 0.06: a fifth of what a whole conversion costs (measured
2026-11-29 with benchmarks). isal is installed wherever there is a build of it.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path


def _fastest() -> Callable[..., int]:
    try:
        found: Callable[..., int] = import_module("isal.isal_zlib").crc32
    except ImportError:
        return zlib.crc32
    return found


#: CRC-32 of bytes, continued from the CRC given as second argument.
crc32 = _fastest()

#: In place of a CRC-32 that is stored and will be known when a byte of its range was read.
LATE = -1


class SealedFile:
    """The stored byte ranges of one file: each with its CRC-32 and the tensor it belongs to.

    As arrays: a checkpoint has tens of thousands of them.
    """

    def __init__(self) -> None:
        self.starts = array("Q")
        self.sizes = array("Q")
        self.crcs = array("q")
        self.names: list[str] = []

    def add(self, name: str, start: int, nbytes: int, crc: int) -> None:
        """`nbytes` from byte `start` have this CRC-32; 0: it was left out; or `LATE`."""
        self.starts.append(start)
        self.sizes.append(nbytes)
        self.crcs.append(crc)
        self.names.append(name)

    def ordered(self) -> SealedFile:
        """The same, each range once, in the order of the file; itself if it is so already."""
        if all(a < b for a, b in pairwise(self.starts)):
            return self
        found = SealedFile()
        for i in sorted(range(len(self.names)), key=self.starts.__getitem__):
            if not found.starts or found.starts[-1] != self.starts[i]:
                found.add(self.names[i], self.starts[i], self.sizes[i], self.crcs[i])
        return found


#: Byte ranges with a CRC-32, by file.
Sealed = dict[Path, SealedFile]
