"""Small checkpoints shaped as real quantised releases: whole, damaged, without MTP, and converted.

Names, dtypes and shapes as `mtpconv.audit.companions` cites them; configs as the quantisers write
them (transformers 5.24 utils/quantization_config.py, compressed-tensors, modelopt's
hf_quant_config.json).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.finding import Report
from mtpconv.audit.options import Options
from mtpconv.audit.sides import open_sides
from mtpconv.convert import hf2mcore
from mtpconv.errors import UnsupportedError
from mtpconv.store.hf import open_hf
from mtpconv.store.manifest import read_manifest, take_manifest, write_manifest
from mtpconv.synth import fewer, tensor_bytes
from mtpconv.tensors import TensorSpec
from tests.audit.models import Model, base_model, errors, said, shown
from tests.convert.folders import tensors_of
from tests.families import distinct

Specs = dict[str, tuple[str, tuple[int, ...]]]

#: The last layer is MTP. Experts and attention of every layer are quantised.
EXPERT = "model.layers.4.mlp.experts.1.down_proj"
BITS = 4


@dataclass(frozen=True)
class Format:
    """How a quantiser stores a weight of so many rows and columns."""

    #: what it writes in place of `weight`, by the end of the name
    parts: Callable[[int, int], Specs]
    config: Mapping[str, Any]
    #: what hf2mcore must say
    said: str
    #: which of the parts is the codes
    codes: str = "weight"
    #: parts without which a weight could be read: then only its like show that one is missing
    optional: tuple[str, ...] = ()
    hf_quant_config: Mapping[str, Any] | None = None
    #: bytes of parts that are no noise
    data: Mapping[str, Callable[[int, int], bytes]] = field(default_factory=dict)


def group(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    """A config of compressed-tensors with one group."""
    one = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": one}, "ignore": []}


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {
        "producer": {"name": "modelopt", "version": "0.39.0"},
        "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": None, **more},
    }


FORMATS: dict[str, Format] = {
    "compressed-tensors int4": Format(
        lambda n, k: {
            "weight_packed": ("I32", (n, -(-k // 8))), "weight_scale": ("BF16", (n, -(-k // 4))),
            "weight_shape": ("I64", (2,)),
        },
        group({"num_bits": 4, "type": "int", "symmetric": True, "group_size": 4}, None)
        | {"format": "pack-quantized"},
        "compressed-tensors, packed, quant_method compressed-tensors pack-quantized",
        "weight_packed", data={"weight_shape": lambda n, k: struct.pack("<2q", n, k)},
    ),
    "compressed-tensors int4, asymmetric, by group": Format(
        lambda n, k: {
            "weight_packed": ("I32", (n, -(-k // 8))), "weight_scale": ("BF16", (n, -(-k // 4))),
            "weight_shape": ("I64", (2,)), "weight_zero_point": ("I32", (-(-n // 8), -(-k // 4))),
            "weight_g_idx": ("I32", (k,)),
        },
        group({"num_bits": 4, "type": "int", "symmetric": False, "group_size": 4}, None)
        | {"format": "pack-quantized"},
        "compressed-tensors, packed", "weight_packed", ("weight_zero_point", "weight_g_idx"),
    ),
    "compressed-tensors FP8, a scale per channel": Format(
        lambda n, k: {"weight": ("F8_E4M3", (n, k)), "weight_scale": ("BF16", (n, 1))},
        group({"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "float", "dynamic": True})
        | {"format": "float-quantized"},
        "a scale per tensor or channel, quant_method compressed-tensors float-quantized",
    ),
    "compressed-tensors FP8, a scale per tensor": Format(
        lambda n, k: {
            "weight": ("F8_E4M3", (n, k)), "weight_scale": ("BF16", (1,)),
            "input_scale": ("BF16", (1,)),
        },
        group({"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "float", "dynamic": False})
        | {"format": "float-quantized"},
        "static activation scales",
    ),
    "compressed-tensors INT8": Format(
        lambda n, k: {"weight": ("I8", (n, k)), "weight_scale": ("BF16", (n, 1))},
        group({"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "int", "dynamic": True})
        | {"format": "int-quantized"},
        "a scale per tensor or channel",
    ),
    "compressed-tensors NVFP4": Format(
        lambda n, k: {
            "weight_packed": ("U8", (n, k // 2)), "weight_scale": ("F8_E4M3", (n, -(-k // 16))),
            "weight_global_scale": ("F32", (1,)), "input_global_scale": ("F32", (1,)),
        },
        group({"num_bits": 4, "type": "float", "group_size": 16},
              {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": "local"})
        | {"format": "nvfp4-pack-quantized"},
        "compressed-tensors NVFP4, quant_method compressed-tensors nvfp4-pack-quantized",
        "weight_packed",
    ),
    "modelopt NVFP4": Format(
        lambda n, k: {
            "weight": ("U8", (n, k // 2)), "weight_scale": ("F8_E4M3", (n, -(-k // 16))),
            "weight_scale_2": ("F32", ()), "input_scale": ("F32", ()),
        },
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        "modelopt NVFP4, quant_method modelopt NVFP4",
        hf_quant_config=modelopt("NVFP4", group_size=16, exclude_modules=["lm_head"]),
    ),
    "modelopt NVFP4, said in hf_quant_config.json only": Format(
        lambda n, k: {
            "weight": ("U8", (n, k // 2)), "weight_scale": ("F8_E4M3", (n, -(-k // 16))),
            "weight_scale_2": ("F32", ()), "input_scale": ("F32", ()),
        },
        {},
        "modelopt NVFP4, quant_method modelopt NVFP4",
        hf_quant_config=modelopt("NVFP4", group_size=16, exclude_modules=["lm_head"]),
    ),
    "modelopt FP8": Format(
        lambda n, k: {
            "weight": ("F8_E4M3", (n, k)), "weight_scale": ("F32", ()), "input_scale": ("F32", ()),
        },
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        "static activation scales, quant_method modelopt FP8",
        hf_quant_config=modelopt("FP8", exclude_modules=["lm_head"]),
    ),
    "GPTQ": Format(
        lambda n, k: {
            "qweight": ("I32", (-(-k // 8), n)), "qzeros": ("I32", (-(-k // 4), -(-n // 8))),
            "scales": ("F16", (-(-k // 4), n)), "g_idx": ("I32", (k,)),
        },
        {"quant_method": "gptq", "bits": BITS, "group_size": 4, "desc_act": True, "sym": True,
         "checkpoint_format": "gptq"},
        "GPTQ, quant_method gptq", "qweight", ("g_idx",),
    ),
    "AWQ": Format(
        lambda n, k: {
            "qweight": ("I32", (k, -(-n // 8))), "qzeros": ("I32", (-(-k // 4), -(-n // 8))),
            "scales": ("F16", (-(-k // 4), n)),
        },
        {"quant_method": "awq", "bits": BITS, "group_size": 4, "zero_point": True,
         "version": "gemm", "modules_to_not_convert": None},
        "GPTQ or AWQ, quant_method awq", "qweight",
    ),
    "bitsandbytes NF4": Format(
        lambda n, k: {
            "weight": ("U8", (-(-n * k // 2), 1)), "weight.absmax": ("U8", (-(-n * k // 64),)),
            "weight.quant_map": ("F32", (16,)), "weight.nested_absmax": ("F32", (1,)),
            "weight.nested_quant_map": ("F32", (256,)),
            "weight.quant_state.bitsandbytes__nf4": ("U8", (80,)),
        },
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
         "bnb_4bit_use_double_quant": True, "llm_int8_skip_modules": None},
        "bitsandbytes NF4, quant_method bitsandbytes",
    ),
    "bitsandbytes INT8": Format(
        lambda n, k: {
            "weight": ("I8", (n, k)), "SCB": ("F32", (n,)), "weight_format": ("U8", ()),
        },
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": None},
        "bitsandbytes INT8, quant_method bitsandbytes", optional=("weight_format",),
    ),
    "MXFP4 as in DeepSeek-V4": Format(
        lambda n, k: {"weight": ("I8", (n, k // 2)), "scale": ("F8_E8M0", (n, -(-k // 32)))},
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        "scales as DeepSeek-V4 has them, FP8 or MXFP4, quant_method fp8",
    ),
    "MXFP4 as quark writes it": Format(
        lambda n, k: {"weight": ("U8", (n, k // 2)), "weight_scale": ("U8", (n, -(-k // 32)))},
        {"quant_method": "quark", "exclude": ["lm_head"]},
        "a scale per tensor or channel, quant_method quark",
    ),
}  # fmt: skip


def is_quantised(name: str) -> bool:
    return ".experts." in name or name.endswith("o_proj.weight")


def part_of(name: str, part: str) -> str:
    return name.removesuffix("weight") + part


def quantised(form: Format) -> Model:
    """GLM-5.2 with its experts and o_proj as a quantiser stores them."""
    model = base_model("glm-5.2.json")
    for name in [n for n in model.tensors if is_quantised(n)]:
        rows, columns = model.tensors.pop(name)[0].shape
        for part, (dtype, shape) in form.parts(rows, columns).items():
            spec = TensorSpec(dtype, shape)
            made = form.data[part](rows, columns) if part in form.data else None
            full = part_of(name, part)
            model.tensors[full] = spec, made or tensor_bytes(full, spec, 0)
    if form.config.get("scale_fmt"):
        block_fp8(model)
    if form.config:
        model.config["quantization_config"] = dict(form.config)
    return model


def block_fp8(model: Model) -> None:
    """Attention in FP8, as beside the MXFP4 experts of DeepSeek-V4."""
    for name in [n for n in model.tensors if n.endswith("o_proj.weight")]:
        rows, columns = base_model("glm-5.2.json").tensors[name][0].shape
        spec, scale = TensorSpec("F8_E4M3", (rows, columns)), TensorSpec("F8_E8M0", (1, 1))
        model.tensors[name] = spec, tensor_bytes(name, spec, 0)
        full = part_of(name, "scale")
        model.tensors[full] = scale, tensor_bytes(full, scale, 0)


def write(model: Model, form: Format, folder: Path) -> Path:
    model.write(folder)
    if form.hf_quant_config is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(form.hf_quant_config))
    return folder


def alone(folder: Path) -> Report:
    return audit(None, open_sides(None, folder).after, Options(workers=1))


def against(before: Path, after: Path) -> Report:
    sides = open_sides(before, after)
    return audit(sides.before, sides.after, Options(workers=1))


def without_table(model: Model) -> Model:
    """The same for a model type that has no table."""
    bare = model.copy()
    bare.config["model_type"] = "nobody_knows"
    return bare


@pytest.mark.parametrize("name", FORMATS)
def test_a_whole_checkpoint_is_green(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    model = quantised(form)
    folder = write(model, form, tmp_path / "whole")
    report = alone(folder)
    assert report.verdict == "pass", shown(report)
    assert [f.message for f in report.findings if f.severity != "note"] == []
    (depth,) = report.mtp.depths
    assert (depth.status, depth.tensors) == ("present", depth.expected)
    bare = alone(write(without_table(model), form, tmp_path / "bare"))
    assert (bare.verdict, errors(bare)) == ("pass", []), shown(bare)

    write_manifest(take_manifest(open_hf(folder), folder, "hf"), tmp_path / "manifest.json")
    inventory = read_manifest(tmp_path / "manifest.json").tensors
    assert inventory == {n: spec for n, (spec, _) in model.tensors.items()}
    assert against(tmp_path / "manifest.json", folder).verdict == "pass"


@pytest.mark.parametrize("name", FORMATS)
def test_against_megatron_the_format_is_named(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    folder = write(quantised(form), form, tmp_path / "codes")
    hf2mcore(base_model("glm-5.2.json").write(tmp_path / "hf"), tmp_path / "mcore", verify=False)
    for sides in ((folder, tmp_path / "mcore"), (tmp_path / "mcore", folder)):
        with pytest.raises(UnsupportedError, match="is quantised") as refused:
            open_sides(*sides)
        assert form.said.partition(", quant_method")[0] in str(refused.value)


PARTS = [(name, part) for name, form in FORMATS.items() for part in form.parts(8, 8)]


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_a_missing_part_of_an_mtp_weight_is_named(name: str, part: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    model = quantised(form)
    whole = write(model, form, tmp_path / "whole")
    lost = f"{EXPERT}.{part}"
    del model.tensors[lost]
    named = f"{EXPERT}.weight" if part == form.codes else lost
    folder = write(model, form, tmp_path / "damaged")
    report = alone(folder)
    assert said(report) == [("missing_tensor", named)], shown(report)
    assert report.mtp.status == "partial"
    (depth,) = report.mtp.depths
    assert (depth.status, depth.detail) == ("partial", f"absent: {named}")
    assert depth.tensors + 1 == depth.expected
    assert report.states[named] == "missing"
    bare = alone(write(without_table(model), form, tmp_path / "bare"))
    if said(bare):
        assert bare.mtp.status == "partial"
    pair = against(whole, folder)
    assert ("missing_tensor", lost) in said(pair)
    assert pair.mtp.status == "partial"


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_a_part_that_is_missing_everywhere_is_named(name: str, part: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    model = quantised(form)
    for full in [n for n in model.tensors if n.endswith(f".{part}")]:
        if is_quantised(full.removesuffix(part) + "weight"):
            del model.tensors[full]
    report = alone(write(model, form, tmp_path))
    if part in form.optional:
        assert report.verdict == "pass", shown(report)
        return
    found = said(report)
    # No FP8 is left that a config which says fp8 could mean.
    also = {"config_contradiction"} if (name, part) == ("MXFP4 as in DeepSeek-V4", "weight") else {}
    assert {k for k, _ in found} == {"missing_tensor", *also}, shown(report)
    wanted = f"{EXPERT}.weight" if part == form.codes else f"{EXPERT}.{part}"
    if part == "scale":
        wanted = f"{EXPERT}.weight_scale"  # nothing shows the style any more
    if name.startswith(("compressed-tensors FP8", "modelopt FP8")) and part == "weight_scale":
        wanted += "_inv"
    assert ("missing_tensor", wanted) in found


@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_lost_mtp_is_red(name: str, table: bool, tmp_path: Path) -> None:
    form = FORMATS[name]
    model = quantised(form)
    whole = write(model, form, tmp_path / "whole")
    for full in [n for n in model.tensors if n.startswith("model.layers.4.")]:
        del model.tensors[full]
    folder = write(model if table else without_table(model), form, tmp_path / "lost")
    report = alone(folder)
    assert [k for k, _ in said(report)] == ["mtp_missing"], shown(report)
    assert report.mtp.status == "absent"
    if table:
        assert against(whole, folder).mtp.status == "dropped"


@pytest.mark.parametrize("name", FORMATS)
def test_conversion_names_the_format_and_writes_nothing(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    folder = write(quantised(form), form, tmp_path / "hf")
    with pytest.raises(UnsupportedError) as refused:
        hf2mcore(folder, tmp_path / "mcore")
    assert refused.value.exit_code == 3
    assert f"is quantised ({form.said}" in str(refused.value)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_experts_packed_as_in_gpt_oss(tmp_path: Path) -> None:
    """MXFP4 in blocks: 32 values in 16 bytes, `_blocks` and `_scales` in place of the experts."""
    form = Format(lambda n, k: {}, {"quant_method": "mxfp4"}, "MXFP4 in blocks, quant_method mxfp4")
    model = packed_experts()
    plain = [n for n in model.tensors if n.endswith((".gate_up_proj", ".down_proj"))]
    assert len(plain) == 2 * model.config["text_config"]["num_hidden_layers"] + 2
    for name in plain:
        experts, rows, columns = model.tensors.pop(name)[0].shape
        for part, shape in (("_blocks", (experts, rows, -(-columns // 32), 16)),
                            ("_scales", (experts, rows, -(-columns // 32)))):  # fmt: skip
            spec = TensorSpec("U8", shape)
            model.tensors[name + part] = spec, tensor_bytes(name + part, spec, 0)
    model.config["quantization_config"] = dict(form.config)
    folder = write(model, form, tmp_path / "whole")
    whole = alone(folder)
    assert [f.message for f in whole.findings if f.severity != "note"] == []
    assert {(d.status, d.tensors) for d in whole.mtp.depths} == {("present", 19)}
    with pytest.raises(UnsupportedError, match="MXFP4 in blocks"):
        hf2mcore(folder, tmp_path / "mcore")

    name = "mtp.layers.0.mlp.experts.down_proj"
    for part, kind, named in (
        ("_scales", "missing_tensor", name + "_scales"), ("_blocks", "missing_tensor", name),
    ):  # fmt: skip
        lost = model.copy()
        del lost.tensors[name + part]
        assert said(alone(write(lost, form, tmp_path / part))) == [(kind, named)]
    wrong = model.copy()
    spec = TensorSpec("U8", (3, 1, 1))
    wrong.tensors[name + "_scales"] = spec, tensor_bytes(name, spec, 0)
    report = alone(write(wrong, form, tmp_path / "shape"))
    assert said(report) == [("shape_mismatch", name + "_scales")]


def packed_experts() -> Model:
    """Qwen3.6: all experts of a layer, MTP's too, in two tensors."""
    variant = next(v for v in distinct("qwen3_5_moe") if v.label == "Qwen3.6-35B-A3B")
    cut = replace(variant, config=fewer(variant.config, layers=4))
    with TemporaryDirectory() as place:
        return Model(dict(cut.config), tensors_of(cut.write(Path(place), shards=1)))


