from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpconv.errors import RefusedError, UnsupportedError
from mtpconv.geometry import FACTS, Geometry, read_geometry
from mtpconv.geometry.dims import DERIVED


def config(**fields: Any) -> dict[str, Any]:
    base = {"model_type": "x", "num_hidden_layers": 4, "hidden_size": 8, "num_attention_heads": 2}
    return base | fields


def geometry(**fields: Any) -> Geometry:
    return read_geometry(config(**fields))


def layers_where(g: Geometry, fact: str) -> list[int]:
    return [layer for layer in range(g.layers + g.depths) if g.fact(fact, layer)]


@pytest.mark.parametrize(
    "field", ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"]
)
@pytest.mark.parametrize(("value", "depths"), [(0, 0), (None, 0), (3, 3)])
def test_absent_zero_and_null_are_three_different_things(
    field: str, value: int | None, depths: int
) -> None:
    g = read_geometry(config(**{field: value}), mtp_default=1)
    assert (g.depths, g.mtp_field) == (depths, field)
    absent = read_geometry(config(), mtp_default=1)
    assert (absent.depths, absent.mtp_field) == (1, None)
    assert read_geometry(config()).depths == 0


def test_minimax_promises_nothing() -> None:
    assert geometry(num_mtp_modules=3, use_mtp=True).depths == 0


@pytest.mark.parametrize("value", [-1, 1.0, "4", True, 1 << 40, [4]])
def test_a_count_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(RefusedError, match="num_hidden_layers"):
        geometry(num_hidden_layers=value)
    with pytest.raises(RefusedError, match="num_nextn_predict_layers"):
        geometry(num_nextn_predict_layers=value)


def test_a_config_without_model_type_is_refused() -> None:
    with pytest.raises(RefusedError, match="no model_type"):
        read_geometry({"num_hidden_layers": 1})


def test_the_text_part_of_a_wrapper_is_read() -> None:
    g = read_geometry(
        {
            "model_type": "x",
            "num_hidden_layers": 99,
            "tie_word_embeddings": True,
            "text_config": config(mtp_num_hidden_layers=1, num_experts=6),
        }
    )
    assert (g.layers, g.depths, g.experts) == (4, 1, 6)
    # The flag sits on the wrapper.
    assert g.fact("is_tied", 0)


def test_dtypes() -> None:
    assert geometry().dtype == "BF16"
    assert geometry(torch_dtype="float32").dtype == "F32"
    assert geometry(dtype="torch.float16").dtype == "F16"
    with pytest.raises(UnsupportedError, match="int8"):
        _ = geometry(dtype="int8").dtype


def test_dims_are_sums_of_products() -> None:
    g = geometry(a=3, b=5, num_experts=7)
    assert g.dim("a") == 3
    assert g.dim("2*a+b*10") == 56
    assert g.dim("experts") == 7
    assert g.dim("head_dim") == 4
    assert g.dim("num_key_value_heads") == 2
    with pytest.raises(RefusedError, match="c is missing"):
        g.dim("a+c")


def test_a_head_dim_that_cannot_be_is_refused() -> None:
    with pytest.raises(RefusedError, match="not a multiple"):
        geometry(num_attention_heads=3).dim("head_dim")


def test_widths_of_shared_experts() -> None:
    assert geometry(n_shared_experts=2, moe_intermediate_size=6).dim("shared_experts_width") == 12
    assert (
        geometry(moe_num_shared_experts=2, moe_intermediate_size=6).dim("shared_experts_width")
        == 12
    )
    explicit = geometry(shared_expert_intermediate_size=5, moe_intermediate_size=6)
    assert explicit.dim("shared_experts_width") == 5


def test_sliding_layers_by_prefix_and_by_section() -> None:
    by_prefix = geometry(
        num_key_value_heads=1, v_head_dim=3, hybrid_layer_pattern=[0, 1, 1, 0],
        swa_num_key_value_heads=2, swa_v_head_dim=5, num_nextn_predict_layers=1,
    )  # fmt: skip
    assert [by_prefix.dim("num_key_value_heads", i) for i in range(5)] == [1, 2, 2, 1, 2]
    assert [by_prefix.dim("v_head_dim", i) for i in range(5)] == [3, 5, 5, 3, 5]
    by_section = geometry(
        num_attention_groups=1, layer_types=["full_attention", "sliding_attention"] * 2,
        attention_other_setting={"num_attention_heads": 6, "num_attention_groups": 3},
    )  # fmt: skip
    assert [by_section.dim("num_attention_heads", i) for i in range(4)] == [2, 6, 2, 6]
    assert [by_section.dim("num_key_value_heads", i) for i in range(4)] == [1, 3, 1, 3]


