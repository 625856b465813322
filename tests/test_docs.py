from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.console import Block, blocks, run

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def _blocks() -> list[Block]:
    found: list[Block] = []
    for document in DOCUMENTS:
        found += blocks(str(document.relative_to(ROOT)), document.read_text("utf-8"))
    return found


def _documents(*, make: bool) -> list[str]:
    """The documents that have a block to run, of the two sorts."""
    return sorted({b.document for b in _blocks() if b.uses_make == make and b.runs})


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Commands run as for someone who installed the checkout, in a folder of their own."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("no make on PATH")
    programs = tmp_path_factory.mktemp("bin")
    main = "import sys; from mtpconv.cli import main; sys.exit(main())"
    for name, command in {
        "mtpconv": f"{shlex.quote(sys.executable)} -c {shlex.quote(main)}",
        "make": f"{shlex.quote(make)} --no-print-directory -C {shlex.quote(str(ROOT))}",
    }.items():
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {command} "$@"\n', "utf-8")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "REPO": str(ROOT),
        "MAKEFLAGS": "",  # those of the make that runs the tests are not meant for this one
        "COLUMNS": "100",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "LC_ALL": "C.UTF-8",
    }


#: Documents that run models.
_SLOW = ("docs/parity.md", "docs/speculative.md")


@pytest.mark.parametrize("document", [
    pytest.param(d, marks=[pytest.mark.slow, pytest.mark.timeout(900)]) if d in _SLOW else d
    for d in _documents(make=False)
])  # fmt: skip
def test_the_commands_of_a_document_do_what_it_shows(
    document: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    for block in _blocks():
        if block.document == document and block.runs and not block.uses_make:
            run(block, tmp_path, environment, limit=300 if document in _SLOW else 60)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("document", _documents(make=True))
def test_the_make_targets_of_a_document_do_what_it_shows(
    document: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    for block in _blocks():
        if block.document == document and block.runs and block.uses_make:
            run(block, tmp_path, environment, limit=300)


def test_every_make_target_that_a_document_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = set()
    for document in DOCUMENTS:
        named |= set(re.findall(r"(?:`|\$ )make ([a-z-]+)", document.read_text("utf-8")))
    assert named
    assert named <= targets
