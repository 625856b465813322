"""The CRC-32 of zip records, by the fastest means installed.

zlib takes 0.23 CPU s/GB, isal (`pip install mtpconv[fast]`) 0.06: a fifth of what a whole
conversion costs (measured 2026-11-29, docs/performance.md).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from importlib import import_module


def _fastest() -> Callable[..., int]:
    try:
        found: Callable[..., int] = import_module("isal.isal_zlib").crc32
    except ImportError:
        return zlib.crc32
    return found


#: CRC-32 of bytes, continued from the CRC given as second argument.
crc32 = _fastest()
