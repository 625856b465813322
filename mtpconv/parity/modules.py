"""The modules that megatron-core lacks on a CPU, and the layer specs made with them.

Everything with weights is Megatron's own class. Only the attention arithmetic, which has no
weights, and a plain linear in place of Transformer Engine's are ours: the local
`DotProductAttention` needs a CUDA random state and takes no `k_channels`.
"""

from __future__ import annotations

import functools
from typing import Any

from mtpconv.parity.delta_nets import local_delta_net
from mtpconv.parity.runtime import megatron_version
from mtpconv.parity.settings import LayerKind, Settings

Dialect = str  # "te" | "local": which norm names the sharded keys use


@functools.cache
def plain_attention() -> type:
    """A causal softmax attention without weights, for any number of query groups, with windows.

    Shape: query [s, b, heads, d], key and value [s, b, groups, d]; result [s, b, heads * d].
    """
    import torch
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.utils import is_layer_window_attention

    class PlainAttention(MegatronModule):
        def __init__(
            self,
            config: Any,
            layer_number: int,
            softmax_scale: float | None = None,
            **_unused: Any,
        ) -> None:
            super().__init__(config=config)
            self.softmax_scale = softmax_scale
            self.slides = (config.window_size, config.window_attn_skip_freq, layer_number)

        def forward(
            self, query: Any, key: Any, value: Any, attention_mask: Any, **_unused: Any
        ) -> Any:
            scale = self.softmax_scale or query.shape[-1] ** -0.5
            repeats = query.shape[2] // key.shape[2]
            key = key.repeat_interleave(repeats, dim=2)
            value = value.repeat_interleave(repeats, dim=2)
            scores = torch.einsum("sbhd,tbhd->bhst", query, key).float() * scale
            scores = scores.masked_fill(attention_mask, float("-inf"))
            # Asked here and not above: Megatron's rule has no answer for an MTP depth.
            if is_layer_window_attention(*self.slides):
                back = self.config.window_size[0]
                far = torch.ones_like(scores[0, 0], dtype=torch.bool).tril(-back - 1)
                scores = scores.masked_fill(far, float("-inf"))
            weights = scores.softmax(-1).to(value.dtype)
            return torch.einsum("bhst,tbhd->sbhd", weights, value).flatten(2)

    return PlainAttention


@functools.cache
def duplicated_linear() -> type:
    """A linear held whole on every rank, with the call convention of TELinear.

    Shape: weight [out, in]; stored whole under `<prefix>weight`.
    """
    import torch
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    class DuplicatedLinear(torch.nn.Linear):
        def __init__(
            self, input_size: int, output_size: int, *, config: Any, **_unused: Any
        ) -> None:
            super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)

        def forward(self, x: Any) -> Any:
            return super().forward(x), None

        def get_extra_state(self) -> None:
            """Nothing, under the key that TELinear has for it."""

        def set_extra_state(self, state: Any) -> None:
            """Nothing to set."""

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), **_unused: Any
        ) -> Any:
            state = self.state_dict(prefix="", keep_vars=True)
            return make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets)

    return DuplicatedLinear


def key_map(settings: Settings, kind: LayerKind, dialect: Dialect) -> dict[str, str]:
    """How the norms of a locally built layer are called in a checkpoint of this dialect.

    Source: facts/megatron.md section 2; the `te` names are those of production checkpoints.
    """
    fused_fc1 = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    if not settings.mla:
        first = "in_proj" if kind.is_linear else "linear_qkv"
        fused_first = {"input_layernorm.": f"self_attention.{first}.layer_norm_"}
        return fused_first | (fused_fc1 if dialect == "local" or not kind.is_moe else {})
    if dialect == "local":
        return {}
    latent = {
        f"self_attention.{x}_layernorm.": f"self_attention.linear_{x}_up_proj.layer_norm_"
        for x in ("q", "kv")
    }
    return ({} if settings.dsa else latent) | ({} if kind.is_moe else fused_fc1)


def local_layer(settings: Settings, kind: LayerKind) -> Any:
    """Spec of one decoder layer from Megatron's local modules."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(
        num_experts=settings.transformer["num_moe_experts"] if kind.is_moe else None,
        moe_grouped_gemm=False,
        qk_layernorm=settings.transformer["qk_layernorm"],
        multi_latent_attention=settings.mla,
        normalization="RMSNorm",
    )
    attention = spec.submodules.self_attention
    if kind.is_linear:
        spec.submodules.self_attention = local_delta_net()
        spec.submodules.sharded_state_dict_keys_map = key_map(settings, kind, "local")
    elif settings.dsa:
        spec.submodules.self_attention = _sparse_attention(attention.submodules)
    else:
        attention.submodules.core_attention = plain_attention()
    return spec


def _sparse_attention(mla: Any) -> Any:
    """The attention of a DSA layer: Megatron's own classes, which no getter gives locally."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
        AbsorbedMLASelfAttention,
        AbsorbedMLASelfAttentionSubmodules,
    )
    from megatron.core.transformer.experimental_attention_variant.dsa import (
        DSAIndexer,
        DSAIndexerSubmodules,
        DSAttention,
        DSAttentionSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    linear = duplicated_linear()
    indexer = DSAIndexerSubmodules(
        linear_wq_b=linear,
        linear_wk=linear,
        k_norm=WrappedTorchNorm,
        linear_weights_proj=linear,
    )
    core = ModuleSpec(
        module=DSAttention,
        submodules=DSAttentionSubmodules(indexer=ModuleSpec(module=DSAIndexer, submodules=indexer)),
    )
    return ModuleSpec(
        module=AbsorbedMLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=AbsorbedMLASelfAttentionSubmodules(
            linear_q_proj=mla.linear_q_proj,
            linear_q_down_proj=mla.linear_q_down_proj,
            linear_q_up_proj=mla.linear_q_up_proj,
            linear_kv_down_proj=mla.linear_kv_down_proj,
            linear_kv_up_proj=mla.linear_kv_up_proj,
            core_attention=core,
            linear_proj=mla.linear_proj,
            q_layernorm=mla.q_layernorm,
            kv_layernorm=mla.kv_layernorm,
        ),
    )


def block_specs(settings: Settings, config: Any, te: bool) -> tuple[Any, Any]:
    """Specs of the decoder block and of the MTP block (None without depths)."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    depths = settings.geometry.depths
    if te:
        if settings.dsa or settings.delta_nets:
            from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
                get_transformer_block_with_experimental_attention_variant_spec as variant_block,
            )

            decoder = variant_block(config)
        else:
            decoder = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
        last = decoder
    else:
        decoder = TransformerBlockSubmodules(
            layer_specs=[local_layer(settings, kind) for kind in settings.layers],
            layer_norm=WrappedTorchNorm,
        )
        last = local_layer(settings, settings.depth)
    if not depths:
        return decoder, None
    return decoder, get_gpt_mtp_block_spec(config, last, use_transformer_engine=te)


def mtp_attribute() -> str:
    """Attribute of an MTP layer that holds its transformer layer; renamed in 0.17."""
    return "mtp_model_layer" if megatron_version() >= (0, 17) else "transformer_layer"
