from __future__ import annotations

import json
import os
import stat
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpconv.audit.finding import Compared, Finding, MtpDepth, MtpStatus, Report, Side
from mtpconv.errors import UsageError, WriteError
from mtpconv.report import FORMATS, parse_targets, write_file, write_reports
from mtpconv.tensors import Region
from tests.report.reports import ALL, HOSTILE, mtp_dropped


def test_every_format_writes_every_report(tmp_path: Path) -> None:
    for name, make in ALL.items():
        report = make()
        write_reports(report, [f"{form}={tmp_path / f'{name}.{form}'}" for form in FORMATS])
        for form, render in FORMATS.items():
            written = (tmp_path / f"{name}.{form}").read_bytes()
            assert written == render(report).encode()
            assert written
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


TEXT = st.one_of(st.text(st.characters(), max_size=12), st.sampled_from(HOSTILE))
MAYBE = st.none() | TEXT
REGIONS = st.builds(Region, st.sampled_from(["root", "trunk", "mtp"]) | TEXT, st.integers(0, 99))
FINDINGS = st.builds(
    Finding, TEXT, st.sampled_from(["missing_tensor", "zero_tensor"]) | TEXT,
    st.sampled_from(["error", "warning", "note"]), TEXT, tensor=MAYBE, file=MAYBE, field=MAYBE,
    region=st.none() | REGIONS, before=MAYBE | st.floats(), after=MAYBE, hint=MAYBE, waived=MAYBE,
    tensors=st.lists(TEXT, max_size=3).map(tuple),
)  # fmt: skip
REPORTS = st.builds(
    Report,
    verdict=st.sampled_from(["pass", "fail", "error"]),
    tier=st.sampled_from(["none", "L0", "L1", "L2"]),
    mtp=st.builds(
        MtpStatus, TEXT, st.none() | st.integers(0, 3),
        st.lists(st.builds(MtpDepth, st.integers(0, 3), TEXT, st.integers(0, 9)), max_size=2)
        .map(tuple),
    ),
    findings=st.lists(FINDINGS, max_size=5).map(tuple),
    compared=st.builds(Compared, not_read=st.lists(TEXT, max_size=2).map(tuple)),
    before=st.none() | st.builds(Side, TEXT, TEXT, st.integers(0), st.integers(0)),
    after=st.builds(Side, TEXT, TEXT, st.integers(0, 9), st.integers(0, 1 << 60)),
    states=st.dictionaries(TEXT, st.sampled_from(["identical", "missing"]) | TEXT, max_size=5),
    regions=st.dictionaries(TEXT, REGIONS, max_size=5),
    checked=st.lists(TEXT, max_size=2).map(tuple),
)  # fmt: skip


@settings(max_examples=60)
@given(REPORTS)
def test_any_report_can_be_shown_in_every_format(report: Report) -> None:
    for form, render in FORMATS.items():
        shown = render(report)
        shown.encode()
        assert "\x1b" not in shown, form
        assert not any(line.lstrip().startswith("::stop") for line in shown.split("\n")), form
    json.loads(FORMATS["json"](report))
    json.loads(FORMATS["sarif"](report))
    ET.fromstring(FORMATS["junit"](report))


def test_the_formats_are_those_that_the_docs_list() -> None:
    assert list(FORMATS) == ["text", "json", "markdown", "junit", "sarif", "html", "github"]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("pdf=x", "must be FORMAT=FILE, with FORMAT of text, json,"),
        ("json", "must be FORMAT=FILE"),
        ("json=", "must be FORMAT=FILE"),
        ("=x", "must be FORMAT=FILE"),
        ("json=no/such/folder/x.json", "no/such/folder is no folder"),
        ("json=.", "is a folder"),
        ("\x1b[2J=x", r"\\x1b"),
    ],
)
def test_a_bad_target_is_refused_before_anything_is_written(spec: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        parse_targets([spec])
    assert len(str(caught.value).splitlines()) == 1


def test_one_file_for_two_formats_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="named twice"):
        write_reports(mtp_dropped(), [f"json={tmp_path / 'x'}", f"html={tmp_path / 'x'}"])
    assert not list(tmp_path.iterdir())


def test_a_file_name_may_hold_an_equals_sign(tmp_path: Path) -> None:
    assert parse_targets([f"json={tmp_path}/a=b.json"]) == [("json", tmp_path / "a=b.json")]


def test_an_existing_report_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    target.write_text("x" * 10**6, "utf-8")
    write_reports(mtp_dropped(), [f"json={target}"])
    assert json.loads(target.read_text("utf-8"))["verdict"] == "fail"
    assert stat.S_IMODE(target.stat().st_mode) & 0o044 == 0o044 & ~os.umask(0o022)


def test_a_link_and_a_pipe_are_written_through(tmp_path: Path) -> None:
    real = tmp_path / "real.txt"
    real.write_text("", "utf-8")
    link = tmp_path / "link.txt"
    link.symlink_to(real)
    write_reports(mtp_dropped(), [f"text={link}"])
    assert link.is_symlink()
    assert real.read_text("utf-8").startswith("FAIL")
    write_reports(mtp_dropped(), ["text=/dev/null"])
    assert Path("/dev/null").is_char_device()


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "report.txt"
    target.mkdir()
    with pytest.raises(WriteError, match="the report cannot be written"):
        write_file(target, "x")
    assert [p.name for p in tmp_path.iterdir()] == ["report.txt"]
