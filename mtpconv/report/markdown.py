"""The report as GitHub-flavoured Markdown, for pull requests and step summaries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from mtpconv.audit.finding import Report, Side
from mtpconv.report import words
from mtpconv.report.escape import code, markdown
from mtpconv.report.groups import Group, extent, group_findings

#: Said beside the verdict, so that it can be told without reading.
_MARKS: Final = {"pass": "✅", "fail": "❌", "error": "⚠️"}
#: Lines of names per rule before the rest is only counted.
_MAX_NAMES: Final = 200
_MAX_MESSAGES: Final = 20


def render(report: Report, *, limit: int | None = None) -> str:
    """The report as Markdown, at most `limit` bytes of UTF-8."""
    parts = [_head(report), *(_section(report, g) for g in group_findings(report.findings))]
    if limit is None:
        return "".join(parts)
    left = limit - 200  # room for the line that says what is missing
    kept: list[str] = []
    for number, part in enumerate(parts):
        left -= len(part.encode())
        if left < 0:
            hidden = words.count(len(parts) - number, "section")
            kept.append(f"\n_{hidden} too long to show here; see the JSON report._\n")
            break
        kept.append(part)
    return "".join(kept)


def _head(report: Report) -> str:
    verdict = f"{_MARKS[report.verdict]} {words.VERDICTS[report.verdict]}"
    lines = [
        f"## mtpconv audit: {verdict}",
        "",
        f"**{markdown(words.headline(report))}**",
        "",
        "| | |",
        "| --- | --- |",
        f"| MTP | **{markdown(words.mtp(report.mtp))}** |",
    ]
    if report.before is not None:
        lines.append(f"| before | {_side(report.before)} |")
    lines.append(f"| after | {_side(report.after)} |")
    lines.append(f"| compared | {markdown(words.compared(report.compared, report.tier))} |")
    if report.switches:
        lines.append(f"| allowed | {', '.join(map(code, report.switches[:20]))} |")
    lines += [f"| note | {markdown(note)} |" for note in report.compared.notes[:20]]
    if report.compared.not_read:
        lines.append(f"| not read | {words.count(len(report.compared.not_read), 'tensor')} |")
    return "\n".join(lines) + "\n"


def _side(side: Side) -> str:
    amount = f"{words.count(side.tensors, 'tensor')}, {words.size(side.nbytes)}"
    dialect = f", {markdown(side.dialect)}" if side.dialect else ""
    return f"{code(side.path)} ({markdown(side.format)}{dialect}, {amount})"


def _section(report: Report, group: Group) -> str:
    return "\n".join(_lines(report, group)) + "\n"


def _lines(report: Report, group: Group) -> Iterator[str]:
    where = extent(report, group)
    title = f"{group.label} {markdown(group.code)} {markdown(group.kind)}"
    yield f"\n### {title}{': ' + markdown(where) if where else ''}\n"
    messages = group.messages
    for message in messages[:_MAX_MESSAGES]:
        yield f"- {markdown(message)}"
    if len(messages) > _MAX_MESSAGES:
        yield f"- and {len(messages) - _MAX_MESSAGES:,} more like it"
    for hint in group.hints[:3]:
        yield f"- hint: {markdown(hint)}"
    if group.step is not None:
        yield f"- **do: {markdown(group.step)}**"
    for reason in list(dict.fromkeys(f.waived for f in group.findings if f.waived))[:3]:
        yield f"- waived: {markdown(reason)}"
    names = group.lines
    if names:
        yield f"\n<details><summary>{words.count(len(group.names), 'tensor')}</summary>\n"
        yield from (f"- {code(name)}" for name in names[:_MAX_NAMES])
        if len(names) > _MAX_NAMES:
            yield f"- and {words.count(len(names) - _MAX_NAMES, 'more line')}"
        yield "\n</details>"
