from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mtpconv.audit.finding import Finding
from mtpconv.errors import WriteError
from mtpconv.report import github
from tests.report.reports import ALL, mtp_dropped, passing, scattered


def _many() -> list[Finding]:
    return [
        Finding(f"X{n:02}", f"kind_{n}", "error" if n % 2 else "warning", f"message {n}")
        for n in range(40)
    ]


@pytest.mark.parametrize("name", ALL)
def test_at_most_ten_annotations_each_on_one_line(name: str) -> None:
    lines = github.render(ALL[name]()).splitlines()
    assert 1 <= len(lines) <= 10
    for line in lines:
        assert line.startswith(("::error ", "::warning ", "::notice "))
        assert line.count("::") == 2


def test_forty_rules_are_ten_annotations_that_count_the_rest() -> None:
    lines = github.render(replace(passing(), verdict="fail", findings=tuple(_many()))).splitlines()
    assert len(lines) == 10
    assert lines[-1].startswith("::error title=mtpconv audit::31 more rules found something")
    assert sum(line.startswith("::error") for line in lines) == 10


def test_an_annotation_names_the_file_and_what_to_do() -> None:
    first = github.render(mtp_dropped()).splitlines()[0]
    assert first.startswith("::error file=export/config.json,title=P01 mtp_missing::")
    assert "%0Ado: restore the MTP tensors" in first


def test_all_green_is_one_notice_with_the_mtp_line() -> None:
    assert github.render(passing()) == (
        "::notice title=mtpconv audit passed::all 59,585 tensors identical; MTP preserved; "
        "config promises 1 depth; depth 0: preserved, 791 of 791 tensors\n"
    )


def test_hostile_names_start_no_command_of_their_own() -> None:
    for line in github.render(ALL["hostile"]()).splitlines():
        command, _, rest = line.removeprefix("::").partition(" ")
        assert command in ("error", "warning", "notice")
        properties, _, data = rest.partition("::")
        assert "::" not in data
        assert {part.partition("=")[0] for part in properties.split(",")} <= {"file", "title"}
        assert "##[" not in line


def test_only_github_actions_counts() -> None:
    assert github.active({"GITHUB_ACTIONS": "true"})
    assert not github.active({"GITHUB_ACTIONS": "false"})
    assert not github.active({})


def test_the_step_summary_is_appended_and_stays_below_1_mib(tmp_path: Path) -> None:
    page = tmp_path / "summary.md"
    environment = {"GITHUB_STEP_SUMMARY": str(page)}
    page.write_text("# before\n", "utf-8")
    github.write_summary(mtp_dropped(), environment)
    text = page.read_text("utf-8")
    assert text.startswith("# before\n## mtpconv audit: ❌ FAIL\n")

    page.write_bytes(b"x" * (github.MAX_SUMMARY - 3000))
    github.write_summary(scattered(), environment)
    assert github.MAX_SUMMARY - 3000 < page.stat().st_size <= github.MAX_SUMMARY

    page.write_bytes(b"x" * github.MAX_SUMMARY)
    github.write_summary(scattered(), environment)
    assert page.stat().st_size == github.MAX_SUMMARY


def test_a_huge_report_keeps_the_summary_small(tmp_path: Path) -> None:
    page = tmp_path / "summary.md"
    long = [replace(one, message=f"{n} " + "x" * 90_000) for n, one in enumerate(_many())]
    github.write_summary(
        replace(passing(), verdict="fail", findings=tuple(long)),
        {"GITHUB_STEP_SUMMARY": str(page)},
    )
    assert 500_000 < page.stat().st_size < 1 << 20
    assert "too long to show here" in page.read_text("utf-8")


def test_no_summary_file_is_no_error_and_a_bad_one_is(tmp_path: Path) -> None:
    github.write_summary(passing(), {})
    with pytest.raises(WriteError, match="the step summary cannot be written"):
        github.write_summary(passing(), {"GITHUB_STEP_SUMMARY": str(tmp_path)})
