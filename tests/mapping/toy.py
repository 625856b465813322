"""Small configs of the two main families, for laws over random geometries."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

SIZES: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 12, "moe_intermediate_size": 4, "vocab_size": 24,
    "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 4, "kv_lora_rank": 4,
    "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4, "index_n_heads": 2,
    "index_head_dim": 4, "n_shared_experts": 1, "num_experts_per_tok": 1, "dtype": "bfloat16",
    "moe_layer_freq": 1, "tie_word_embeddings": False, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "rope_theta": 10000, "hidden_act": "silu", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
    "attention_bias": False,
}  # fmt: skip


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Layers 1-6, depths 0-3, experts 1-8, a dense prefix, an indexer pattern."""
    layers = draw(st.integers(1, 6))
    depths = draw(st.integers(0, 3))
    # Megatron builds MTP from the spec of the last layer: with depths, that one is MoE.
    dense = draw(st.integers(0, layers - 1 if depths else layers))
    config = {
        **SIZES,
        "model_type": draw(st.sampled_from(["glm_moe_dsa", "deepseek_v3"])),
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": depths,
        "n_routed_experts": draw(st.integers(1, 8)),
        "first_k_dense_replace": dense,
    }
    if config["model_type"] == "glm_moe_dsa":
        config["index_topk"] = 4
        kind = draw(st.sampled_from(["all", "pattern", "list"]))
        if kind == "pattern":
            config["index_topk_freq"] = draw(st.integers(1, 4))
            config["index_skip_topk_offset"] = draw(st.integers(1, 3))
        elif kind == "list":
            # Megatron knows only patterns; published configs spell them out as a list too.
            every = draw(st.integers(1, 4))
            config |= {"index_topk_freq": every, "index_skip_topk_offset": 1}
            config["indexer_types"] = ["shared" if i % every else "full" for i in range(layers)]
    return config


def config(model_type: str = "glm_moe_dsa", **changes: Any) -> dict[str, Any]:
    """One fixed config: three layers, one dense, one depth, four experts."""
    base = {
        **SIZES, "model_type": model_type, "num_hidden_layers": 3, "num_nextn_predict_layers": 1,
        "n_routed_experts": 4, "first_k_dense_replace": 1,
    }  # fmt: skip
    if model_type == "glm_moe_dsa":
        base.update(index_topk=4, index_topk_freq=2, index_skip_topk_offset=2)
    return {**base, **changes}
