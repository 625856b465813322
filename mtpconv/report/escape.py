"""Names and messages from a checkpoint, made harmless for each place they are shown in.

A tensor name is untrusted text: it may hold terminal escapes, markup, control characters or
the commands that CI systems read from a log. Everything a report shows passes through here.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Final

#: Unicode categories that move the cursor, reorder text, hide, or cannot be encoded.
_UNSAFE: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
#: Characters that XML 1.0 cannot hold, not even escaped.
#: Source: XML 1.0 (5th edition), production 2 "Char".
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
#: Characters with a meaning inside a line of GitHub-flavoured Markdown.
_MARKDOWN = re.compile(r"[\\`*_\[\]#|~$]")


def plain(text: str, limit: int | None = None) -> str:
    r"""The text on one line without anything that a terminal or a CI log acts on.

    Unsafe characters become `\x1b`, `\u202e`, ... . `::` and `##`, which start commands in the
    logs of GitHub Actions and Azure Pipelines, lose their second character to an escape.
    """
    if limit is not None and len(text) > limit:
        text = text[:limit] + "..."
    if not text.isprintable() or not text.isascii():
        text = "".join(map(_visible, text))
    return text.replace("::", r":\x3a").replace("##", r"#\x23")


@lru_cache(1 << 12)
def _visible(char: str) -> str:
    category = unicodedata.category(char)
    if category not in _UNSAFE and (category != "Zs" or char == " "):
        return char
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def html(text: str) -> str:
    """Text for HTML content and quoted attributes."""
    shown = plain(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return shown.replace('"', "&quot;").replace("'", "&#39;")


def xml(text: str, *, attribute: bool = False) -> str:
    """Text for XML content or a quoted attribute; what XML cannot hold is written out."""
    shown = _NOT_XML.sub(lambda found: _visible(found[0]), text)
    shown = shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    shown = shown.replace("\r", "&#13;")
    if attribute:
        shown = shown.replace('"', "&quot;").replace("\t", "&#9;").replace("\n", "&#10;")
    return shown


def markdown(text: str) -> str:
    """Text inside a Markdown line or table cell: no markup, no mention, no link."""
    shown = _MARKDOWN.sub(lambda found: "\\" + found[0], plain(text))
    shown = shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return shown.replace("://", r":\/\/").replace("www.", r"www\.").replace("@", r"\\x40")


def code(text: str) -> str:
    """A Markdown code span that also fits into a table cell."""
    shown = plain(text).replace("`", r"\x60").replace("|", r"\x7c")
    return f"`{shown}`" if shown.strip() else "``` ```"


def command_data(text: str) -> str:
    """The message of a GitHub workflow command, newlines kept as `%0A`.

    Source: actions/runner src/Runner.Common/ActionCommand.cs, read 2026-11-29.
    """
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def command_property(text: str) -> str:
    """A property of a GitHub workflow command, `file=` or `title=`.

    Source: as for `command_data`.
    """
    return command_data(text).replace(":", "%3A").replace(",", "%2C")
