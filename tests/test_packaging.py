from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
TABLES = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("mappings/**/*.toml"))

#: What only mtpconv.parity may import, and only when a model is really run.
HEAVY = ("torch", "transformers", "megatron")

#: Modules that import an optional package late, and say which extra brings it if it is absent.
OPTIONAL = {"mtpconv/store/object_store.py": {"fsspec"}, "mtpconv/store/upload.py": {"fsspec"}}


def _clean_environment(**more: str) -> dict[str, str]:
    """The environment without what would lead Python to the checkout."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return {**kept, **more}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without network through the source distribution, as for a release."""
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    subprocess.run([*build, "-t", "sdist"], cwd=ROOT, check=True, capture_output=True)
    (archive,) = out.glob("*.tar.gz")
    source = out / "source"
    subprocess.run([sys.executable, "-m", "tarfile", "-e", str(archive), str(source)], check=True)
    (unpacked,) = source.iterdir()
    subprocess.run([*build, "-t", "wheel"], cwd=unpacked, check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed, nothing else in it."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True)
    return target


def _files(package: Path) -> set[str]:
    return {p.relative_to(package).as_posix() for p in package.rglob("*.py")}


def test_the_wheel_holds_the_package_the_tables_and_the_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert TABLES
    assert {f"mtpconv/_{table}" for table in TABLES} <= names
    assert {f"mtpconv/{name}" for name in _files(ROOT / "mtpconv")} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    tops = {name.split("/")[0] for name in names}
    assert tops == {"mtpconv", f"mtpconv-{PROJECT['version']}.dist-info"}


def test_the_version_is_the_same_everywhere() -> None:
    source = (ROOT / "mtpconv" / "__init__.py").read_text("utf-8")
    assert re.findall(r'^__version__ = "(.*)"$', source, re.MULTILINE) == [PROJECT["version"]]


def test_installed_it_finds_its_tables_from_any_folder(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [installed / "bin" / "mtpconv", "check", "glm_moe_dsa"],
        cwd=tmp_path,
        env=_clean_environment(PYTHONPATH=str(installed)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def tripwires(tmp_path: Path) -> Path:
    """A folder of modules that end the program when they are imported, even by a `try`."""
    folder = tmp_path / "tripwires"
    for name in HEAVY:
        (folder / name).mkdir(parents=True)
        code = f'import os\nos.write(2, b"{name} was imported\\n")\nos._exit(99)\n'
        (folder / name / "__init__.py").write_text(code, "utf-8")
    return folder


def _run_light(tripwires: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=tripwires.parent,
        env=_clean_environment(PYTHONPATH=f"{tripwires}{os.pathsep}{ROOT}"),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", HEAVY)
def test_the_tripwires_work(tripwires: Path, name: str) -> None:
    done = _run_light(tripwires, f"try:\n import {name}\nexcept Exception:\n pass")
    assert (done.returncode, done.stderr) == (99, f"{name} was imported\n")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["check", "deepseek_v3"]])
def test_the_command_line_imports_no_heavy_package(tripwires: Path, arguments: list[str]) -> None:
    main = "import sys; from mtpconv.cli import main; sys.exit(main())"
    done = _run_light(tripwires, f"import sys; sys.argv = {['mtpconv', *arguments]!r}; {main}")
    assert done.returncode == 0, done.stderr


def _import_all(root: Path) -> str:
    """Code that imports every module of the package in this folder, except parity's."""
    found = []
    for path in sorted((root / "mtpconv").rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        if parts[1:2] != ["parity"] and parts[-1] != "__main__":
            found.append(".".join(parts))
    return f"import importlib\nfor m in {found!r}: importlib.import_module(m)"


def test_no_module_outside_parity_imports_a_heavy_package(tripwires: Path) -> None:
    done = _run_light(tripwires, _import_all(ROOT))
    assert done.returncode == 0, done.stderr


def test_outside_parity_only_the_base_dependencies_are_imported() -> None:
    base = {re.split(r"[^\w-]", line)[0] for line in PROJECT["dependencies"]}
    allowed = sys.stdlib_module_names | base | {"mtpconv"}
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "mtpconv").rglob("*.py")):
        if "parity" in path.relative_to(ROOT).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            foreign = {name.split(".")[0] for name in names} - allowed
            if foreign:
                found.setdefault(path.relative_to(ROOT).as_posix(), set()).update(foreign)
    assert found == OPTIONAL


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pip_install_brings_all_that_the_base_commands_need(wheel: Path, tmp_path: Path) -> None:
    """Installed with its dependencies only, from the registry that pip is set up for."""
    programs = tmp_path / "venv" / "bin"
    venv.create(programs.parent, with_pip=True)
    python, constraints = str(programs / "python"), str(ROOT / "constraints.txt")
    environment = _clean_environment()
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", constraints, str(wheel)]
    subprocess.run(pip, check=True, env=environment, stdin=subprocess.DEVNULL)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    for command in ([python, "-c", _import_all(packages)], [str(programs / "mtpconv"), "--help"]):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
