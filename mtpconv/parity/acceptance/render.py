"""An acceptance report as text, JSON and a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape

from mtpconv.parity.acceptance.report import AcceptanceReport, Measurement

FORMAT = 1

#: A ground of its own, for pages that are dark.
_WHITE = "<rect width='100%' height='100%' fill='#ffffff'/>"


def render_text(report: AcceptanceReport) -> str:
    """The report for a terminal."""
    return "\n".join(_lines(report))


def _lines(report: AcceptanceReport) -> Iterator[str]:
    how = f"temperature {report.temperature:g}" if report.temperature else "greedy"
    yield f"acceptance, {how}: {report.prompts}, {report.tokens} tokens more for each"
    for measured in (report.measured, report.against):
        if measured is not None:
            yield from _measurement(measured)
    if report.cost is not None:
        cost = report.cost
        yield (
            f"  a pass over {cost.tokens} tokens costs {cost.wide:.2f} of one over one token "
            f"({cost.one * 1e3:.1f} ms on {cost.device}, {cost.context} tokens before)"
        )
    if report.speedup is not None and report.draft_cost is not None:
        yield (f"  speed-up {report.speedup:.2f} at a draft cost of {report.draft_cost:.2f} passes")
    for note in report.notes:
        yield f"  note: {note}"
    for reason in report.reasons:
        yield f"  {reason}"
    yield f"{'PASS' if report.verdict == 'pass' else 'FAIL'} in {report.seconds:.1f} s"


def _measurement(measured: Measurement) -> Iterator[str]:
    count = measured.count
    yield f"  {measured.checkpoint} ({measured.kind}), drafts: {measured.draft}"
    for place in range(len(count.made)):
        rate = count.rate(place)
        shown = "never reached" if rate is None else f"{rate:6.1%}"
        yield (
            f"    draft {place}: {shown}  ({count.kept[place]} kept of {count.reached[place]} "
            f"reached, {count.made[place]} made)"
        )
    yield (
        f"    {count.tokens_per_pass:.2f} tokens per trunk pass "
        f"({count.tokens} tokens, {count.passes} passes)"
    )
    if measured.sample is not None:
        yield f"    {measured.sample}"


def render_json(report: AcceptanceReport) -> str:
    """The report as JSON."""
    value = {"format": FORMAT, "exit_code": report.exit_code} | asdict(report)
    for name, measured in (("measured", report.measured), ("against", report.against)):
        if measured is not None:
            count = measured.count
            value[name]["acceptance"] = [count.rate(i) for i in range(len(count.made))]
            value[name]["tokens_per_pass"] = count.tokens_per_pass
    return json.dumps(value, indent=1, default=str)


def bars(title: str, rows: Sequence[tuple[str, float | None]]) -> str:
    """A bar for each named rate between 0 and 1, as one SVG."""
    width, step, left = 640, 30, 230
    parts = [
        f"<text x='0' y='16' font-weight='bold'>{escape(title)}</text>",
    ]
    for number, (name, rate) in enumerate(rows):
        y = 30 + number * step
        length = (width - left - 60) * (rate or 0.0)
        shown = "none" if rate is None else f"{rate:.0%}"
        parts.append(
            f"<text x='{left - 8}' y='{y + 15}' text-anchor='end'>{escape(name)}</text>"
            f"<rect x='{left}' y='{y}' width='{max(length, 1):.1f}' height='20' fill='#1f5fa8'/>"
            f"<text x='{left + length + 6:.1f}' y='{y + 15}'>{shown}</text>"
        )
    height = 40 + len(rows) * step
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' "
        f"font-family='system-ui,sans-serif' font-size='13'>{_WHITE}{''.join(parts)}</svg>\n"
    )


_COLOURS = ("#1f5fa8", "#c2410c", "#15803d", "#78716c", "#7e22ce")


def curves(title: str, places: Sequence[str], lines: Mapping[str, Sequence[float]]) -> str:
    """Named curves over named places, from 0 up, as one SVG."""
    width, height, left, top, bottom = 640, 320, 40, 34, 40
    top_value = max(max(values) for values in lines.values()) * 1.05

    def x(place: int) -> float:
        return left + (width - left - 150) * place / max(len(places) - 1, 1)

    def y(value: float) -> float:
        return height - bottom - (height - top - bottom) * value / top_value

    parts = [f"<text x='0' y='16' font-weight='bold'>{escape(title)}</text>"]
    for level in range(int(top_value) + 1):
        parts.append(
            f"<line x1='{left}' x2='{x(len(places) - 1):.1f}' y1='{y(level):.1f}' "
            f"y2='{y(level):.1f}' stroke='#e7e5e4'/>"
            f"<text x='{left - 8}' y='{y(level) + 4:.1f}' text-anchor='end'>{level}</text>"
        )
    for place, word in enumerate(places):
        parts.append(
            f"<text x='{x(place):.1f}' y='{height - bottom + 18}' text-anchor='middle'>"
            f"{escape(word)}</text>"
        )
    for number, (name, values) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(values))
        parts.append(
            f"<polyline fill='none' stroke='{colour}' stroke-width='2' points='{path}'/>"
            f"<text x='{x(len(places) - 1) + 8:.1f}' y='{y(values[-1]) + 4:.1f}' fill='{colour}'>"
            f"{escape(name)}</text>"
        )
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' "
        f"font-family='system-ui,sans-serif' font-size='13'>{_WHITE}{''.join(parts)}</svg>\n"
    )