@pytest.mark.parametrize("name", ["GPTQ", "compressed-tensors int4", "compressed-tensors NVFP4"])
def test_codes_under_other_names_tell_single_experts_from_packed_ones(
    name: str, tmp_path: Path
) -> None:
    """Qwen3.5's table takes packed experts unless names of single ones are there."""
    form = FORMATS[name]
    variant = distinct("qwen3_5_moe")[0]
    single = [f"model.language_model.layers.{n}.mlp.experts.0.gate_proj.weight" for n in range(4)]
    cut = replace(variant, config=fewer(variant.config, layers=4), present=single)
    hf = cut.write(tmp_path / "bf16", shards=1)
    model = Model(dict(cut.config), tensors_of(hf))
    for full in [n for n in model.tensors if ".experts." in n]:
        rows, columns = model.tensors.pop(full)[0].shape
        for part, (dtype, shape) in form.parts(rows, columns).items():
            spec = TensorSpec(dtype, shape)
            made = form.data[part](rows, columns) if part in form.data else None
            model.tensors[part_of(full, part)] = spec, made or tensor_bytes(full + part, spec, 0)
    model.config["quantization_config"] = dict(form.config)
    report = alone(write(model, form, tmp_path / "codes"))
    assert [f.message for f in report.findings if f.severity != "note"] == []


