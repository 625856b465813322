"""Where a tensor belongs, read off its name alone: root, trunk layer or MTP depth.

Works for model types without a table and for sharded keys of torch_dist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mtpconv.tensors import ROOT, Region

#: Modules around a decoder that do not change what a layer number means. Vision towers have
#: `layers.N` too and must not match.
_AROUND = (
    r"(?:(?:model|language_model|text_model|llm|transformer|backbone|decoder|module|_orig_mod)\.)*"
)
#: A layer number; longer ones are made up to exhaust something.
_NUMBER = "[0-9]{1,9}"
_LAYER = re.compile(rf"(?P<prefix>{_AROUND}layers\.)(?P<layer>{_NUMBER})\.")
_STACKED = re.compile(r"decoder\.layers\.(?![0-9])")
#: Source: facts on MTP families, section 1: Qwen and Nemotron `mtp.`, MiMo `model.mtp_layers.`,
#: MiMo-V2 and LongCat `model.mtp.`, Ernie `model.mtp_block.` and its three glue lists.
_MTP = re.compile(
    rf"(?P<prefix>{_AROUND}(?:mtp|mtp_layers|mtp_block|mtp_emb_norm|mtp_hidden_norm|"
    rf"mtp_linear_proj)\.)(?:layers\.)?(?:(?P<depth>{_NUMBER})\.)?"
)

#: Prefix of the MTP module by start of model_type, where it is not `model.layers.N.`.
_OWN_PREFIX: Mapping[str, str] = {
    "qwen3": "mtp.",
    "exaone": "mtp.",
    "nemotron": "mtp.",
    "deepseek_v4": "mtp.",
    "mimo_v2": "model.mtp.",
    "mimo": "model.mtp_layers.",
    "longcat": "model.mtp.",
    "ernie": "model.mtp_block.",
}

#: Families that ship MTP although no config field says so.
#: Source: facts on MTP families, section 1.
PROMISED_BY_FAMILY = ("qwen3_next", "longcat_flash", "mimo_v2_flash")


@dataclass(frozen=True, slots=True)
class Naming:
    """How names map to regions for one geometry."""

    #: num_hidden_layers; None if the config does not say
    layers: int | None = None
    #: physical blocks per depth (Nemotron-H flattens its MTP pattern into `mtp.layers.N`)
    blocks_per_depth: int = 1

    def region(self, name: str) -> Region:
        """The region of an HF name or a sharded key."""
        mtp = _MTP.match(name)
        if mtp:
            return Region("mtp", int(mtp["depth"] or 0) // self.blocks_per_depth)
        layer = _LAYER.match(name)
        if layer:
            number = int(layer["layer"])
            if self.layers is not None and number >= self.layers:
                return Region("mtp", number - self.layers)
            return Region("trunk", number)
        # Stacked decoder keys hold every trunk layer at once.
        return Region("trunk", 0) if _STACKED.match(name) else ROOT

    def regions(self, names: Iterable[str]) -> dict[str, Region]:
        """The region of each name."""
        return {name: self.region(name) for name in names}


def mtp_prefix(name: str) -> str:
    """What all names of the MTP depth of this tensor start with."""
    found = _MTP.match(name)
    if found:
        return found["prefix"]
    layer = _LAYER.match(name)
    return f"{layer['prefix']}{layer['layer']}." if layer else name


def layer_number(name: str) -> int | None:
    """The layer number in a name that has one, MTP layers in the DeepSeek layout included."""
    layer = None if _MTP.match(name) else _LAYER.match(name)
    return int(layer["layer"]) if layer else None


def layer_prefix(names: Iterable[str]) -> str:
    """What stands before the layer number in this checkpoint."""
    for name in names:
        layer = None if _MTP.match(name) else _LAYER.match(name)
        if layer:
            return layer["prefix"]
    return "model.layers."


def expected_mtp_prefix(model_type: str | None, names: Iterable[str], layer: int | None) -> str:
    """The prefix under which a family keeps its MTP module."""
    for start, prefix in _OWN_PREFIX.items():
        if model_type is not None and model_type.startswith(start):
            return prefix
    return f"{layer_prefix(names)}{layer}." if layer is not None else "mtp."


def tail(name: str) -> str:
    """A name without the part that says which layer or depth it is in."""
    for pattern in (_MTP, _LAYER):
        found = pattern.match(name)
        if found:
            return name[found.end() :]
    return name


#: DOTALL: `.*` that stops at a newline makes every `experts.` of a long name a start over.
_EXPERT = re.compile(r"(?P<before>.*\bexperts\.)(?P<expert>[0-9]{1,9})(?P<after>\..*)", re.DOTALL)


def split_expert(name: str) -> tuple[str, int, str] | None:
    """(before, expert, after) of the name of one expert's tensor, else None."""
    found = _EXPERT.fullmatch(name)
    return (found["before"], int(found["expert"]), found["after"]) if found else None


def namesake(name: str) -> str:
    """What the tensors of one module share, whatever layer and expert they are in."""
    module = tail(name)
    expert = split_expert(module)
    return expert[0] + expert[2] if expert else module


#: Heads that a depth has of its own; elsewhere the head of a depth is a copy of lm_head.
#: Source: facts on MTP families, section 1, Step-3.5; an exporter that knows one head only
#: writes lm_head over them (there, section 6, number 10).
_OWN_HEADS = ("transformer.shared_head.output.weight",)


def is_own_head(name: str) -> bool:
    """Whether an MTP head is no copy of lm_head in a trained model."""
    return tail(name) in _OWN_HEADS
