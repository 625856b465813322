"""An attention model as Megatron's HybridModel has it: a layer of GPTModel is two layers there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtpconv.convert import hf2mcore, mcore2hf
from mtpconv.geometry import read_geometry
from mtpconv.megatron_args import megatron_args, transformer_fields
from mtpconv.parity import mcore, runtime
from mtpconv.store.torch_dist import open_torch_dist
from tests.convert.folders import file_hashes, make_hf
from tests.parity import configs
from tests.parity.test_hybrid_load import mamba, on_cpu, stack_spec
from tests.store.respelled import respelled

__all__ = ["mamba"]
pytestmark = pytest.mark.megatron
MLP = ("pre_mlp_layernorm", "mlp")


def build(config: configs.Config) -> Any:
    """A HybridModel with an attention layer and a layer of experts, or a dense one, in turn."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    args = megatron_args(read_geometry(config))
    dense = config["first_k_dense_replace"]
    pairs = ["*-" if layer < dense else "*E" for layer in range(config["num_hidden_layers"])]
    pattern = "/".join(["".join(pairs), *["*E"] * config["num_nextn_predict_layers"]])
    transformer = TransformerConfig(
        **transformer_fields(args)
        | on_cpu()
        | {"num_layers": 2 * config["num_hidden_layers"], "moe_layer_freq": 1}
    )
    return HybridModel(
        config=transformer,
        hybrid_stack_spec=stack_spec(),
        vocab_size=args["padded_vocab_size"],
        max_sequence_length=args["max_position_embeddings"],
        hybrid_layer_pattern=pattern,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        parallel_output=False,
    )


def hybrid_keys(config: configs.Config) -> list[tuple[str, str]]:
    """What to replace in GPTModel's keys, written out by hand."""
    layers = [
        (f"decoder.layers.{n}.{part}.", f"decoder.layer.{2 * n + (part in MLP)}.{part}.")
        for n in range(config["num_hidden_layers"])
        for part in ("self_attention", "input_layernorm", *MLP)
    ]
    inner = [
        (f".transformer_layer.{part}.", f".mtp_model_layer.layers.{int(part in MLP)}.{part}.")
        for part in ("self_attention", "input_layernorm", *MLP)
    ]
    back = ("decoder.layer.", "decoder.layers.")
    return [*layers, back, *inner, ("decoder.final_layernorm", "decoder.final_norm")]


def test_megatron_loads_and_saves_what_hybrid_layers_reads(
    mamba: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from megatron.core.transformer import attention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    monkeypatch.setattr(attention, "TENorm", WrappedTorchNorm)
    config = {**configs.GLM4_MOE, "dtype": "float32"}
    hf = make_hf(tmp_path / "hf", config)
    hf2mcore(hf, tmp_path / "mcore")
    other = respelled(tmp_path / "mcore", tmp_path / "hybrid", *hybrid_keys(config))
    metadata = {"non_homogeneous_layers": True, "singleton_local_shards": False}
    with runtime.quiet():
        model = build(config)
        state = model.sharded_state_dict(metadata=metadata)
        asked = {k for k in mcore.sharded_keys(state) if "_extra_state" not in k}
        assert set(open_torch_dist(other).tensors) == asked
        loaded = dist_checkpointing.load(state, str(other), strict=StrictHandling.IGNORE_ALL)
        wanted = {n: v for n, v in model.state_dict().items() if hasattr(v, "detach")}
        model.load_state_dict({n: loaded[n] for n in wanted}, strict=False)
        saved = tmp_path / "later/iter_0000001"
        saved.mkdir(parents=True)
        again = model.sharded_state_dict(metadata=metadata)
        dist_checkpointing.save(again, str(saved), content_metadata=metadata)
    done = mcore2hf(tmp_path / "later", tmp_path / "back", like=hf)
    assert done.layout == "stacked_experts+hybrid_layers; HybridModel"
    assert file_hashes(tmp_path / "back") == file_hashes(hf)
