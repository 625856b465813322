"""Quantised weights and the tensors that belong to them: a code without its scale is noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from mtpconv.audit.codes import finding
from mtpconv.audit.finding import Finding
from mtpconv.audit.subject import Expected, Subject
from mtpconv.geometry import text_config
from mtpconv.store.fp8 import Grid
from mtpconv.store.fp8_tensors import SCALE
from mtpconv.tensors import Region, TensorSpec

#: What quantisers append to the name of a weight.
#: Source: facts on MTP families, section 5 (DeepSeek, compressed-tensors, modelopt).
_SCALES = ("_scale_inv", "_scale")
_COMPANIONS = (
    "_scale_inv", "_scale_2", "_scale", "_packed", "_shape", "_zero_point", "_g_idx",
    "_global_scale",
)  # fmt: skip
_CODES = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


def companion_base(name: str) -> str | None:
    """The weight that a scale or another companion belongs to; None for other names."""
    for suffix in _COMPANIONS:
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    module, _, leaf = name.rpartition(".")
    return f"{module}.weight" if leaf in ("input_scale", "input_global_scale") else None


def is_quantised(subject: Subject, name: str) -> bool:
    """Whether a weight is stored as codes, so that shape and dtype are not those of the table."""
    return subject.tensors[name].dtype in _CODES or any(
        name + suffix in subject.tensors for suffix in _COMPANIONS
    )


def quantisation(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The quantisation config at whatever level it stands."""
    for part in (config or {}, text_config(config or {})):
        for key in ("quantization_config", "compression_config"):
            value = part.get(key)
            if isinstance(value, Mapping):
                return value
    return None


def with_fp8_scales(
    expected: Expected, tensors: Mapping[str, TensorSpec], config: Mapping[str, Any] | None
) -> Expected:
    """The promise of a table, and a scale for every weight that the headers say is block FP8.

    Which weights are quantised is not the family's to say, so no table can. Shapes of scales
    that are there are left to `scale_findings`.
    """
    codes = [
        n
        for n, spec in tensors.items()
        if spec.dtype == "F8_E4M3" and len(spec.shape) > 1 and n in expected.tensors
    ]
    block = _block(config)
    if not any(n + SCALE in tensors for n in codes) and block is None:
        return expected
    scales = {}
    for name in codes:
        shape = Grid(tensors[name].shape, block or (128, 128)).scale_shape
        scales[name + SCALE] = tensors.get(name + SCALE, TensorSpec("F32", shape))
    regions = {n: expected.regions[n.removesuffix(SCALE)] for n in scales}
    return Expected({**expected.tensors, **scales}, {**expected.regions, **regions})


def scale_findings(subject: Subject, regions: Mapping[str, Region]) -> Iterator[Finding]:
    """FP8 weights without a scale, and a quantisation config that does not fit the tensors."""
    codes = [n for n, s in subject.tensors.items() if s.dtype in _CODES]
    config = quantisation(subject.config)
    if config is not None and config.get("quant_method") == "fp8" and not codes:
        if subject.tensors and not subject.blind and not subject.unread:
            yield finding(
                "config_contradiction",
                "error",
                "config.json: quantization_config says fp8 and no tensor is; remove it or"
                " restore the quantised weights",
                field="quantization_config", file="config.json",
            )  # fmt: skip
        return
    if not codes:
        return
    known = subject.tensors.keys() | subject.unread | subject.ghosts
    styles = Counter(s for n in codes for s in _SCALES if n + s in known)
    if config is None and subject.config is not None:
        yield finding(
            "config_contradiction",
            "warning",
            f"config.json: has no quantization_config but {len(codes)} tensors are FP8",
            field="quantization_config", file="config.json",
        )  # fmt: skip
    if config is None and not styles:
        return  # a bare FP8 cast: nothing says that scales ever existed
    style = styles.most_common(1)[0][0] if styles else "_scale_inv"
    for name in sorted(codes):
        if subject.blind or any(name + s in known for s in _SCALES):
            continue
        yield finding(
            "missing_tensor",
            "error",
            f"{name + style}: the FP8 weight is there and its scale is not",
            tensor=name + style, region=regions[name],
        )  # fmt: skip
    yield from _block_shapes(subject, config, codes, regions)


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
