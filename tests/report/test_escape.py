from __future__ import annotations

import unicodedata
import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from mtpconv.report import escape
from tests.report.reports import HOSTILE

#: Any text, lone surrogates and controls included, salted with what hurts.
TEXT = st.lists(
    st.one_of(
        st.text(st.characters(), max_size=5),
        st.sampled_from(["::", "##[", "##vso[", "\x1b[", "%0A", "<!--", "]]>", "`", "|", "\r\n"]),
        st.sampled_from(HOSTILE),
    ),
    max_size=6,
).map("".join)


def _starts_a_command(line: str) -> bool:
    return line.lstrip().startswith("::") or "##[" in line or "##vso[" in line


@given(TEXT)
def test_plain_text_is_one_line_that_no_terminal_and_no_ci_log_acts_on(text: str) -> None:
    shown = escape.plain(text)
    assert len(shown.splitlines()) <= 1
    shown.encode()  # no lone surrogate is left
    allowed = {" "}
    for char in shown:
        assert unicodedata.category(char)[0] not in "CZ" or char in allowed, ascii(char)
    assert not _starts_a_command(shown)


@given(st.text(st.characters(codec="ascii", categories=("L", "N")), max_size=30))
def test_plain_leaves_ordinary_names_alone(name: str) -> None:
    dotted = f"model.layers.{name}_weight"
    assert escape.plain(dotted) == dotted


@given(TEXT, TEXT)
def test_plain_never_makes_two_ordinary_names_one(a: str, b: str) -> None:
    # Only a backslash in the input can look like an escape.
    if "\\" not in a + b and a != b:
        assert escape.plain(a) != escape.plain(b)


@given(TEXT)
def test_xml_is_well_formed_and_gives_the_text_back(text: str) -> None:
    document = f'<x a="{escape.xml(text, attribute=True)}">{escape.xml(text)}</x>'
    root = ET.fromstring(document)
    if all(char in "\t\n\r" or unicodedata.category(char)[0] != "C" for char in text):
        assert root.get("a") == text
        assert (root.text or "") == text


@given(TEXT)
def test_a_code_span_cannot_be_left_and_fits_into_a_table(text: str) -> None:
    span = escape.code(text)
    assert span.startswith("`")
    assert span.endswith("`")
    assert "`" not in span.strip("`")
    assert "|" not in span
    assert "\n" not in span


@given(TEXT)
def test_markdown_text_has_no_active_character(text: str) -> None:
    shown = escape.markdown(text)
    unescaped = shown.replace("\\\\", "")
    for char in "`*_[]#|~$":
        assert f"{char}" not in unescaped.replace(f"\\{char}", ""), shown
    for word in ("<", ">", "@", "://", "www."):
        assert word not in shown


@given(TEXT)
def test_html_text_has_no_markup(text: str) -> None:
    shown = escape.html(text)
    assert not set(shown) & set("<>\"'")


@given(TEXT, TEXT)
def test_a_workflow_command_stays_one_command(title: str, message: str) -> None:
    line = f"::error title={escape.command_property(title)}::{escape.command_data(message)}"
    assert "\n" not in line
    assert "\r" not in line
    head, _, data = line.removeprefix("::").partition("::")
    assert "," not in head
    # What the runner unescapes is what was meant; source: ActionCommand.cs.
    value = data
    for token, char in (("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
        value = value.replace(token, char)
    assert value == message