@pytest.mark.parametrize(
    ("fields", "moe"),
    [
        ({}, []),
        ({"n_routed_experts": 2}, [0, 1, 2, 3, 4]),
        ({"n_routed_experts": 2, "first_k_dense_replace": 2}, [2, 3, 4]),
        ({"n_routed_experts": 2, "moe_layer_freq": 2}, [0, 2, 4]),
        ({"n_routed_experts": 2, "moe_layer_freq": [0, 1, 0, 1]}, [1, 3, 4]),
        ({"num_experts": 2, "mlp_layer_types": ["dense", "sparse"] * 2}, [1, 3, 4]),
        ({"num_experts": 2, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1, 4]),
        ({"moe_num_experts": 2, "moe_layers_enum": "1,3"}, [1, 3, 4]),
        ({"moe_num_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 2}, [1, 2, 4]),
        ({"moe_num_experts": 2, "moe_layer_start_index": 1, "moe_layer_interval": 2}, [1, 3, 4]),
    ],
)
def test_which_layers_are_moe(fields: dict[str, Any], moe: list[int]) -> None:
    g = geometry(num_nextn_predict_layers=1, **fields)
    assert layers_where(g, "is_moe") == moe
    assert layers_where(g, "is_dense") == [i for i in range(5) if i not in moe]


@pytest.mark.parametrize(
    ("fields", "indexers"),
    [
        ({}, []),
        ({"index_topk": 2}, [0, 1, 2, 3, 4]),
        ({"index_topk": 2, "indexer_types": ["full", "shared", "shared", "full"]}, [0, 3, 4]),
        ({"index_topk": 2, "index_topk_pattern": "FSSF"}, [0, 3, 4]),
        ({"index_topk": 2, "index_topk_freq": 2, "index_skip_topk_offset": 2}, [0, 1, 3, 4]),
        # transformers' default offset
        ({"index_topk": 2, "index_topk_freq": 2}, [0, 1, 3, 4]),
        ({"index_topk": 2, "compress_ratios": [0, 4, 128, 4, 0]}, [1, 3]),
    ],
)
def test_which_layers_have_an_indexer(fields: dict[str, Any], indexers: list[int]) -> None:
    assert layers_where(geometry(num_nextn_predict_layers=1, **fields), "has_indexer") == indexers


@given(st.integers(1, 90), st.integers(1, 8), st.integers(0, 8))
def test_indexer_types_and_their_formula_agree(layers: int, freq: int, offset: int) -> None:
    # Source: transformers 5.24 configuration_glm_moe_dsa.py.
    types = ["full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(layers)]
    listed = geometry(num_hidden_layers=layers, index_topk=1, indexer_types=types)
    by_rule = geometry(
        num_hidden_layers=layers, index_topk=1, index_topk_freq=freq, index_skip_topk_offset=offset
    )
    assert layers_where(listed, "has_indexer") == layers_where(by_rule, "has_indexer")


def test_which_layers_are_linear() -> None:
    by_interval = geometry(full_attention_interval=4, num_nextn_predict_layers=1)
    assert layers_where(by_interval, "is_linear") == [0, 1, 2]
    types = ["full_attention", "linear_attention", "full_attention", "linear_attention"]
    by_list = geometry(layer_types=types, full_attention_interval=4, num_nextn_predict_layers=1)
    assert layers_where(by_list, "is_linear") == [1, 3]
    assert layers_where(geometry(), "is_linear") == []


def test_hybrid_patterns_in_letters_and_words() -> None:
    letters = geometry(
        hybrid_override_pattern="ME*-", mtp_hybrid_override_pattern="*E",
        num_nextn_predict_layers=2,
    )  # fmt: skip
    assert (letters.layers, letters.mtp_inner) == (4, 2)
    kinds = ["is_hybrid_mamba", "is_hybrid_moe", "is_hybrid_attention", "is_hybrid_mlp"]
    assert [[i for i in range(8) if letters.fact(k, i)] for k in kinds] == [
        [0], [1, 5, 7], [2, 4, 6], [3],
    ]  # fmt: skip
    assert [i for i in range(4, 8) if letters.fact("is_first_inner", i)] == [4, 6]
    assert [i for i in range(4, 8) if letters.fact("is_last_inner", i)] == [5, 7]
    words = geometry(layers_block_type=["mamba", "moe", "attention", "mlp"])
    assert [[i for i in range(4) if words.fact(k, i)] for k in kinds] == [[0], [1], [2], [3]]


#: Every field that facts and dims read.
FIELDS = (
    "add_full_attention_sink_bias", "add_swa_attention_sink_bias", "attention_bias",
    "attention_other_setting", "compress_ratios", "decoder_sparse_step", "first_k_dense_replace",
    "full_attention_interval", "head_dim", "hybrid_layer_pattern", "hybrid_override_pattern",
    "index_skip_topk_offset", "index_topk", "index_topk_freq", "index_topk_pattern",
    "indexer_types", "layer_types", "linear_num_key_heads", "linear_num_value_heads",
    "mlp_layer_types", "mlp_only_layers", "moe_intermediate_size", "moe_latent_size",
    "moe_layer_end_index", "moe_layer_freq", "moe_layer_interval", "moe_layer_start_index",
    "moe_layers_enum", "mtp_hybrid_override_pattern", "n_routed_experts", "n_shared_experts",
    "num_attention_heads", "num_hash_layers", "num_hidden_layers", "num_key_value_heads",
    "num_nextn_predict_layers", "o_groups", "share_expert_dim", "swa_head_dim",
    "tie_word_embeddings", "v_head_dim",
)  # fmt: skip
hostile = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text("ME*-F,123", max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(FIELDS), hostile))
def test_a_hostile_config_is_refused_or_read(fields: dict[str, Any]) -> None:
    try:
        g = geometry(**fields)
    except RefusedError:
        return
    for layer in range(min(g.layers, 20) + 2):
        reads: list[Callable[[], int]] = [partial(g.fact, fact, layer) for fact in FACTS]
        reads += [partial(g.dim, dim, layer) for dim in DERIVED]
        for read in reads:
            try:
                value = read()
            except RefusedError:
                continue
            assert isinstance(value, int)


def test_a_config_of_more_than_any_model_is_refused() -> None:
    with pytest.raises(RefusedError, match="no model is that large"):
        geometry(num_hidden_layers=1 << 20, n_routed_experts=1 << 20)
    with pytest.raises(RefusedError, match="no model is that large"):
        geometry(num_nextn_predict_layers=1 << 30)


@pytest.mark.parametrize("fact", FACTS)
def test_every_fact_is_a_truth_of_any_config(fact: str) -> None:
    g = geometry(num_nextn_predict_layers=1)
    assert all(g.fact(fact, layer) in (True, False) for layer in range(5))