@pytest.mark.parametrize("place", ["k_proj.k_scale", "k_scale"])
def test_scales_of_the_kv_cache_belong_to_any_attention(place: str, tmp_path: Path) -> None:
    form = FORMATS["modelopt FP8"]
    model = quantised(form)
    for layer in range(5):
        full = f"model.layers.{layer}.self_attn.{place}"
        model.tensors[full] = TensorSpec("F32", ()), struct.pack("<f", 0.5)
    assert alone(write(model, form, tmp_path / "kv")).verdict == "pass"
    stray = "model.layers.4.mlp.k_scale"
    model.tensors[stray] = TensorSpec("F32", ()), struct.pack("<f", 0.5)
    assert said(alone(write(model, form, tmp_path / "stray"))) == [("extra_tensor", stray)]


SHAPES = [
    ("GPTQ", "scales", (1, 3)), ("GPTQ", "qzeros", (9, 9)), ("GPTQ", "g_idx", (3,)),
    ("GPTQ", "qweight", (3, 3)), ("AWQ", "scales", (1,)), ("AWQ", "qweight", (1, 1)),
    ("bitsandbytes NF4", "weight.absmax", (9,)), ("bitsandbytes NF4", "weight", (9, 1)),
    ("bitsandbytes INT8", "SCB", (3,)), ("compressed-tensors int4", "weight_shape", (3,)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "part", "shape"), SHAPES)
