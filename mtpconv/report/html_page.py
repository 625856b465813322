"""The report as one HTML page that needs nothing else: a picture of the model, and findings.

The page loads nothing, so it works offline; its policy forbids every script but its own, so a
name from a checkpoint cannot become one. Verdict, MTP and findings are readable without
JavaScript; the picture needs it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from importlib.resources import files
from typing import Final

import mtpconv
from mtpconv.audit.finding import Report
from mtpconv.report import words
from mtpconv.report.escape import html, plain
from mtpconv.report.grid import Grid, fit_grid
from mtpconv.report.groups import Group, extent, group_findings

_MARKS: Final = {"pass": "\u2713", "fail": "\u2717", "error": "?"}
#: How much of the findings the page lists in text; the picture has the others.
_MAX_GROUPS: Final = 100
_MAX_LINES: Final = 40
_MAX_MESSAGES: Final = 5


#: Units: bytes. Findings in text end with the first rule beyond; the page ends before 2 MB.
_MAX_FINDINGS: Final = 200_000
_MAX_PAGE: Final = 1_990_000


def render(report: Report) -> str:
    """The report as one page, under 2 MB."""
    style = _asset("page.css")
    script = _asset("page.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    verdict = words.VERDICTS[report.verdict]
    said = [*_head(report), *_findings(report)]
    rest = sum(len(line.encode()) + 1 for line in (style, script, policy, *said)) + 10_000
    grid, data = fit_grid(report, _MAX_PAGE - rest)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            f"<title>{verdict}: {html(report.after.path[:200])}</title>",
            f"<style>{style}</style></head><body>",
            *said,
            *_picture(report, grid),
            f'<footer class="quiet"><p>mtpconv {html(mtpconv.__version__)}</p></footer>',
            f'<script type="application/json" id="data">{data}</script>',
            f"<script>{script}</script></body></html>",
            "",
        ]
    )


def _asset(name: str) -> str:
    return files("mtpconv.report").joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _head(report: Report) -> Iterator[str]:
    mark = f'<span aria-hidden="true">{_MARKS[report.verdict]}</span>'
    yield f'<header class="verdict {report.verdict}">'
    yield f"<h1>{mark} {words.VERDICTS[report.verdict]}</h1>"
    yield f"<p>{html(words.headline(report)[:2000])}</p></header>"
    yield '<dl class="facts">'
    yield f'<dt>MTP</dt><dd class="mtp">{html(words.mtp(report.mtp)[:5000])}</dd>'
    for name, side in (("before", report.before), ("after", report.after)):
        if side is not None:
            yield _fact(name, words.side(side))
    yield _fact("compared", words.compared(report.compared, report.tier))
    if report.model_type is not None:
        yield _fact("model", report.model_type)
    if report.switches:
        yield _fact("allowed", ", ".join(report.switches[:_MAX_LINES]))
    for note in report.compared.notes[:_MAX_LINES]:
        yield _fact("note", note)
    if report.compared.not_read:
        yield _fact("not read", words.count(len(report.compared.not_read), "tensor"))
    yield "</dl>"


def _fact(name: str, said: str) -> str:
    return f"<dt>{name}</dt><dd>{html(plain(said, 2000)[:2000])}</dd>"


def _findings(report: Report) -> Iterator[str]:
    groups = group_findings(report.findings)
    yield '<section id="findings"><h2>Findings</h2>'
    if not groups:
        yield "<p>None.</p>"
    used = shown = 0
    for group in groups[:_MAX_GROUPS]:
        lines = list(_finding(report, group, opened=shown == 0 and group.fails))
        used += sum(len(line.encode()) for line in lines)
        if shown and used > _MAX_FINDINGS:
            break
        shown += 1
        yield from lines
    if len(groups) > shown:
        yield f"<p>{words.count(len(groups) - shown, 'more rule')} in the JSON report.</p>"
    yield "</section>"


def _finding(report: Report, group: Group, *, opened: bool) -> Iterator[str]:
    where = extent(report, group)
    title = f"{html(group.code)} {html(group.kind)}{': ' + html(where) if where else ''}"
    yield f'<details class="finding {group.label}"{" open" if opened else ""}>'
    yield f'<summary><span class="label">{group.label}</span> {title}</summary>'
    messages = [html(message[:2000]) for message in group.messages]
    yield from _list(messages, _MAX_MESSAGES, "more like it; the picture has each")
    for hint in group.hints[:3]:
        yield f"<p>hint: {html(hint[:2000])}</p>"
    if group.step is not None:
        yield f'<p class="do">do: {html(group.step)}</p>'
    for reason in list(dict.fromkeys(f.waived for f in group.findings if f.waived))[:3]:
        yield f"<p>waived: {html(reason[:2000])}</p>"
    names = [f"<code>{html(name)}</code>" for name in group.lines]
    yield from _list(names, _MAX_LINES, "more lines of names")
    yield "</details>"


def _list(items: list[str], most: int, more: str) -> Iterator[str]:
    if items:
        yield "<ul>"
        yield from (f"<li>{item}</li>" for item in items[:most])
        if len(items) > most:
            yield f"<li>and {len(items) - most:,} {more}</li>"
        yield "</ul>"


def _picture(report: Report, grid: Grid) -> Iterator[str]:
    yield '<section id="picture"><h2>The model</h2>'
    if not report.states and not grid.data["blocks"]:
        yield "<p>No tensor was looked at.</p>"
    yield "<noscript><p>The picture needs JavaScript; everything above does not.</p></noscript>"
    left_out = []
    if grid.hidden_tensors:
        left_out.append(words.count(grid.hidden_tensors, "tensor"))
    if grid.hidden_findings:
        left_out.append(f"the text of {words.count(grid.hidden_findings, 'finding')}")
    if left_out:
        yield f"<p>Left out for the size of this page: {' and '.join(left_out)}; "
        yield "the JSON report has all.</p>"
    yield '<div class="controls"><label for="search">Name</label>'
    yield '<input id="search" type="search" autocomplete="off" spellcheck="false" '
    yield 'placeholder="part of a name, * for anything (press /)"></div>'
    yield '<div class="controls" id="states" role="group" aria-label="States shown"></div>'
    yield '<p id="count" role="status" class="quiet"></p>'
    yield '<p class="quiet">Columns are layers, MTP depths stand apart on the right; rows are '
    yield "groups of tensors. A line under a symbol: the tensors of the cell differ, the worst "
    yield "is shown. Click a cell, or use arrow keys and Enter.</p>"
    yield '<div id="grid"></div>'
    yield '<div id="details" role="region" aria-live="polite" aria-label="Details">'
    yield '<p class="quiet">Choose a cell to see its tensors and findings.</p></div></section>'
