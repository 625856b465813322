"""How families spell the glue of an MTP depth on disk, and in which order they join its halves."""

from __future__ import annotations

from dataclasses import dataclass

from mtpconv.geometry import Geometry


@dataclass(frozen=True)
class Glue:
    """HF names of the four glue tensors of a depth, under a prefix.

    The prefix may hold `{layer}`, which counts on from the trunk, and `{depth}`, which counts
    from 0. `hidden_first`: eh_proj takes [hidden, embedding] instead of [embedding, hidden].
    """

    prefix: str = "model.layers.{layer}."
    enorm: str = "enorm"
    hnorm: str = "hnorm"
    eh_proj: str = "eh_proj"
    final_norm: str = "shared_head.norm"
    hidden_first: bool = False

    def at(self, geometry: Geometry, depth: int) -> str:
        """The prefix of one depth."""
        return self.prefix.format(layer=geometry.layers + depth, depth=depth)


#: Families that differ from the DeepSeek spelling.
#: Source: facts/families.md section 1.
_OTHERS = {
    "mimo": Glue(
        "model.mtp_layers.{depth}.",
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "final_layernorm",
        hidden_first=True,
    ),
}


def glue_of(geometry: Geometry) -> Glue:
    """The glue of a family."""
    return _OTHERS.get(geometry.model_type, Glue())
