"""Weights stored as codes, and the tensors that stand beside them, told from names and headers.

Source: facts on MTP families, section 5; and, read 2026-11-29: vllm-project/compressed-tensors
compressors/pack_quantized/base.py and nvfp4/base.py @ 01dd1a58; AutoAWQ awq/modules/linear/gemm.py
@ 030fe2a1; the keys of bitsandbytes' Linear4bit (`weight.absmax`, ...) as in its issue on FSDP
(fix 1866) and of Linear8bitLt (`SCB`); gpt-oss checkpoints (`gate_up_proj_blocks`, `_scales`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from mtpconv.tensors import DTYPE_BITS, Shape, TensorSpec

#: What quantisers append to the name of a weight. A second scale over the first is what NVFP4
#: cannot do without.
SECOND_SCALES = ("_scale_2", "_global_scale")
QUANT_STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_BITSANDBYTES = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", *QUANT_STATES)
#: What they put where `weight` stands.
_INPUT_SCALES = ("input_scale", "input_global_scale", "pre_quant_scale")

#: The forms in which codes are stored: under the name of the weight, with something appended,
#: or with another last word.
PACKED, BLOCKS, QWEIGHT = "_packed", "_blocks", "qweight"
#: What may stand beside codes of each form: appended to the weight's name, and as last words.
_APPENDED: Mapping[str, tuple[str, ...]] = {
    "": ("_scale_inv", "_scale", *SECOND_SCALES, "_zero_point", *_BITSANDBYTES),
    PACKED: ("_shape", "_scale", "_global_scale", "_zero_point", "_g_idx"),
    BLOCKS: ("_scales",),
    QWEIGHT: (),
}
_BESIDE: Mapping[str, tuple[str, ...]] = {
    "": ("scale", *_INPUT_SCALES, "SCB", "weight_format"),
    PACKED: _INPUT_SCALES,
    BLOCKS: (),
    QWEIGHT: ("qzeros", "scales", "g_idx"),
}
_ALL_APPENDED = tuple(
    sorted({PACKED, BLOCKS, *(s for a in _APPENDED.values() for s in a)}, key=len, reverse=True)
)
_ALL_BESIDE = frozenset((QWEIGHT, *(leaf for leaves in _BESIDE.values() for leaf in leaves)))
#: Names that mean something else where no table says what belongs to a model.
_AMBIGUOUS = (".scale", ".scales", ".g_idx", ".weight_format")
#: Scales of a quantised KV cache, which the attention has whatever its weights are.
_KV_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale")

#: Companions that may hold one value throughout: a place, a format, symmetric zero points.
_BOOKKEEPING = (
    "_zero_point", "_shape", "_g_idx", ".qzeros", ".g_idx", ".weight_format", *QUANT_STATES,
)  # fmt: skip

FLOATS = ("F64", "F32", "F16", "BF16")
#: FP8: one value a byte, so a code tensor has the shape of its weight.
FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
#: Integers that may be one value, or two of four bits.
_BYTES = ("U8", "I8", "F4")
_PACKED_IN = ("I32", "U8", "I8")
_BITS = (2, 3, 4, 8)
#: Values of MXFP4 that share a scale, and bytes that hold them.
_MX_VALUES, _MX_BYTES = 32, 16


def companion_base(name: str) -> str | None:
    """The weight that a scale, packed codes or another companion belong to; None for others."""
    module, _, leaf = name.rpartition(".")
    end = _end(leaf)
    if end is None:
        return None
    if end in _ALL_BESIDE:
        return f"{module}.weight"
    return name.removesuffix(end) if name.endswith(end) else None


def companion_of(name: str) -> str:
    """The end of a companion's name: what `full_name` makes the name of."""
    return _end(name.rpartition(".")[2]) or ""


@lru_cache(4096)
def _end(leaf: str) -> str | None:
    """The companion that the last word of a name says it is; there are few such words."""
    if leaf in _ALL_BESIDE:
        return leaf
    last = f".{leaf}"
    return next((s for s in _ALL_APPENDED if last.endswith(s) or s.endswith(last)), None)


def beside(weight: str, word: str) -> str:
    """The name of a companion that stands where `weight` does."""
    return f"{weight.rpartition('.')[0]}.{word}"


def form_of(known: Collection[str], weight: str) -> str | None:
    """The form in which a weight is stored: `""` under its own name; None if it is not there."""
    if weight in known:
        return ""
    for form in (PACKED, BLOCKS):
        if weight + form in known:
            return form
    return QWEIGHT if weight.endswith(".weight") and beside(weight, QWEIGHT) in known else None


def stored_as(known: Collection[str], weight: str) -> str | None:
    """The name under which a weight or its codes are stored; None if they are not."""
    form = form_of(known, weight)
    if form is None:
        return None
    return beside(weight, QWEIGHT) if form == QWEIGHT else weight + form


def is_stored(known: Collection[str], weight: str) -> bool:
    """Whether a weight is there, in whatever form."""
    return form_of(known, weight) is not None


def stored_dtype(tensors: Mapping[str, TensorSpec], weight: str) -> str | None:
    """The dtype of a weight or of its codes; None if neither is there."""
    stored = stored_as(tensors, weight)
    return tensors[stored].dtype if stored is not None else None


def weight_names(names: Iterable[str]) -> set[str]:
    """Names of weights, of those too of which only codes under another name are there."""
    return {(companion_base(name) if _is_codes(name) else None) or name for name in names}


def is_part(name: str) -> bool:
    """Whether a tensor stands beside codes: a scale, a map, a shape, never the codes themselves."""
    return companion_base(name) is not None and not _is_codes(name)


