from __future__ import annotations

from pathlib import Path

import pytest

from mtpconv.errors import RefusedError, UnreadableError, UnsupportedError
from mtpconv.parity import mcore, runtime
from mtpconv.store.torch_dist import open_torch_dist
from tests.parity import checkpoints, configs

pytestmark = pytest.mark.megatron

ALL = configs.WITH_MTP | configs.WITHOUT_MTP


@pytest.mark.parametrize("dialect", mcore.DIALECTS)
@pytest.mark.parametrize("name", ALL)
def test_what_megatron_saves_it_loads(
    megatron_cpu: None, tmp_path: Path, name: str, dialect: str
) -> None:
    import torch

    config = ALL[name]
    checkpoints.need_megatron_for(config)
    before = mcore.build(config, seed=1)
    mcore.save(before, tmp_path, dialect=dialect)
    after = mcore.build(config, seed=2)
    mcore.load(after, tmp_path)
    left, right = mcore.module_tensors(before), mcore.module_tensors(after)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    fresh = mcore.module_tensors(mcore.build(config, seed=2))
    differing = {name for name in left if not torch.equal(left[name], fresh[name])}
    assert differing >= {name for name in left if name.endswith("linear_fc1.weight")}


def test_layers_are_stacked_on_request(megatron_cpu: None, tmp_path: Path) -> None:
    model = mcore.build(configs.DEEPSEEK_V3_ALIKE)
    folder = mcore.save(model, tmp_path / "stacked", stacked=True)
    key = "self_attention.linear_proj.weight"
    assert f"decoder.layers.{key}" in open_torch_dist(folder).tensors
    apart = mcore.save(model, tmp_path / "apart")
    assert f"decoder.layers.0.{key}" in open_torch_dist(apart).tensors
    mcore.load(mcore.build(configs.DEEPSEEK_V3_ALIKE, seed=1), tmp_path / "stacked")


def test_production_names_are_those_of_transformer_engine(
    megatron_cpu: None, tmp_path: Path
) -> None:
    model = mcore.build(configs.DEEPSEEK_V3)
    keys = open_torch_dist(mcore.save(model, tmp_path)).tensors
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in keys
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in keys
    block = "mtp.layers.0.transformer_layer."
    assert f"{block}self_attention.linear_q_up_proj.layer_norm_weight" in keys
    assert f"{block}mlp.experts.experts.linear_fc1.weight" in keys
    assert "mtp.layers.0.eh_proj.weight" in keys


def test_module_names_are_the_same_in_every_version(megatron_cpu: None) -> None:
    tensors = mcore.module_tensors(mcore.build(configs.DEEPSEEK_V3))
    expert = "mtp.layers.0.transformer_layer.mlp.experts.local_experts.7.linear_fc2.weight"
    assert tuple(tensors[expert].shape) == (32, 16)


def test_a_checkpoint_with_more_than_the_model_is_refused(
    megatron_cpu: None, tmp_path: Path
) -> None:
    mcore.save(mcore.build(configs.DEEPSEEK_V3), tmp_path)
    trunk = mcore.build(configs.DEEPSEEK_V3 | {"num_nextn_predict_layers": 0})
    with pytest.raises(RefusedError, match=r"not part of the model.*first mtp\.layers\.0"):
        mcore.load(trunk, tmp_path)


def test_a_checkpoint_with_less_than_the_model_is_refused(
    megatron_cpu: None, tmp_path: Path
) -> None:
    trunk = mcore.build(configs.DEEPSEEK_V3 | {"num_nextn_predict_layers": 0})
    mcore.save(trunk, tmp_path)
    with pytest.raises(RefusedError, match="keys that Megatron asks for are not stored"):
        mcore.load(mcore.build(configs.DEEPSEEK_V3), tmp_path)


def test_a_folder_without_metadata_is_unreadable(megatron_cpu: None, tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match=r"torch_dist|\.metadata"):
        mcore.load(mcore.build(configs.LLAMA), tmp_path)


def test_sparse_attention_says_which_version_it_needs(megatron_cpu: None) -> None:
    if runtime.megatron_version() >= (0, 19):
        pytest.skip("this megatron-core has sparse attention")
    with pytest.raises(UnsupportedError, match=r"needs megatron-core 0\.19 or newer"):
        mcore.build(configs.GLM_MOE_DSA)


def test_outside_a_session_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_open", None)
    with pytest.raises(RuntimeError, match="session"):
        mcore.build(configs.LLAMA)
