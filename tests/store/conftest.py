from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def megatron_cpu() -> Iterator[None]:
    """A megatron-core process on the CPU; the test is skipped where it is not installed."""
    pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    pytest.importorskip("psutil")  # without it Megatron 0.16.1 waits for ever when saving
    from mtpconv.parity import runtime

    with runtime.session("cpu"):
        yield
