"""The self-test: every fault turns the gate red, and a blind gate is noticed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mtpconv.selftest as module
from mtpconv.audit.finding import Report
from mtpconv.audit.options import Options
from mtpconv.cli.app import app
from mtpconv.cli.selftest import _BUILT_IN
from mtpconv.errors import WriteError
from mtpconv.selftest import FAULTS, run_selftest
from mtpconv.synth import fewer, shrink
from tests.conftest import ROOT
from tests.convert.folders import file_hashes, make_hf, tensors_of, write_hf
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


def published(name: str) -> dict[str, Any]:
    value = json.loads((ROOT / "fixtures" / "configs" / f"{name}.json").read_text())
    return fewer(shrink(value), layers=4, experts=3)


@pytest.mark.parametrize(
    ("name", "not_applicable"),
    [
        ("qwen3-0.6b", "no tensor ends with lm_head.weight"),  # tied
        ("ernie-4.5-21b-a3b", "is not converted"),
        ("deepseek-v4-flash", "is not converted"),
        ("deepseek-r1", None),  # FP8
        ("qwen3.5-35b-a3b", None),  # text_config
        ("mimo-7b", None),
    ],
)
def test_sound_checkpoints_of_all_kinds(
    name: str, not_applicable: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = make_hf(tmp_path / "hf", published(name), shards=2)
    assert app(["selftest", str(hf)], standalone_mode=False) in (0, None), capsys.readouterr().out
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("selftest: the clean copy is green and all ")
    crossed = [line for line in lines if line.startswith("Megatron: one bit flipped")]
    assert ("is not converted" in crossed[0]) == (not_applicable == "is not converted")
    tie = next(line for line in lines if line.startswith("tie_word_embeddings changed"))
    assert "config_mismatch" in tie
    if not_applicable is not None:
        assert any(not_applicable in line for line in lines)


def test_a_stored_head_of_a_tied_model_may_go(tmp_path: Path) -> None:
    raw = {**config(num_nextn_predict_layers=0), "tie_word_embeddings": True}
    tensors = tensors_of(make_hf(tmp_path / "made", raw))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    hf = write_hf(tmp_path / "hf", tensors, raw)
    place = tmp_path / "place"
    place.mkdir()
    trials = {t.fault: t for t in run_selftest(hf, place, {})}
    assert [t for t in trials.values() if not t.red] == []
    assert "tied" in str(trials["LM head omitted"].skipped)


def test_what_goes_wrong_in_one_trial_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = vars(module)["hf2mcore"]

    def broken(source: Path, target: Path, **options: Any) -> object:
        if "fault" in source.name:
            raise WriteError("no space left")
        return real(source, target, **options)

    monkeypatch.setattr(module, "hf2mcore", broken)
    assert app(["selftest"], standalone_mode=False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(FAULTS) + 2
    assert sum("NOT CAUGHT (found: WriteError: no space left)" in line for line in lines) == 3
    assert lines[-1].startswith(f"selftest: 3 of {len(FAULTS) + 1} trials went wrong")
