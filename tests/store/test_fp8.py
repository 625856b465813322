"""Block FP8 arithmetic against torch and against its own laws; views of whole checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpconv.errors import MtpconvError, RefusedError, UnsupportedError
from mtpconv.store import fp8
from mtpconv.store.content import Piece, blocks
from mtpconv.store.dequant import Dequantised, Stream
from mtpconv.store.files import Files
from mtpconv.store.fp8_tensors import Quantised, find_fp8, with_scales, without_quantisation
from mtpconv.store.hf import open_hf
from mtpconv.store.requant import Requantised
from mtpconv.tensors import TensorSpec
from tests.convert.folders import write_hf

ALL_CODES = np.arange(256, dtype=np.uint8)
FP8: dict[str, Any] = {"quantization_config": {"quant_method": "fp8"}}


def normal_scales(shape: tuple[int, ...], seed: int) -> fp8.Scales:
    """Scales of every size at which no value leaves the range of normal BF16."""
    random = np.random.default_rng(seed)
    return np.exp2(random.uniform(-100, 100, shape)).astype(np.float32)


def by_hand(codes: fp8.Codes, scales: fp8.Scales, block: tuple[int, int]) -> fp8.Bf16:
    """The definition: every code times its scale in fp32, rounded to BF16."""
    rows, columns = codes.shape
    spread = np.repeat(np.repeat(scales, block[0], 0), block[1], 1)[:rows, :columns]
    return fp8.to_bf16(fp8.e4m3_values()[codes] * spread)


# -- numbers, against torch ----------------------------------------------------------------------


def test_every_code_is_the_number_that_torch_makes_of_it() -> None:
    torch = pytest.importorskip("torch")
    theirs = torch.from_numpy(ALL_CODES).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    mine = fp8.e4m3_values()
    assert np.array_equal(mine, theirs, equal_nan=True)
    assert np.array_equal(np.signbit(mine[:127]), np.signbit(theirs[:127]))
    assert np.isnan(mine).nonzero()[0].tolist() == [0x7F, 0xFF]


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E8M0"])
def test_scales_are_the_numbers_that_torch_makes_of_them(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    name = {"F32": "float32", "BF16": "bfloat16", "F8_E8M0": "float8_e8m0fnu"}[dtype]
    raw = np.random.default_rng(3).bytes(4096) if dtype != "F8_E8M0" else bytes(range(256))
    theirs = torch.frombuffer(bytearray(raw), dtype=getattr(torch, name)).to(torch.float32)
    assert np.array_equal(fp8.read_scales(dtype, raw), theirs.numpy(), equal_nan=True)


def test_rounding_to_bf16_is_that_of_torch_on_ties_subnormals_and_the_edge_of_infinity() -> None:
    torch = pytest.importorskip("torch")
    high = np.arange(0, 1 << 16, 7, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values = (high[:, None] | low).reshape(-1).view(np.float32)
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    mine = fp8.to_bf16(values)
    finite = ~np.isnan(values)
    assert np.array_equal(mine[finite], theirs[finite])
    assert np.isnan(fp8.from_bf16(mine[~finite])).all()
    assert np.array_equal(mine[~finite] >> 15, values.view(np.uint32)[~finite] >> 31)


@pytest.mark.parametrize("seed", range(3))
def test_dequantising_is_that_of_torch_on_all_codes(seed: int) -> None:
    torch = pytest.importorskip("torch")
    scales = normal_scales((300,), seed)
    codes = np.repeat(ALL_CODES[:, None], 300, 1)
    mine = fp8.dequantise(codes, scales, 1)
    wide = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.float32)
    theirs = (wide * torch.from_numpy(scales)).to(torch.bfloat16).view(torch.int16).numpy()
    numbers = codes & 127 != 127
    assert np.array_equal(mine[numbers], theirs.view(np.uint16)[numbers])
    assert set(mine[~numbers].tolist()) == {0x7FC0, 0xFFC0}


def test_quantising_is_that_of_torch_on_all_finite_bf16() -> None:
    torch = pytest.importorskip("torch")
    every = np.arange(1 << 16, dtype=np.uint16)
    words = every[(every & 0x7FFF) < 0x7F80].reshape(1, -1)
    for scale in (1.0, 0.37, 3e-5, 2.0**-100, 7e20):
        mine = fp8.quantise(words, np.array([scale], np.float32), words.size)
        wide = torch.from_numpy(fp8.from_bf16(words)) / np.float32(scale)
        theirs = wide.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        assert np.array_equal(mine, theirs), scale


def test_fresh_scales_are_amax_by_448_or_the_power_of_two_above() -> None:
    amax = fp8.to_bf16(np.array([0, 448, 3.5, 3.515625, 1e-38, 3e38], np.float32))
    plain = fp8.fresh_scales(amax, "F32", power_of_two=False, where="w")
    assert plain[:3].tolist() == [1, 1, np.float32(3.5) / np.float32(448)]
    assert plain[4] == np.float32(2.0**-126)
    even = fp8.fresh_scales(amax, "F8_E8M0", power_of_two=False, where="w")
    assert even.tolist() == [1, 1, 2.0**-7, 2.0**-6, 2.0**-126, 2.0**120]
    assert np.array_equal(even, fp8.fresh_scales(amax, "F32", power_of_two=True, where="w"))
    for dtype in fp8.SCALE_DTYPES:
        scales = fp8.fresh_scales(amax, dtype, power_of_two=False, where="w")
        again = fp8.read_scales(dtype, fp8.write_scales(dtype, scales))
        assert np.array_equal(scales, again), dtype
        assert fp8.fits(amax, scales).all(), dtype


@pytest.mark.parametrize("word", [0x7F80, 0x7FC0, 0x7F81])
def test_nan_and_infinity_have_no_scale(word: int) -> None:
    with pytest.raises(RefusedError, match=r"^w: holds NaN or infinity.*--fp8 bf16"):
        fp8.fresh_scales(np.array([1, word], np.uint16), "F32", power_of_two=False, where="w")


# -- laws ----------------------------------------------------------------------------------------


@given(seed=st.integers(0, 1 << 30), rows=st.integers(1, 9), columns=st.integers(1, 300))
def test_codes_come_back_under_their_scales(seed: int, rows: int, columns: int) -> None:
    """What makes keeping possible: under normal scales, no two codes share a BF16 number."""
    codes = np.random.default_rng(seed).integers(0, 256, (rows, columns), np.uint8)
    scales = normal_scales((-(-columns // 128),), seed)
    words = fp8.dequantise(codes, scales, 128)
    back = fp8.quantise(words, scales, 128)
    assert np.array_equal(back, codes)


@given(
    seed=st.integers(0, 1 << 30), rows=st.integers(1, 40), columns=st.integers(1, 40),
    height=st.integers(1, 9), width=st.integers(1, 9),
)  # fmt: skip
def test_fresh_scales_lose_no_more_than_half_a_step(
    seed: int, rows: int, columns: int, height: int, width: int
) -> None:
    random = np.random.default_rng(seed)
    words = fp8.to_bf16((random.standard_normal((rows, columns)) * 0.02).astype(np.float32))
    grid = fp8.Grid((rows, columns), (height, width))
    for low, high, _ in grid.stripes(0, rows):
        part = words[low:high]
        scales = fp8.fresh_scales(fp8.largest(part, width), "F32", power_of_two=False, where="w")
        back = fp8.from_bf16(fp8.dequantise(fp8.quantise(part, scales, width), scales, width))
        exact = fp8.from_bf16(part)
        step = np.repeat(scales, width)[:columns] * 2.0**-10
        assert (np.abs(back - exact) <= np.maximum(np.abs(exact) * 0.0664, step)).all()


# -- views ---------------------------------------------------------------------------------------


def one(
    folder: Path, shape: tuple[int, ...], block: tuple[int, int], dtype: str, seed: int
) -> tuple[Any, Quantised, fp8.Bf16]:
    """A folder with one FP8 weight, its description, and the BF16 it must be seen as."""
    random = np.random.default_rng(seed)
    grid = fp8.Grid(shape, block)
    codes = random.integers(0, 256, shape, np.uint8)
    scales = normal_scales(grid.scale_shape, seed)
    raw = fp8.write_scales(dtype, scales)
    scales = fp8.read_scales(dtype, raw).reshape(scales.shape)
    named = Quantised("a.weight", "a.weight_scale_inv", grid, dtype)
    data = {"a.weight": codes.tobytes(), "a.weight_scale_inv": raw}
    tensors = {n: (spec, data[n]) for n, spec in named.specs.items()}
    tensors["a.norm"] = (TensorSpec("BF16", (3,)), b"\1\2\3\4\5\6")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}
    hf = open_hf(write_hf(folder, tensors, config))
    flat = codes.reshape(-1, *shape[-2:])
    per_matrix = scales.reshape(-1, *grid.scale_shape[-2:])
    words = np.stack([by_hand(c, s, block) for c, s in zip(flat, per_matrix, strict=True)])
    return hf, named, words.reshape(shape)


SHAPES = [((1, 1), (128, 128)), ((130, 257), (128, 128)), ((5, 7), (2, 3)), ((3, 5, 7), (2, 3))]


@pytest.mark.parametrize("dtype", fp8.SCALE_DTYPES)
@pytest.mark.parametrize(("shape", "block"), SHAPES)
def test_a_weight_is_seen_as_bf16_whole_and_in_any_part(
    tmp_path: Path, shape: tuple[int, ...], block: tuple[int, int], dtype: str
) -> None:
    hf, named, words = one(tmp_path, shape, block, dtype, 1)
    assert find_fp8(hf.tensors, hf.config, "x") == {"a.weight": named}
    view = Dequantised(hf, {"a.weight": named})
    assert view.tensors == {"a.weight": TensorSpec("BF16", shape), "a.norm": hf.tensors["a.norm"]}
    want = words.tobytes()
    for size in (2, 64, 4 << 20):
        assert b"".join(bytes(b) for b in blocks(view, "a.weight", size=size)) == want
    assert b"".join(bytes(b) for b in blocks(view, "a.norm")) == b"\1\2\3\4\5\6"
    (piece,) = view.pieces("a.weight")
    random = np.random.default_rng(5)
    with Files() as files:
        for _ in range(40):
            low, high = sorted(random.integers(0, len(want) + 1, 2).tolist())
            part = bytearray(high - low)
            assert piece.file is not None
            files.read_into(piece.file, low, memoryview(part))
            assert part == want[low:high], (low, high)


class Bf16:
    """BF16 tensors in memory, as a Megatron checkpoint would supply them."""

    def __init__(self, **tensors: fp8.Bf16) -> None:
        self._data = {n.replace("_", "."): t for n, t in tensors.items()}
        self.tensors = {n: TensorSpec("BF16", t.shape) for n, t in self._data.items()}

    def pieces(self, name: str) -> list[Piece]:
        def make(_: Files) -> Iterator[memoryview]:
            yield memoryview(self._data[name].tobytes())

        from mtpconv.store.dequant import whole

        return whole(Stream(make), self.tensors[name])


def bytes_of(source: Any, name: str) -> bytes:
    return b"".join(bytes(b) for b in blocks(source, name))


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("dtype", fp8.SCALE_DTYPES)
@pytest.mark.parametrize(("shape", "block"), SHAPES)
def test_unchanged_weights_have_the_kept_bytes(
    tmp_path: Path, shape: tuple[int, ...], block: tuple[int, int], dtype: str, fresh: bool
) -> None:
    hf, named, words = one(tmp_path, shape, block, dtype, 2)
    view = Requantised(Bf16(a_weight=words), {"a.weight": named}, hf, fresh=fresh)
    for name in named.specs:
        assert view.tensors[name] == hf.tensors[name]
        assert bytes_of(view, name) == bytes_of(hf, name)
    assert view.seen == {"a.weight": (0, 0)}


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("dtype", fp8.SCALE_DTYPES)
def test_only_blocks_that_changed_are_quantised_anew(
    tmp_path: Path, dtype: str, fresh: bool
) -> None:
    hf, named, words = one(tmp_path, (5, 7), (2, 3), dtype, 3)
    old_codes = np.frombuffer(bytes_of(hf, "a.weight"), "u1").reshape(5, 7)
    scales = fp8.read_scales(dtype, bytes_of(hf, named.scale)).reshape(3, 3)
    words = words.copy()
    words[2:4, 3:6] = fp8.to_bf16(scales[1, 1] * np.linspace(-9, 9, 6, dtype="f4")).reshape(2, 3)
    words[4, 6] = fp8.to_bf16(scales[2, 2:] * np.float32(1000))[0]  # fits no more
    view = Requantised(Bf16(a_weight=words), {"a.weight": named}, hf, fresh=fresh)
    new_scales = fp8.read_scales(dtype, bytes_of(view, named.scale)).reshape(3, 3)
    codes = np.frombuffer(bytes_of(view, "a.weight"), "u1").reshape(5, 7)
    assert view.seen == {"a.weight": (2, 2 if fresh else 1)}
    same = np.ones((5, 7), bool)
    same[2:4, 3:6] = same[4, 6] = False
    assert np.array_equal(codes[same], old_codes[same])
    kept = np.ones((3, 3), bool)
    kept[2, 2] = False
    kept[1, 1] = not fresh
    assert np.array_equal(new_scales[kept], scales[kept])
    assert new_scales[2, 2] > scales[2, 2]
    values = fp8.from_bf16(by_hand(codes, new_scales, (2, 3)))[~same]
    exact = fp8.from_bf16(words)[~same]
    assert np.allclose(values, exact, rtol=0.0664, atol=float(scales[1, 1]) * 2**-9)


def test_nothing_kept_means_everything_fresh(tmp_path: Path) -> None:
    _, named, _ = one(tmp_path, (130, 257), (128, 128), "F32", 4)
    random = np.random.default_rng(4)
    words = fp8.to_bf16(random.standard_normal((130, 257)).astype("f4"))
    view = Requantised(Bf16(a_weight=words), {"a.weight": named}, None, fresh=False)
    scales = fp8.read_scales("F32", bytes_of(view, named.scale)).reshape(2, 3)
    for low, high, row in named.grid.stripes(0, 130):
        part = words[low:high]
        made = fp8.fresh_scales(fp8.largest(part, 128), "F32", power_of_two=False, where="w")
        assert np.array_equal(scales[row], made)
    codes = np.frombuffer(bytes_of(view, "a.weight"), "u1").reshape(130, 257)
    values = fp8.from_bf16(by_hand(codes, scales, (128, 128)))
    assert np.allclose(values, fp8.from_bf16(words), rtol=0.0664, atol=0.01)


def test_powers_of_two_stay_powers_of_two(tmp_path: Path) -> None:
    """UE8M0 scales in F32: no config says so, but all that were kept are."""
    codes = np.full((4, 4), 0x38, np.uint8)
    grid = fp8.Grid((4, 4), (2, 2))
    named = Quantised("a.weight", "a.weight_scale_inv", grid, "F32")
    raw = np.array([[0.5, 2], [4, 0.25]], np.float32)
    tensors = {
        "a.weight": (named.specs["a.weight"], codes.tobytes()),
        named.scale: (named.specs[named.scale], raw.tobytes()),
    }
    hf = open_hf(write_hf(tmp_path, tensors, {}))
    words = fp8.to_bf16(np.full((4, 4), 3.3, np.float32))
    view = Requantised(Bf16(a_weight=words), {"a.weight": named}, hf, fresh=True)
    scales = np.frombuffer(bytes_of(view, named.scale), "<f4")
    assert set(scales.tolist()) == {2.0**-7}


@settings(max_examples=30)
@given(cuts=st.lists(st.integers(1, 9), min_size=1, max_size=9), steps=st.data())
def test_a_stream_read_in_any_order_gives_the_same_bytes(cuts: list[int], steps: Any) -> None:
    data = bytes(range(sum(cuts)))

    def make(_: Files) -> Iterator[memoryview]:
        at = 0
        for size in cuts:
            yield memoryview(data)[at : at + size]
            at += size

    stream = Stream(make)
    with Files() as files:
        for _ in range(6):
            low = steps.draw(st.integers(0, len(data)))
            high = steps.draw(st.integers(low, len(data)))
            part = bytearray(high - low)
            stream.read_into(files, low, memoryview(part))
            assert part == data[low:high]


# -- which tensors are quantised, and what is refused --------------------------------------------

WEIGHT, SCALE = TensorSpec("F8_E4M3", (130, 257)), TensorSpec("F32", (2, 3))
GOOD = {"a.weight": WEIGHT, "a.weight_scale_inv": SCALE, "norm": TensorSpec("BF16", (4,))}


def test_headers_say_what_is_quantised() -> None:
    found = find_fp8(GOOD, FP8, "x")
    assert list(found) == ["a.weight"]
    assert found["a.weight"].grid == fp8.Grid((130, 257), (128, 128))
    assert find_fp8(GOOD, {}, "x") == found  # the config may have lost it
    assert find_fp8({"norm": GOOD["norm"]}, {}, "x") == {}
    assert find_fp8(GOOD, FP8, "x", lambda n: n.startswith("a.")) == {}
    seen = {"a.weight": TensorSpec("BF16", WEIGHT.shape), "norm": GOOD["norm"]}
    assert with_scales(seen, found) == GOOD
    text = {"num_hidden_layers": 1, "hidden_size": 4}
    stated = {"quant_method": "fp8", "scale_fmt": "ue8m0"}
    nested = {"a": 1, "text_config": {**text, "quantization_config": stated}}
    assert find_fp8(GOOD, nested, "x")["a.weight"].power_of_two
    assert without_quantisation(nested) == {"a": 1, "text_config": text}


def changed(**more: TensorSpec | None) -> dict[str, TensorSpec]:
    names = {n.replace("__", "."): spec for n, spec in more.items()}
    return {n: s for n, s in {**GOOD, **names}.items() if s is not None}


@pytest.mark.parametrize(
    ("tensors", "config", "kind", "match"),
    [
        (changed(a__weight_scale_inv=None), FP8, RefusedError, "a.weight_scale_inv is missing"),
        (changed(a__weight=None), FP8, RefusedError, "1 scales have no FP8 weight: a.weight_scale"),
        (
            changed(a__weight_scale_inv=TensorSpec("F32", (3, 2))), FP8, RefusedError,
            r"M17 a.weight_scale_inv has shape \[3, 2\].* blocks of 128x128 need \[2, 3\]",
        ),
        (changed(a__weight=TensorSpec("F8_E4M3", (4,))), FP8, RefusedError, "need two axes"),
        (changed(a__weight=TensorSpec("F8_E5M2", (130, 257))), FP8, UnsupportedError, "F8_E5M2"),
        (changed(a__weight_scale_inv=TensorSpec("F16", (2, 3))), FP8, UnsupportedError, "F16"),
        ({"norm": GOOD["norm"]}, FP8, RefusedError, "says fp8 and no tensor is"),
        (GOOD, {"quantization_config": {"weight_block_size": [0, 1]}}, RefusedError, "no pair"),
        (
            {"a.weight": TensorSpec("U8", (4, 2)), "a.weight_scale": TensorSpec("F8_E4M3", (4, 1)),
             "a.weight_scale_2": TensorSpec("F32", ())}, {}, UnsupportedError, "modelopt NVFP4",
        ),
        (
            {"a.weight_packed": TensorSpec("I32", (4, 2)), "a.weight_scale": SCALE},
            {"quantization_config": {"quant_method": "compressed-tensors"}}, UnsupportedError,
            "compressed-tensors, packed, quant_method compressed-tensors; 1 tensors like a.w",
        ),
        (
            {"a.qweight": SCALE}, {"quantization_config": {"quant_method": "gptq"}},
            UnsupportedError, "gptq",
        ),
        (
            {"a.weight": SCALE},
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
            UnsupportedError, "modelopt NVFP4",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(
    tensors: dict[str, TensorSpec], config: dict[str, Any], kind: type[MtpconvError], match: str
) -> None:
    with pytest.raises(kind, match=match) as caught:
        find_fp8(tensors, config, "hub/model")
    assert str(caught.value).startswith("hub/model: ")
    assert "\n" not in str(caught.value)
