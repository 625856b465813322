"""What every test can rely on: the options, the markers' meaning, and the shared cases."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

PARITY = ("torch", "megatron-core", "transformers")

# The machines that run this are shared, so how long one example takes says nothing. Everything
# else stays as Hypothesis has it: in CI it tries the same examples each time.
settings.register_profile("mtpconv", parent=settings.default, deadline=None)
settings.load_profile("mtpconv")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --require-parity: without it, a broken environment would only skip tests."""
    parser.addoption(
        "--require-parity",
        action="store_true",
        help=f"fail at once unless {', '.join(PARITY)} are installed",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to skip the Megatron tests where they have to run."""
    if config.getoption("--require-parity"):
        missing = [package for package in PARITY if _version(package) is None]
        if missing:
            raise pytest.UsageError(f"--require-parity: {', '.join(missing)} not installed")


def pytest_report_header() -> str:
    """Say which versions the verdict is about."""
    return ", ".join(f"{p} {_version(p) or 'absent'}" for p in ("numpy", *PARITY))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the gpu tests where torch sees no device."""
    waiting = [item for item in items if item.get_closest_marker("gpu")]
    if not waiting:
        return
    try:
        import torch

        if torch.cuda.is_available():
            return
    except ImportError:
        pass
    for item in waiting:
        item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of cases beside the checkout; skips where there is none."""
    folder = ROOT.parent / "shared"
    if not (folder / "cases").is_dir():
        pytest.skip("no ../shared/cases beside the checkout")
    return folder
