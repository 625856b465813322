from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tools import environment

PYPROJECT = """
[project]
dependencies = ["base>=1"]
[project.optional-dependencies]
parity = ["heavy>=2"]
remote = ["far"]
test = ["runner"]
lint = ["linter"]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a cache folder of its own."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "pyproject.toml").write_text(PYPROJECT, "utf-8")
    (root / "constraints.txt").write_text("base==1.5\n", "utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return root


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[list[str | Path]]:
    """The commands of all builds; they run a bare environment instead of pip."""
    commands: list[list[str | Path]] = []

    def run(*command: str | Path) -> None:
        commands.append(list(command))
        if "venv" in command:
            subprocess.run([*command[:-1], "--without-pip", command[-1]], check=True)

    monkeypatch.setattr(environment, "_run", run)
    return commands


def test_a_kind_has_the_base_dependencies_and_those_of_its_extras(project: Path) -> None:
    assert environment.requirements(project, "base") == ["base>=1"]
    assert environment.requirements(project, "lint") == ["base>=1", "linter", "runner"]
    everything = ["base>=1", "far", "heavy>=2", "linter", "runner"]
    assert environment.requirements(project, "test") == everything


def test_the_real_project_has_every_extra_that_a_kind_names() -> None:
    for kind in environment.KINDS:
        assert environment.requirements(ROOT, kind)


def test_the_name_changes_with_all_that_goes_into_the_environment() -> None:
    names = {
        environment.name_of("base", ["a"], b""),
        environment.name_of("test", ["a"], b""),
        environment.name_of("base", ["a", "b"], b""),
        environment.name_of("base", ["a"], b"a==1"),
    }
    assert len(names) == 4
    assert environment.name_of("base", ["a"], b"") in names


def test_an_environment_is_built_once_and_linked(
    project: Path, built: list[list[str | Path]]
) -> None:
    venv = environment.ensure("base", project)
    assert (project / ".venv").resolve() == venv.resolve()
    assert built[-1][-1] == "base>=1"
    assert project / "constraints.txt" in built[-1]
    count = len(built)
    assert environment.ensure("base", project) == venv
    assert len(built) == count


def test_an_interrupted_build_is_done_again(project: Path, built: list[list[str | Path]]) -> None:
    venv = environment.ensure("base", project)
    (venv / environment.MARK).unlink()
    (venv / "leftover").touch()
    assert environment.ensure("base", project) == venv
    assert not (venv / "leftover").exists()
    assert environment.is_complete(venv)


def test_an_environment_whose_python_is_gone_is_built_again(
    project: Path, built: list[list[str | Path]]
) -> None:
    venv = environment.ensure("base", project)
    python = venv / "bin" / "python"
    python.unlink()
    python.symlink_to(project / "removed")
    assert not environment.is_complete(venv)
    assert environment.is_complete(environment.ensure("base", project))


def test_a_failed_build_leaves_nothing(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*command: str | Path) -> None:
        if "pip" in command:
            raise subprocess.CalledProcessError(1, command)
        Path(command[-1]).mkdir(parents=True)

    monkeypatch.setattr(environment, "_run", run)
    with pytest.raises(subprocess.CalledProcessError):
        environment.ensure("base", project)
    assert [p.suffix for p in environment.cache().iterdir()] == [".lock"]
    assert not (project / ".venv").is_symlink()


def test_the_link_prefers_the_test_environment_and_spares_a_real_folder(
    project: Path, built: list[list[str | Path]]
) -> None:
    link = project / ".venv"
    environment.ensure("base", project)
    test = environment.ensure("test", project)
    assert link.resolve() == test.resolve()
    environment.ensure("lint", project)
    assert link.resolve() == test.resolve()
    link.unlink()
    link.mkdir()
    environment.ensure("test", project)
    assert link.is_dir()
    assert not link.is_symlink()


def test_two_at_once_build_one(project: Path, tmp_path: Path) -> None:
    # A build that logs and dawdles stands in for the real one in both processes.
    code = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from tools import environment
def build(venv, wanted, constraints):
    with open({str(tmp_path / "log")!r}, "a") as log:
        log.write("built\\n")
    time.sleep(0.5)
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    (venv / environment.MARK).touch()
environment.build = build
print(environment.ensure("base", Path({str(project)!r})))
"""
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    paths = {process.communicate(timeout=30)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(paths) == 1
    assert (tmp_path / "log").read_text("utf-8") == "built\n"


def _script(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n", "utf-8")
    (folder / name).chmod(0o755)


def _find_python(path: list[Path], *arguments: str, **more: str) -> tuple[int, str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "PYENV_ROOT")}
    # The script itself needs bash, which must be found behind the folders of the test.
    environment |= {"PATH": os.pathsep.join(map(str, path)), "HOME": "/nonexistent", **more}
    done = subprocess.run(
        ["/bin/bash", ROOT / "tools" / "find-python", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.strip()


def test_a_shim_that_does_not_run_is_passed_over(tmp_path: Path) -> None:
    shims, real = tmp_path / "shims", tmp_path / "real"
    _script(shims, "python3.13", "exit 127")
    _script(shims, "python3.12", "exit 127")
    _script(shims, "python3", "exit 127")
    _script(real, "python3", f'exec {sys.executable} "$@"')
    assert _find_python([shims, real]) == (0, str(real / "python3"))
    assert _find_python([shims])[0] == 1


def test_the_newest_name_wins_and_python_overrides_it(tmp_path: Path) -> None:
    for name in ("python3.11", "python3.12"):
        _script(tmp_path, name, f'exec {sys.executable} "$@"')
    assert _find_python([tmp_path]) == (0, str(tmp_path / "python3.12"))
    chosen = str(tmp_path / "python3.11")
    assert _find_python([tmp_path], PYTHON=chosen) == (0, chosen)
    assert _find_python([tmp_path], PYTHON="python3.10")[0] == 1


def test_a_version_is_also_found_in_pyenv_and_must_be_that_version(tmp_path: Path) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    place = tmp_path / "versions" / f"{version}.99" / "bin"
    place.parent.mkdir(parents=True)
    _script(place, f"python{version}", f'exec {sys.executable} "$@"')
    found = _find_python([tmp_path], version, PYENV_ROOT=str(tmp_path))
    assert found == (0, str(place / f"python{version}"))
    _script(tmp_path, "python3.99", f'exec {sys.executable} "$@"')
    assert _find_python([tmp_path], "3.99", PYENV_ROOT=str(tmp_path))[0] == 1
