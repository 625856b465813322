"""What codes need beside their scale, and which shapes that may have: shapes, zero points, maps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Set
from typing import Any, NamedTuple

from mtpconv.audit.codes import finding
from mtpconv.audit.companions import (
    BLOCKS,
    PACKED,
    QUANT_STATES,
    QWEIGHT,
    beside,
    companions,
    config_groups,
    form_of,
    full_name,
    is_bitsandbytes,
    stored_as,
    stored_dtype,
)
from mtpconv.audit.finding import Finding
from mtpconv.audit.names import namesake
from mtpconv.audit.subject import Subject
from mtpconv.tensors import DTYPE_BITS, Region, Shape, TensorSpec

#: A part that so many of four weights of a kind have belongs to the fourth, too.
_MOST = 3
_INPUT_SCALES = frozenset(("input_scale", "input_global_scale"))
#: Values that share a scale in bitsandbytes. Source: its functional.quantize_4bit.
_BNB_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


class _Kind(NamedTuple):
    """What quantised weights that are alike share."""

    module: str
    form: str | None
    dtype: str | None


def part_findings(
    subject: Subject,
    config: Mapping[str, Any] | None,
    codes: Set[str],
    regions: Mapping[str, Region],
    said: Collection[str | None],
) -> Iterator[Finding]:
    """Parts of quantised weights that are missing or misshapen; `said` are names reported already.

    Some parts a format always has; others a weight has if weights of its kind have them.
    """
    config = config or {}
    tensors, known = subject.tensors, subject.tensors.keys() | subject.unread | subject.ghosts
    beside_each = companions(known)
    there = {n: beside_each.get(n, set()) for n in sorted(codes)}
    kinds = {n: _kind(subject, n) for n in there}
    counted = _counted(kinds, there)
    inputs = _scales_inputs(config)
    reported = set(said)
    for name, parts in there.items():
        count, having = counted[kinds[name]]
        usual = [p for p in having if p not in parts and having[p] * 4 >= count * _MOST]
        required = _required(tensors, config, name, kinds[name], parts)
        if inputs and kinds[name].form in ("", PACKED) and not parts & _INPUT_SCALES:
            required.append("input_scale" if kinds[name].form == "" else "input_global_scale")
        for part in dict.fromkeys((*required, *usual)):
            full = full_name(name, part)
            if full not in reported:
                reported.add(full)
                stored = stored_as(known, name) or name
                yield finding(
                    "missing_tensor", "error",
                    f"{full}: {stored} is there and cannot be read without it",
                    tensor=full, region=regions.get(stored),
                )  # fmt: skip
        yield from _shapes(subject, name, kinds[name].form, regions)


def _required(
    tensors: Mapping[str, TensorSpec],
    config: Mapping[str, Any],
    name: str,
    kind: _Kind,
    there: Set[str],
) -> list[str]:
    """What codes of a form always need, and have not."""
    if kind.form == PACKED and kind.dtype == "I32" and "_shape" not in there:
        return ["_shape"]
    if kind.form == QWEIGHT and "qzeros" not in there and _has_zeros(config):
        return ["qzeros"]
    # With eight bits, SCB is the scale and all.
    if kind.form == "" and kind.dtype == "U8" and is_bitsandbytes(tensors, name, config):
        return [*_of_bitsandbytes(tensors, name, config, there)]
    return []


def _has_zeros(config: Mapping[str, Any]) -> bool:
    """Whether GPTQ or AWQ store zero points; Marlin's layout and symmetric AWQ do not."""
    if config.get("quant_method") == "awq":
        return config.get("zero_point") is not False
    marlin = config.get("checkpoint_format") == "marlin" or config.get("is_marlin_format")
    return config.get("quant_method") == "gptq" and not marlin


def _of_bitsandbytes(
    tensors: Mapping[str, TensorSpec], name: str, config: Mapping[str, Any], there: Set[str]
) -> Iterator[str]:
    if ".quant_map" not in there:
        yield ".quant_map"
    if not there & {*QUANT_STATES}:
        yield QUANT_STATES[config.get("bnb_4bit_quant_type") == "fp4"]
    absmax = tensors.get(name + ".absmax")
    if absmax is not None and absmax.dtype == "U8":  # quantised itself
        yield from (s for s in (".nested_absmax", ".nested_quant_map") if s not in there)


def _scales_inputs(config: Mapping[str, Any]) -> bool:
    """Whether all quantised weights come with a scale for their input, says the config."""
    if config.get("quant_method") == "modelopt":
        return config.get("quant_algo") in ("NVFP4", "FP8")
    inputs = [group.get("input_activations") for group in config_groups(config)]
    # "local": scales of blocks are made at run time, the scale over them is stored.
    return bool(inputs) and all(
        isinstance(i, Mapping) and i.get("dynamic", False) in (False, "local") for i in inputs
    )


def _counted(
    kinds: Mapping[str, _Kind], there: Mapping[str, Set[str]]
) -> Mapping[_Kind, tuple[int, Counter[str]]]:
    """How many weights there are of a kind, and how many of them have each part."""
    found: dict[_Kind, tuple[int, Counter[str]]] = {}
    for name, parts in there.items():
        count, having = found.get(kinds[name], (0, Counter()))
        having.update(parts)
        found[kinds[name]] = count + 1, having
    return found


def _kind(subject: Subject, name: str) -> _Kind:
    """Weights of the same module, form and dtype are alike, whatever layer and expert."""
    return _Kind(
        namesake(name), form_of(subject.tensors, name), stored_dtype(subject.tensors, name)
    )


def _shapes(
    subject: Subject, name: str, form: str | None, regions: Mapping[str, Region]
) -> Iterator[Finding]:
    wanted = subject.expected.tensors.get(name) if subject.expected is not None else None
    allowed: dict[str, list[Shape]] = {}
    if form == BLOCKS:
        allowed[name + "_scales"] = [subject.tensors[name + BLOCKS].shape[:-1]]
    elif wanted is not None and form == PACKED:
        allowed[name + "_shape"] = [(len(wanted.shape),)]
    elif wanted is not None and form == QWEIGHT and len(wanted.shape) == 2:
        allowed.update(_of_groups(subject, name, wanted.shape))
    elif wanted is not None and name + ".absmax" in subject.tensors:
        allowed[name + ".absmax"] = [(-(-wanted.elements // block),) for block in _BNB_BLOCKS]
    for part, shapes in allowed.items():
        spec = subject.tensors.get(part)
        if spec is not None and spec.shape not in shapes:
            yield finding(
                "shape_mismatch", "error",
                f"{part}: is {list(spec.shape)}, its weight needs "
                f"{' or '.join(str(list(shape)) for shape in shapes[:2])}",
                tensor=part, region=regions[part], before=list(shapes[0]), after=list(spec.shape),
            )  # fmt: skip


def _of_groups(subject: Subject, name: str, shape: Shape) -> Iterator[tuple[str, list[Shape]]]:
    """GPTQ and AWQ: a row of scales and of packed zero points for each group of inputs."""
    rows, columns = shape
    yield beside(name, "g_idx"), [(columns,)]
    scales = subject.tensors.get(beside(name, "scales"))
    if scales is None:
        return
    groups = min(max(scales.shape[0], 1), columns) if scales.shape else 1
    yield beside(name, "scales"), [(groups, rows)]
    zeros = subject.tensors.get(beside(name, "qzeros"))
    if zeros is not None:
        width = DTYPE_BITS[zeros.dtype]
        yield beside(name, "qzeros"), [(groups, -(-rows * bits // width)) for bits in (4, 8, 3, 2)]
