"""One quantised checkpoint alone: codes, scales and shapes must belong together."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.finding import Report
from mtpconv.audit.sides import open_sides
from mtpconv.tensors import DTYPE_BITS, TensorSpec
from tests.audit.models import Model, alone, base_model, compare, errors, said, shown
from tests.audit.test_single import fp8_model

TRUNK = "model.layers.3.self_attn.o_proj.weight"
MTP = "model.layers.4.self_attn.o_proj.weight"
DOWN = "model.layers.4.mlp.experts.0.down_proj.weight"
ONE = struct.pack("<f", 1.0)


def put(model: Model, name: str, dtype: str, shape: tuple[int, ...], byte: bytes = b"\x11") -> None:
    """Store a tensor of this form, all bytes equal."""
    spec = TensorSpec(dtype, shape)
    model.tensors[name] = (spec, byte * spec.nbytes)


def scale(model: Model, name: str, shape: tuple[int, ...] = (1,), dtype: str = "F32") -> None:
    put(model, name, dtype, shape, ONE[2:3])


def shape_of(model: Model, name: str) -> tuple[int, ...]:
    return model.tensors[name][0].shape


def experts(model: Model) -> list[str]:
    return [n for n in model.tensors if ".experts." in n and n.endswith("_proj.weight")]


def run(model: Model, place: Path) -> Report:
    return audit(None, open_sides(None, model.write(place)).after)


def int4(model: Model) -> None:
    """compressed-tensors, pack-quantized: eight values in a word."""
    model.config["quantization_config"] = {"quant_method": "compressed-tensors"}
    for name in experts(model):
        rows, columns = shape_of(model, name)
        del model.tensors[name]
        put(model, name + "_packed", "I32", (rows, -(-columns // 8)))
        scale(model, name + "_scale", (rows, 1), "BF16")
        model.tensors[name + "_shape"] = (
            TensorSpec("I64", (2,)), struct.pack("<2q", rows, columns),
        )  # fmt: skip


def nvfp4(model: Model) -> None:
    """modelopt: two values in a byte, FP8 scales of 16, a scale over them."""
    model.config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    for name in experts(model):
        rows, columns = shape_of(model, name)
        put(model, name, "U8", (rows, columns // 2))
        put(model, name + "_scale", "F8_E4M3", (rows, -(-columns // 16)))
        scale(model, name + "_scale_2", ())
        scale(model, name.replace(".weight", ".input_scale"), ())


def w8a8(model: Model) -> None:
    """compressed-tensors, int-quantized: a scale for each row."""
    model.config["quantization_config"] = {"quant_method": "compressed-tensors"}
    for name in experts(model):
        rows, columns = shape_of(model, name)
        put(model, name, "I8", (rows, columns))
        scale(model, name + "_scale", (rows, 1), "BF16")


def channel_fp8(model: Model) -> None:
    """FP8 with a scale for each row."""
    model.config["quantization_config"] = {"quant_method": "compressed-tensors"}
    for name in experts(model):
        rows, columns = shape_of(model, name)
        put(model, name, "F8_E4M3", (rows, columns))
        scale(model, name + "_scale", (rows, 1), "BF16")


def mxfp4(model: Model) -> None:
    """DeepSeek-V4's experts: two values in a byte, powers of two as `scale` beside `weight`."""
    model.config["quantization_config"] = {"quant_method": "mxfp4"}
    for name in experts(model):
        rows, columns = shape_of(model, name)
        put(model, name, "I8", (rows, columns // 2))
        put(model, name.replace(".weight", ".scale"), "F8_E8M0", (rows, -(-columns // 32)))


FORMATS: dict[str, Callable[[Model], None]] = {
    "int4": int4, "nvfp4": nvfp4, "w8a8": w8a8, "channel fp8": channel_fp8, "mxfp4": mxfp4,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
def test_whole_checkpoints_of_every_format_pass(form: str, tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    wanted = len(model.mtp())
    FORMATS[form](model)
    report = run(model, tmp_path / "table")
    assert report.verdict == "pass", shown(report)
    assert not [f for f in report.findings if f.kind in ("dtype_mismatch", "config_contradiction")]
    (depth,) = report.mtp.depths
    assert depth.tensors == depth.expected
    assert depth.expected in (wanted, wanted + len(experts(model)) // 2)
    assert alone(model, tmp_path / "no table", table=False).verdict == "pass"


@pytest.mark.parametrize(
    ("form", "gone", "missing"),
    [
        ("int4", "_scale", "_scale"), ("nvfp4", "_scale", "_scale"),
        ("nvfp4", "_scale_2", "_scale_2"), ("w8a8", "_scale", "_scale"),
        ("channel fp8", "_scale", "_scale_inv"), ("mxfp4", ".scale", "_scale"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("everywhere", [True, False])
def test_codes_without_scales_are_noise(
    form: str, gone: str, missing: str, everywhere: bool, tmp_path: Path
) -> None:
    model = base_model("glm-5.2.json")
    FORMATS[form](model)
    if not everywhere:
        missing = gone  # the other weights show the style
    for weight in experts(model) or [n.removesuffix("_packed") for n in model.tensors]:
        if everywhere or weight == DOWN:
            name = weight.replace(".weight", gone) if gone[0] == "." else weight + gone
            model.tensors.pop(name, None)
    found = said(run(model, tmp_path))
    scale = DOWN.replace(".weight", missing) if missing[0] == "." else DOWN + missing
    assert ("missing_tensor", scale) in found
    assert {k for k, _ in found} == {"missing_tensor"}
    assert everywhere or len(found) == 1


SHAPES: dict[str, tuple[str, str, tuple[int, int]]] = {
    # format, dtype, rows and columns divided by
    "fp8, half the rows": ("channel fp8", "F8_E4M3", (2, 1)),
    "nvfp4, half the rows": ("nvfp4", "U8", (2, 2)),
    "nvfp4, a quarter of the columns": ("nvfp4", "U8", (1, 4)),
    "int8, half the rows": ("w8a8", "I8", (2, 1)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_codes_have_the_shape_of_their_weight(name: str, tmp_path: Path) -> None:
    form, dtype, (a, b) = SHAPES[name]
    model = base_model("glm-5.2.json")
    rows, columns = shape_of(model, DOWN)
    FORMATS[form](model)
    put(model, DOWN, dtype, (rows // a, columns // b))
    found = said(run(model, tmp_path))
    assert ("shape_mismatch", DOWN) in found
    assert {k for k, _ in found} == {"shape_mismatch"}


@pytest.mark.parametrize("shape", [(8, 16), (1, 1), (16, 8)])
def test_fp8_blocks_do_not_excuse_a_shape(shape: tuple[int, int], tmp_path: Path) -> None:
    model = fp8_model(block=128)
    assert shape_of(model, MTP) not in (shape, shape[::-1])
    put(model, MTP, "F8_E4M3", shape)
    assert said(run(model, tmp_path)) == [("shape_mismatch", MTP)]


@pytest.mark.parametrize(("dtype", "columns"), [("I32", 0), ("I32", 1000), ("BF16", 1)])
def test_packed_weights_have_room_for_their_weight(
    dtype: str, columns: int, tmp_path: Path
) -> None:
    model = base_model("glm-5.2.json")
    rows = shape_of(model, TRUNK)[0]
    del model.tensors[TRUNK]
    put(model, TRUNK + "_packed", dtype, (rows, columns))
    put(model, TRUNK + "_shape", "I64", (2,))
    scale(model, TRUNK + "_scale", (rows, 1))
    found = said(run(model, tmp_path / "a"))
    assert found == [("shape_mismatch", TRUNK + "_packed")]
    put(model, TRUNK + "_packed", "I32", (0,))
    assert ("shape_mismatch", TRUNK + "_packed") in said(run(model, tmp_path / "b"))


def test_stated_bits_are_the_only_ones(tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    int4(model)
    rows, packed = shape_of(model, DOWN + "_packed")
    put(model, DOWN + "_packed", "I32", (rows, 2 * packed))
    assert run(model, tmp_path / "any").verdict == "pass"  # eight bits
    model.config["quantization_config"]["config_groups"] = {
        "group_0": {"weights": {"num_bits": 4, "type": "int"}}
    }
    assert said(run(model, tmp_path / "four")) == [("shape_mismatch", DOWN + "_packed")]


STRAY = [
    "model.norm.weight_scale_inv", MTP + "_zero_point", MTP + "_packed", MTP + "_scale",
    MTP.replace(".weight", ".input_scale"), MTP.replace(".weight", ".scale"), MTP + "_shape",
]  # fmt: skip


@pytest.mark.parametrize("name", STRAY)
def test_companions_beside_plain_numbers_are_extra(name: str, tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    put(model, name, "F32", (7,))
    report = run(model, tmp_path / "table")
    assert said(report) == [("extra_tensor", name)]
    assert {(d.tensors, d.expected) for d in report.mtp.depths} == {(len(model.mtp()),) * 2}
    bare = said(alone(model, tmp_path / "none", table=False))
    assert bare == ([] if name.endswith(".scale") else [("extra_tensor", name)])


def test_scales_left_behind_by_dequantising(tmp_path: Path) -> None:
    model = fp8_model()
    left = [n for n in model.tensors if n.endswith("_scale_inv")]
    plain = base_model("deepseek-v3.json")
    for name in left:
        plain.tensors[name] = model.tensors[name]
    assert said(run(plain, tmp_path)) == sorted(("extra_tensor", n) for n in left)


def test_a_companion_hides_no_shape(tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    put(model, MTP, "BF16", (3,))
    scale(model, MTP + "_scale")
    assert said(run(model, tmp_path)) == [
        ("extra_tensor", MTP + "_scale"), ("shape_mismatch", MTP),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", ["BOOL", "F4", "U8", "I8", "I16", "I64"])
def test_no_scale_and_no_config_make_no_codes(dtype: str, tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    shape = shape_of(model, TRUNK)
    assert DTYPE_BITS[dtype] * shape[0] * shape[1] % 8 == 0
    put(model, TRUNK, dtype, shape, b"\1")
    assert said(run(model, tmp_path)) == [("dtype_mismatch", TRUNK)]


def test_floats_of_another_width_still_only_warn(tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    put(model, TRUNK, "F16", shape_of(model, TRUNK))
    report = run(model, tmp_path)
    assert (report.verdict, errors(report)) == ("pass", [])
    assert [(f.kind, f.tensor) for f in report.findings if f.severity == "warning"] == [
        ("dtype_mismatch", TRUNK)
    ]


@pytest.mark.parametrize("scales", ["kept", "gone"])
def test_codes_cast_to_bf16_are_no_upcast(scales: str, tmp_path: Path) -> None:
    before = fp8_model()
    after = before.copy()
    codes = [n for n, (s, _) in before.tensors.items() if s.dtype == "F8_E4M3"]
    for name in codes:
        spec, data = after.tensors[name]
        # Every E4M3 code but NaN is a BF16 number; 0x38 is 1.0 in both.
        assert data
        before.tensors[name] = (spec, b"\x38" * len(data))
        after.tensors[name] = (TensorSpec("BF16", spec.shape), b"\x80\x3f" * len(data))
        if scales == "gone":
            del before.tensors[name + "_scale_inv"], after.tensors[name + "_scale_inv"]
    for model in (before, after):
        del model.config["quantization_config"]
    report = compare(before, after, tmp_path, allow=frozenset({"upcast"}))
    assert said(report) == sorted(("dtype_mismatch", n) for n in codes)
