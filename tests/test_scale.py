"""GLM-5.2 at its true size, with holes for data: what docs/scale.md measures holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scale import measure


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_terabyte_and_a_half_with_holes(tmp_path: Path) -> None:
    """Copied tensors come back and the headers are the same, or `measure` stops."""
    stages, facts = measure(tmp_path)
    assert facts["tensors"] == 59_585
    assert facts["bytes"] > 1.5e12
    assert facts["farthest"] > 1 << 32
    assert facts["largest"] > 1 << 31
    assert facts["disk"] < 10e9
    assert len(stages) == 4
    for stage in stages:
        assert stage.cpu < 120.0, stage
        assert stage.anonymous < 100e6 + 59_585 * 1200, stage
