from __future__ import annotations

import re

import pytest
from markdown_it import MarkdownIt

from mtpconv.report import markdown
from tests.report.reports import ALL, HOSTILE, mtp_dropped, passing, scattered


def test_it_says_verdict_mtp_and_findings() -> None:
    shown = markdown.render(mtp_dropped())
    assert shown.startswith("## mtpconv audit: ❌ FAIL\n")
    assert (
        "| MTP | **absent; config promises 1 depth; depth 0: absent, 0 of 791 tensors** |" in shown
    )
    assert "### error P01 mtp\\_missing\n" in shown
    assert "- `model.layers.78.mlp.experts.{0..255}.gate_proj.weight`" in shown
    assert "PASS" in markdown.render(passing())
    assert "| MTP | **preserved;" in markdown.render(passing())


@pytest.mark.parametrize("limit", [1000, 5000, 20_000])
def test_a_limit_is_kept_and_what_is_missing_is_said(limit: int) -> None:
    whole = markdown.render(scattered())
    cut = markdown.render(scattered(), limit=limit)
    assert len(cut.encode()) <= limit
    if len(whole.encode()) > limit:
        assert "too long to show here" in cut
    else:
        assert cut == whole


def test_details_are_opened_and_closed_on_lines_of_their_own() -> None:
    shown = markdown.render(mtp_dropped())
    assert shown.count("<details>") == shown.count("\n</details>\n") == 1
    assert "</summary>\n\n- " in shown  # without the empty line, GitHub shows no list


def test_hostile_names_stay_text() -> None:
    shown = markdown.render(ALL["hostile"]())
    shown.encode()
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    inline = [t for token in parser.parse(shown) for t in [token, *(token.children or [])]]
    seen = {token.type for token in inline}
    assert not seen & {"link_open", "image", "html_inline", "s_open", "em_open", "fence"}
    for token in inline:
        if token.type == "html_block":
            assert re.fullmatch(
                r"<details><summary>[\d,]+ tensors?</summary>\n|</details>\n", token.content
            )
        elif token.type == "text":
            assert "@" not in token.content
    # Every table row has its two cells: no name opened a third.
    cells = [token.type for token in inline].count("td_open")
    assert cells == 2 * ([token.type for token in inline].count("tr_open") - 1)
    for line in shown.splitlines():
        assert not line.lstrip().startswith("::")
        assert "##[" not in line
    assert len(shown.splitlines()) < 40 * len(HOSTILE)
