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
}
WITHOUT_MTP: dict[str, Config] = {
    "llama": LLAMA,
    "mixtral": MIXTRAL,
    "qwen2, tied": QWEN2_TIED,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
}

#: Families with sparse attention, which megatron-core has from 0.19 on.
SPARSE = frozenset({"deepseek_v32", "glm_moe_dsa"})
