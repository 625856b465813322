from __future__ import annotations

from collections.abc import Iterator

import pytest

from mtpconv.parity import runtime


@pytest.fixture(scope="session")
def megatron_cpu() -> Iterator[None]:
    """A megatron-core process on the CPU; the test is skipped where it is not installed."""
    pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    pytest.importorskip("psutil")  # without it Megatron 0.16.1 waits for ever when saving
    with runtime.session("cpu"):
        yield


@pytest.fixture
def dsa(megatron_cpu: None) -> None:
    """Skips where megatron-core cannot build sparse attention."""
    if runtime.megatron_version() < (0, 19):
        pytest.skip("sparse attention needs megatron-core 0.19 or newer")
