"""The report on a terminal: verdict, MTP and next step first, at most a screenful.

The only report that uses rich. Says the same without colour and when piped.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.text import Text

from mtpconv.audit.finding import Report
from mtpconv.report import words
from mtpconv.report.escape import plain
from mtpconv.report.groups import Group, extent, group_findings

_STYLES: Final = {
    "pass": "bold green",
    "fail": "bold red",
    "error": "bold yellow",
    "warning": "yellow",
    "note": "cyan",
    "waived": "dim",
}
#: Lines that one message or hint may take on a screen.
_CLIP: Final = 3
#: Lines of names that a rule that fails has before warnings take the room.
_MIN_NAMES: Final = 3
#: Different messages of one rule that `verbose` shows.
_MAX_MESSAGES: Final = 50

Line = tuple[int, str, str]  # indent, text, style


def render(
    report: Report,
    *,
    width: int | None = None,
    lines: int | None = None,
    colour: bool = False,
) -> str:
    """The report as text.

    `width` wraps (None: never, for files and pipes), `lines` is the height of the screen
    (None: everything, for files, pipes and --verbose).
    """
    console = Console(
        file=io.StringIO(),
        width=width or 1 << 16,
        color_system="standard" if colour else None,
        force_terminal=colour,
        highlight=False,
        emoji=False,
        markup=False,
        legacy_windows=False,
    )
    if lines is None:
        shown = _wrap(console, [*_head(report), *_everything(report)])
    else:
        shown = _wrap(console, _head(report), clip=_CLIP)
        # One line for what is left out, one for the prompt that follows.
        shown += _screenful(console, report, max(lines - len(shown) - 2, 0))
        del shown[max(lines - 1, 1) :]
    with console.capture() as capture:
        for line in shown:
            console.print(line, soft_wrap=True)
    return capture.get()


def _head(report: Report) -> Iterable[Line]:
    verdict = words.VERDICTS[report.verdict]
    yield 0, f"{verdict}  {words.headline(report)}", _STYLES[report.verdict]
    for name, side in (("before", report.before), ("after", report.after)):
        if side is not None:
            yield 2, f"{name:<10}{words.side(side)}", ""
    yield 2, f"{'compared':<10}{words.compared(report.compared, report.tier)}", ""
    yield 2, f"{'MTP':<10}{words.mtp(report.mtp)}", "bold"
    if report.switches:
        yield 2, f"{'allowed':<10}{', '.join(map(plain, report.switches))}", "yellow"
    yield from _some("note", report.compared.notes, "")
    yield from _some("not read", report.compared.not_read, "yellow")
    first = next((g for g in group_findings(report.findings) if g.fails and g.step), None)
    if first is not None:
        yield 2, f"{'next':<10}{first.step}", "bold"


def _some(word: str, lines: Sequence[str], style: str) -> Iterable[Line]:
    for line in lines[:3]:
        yield 2, f"{word:<10}{plain(line)}", style
    if len(lines) > 3:
        yield 2, f"{word:<10}... {len(lines) - 3:,} more; --report json=FILE has all", style


def _title(report: Report, group: Group) -> Line:
    where = extent(report, group)
    said = f"{group.label} {plain(group.code)} {plain(group.kind)}"
    return 0, f"{said}: {where}" if where else said, _STYLES[group.label]


def _advice(group: Group) -> Iterable[Line]:
    for hint in group.hints[:1]:
        more = f" (and {len(group.hints) - 1:,} more hints)" if len(group.hints) > 1 else ""
        yield 2, f"hint: {hint}{more}", ""
    if group.step is not None:
        yield 2, f"do: {group.step}", "bold"
    if group.waived:
        for reason in list(dict.fromkeys(plain(f.waived) for f in group.findings if f.waived))[:1]:
            yield 2, f"waived: {reason}", "dim"


def _everything(report: Report) -> Iterable[Line]:
    for group in group_findings(report.findings):
        yield 0, "", ""
        yield _title(report, group)
        yield from ((2, said, "") for said in group.messages[:_MAX_MESSAGES])
        hidden = len(group.messages) - _MAX_MESSAGES
        if hidden > 0:
            yield 2, f"... {hidden:,} more messages; --report json=FILE has all", "dim"
        yield from ((4, name, "") for name in group.lines)
        yield from _advice(group)


@dataclass(slots=True)
class _Block:
    """One group on the screen: what must be said, and the names that may."""

    top: list[Text]
    names: list[list[Text]]
    bottom: list[Text]

    @property
    def height(self) -> int:
        """Lines without names."""
        return len(self.top) + len(self.bottom)

    def lines(self, room: int) -> list[Text]:
        """The group with as many names as `room` lines allow, and how many are left out."""
        if sum(map(len, self.names)) <= room:
            shown = self.names
            left = 0
        else:
            shown = list(self._fitting(room - 1))
            left = len(self.names) - len(shown) if shown else 0
        middle = [line for name in shown for line in name]
        if left:
            middle.append(Text(f"    ... {left:,} more lines of names", "dim"))
        return [*self.top, *middle, *self.bottom]

    def _fitting(self, room: int) -> Iterable[list[Text]]:
        for name in self.names:
            room -= len(name)
            if room < 0:
                return
            yield name


def _block(console: Console, report: Report, group: Group) -> _Block:
    messages = group.messages
    more = f" (and {len(messages) - 1:,} more like it)" if len(messages) > 1 else ""
    top = [(0, "", ""), _title(report, group), (2, messages[0] + more, "")]
    return _Block(
        top=_wrap(console, top, clip=_CLIP),
        # What covers most tensors first: `experts.{0..255}` before a single norm.
        names=[_wrap(console, [(4, name, "")]) for name in sorted(group.lines, key=_coverage)],
        bottom=_wrap(console, _advice(group), clip=_CLIP),
    )


def _coverage(line: str) -> int:
    """Minus the number of names that a line with ranges stands for."""
    total = 1
    for ranges in re.findall(r"{([\d.,]+)}", line):
        numbers = 0
        for run in ranges.split(","):
            first, _, last = run.partition("..")
            numbers += int(last or first) - int(first) + 1 if first.isdecimal() else 1
        total *= numbers
    return -total


def _screenful(console: Console, report: Report, room: int) -> list[Text]:
    """As many groups as fit, what fails first, and a line that says what does not."""
    groups = group_findings(report.findings)
    blocks: list[_Block] = []
    spare = room
    for group in groups:
        block = _block(console, report, group)
        # Names of what fails are worth more than what only warns.
        kept = 0 if group.fails else sum(min(len(b.names), _MIN_NAMES) for b in blocks)
        if block.height > spare - kept:
            break
        blocks.append(block)
        spare -= block.height
    body: list[Text] = []
    # Whatever room is left goes to names, the first group first.
    for block in blocks:
        lines = block.lines(spare)
        spare -= len(lines) - block.height
        body += lines
    rest = groups[len(blocks) :]
    if rest:
        kinds = ", ".join(f"{plain(g.code)} {plain(g.kind)} {len(g.findings):,}" for g in rest[:3])
        more = f" and {len(rest) - 3} more kinds" if len(rest) > 3 else ""
        said = f"also: {kinds}{more}; --verbose shows everything"
        body += _wrap(console, [(0, said, "bold")], clip=1)
    elif any(len(group.names) > 1 for group in groups):
        body.append(Text("--verbose shows every name", "dim"))
    return body


def _wrap(console: Console, lines: Iterable[Line], clip: int | None = None) -> list[Text]:
    """Lines no wider than the console; of a long one, the first `clip` lines."""
    wrapped: list[Text] = []
    for indent, said, style in lines:
        if not said:
            wrapped.append(Text())
            continue
        room = max(console.width - indent - 2, 20)
        pieces = list(Text(said, style).wrap(console, room, overflow="fold"))
        if clip is not None and len(pieces) > clip:
            pieces = pieces[:clip]
            pieces[-1].truncate(room - 4)
            pieces[-1].append(" ...")
        for number, piece in enumerate(pieces):
            piece.rstrip()
            wrapped.append(Text(" " * (indent if number == 0 else indent + 2)) + piece)
    return wrapped
