"""Which `_extra_state` objects Megatron asks for when it loads a checkpoint.

Every linear layer of Megatron, every linear layer, norm and attention core of Transformer
Engine has one: scales for FP8 training, nothing otherwise. A load at the default strictness
fails if one is absent, and does not mind one that it did not ask for, so a writer stores those
of every spec.

Source: megatron-core 0.16.1 and 0.19.2 megatron/core/transformer/utils.py
(make_sharded_object_for_checkpoint), moe/experts.py, extensions/transformer_engine.py, read
2026-11-29. Transformer Engine's norms and attention cores: github.com/NVIDIA/cosmos issue 69
(q_layernorm) and github.com/modelscope/ms-swift issue 6637 (core_attention), read 2026-11-29.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from mtpconv.tensors import Shape, TensorSpec

_PARAMETERS = frozenset({"weight", "bias", "layer_norm_weight", "layer_norm_bias"})
#: Modules with parameters that are neither linear layer nor norm.
_PLAIN = frozenset({"router", "word_embeddings", "position_embeddings", "conv1d"})


def extra_state_keys(tensors: Mapping[str, TensorSpec]) -> Iterator[str]:
    """The keys of all `_extra_state` objects that go with a checkpoint's tensors, each once.

    Law: for stacked layers and experts there is one object per layer and expert:
        `<module>._extra_state/shard_<layer>.<expert>_<layers>.<experts>`.
    """
    stacks: dict[str, Shape] = {}
    for key, spec in tensors.items():
        module, _, parameter = key.rpartition(".")
        if parameter not in _PARAMETERS or module.rpartition(".")[2] in _PLAIN:
            continue
        stack = spec.shape[: _stacked_axes(module)]
        stacks[module] = stack
        attention, _, last = module.rpartition(".")
        if last == "linear_proj":
            stacks[f"{attention}.core_attention"] = stack
    for module, stack in stacks.items():
        counts = stack or (1,)
        shape = ".".join(map(str, counts))
        for index in product(*map(range, counts)):
            yield f"{module}._extra_state/shard_{'.'.join(map(str, index))}_{shape}"


def _stacked_axes(module: str) -> int:
    """How many leading axes of a tensor count layers and experts, known from its key.

    A container that is followed by a number is not stacked: `layers.3.`, but `layers.mlp.`.
    """
    parts = module.split(".")
    axes = 0
    for part, before, after in zip(parts, ["", *parts], [*parts[1:], "0"], strict=False):
        stacks = part == "layers" or (part == "experts" and before == "experts")
        if stacks and not after.isdigit():
            axes += 1
    return axes
