"""What Megatron itself calls HF modules inside an attention, as slime has them."""

from __future__ import annotations

import pytest

from mtpconv.mapping.layouts import addresses, as_stored, layout_of
from mtpconv.mapping.plan import make_plan
from mtpconv.mapping.table_reader import find_table
from mtpconv.parity import runtime

pytestmark = pytest.mark.megatron

SIZES = {
    "hidden_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_conv_kernel_dim": 4,
}  # fmt: skip
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
LAYER = "decoder.layers.0.self_attention."


def test_the_layout_has_megatrons_own_keys_and_shapes(megatron_cpu: None) -> None:
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import (
        Qwen3NextGatedDeltaNet,
        Qwen3NextRMSNorm,
    )

    class Attention(MegatronModule):
        """As slime_plugins/models/hf_attention.py and qwen3_next.py put it together."""

        def __init__(self) -> None:
            super().__init__(
                config=TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
            )
            self.linear_attn = Qwen3NextGatedDeltaNet(Qwen3NextConfig(**SIZES, **HEADS), 0)
            self.input_layernorm = Qwen3NextRMSNorm(16)

    with runtime.quiet():
        state = Attention().sharded_state_dict(prefix=LAYER)
    written = {value.key: tuple(value.global_shape) for value in state.values()}
    raw = SIZES | HEADS | EXPERTS | {
        "model_type": "qwen3_next", "num_hidden_layers": 4, "vocab_size": 32,
        "full_attention_interval": 4, "shared_expert_intermediate_size": 8,
        "intermediate_size": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    layout = layout_of(["slime_linear_attention"])
    plan = as_stored(make_plan(raw, find_table("qwen3_next")), layout)
    read = {
        spot.key: step.shape
        for spot, step in zip(addresses(plan, layout), plan.steps, strict=True)
        if spot.key.startswith(LAYER)
    }
    assert read == written
