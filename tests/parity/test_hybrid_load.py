"""What hf2mcore writes for Nemotron-H, loaded by Megatron's own HybridModel.

Mamba's kernels need CUDA and are never called; its parameters, their names and how they are cut
into shards are Megatron's. Transformer Engine's fused norm and linear is a linear with the norm's
weight beside it, which is how Megatron stores the pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtpconv.convert import hf2mcore
from mtpconv.geometry import read_geometry
from mtpconv.megatron_args import megatron_args, transformer_fields
from mtpconv.parity import mcore, runtime
from mtpconv.parity.modules import duplicated_linear, plain_attention
from mtpconv.store.torch_dist import open_torch_dist
from tests.convert.folders import make_hf
from tests.parity import configs
from tests.parity.test_families_load import floats

pytestmark = pytest.mark.megatron


@pytest.fixture
def mamba(megatron_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mamba and latent experts without their kernels."""
    if runtime.megatron_version() < (0, 19):
        pytest.skip("HybridModel with MTP came with megatron-core 0.19")
    import torch
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer
    from megatron.core.transformer.moe import moe_layer
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    class Norm(torch.nn.Module):
        """As mamba_mixer.ExtendedRMSNorm, which does not exist without mamba_ssm."""

        def __init__(self, width: int, **_unused: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(width))

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
        ) -> Any:
            return make_sharded_tensors_for_checkpoint(
                self.state_dict(keep_vars=True), prefix, {"weight": 0}, sharded_offsets
            )

    for name, value in {
        "HAVE_MAMBA_SSM": True, "HAVE_EINOPS": True, "ExtendedRMSNorm": Norm,
        "get_cuda_rng_tracker": lambda: SimpleNamespace(fork=nullcontext),
    }.items():  # fmt: skip
        monkeypatch.setattr(mamba_mixer, name, value)
    monkeypatch.setattr(hybrid_block, "TENorm", WrappedTorchNorm)
    monkeypatch.setattr(mamba_context_parallel, "HAVE_EINOPS", True)
    monkeypatch.setattr(moe_layer, "HAVE_TE", True)
    monkeypatch.setattr(moe_layer, "TELinear", duplicated_linear())


def stack_spec() -> Any:
    """Megatron's hybrid_stack_spec with modules that can be built here."""
    import torch
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.hybrid import hybrid_layer_specs as theirs
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    class Fused(ColumnParallelLinear):
        def __init__(self, input_size: int, *args: Any, **options: Any) -> None:
            super().__init__(input_size, *args, **options)
            self.layer_norm_weight = torch.nn.Parameter(torch.empty(input_size))

    local: Mapping[str, Any] = {
        "TELayerNormColumnParallelLinear": Fused, "TEColumnParallelLinear": ColumnParallelLinear,
        "TERowParallelLinear": RowParallelLinear, "TENorm": WrappedTorchNorm,
        "TEDotProductAttention": plain_attention(), "TELinear": duplicated_linear(),
    }  # fmt: skip
    moe = get_moe_module_spec(use_te=False, num_experts=8)
    known = {id(getattr(theirs, name)): value for name, value in local.items()}
    known[id(theirs.moe)] = moe
    return replaced(theirs.hybrid_stack_spec, known)


def replaced(spec: Any, known: Mapping[int, Any]) -> Any:
    """A spec with other modules, at any depth."""
    if id(spec) in known:
        return known[id(spec)]
    if isinstance(spec, partial):
        return partial(spec.func, **{k: replaced(v, known) for k, v in spec.keywords.items()})
    if isinstance(spec, list):
        return [replaced(entry, known) for entry in spec]
    if is_dataclass(spec) and not isinstance(spec, type):
        changed = {f.name: replaced(getattr(spec, f.name), known) for f in fields(spec)}
        return replace(spec, **changed)
    return spec


def on_cpu() -> dict[str, Any]:
    """Settings of a HybridModel from Megatron's local modules, without random weights."""
    import torch

    return {
        "is_hybrid_model": True, "activation_func": torch.nn.functional.silu,
        "params_dtype": torch.float32, "bf16": False, "use_cpu_initialization": True,
        "moe_grouped_gemm": False, "persist_layer_norm": False, "transformer_impl": "local",
        "perform_initialization": False, "moe_token_dispatcher_type": "allgather",
    }  # fmt: skip


