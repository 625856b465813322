"""Which tensors of a checkpoint are block FP8, told from headers and config; others are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mtpconv.errors import RefusedError, UnsupportedError
from mtpconv.geometry import text_config
from mtpconv.ranges import compress
from mtpconv.store.fp8 import SCALE_DTYPES, Grid
from mtpconv.store.safetensors_header import plain
from mtpconv.tensors import TensorSpec

SCALE = "_scale_inv"
#: What other formats store beside a weight or for it, the most telling first, and the format's
#: name. Source: as `mtpconv.audit.companions`.
_OTHERS = {
    ".quant_state.bitsandbytes__nf4": "bitsandbytes NF4",
    ".quant_state.bitsandbytes__fp4": "bitsandbytes FP4", ".weight.absmax": "bitsandbytes",
    ".SCB": "bitsandbytes INT8", ".g_idx": "GPTQ", ".qweight": "GPTQ or AWQ",
    "_proj_blocks": "MXFP4 in blocks", "weight_global_scale": "compressed-tensors NVFP4",
    "weight_packed": "compressed-tensors, packed", "weight_scale_2": "modelopt NVFP4",
    "weight_zero_point": "compressed-tensors", "weight_g_idx": "compressed-tensors GPTQ",
    ".scale": "scales as DeepSeek-V4 has them, FP8 or MXFP4",
    "input_scale": "static activation scales", "weight_scale": "a scale per tensor or channel",
}  # fmt: skip
_CODES = ("I8", "U8", "F4", "F8_E4M3")
_CONFIG_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class Quantised:
    """An FP8 weight, its scale tensor and how they belong together."""

    name: str
    scale: str
    grid: Grid
    scale_dtype: str
    #: releases of the UE8M0 format hold powers of two only, in whatever dtype
    power_of_two: bool = False

    @property
    def values(self) -> TensorSpec:
        """What Megatron gets."""
        return TensorSpec("BF16", self.grid.shape)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """What the release holds: codes and scales."""
        return {
            self.name: TensorSpec("F8_E4M3", self.grid.shape),
            self.scale: TensorSpec(self.scale_dtype, self.grid.scale_shape),
        }


def find_fp8(
    tensors: Mapping[str, TensorSpec],
    config: Mapping[str, Any],
    where: str,
    left_alone: Callable[[str], bool] = lambda _: False,
    *,
    quant_config: Mapping[str, Any] | None = None,
) -> dict[str, Quantised]:
    """The block FP8 weights by name; empty for a checkpoint that is not quantised.

    `left_alone` says which weights travel as they are, whatever they hold. `where` names the
    checkpoint in messages. `quant_config` is what is said beside a config that says nothing.

    Raises: UnsupportedError for other quantised formats, by name; RefusedError for weights
    without scales, scales without weights, and a config that fits neither.
    """
    stated = quantisation(config) or quant_config or {}
    refuse_others(tensors, stated, where)
    if stated.get("quant_method") not in (None, "fp8"):
        raise UnsupportedError(
            f"{where}: is quantised ({_stated_form(stated)}); "
            "convert the BF16 release, inventory and audit work on this one"
        )
    block = _block(stated, where)
    power_of_two = stated.get("scale_fmt") == "ue8m0"
    found: dict[str, Quantised] = {}
    for name, spec in tensors.items():
        if not spec.dtype.startswith("F8_") or name.endswith(SCALE):
            continue
        scale = tensors.get(name + SCALE)
        if scale is None:
            raise RefusedError(
                f"{where}: {plain(name)} is {spec.dtype} and its scale {plain(name + SCALE)} is "
                "missing; without it the codes say nothing, fetch the shard that holds it"
            )
        if spec.dtype != "F8_E4M3" or scale.dtype not in SCALE_DTYPES:
            raise UnsupportedError(
                f"{where}: {plain(name)} is {spec.dtype} with scales of {scale.dtype}; convert "
                "the BF16 release, inventory and audit work on this one"
            )
        grid = Grid(spec.shape, block)
        if len(spec.shape) < 2 or scale.shape != grid.scale_shape:
            wanted = list(grid.scale_shape) if len(spec.shape) > 1 else "two axes"
            raise RefusedError(
                f"{where}: M17 {plain(name + SCALE)} has shape {list(scale.shape)}; "
                f"{plain(name)} is {list(spec.shape)}, whose blocks of {block[0]}x{block[1]} "
                f"need {wanted}"
            )
        found[name] = Quantised(name, name + SCALE, grid, scale.dtype, power_of_two)
    stray = [n for n in tensors if n.endswith(SCALE) and n.removesuffix(SCALE) not in found]
    if stray:
        raise RefusedError(
            f"{where}: {len(stray)} scales have no FP8 weight: {compress(map(plain, stray), 4)}; "
            "fetch the weights they belong to"
        )
    if stated.get("quant_method") == "fp8" and not found:
        raise RefusedError(
            f"{where}: quantization_config in config.json says fp8 and no tensor is; remove it "
            "or restore the quantised weights"
        )
    return {n: q for n, q in found.items() if not left_alone(n)}


def with_scales(
    tensors: Mapping[str, TensorSpec], quantised: Mapping[str, Quantised]
) -> dict[str, TensorSpec]:
    """The inventory of a release that keeps these weights in FP8: codes, scales and the rest."""
    found: dict[str, TensorSpec] = {}
    for name, spec in tensors.items():
        found.update(quantised[name].specs if name in quantised else {name: spec})
    return found


def quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the config says about quantisation, at whatever level; empty if nothing."""
    for part in (config, text_config(config)):
        for key in _CONFIG_KEYS:
            value = part.get(key)
            if isinstance(value, Mapping):
                return value
    return {}


def without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model in BF16."""
    return {
        k: without_quantisation(v) if isinstance(v, Mapping) else v
        for k, v in config.items()
        if k not in _CONFIG_KEYS
    }


def refuse_others(tensors: Mapping[str, TensorSpec], stated: Mapping[str, Any], where: str) -> None:
    """Stop at codes in a form that is not read here, told from names.

    `stated` is what the config says, for the message. Raises: UnsupportedError.
    """
    few = [n for n in tensors if n.endswith(tuple(_OTHERS))]
    for suffix, form in _OTHERS.items():
        names = [n for n in few if n.endswith(suffix)]
        if suffix == ".scale":  # other modules may have a parameter of that name
            weights = {n: tensors.get(n.removesuffix("scale") + "weight") for n in names}
            names = [n for n, w in weights.items() if w is not None and w.dtype in _CODES]
        if names:
            name = f"{form}, {_stated_form(stated)}" if stated.get("quant_method") else form
            raise UnsupportedError(
                f"{where}: is quantised ({name}; {len(names)} tensors like {plain(names[0])}); "
                "convert the BF16 release, inventory and audit work on this one"
            )


def _stated_form(stated: Mapping[str, Any]) -> str:
    """The format in the words of the config."""
    more = stated.get("quant_algo") or stated.get("format")
    said = f"quant_method {stated.get('quant_method')}" + (f" {more}" if more else "")
    return plain(said)


def _block(stated: Mapping[str, Any], where: str) -> tuple[int, int]:
    block = stated.get("weight_block_size") or [128, 128]
    if isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block):
        return block[0], block[1]
    said = f"weight_block_size {plain(repr(block))} in config.json"
    raise RefusedError(f"{where}: {said} is no pair of sizes")