def test_parts_have_the_shape_that_their_weight_needs(
    name: str, part: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    form = FORMATS[name]
    model = quantised(form)
    full = f"{EXPERT}.{part}"
    spec = TensorSpec(model.tensors[full][0].dtype, shape)
    model.tensors[full] = spec, tensor_bytes(full, spec, 0)
    assert ("shape_mismatch", full) in said(alone(write(model, form, tmp_path)))


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("compressed-tensors int4", {"ignore": [EXPERT]}),
        ("compressed-tensors int4", {"ignore": [r"re:.*layers\.4\.mlp.*"]}),
        ("modelopt NVFP4", {"ignore": ["model.layers.4*"]}),
        ("AWQ", {"modules_to_not_convert": ["model.layers.4"]}),
        ("GPTQ", {"dynamic": {r"-:^model\.layers\.4\.mlp\.experts\..*$": {}}}),
    ],
)
def test_codes_in_a_module_that_the_config_leaves_alone(
    name: str, listed: dict[str, Any], tmp_path: Path
) -> None:
    form = FORMATS[name]
    model = quantised(form)
    model.config["quantization_config"].update(listed)
    report = alone(write(model, form, tmp_path))
    assert said(report) == [("config_contradiction", "quantization_config")]
    assert f"{EXPERT}.weight" in report.findings[0].message or "4.mlp" in report.findings[0].message