def build(config: configs.Config) -> Any:
    """A HybridModel from the Megatron arguments of the config."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    args = megatron_args(read_geometry(config))
    transformer = TransformerConfig(**transformer_fields(args) | on_cpu())
    return HybridModel(
        config=transformer,
        hybrid_stack_spec=stack_spec(),
        vocab_size=args["padded_vocab_size"],
        max_sequence_length=args["max_position_embeddings"],
        hybrid_layer_pattern=args["hybrid_layer_pattern"],
        position_embedding_type=args["position_embedding_type"],
        share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
        parallel_output=False,
    )


#: What a module tensor of each kind of layer holds, in tensors of the HF layer.
LAYER = {
    "mixer.in_proj.layer_norm_weight": "norm", "mixer.in_proj.weight": "mixer.in_proj",
    "mixer.out_proj.weight": "mixer.out_proj", "mixer.norm.weight": "mixer.norm",
    "mixer.conv1d_weight": "mixer.conv1d",
    "self_attention.linear_qkv.layer_norm_weight": "norm",
    "self_attention.linear_proj.weight": "mixer.o_proj",
    "mlp.linear_fc1.layer_norm_weight": "norm", "mlp.linear_fc1.weight": "mixer.up_proj",
    "mlp.linear_fc2.weight": "mixer.down_proj", "pre_mlp_layernorm.weight": "norm",
    "mlp.router.weight": "mixer.gate", "mlp.fc1_latent_proj.weight": "mixer.fc1_latent_proj",
    "mlp.fc2_latent_proj.weight": "mixer.fc2_latent_proj",
    "mlp.shared_experts.linear_fc1.weight": "mixer.shared_experts.up_proj",
    "mlp.shared_experts.linear_fc2.weight": "mixer.shared_experts.down_proj",
}  # fmt: skip
PLAIN = {
    "mixer.conv1d_bias": "mixer.conv1d.bias", "mixer.A_log": "mixer.A_log", "mixer.D": "mixer.D",
    "mixer.dt_bias": "mixer.dt_bias",
    "mlp.router.expert_bias": "mixer.gate.e_score_correction_bias",
}  # fmt: skip
ROOT = {
    "embedding.word_embeddings.weight": "backbone.embeddings.weight",
    "decoder.final_norm.weight": "backbone.norm_f.weight", "output_layer.weight": "lm_head.weight",
}  # fmt: skip


def expected(tensors: Mapping[str, Any], name: str) -> Any:
    """What a tensor of the live model must hold."""
    import torch

    if name in ROOT:
        return tensors[ROOT[name]]
    words = name.split(".")
    if words[0] == "mtp" and words[3] != "mtp_model_layer":
        flat = 2 * int(words[2]) + (words[3] == "final_layernorm")
        return tensors[f"mtp.layers.{flat}.{words[3]}.weight"]
    if words[0] == "mtp":
        at = f"mtp.layers.{2 * int(words[2]) + int(words[5])}."
        tail = ".".join(words[6:])
    else:
        at, tail = f"backbone.layers.{words[2]}.", ".".join(words[3:])
    if tail == "self_attention.linear_qkv.weight":
        parts = [tensors[f"{at}mixer.{x}_proj.weight"].unflatten(0, (2, -1)) for x in "qkv"]
        return torch.cat(parts, 1).flatten(0, 1)
    expert = tail.partition("mlp.experts.local_experts.")[2]
    if expert:
        number, linear, _ = expert.split(".")
        half = "up_proj" if linear == "linear_fc1" else "down_proj"
        return tensors[f"{at}mixer.experts.{number}.{half}.weight"]
    return tensors[at + (PLAIN[tail] if tail in PLAIN else LAYER[tail] + ".weight")]


@pytest.mark.parametrize("depths", [0, 2])
@pytest.mark.parametrize("pattern", ["MEM*-E", "M*M-"])
def test_a_hybrid_model_loads(mamba: None, tmp_path: Path, depths: int, pattern: str) -> None:
    from megatron.core import dist_checkpointing

    config = configs.NEMOTRON_H | {
        "hybrid_override_pattern": pattern, "num_nextn_predict_layers": depths, "dtype": "float32",
    }  # fmt: skip
    hf = make_hf(tmp_path / "hf", config)
    hf2mcore(hf, tmp_path / "mcore")
    model = build(config)
    state = model.sharded_state_dict(
        metadata={"non_homogeneous_layers": True, "singleton_local_shards": False}
    )
    assert set(open_torch_dist(tmp_path / "mcore").tensors) <= mcore.sharded_keys(state)
    loaded = dist_checkpointing.load(state, str(tmp_path / "mcore" / "release"))
    wanted = {n: v for n, v in model.state_dict().items() if hasattr(v, "detach")}
    model.load_state_dict({n: loaded[n] for n in wanted}, strict=False)
    tensors = floats(hf, config)
    for name, value in wanted.items():
        want = expected(tensors, name)
        assert want.shape == value.shape, name
        assert want.contiguous().numpy().tobytes() == value.contiguous().numpy().tobytes(), name
    assert len(wanted) > 20
