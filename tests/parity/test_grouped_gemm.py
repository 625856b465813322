"""Megatron's own GroupedMLP: how legacy checkpoints and torch_dist hold its experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mtpconv.mapping.ops import Concat, Copy
from mtpconv.mapping.stored import Transposed
from mtpconv.parity import runtime

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.megatron

EXPERTS, HIDDEN, FFN = 3, 8, 4


def grouped_mlp(monkeypatch: pytest.MonkeyPatch) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe import experts
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not hasattr(experts, "GroupedMLP"):
        pytest.skip("this megatron-core has no GroupedMLP: nothing writes its tensors any more")
    monkeypatch.setattr(experts.gg, "assert_grouped_gemm_is_available", lambda: None)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, num_moe_experts=EXPERTS,
        moe_ffn_hidden_size=FFN, add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, use_cpu_initialization=True,
        moe_grouped_gemm=True, bf16=True, params_dtype=torch.bfloat16,
    )  # fmt: skip
    groups = ProcessGroupCollection.use_mpu_process_groups(["ep", "expt_tp", "expt_dp"])
    return experts.GroupedMLP(EXPERTS, config, groups)


def test_packed_experts_are_torch_dists_transposed(
    megatron_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.dist_checkpointing.mapping import apply_factories

    with runtime.quiet():
        module = grouped_mlp(monkeypatch)
        state = module.sharded_state_dict("mlp.experts.")
        apply_factories(state)
    gate, up = (part.data for part in state["mlp.experts.weight1"])
    down = state["mlp.experts.weight2"]
    assert {gate.shape, up.shape} == {(EXPERTS, FFN, HIDDEN)}
    assert down.key == "mlp.experts.experts.linear_fc2.weight"
    held = {n: t.detach().view(torch.int16).numpy() for n, t in module.state_dict().items()}
    assert (held["weight1"].shape, held["weight2"].shape) == (
        (HIDDEN, 2 * FFN * EXPERTS), (FFN * EXPERTS, HIDDEN),
    )  # fmt: skip
    first = held["weight1"].reshape(EXPERTS, HIDDEN, 2 * FFN)
    second = held["weight2"].reshape(EXPERTS, FFN, HIDDEN)
    for expert in range(EXPERTS):
        parts = [t[expert].view(torch.int16).numpy() for t in (gate, up)]
        np.testing.assert_array_equal(Transposed(Concat()).forward(parts), first[expert])
        part = down.data[expert].view(torch.int16).numpy()
        np.testing.assert_array_equal(Transposed(Copy()).forward([part]), second[expert])