PLAIN_MTP = [
    # format, what its config says, whether that covers a plain MTP
    ("modelopt NVFP4", {"ignore": ["lm_head"]}, False),
    ("modelopt NVFP4", {"ignore": ["lm_head", "model.layers.4*"]}, True),
    ("compressed-tensors int4", {"ignore": []}, False),
    ("compressed-tensors int4", {"ignore": [r"re:.*layers\.4\..*"]}, True),
    ("compressed-tensors int4", {"ignore": ["re:(a+)+(b|c)$"]}, True),  # says more than we read
    ("GPTQ", {}, False),
    ("GPTQ", {"dynamic": {r"-:.*layers\.4.*": {}}}, True),
    ("AWQ", {"modules_to_not_convert": ["layers.4."]}, True),
]


@pytest.mark.parametrize(("name", "listed", "covered"), PLAIN_MTP)
def test_a_plain_mtp_must_be_listed(
    name: str, listed: dict[str, Any], covered: bool, tmp_path: Path
) -> None:
    form = FORMATS[name]
    model = quantised(form)
    for full in [n for n in model.tensors if n.startswith("model.layers.4.")]:
        del model.tensors[full]
    plain = base_model("glm-5.2.json")
    model.tensors |= {n: plain.tensors[n] for n in plain.mtp()}
    model.config["quantization_config"].update(listed)
    report = alone(write(model, form, tmp_path))
    assert report.verdict == "pass", shown(report)
    found = [f.kind for f in report.findings if f.severity == "warning"]
    assert found == ([] if covered else ["config_contradiction"]), shown(report)


