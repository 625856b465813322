"""BF16 tensors seen as the block FP8 tensors of the release they came from."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from mtpconv.store import fp8
from mtpconv.store.checkpoint import Checkpoint
from mtpconv.store.content import Piece, Pieced, blocks, pieces
from mtpconv.store.dequant import Kept, Stream, Values, whole
from mtpconv.store.files import Computed, Files
from mtpconv.store.fp8_tensors import Quantised, with_scales
from mtpconv.tensors import TensorSpec

#: Units: bytes. What is remembered of weights that changed: scales, and which blocks.
_REMEMBERED = 64 << 20
_WORDS = {"F32": "<u4", "BF16": "<u2", "F8_E8M0": "u1"}


class Requantised:
    """BF16 tensors under HF names, seen as the block FP8 tensors of the release.

    A block whose values are those of the kept codes has the kept codes and the kept scale; a
    block that changed is quantised anew, under its kept scale if nothing is cut off by it and
    `fresh` is false, else under a fresh one. `kept` None: nothing was kept, all is new.
    """

    def __init__(
        self,
        values: Pieced,
        quantised: Mapping[str, Quantised],
        kept: Checkpoint | None,
        *,
        fresh: bool,
    ) -> None:
        self._plain = values
        self.kept = kept
        self._fresh = fresh
        self._owner = {n: q for q in quantised.values() for n in (q.name, q.scale)}
        self.tensors: Mapping[str, TensorSpec] = with_scales(values.tensors, quantised)
        #: changed and fresh blocks of every weight that was looked at
        self.seen: dict[str, tuple[int, int]] = {}
        self._changes: OrderedDict[str, _Change] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}

    @property
    def owned(self) -> Collection[str]:
        """Names of weights and scales that are seen as FP8."""
        return self._owner.keys()

    def pieces(self, name: str) -> Sequence[Piece]:
        """Where the bytes lie, or how they are worked out; nothing is compared before reading."""
        owner = self._owner.get(name)
        if owner is None:
            return pieces(self._plain, name)
        return whole(_Lazy(self, owner, name), self.tensors[name])

    def stream(self, owner: Quantised, name: str, files: Files) -> Computed:
        """Where the bytes of codes or scales come from, now that it has to be known."""
        change = self._change(owner, files)
        if change is None:
            assert self.kept is not None  # without kept codes every block counts as changed
            return Kept(self.kept, name)
        made = self._codes if name == owner.name else self._scale_bytes
        return Stream(lambda own: made(owner, change, own))

    def _change(self, owner: Quantised, files: Files) -> _Change | None:
        with self._lock:
            mine = self._locks.setdefault(owner.name, threading.Lock())
        with mine:  # codes and scales of one weight may be asked for at the same time
            with self._lock:
                found = self._changes.get(owner.name)
                if found is not None or self.seen.get(owner.name) == (0, 0):
                    return found
            found = self._compare(owner, files)
            with self._lock:
                self.seen[owner.name] = found.counts
                if not found.counts[0]:
                    return None
                self._changes[owner.name] = found
                self._nbytes += found.nbytes
                while self._nbytes > _REMEMBERED and len(self._changes) > 1:
                    self._nbytes -= self._changes.popitem(last=False)[1].nbytes
        return found

    def _compare(self, owner: Quantised, files: Files) -> _Change:
        kept = Values(self.kept, owner) if self.kept is not None else None
        width = owner.grid.block[1]
        old = kept.scales(files) if kept is not None else None
        power = owner.power_of_two or (old is not None and fp8.are_powers_of_two(old))
        rows, columns = prod(owner.grid.scale_shape[:-1]), owner.grid.scale_shape[-1]
        scales = np.ones((rows, columns), np.float32) if old is None else old.copy()
        changed = np.zeros((rows, columns), np.bool_)
        renewed = np.zeros((rows, columns), np.bool_)
        for words, first, last, row in self._stripes(owner, files):
            if kept is None or old is None:
                changed[row] = True
            else:
                differs = (kept.words(files, first, last) != words).any(axis=0)
                changed[row] = np.logical_or.reduceat(differs, np.arange(0, len(differs), width))
            here = changed[row]
            if not here.any():
                continue
            most = fp8.largest(words, width)
            new = here if self._fresh or old is None else here & ~fp8.fits(most, scales[row])
            # A kept scale fits finite numbers only, so every other one is looked at here.
            made = fp8.fresh_scales(
                most[new], owner.scale_dtype, power_of_two=power, where=owner.name
            )
            scales[row, new] = made
            renewed[row] = new
        return _Change(scales, changed, renewed)

    def _codes(self, owner: Quantised, change: _Change, files: Files) -> Iterator[memoryview]:
        kept = Values(self.kept, owner) if self.kept is not None else None
        width = owner.grid.block[1]
        for words, first, last, row in self._stripes(owner, files):
            here = change.changed[row]
            codes = fp8.quantise(words, change.scales[row], width)
            if kept is not None and not here.all():
                same = ~np.repeat(here, width)[: words.shape[1]]
                codes[:, same] = kept.codes(files, first, last)[:, same]
            yield codes.reshape(-1).data

    def _scale_bytes(self, owner: Quantised, change: _Change, files: Files) -> Iterator[memoryview]:
        new = np.frombuffer(
            fp8.write_scales(owner.scale_dtype, change.scales), _WORDS[owner.scale_dtype]
        )
        if self.kept is not None:
            old = b"".join(bytes(b) for b in blocks(self.kept, owner.scale, files))
            new = np.where(change.renewed.reshape(-1), new, np.frombuffer(old, new.dtype))
        yield memoryview(new.tobytes())

    def _stripes(self, owner: Quantised, files: Files) -> Iterator[tuple[fp8.Bf16, int, int, int]]:
        """BF16 rows that share their scales: (words, first row, last row, row of the scales)."""
        source = Stream(lambda own: blocks(self._plain, owner.name, own))
        columns, at = owner.grid.columns, 0
        for first, last, row in owner.grid.stripes(0, prod(owner.grid.shape[:-1])):
            words = np.empty((last - first, columns), "<u2")
            source.read_into(files, at, words.reshape(-1).view("u1").data)
            at += words.nbytes
            yield words, first, last, row


class _Lazy:
    """Codes or scales of one weight; reading the first byte decides where they come from."""

    def __init__(self, view: Requantised, owner: Quantised, name: str) -> None:
        self._view = view
        self._owner = owner
        self._name = name
        self._source: Computed | None = None

    def read_into(self, files: Files, start: int, view: memoryview) -> None:
        """Fill `view` from byte `start`."""
        if self._source is None:
            self._source = self._view.stream(self._owner, self._name, files)
        self._source.read_into(files, start, view)


@dataclass(frozen=True, slots=True)
class _Change:
    """What becomes of a weight: scales, blocks that changed, blocks with a fresh scale."""

    scales: fp8.Scales
    changed: NDArray[np.bool_]
    renewed: NDArray[np.bool_]

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self.scales.nbytes + self.changed.nbytes + self.renewed.nbytes

    @property
    def counts(self) -> tuple[int, int]:
        """Changed blocks, and those of them with a fresh scale."""
        return int(self.changed.sum()), int(self.renewed.sum())
