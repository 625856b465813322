"""Tensors that are not moved but computed: words in, words out, worked out while they are read.

An op of the mapping language may name an arithmetic of `ARITHMETIC`. It rounds, so the original
travels beside, and on the way back the original is the answer wherever Megatron still holds
exactly what was made of it; elsewhere the inverse is computed, which is no identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mtpconv.errors import UnsupportedError
from mtpconv.store import fp8
from mtpconv.store.checkpoint import Checkpoint, Problem
from mtpconv.store.content import Piece, Pieced, Run, blocks, pieces
from mtpconv.store.dequant import HfTensors, Stream, whole
from mtpconv.store.digest import digest_tensor
from mtpconv.store.files import Files
from mtpconv.tensors import TensorSpec

Words = NDArray[Any]


class Arithmetic(NamedTuple):
    """A function of single words and its inverse, for all dtypes it is defined on."""

    #: HF -> Megatron
    forward: Callable[[Words, str], Words]
    #: Megatron -> HF
    backward: Callable[[Words, str], Words]
    #: what it does, for reports
    says: str


def minus_one(words: Words, dtype: str) -> Words:
    """Less one: in fp32 (F64 in F64), rounded once to the dtype.

    Exact for BF16 in [0.5, 16); what lies below loses bits. Source: families.md section 0, item 8.
    """
    return _plus(words, dtype, -1.0)


def plus_one(words: Words, dtype: str) -> Words:
    """The inverse, rounded once to the dtype."""
    return _plus(words, dtype, 1.0)


#: dtypes that arithmetic is defined on: their words, as numpy reads and computes them.
_FLOATS: Mapping[str, tuple[str, type[np.floating[Any]], type[np.floating[Any]]]] = {
    "F16": ("<u2", np.float16, np.float32), "F32": ("<u4", np.float32, np.float32),
    "F64": ("<u8", np.float64, np.float64),
}  # fmt: skip
_WORD = {"BF16": "<u2"} | {dtype: word for dtype, (word, _, _) in _FLOATS.items()}


def _plus(words: Words, dtype: str, shift: float) -> Words:
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "BF16":
            return fp8.to_bf16(fp8.from_bf16(words) + np.float32(shift))
        _, stored, computed = _FLOATS[dtype]
        value: Words = words.view(stored).astype(computed) + computed(shift)
        return value.astype(stored).view(words.dtype)


#: Arithmetic by the word that an op has for it.
ARITHMETIC: Mapping[str, Arithmetic] = {
    "minus_one": Arithmetic(minus_one, plus_one, "norms that Megatron centres on zero: gamma - 1"),
}


def _require_floats(tensors: Mapping[str, TensorSpec], names: Iterable[str]) -> None:
    for name in names:
        if tensors[name].dtype not in _WORD:
            raise UnsupportedError(
                f"{name}: is {tensors[name].dtype}; it is stored changed by Megatron, and that is "
                f"defined for {', '.join(_WORD)} only"
            )


class Applied:
    """HF tensors as Megatron gets them: those in `todo` after their arithmetic, by its word.

    Raises: UnsupportedError for a tensor of another dtype than the arithmetic is defined on.
    """

    format = "hf"

    def __init__(self, source: HfTensors, todo: Mapping[str, str]) -> None:
        _require_floats(source.tensors, todo)
        self.source = source
        self.todo = todo
        self.tensors: Mapping[str, TensorSpec] = source.tensors

    @property
    def path(self) -> Path:
        """The folder the user named."""
        return self.source.path

    @property
    def problems(self) -> Sequence[Problem]:
        """Those of the checkpoint."""
        return self.source.problems

    def pieces(self, name: str) -> Sequence[Piece]:
        """Where the bytes of a tensor lie, or how they are worked out."""
        if name not in self.todo:
            return pieces(self.source, name)
        return whole(self._stream(name), self.tensors[name])

    def runs(self, name: str) -> Sequence[Run]:
        """A tensor as one run: of its file, or of what is worked out."""
        if name not in self.todo:
            return self.source.runs(name)
        return (Run(0, self.tensors[name].nbytes, self._stream(name), 0),)

    def _stream(self, name: str) -> Stream:
        return _stream(self.source, name, ARITHMETIC[self.todo[name]].forward)


class Undone:
    """Megatron's tensors under HF names, the arithmetic of those in `todo` undone.

    `kept` has originals. Law: where the arithmetic of the original is what Megatron holds, the
    original is the answer, byte for byte; else it is the inverse, rounded.

    Raises: as `Applied`.
    """

    format = "torch_dist"

    def __init__(
        self, view: Pieced, todo: Mapping[str, str], kept: Sequence[Checkpoint | None]
    ) -> None:
        self.view = view
        self.tensors = view.tensors
        self._todo = {n: ARITHMETIC[word] for n, word in todo.items() if n in view.tensors}
        _require_floats(view.tensors, self._todo)
        self._kept = [checkpoint for checkpoint in kept if checkpoint is not None]

    @cached_property
    def restored(self) -> Mapping[str, Checkpoint]:
        """Names that an original answers, and who has it. Reads all of `todo`, once."""
        found = {}
        for name, arithmetic in self._todo.items():
            spec = self.tensors[name]
            original = next((k for k in self._kept if k.tensors.get(name) == spec), None)
            if original is not None:
                made = _Made(original, name, arithmetic.forward)
                if digest_tensor(made, name) == digest_tensor(self.view, name):
                    found[name] = original
        return found

    @property
    def computed(self) -> Sequence[str]:
        """Names that the inverse answers: never identical to anything."""
        return [name for name in self._todo if name not in self.restored]

    def pieces(self, name: str) -> Sequence[Piece]:
        """Where the bytes of a tensor lie, or how they are worked out."""
        arithmetic = self._todo.get(name)
        if arithmetic is None:
            return pieces(self.view, name)
        original = self.restored.get(name)
        if original is not None:
            return pieces(original, name)
        return whole(_stream(self.view, name, arithmetic.backward), self.tensors[name])

    def runs(self, name: str) -> Sequence[Run] | None:
        """The runs of a tensor where the view knows them; None: ask for its pieces."""
        known = getattr(self.view, "runs", None)
        return known(name) if known is not None and name not in self._todo else None


class _Made:
    """One tensor after a function."""

    def __init__(
        self, source: Checkpoint, name: str, function: Callable[[Words, str], Words]
    ) -> None:
        self.tensors = {name: source.tensors[name]}
        self._stream = _stream(source, name, function)

    def pieces(self, name: str) -> Sequence[Piece]:
        """The tensor as one piece that is worked out."""
        return whole(self._stream, self.tensors[name])


def _stream(
    source: Checkpoint | Pieced, name: str, function: Callable[[Words, str], Words]
) -> Stream:
    dtype = source.tensors[name].dtype

    def made(files: Files) -> Iterator[memoryview]:
        for block in blocks(source, name, files):
            words = function(np.frombuffer(block, _WORD[dtype]), dtype)
            yield words.astype(_WORD[dtype]).view("u1").data

    return Stream(made)
