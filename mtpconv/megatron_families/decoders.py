"""Dense decoders: what is common to all, grouped-query and latent attention, sparse attention."""

from __future__ import annotations

from mtpconv.geometry import index_sharing
from mtpconv.megatron_families.draft import Draft, number, rope

#: Spellings of the norms' epsilon.
EPSILONS = ("rms_norm_eps", "layernorm_epsilon", "layer_norm_epsilon", "norm_eps")


def decoder(d: Draft) -> None:
    """Sizes, norms, rope and embeddings, and MTP depths."""
    g, turned = d.geometry, rope(d)
    d.only("hidden_act", "silu")
    d.only("mlp_bias", False)
    theta = number(turned, "rope_theta")
    d.args |= {
        "num_layers": g.layers,
        "hidden_size": d.dim("hidden_size"),
        "ffn_hidden_size": d.dim(d.named("intermediate_size", "moe_intermediate_size")),
        "num_attention_heads": d.dim("num_attention_heads"),
        # No HF config says how long the training sequences were.
        "seq_length": d.dim("max_position_embeddings"),
        "max_position_embeddings": d.dim("max_position_embeddings"),
        "position_embedding_type": "rope",
        "rotary_base": int(theta) if theta == int(theta) else theta,
        "rotary_percent": number(turned, "partial_rotary_factor", 1.0),
        "normalization": "RMSNorm",
        "norm_epsilon": number(d.config, d.named(*EPSILONS)),
        "swiglu": True,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "untie_embeddings_and_output_weights": not g.fact("is_tied", 0),
        "mtp_num_layers": g.depths or None,
        "mtp_loss_scaling_factor": 0.1,
    }
    kinds = {g.fact("is_moe", g.layers + depth) for depth in range(g.depths)}
    if kinds and kinds != {g.fact("is_moe", g.layers - 1)}:
        d.gaps.append(
            f"{g.model_type}: an MTP depth with another MLP than the last layer; Megatron builds "
            "depths from the spec of that layer"
        )


def gqa(d: Draft) -> None:
    """Attention with query groups."""
    turned = rope(d)
    kind = turned["rope_type"]
    if kind == "llama3":
        d.only("low_freq_factor", 1.0, turned)
        d.only("high_freq_factor", 4.0, turned)
        d.only("original_max_position_embeddings", 8192, turned)
        d.args |= {"use_rope_scaling": True, "rope_scaling_factor": number(turned, "factor")}
    elif kind != "default":
        d.gaps.append(
            f"config.json: rope_type {kind!r}: Megatron arguments are known for default and llama3"
        )
    # Mixtral has only the width, the others have one they do not use unless told to.
    window = "sliding_window" if d.geometry.model_type == "mixtral" else "use_sliding_window"
    if d.config.get(window):
        d.gaps.append(f"config.json: {window}: Megatron arguments for it are not known")
    d.args |= {
        "group_query_attention": True,
        "num_query_groups": d.dim("num_key_value_heads"),
        "kv_channels": d.dim("head_dim"),
    }


def no_attention_bias(d: Draft) -> None:
    """No bias in attention; a config that has one is not to be told."""
    # `attention_bias` biases o_proj too in these families; Megatron biases qkv or every linear.
    d.only("attention_bias", False)


def qkv_bias(d: Draft) -> None:
    """A bias on q, k and v, whatever the config says."""
    d.args["add_qkv_bias"] = True


def qk_norm(d: Draft) -> None:
    """A norm on q and k of each head."""
    d.args["qk_layernorm"] = True


def glm4_attention(d: Draft) -> None:
    """GLM-4.5: biases and norms by config, half of each head turns."""
    d.args["add_qkv_bias"] = d.geometry.fact("has_qkv_bias", 0)
    d.args["qk_layernorm"] = d.geometry.fact("has_qk_norm", 0)
    rotary_default(d, 0.5)


def mla(d: Draft) -> None:
    """Multi-latent attention."""
    d.only("attention_bias", False)
    d.only("rope_interleave", True)
    d.args |= {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": None if d.config.get("q_lora_rank") is None else d.dim("q_lora_rank"),
        "kv_lora_rank": d.dim("kv_lora_rank"),
        "qk_head_dim": d.dim("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": d.dim("qk_rope_head_dim"),
        "v_head_dim": d.dim("v_head_dim"),
        # No weight has this width, but without it Megatron wants hidden_size / heads to be whole.
        "kv_channels": d.dim("qk_nope_head_dim"),
        # The rotary part of a head has a dimension of its own, whatever the factor says.
        "rotary_percent": 1.0,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    }
    turned = rope(d)
    if turned["rope_type"] == "yarn":
        longest = d.dim("max_position_embeddings")
        d.args |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": number(turned, "factor"),
            "mscale": number(turned, "mscale", 1.0),
            "mscale_all_dim": number(turned, "mscale_all_dim", 0.0),
            "original_max_position_embeddings": int(
                number(turned, "original_max_position_embeddings", longest)
            ),
            "beta_fast": number(turned, "beta_fast", 32.0),
            "beta_slow": number(turned, "beta_slow", 1.0),
        }
        return
    d.only("rope_type", "default", turned)
    d.args["apply_rope_fusion"] = False  # MLATransformerConfig refuses it unless yarn


def dsa(d: Draft) -> None:
    """Sparse attention, its indexers shared by a frequency and an offset."""
    sharing = index_sharing(d.geometry)
    if sharing is None:
        d.gaps.append(
            "config.json: the layers that have an indexer follow no index_topk_freq and "
            "index_skip_topk_offset, the only pattern Megatron can build"
        )
    frequency, offset = sharing or (1, 0)
    d.args |= {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": d.dim("index_n_heads"),
        "dsa_indexer_head_dim": d.dim("index_head_dim"),
        "dsa_indexer_topk": d.dim("index_topk"),
        "dsa_indexer_topk_freq": frequency,
        "dsa_indexer_skip_topk_offset": offset if frequency > 1 else 0,
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "dsa_indexer_scoring_relu": True,
        "apply_rope_fusion": False,  # DSAttention refuses it
    }


def deepseek_indexer(d: Draft) -> None:
    """The indexer of DeepSeek-V3.2."""
    # Source: transformers modeling_deepseek_v32.py: half-split rope, a Hadamard rotation.
    d.args |= {"dsa_indexer_rope_interleaved": False, "dsa_indexer_rotate_activation": True}


def glm_indexer(d: Draft) -> None:
    """The indexer of GLM-5."""
    # Source: Megatron-Bridge glm5_bridge.py 06874539; equal to transformers as measured.
    d.args["dsa_indexer_rope_interleaved"] = bool(d.config.get("indexer_rope_interleave", True))
    d.args["dsa_indexer_rotate_activation"] = False


def rotary_default(d: Draft, factor: float) -> None:
    """The share of a head that rotates, where the config leaves it to transformers."""
    if "partial_rotary_factor" not in rope(d):
        d.args["rotary_percent"] = factor
