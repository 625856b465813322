"""The self-test: every fault turns the gate red, and a blind gate is noticed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mtpconv.selftest as module
from mtpconv.audit.finding import Report
from mtpconv.audit.options import Options
from mtpconv.cli.app import app
from mtpconv.cli.selftest import _BUILT_IN
from mtpconv.selftest import FAULTS, run_selftest
from tests.convert.folders import file_hashes, make_hf
from tests.mapping.toy import config


def test_every_fault_is_red_and_the_copy_is_green(tmp_path: Path) -> None:
    trials = list(run_selftest(None, tmp_path, _BUILT_IN))
    assert [t.fault for t in trials if not t.red] == []
    assert [t.fault for t in trials if t.skipped] == []
    assert len(trials) == len(FAULTS) + 1


def test_a_users_checkpoint_is_copied_not_touched(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config("deepseek_v3"))
    before = file_hashes(hf)
    place = tmp_path / "place"
    place.mkdir()
    assert all(t.red for t in run_selftest(hf, place, {}))
    assert file_hashes(hf) == before


def test_a_model_without_mtp_skips_what_needs_it(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", config(num_nextn_predict_layers=0))
    place = tmp_path / "place"
    place.mkdir()
    trials = list(run_selftest(hf, place, {}))
    assert all(t.red for t in trials)
    assert 5 < sum(t.skipped is not None for t in trials) < len(trials) // 2


def test_a_blind_audit_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An audit that reads no bytes, or that forgives, must not pass its own test."""
    real = vars(module)["audit"]
    monkeypatch.setattr(module, "audit", lambda b, a: real(b, a, Options(read_bytes=False)))
    wrong = [t.fault for t in run_selftest(None, tmp_path, _BUILT_IN) if not t.red]
    assert "one bit flipped" in wrong
    assert "halves of eh_proj swapped" in wrong


def test_the_command_fails_if_one_fault_is_not_caught(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = vars(module)["audit"]

    def forgiving(*sides: Any) -> Report:
        report = real(*sides)
        kept = tuple(f for f in report.findings if f.kind != "missing_tensor")
        return replace(report, findings=kept)

    monkeypatch.setattr(module, "audit", forgiving)
    assert app(["selftest"], standalone_mode=False) == 1
    said = capsys.readouterr().out
    assert "NOT CAUGHT" in said
    assert "do not trust this gate" in said
    monkeypatch.undo()
    assert app(["selftest", "--quiet"], standalone_mode=False) in (0, None)
