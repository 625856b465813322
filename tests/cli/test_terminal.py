"""What is printed of names and values that anybody may have chosen: one line, and no commands."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from mtpconv.cli import terminal
from mtpconv.cli.terminal import make_progress, one_line
from tests.cli import test_cli
from tests.cli.test_cli import Run, Said
from tests.convert.folders import make_hf
from tests.mapping.toy import config

run = test_cli.run
EVIL = "\x1b[31m\n::error::x\r##[error]\u202e\u2028y"
HARMLESS = r"\x1b[31m\n::error::x\r#\x23[error]\u202e\u2028y"


def test_one_line() -> None:
    assert one_line(EVIL) == HARMLESS
    assert one_line(HARMLESS) == HARMLESS
    assert one_line("\udc80 größer 模型 a\\nb") == r"\udc80 größer 模型 a\nb"


def require_harmless(said: Said, *, shown: str = r"\x1b[31m\n") -> None:
    printed = said.out + said.err
    assert shown in printed
    assert [c for c in printed if not c.isprintable() and c != "\n"] == []
    assert not [line for line in printed.splitlines() if line.startswith("::")]
    assert "##[" not in printed


@pytest.mark.parametrize("command", ["hf2mcore", "roundtrip"])
@pytest.mark.parametrize("where", ["quant_method", "quant_algo", "weight_block_size"])
def test_values_of_a_config(run: Run, tmp_path: Path, command: str, where: str) -> None:
    stated = {"quant_method": "fp8"} if where == "weight_block_size" else {"quant_method": "other"}
    raw = config() | {"quantization_config": {**stated, where: EVIL}}
    hf = make_hf(tmp_path / "hf", config())
    (hf / "config.json").write_text(json.dumps(raw))
    said = run(command, hf, *[tmp_path / "mcore"] * (command == "hf2mcore"))
    assert said.code in (1, 3)
    assert test_cli.one_line(said).startswith(f"mtpconv: {hf}: ")
    require_harmless(said)


def test_names_of_files(run: Run, tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config())
    (hf / f"{EVIL}.bin").write_bytes(b"left behind")
    said = run("roundtrip", hf)
    assert said.code == 0
    assert r"\x1b[31m\n" in said.out.splitlines()[-1]
    require_harmless(said)


def test_a_file_that_does_not_come_back(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = make_hf(tmp_path / "hf", config())
    (hf / f"{EVIL}.txt").write_text("travels")
    monkeypatch.setattr("mtpconv.cli.convert._sha256", lambda path: str(path))
    said = run("roundtrip", hf)
    assert said.code == 1
    require_harmless(said)


def test_paths(run: Run, tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config())
    odd = tmp_path / EVIL
    require_harmless(run("hf2mcore", hf, odd))
    assert odd.is_dir()
    for words in (
        ("hf2mcore", hf, odd), ("audit", odd / "gone"), ("inventory", hf, "-o", odd / "m" / "n"),
        ("plan", odd / "gone"), ("inventory", hf, "-o", tmp_path / f"{EVIL}.json"),
        ("mcore2hf", odd, f"s3://[{EVIL}"), ("mcore2hf", odd, f"https://{EVIL}"),
    ):  # fmt: skip
        require_harmless(run(*words))


def test_a_bug_over_several_lines(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError(EVIL)

    monkeypatch.setattr("mtpconv.cli.convert.hf2mcore", broken)
    said = run("hf2mcore", tmp_path, tmp_path / "m")
    assert said.code == 70
    test_cli.one_line(said)
    require_harmless(said)


def test_rows_of_a_plan_are_rows(run: Run, tmp_path: Path) -> None:
    rows = run("plan", make_hf(tmp_path / "hf", config()), "--rows").out.splitlines()
    assert all(row.count("\t") == 3 for row in rows)


def test_progress_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = make_progress(False, "text")
    monkeypatch.setattr(type(progress), "PAUSE", 0.0)
    progress.begin("convert", 10)
    progress.advance(5, EVIL)
    progress.note(EVIL)
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 3
    require_harmless(Said(0, said.out, said.err))


def test_a_bar_takes_no_markup_from_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closing tag that nobody opened would end the conversion."""
    screen = StringIO()
    monkeypatch.setattr(
        "rich.console.Console", lambda **_: Console(file=screen, force_terminal=True, width=200)
    )
    bar = terminal._Bar()
    bar.begin("convert", 10)
    bar.advance(5, f"a[/b]{EVIL}")
    assert bar._bar is not None
    bar._bar.refresh()
    bar.note(f"c[/d]{EVIL}")
    bar.end()
    assert r"a[/b]\x1b[31m\n::error" in screen.getvalue()
    assert r"c[/d]\x1b[31m\n::error" in screen.getvalue()
