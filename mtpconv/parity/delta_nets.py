"""Gated delta nets from Megatron's local modules, and zero-centred norms, on a CPU.

All weights, projections, the convolution and the delta rule are Megatron's own: its
`GatedDeltaNet` runs in its deterministic mode, which is plain torch. Two things are ours,
because Megatron takes them from packages that need CUDA: the L2 norm of queries and keys
(flash-linear-attention), and the RMS norm whose gamma is stored around 0 (Transformer Engine).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

#: Source: flash-linear-attention 1165df27 fla/modules/l2norm.py, the default, read 2026-11-29.
L2NORM_EPS = 1e-6


def l2norm(x: Any, eps: float = L2NORM_EPS) -> Any:
    """Each vector of the last axis over its length.

    Shape: any; the same. Source: as `L2NORM_EPS`: x / sqrt(sum(x^2) + eps), summed in float32.
    """
    wide = x.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


class _NoTracker:
    """In place of the random states of CUDA devices, which a CPU does not have."""

    def fork(self) -> AbstractContextManager[None]:
        """Nothing to switch to."""
        return nullcontext()


@functools.cache
def zero_centred_norm() -> type:
    """An RMS norm that multiplies by 1 + gamma, as Transformer Engine's does when so told.

    Shape: weight [size]; input [..., size], result the same.
    """
    import torch

    class ZeroCentredNorm(torch.nn.RMSNorm):
        def reset_parameters(self) -> None:
            """Multiply by one."""
            torch.nn.init.zeros_(self.weight)

        def forward(self, x: Any) -> Any:
            one_more = 1 + self.weight.float()
            size = self.normalized_shape
            return torch.nn.functional.rms_norm(x.float(), size, one_more, self.eps).to(x.dtype)

    return ZeroCentredNorm


def _torch_norm(original: Any) -> Any:
    """`WrappedTorchNorm.__new__` that also knows zero-centred RMS norms."""

    def new(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **others: Any) -> Any:
        if config.layernorm_zero_centered_gamma and config.normalization == "RMSNorm":
            return zero_centred_norm()(hidden_size, eps=eps)
        return original(cls, config=config, hidden_size=hidden_size, eps=eps, **others)

    return new


def cpu_patches() -> Iterator[tuple[Any, str, Any]]:
    """Attributes that keep delta nets and zero-centred norms from running on a CPU.

    Source: megatron-core 0.16.1 and 0.19.2, measured 2026-11-29.
    """
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    yield WrappedTorchNorm, "__new__", _torch_norm(WrappedTorchNorm.__new__)
    # 0.19 has the class in one module and what it calls in its base class's.
    modules = (sys.modules[base.__module__] for base in GatedDeltaNet.__mro__)
    module = next(module for module in modules if hasattr(module, "HAVE_FLA"))
    yield module, "HAVE_FLA", True
    yield module, "l2norm", l2norm
    yield module, "get_cuda_rng_tracker", _NoTracker


def local_delta_net() -> Any:
    """Spec of a gated delta net from Megatron's local linears."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
        ),
    )
