"""Which differences between two configs fail, warn, or are nothing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpconv.audit.config_rules import compare_configs
from tests.audit.models import base_model, compare, said

BASE: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "index_share_for_mtp_iteration": True,
    "vocab_size": 80,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16",
    "eos_token_id": [1, 2],
    "transformers_version": "5.0.0",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "text_config": {"mtp_num_hidden_layers": 1, "vocab_size": 80, "rope_theta": 10000.0},
    "rope_scaling": None,
}
ABSENT = object()


def change(path: str, value: Any) -> dict[str, Any]:
    out = copy.deepcopy(BASE)
    at: Any = out
    *outer, last = path.split(".")
    for key in outer:
        at = at[key]
    if value is ABSENT:
        del at[last]
    else:
        at[last] = value
    return out


def found(before: Any, after: Any, *, requantised: bool = False) -> list[tuple[str, str | None]]:
    differences = compare_configs(before, after, tensors_requantised=requantised)
    return [(f.severity, f.field) for f in differences]


ERRORS = [
    ("num_nextn_predict_layers", ABSENT),
    ("num_nextn_predict_layers", None),
    ("num_nextn_predict_layers", 0),
    ("num_nextn_predict_layers", 2),
    ("num_nextn_predict_layers", True),
    ("text_config.mtp_num_hidden_layers", 0),
    ("text_config.mtp_num_hidden_layers", ABSENT),
    ("index_share_for_mtp_iteration", False),
    ("num_mtp_layers", 1),
    ("vocab_size", 81),
    ("vocab_size", ABSENT),
    ("text_config.vocab_size", 79),
    ("tie_word_embeddings", True),
    ("tie_word_embeddings", ABSENT),
    ("rope_parameters.rope_theta", 1000000),
    ("rope_parameters.rope_theta", ABSENT),
    ("rope_parameters.rope_type", "yarn"),
    ("rope_parameters.factor", 4.0),
    ("text_config.rope_theta", 1e6),
    ("text_config.rope_theta", ABSENT),
    ("partial_rotary_factor", 0.5),
    ("quantization_config", ABSENT),
    ("quantization_config.weight_block_size", [64, 64]),
    ("quantization_config.ignored_layers", ["lm_head"]),
    ("architectures", ["DeepseekV3ForCausalLM"]),
    ("model_type", "deepseek_v3"),
    ("num_hidden_layers", 4),
    ("rms_norm_eps", 1e-6),
]


@pytest.mark.parametrize(("path", "value"), ERRORS)
def test_what_loaders_act_on_fails(path: str, value: Any) -> None:
    assert found(BASE, change(path, value)) == [("error", path)]
    assert found(change(path, value), BASE) == [("error", path)]


@pytest.mark.parametrize(
    ("path", "value"), [("eos_token_id", 1), ("eos_token_id", ABSENT), ("note", "x")]
)
def test_other_fields_warn(path: str, value: Any) -> None:
    assert found(BASE, change(path, value)) == [("warning", path)]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("transformers_version", "5.24.0"),
        ("transformers_version", ABSENT),
        ("use_cache", True),
        ("torch_dtype", ABSENT),
        ("dtype", None),
        ("rope_scaling", ABSENT),
        ("rope_parameters.rope_type", ABSENT),
        ("rope_parameters.rope_theta", 8000000.0),
        ("vocab_size", 80.0),
        ("pad_token_id", None),
    ],
)
def test_cosmetic_differences_are_nothing(path: str, value: Any) -> None:
    assert found(BASE, change(path, value)) == []


def test_dtype_under_either_name() -> None:
    after = change("torch_dtype", ABSENT)
    for value, wanted in (
        ("bfloat16", []), ("torch.bfloat16", []), ("float16", [("warning", "dtype")]),
    ):  # fmt: skip
        after["dtype"] = value
        assert found(BASE, after) == wanted


def test_rope_is_compared_by_meaning() -> None:
    old = {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    new: dict[str, Any] = {
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "yarn", "factor": 4.0}
    }
    assert found(old, new) == []
    new["rope_parameters"]["factor"] = 8.0
    assert found(old, new) == [("error", "rope_scaling.factor")]
    new["rope_parameters"]["factor"], new["rope_theta"] = 4, 1e6
    assert found(old, new) == []  # said twice, and the same
    per_kind = {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    other = copy.deepcopy(per_kind)
    other["rope_parameters"]["sliding_attention"]["rope_theta"] = 1e5
    assert found(per_kind, other) == [("error", "rope_parameters.sliding_attention.rope_theta")]


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 8e6}
ROPES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "the other bag keeps the old factor": (
        {"rope_parameters": YARN},
        {"rope_parameters": {**YARN, "factor": 8.0}, "rope_scaling": {"factor": 4.0}},
        "factor",
    ),
    "the other bag keeps the old theta": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 8e6}},
        {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_theta": 8e6}},
        "rope_theta",
    ),
    "theta outside the bag": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 8e6}},
        {"rope_theta": 1e4, "rope_scaling": {"rope_theta": 8e6}},
        "rope_theta",
    ),
    "both spellings of the type": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4}},
        {"rope_parameters": {"rope_type": "linear", "type": "yarn", "factor": 4}},
        "rope_type",
    ),
    "the default type beside another": (
        {"rope_scaling": {"type": "yarn", "factor": 4}},
        {"rope_scaling": {"type": "yarn", "rope_type": "default", "factor": 4}},
        "rope_type",
    ),
    "two values change places": (
        {"rope_parameters": {"factor": 4}, "rope_scaling": {"factor": 8}},
        {"rope_parameters": {"factor": 8}, "rope_scaling": {"factor": 4}},
        "factor",
    ),
    "a word instead of nothing": ({}, {"rope_scaling": "yarn"}, "rope_scaling"),
    "another word": ({"rope_scaling": "dynamic"}, {"rope_scaling": "linear"}, "rope_scaling"),
    "another list": (
        {"rope_parameters": [{"rope_theta": 1}]},
        {"rope_parameters": [{"rope_theta": 2}]},
        "rope_parameters",
    ),
    "another list inside": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0, 2.0]}},
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0, True]}},
        "short_factor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("level", ["top", "text_config"])
def test_another_rope_in_any_spelling_fails(name: str, level: str) -> None:
    before, after, field = ROPES[name]
    before, after = {"vocab_size": 80, **before}, {"vocab_size": 80, **after}
    if level != "top":
        before, after = {level: before}, {level: after}
    for a, b in ((before, after), (after, before)):
        ((severity, path),) = found(a, b)
        assert (severity, (path or "").rpartition(".")[2]) == ("error", field)
    assert found(before, copy.deepcopy(before)) == found(after, copy.deepcopy(after)) == []


@pytest.mark.parametrize(
    ("old", "new"), [(1, 1.0), ([True, False], [1, 0]), ([1], [1.0]), ({"x": 1}, {"x": 1.0})]
)
def test_mtp_fields_keep_the_type_of_their_values(old: Any, new: Any) -> None:
    for field in ("num_nextn_predict_layers", "mtp_layer_types"):
        ((severity, _),) = found({field: old}, {field: new})
        assert severity == "error"


def test_a_key_with_a_dot_is_not_a_nested_field() -> None:
    inner = {"vocab_size": 80}
    nested: dict[str, Any] = {"text_config": {**inner, "mtp_num_hidden_layers": 1}}
    literal: dict[str, Any] = {"text_config": inner, "text_config.mtp_num_hidden_layers": 1}
    assert found(nested, literal) == [
        ("error", "text_config.mtp_num_hidden_layers"),
        ("error", '"text_config.mtp_num_hidden_layers"'),
    ]
    nested = {"text_config": {**inner, "rope_theta": 1e7}}
    literal = {"text_config": inner, "text_config.rope_theta": 1e7}
    assert ("error", "text_config.rope_theta") in found(nested, literal)


def test_a_quantisation_config_that_went_with_its_tensors_warns() -> None:
    after = change("quantization_config", ABSENT)
    assert found(BASE, after, requantised=True) == [("warning", "quantization_config")]


def test_absent_and_null_mtp_are_different() -> None:
    none, null = {"model_type": "x"}, {"model_type": "x", "num_nextn_predict_layers": None}
    zero = {"model_type": "x", "num_nextn_predict_layers": 0}
    for a, b in ((none, null), (none, zero), (null, zero)):
        assert found(a, b) == [("error", "num_nextn_predict_layers")]
    (one,) = compare_configs(none, null, tensors_requantised=False)
    assert "was absent and is null" in one.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["rope_theta", "rope_scaling", "quantization_config", "a", "b", "dtype",
                         "num_nextn_predict_layers", "text_config", "torch_dtype"]),
        inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip
CONFIGS = st.dictionaries(st.sampled_from(["rope_parameters", "text_config", "dtype", "x"]), JSON)


@given(CONFIGS)
def test_law_a_config_equals_itself(config: dict[str, Any]) -> None:
    assert found(config, copy.deepcopy(config)) == []


@given(CONFIGS, CONFIGS)
def test_law_both_directions_find_the_same_fields(a: dict[str, Any], b: dict[str, Any]) -> None:
    there, back = found(a, b), found(b, a)
    assert len(there) == len(back)
    assert sorted(s for s, _ in there) == sorted(s for s, _ in back)


def test_config_comparison_can_be_switched_off(tmp_path: Path) -> None:
    before = base_model("glm-5.2.json")
    after = before.copy()
    after.config["rope_theta"] = 7
    assert said(compare(before, after, tmp_path / "a")) == [("config_mismatch", "rope_theta")]
    off = compare(before, after, tmp_path / "b", allow=frozenset({"config"}))
    assert off.verdict == "pass"
    assert "config_mismatch" not in off.checked


def test_a_lost_config_is_an_error_of_its_own(tmp_path: Path) -> None:
    from mtpconv.audit.audit import audit
    from tests.audit import sides

    model = base_model("glm-5.2.json")
    before, after = model.write(tmp_path / "a"), model.write(tmp_path / "b")
    (after / "config.json").unlink()
    assert said(audit(sides.hf(before), sides.hf(after))) == [("config_missing", "config.json")]
