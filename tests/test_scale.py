"""GLM-5.2 at its true size, with holes for data: what docs/scale.md measures holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

#: In a process of its own: that of the tests may hold torch in its memory.
_MEASURE = """
import dataclasses, json, sys
from pathlib import Path
from benchmarks import scale
watch, facts = scale.measure(Path(sys.argv[1]))
print(json.dumps([[dataclasses.asdict(stage) for stage in watch.stages], facts]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_terabyte_and_a_half_with_holes(tmp_path: Path) -> None:
    """Copied tensors come back and the headers are the same, or `measure` stops."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path)], cwd=ROOT,
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    stages, facts = json.loads(done.stdout)
    assert facts["tensors"] == 59_585
    assert facts["bytes"] > 1.5e12
    assert facts["farthest"] > 1 << 32
    assert facts["largest"] > 1 << 31
    assert facts["disk"] < 10e9
    assert len(stages) == 4
    for stage in stages:
        assert stage["cpu"] < 120.0, stage
        assert stage["anonymous"] < 150e6 + 59_585 * 1500, stage