def test_mixed_precision_names_what_is_quantised(tmp_path: Path) -> None:
    form = FORMATS["modelopt NVFP4"]
    model = quantised(form)
    plain = base_model("glm-5.2.json")
    for full in [n for n in model.tensors if n.startswith("model.layers.4.")]:
        del model.tensors[full]
    model.tensors |= {n: plain.tensors[n] for n in plain.mtp()}
    layers = {n.removesuffix(".weight"): {"quant_algo": "NVFP4"} for n in model.tensors}
    only = {n: v for n, v in layers.items() if ".experts." in n and ".3." in n}
    model.config["quantization_config"].update(quant_algo="MIXED", quantized_layers=only)
    report = alone(write(model, replace(form, hf_quant_config=None), tmp_path))
    assert [f.message for f in report.findings if f.severity != "note"] == []


def test_two_configs_that_say_different_things(tmp_path: Path) -> None:
    form = replace(FORMATS["modelopt NVFP4"], hf_quant_config=modelopt("FP8"))
    report = alone(write(quantised(form), form, tmp_path / "two"))
    (one,) = [f for f in report.findings if f.severity == "warning"]
    assert (one.kind, "hf_quant_config.json FP8" in one.message) == ("config_contradiction", True)


@pytest.mark.parametrize("text", [b"{", b"[1]", b'{"quantization": 3}'])
def test_a_broken_hf_quant_config_is_no_crash(text: bytes, tmp_path: Path) -> None:
    form = FORMATS["modelopt NVFP4"]
    folder = write(quantised(form), form, tmp_path / "hf")
    (folder / "hf_quant_config.json").write_bytes(text)
    report = alone(folder)
    kinds = [(f.kind, f.file) for f in report.findings if f.severity == "error"]
    assert kinds == ([("unreadable_file", "hf_quant_config.json")] if text == b"{" else [])
