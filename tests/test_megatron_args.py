"""Megatron arguments: what they say, what Megatron reads of them, and that models follow."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpconv.errors import RefusedError, UnsupportedError
from mtpconv.geometry import read_geometry
from mtpconv.mapping.layouts import addresses, layout_of
from mtpconv.mapping.plan import make_plan
from mtpconv.mapping.table_reader import find_table
from mtpconv.megatron_args import (
    FLAGLESS,
    RENAMED,
    SWITCHES,
    VALUES,
    megatron_args,
    shell_flags,
    transformer_fields,
    yaml_text,
)
from mtpconv.megatron_families import FAMILIES
from mtpconv.parity import runtime
from mtpconv.store.dist_metadata_writer import write_common, write_config
from mtpconv.store.pickles import Global
from tests.conftest import ROOT
from tests.parity import configs
from tests.parity.configs import Config

RELEASES: dict[str, Config] = {
    path.stem: config
    for path in sorted((ROOT / "fixtures" / "configs").glob("*.json"))
    if (config := json.loads(path.read_text("utf-8")))["model_type"] in FAMILIES
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
QWEN3_NEXT = configs.QWEN3_NEXT
DEEPSEEK_V32: Config = configs.GLM_MOE_DSA | {"model_type": "deepseek_v32"}
SMALL: dict[str, Config] = {
    **configs.WITH_MTP,
    **configs.WITHOUT_MTP,
    "deepseek_v32": DEEPSEEK_V32,
    "glm4_moe_lite": configs.DEEPSEEK_V3 | {"model_type": "glm4_moe_lite"},
    "kimi_k2": configs.DEEPSEEK_V3 | {"model_type": "kimi_k2"},
    "llama, scaled": configs.LLAMA | {"rope_scaling": LLAMA3},
    "mimo": configs.QWEN2_TIED | {"model_type": "mimo", "num_nextn_predict_layers": 1},
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN3_NEXT | {"model_type": "qwen3_5"},
    "qwen3_5_moe": QWEN3_NEXT | {"model_type": "qwen3_5_moe"},
    "qwen3_5_moe_text": QWEN3_NEXT | {"model_type": "qwen3_5_moe_text"},
    "qwen3_5_text": configs.QWEN3_5_TEXT,
    "bailing_moe_v2": configs.BAILING_MOE_V2,
    "hy_v3": configs.HY_V3,
}
#: Families that Megatron cannot be told whole, and the beginning of every gap.
GAPS: dict[str, tuple[Config, tuple[str, ...]]] = {
    "exaone_moe": (configs.EXAONE_MOE, ("exaone_moe: an MTP depth with another MLP",)),
    "mimo_v2_flash": (
        configs.MIMO_V2_FLASH,
        (
            "mimo_v2_flash: query groups differ by layer",
            "mimo_v2_flash: values narrower than keys",
            "mimo_v2_flash: learned softmax offsets",
            "config.json: swa_rope_theta = 5000",
            "config.json: attention_value_scale = 0.707",
        ),
    ),
    "minimax_m2": (configs.MINIMAX_M2, ("minimax_m2: q/k norms over all heads at once",)),
    "step3p5": (
        configs.STEP3P5,
        (
            "config.json: rope_theta differs by layer",
            "step3p5: an MTP depth with another MLP",
            "step3p5: attention heads differ by layer",
            "config.json: use_head_wise_attn_gate = True",
        ),
    ),
}

#: Names that Megatron's load path reads from a checkpoint's `args`, by function, in any version
#: from 0.12 to 0.19. Source: see mtpconv/megatron_args.py.
COMPARED = {
    "num_layers", "hidden_size", "num_attention_heads", "add_position_embedding",
    "max_position_embeddings", "make_vocab_size_divisible_by", "padded_vocab_size",
    "tokenizer_type", "data_parallel_random_init", "global_batch_size",
    "tensor_model_parallel_size", "pipeline_model_parallel_size",
}  # fmt: skip
TAKEN_OVER = {
    "num_layers", "hidden_size", "ffn_hidden_size", "seq_length", "num_attention_heads",
    "num_query_groups", "group_query_attention", "kv_channels", "max_position_embeddings",
    "position_embedding_type", "add_position_embedding", "use_rotary_position_embeddings",
    "rotary_base", "rotary_percent", "rotary_interleaved", "add_bias_linear", "add_qkv_bias",
    "squared_relu", "swiglu", "untie_embeddings_and_output_weights", "apply_layernorm_1p",
    "normalization", "apply_query_key_layer_scaling", "attention_dropout", "hidden_dropout",
    "mtp_num_layers", "mtp_use_repeated_layer", "spec", "num_experts", "moe_layer_freq",
    "moe_ffn_hidden_size", "moe_router_topk", "moe_token_dispatcher_type",
    "moe_router_pre_softmax", "moe_grouped_gemm", "moe_shared_expert_intermediate_size",
    "moe_router_score_function", "moe_router_enable_expert_bias",
    "moe_router_topk_scaling_factor", "moe_latent_size", "hybrid_layer_pattern",
    "heterogeneous_layers_config_path", "tokenizer_type", "tokenizer_model", "tiktoken_pattern",
    "padded_vocab_size", "ckpt_format", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage", "expert_model_parallel_size", "is_hybrid_model",
}  # fmt: skip
LOADED = {
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "no_save_rng",
    "no_save_optim", "consumed_train_samples", "skipped_train_samples",
    "consumed_valid_samples", "global_batch_size", "num_layers", "hybrid_layer_pattern",
}  # fmt: skip
#: tools/checkpoint/loader_base.py and Megatron-Bridge's mlm_compat, without a fallback.
BUILT_FROM = {
    "fp16", "bf16", "multi_latent_attention", "heterogeneous_layers_config_path",
    "no_persist_layer_norm", "apply_layernorm_1p", "norm_epsilon", "params_dtype",
    "overlap_p2p_comm", "num_experts", "rotary_interleaved",
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "fp8_param_gather",
    "swiglu", "bias_swiglu_fusion", "bias_gelu_fusion", "squared_relu",
    "init_method_xavier_uniform", "group_query_attention", "num_query_groups",
    "config_logger_dir", "cp_comm_type", "is_hybrid_model", "moe_grouped_gemm", "qk_layernorm",
    "qk_l2_norm", "normalization", "transformer_impl", "mtp_num_layers", "padded_vocab_size",
    "max_position_embeddings", "fp16_lm_cross_entropy", "position_embedding_type",
    "rotary_percent", "rotary_base", "use_rope_scaling", "untie_embeddings_and_output_weights",
    "init_model_with_meta_device",
}  # fmt: skip
#: Read with a fallback, and right when absent.
ABSENT = {
    # a run's size: equal ones would make Megatron look for a rerun state
    "world_size", "data_parallel_size",
    # how an optimizer state was saved; there is none
    "ckpt_fully_parallel_save",
    # spelled add_bias_linear since 0.3
    "disable_bias_linear",
    # Mamba, hybrid and heterogeneous models; GroupedLinear's storage
    "hybrid_override_pattern", "mtp_hybrid_override_pattern", "mamba_state_dim",
    "mamba_head_dim", "mamba_num_groups", "mamba_num_heads",
    "heterogeneous_layers_config_encoded_json", "moe_single_grouped_weight",
    "moe_single_grouped_bias",
    # how a run balances experts; taken over by the development branch 0032978f
    "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_router_qb_num_bins",
    "moe_router_quantile_balancing_estimation_scope", "moe_hybridep_routing_map_mode",
}  # fmt: skip


def args_of(config: Config, **changes: Any) -> dict[str, Any]:
    return megatron_args(read_geometry({**config, **changes}))


def test_deepseek_v3_as_flags() -> None:
    assert " ".join(shell_flags(args_of(RELEASES["deepseek-v3"]))) == (
        "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
        "--kv-channels 128 --q-lora-rank 1536 --kv-lora-rank 512 "
        "--max-position-embeddings 163840 --position-embedding-type rope --rope-type yarn "
        "--rotary-scaling-factor 40.0 --mscale-all-dim 1.0 --normalization RMSNorm "
        "--norm-epsilon 1e-06 --attention-dropout 0.0 --hidden-dropout 0.0 --num-experts 256 "
        "--moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048 "
        "--moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 "
        "--moe-router-score-function sigmoid --moe-router-num-groups 8 "
        "--moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5 "
        "--moe-router-dtype fp32 --mtp-num-layers 1 --vocab-size 129280 "
        "--padded-vocab-size 129280 --tokenizer-type HuggingFaceTokenizer "
        "--untie-embeddings-and-output-weights --swiglu --disable-bias-linear "
        "--multi-latent-attention --qk-layernorm --moe-grouped-gemm --moe-router-pre-softmax "
        "--moe-router-enable-expert-bias --bf16"
    )


def test_glm_5_2_has_the_flags_of_sparse_attention() -> None:
    flags = " ".join(shell_flags(args_of(RELEASES["glm-5.2"])))
    for expected in (
        "--experimental-attention-variant dsa --dsa-indexer-n-heads 32",
        "--dsa-indexer-head-dim 128 --dsa-indexer-topk 2048 --dsa-indexer-topk-freq 4",
        "--dsa-indexer-skip-topk-offset 3 --dsa-indexer-k-norm-epsilon 1e-06",
        "--rope-type rope",
        "--rotary-base 8000000",
        "--qk-head-dim 192",
        "--v-head-dim 256",
        "--no-rope-fusion --dsa-indexer-rope-interleaved --no-dsa-indexer-rotate-activation",
        "--mtp-num-layers 1",
    ):
        assert expected in flags
    assert "--rotary-scaling-factor" not in flags
    assert "--dsa-indexer-topk-freq" not in " ".join(shell_flags(args_of(RELEASES["glm-5.1"])))


def test_the_args_of_releases() -> None:
    v32 = args_of(RELEASES["deepseek-v3.2-exp"])
    assert (v32["dsa_indexer_rope_interleaved"], v32["dsa_indexer_rotate_activation"]) == (0, 1)
    air, glm = args_of(RELEASES["glm-4.5-air"]), args_of(RELEASES["glm-4.5"])
    assert (air["qk_layernorm"], glm["qk_layernorm"]) == (False, True)
    assert (air["add_qkv_bias"], air["rotary_percent"]) == (True, 0.5)
    assert air["moe_layer_freq"] == [0] + [1] * 45
    assert air["num_query_groups"] == 8
    v3 = args_of(RELEASES["deepseek-v3"])
    assert (v3["num_query_groups"], v3["group_query_attention"]) == (1, False)
    assert v3["params_dtype"] == Global("torch", "bfloat16")
    assert (v3["mtp_num_layers"], v3["mtp_loss_scaling_factor"]) == (1, 0.1)
    kimi = args_of(RELEASES["kimi-k2"])
    assert kimi["mtp_num_layers"] is None
    with pytest.raises(UnsupportedError, match=r"beta_fast = 1\.0: Megatron-LM has no flag"):
        shell_flags(kimi)


def test_the_args_of_families() -> None:
    scaled = args_of(SMALL["llama, scaled"])
    assert (scaled["use_rope_scaling"], scaled["rope_scaling_factor"]) == (True, 32.0)
    assert args_of(configs.QWEN2_TIED)["untie_embeddings_and_output_weights"] is False
    assert args_of(configs.QWEN2_TIED)["add_qkv_bias"] is True
    mixtral = args_of(configs.MIXTRAL, num_key_value_heads=None)
    assert (mixtral["num_query_groups"], mixtral["moe_ffn_hidden_size"]) == (4, 48)
    assert (mixtral["moe_layer_freq"], mixtral["moe_router_pre_softmax"]) == (1, False)
    assert args_of(configs.QWEN3_MOE, norm_topk_prob=False)["moe_router_pre_softmax"] is True
    gdn = args_of(QWEN3_NEXT)
    assert gdn["moe_shared_expert_intermediate_size"] == 24
    assert (gdn["apply_layernorm_1p"], gdn["layernorm_zero_centered_gamma"]) == (True, True)
    assert (gdn["rotary_percent"], gdn["linear_attention_freq"]) == (0.25, 4)
    assert args_of(configs.LLAMA, num_nextn_predict_layers=0)["mtp_num_layers"] is None
    half = args_of(configs.LLAMA, dtype="float16")
    assert (half["fp16"], half["bf16"], half["params_dtype"].name) == (True, False, "float16")


def test_a_padded_vocabulary() -> None:
    geometry = read_geometry({**configs.LLAMA, "vocab_size": 151669})
    args = megatron_args(geometry, padded_vocab_size=151680)
    assert (args["vocab_size"], args["padded_vocab_size"]) == (151669, 151680)
    assert args["make_vocab_size_divisible_by"] == 128
    assert megatron_args(geometry)["make_vocab_size_divisible_by"] == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba': its Megatron arguments are not known"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type 'dynamic'"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 2.0}}, "low_freq_factor = 2.0"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"dtype": "float64"}, "dtype F64"),
        (configs.MIXTRAL | {"sliding_window": 4096}, "sliding_window"),
        (configs.DEEPSEEK_V3 | {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        (configs.DEEPSEEK_V3 | {"norm_topk_prob": False}, "norm_topk_prob = False"),
        (configs.DEEPSEEK_V3 | {"rope_interleave": False}, "rope_interleave = False"),
        (configs.DEEPSEEK_V3 | {"first_k_dense_replace": 3}, "another MLP than the last layer"),
        (configs.GLM_MOE_DSA | {"indexer_types": ["shared"] * 3}, "follow no index_topk_freq"),
        (QWEN3_NEXT | {"layer_types": ["full_attention"] * 4}, "layer_types"),
        (QWEN3_NEXT | {"num_hidden_layers": 7}, "MTP depths have full attention"),
    ],
)
def test_what_megatron_cannot_be_told_is_refused_or_listed(config: Config, message: str) -> None:
    geometry = read_geometry({**configs.LLAMA, **config})
    with pytest.raises(UnsupportedError, match=message):
        megatron_args(geometry)
    gaps: list[str] = []
    args = megatron_args(geometry, gaps=gaps)
    assert len(gaps) == 1
    assert message in gaps[0].replace("\\", "")
    assert args["num_layers"] == geometry.layers
    assert args.keys() >= {*COMPARED, *LOADED}


@pytest.mark.parametrize("name", GAPS)
def test_gaps_of_families_that_megatron_core_lacks_parts_of(name: str) -> None:
    config, wanted = GAPS[name]
    gaps: list[str] = []
    args = megatron_args(read_geometry(config), gaps=gaps)
    assert len(gaps) == len(wanted)
    assert all(gap.startswith(start) for gap, start in zip(gaps, wanted, strict=True))
    assert args.keys() >= {*COMPARED, *TAKEN_OVER, *LOADED, *BUILT_FROM}


def test_windows_and_layers_without_rope() -> None:
    args = megatron_args(read_geometry(configs.EXAONE_MOE), gaps=[])
    assert (args["window_size"], args["window_attn_skip_freq"]) == ((15, 0), [1, 1, 0, 0])
    assert args["no_rope_freq"] == [0, 0, 1, 1]
    flags = " ".join(shell_flags(args))
    assert "--window-size (15,0) --window-attn-skip-freq ([1]*2+[0]*2)" in flags
    assert "no_rope_freq" not in megatron_args(read_geometry(configs.STEP3P5), gaps=[])


def test_a_hybrid_model_as_flags() -> None:
    config = configs.NEMOTRON_H | {"num_nextn_predict_layers": 2}
    assert " ".join(shell_flags(args_of(config))) == (
        "--num-layers 6 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 "
        "--num-query-groups 2 --kv-channels 8 --max-position-embeddings 256 "
        "--position-embedding-type none --normalization RMSNorm --attention-dropout 0.0 "
        "--hidden-dropout 0.0 --hybrid-layer-pattern MEM*-E/*E/*E --mamba-num-heads 4 "
        "--mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 16 --num-experts 8 "
        "--moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 40 "
        "--moe-latent-size 24 --moe-router-topk 4 --moe-router-score-function sigmoid "
        "--moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32 --mtp-num-layers 2 "
        "--vocab-size 128 --padded-vocab-size 128 --tokenizer-type HuggingFaceTokenizer "
        "--untie-embeddings-and-output-weights --squared-relu --disable-bias-linear "
        "--group-query-attention --moe-grouped-gemm --moe-router-pre-softmax "
        "--moe-router-enable-expert-bias --bf16"
    )
    again = args_of(config | {"mtp_use_repeated_layer": True})
    assert (again["mtp_use_repeated_layer"], again["mtp_num_layers"]) == (True, 2)
    assert again["hybrid_layer_pattern"] == "MEM*-E/*E/*E"
    dense = args_of(configs.NEMOTRON_H | {"hybrid_override_pattern": "M*-",
                                          "num_nextn_predict_layers": 0})  # fmt: skip
    assert (dense["num_experts"], dense["hybrid_layer_pattern"]) == (None, "M*-")


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 12))
def test_law_index_sharing_is_found_in_a_list_of_layers(
    freq: int, offset: int, layers: int
) -> None:
    own = [max(layer - offset + 1, 0) % freq == 0 for layer in range(layers)]
    geometry = read_geometry(
        configs.GLM_MOE_DSA
        | {"num_hidden_layers": layers, "indexer_types": ["full" if o else "shared" for o in own]}
        | {"first_k_dense_replace": 0}
    )
    args = megatron_args(geometry)
    found, skip = args["dsa_indexer_topk_freq"], args["dsa_indexer_skip_topk_offset"]
    # Megatron counts layers from 1 and takes an offset of 0 for 1.
    assert own == [max(n - max(skip, 1), 0) % found == 0 for n in range(1, layers + 1)]


@pytest.mark.parametrize("field", ["rms_norm_eps", "max_position_embeddings", "vocab_size"])
def test_a_missing_field_is_named(field: str) -> None:
    config = {k: v for k, v in configs.DEEPSEEK_V3.items() if k != field}
    with pytest.raises(RefusedError, match=f"{field} is missing"):
        args_of(config)


@pytest.mark.parametrize("name", SMALL)
def test_every_name_that_a_reader_wants_is_there(name: str) -> None:
    args = args_of(SMALL[name])
    assert args.keys() >= {*COMPARED, *TAKEN_OVER, *LOADED, *BUILT_FROM}
    assert not args.keys() & ABSENT
    for key, value in args.items():
        plain = isinstance(value, bool | int | float | str | list | tuple | None)
        assert plain or (key, type(value)) == ("params_dtype", Global)
    assert not {key for key in args if key in FLAGLESS} or args["rope_type"] == "yarn"


def test_args_do_not_share_their_lists() -> None:
    args_of(configs.LLAMA)["cp_comm_type"].append("a2a")
    assert args_of(configs.LLAMA)["cp_comm_type"] == ["p2p"]


@given(st.lists(st.integers(0, 1), min_size=1))
def test_law_a_layer_pattern_is_what_it_was(pattern: list[int]) -> None:
    (flag, text) = shell_flags({"moe_layer_freq": pattern})
    assert flag == "--moe-layer-freq"
    # Evaluated as Megatron does: digits, brackets, plus and times only.
    assert set(text) <= set("01234567890[]()+*,")
    assert eval(text) == pattern


def test_a_checkpoint_s_own_names_give_the_same_flags() -> None:
    args = args_of(QWEN3_NEXT)
    newer = {k: v for k, v in args.items() if k not in RENAMED}
    older = {k: v for k, v in args.items() if k not in RENAMED.values()}
    assert shell_flags(newer) == shell_flags(older) == shell_flags(args)


@given(
    st.dictionaries(
        st.from_regex(r"\A[a-z][a-z_0-9]{2,8}\Z"),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text()
        | st.lists(st.integers()),
    )
)  # fmt: skip
def test_law_yaml_reads_back(args: dict[str, Any]) -> None:
    yaml = pytest.importorskip("yaml")
    words = {k: v for k, v in args.items() if k not in ("null", "true", "false", "yes", "off")}
    read = yaml.safe_load(yaml_text(words)) or {}
    assert read.keys() == words.keys()
    for key, value in words.items():
        assert type(read[key]) is type(value)
        assert read[key] == value or math.isnan(value)


def test_yaml_names_what_it_has_no_form_for() -> None:
    assert yaml_text({"params_dtype": Global("torch", "bfloat16"), "eps": 1e-6}) == (
        'params_dtype: "bfloat16"\neps: 1.0e-06\n'
    )


# What follows runs Megatron-LM itself: its wheels have megatron.training since 0.17.


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    with runtime.session("cpu"):
        yield


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    arguments = pytest.importorskip("megatron.training.arguments")
    made: argparse.ArgumentParser = arguments.add_megatron_arguments(
        argparse.ArgumentParser(allow_abbrev=False)
    )
    return made


def newest(config: Config) -> Config:
    if "index_topk" in config and runtime.megatron_version() < (0, 19):
        pytest.skip("sparse attention needs megatron-core 0.19 or newer")
    return config


def namespace(args: dict[str, Any]) -> argparse.Namespace:
    import torch

    return argparse.Namespace(**args | {"params_dtype": getattr(torch, args["params_dtype"].name)})


@pytest.mark.megatron
def test_defaults_and_switches_are_megatron_s(parser: argparse.ArgumentParser) -> None:
    by_flag = {flag: a for a in parser._actions for flag in a.option_strings}
    for name, default in VALUES.items():
        action = by_flag["--" + name.replace("_", "-")]
        assert (action.dest, action.default) == (RENAMED.get(name, name), default)
    for name, (flag, sets) in SWITCHES.items():
        action = by_flag[flag]
        assert (action.dest, action.const) == (RENAMED.get(name, name), sets)


@pytest.mark.megatron
@pytest.mark.parametrize("name", [*SMALL, *RELEASES])
def test_megatron_parses_the_flags(parser: argparse.ArgumentParser, name: str) -> None:
    args = megatron_args(read_geometry((SMALL | RELEASES)[name]), gaps=[])
    args |= {k: v for k, v in FLAGLESS.items() if k in args}  # no flag can say otherwise
    parsed = parser.parse_args(shell_flags(args))
    for name in (*VALUES, *SWITCHES):
        if name in args:
            assert getattr(parsed, RENAMED.get(name, name)) == args[name], name


@pytest.mark.megatron
def test_the_lists_of_names_are_complete() -> None:
    checkpointing = pytest.importorskip("megatron.training.checkpointing")
    read = []
    for node in ast.walk(ast.parse(inspect.getsource(checkpointing))):
        match node:
            case ast.Call(func=ast.Name(id="_set_arg" | "_compare"), args=[name, *_]):
                read.append(name)
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"),
                args=[ast.Name(id="ckpt_args" | "checkpoint_args"), name, *_],
            ):
                read.append(name)
    names = {n.value for n in read if isinstance(n, ast.Constant)}
    assert len(names) > 60
    assert names <= {*COMPARED, *TAKEN_OVER, *LOADED, *ABSENT}


@pytest.mark.megatron
@pytest.mark.parametrize("name", SMALL)
def test_megatron_takes_them_over_from_a_checkpoint(
    parser: argparse.ArgumentParser, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointing = pytest.importorskip("megatron.training.checkpointing")
    import torch

    # Other tests may have a process group open; then Megatron agrees on iterations on a GPU.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    args = args_of(SMALL[name])
    folder = tmp_path / "release"
    folder.mkdir()
    write_common(folder, {"args": args, "checkpoint_version": 3.0, "iteration": 0})
    write_config(folder)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    run = parser.parse_args(["--load", str(tmp_path), "--use-mp-args-from-checkpoint-args"])
    run.use_dist_ckpt = False  # `validate_args` sets it; here it asks for more comparisons
    checkpointing.load_args_from_checkpoint(run)
    for key in {*TAKEN_OVER} - {"is_hybrid_model"}:
        if args[key] is not None and key not in ("moe_token_dispatcher_type", "ckpt_format"):
            assert getattr(run, key, None) == args[key], key

    run.vocab_file, run.data_parallel_random_init = "vocab.json", False
    monkeypatch.setattr(checkpointing, "get_args", lambda: run)
    monkeypatch.setattr(checkpointing, "get_checkpoint_version", lambda: 3.0)
    stored = checkpointing._load_base_checkpoint(str(tmp_path), run, rank0=True)[0]["args"]
    checkpointing.check_checkpoint_args(stored)
    stored.num_layers += 1
    with pytest.raises(AssertionError, match="num_layers value from checkpoint"):
        checkpointing.check_checkpoint_args(stored)


@pytest.mark.megatron
@pytest.mark.parametrize("name", SMALL)
def test_megatron_builds_its_config_from_them(name: str) -> None:
    argument_utils = pytest.importorskip("megatron.training.argument_utils")
    args = args_of(SMALL[name]) | {"transformer_impl": "local", "moe_grouped_gemm": False}
    config = argument_utils.gpt_config_from_args(namespace(args))
    for field, value in transformer_fields(args).items():
        if field == "num_query_groups" and value is None:
            value = args["num_attention_heads"]
        assert getattr(config.transformer, field) == value, field
    assert config.vocab_size == args["padded_vocab_size"]
    assert config.share_embeddings_and_output_weights != args["untie_embeddings_and_output_weights"]
    if not args["multi_latent_attention"]:
        assert config.rotary_base == args["rotary_base"]


def build(args: dict[str, Any], config: Config) -> Any:
    """A GPTModel from args alone; the HF config only tells which layer specs to compose."""
    from dataclasses import fields

    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    from mtpconv.parity.modules import block_specs
    from mtpconv.parity.settings import read_settings

    kind = MLATransformerConfig if args["multi_latent_attention"] else TransformerConfig
    on_cpu = {
        "activation_func": torch.nn.functional.silu,
        "params_dtype": torch.float32,
        "bf16": False,
        "transformer_impl": "local",
        "use_cpu_initialization": True,
        "moe_grouped_gemm": False,
        "persist_layer_norm": False,
        "deterministic_mode": True,  # gated delta nets without kernels for CUDA
    }
    wanted = transformer_fields(args) | on_cpu
    assert wanted.keys() <= {f.name for f in fields(kind)}
    transformer = kind(**wanted)
    decoder, mtp = block_specs(read_settings(read_geometry(config)), transformer, te=False)
    return GPTModel(
        config=transformer,
        transformer_layer_spec=decoder,
        mtp_block_spec=mtp,
        vocab_size=args["padded_vocab_size"],
        max_sequence_length=args["max_position_embeddings"],
        share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
        position_embedding_type=args["position_embedding_type"],
        rotary_percent=args["rotary_percent"],
        rotary_base=args["rotary_base"],
        rope_scaling=args["use_rope_scaling"],
        parallel_output=False,
    )


def stored_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that the model would store, by sharded key."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    metadata = {"non_homogeneous_layers": True, "singleton_local_shards": False}
    state = model.sharded_state_dict(metadata=metadata)
    apply_factories(state)
    return {
        v.key: tuple(v.global_shape) for v in nested_values(state) if isinstance(v, ShardedTensor)
    }


@pytest.mark.megatron
@pytest.mark.parametrize("name", configs.WITH_MTP)
def test_the_model_that_follows_has_the_tensors_of_the_plan(megatron: None, name: str) -> None:
    config = newest(configs.WITH_MTP[name])
    table = find_table(config["model_type"])
    plan = make_plan(config, table)
    layout = layout_of(["stacked_experts", table.local_spec or ""])
    planned = {
        where.key: where.lead + step.shape
        for step, where in zip(plan.steps, addresses(plan, layout), strict=True)
    }
    assert any(key.startswith("mtp.layers.0.") for key in planned)
    assert stored_shapes(build(args_of(config), config)) == planned


def test_every_family_has_a_config_here() -> None:
    known = {c["model_type"] for c in SMALL.values()} | GAPS.keys() | {"nemotron_h"}
    assert known == set(FAMILIES)


def test_the_document_lists_the_families() -> None:
    text = (ROOT / "docs" / "megatron_args.md").read_text("utf-8")
    listed = text.partition("Known model types:")[2].replace("\n", " ").strip(" .")
    assert listed.split(", ") == sorted(FAMILIES)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("qwen3-next-80b-a3b", {"num_hidden_layers": 0}),
        ("qwen3-next-80b-a3b", {"full_attention_interval": 0}),
        ("minimax-m2", {"head_dim": 0}),
    ],
)
def test_zeros_in_a_config_are_no_internal_error(name: str, fields: dict[str, Any]) -> None:
    with suppress(RefusedError):
        megatron_args(read_geometry(RELEASES[name] | fields), None, [])
