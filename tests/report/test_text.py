from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpconv.audit.finding import Compared
from mtpconv.report import text, words
from tests.report.reports import ALL, incomplete, mtp_dropped, not_checked, passing, scattered

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("width", [40, 80, 132])
@pytest.mark.parametrize("lines", [12, 24, 50])
def test_it_fits_on_the_screen(name: str, width: int, lines: int) -> None:
    shown = text.render(ALL[name](), width=width, lines=lines).splitlines()
    assert len(shown) < lines
    assert max(map(len, shown)) <= width


def test_the_verdict_the_mtp_line_and_the_next_step_are_at_the_top() -> None:
    shown = text.render(mtp_dropped(), width=100, lines=24).splitlines()
    assert shown[0].startswith("FAIL  792 errors")
    top = "\n".join(shown[:8])
    assert "MTP       absent; config promises 1 depth; depth 0: absent, 0 of 791 tensors" in top
    assert "next      restore the MTP tensors" in top
    assert shown.index("error P01 mtp_missing") < shown.index(
        "error T01 missing_tensor: 791 tensors in MTP depth 0 (all of it)"
    )


def test_the_mtp_line_is_there_when_all_is_green() -> None:
    shown = text.render(passing(), width=100, lines=24)
    assert shown.startswith("PASS  all 59,585 tensors identical\n")
    assert "MTP       preserved; config promises 1 depth; depth 0: preserved, 791 of 791" in shown


def test_what_was_not_checked_is_on_the_first_line() -> None:
    first = text.render(incomplete(), width=100, lines=24).splitlines()[0]
    assert first.startswith("PASS  no errors, completeness not checked (A04)")


def test_bytes_that_were_read_are_no_headers() -> None:
    looked = words.compared(Compared(115, 8000), "L0")
    assert looked == "115 tensors; tier L0: headers, index and config, and 8 kB of values"
    sampled = words.compared(Compared(40, 8000, ("a", "b")), "L0")
    assert sampled == (
        "42 tensors; tier L0: headers, index and config, and 8 kB of values of 40 of them"
    )
    headers = words.compared(Compared(115, 0), "L0")
    assert headers == "115 tensors, 0 B; tier L0: headers, index and config"


def test_not_checked_is_not_called_a_pass_or_a_fail() -> None:
    shown = text.render(not_checked())
    assert shown.startswith("NOT CHECKED")
    assert "nothing was read" in shown


def test_without_a_limit_every_name_is_there_as_ranges() -> None:
    shown = text.render(mtp_dropped())
    assert "    model.layers.78.mlp.experts.{0..255}.gate_proj.weight\n" in shown
    assert len(shown.splitlines()) < 60
    names = {line.strip() for line in shown.splitlines() if line.startswith("    ")}
    assert len(names) == 26  # 23 tensors outside the experts, 3 per expert


def test_what_covers_most_comes_first_on_a_screen() -> None:
    shown = text.render(mtp_dropped(), width=100, lines=24)
    assert "experts.{0..255}.gate_proj.weight" in shown
    assert "more lines of names" in shown
    assert "--verbose" in shown


def test_colour_adds_nothing_but_colour() -> None:
    for make in (passing, mtp_dropped, scattered):
        plain = text.render(make(), width=100, lines=30)
        coloured = text.render(make(), width=100, lines=30, colour=True)
        assert "\x1b" not in plain
        assert ANSI.search(coloured)
        assert ANSI.sub("", coloured) == plain


def test_waived_findings_are_shown_with_their_reason() -> None:
    shown = text.render(scattered())
    assert "waived T03 dtype_mismatch: 50 tensors" in shown
    assert "waived: router bias is rounded on purpose" in shown
    assert ", 50 waived" in shown.splitlines()[0]
    assert "allowed   copies" in shown


@pytest.mark.parametrize("lines", [None, 24])
def test_hostile_names_cannot_reach_the_terminal_or_a_ci_log(lines: int | None) -> None:
    shown = text.render(ALL["hostile"](), width=60 if lines else None, lines=lines)
    for line in shown.split("\n"):
        assert not line.lstrip().startswith("::")
        assert "##[" not in line
        assert "##vso[" not in line
        for char in line:
            assert unicodedata.category(char)[0] != "C", ascii(char)
    shown.encode()


@settings(max_examples=25)
@given(st.integers(5, 200), st.integers(1, 100))
def test_any_screen_will_do(width: int, lines: int) -> None:
    shown = text.render(mtp_dropped(), width=width, lines=lines)
    assert shown.startswith("FAIL")
    assert len(shown.splitlines()) <= max(lines, 1)
