"""A config.json as what megatron-core is built from.

The model is what `mtpconv args` says it is, so parity also shows that those arguments are
right; here is only what has to do with running it without a trainer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mtpconv.errors import UnsupportedError
from mtpconv.geometry import Geometry
from mtpconv.megatron_args import megatron_args, transformer_fields
from mtpconv.parity.families import FAMILIES, NOT_RUN, Family, family_of

#: First megatron-core release that wires up sparse attention with its rope and ReLU switches.
#: Source: facts measured 2026-11-29 on 0.16.1 and 0.19.2.
DSA_NEEDS = (0, 19)

#: transformers builds q_a_layernorm and kv_a_layernorm without passing `rms_norm_eps`.
#: Source: transformers 5.24, modeling_deepseek_v3.py and modeling_glm_moe_dsa.py.
LATENT_NORM_EPS = 1e-6

#: Fields that say how a model runs, not what it is: no dropout, no fused kernels (they exist for
#: CUDA only, and a reference needs none), no loss that balances experts.
RUN: dict[str, Any] = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "attention_softmax_in_fp32": True,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_token_dispatcher_type": "allgather",
}

#: The Hadamard rotation of indexer queries and keys changes no score, and its kernel needs CUDA.
NO_ROTATION = {"dsa_indexer_rotate_activation": False}


@dataclass(frozen=True)
class LayerKind:
    """Whether a layer's MLP is a mixture of experts, and its attention a gated delta net."""

    is_moe: bool = False
    is_linear: bool = False


@dataclass
class Settings:
    """How to build one model in megatron-core.

    `transformer` are fields of its TransformerConfig, the rest are arguments of GPTModel and
    choices of modules. `notes` are remarks the parity report must repeat.
    """

    geometry: Geometry
    transformer: dict[str, Any] = field(default_factory=dict)
    mla: bool = False
    dsa: bool = False
    rotary_percent: float = 1.0
    rotary_base: float = 10000.0
    llama3_factor: float | None = None
    latent_norm_eps: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def family(self) -> Family:
        """The family's names."""
        return family_of(self.geometry)

    @property
    def layers(self) -> list[LayerKind]:
        """The kind of each trunk layer."""
        return [self._kind(layer) for layer in range(self.geometry.layers)]

    @property
    def depth(self) -> LayerKind:
        """The kind of the blocks of the MTP depths.

        Raises: UnsupportedError if depths differ: Megatron builds all of them from one spec.
        """
        g = self.geometry
        kinds = {self._kind(g.layers + depth) for depth in range(g.depths)}
        if len(kinds) > 1:
            raise UnsupportedError("MTP depths with different MLPs: Megatron builds them alike")
        return kinds.pop() if kinds else LayerKind()

    def _kind(self, layer: int) -> LayerKind:
        fact = self.geometry.fact
        return LayerKind(fact("is_moe", layer), self.delta_nets and fact("is_linear", layer))

    @property
    def delta_nets(self) -> bool:
        """Whether some layers have a gated delta net in place of attention."""
        return self.transformer.get("experimental_attention_variant") == "gated_delta_net"

    @property
    def zero_centred(self) -> bool:
        """Whether norms multiply by 1 + gamma."""
        return bool(self.transformer.get("layernorm_zero_centered_gamma"))

    @property
    def tied(self) -> bool:
        """Whether the LM head is the embedding."""
        return self.geometry.fact("is_tied", 0)


def read_settings(geometry: Geometry) -> Settings:
    """The Megatron settings of a model.

    Raises: UnsupportedError for a family that parity does not run, or what Megatron cannot be
    told; RefusedError if the config lacks a field.
    """
    name = geometry.model_type
    why = NOT_RUN.get(name)
    if why is not None and name not in FAMILIES:
        raise UnsupportedError(f"parity does not run {name}: {why}")
    if why is not None and geometry.depths:
        raise UnsupportedError(
            f"parity does not run {name} with MTP: {why}, of a checkpoint made with --drop-mtp"
        )
    if name not in FAMILIES:
        raise UnsupportedError(
            f"parity does not know model_type {name!r}; it knows {', '.join(sorted(FAMILIES))}"
        )
    args = megatron_args(geometry)
    settings = Settings(
        geometry,
        transformer_fields(args) | RUN,
        mla=bool(args["multi_latent_attention"]),
        dsa=args["experimental_attention_variant"] == "dsa",
        rotary_percent=float(args["rotary_percent"]),
        rotary_base=float(args["rotary_base"]),
        llama3_factor=float(args["rope_scaling_factor"]) if args["use_rope_scaling"] else None,
    )
    if settings.mla:
        _latent_norms(settings)
    elif settings.transformer["num_query_groups"] == 1:
        settings.notes.append("one query group: the order of groups was not exercised")
    if settings.dsa:
        settings.transformer |= NO_ROTATION
        settings.notes.append("the indexer's scores pass a ReLU on both sides")
    _group_routing(settings)
    return settings


def _latent_norms(s: Settings) -> None:
    eps = s.transformer["layernorm_epsilon"]
    s.latent_norm_eps = LATENT_NORM_EPS
    if eps != LATENT_NORM_EPS:
        s.notes.append(
            f"q_a_layernorm and kv_a_layernorm use epsilon {LATENT_NORM_EPS:g} on both sides, as "
            f"transformers does; Megatron by itself uses rms_norm_eps {eps:g}"
        )


def _group_routing(s: Settings) -> None:
    limit = s.transformer.get("moe_router_group_topk")
    if not limit:
        return
    per_group = s.transformer["moe_router_topk"] // limit
    if per_group != 2:
        s.notes.append(
            f"group routing differs by design: Megatron ranks groups by their best {per_group} "
            "experts, transformers by their best 2"
        )
