"""Fuzzing of every reader: mutated sound inputs, the kept corpus, and coverage-guided runs."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import NAMES, Targets

CORPUS = Path(__file__).parent / "corpus"


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    return Targets(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("name", NAMES)
def test_kept_inputs_raise_only_documented_errors(targets: Targets, name: str) -> None:
    kept = sorted((CORPUS / name).glob("*")) if (CORPUS / name).is_dir() else []
    for path in kept:
        targets.run(name, path.read_bytes())
    targets.run(name, targets.seeds()[name])
    targets.run(name, b"")


@st.composite
def mutations(draw: st.DrawFn) -> list[tuple[float, str, bytes]]:
    """Places (as a fraction of the length) and what happens there."""
    what = st.sampled_from(["replace", "insert", "cut", "end"])
    one = st.tuples(st.floats(0, 1), what, st.binary(min_size=1, max_size=8))
    return draw(st.lists(one, min_size=1, max_size=4))


def mutated(data: bytes, changes: list[tuple[float, str, bytes]]) -> bytes:
    for place, what, part in changes:
        at = int(place * len(data))
        if what == "replace":
            data = data[:at] + part + data[at + len(part) :]
        elif what == "insert":
            data = data[:at] + part + data[at:]
        elif what == "cut":
            data = data[:at] + data[at + len(part) :]
        else:
            data = data[:at]
    return data


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=mutations())
def test_mutated_inputs_raise_only_documented_errors(
    targets: Targets, name: str, changes: list[tuple[float, str, bytes]]
) -> None:
    targets.run(name, mutated(targets.seeds()[name], changes))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_coverage_guided(name: str, tmp_path: Path) -> None:
    """libFuzzer through atheris, from the kept corpus, for a bounded number of inputs.

    With one seed, so that the same code gives the same answer; guided.py by itself hunts on.
    """
    if find_spec("atheris") is None:
        pytest.skip("atheris has no build for this Python")
    script = Path(__file__).parent / "guided.py"
    done = subprocess.run(
        [sys.executable, str(script), name, "-seed=1", "-runs=1500", "-max_total_time=30",
         f"-artifact_prefix={tmp_path}/"],
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
