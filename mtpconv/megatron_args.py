"""A model's Megatron-LM arguments: for `common.pt`, a command line, a YAML file.

Three readers decide which names there are. Megatron-LM's load path compares some with the
run's, and takes others over with `--use-checkpoint-args`; that list knows MoE and MTP but no
MLA, group routing or DSA, so a run needs those as flags too. Megatron-Bridge builds the whole
model from the namespace.

Source: megatron/training/{arguments,argument_utils,checkpointing}.py of megatron-core 0.17.1,
0.18.0 and 0.19.2; checkpointing.py and arguments.py of forks of 0.12 (swiss-ai/Megatron-LM
02785e39) and 0.15 (flagos-ai/Megatron-LM-FL 00738f32); tools/checkpoint/loader_base.py of
Megatron-LM 00caa53a; Megatron-Bridge training/mlm_compat 03ea70d8; read 2026-11-29.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from typing import Any

from mtpconv.errors import UnsupportedError
from mtpconv.geometry import Geometry
from mtpconv.megatron_families import FAMILIES, Args, Draft, unknown
from mtpconv.store.pickles import Global

#: How the checkpoint was made. `world_size` and `data_parallel_size` are absent on purpose:
#: where they equal the run's, Megatron asks for a rerun state that is not there.
CHECKPOINT: Mapping[str, Any] = {
    "ckpt_format": "torch_dist", "no_save_optim": True, "no_save_rng": True,
    "consumed_train_samples": 0, "skipped_train_samples": 0, "consumed_valid_samples": 0,
    "global_batch_size": None, "data_parallel_random_init": False,
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None, "num_layers_per_virtual_pipeline_stage": None,
    "expert_model_parallel_size": 1, "context_parallel_size": 1,
}  # fmt: skip

#: Megatron's own values for what no HF config says; a part of the family may overrule them.
DEFAULTS: Mapping[str, Any] = {
    # attention and embeddings
    "add_position_embedding": True, "use_rotary_position_embeddings": False,
    "rotary_interleaved": False, "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False, "rope_type": None, "multi_latent_attention": False,
    "group_query_attention": False, "num_query_groups": 1, "add_qkv_bias": False,
    "qk_layernorm": False, "qk_l2_norm": False, "apply_query_key_layer_scaling": False,
    "experimental_attention_variant": None,
    # norms and MLP
    "apply_layernorm_1p": False, "no_persist_layer_norm": False, "squared_relu": False,
    "quick_geglu": False, "bias_swiglu_fusion": True, "bias_gelu_fusion": False,
    # experts
    "num_experts": None, "moe_layer_freq": 1, "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None, "moe_router_topk": 2,
    "moe_router_pre_softmax": False, "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False, "moe_router_topk_scaling_factor": None,
    "moe_token_dispatcher_type": "allgather", "moe_grouped_gemm": False, "moe_latent_size": None,
    # the kind of model
    "mtp_use_repeated_layer": False, "spec": None, "is_hybrid_model": False,
    "hybrid_layer_pattern": None, "heterogeneous_layers_config_path": None,
    # the run
    "transformer_impl": "transformer_engine", "fp16_lm_cross_entropy": False,
    "fp8_param_gather": False, "fp4_param_gather": False, "te_precision_config_file": None,
    "init_model_with_meta_device": False, "init_method_xavier_uniform": False,
    "overlap_p2p_comm": False, "cp_comm_type": ["p2p"], "config_logger_dir": "",
    "decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None,
    "yaml_cfg": None, "seed": 1234,
}  # fmt: skip

#: Flags with a value, by the name in `args`, with Megatron's default; in order of printing.
VALUES: Mapping[str, Any] = {
    "num_layers": None, "hidden_size": None, "ffn_hidden_size": None,
    "num_attention_heads": None, "num_query_groups": 1, "kv_channels": None,
    "q_lora_rank": None, "kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": None, "position_embedding_type": "learned_absolute",
    "rotary_base": 10000, "rotary_percent": 1.0, "rope_scaling_factor": 8.0, "rope_type": None,
    "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0,
    "normalization": "LayerNorm", "norm_epsilon": 1e-5,
    "attention_dropout": 0.1, "hidden_dropout": 0.1,
    "window_size": None, "window_attn_skip_freq": None, "no_rope_freq": None,
    "experimental_attention_variant": None, "dsa_indexer_n_heads": None,
    "dsa_indexer_head_dim": None, "dsa_indexer_topk": None, "dsa_indexer_topk_freq": 1,
    "dsa_indexer_skip_topk_offset": 0, "dsa_indexer_k_norm_epsilon": None,
    "linear_attention_freq": None, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "hybrid_layer_pattern": None, "mamba_num_heads": None, "mamba_head_dim": 64,
    "mamba_num_groups": 8, "mamba_state_dim": 128,
    "num_experts": None, "moe_layer_freq": 1, "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None, "moe_latent_size": None, "moe_router_topk": 2,
    "moe_router_score_function": "softmax", "moe_router_num_groups": None,
    "moe_router_group_topk": None, "moe_router_topk_scaling_factor": None,
    "moe_router_dtype": None,
    "mtp_num_layers": None, "mtp_loss_scaling_factor": 0.1,
    "vocab_size": None, "padded_vocab_size": None, "make_vocab_size_divisible_by": 128,
    "tokenizer_type": None, "tokenizer_model": None,
}  # fmt: skip

#: Flags without a value, by the name in `args`: the flag, and what it sets the name to.
SWITCHES: Mapping[str, tuple[str, bool]] = {
    "untie_embeddings_and_output_weights": ("--untie-embeddings-and-output-weights", True),
    "swiglu": ("--swiglu", True),
    "squared_relu": ("--squared-relu", True),
    "add_bias_linear": ("--disable-bias-linear", False),
    "add_qkv_bias": ("--add-qkv-bias", True),
    "group_query_attention": ("--group-query-attention", True),
    "multi_latent_attention": ("--multi-latent-attention", True),
    "qk_layernorm": ("--qk-layernorm", True),
    "apply_layernorm_1p": ("--apply-layernorm-1p", True),
    "attention_output_gate": ("--attention-output-gate", True),
    "use_rope_scaling": ("--use-rope-scaling", True),
    "apply_rope_fusion": ("--no-rope-fusion", False),
    "dsa_indexer_rope_interleaved": ("--dsa-indexer-rope-interleaved", True),
    "dsa_indexer_rotate_activation": ("--no-dsa-indexer-rotate-activation", False),
    "dsa_indexer_scoring_relu": ("--no-dsa-indexer-scoring-relu", False),
    "moe_grouped_gemm": ("--moe-grouped-gemm", True),
    "moe_shared_expert_gate": ("--moe-shared-expert-gate", True),
    "moe_router_pre_softmax": ("--moe-router-pre-softmax", True),
    "moe_router_enable_expert_bias": ("--moe-router-enable-expert-bias", True),
    "bf16": ("--bf16", True),
    "fp16": ("--fp16", True),
}

#: Fields of MLATransformerConfig without a flag, with their defaults there.
FLAGLESS: Mapping[str, Any] = {
    "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip

#: Names that 0.17 changed in `args` and not on the command line, old to new.
RENAMED: Mapping[str, str] = {
    "norm_epsilon": "layernorm_epsilon", "apply_layernorm_1p": "layernorm_zero_centered_gamma",
}  # fmt: skip

#: Names that `core_transformer_config_from_args` changes, and names that are not of the config.
_IN_CONFIG = {**RENAMED, "num_experts": "num_moe_experts", "swiglu": "gated_linear_unit"}
_NOT_IN_CONFIG = frozenset({
    "group_query_attention", "max_position_embeddings", "position_embedding_type",
    "use_rope_scaling", "rope_scaling_factor", "untie_embeddings_and_output_weights",
    "vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by", "tokenizer_type",
    "tokenizer_model", "squared_relu", "hybrid_layer_pattern",
})  # fmt: skip

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def megatron_args(
    geometry: Geometry, padded_vocab_size: int | None = None, gaps: list[str] | None = None
) -> Args:
    """The `args` of a model, by the names that Megatron-LM gives them in a checkpoint.

    `padded_vocab_size` is the number of rows of embedding and LM head, if not the vocabulary's.
    With a list in `gaps`, what Megatron cannot be told is added there, a line each, and the args
    say the rest. All values are plain except `params_dtype`, which Megatron-Bridge reads: the
    pickle global `torch.bfloat16`, say.

    Raises: UnsupportedError for the first gap, if `gaps` is None; RefusedError if the config
        lacks a field.
    """
    dtype = _DTYPES.get(geometry.dtype, "float32")
    rows = padded_vocab_size or geometry.dim("vocab_size")
    args: Args = {
        **CHECKPOINT,
        **DEFAULTS,
        "cp_comm_type": list(DEFAULTS["cp_comm_type"]),
        "params_dtype": Global("torch", dtype),
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "vocab_size": geometry.dim("vocab_size"),
        "padded_vocab_size": rows,
        "make_vocab_size_divisible_by": math.gcd(rows, 128),
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": None,
        "tiktoken_pattern": None,
        "vocab_file": None,
    }
    draft = Draft(geometry, args)
    if geometry.dtype not in _DTYPES:
        draft.gaps.append(f"config.json: dtype {geometry.dtype}: Megatron has no such weights")
    for part in FAMILIES.get(geometry.model_type, (unknown,)):
        part(draft)
    if gaps is not None:
        gaps += draft.gaps
    elif draft.gaps:
        raise UnsupportedError(draft.gaps[0])
    return args | {new: args[old] for old, new in RENAMED.items() if old in args}


def transformer_fields(args: Mapping[str, Any]) -> Args:
    """The model in `args` as fields of megatron-core's TransformerConfig or MLATransformerConfig.

    Law: what `core_transformer_config_from_args` makes of them, without the torch values
    `params_dtype` and `activation_func`.
    """
    names = {n for n in (*VALUES, *SWITCHES, *FLAGLESS) if n in args} - _NOT_IN_CONFIG
    if not args["multi_latent_attention"]:
        names -= {"rotary_base", "rotary_percent", "rope_type"}  # GPTModel takes them itself
    fields = {_IN_CONFIG.get(name, name): args[name] for name in sorted(names)}
    if not args["group_query_attention"]:
        fields["num_query_groups"] = None
    return fields


def shell_flags(args: Mapping[str, Any]) -> list[str]:
    """Megatron-LM's command line for the model in `args`; what is Megatron's default is left out.

    How a run trains and spreads the model is not in it. Source: every flag is in 0.17.1, 0.18.0
    and 0.19.2, but for the DSA flags on index sharing, rope, rotation, ReLU and k_norm, and those
    of hybrid models, which were looked up in 0.19.2 only.

    Raises: UnsupportedError for a value that no flag can give.
    """
    for name, default in FLAGLESS.items():
        if args.get(name, default) != default:
            raise UnsupportedError(
                f"{name} = {args[name]}: Megatron-LM has no flag for it and takes {default}; "
                "set it where the model's config is built"
            )
    flags = []
    for name, default in VALUES.items():
        value = args.get(name, args.get(RENAMED.get(name, name)))
        if value is not None and value != default:
            flags += ["--" + name.replace("_", "-"), _word(value)]
    for name, (flag, sets) in SWITCHES.items():
        if args.get(name, args.get(RENAMED.get(name, name))) is sets:
            flags.append(flag)
    return flags


def _word(value: Any) -> str:
    """A value as one word; a list as the pattern that Megatron evaluates."""
    if isinstance(value, tuple):
        return "(" + ",".join(map(str, value)) + ")"
    if not isinstance(value, list):
        return str(value)
    runs = ((entry, len(list(run))) for entry, run in itertools.groupby(value))
    return "(" + "+".join(f"[{entry}]*{count}" for entry, count in runs) + ")"


def namespace_text(args: Mapping[str, Any]) -> str:
    """`args` as Python assignments to the attributes of `args`, sorted by name."""
    return "".join(
        f"args.{name} = "
        + (f"{value.module}.{value.name}" if isinstance(value, Global) else repr(value))
        + "\n"
        for name, value in sorted(args.items())
    )


def yaml_text(args: Mapping[str, Any]) -> str:
    """`args` as a flat YAML map; a value that YAML has no form for is a string naming it."""
    return "".join(f"{name}: {_scalar(value)}\n" for name, value in args.items())


def _scalar(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_scalar(entry) for entry in value) + "]"
    if value is None or isinstance(value, bool | int):
        return json.dumps(value)
    if isinstance(value, float):
        # YAML 1.1 takes 1e-06 for a string: a float needs a point.
        mantissa, e, exponent = repr(value).partition("e")
        if math.isfinite(value):
            return mantissa + ("" if "." in mantissa else ".0") + e + exponent
        return "." + mantissa if value > 0 or value != value else "-.inf"
    text = value.name if isinstance(value, Global) else str(value)
    plain = (c if " " <= c <= "~" and c not in '"\\' else f"\\U{ord(c):08x}" for c in text)
    return '"' + "".join(plain) + '"'
