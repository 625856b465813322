"""Quantised weights and the tensors that belong to them: a code without its scale is noise."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from typing import Any

from mtpconv.audit.codes import finding
from mtpconv.audit.companions import (
    FLOATS,
    FP8,
    PACKED,
    QWEIGHT,
    SECOND_SCALES,
    beside,
    code_fits,
    companion_base,
    companion_of,
    form_of,
    full_name,
    has_companions,
    is_bitsandbytes,
    is_code,
    is_lone,
    is_stray,
    packed_fits,
    scale_of,
    stored_as,
    stored_dtype,
    weight_names,
)
from mtpconv.audit.finding import Finding, Severity
from mtpconv.audit.left_alone import contradiction, left_alone_findings
from mtpconv.audit.quantised_parts import part_findings
from mtpconv.audit.subject import Expected, Subject
from mtpconv.geometry import text_config
from mtpconv.store.fp8 import Grid
from mtpconv.store.fp8_tensors import SCALE
from mtpconv.tensors import DTYPE_BITS, Region, TensorSpec


def is_quantised(subject: Subject, name: str) -> bool:
    """Whether a weight is stored as codes, as far as it and what stands beside it tell."""
    spec = subject.tensors[name]
    return spec.dtype in FP8 or (is_code(spec) and has_companions(subject.tensors, name))


def quantisation(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The quantisation config at whatever level it stands."""
    for part in (config or {}, text_config(config or {})):
        for key in ("quantization_config", "compression_config"):
            value = part.get(key)
            if isinstance(value, Mapping):
                return value
    return None


def stated(subject: Subject) -> Mapping[str, Any] | None:
    """What a side says about its quantisation, in config.json or in modelopt's own file."""
    return quantisation(subject.config) or subject.quant_config


def with_fp8_scales(
    expected: Expected, tensors: Mapping[str, TensorSpec], config: Mapping[str, Any] | None
) -> Expected:
    """The promise of a table, and a scale for every weight that the headers say is FP8.

    Which weights are quantised is not the family's to say, so no table can. Shapes of scales
    that are there are left to `scale_findings`.
    """
    codes = [
        n
        for n, spec in tensors.items()
        if spec.dtype == "F8_E4M3" and len(spec.shape) > 1 and n in expected.tensors
    ]
    block = _block(config)
    there = {n: scale for n in codes if (scale := scale_of(tensors, n)) is not None}
    if not there and block is None:
        return expected
    usual = Counter(companion_of(s) for s in there.values()).most_common(1)
    style = usual[0][0] if usual else SCALE
    scales, regions = {}, {}
    for name in codes:
        shape = Grid(tensors[name].shape, block or (128, 128)).scale_shape
        scale = there.get(name) or full_name(name, style)
        scales[scale] = tensors.get(scale, TensorSpec("F32", shape))
        regions[scale] = expected.regions[name]
    return replace(
        expected,
        tensors={**expected.tensors, **scales},
        regions={**expected.regions, **regions},
    )


def scale_findings(subject: Subject, regions: Mapping[str, Region]) -> Iterator[Finding]:
    """Codes without a scale, companions without codes, a quantisation config that fits neither."""
    yield from _stray(subject, regions)
    config = stated(subject)
    # The scales of four-bit codes may be FP8 themselves.
    fp8 = [n for n, s in subject.tensors.items() if s.dtype in FP8 and companion_base(n) is None]
    whole = not (subject.blind or subject.unread)
    if config is not None and config.get("quant_method") == "fp8" and not fp8 and whole:
        yield contradiction(
            "error",
            "quantization_config says fp8 and no tensor is; remove it or restore the quantised"
            " weights",
        )
        return
    codes = {*fp8, *_integer_codes(subject, config), *_stored_elsewhere(subject)}
    if not codes:
        return
    if config is None and subject.config is not None:
        shown = f"{len(codes)} tensors are FP8" if len(codes) == len(fp8) else (
            f"{len(codes)} weights are stored as codes"
        )  # fmt: skip
        yield contradiction("warning", f"has no quantization_config but {shown}")
    yield from left_alone_findings(subject, config, codes, regions)
    known = subject.tensors.keys() | subject.unread | subject.ghosts
    scales = {n: scale for n in codes if (scale := scale_of(known, n)) is not None}
    if config is None and not scales:
        codes -= {*fp8}  # bare FP8 casts: nothing says that scales ever existed
    said: list[Finding] = []
    if not subject.blind:
        said += _scaleless(codes, scales, regions, subject, config)
    said += _half_scaled(scales, known, regions, subject)
    yield from said
    if not subject.blind:
        yield from part_findings(subject, config, codes, regions, {f.tensor for f in said})
    yield from _block_shapes(subject, config, fp8, regions)


