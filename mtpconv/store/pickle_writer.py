"""Writing the pickles that torch reads, from plain values, `Global`s and `Instance`s.

Protocol 2, the one that `torch.save` uses: it is the only one that
`torch.load(weights_only=True)` accepts. Nothing is imported; a class is written as its name.

Source: CPython 3.12 Lib/pickletools.py, opcode table, read 2026-11-29.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

from mtpconv.store.pickles import PERSISTENT, Global, Instance

_TUPLES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}


class PickleWriter:
    """One pickle, written front to back; names and strings are written once.

    `save` takes any value; `raw` and the methods that return bytes let a caller with many
    equal-shaped objects build them itself.
    """

    def __init__(self) -> None:
        self._out = bytearray(b"\x80\x02")
        self._memo: dict[str | Global | tuple[int, ...], bytes] = {}
        self.raw = self._out.extend

    def finish(self) -> bytes:
        """The whole pickle."""
        self.raw(b".")
        return bytes(self._out)

    def text(self, value: str) -> bytes:
        """A string; the second time a reference to the first.

        Law: what is returned must be appended before the next call.
        """
        known = self._memo.get(value)
        if known is not None:
            return known
        data = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(data)) + data + self._remember(value)

    def name(self, value: Global) -> bytes:
        """A class or function by name; the second time a reference to the first.

        Law: what is returned must be appended before the next call.
        """
        known = self._memo.get(value)
        if known is not None:
            return known
        return f"c{value.module}\n{value.name}\n".encode() + self._remember(value)

    def numbers(self, value: tuple[int, ...], of: Global) -> bytes:
        """What a class makes of a tuple of numbers; the second time a reference to the first.

        Law: as `text`; `of` is the same for all tuples.
        """
        known = self._memo.get(value)
        if known is not None:
            return known
        return self.name(of) + integers(value) + b"\x85R" + self._remember(value)

    def _remember(self, value: str | Global | tuple[int, ...]) -> bytes:
        index = len(self._memo)
        if index < 256:
            self._memo[value] = b"h" + bytes([index])
            return b"q" + bytes([index])
        self._memo[value] = b"j" + struct.pack("<I", index)
        return b"r" + struct.pack("<I", index)

    def save(self, value: Any) -> None:
        """Write a value: None, bool, int, float, str, tuple, list, dict, Global, Instance.

        Raises: TypeError for anything else.
        """
        raw = self.raw
        if value is None:
            raw(b"N")
        elif value is True or value is False:
            raw(b"\x88" if value else b"\x89")
        elif type(value) is str:
            raw(self.text(value))
        elif type(value) is int:
            raw(integer(value))
        elif type(value) is float:
            raw(b"G" + struct.pack(">d", value))
        elif type(value) is Global:
            raw(self.name(value))
        elif type(value) is Instance:
            self._save_instance(value)
        elif type(value) is tuple:
            self._save_tuple(value)
        elif type(value) is list:
            raw(b"]")
            self._save_items(value)
        elif type(value) is dict:
            raw(b"}")
            self._save_pairs(value.items())
        else:
            raise TypeError(f"cannot write a {type(value).__name__} into a checkpoint")

    def _save_tuple(self, value: tuple[Any, ...]) -> None:
        close = _TUPLES.get(len(value))
        if close is None:
            self.raw(b"(")
            close = b"t"
        for part in value:
            self.save(part)
        self.raw(close)

    def _save_items(self, values: Iterable[Any]) -> None:
        self.raw(b"(")
        for part in values:
            self.save(part)
        self.raw(b"e")

    def _save_pairs(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        self.raw(b"(")
        for key, part in pairs:
            self.save(key)
            self.save(part)
        self.raw(b"u")

    def _save_instance(self, value: Instance) -> None:
        if value.of == PERSISTENT:
            self._save_tuple(value.args)
            self.raw(b"Q")
            return
        self.raw(self.name(value.of))
        self._save_tuple(value.args)
        self.raw(b"\x81" if value.new else b"R")
        if value.items:
            pairs = all(type(item) is tuple and len(item) == 2 for item in value.items)
            (self._save_pairs if pairs else self._save_items)(value.items)
        if value.state is not None:
            self.save(value.state)
            self.raw(b"b")


def integer(value: int) -> bytes:
    """The shortest opcode for a whole number."""
    if 0 <= value < 1 << 8:
        return b"K" + bytes([value])
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def integers(values: tuple[int, ...]) -> bytes:
    """A tuple of whole numbers."""
    close = _TUPLES.get(len(values))
    body = b"".join(map(integer, values))
    return body + close if close is not None else b"(" + body + b"t"


def dump_pickle(value: Any) -> bytes:
    """A value as a pickle; `load_pickle` gives it back."""
    writer = PickleWriter()
    writer.save(value)
    return writer.finish()
