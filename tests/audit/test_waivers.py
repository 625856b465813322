"""Waivers: what they cover, when they end, and that useless ones are findings."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from mtpconv.audit.audit import audit
from mtpconv.audit.options import Options
from mtpconv.audit.waivers import read_waivers
from mtpconv.errors import UsageError
from tests.audit import sides
from tests.audit.models import base_model
from tests.convert.folders import write_hf

TODAY = date(2026, 11, 29)
WAIVER = """
[[waiver]]
code = "T05"
tensor = "model.layers.4.*norm.weight"
reason = "norms are retrained"
expires = 2026-11-29
"""


def write(place: Path, text: str) -> Path:
    file = place / "waivers.toml"
    file.write_text(text)
    return file


def damaged(place: Path) -> tuple[Path, Path]:
    model = base_model("glm-5.2.json")
    before = model.write(place / "a")
    for name in ("enorm", "hnorm"):
        model.data(f"model.layers.4.{name}.weight", lambda d: d.__setitem__(0, d[0] ^ 1))
    return before, model.write(place / "b")


def run(place: Path, text: str, today: date = TODAY) -> list[tuple[str, str, bool]]:
    before, after = damaged(place)
    options = Options(waivers=read_waivers(write(place, text)), today=today)
    report = audit(sides.hf(before), sides.hf(after), options)
    (place / "verdict").write_text(report.verdict)
    return [(f.code, f.severity, f.waived is not None) for f in report.findings]


def test_waived_findings_stay_and_do_not_fail(tmp_path: Path) -> None:
    assert run(tmp_path, WAIVER) == [("T05", "error", True)] * 2
    assert (tmp_path / "verdict").read_text() == "pass"


def test_expired_waivers_are_findings_and_cover_nothing(tmp_path: Path) -> None:
    found = run(tmp_path, WAIVER, date(2026, 11, 30))
    assert found == [("T05", "error", False)] * 2 + [("W02", "error", False)]


def test_unused_waivers_are_findings(tmp_path: Path) -> None:
    other = WAIVER.replace("norm.weight", "eh_proj.weight")
    found = run(tmp_path, WAIVER + other)
    assert found == [("T05", "error", True)] * 2 + [("W01", "warning", False)]


def test_patterns_match_case_and_brackets_as_glob(tmp_path: Path) -> None:
    narrow = WAIVER.replace("*norm.weight", "[e]norm.weight")
    assert sorted(w for _, _, w in run(tmp_path, narrow)) == [False, True]


BAD = {
    "no such file": None,
    "no TOML": "[[waiver",
    "unknown table": "[other]\nx = 1",
    "missing field": WAIVER.replace('reason = "norms are retrained"\n', ""),
    "extra field": WAIVER + "x = 1\n",
    "unknown code": WAIVER.replace("T05", "T99"),
    "audit code": WAIVER.replace("T05", "A01"),
    "empty reason": WAIVER.replace("norms are retrained", " "),
    "date as text": WAIVER.replace("2026-11-29", '"2026-11-29"'),
    "date with time": WAIVER.replace("2026-11-29", "2026-11-29T00:00:00"),
    "not a list": "waiver = 3",
    "no pattern": WAIVER.replace("model.layers.4.*norm.weight", ""),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_waivers_files_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    text = BAD[name]
    file = tmp_path / "none.toml" if text is None else write(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_waivers(file)
    assert file.name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_file_has_no_waivers(tmp_path: Path) -> None:
    assert read_waivers(write(tmp_path, "")) == ()


UNREAD = """
[[waiver]]
code = "F01"
tensor = "*"
reason = "known"
expires = 2026-11-29

[[waiver]]
code = "F02"
tensor = "*"
reason = "known"
expires = 2026-11-29
"""


@pytest.mark.parametrize("how", ["gone", "empty", "all gone", "config"])
def test_waived_files_are_no_pass(how: str, tmp_path: Path) -> None:
    model = base_model("glm-5.2.json")
    mtp = set(model.mtp())
    shard_of = {n: "b.safetensors" if n in mtp else "a.safetensors" for n in model.tensors}
    before, after = (
        write_hf(tmp_path / x, model.tensors, model.config, shard_of=shard_of) for x in "xy"
    )
    if how == "config":
        (after / "config.json").write_bytes(b"")
    elif how == "empty":
        (after / "b.safetensors").write_bytes(b"")
    else:
        for name in ("a", "b") if how == "all gone" else "b":
            (after / f"{name}.safetensors").unlink()
    options = Options(waivers=read_waivers(write(tmp_path, UNREAD)), today=TODAY)
    for report in (
        audit(sides.hf(before), sides.hf(after), options),
        audit(None, sides.hf(after, table=True), options),
    ):
        assert report.verdict == "error"
        assert {f.code for f in report.findings if f.waived} <= {"F01", "F02"}
        (one,) = [f for f in report.findings if f.kind == "waived_unread"]
        unread = set() if how == "config" else set(model.tensors) if how == "all gone" else mtp
        assert set(one.tensors) == unread
    sound = audit(sides.hf(before), sides.hf(before), options)
    assert sound.verdict == "pass"