def _is_codes(name: str) -> bool:
    return name.endswith((PACKED, BLOCKS, "." + QWEIGHT))


def companions(known: Iterable[str]) -> dict[str, set[str]]:
    """What is there beside each weight, as the end of its name: `_scale`, `.absmax`, `qzeros`."""
    found: dict[str, set[str]] = {}
    for name in known:
        base = companion_base(name)
        if base is not None:
            found.setdefault(base, set()).add(companion_of(name))
    return found


def full_name(weight: str, companion: str) -> str:
    """The name of a companion, of which `companion` is the end as `companions` gives it."""
    return weight + companion if companion[0] in "_." else beside(weight, companion)


def scale_of(known: Collection[str], weight: str) -> str | None:
    """The name of the scale of a weight, in whatever style."""
    styles = [weight + s for s in ("_scale_inv", "_scale", "_scales", ".absmax")]
    if weight.endswith(".weight"):
        styles += [beside(weight, leaf) for leaf in ("scale", "scales", "SCB")]
    return next((name for name in styles if name in known), None)


def is_code(spec: TensorSpec) -> bool:
    """Whether a weight of this form may be codes; only scales or a config say that it is."""
    return spec.dtype in FP8 or (spec.dtype in _BYTES and len(spec.shape) > 1)


def has_companions(known: Collection[str], weight: str) -> bool:
    """Whether anything of a quantised weight is there."""
    return scale_of(known, weight) is not None or any(weight + s in known for s in _ALL_APPENDED)


def is_bitsandbytes(known: Collection[str], name: str, config: Mapping[str, Any] | None) -> bool:
    """Whether a weight is stored as bitsandbytes does."""
    marks = (".absmax", ".quant_map", *QUANT_STATES)
    return (config or {}).get("quant_method") == "bitsandbytes" or any(
        name + mark in known for mark in marks
    )


def is_stray(tensors: Mapping[str, TensorSpec], name: str, *, table: bool) -> bool:
    """Whether a companion stands beside a weight that needs none: plain numbers are no codes.

    Nor do codes of one form need the companions of another. `table`: names that a model may have
    for something else are known not to be its.
    """
    base = companion_base(name)
    if base is None or (not table and name.endswith(_AMBIGUOUS)):
        return False
    form = form_of(tensors, base)
    if form is None or name == stored_as(tensors, base):
        return False
    if form == "" and not is_code(tensors[base]):
        return True
    return companion_of(name) not in (*_APPENDED[form], *_BESIDE[form])


def is_lone(known: Collection[str], name: str) -> bool:
    """Whether a companion, told from its name alone, is there and its weight is not."""
    base = companion_base(name)
    if base is None or not base.endswith(".weight") or name.endswith(_AMBIGUOUS):
        return False
    return form_of(known, base) is None


def is_bookkeeping(name: str) -> bool:
    """Whether a companion's values say nothing about training: no scale of anything."""
    return name.endswith(_BOOKKEEPING)


def is_kv_scale(name: str, tensors: Mapping[str, TensorSpec]) -> bool:
    """Whether a tensor is a scale of the KV cache: one number, or one for each head."""
    module, _, leaf = name.rpartition(".")
    return leaf in _KV_SCALES and "attn" in module and len(tensors[name].shape) <= 1


def code_fits(spec: TensorSpec, wanted: Shape, *, flat: bool = False) -> bool:
    """Whether codes of this form can be those of a weight of the wanted shape.

    `flat`: bitsandbytes stores four-bit codes as one column.
    """
    if spec.shape == wanted:
        return True
    if flat:
        elements = TensorSpec("U8", wanted).elements
        return spec.shape == (-(-elements // 2), 1)
    return spec.dtype in _BYTES and spec.shape == (*wanted[:-1], -(-wanted[-1] // 2))


def packed_fits(
    spec: TensorSpec, wanted: Shape, config: Mapping[str, Any] | None, form: str = PACKED
) -> bool:
    """Whether a packed tensor has room for exactly a weight of the wanted shape.

    compressed-tensors packs rows, as many whole values into a word as fit. GPTQ and AWQ store the
    transpose and pack its rows or its columns. MXFP4 has blocks of 32 values in 16 bytes.
    """
    if form == BLOCKS:
        blocks = (*wanted[:-1], -(-wanted[-1] // _MX_VALUES), _MX_BYTES)
        return spec.dtype == "U8" and spec.shape == blocks
    if spec.dtype not in _PACKED_IN or len(wanted) < 2:
        return False
    bits = _stated_bits(config) or _BITS
    width = DTYPE_BITS[spec.dtype]
    if form == QWEIGHT:
        rows, columns = wanted[-2:]
        return any(
            spec.shape in ((-(-columns * b // width), rows), (columns, -(-rows * b // width)))
            for b in bits
        )
    return spec.shape[:-1] == wanted[:-1] and any(
        spec.shape[-1] == -(-wanted[-1] // (width // b)) for b in bits
    )


def _stated_bits(config: Mapping[str, Any] | None) -> list[int]:
    said = [(config or {}).get(key) for key in ("bits", "w_bit")]
    for group in config_groups(config or {}):
        weights = group.get("weights")
        said.append(weights.get("num_bits") if isinstance(weights, Mapping) else None)
    return [bits for bits in said if type(bits) is int and 0 < bits <= 8]


def config_groups(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The groups of a compressed-tensors config; an empty one for each that is no table."""
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        yield group if isinstance(group, Mapping) else {}
