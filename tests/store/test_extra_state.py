from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtpconv.store.dist_metadata_writer import write_common, write_config, write_metadata
from mtpconv.store.extra_state import extra_state_keys
from mtpconv.store.torch_dist import open_torch_dist
from mtpconv.store.torch_dist_writer import TorchDistWriter
from mtpconv.tensors import TensorSpec
from tests.store.dist import stored_bytes


def keys(*names_and_shapes: tuple[str, tuple[int, ...]]) -> list[str]:
    return list(extra_state_keys({n: TensorSpec("BF16", s) for n, s in names_and_shapes}))


def test_one_object_for_a_linear_layer_of_its_own() -> None:
    assert keys(
        ("decoder.layers.3.mlp.linear_fc1.weight", (8, 4)),
        ("decoder.layers.3.mlp.linear_fc1.layer_norm_weight", (4,)),
        ("mtp.layers.0.eh_proj.weight", (4, 8)),
        ("decoder.final_layernorm.weight", (4,)),
    ) == [
        "decoder.layers.3.mlp.linear_fc1._extra_state/shard_0_1",
        "mtp.layers.0.eh_proj._extra_state/shard_0_1",
        "decoder.final_layernorm._extra_state/shard_0_1",
    ]


def test_one_object_for_each_stacked_layer_and_expert() -> None:
    assert keys(("decoder.layers.mlp.linear_fc2.weight", (2, 4, 8))) == [
        "decoder.layers.mlp.linear_fc2._extra_state/shard_0_2",
        "decoder.layers.mlp.linear_fc2._extra_state/shard_1_2",
    ]
    assert keys(("mtp.layers.0.t.mlp.experts.experts.linear_fc2.weight", (2, 4, 8))) == [
        "mtp.layers.0.t.mlp.experts.experts.linear_fc2._extra_state/shard_0_2",
        "mtp.layers.0.t.mlp.experts.experts.linear_fc2._extra_state/shard_1_2",
    ]
    both = keys(("decoder.layers.mlp.experts.experts.linear_fc1.weight", (2, 3, 4, 8)))
    assert both == [
        f"decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_{i}.{e}_2.3"
        for i in range(2)
        for e in range(3)
    ]
    assert keys(("decoder.layers.1.mlp.experts.experts.7.linear_fc1.weight", (4, 8))) == [
        "decoder.layers.1.mlp.experts.experts.7.linear_fc1._extra_state/shard_0_1"
    ]


def test_the_attention_core_has_one_too() -> None:
    assert keys(("decoder.layers.self_attention.linear_proj.weight", (1, 4, 4))) == [
        "decoder.layers.self_attention.linear_proj._extra_state/shard_0_1",
        "decoder.layers.self_attention.core_attention._extra_state/shard_0_1",
    ]


def test_routers_and_embeddings_have_none() -> None:
    assert not keys(
        ("decoder.layers.1.mlp.router.weight", (8, 4)),
        ("decoder.layers.1.mlp.router.expert_bias", (8,)),
        ("embedding.word_embeddings.weight", (16, 4)),
        ("decoder.layers.1.mlp.shared_experts.gate_weight", (1, 4)),
    )


@pytest.mark.megatron
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("dialect", ["te", "local"])
def test_a_model_with_mtp_loads_what_has_these_keys(
    megatron_cpu: None, tmp_path: Path, dialect: Any, stacked: bool
) -> None:
    import torch

    from mtpconv.parity import mcore, runtime
    from tests.parity import configs

    models = ["glm4_moe", "deepseek_v3", "deepseek_v3, layers alike"]
    if runtime.megatron_version() >= (0, 19):
        models.append("glm_moe_dsa")
    for name in models:
        config = dict(configs.WITH_MTP[name])
        before = mcore.build(config, seed=1)
        saved = open_torch_dist(
            mcore.save(before, tmp_path / f"{name} saved", dialect=dialect, stacked=stacked)
        )
        asked = {key for key in saved.objects if "_extra_state/" in key}
        offered = list(extra_state_keys(saved.tensors))
        assert asked <= set(offered)
        assert len(offered) == len(set(offered))

        folder = tmp_path / f"{name} written"
        folder.mkdir()
        with TorchDistWriter(folder) as writer:
            for key, spec in saved.tensors.items():
                boxes = {chunk.box.offsets: chunk.box for chunk in saved.chunks(key)}
                for at, data in stored_bytes(saved, key).items():
                    writer.write(key, spec, boxes[at], [data])
            for key in offered:
                writer.write_object(key, [None])
            write_metadata(folder, writer.close())
        write_common(folder, saved.common)
        write_config(folder)
        after = mcore.build(config, seed=2)
        mcore.load(after, folder)  # at the default strictness
        left, right = mcore.module_tensors(before), mcore.module_tensors(after)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)
