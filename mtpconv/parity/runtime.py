"""What megatron-core needs from its process before a model can be built, on CPU and on CUDA.

Megatron-core assumes a GPU and a process group. On a CPU it runs in a single gloo process once
a handful of CUDA calls answer for the CPU; `session` makes them do so and undoes it after.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from typing import Any

from mtpconv.errors import UnsupportedError, UsageError
from mtpconv.parity import delta_nets

Version = tuple[int, ...]


def version_of(distribution: str) -> Version | None:
    """Release number of an installed distribution, None if it is not installed."""
    try:
        text = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
    parts = []
    for part in text.split("+")[0].split("."):
        digits = "".join(c for c in part if c.isdigit())
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def require(*distributions: str) -> None:
    """Check that optional packages are installed.

    Raises: UnsupportedError that names the missing one.
    """
    for name in distributions:
        if version_of(name) is None:
            raise UnsupportedError(f"{name} is not installed; pip install 'mtpconv[parity]'")


def megatron_version() -> Version:
    """Release number of megatron-core.

    Raises: UnsupportedError if it is not installed.
    """
    require("torch", "megatron-core")
    return version_of("megatron-core") or ()


def pick_device(name: str) -> str:
    """`cpu` or `cuda` for the option value `auto`, `cpu` or `cuda`.

    Raises: UsageError for another word; UnsupportedError if cuda is asked for and absent.
    """
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {name}: not one of auto, cpu, cuda")
    present = torch.cuda.is_available()
    if name == "cuda" and not present:
        raise UnsupportedError("--device cuda: torch sees no CUDA device; use --device cpu")
    return "cuda" if name == "cuda" or (name == "auto" and present) else "cpu"


def have_transformer_engine() -> bool:
    """True if Transformer Engine can be imported, which its version alone does not promise."""
    try:
        import transformer_engine  # type: ignore[import-not-found]  # noqa: F401
    except (ImportError, OSError, RuntimeError):  # a broken CUDA install raises any of them
        return False
    return True


def _cpu_patches() -> Iterator[tuple[Any, str, Any]]:
    """The attributes that keep megatron-core from running on a CPU, and what to put there.

    Source: megatron-core 0.16.1 and 0.19.2, measured 2026-11-29.
    """
    import torch
    from megatron.core.transformer import multi_latent_attention as mla
    from megatron.core.transformer.moe import moe_utils

    yield torch.cuda, "current_device", lambda: torch.device("cpu")
    yield torch.cuda, "synchronize", lambda *_args: None
    # 0.16.1 defines neither name when Transformer Engine is absent, and guards on the second.
    if not hasattr(moe_utils, "te_general_gemm"):
        yield moe_utils, "te_general_gemm", None
    if not have_transformer_engine():
        yield mla, "HAVE_TE", False
    yield from delta_nets.cpu_patches()


@contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    absent = object()
    before = getattr(owner, name, absent)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is absent:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


_open: str | None = None


@contextmanager
def session(device: str) -> Iterator[None]:
    """A process in which megatron-core models can be built, loaded, saved and run.

    One rank, model parallel sizes 1. Entering while a session for the same device is open is
    free, so that callers need not know whether they are inside one.

    Raises: UsageError if a session for the other device is open.
    """
    global _open
    if _open is not None:
        if _open != device:
            raise UsageError(f"a megatron session on {_open} is open; close it to use {device}")
        yield
        return
    megatron_version()
    import torch

    with quiet():
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mtpconv-"))
        if device == "cpu":
            for owner, name, value in _cpu_patches():
                stack.enter_context(_patched(owner, name, value))
            # Megatron compiles some functions; one forward pass is not worth that.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        torch.distributed.init_process_group(
            "gloo" if device == "cpu" else "nccl",
            init_method=f"file://{folder}/rendezvous",
            rank=0,
            world_size=1,
        )
        stack.callback(torch.distributed.destroy_process_group)
        parallel_state.initialize_model_parallel(1, 1)
        stack.callback(parallel_state.destroy_model_parallel)
        if device == "cuda":
            model_parallel_cuda_manual_seed(0)
        _open = device
        try:
            yield
        finally:
            _open = None


def require_session() -> str:
    """Device of the open session.

    Raises: RuntimeError outside a session: the caller's fault, not the user's.
    """
    if _open is None:
        raise RuntimeError("megatron-core is used outside mtpconv.parity.runtime.session")
    return _open


@contextmanager
def quiet() -> Iterator[None]:
    """Megatron's start-up warnings and INFO lines say nothing about the checkpoint."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