def _stray(subject: Subject, regions: Mapping[str, Region]) -> Iterator[Finding]:
    known = subject.expected.tensors if subject.expected is not None else {}
    there = subject.tensors.keys() | subject.unread | subject.ghosts
    lone: dict[str, list[str]] = {}
    for name in sorted(subject.tensors):
        if name in known:
            continue
        if is_stray(subject.tensors, name, table=subject.expected is not None):
            yield finding(
                "extra_tensor", "error",
                f"{name}: belongs to a quantised weight, and the weight beside it is none",
                tensor=name, region=regions[name],
            )  # fmt: skip
        elif subject.expected is None and not subject.blind and is_lone(there, name):
            lone.setdefault(companion_base(name) or name, []).append(name)
    for weight, names in lone.items():  # with a table, the weight is missing anyway
        yield finding(
            "missing_tensor", "error",
            f"{weight}: its codes are not there, in any form, and {names[0]} is",
            tensor=weight, region=regions[names[0]],
        )  # fmt: skip


def _integer_codes(subject: Subject, config: Mapping[str, Any] | None) -> list[str]:
    """Weights that are integers because a quantiser wrote them."""
    return [
        n
        for n, spec in subject.tensors.items()
        if n.endswith("weight")
        and is_code(spec)
        and spec.dtype not in FP8
        and (config is not None or has_companions(subject.tensors, n))
    ]


def _stored_elsewhere(subject: Subject) -> set[str]:
    """Weights of which only codes under another name are there."""
    return {n for n in weight_names(subject.tensors) if n not in subject.tensors}


def _scaleless(
    codes: Set[str],
    scales: Mapping[str, str],
    regions: Mapping[str, Region],
    subject: Subject,
    config: Mapping[str, Any] | None,
) -> Iterator[Finding]:
    styles: dict[str | None, Counter[str]] = defaultdict(Counter)
    for name, scale in scales.items():
        styles[stored_dtype(subject.tensors, name)][companion_of(scale)] += 1
    for name in sorted(codes - scales.keys()):
        dtype = stored_dtype(subject.tensors, name)
        usual = styles[dtype].most_common(1)
        scale = full_name(name, usual[0][0]) if usual else _scale_wanted(name, subject, config)
        yield finding(
            "missing_tensor", "error",
            f"{scale}: the {'FP8' if dtype in FP8 else 'quantised'} weight is there and its scale"
            " is not",
            tensor=scale, region=_region(name, regions),
        )  # fmt: skip


def _scale_wanted(name: str, subject: Subject, config: Mapping[str, Any] | None) -> str:
    """The name under which a scale should be where no other weight shows the style."""
    form = form_of(subject.tensors, name)
    if stored_dtype(subject.tensors, name) in FP8:
        return name + "_scale_inv"
    if form == QWEIGHT:
        return beside(name, "scales")
    if form == "" and is_bitsandbytes(subject.tensors, name, config):
        spec = subject.tensors[name]
        return beside(name, "SCB") if spec.dtype == "I8" else name + ".absmax"
    return name + ("_scale" if form in ("", PACKED) else "_scales")


