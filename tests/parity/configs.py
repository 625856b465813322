"""Small configs with every feature of their family, and sizes that tell axes apart."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

_MOE: Config = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
}
_MLA: Config = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}

DEEPSEEK_V3: Config = (
    _MOE
    | _MLA
    | {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_group": 4,
        "topk_group": 2,
        "rope_theta": 10000,
    }
)
#: All layers alike, so that Megatron can stack them.
DEEPSEEK_V3_ALIKE: Config = DEEPSEEK_V3 | {"first_k_dense_replace": 0}
DEEPSEEK_V3_TWO_DEPTHS: Config = DEEPSEEK_V3 | {"num_nextn_predict_layers": 2}
DEEPSEEK_V3_YARN: Config = DEEPSEEK_V3 | {
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
}

GLM_MOE_DSA: Config = (
    _MOE
    | _MLA
    | {
        "model_type": "glm_moe_dsa",
        "architectures": ["GlmMoeDsaForCausalLM"],
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "index_topk": 8,
        "index_head_dim": 16,
        "index_n_heads": 4,
        "rms_norm_eps": 1e-5,
    }
)
#: Layers 0 and 1 choose, layer 2 reuses the choice of layer 1, layer 3 chooses.
GLM_MOE_DSA_SHARING: Config = GLM_MOE_DSA | {
    "num_hidden_layers": 4,
    "index_topk_freq": 2,
    "index_skip_topk_offset": 2,
}

GLM4_MOE_LITE: Config = (
    _MOE
    | _MLA
    | {
        "model_type": "glm4_moe_lite",
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "rope_theta": 10000,
        "rms_norm_eps": 1e-5,
    }
)
DEEPSEEK_V32: Config = DEEPSEEK_V3 | {
    "model_type": "deepseek_v32",
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 4,
}

GLM4_MOE: Config = _MOE | {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000,
}

_DENSE: Config = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
}
LLAMA: Config = _DENSE | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
QWEN2_TIED: Config = _DENSE | {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "tie_word_embeddings": True,
}
QWEN3: Config = _DENSE | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 16,
}
QWEN3_MOE: Config = _DENSE | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
MIXTRAL: Config = _DENSE | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}

MIMO: Config = QWEN2_TIED | {
    "model_type": "mimo",
    "architectures": ["MiMoForCausalLM"],
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
}

_SIGMOID: Config = {
    "num_experts": 8,
    "num_shared_experts": 1,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_UNLIKE: Config = {
    k: v for k, v in _MOE.items() if k not in ("n_routed_experts", "n_shared_experts")
}
HY_V3: Config = (
    {k: v for k, v in _UNLIKE.items() if k != "routed_scaling_factor"}
    | _SIGMOID
    | {
        "model_type": "hy_v3",
        "architectures": ["HYV3ForCausalLM"],
        "router_scaling_factor": 2.826,
    }
)

EXAONE_MOE: Config = _UNLIKE | _SIGMOID | {
    "model_type": "exaone_moe",
    "num_hidden_layers": 4,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 16,
    "scoring_func": "sigmoid",
}  # fmt: skip
QWEN3_NEXT: Config = QWEN3_MOE | {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-6,
    "shared_expert_intermediate_size": 24,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_nextn_predict_layers": 1,
}
QWEN3_5_TEXT: Config = {
    k: v for k, v in QWEN3_NEXT.items()
    if k not in ("num_experts", "num_experts_per_tok", "shared_expert_intermediate_size",
                 "num_nextn_predict_layers")
} | {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}  # fmt: skip
QWEN3_5_MOE_TEXT: Config = {
    k: v for k, v in QWEN3_NEXT.items() if k != "num_nextn_predict_layers"
} | {"model_type": "qwen3_5_moe_text", "mtp_num_hidden_layers": 1}  # fmt: skip
#: As published, around the text model.
QWEN3_5: Config = {"model_type": "qwen3_5", "text_config": QWEN3_5_TEXT}
QWEN3_5_MOE: Config = {"model_type": "qwen3_5_moe", "text_config": QWEN3_5_MOE_TEXT}

WITH_MTP: dict[str, Config] = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v3, layers alike": DEEPSEEK_V3_ALIKE,
    "deepseek_v3, two depths": DEEPSEEK_V3_TWO_DEPTHS,
    "deepseek_v3, yarn": DEEPSEEK_V3_YARN,
    "deepseek_v32": DEEPSEEK_V32,
    "glm4_moe": GLM4_MOE,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "glm_moe_dsa": GLM_MOE_DSA,
    "glm_moe_dsa, index sharing": GLM_MOE_DSA_SHARING,
    "hy_v3": HY_V3,
    "mimo": MIMO,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen3_5_moe_text": QWEN3_5_MOE_TEXT,
    "qwen3_5_text": QWEN3_5_TEXT,
    "qwen3_next": QWEN3_NEXT,
}
WITHOUT_MTP: dict[str, Config] = {
    "exaone_moe": EXAONE_MOE | {"num_nextn_predict_layers": 0},
    "kimi_k2": DEEPSEEK_V3 | {"model_type": "kimi_k2", "num_nextn_predict_layers": 0},
    "llama": LLAMA,
    "mixtral": MIXTRAL,
    "qwen2, tied": QWEN2_TIED,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
}

#: Qwen's hybrids: gated delta nets and gated attention.
HYBRIDS = (QWEN3_NEXT, QWEN3_5_TEXT, QWEN3_5_MOE_TEXT, QWEN3_5, QWEN3_5_MOE)

#: Families with sparse attention, which megatron-core has from 0.19 on.
SPARSE = frozenset({"deepseek_v32", "glm_moe_dsa"})

# Families that parity does not run; Megatron-Core can build the first.

BAILING_MOE_V2: Config = _UNLIKE | _SIGMOID | {
    "model_type": "bailing_moe_v2",
    "n_group": 4,
    "topk_group": 2,
    "score_function": "sigmoid",
    "partial_rotary_factor": 0.5,
    "use_bias": False,
    "use_qkv_bias": True,
    "use_qk_norm": True,
}  # fmt: skip
MINIMAX_M2: Config = _DENSE | {
    "model_type": "minimax_m2",
    "head_dim": 16,
    "rotary_dim": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_mtp_modules": 3,
}
MIMO_V2_FLASH: Config = _MOE | {
    "model_type": "mimo_v2_flash",
    "num_nextn_predict_layers": None,
    "layernorm_epsilon": 1e-5,
    "rms_norm_eps": None,
    "n_shared_experts": None,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "v_head_dim": 8,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 12,
    "swa_v_head_dim": 8,
    "swa_rope_theta": 5000,
    "hybrid_layer_pattern": [0, 1, 0],
    "moe_layer_freq": [0, 1, 1],
    "sliding_window": 16,
    "add_swa_attention_sink_bias": True,
    "attention_value_scale": 0.707,
}
STEP3P5: Config = _DENSE | {
    "model_type": "step3p5",
    "num_attention_groups": 2,
    "head_dim": 8,
    "layer_types": ["full_attention", "sliding_attention", *["sliding_attention"] * 3],
    "attention_other_setting": {
        "num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 8,
    },
    "sliding_window": 16,
    "use_head_wise_attn_gate": True,
    "moe_num_experts": 8,
    "moe_top_k": 2,
    "moe_layers_enum": "1,2",
    "moe_intermediate_size": 16,
    "share_expert_dim": 24,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "num_nextn_predict_layers": 2,
    "rope_theta": [10000.0, 5000.0, 5000.0],
}  # fmt: skip
NEMOTRON_H: Config = _MOE | {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MEM*-E",
    "mtp_hybrid_override_pattern": "*E",
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_norm_epsilon": 1e-5,
    "rms_norm_eps": None,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "chunk_size": 128,
    "mlp_hidden_act": "relu2",
    "moe_latent_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}
