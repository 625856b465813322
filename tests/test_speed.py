"""The steady figures of speed, with wide margins: CPU, memory, imports. See benchmarks/."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import measure, model
from mtpconv.cli.app import app
from tests.conftest import ROOT

#: What takes seconds to import, and what only the command line needs.
HEAVY = {"torch", "transformers", "megatron", "pandas", "fsspec"}
#: What fetches from elsewhere.
AFAR = {"asyncio", "http.client", "ssl", "urllib.request"}
#: What an answer without weights has no use for: numbers, digests, and typer's check of values.
UNUSED = {*HEAVY, *AFAR, "numpy", "blake3", "safetensors", "pydantic", "importlib.metadata"}


def loaded(*arguments: str) -> set[str]:
    """Modules that a command has imported when it ends."""
    code = (
        "import json, sys; sys.argv[1:] = json.loads(sys.argv[1])\n"
        "from mtpconv.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(arguments)], cwd=ROOT,
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    found: list[str] = json.loads(done.stderr.splitlines()[-1])
    return set(found)


def test_help_and_version_import_next_to_nothing() -> None:
    for command in app.registered_commands:
        assert command.callback is not None
        arguments = (command.callback.__name__, "--help")
        assert not loaded(*arguments) & UNUSED, arguments
    assert not loaded("--help") & UNUSED
    assert not loaded("--version") & {*UNUSED, "rich"}


def test_typer_has_no_annotation_to_compile() -> None:
    """It would compile each of every command, four times at every start."""
    for command in app.registered_commands:
        annotations = inspect.get_annotations(command.callback)  # type: ignore[arg-type]
        assert not [name for name, it in annotations.items() if isinstance(it, str)], annotations


def test_no_command_that_moves_bytes_imports_torch_or_http(tmp_path: Path) -> None:
    hf = model.tiny(tmp_path / "hf", "deepseek-v3", num_hidden_layers=4, n_routed_experts=8)
    config = str(ROOT / "fixtures" / "configs" / "glm-5.2.json")
    mcore, back = str(tmp_path / "mcore"), str(tmp_path / "back")
    for arguments in (
        ["plan", config], ["inventory", str(hf)], ["hf2mcore", str(hf), mcore],
        ["mcore2hf", mcore, back], ["audit", str(hf), back], ["audit", str(hf), mcore],
    ):  # fmt: skip
        assert not loaded(*arguments) & {*HEAVY, *AFAR}, arguments
    for arguments in (["audit", str(hf), back, "--quiet"], ["audit", back, "--format", "json"]):
        assert "rich" not in loaded(*arguments), arguments


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12,000 tensors with hardly a byte in them."""
    folder = tmp_path_factory.mktemp("many")
    return model.tiny(folder / "hf", "deepseek-v3", num_hidden_layers=19)


def tensors(hf: Path) -> int:
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    return len(index["weight_map"])


def test_cpu_and_memory_of_a_tensor(many: Path, tmp_path: Path) -> None:
    """About 0.1 ms and 1 KB for each, verification included; a shared machine may need twice."""
    count = tensors(many)
    assert count > 12_000
    there = measure.mtpconv("hf2mcore", many, tmp_path / "mcore", "--quiet")
    back = measure.mtpconv("mcore2hf", tmp_path / "mcore", tmp_path / "back", "--quiet")
    for cost in (there, back):
        assert cost.cpu < 1.0 + count * 400e-6
        assert cost.anonymous < 120e6 + count * 3000


@pytest.mark.slow
def test_cpu_and_memory_of_a_gigabyte(tmp_path: Path) -> None:
    """Every byte read twice, the second time to verify it, and written once; little memory.

    Time in the kernel is left out: a page of a new file costs ten times as much on one machine as
    on another, and from one minute to the next, for `cp` too.
    """
    config = {**model.published("deepseek-v3"), **model.WIDTHS, "hidden_size": 2048,
              "num_hidden_layers": 3, "n_routed_experts": 80}  # fmt: skip
    hf = model.make_model(tmp_path / "hf", config, 2)
    size = measure.size_of(hf)
    assert size > 4e8
    for verify in ([], ["--no-verify"]):
        mcore, back = tmp_path / f"mcore{verify}", tmp_path / f"back{verify}"
        there = measure.mtpconv("hf2mcore", hf, mcore, "--quiet", *verify)
        home = measure.mtpconv("mcore2hf", mcore, back, "--quiet", *verify)
        for cost in (there, home):
            assert cost.user < 2.0 + 3.0 * size / 1e9  # 0.3 + 1.1 on a quiet machine
            assert cost.read < (1.1 if verify else 2.1) * size
            assert cost.written < 1.01 * size
            assert cost.anonymous < 120e6


def test_planning_is_linear(many: Path, tmp_path: Path) -> None:
    twice = model.tiny(tmp_path / "hf", "deepseek-v3", num_hidden_layers=19, n_routed_experts=512)
    costs = [
        measure.mtpconv("hf2mcore", hf, tmp_path / f"mcore{i}", "--quiet").cpu
        for i, hf in enumerate((many, twice))
    ]
    assert costs[1] < 3.0 * costs[0]