def _half_scaled(
    scales: Mapping[str, str],
    known: Set[str],
    regions: Mapping[str, Region],
    subject: Subject,
) -> Iterator[Finding]:
    """Four-bit codes: a row of scales for each row, and a second scale where those are FP8."""
    for name, scale in sorted(scales.items()):
        spec = subject.tensors.get(name, subject.tensors.get(name + PACKED))
        held = subject.tensors.get(scale)
        if spec is None or held is None or spec.dtype in FP8 or scale.endswith(".absmax"):
            continue
        if held.dtype in FP8 and not any(name + s in known for s in SECOND_SCALES):
            second = name + ("_scale_2" if name in subject.tensors else "_global_scale")
            yield finding(
                "missing_tensor", "error",
                f"{second}: the weight's scales are FP8, and the scale over them is not there",
                tensor=second, region=_region(name, regions),
            )  # fmt: skip
        if not held.elements or held.shape[:1] not in ((), (1,), spec.shape[:1]):
            wanted = [*spec.shape[:1], *held.shape[1:]]
            yield finding(
                "shape_mismatch", "error",
                f"{scale}: is {list(held.shape)}, the weight has {spec.shape[0]} rows",
                tensor=scale, region=_region(name, regions),
                before=wanted, after=list(held.shape),
            )  # fmt: skip


def _region(weight: str, regions: Mapping[str, Region]) -> Region:
    return regions[stored_as(regions, weight) or weight]


def form_findings(
    subject: Subject, name: str, wanted: TensorSpec, region: Region
) -> Iterator[Finding]:
    """A tensor in another form than config and table say: shape, dtype, codes or packed."""
    spec, config = subject.tensors.get(name), stated(subject)
    if spec is None:
        stored = stored_as(subject.tensors, name)
        packed = subject.tensors[stored] if stored is not None else None
        form = form_of(subject.tensors, name) or PACKED
        if packed is not None and not packed_fits(packed, wanted.shape, config, form):
            what = f"is {packed.dtype} {list(packed.shape)} and cannot be {list(wanted.shape)}"
            yield _shape(stored or name, what, wanted, packed, region)
        return
    quantised = is_code(spec) and wanted.dtype in FLOATS
    flat = quantised and spec.dtype == "U8" and is_bitsandbytes(subject.tensors, name, config)
    if not (code_fits(spec, wanted.shape, flat=flat) if quantised else spec.shape == wanted.shape):
        what = f"is {list(spec.shape)}, config and table say {list(wanted.shape)}"
        yield _shape(name, what, wanted, spec, region)
    if spec.dtype == wanted.dtype or is_quantised(subject, name) or (quantised and config):
        return
    said = f"{name}: is {spec.dtype}, config and table say {wanted.dtype}"
    severity: Severity = "warning"
    if (wanted.dtype in FLOATS) is not (spec.dtype in FLOATS):
        severity = "error"
        if quantised:
            said += ", and neither a scale nor a quantization_config makes codes of it"
    elif DTYPE_BITS[spec.dtype] < DTYPE_BITS[wanted.dtype]:
        said += "; low bits are lost"
    yield finding(
        "dtype_mismatch", severity, said,
        tensor=name, region=region, before=wanted.dtype, after=spec.dtype,
    )  # fmt: skip


def _shape(name: str, what: str, wanted: TensorSpec, spec: TensorSpec, region: Region) -> Finding:
    return finding(
        "shape_mismatch", "error", f"{name}: {what}",
        tensor=name, region=region, before=list(wanted.shape), after=list(spec.shape),
    )  # fmt: skip


def _block(config: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """The block size that a quantisation config, or the whole config, states."""
    stated = config if config and "weight_block_size" in config else quantisation(config) or {}
    block = stated.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block):
        return block[0], block[1]
    return None


def _block_shapes(
    subject: Subject,
    config: Mapping[str, Any] | None,
    codes: list[str],
    regions: Mapping[str, Region],
) -> Iterator[Finding]:
    block = _block(config)
    if block is None:  # then nothing says which shape is right
        return
    for name in sorted(codes):
        spec, scale = subject.tensors[name], subject.tensors.get(name + "_scale_inv")
        if scale is None or len(spec.shape) < 2:
            continue
        wanted = list(Grid(spec.shape, block).scale_shape)
        if list(scale.shape) != wanted:
            yield finding(
                "shape_mismatch",
                "error",
                f"{name}_scale_inv: is {list(scale.shape)}, blocks of {list(block)} need {wanted}",
                tensor=name + "_scale_inv", region=regions[name],
                before=wanted, after=list(scale.shape),
            )  # fmt: skip
