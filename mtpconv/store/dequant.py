"""Block FP8 weights seen as BF16: names, specs and pieces as of any checkpoint.

The arithmetic of `mtpconv.store.fp8` happens while bytes are read, some rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from mtpconv.store import fp8
from mtpconv.store.checkpoint import Checkpoint, Chunk, Problem
from mtpconv.store.content import Piece, Run, pieces
from mtpconv.store.files import Computed, Files
from mtpconv.store.fp8_tensors import Quantised
from mtpconv.store.hf import HfCheckpoint
from mtpconv.tensors import Box, TensorSpec

if TYPE_CHECKING:
    from mtpconv.store.arithmetic import Applied

#: An HF folder as stored, with its FP8 weights as BF16, or with arithmetic done.
HfTensors: TypeAlias = "HfCheckpoint | Dequantised | Applied"


class Dequantised:
    """An HF checkpoint whose block FP8 weights are BF16 and whose scales are gone.

    Law: every value is code times scale in fp32, rounded once to BF16; all else is as stored.
    """

    format = "hf"

    def __init__(self, checkpoint: HfCheckpoint, quantised: Mapping[str, Quantised]) -> None:
        self.checkpoint = checkpoint
        self.quantised = quantised
        scales = {q.scale for q in quantised.values()}
        self.tensors: Mapping[str, TensorSpec] = {
            name: quantised[name].values if name in quantised else spec
            for name, spec in checkpoint.tensors.items()
            if name not in scales
        }
        # Ops ask for the pieces of one tensor many times; its scales are read once.
        self._values = lru_cache(maxsize=64)(self._make_values)

    @property
    def path(self) -> Path:
        """The folder the user named."""
        return self.checkpoint.path

    @property
    def problems(self) -> Sequence[Problem]:
        """Those of the checkpoint."""
        return self.checkpoint.problems

    def pieces(self, name: str) -> Sequence[Piece]:
        """Where the bytes of a tensor lie, or how they are worked out."""
        if name not in self.quantised:
            return pieces(self.checkpoint, name)
        return whole(self._values(name), self.tensors[name])

    def runs(self, name: str) -> Sequence[Run]:
        """A tensor as one run: of its file, or of what is worked out."""
        if name in self.quantised:
            return (Run(0, self.tensors[name].nbytes, self._values(name), 0),)
        return self.checkpoint.runs(name)

    def _make_values(self, name: str) -> Values:
        return Values(self.checkpoint, self.quantised[name])


class Values:
    """The BF16 bytes of one FP8 weight, anywhere in it."""

    def __init__(self, checkpoint: Checkpoint, quantised: Quantised) -> None:
        self._chunk = _only(checkpoint, quantised.name)
        self._scale_chunk = _only(checkpoint, quantised.scale)
        self._quantised = quantised
        self._grid = quantised.grid
        self._scales: fp8.Scales | None = None

    def scales(self, files: Files) -> fp8.Scales:
        """All scales. Shape: [rows of blocks, through all matrices; blocks of a row]."""
        if self._scales is None:
            shape = self._grid.scale_shape
            data = memoryview(bytearray(self._quantised.specs[self._quantised.scale].nbytes))
            files.read_into(self._scale_chunk.file, self._scale_chunk.start, data)
            flat = fp8.read_scales(self._quantised.scale_dtype, data)
            self._scales = flat.reshape(prod(shape[:-1]), shape[-1])
        return self._scales

    def codes(self, files: Files, first: int, last: int) -> fp8.Codes:
        """Codes of whole rows."""
        codes = np.empty((last - first, self._grid.columns), np.uint8)
        start = self._chunk.start + first * self._grid.columns
        files.read_into(self._chunk.file, start, codes.reshape(-1).data)
        return codes

    def words(self, files: Files, first: int, last: int) -> fp8.Bf16:
        """BF16 words of whole rows that share their scales."""
        ((_, _, row),) = self._grid.stripes(first, last)
        codes = self.codes(files, first, last)
        return fp8.dequantise(codes, self.scales(files)[row], self._grid.block[1])

    def read_into(self, files: Files, start: int, view: memoryview) -> None:
        """Fill `view` from byte `start` of the BF16 tensor."""
        first, last = start // 2, -(-(start + len(view)) // 2)
        done = 2 * first
        for words in self._stretch(files, first, last):
            low, high = max(start - done, 0), min(start + len(view) - done, words.nbytes)
            at = done + low - start
            view[at : at + high - low] = words.astype("<u2").reshape(-1).view("u1").data[low:high]
            done += words.nbytes

    def _stretch(self, files: Files, first: int, last: int) -> Iterator[fp8.Bf16]:
        """BF16 words of elements `first` to `last`, in order."""
        columns, width = self._grid.columns, self._grid.block[1]
        while first < last:
            row, column = divmod(first, columns)
            if column or last - first < columns:  # a part of a row
                count = min(columns - column, last - first)
                codes = np.empty((1, count), np.uint8)
                files.read_into(self._chunk.file, self._chunk.start + first, codes[0].data)
                ((_, _, number),) = self._grid.stripes(row, row + 1)
                yield fp8.dequantise(codes, self.scales(files)[number], width, column)
                first += count
                continue
            for low, high, _ in self._grid.stripes(row, last // columns):
                yield self.words(files, low, high)
                first += (high - low) * columns


class Stream:
    """Bytes that are made from the start to the end; reading elsewhere begins anew."""

    def __init__(self, make: Callable[[Files], Iterator[memoryview]]) -> None:
        self._make = make
        self._blocks: Iterator[memoryview] = iter(())
        self._rest = memoryview(b"")
        self._at = -1
        self._files: Files | None = None

    def read_into(self, files: Files, start: int, view: memoryview) -> None:
        """Fill `view` from byte `start`."""
        if start != self._at or files is not self._files:
            self._blocks, self._rest, self._at = self._make(files), memoryview(b""), 0
            self._files = files
        self._skip(start)
        done = 0
        while done < len(view):
            part = self._next(len(view) - done)
            view[done : done + len(part)] = part
            done += len(part)

    def _skip(self, start: int) -> None:
        while self._at < start:
            self._next(start - self._at)

    def _next(self, most: int) -> memoryview:
        while not len(self._rest):
            self._rest = next(self._blocks)
        part, self._rest = self._rest[:most], self._rest[most:]
        self._at += len(part)
        return part


class Kept:
    """A stored tensor, byte for byte."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._chunk = _only(checkpoint, name)

    def read_into(self, files: Files, start: int, view: memoryview) -> None:
        """Fill `view` from byte `start` of the tensor."""
        files.read_into(self._chunk.file, self._chunk.start + start, view)


def whole(source: Computed, spec: TensorSpec) -> list[Piece]:
    """A tensor that is worked out as one piece."""
    box = Box.whole(spec.shape)
    return [Piece(box, source, 0, spec.shape, box)]


def _only(checkpoint: Checkpoint, name: str) -> Chunk:
    """The one chunk of a safetensors tensor."""
    (chunk,) = checkpoint.chunks(name)
    return chunk
