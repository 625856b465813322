"""Make the virtual environment of a kind, unless it exists, and print where it is.

Environments live in a cache folder under a name that says what is in them: the kind, the Python
version and a hash over the interpreter, the dependency list and the constraints. Two checkouts
with the same dependencies share one, an environment never changes after it was built, and 6 GB
are unpacked once. mtpconv itself is not installed into it: it is run from the checkout.

Only the standard library is imported here; this runs before anything is installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: The extras of pyproject.toml that each kind installs on top of the base dependencies.
#: `lint` has the test extra because mypy reads the tests too.
KINDS = {
    "base": (),
    "lint": ("lint", "test"),
    "test": ("parity", "remote", "test", "lint"),
}

#: Written last; an environment without it was interrupted and is built again.
MARK = "complete"


def requirements(root: Path, kind: str) -> list[str]:
    """The requirement lines of a kind, from pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    lines = list(project["dependencies"])
    for extra in KINDS[kind]:
        lines += project["optional-dependencies"][extra]
    return sorted(lines)


def name_of(kind: str, wanted: Sequence[str], constraints: bytes) -> str:
    """The folder name of an environment; it changes whenever the content would."""
    python = f"{platform.python_implementation()} {sys.version} {platform.machine()}"
    parts = [python, sys.base_prefix, *wanted, constraints.decode()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return f"{kind}-py{sys.version_info.major}.{sys.version_info.minor}-{digest}"


def cache() -> Path:
    """The folder that holds the environments of every checkout."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mtpconv" / "venvs"


def is_complete(venv: Path) -> bool:
    """Whether the environment was built to the end and its Python is still installed."""
    if not (venv / MARK).is_file():
        return False
    try:
        return subprocess.run([venv / "bin" / "python", "-c", ""], check=False).returncode == 0
    except OSError:
        return False


def build(venv: Path, wanted: Sequence[str], constraints: Path) -> None:
    """Build the environment in place: its scripts hold its path, so it cannot be moved later.

    Raises: CalledProcessError if a step fails; what was made so far is removed.
    """
    shutil.rmtree(venv, ignore_errors=True)
    python = venv / "bin" / "python"
    try:
        if find_spec("ensurepip"):
            _run(sys.executable, "-m", "venv", venv)
        else:  # the distribution has split it off
            _run(sys.executable, "-m", "venv", "--without-pip", venv)
            _run(sys.executable, "-m", "pip", "--python", python, "install", "pip")
        _run(python, "-m", "pip", "install", "--constraint", constraints, *wanted)
    except BaseException:
        shutil.rmtree(venv, ignore_errors=True)
        raise
    (venv / MARK).write_text("\n".join(wanted) + "\n", "utf-8")


def _run(*command: str | Path) -> None:
    # stdout carries one thing, the path of the environment.
    environment = {**os.environ, "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run(
        command, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment
    )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file; the system gives it back if this process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another build of {path.stem}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def link(venv: Path, at: Path, *, replace: bool) -> None:
    """Let `at` point to the environment; a real folder there is the user's and stays."""
    if at.is_symlink():
        if at.exists() and not replace:
            return
    elif at.exists():
        return
    fresh = at.with_name(f"{at.name}.{os.getpid()}")
    fresh.symlink_to(venv)
    fresh.replace(at)


def ensure(kind: str, root: Path = ROOT) -> Path:
    """The environment of a kind, built if it does not exist.

    Raises: CalledProcessError if it cannot be built.
    """
    constraints = root / "constraints.txt"
    wanted = requirements(root, kind)
    name = name_of(kind, wanted, constraints.read_bytes())
    venv = cache() / name
    if not is_complete(venv):
        with locked(cache() / f"{name}.lock"):
            if not is_complete(venv):
                _say(f"building {venv}")
                build(venv, wanted, constraints)
    # The test environment has everything, so it is the one an editor should see.
    link(venv, root / ".venv", replace=kind == "test")
    return venv


def _say(text: str) -> None:
    print(f"venv: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Print the path of the environment of the kind that the command line names."""
    if len(arguments) != 1 or arguments[0] not in KINDS:
        _say(f"usage: environment.py {{{','.join(KINDS)}}}")
        return 2
    try:
        print(ensure(arguments[0]))
    except subprocess.CalledProcessError as error:
        _say(f"`{' '.join(map(str, error.cmd))}` failed; see above")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
