from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtpconv.errors import UnsupportedError
from mtpconv.store.arithmetic import Applied, Undone, minus_one, plus_one
from mtpconv.store.content import blocks, pieces, reading
from mtpconv.store.files import Files
from mtpconv.store.fp8 import from_bf16
from mtpconv.store.hf import HfCheckpoint, open_hf
from mtpconv.tensors import TensorSpec
from tests.convert.folders import write_hf

CODES = np.arange(65536, dtype=np.uint16)
FINITE = CODES[np.isfinite(from_bf16(CODES))]
LESS = {"norm.weight": "minus_one"}


def nearest(exact: Fraction) -> int:
    """The BF16 code of a number, ties to even, by trying the neighbours."""
    size = abs(exact)
    guess = int(np.float32(float(size)).view(np.uint32) >> 16)
    around = range(max(guess - 1, 0), guess + 3)
    code = min(around, key=lambda c: (abs(value(c) - size), c & 1))
    return code | (0x8000 if exact < 0 else 0)


def value(code: int) -> Fraction:
    return Fraction(float(from_bf16(np.array([code], np.uint16))[0])) if code < 0x7F80 else (
        Fraction(2) ** 128
    )  # fmt: skip


@pytest.mark.parametrize(("function", "shift"), [(minus_one, -1), (plus_one, 1)])
def test_every_finite_bf16_code_is_rounded_once(function: Any, shift: int) -> None:
    found = function(FINITE, "BF16")
    numbers = from_bf16(FINITE)
    for code, number, result in zip(FINITE[::7], numbers[::7], found[::7], strict=True):
        want = nearest(Fraction(float(number)) + shift)
        assert result == want or (result | want) == 0x8000, hex(int(code))


def test_every_bf16_code_as_torch_has_it() -> None:
    torch = pytest.importorskip("torch")
    theirs = torch.from_numpy(CODES.view(np.int16).copy()).view(torch.bfloat16)
    for function, shift in ((minus_one, -1), (plus_one, 1)):
        want = (theirs + shift).view(torch.int16).numpy().view(np.uint16)
        have = function(CODES, "BF16")
        nan = np.isnan(from_bf16(CODES))
        assert np.array_equal(have[~nan], want[~nan])
        assert np.isnan(from_bf16(have[nan])).all()


def lost(low: float, high: float) -> int:
    numbers = from_bf16(FINITE)
    here = FINITE[(numbers >= low) & (numbers < high)]
    return int((plus_one(minus_one(here, "BF16"), "BF16") != here).sum())


def test_where_bf16_comes_back_and_where_it_does_not() -> None:
    # Source: families.md section 0, item 8.
    assert (lost(0.5, 16), lost(0.25, 0.5), lost(0.125, 0.25)) == (0, 64, 96)


def test_where_fp32_comes_back() -> None:
    numbers = from_bf16(FINITE)
    words = numbers[(numbers >= 2.0**-10) & (numbers <= 64)].view(np.uint32)
    assert len(words) == 2049
    assert np.array_equal(plus_one(minus_one(words, "F32"), "F32"), words)


@pytest.mark.parametrize(("dtype", "kind"), [("F16", "f2"), ("F32", "f4"), ("F64", "f8")])
def test_other_floats(dtype: str, kind: str) -> None:
    words = np.array([0.5, 1.0, -3.0, np.inf], kind).view(f"u{kind[1]}")
    assert minus_one(words, dtype).view(kind).tolist() == [-0.5, 0.0, -4.0, np.inf]
    assert plus_one(words, dtype).view(kind).tolist() == [1.5, 2.0, -2.0, np.inf]


def folder(path: Path, words: np.ndarray, other: bytes = b"\1\2\3\4") -> HfCheckpoint:
    tensors = {
        "norm.weight": (TensorSpec("BF16", words.shape), words.tobytes()),
        "other.weight": (TensorSpec("BF16", (2,)), other),
    }
    write_hf(path, tensors, {"model_type": "x"})
    return open_hf(path)


def read(source: Any, name: str) -> bytes:
    return b"".join(bytes(b) for b in blocks(source, name))


def test_what_is_applied_is_what_is_read_in_any_blocks(tmp_path: Path) -> None:
    made = Applied(folder(tmp_path, CODES), LESS)
    want = minus_one(CODES, "BF16").tobytes()
    assert read(made, "norm.weight") == want
    assert read(made, "other.weight") == b"\1\2\3\4"
    assert (made.path, list(made.problems)) == (tmp_path, [])
    (piece,) = made.pieces("norm.weight")
    assert piece.box.sizes == (65536,)
    with Files() as files:
        parts = [bytes(b) for b in reading(made, "norm.weight").blocks(files, 4098)]
    assert len(parts) > 30
    assert b"".join(parts) == want


class Stored:
    """Megatron's side as its words are."""

    def __init__(self, tensors: Mapping[str, tuple[TensorSpec, bytes]], path: Path) -> None:
        self.inner = open_hf(write_hf(path, tensors, {"model_type": "x"}))
        self.tensors = self.inner.tensors

    def pieces(self, name: str) -> Any:
        return pieces(self.inner, name)


def megatron(path: Path, words: np.ndarray) -> Stored:
    spec = TensorSpec("BF16", words.shape)
    return Stored({"norm.weight": (spec, words.tobytes())}, path)


def test_the_original_answers_where_nothing_changed(tmp_path: Path) -> None:
    kept = folder(tmp_path / "kept", CODES)
    back = Undone(megatron(tmp_path / "m", minus_one(CODES, "BF16")), LESS, (None, kept))
    assert read(back, "norm.weight") == CODES.tobytes()  # NaNs, small numbers and all
    assert (back.computed, list(back.restored)) == ([], ["norm.weight"])


def test_the_inverse_answers_where_something_did(tmp_path: Path) -> None:
    words = minus_one(CODES, "BF16")
    words[7] ^= 1
    kept = folder(tmp_path / "kept", CODES)
    other = folder(tmp_path / "other", CODES[:5])
    for name, originals in (("a", (kept,)), ("b", (other,)), ("c", ())):
        back = Undone(megatron(tmp_path / name, words), LESS, originals)
        assert read(back, "norm.weight") == plus_one(words, "BF16").tobytes()
        assert back.computed == ["norm.weight"]


def test_only_floats_have_arithmetic(tmp_path: Path) -> None:
    spec = TensorSpec("F8_E4M3", (2,))
    write_hf(tmp_path, {"norm.weight": (spec, b"\0\0")}, {"model_type": "x"})
    with pytest.raises(UnsupportedError, match=r"norm\.weight: is F8_E4M3"):
        Applied(open_hf(tmp_path), LESS)
