"""A parity report as one HTML file: a curve over the layers, and one over the positions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from mtpconv.parity.render import render_text
from mtpconv.parity.report import ParityReport

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 900, 280, 64, 16, 78
_COLOURS = ("#1f5fa8", "#c2410c", "#15803d", "#7e22ce", "#0f766e", "#b91c1c")

_STYLE = """
body{font:14px/1.5 system-ui,sans-serif;max-width:960px;margin:2em auto;color:#1c1c1c;
background:#fff}h1{font-size:20px}h2{font-size:16px;margin-top:2em}
pre{background:#f5f5f4;padding:1em;overflow:auto;font-size:12px}
svg{width:100%;height:auto}text{font:11px system-ui,sans-serif;fill:#444}
.pass{color:#15803d}.fail{color:#b91c1c}
"""

_ABOUT_LAYERS = (
    "Difference of the hidden states, relative to their size, at every point both sides have, in "
    "the order of computation. Grey is the rounding noise of a side against itself."
)
_ABOUT_POSITIONS = (
    "Largest difference of the logits at each position, in logits; the dashed line is the limit."
)

#: Least value on the logarithmic axes: equal is drawn here.
FLOOR = 1e-9


def render_html(report: ParityReport) -> str:
    """The report with its pictures; needs nothing but the one file."""
    word = "pass" if report.verdict == "pass" else "fail"
    return "".join(
        (
            "<!doctype html><html lang='en'><meta charset='utf-8'>",
            f"<title>parity {escape(report.model_type)}: {word}</title><style>{_STYLE}</style>",
            f"<h1>Forward parity of {escape(report.model_type)}: ",
            f"<span class='{word}'>{word}</span></h1>",
            f"<pre>{escape(render_text(report))}</pre>",
            f"<h2>Along the layers</h2><p>{_ABOUT_LAYERS}</p>",
            _layers(report),
            f"<h2>Along the positions</h2><p>{_ABOUT_POSITIONS}</p>",
            *(_positions(report, number) for number in range(len(report.heads))),
            "</html>\n",
        )
    )


def _layers(report: ParityReport) -> str:
    points = report.points
    if not points:
        return "<p>No point was seen.</p>"
    values = [point.difference for point in points]
    noise = [point.noise for point in points if point.noise is not None]
    chart = _Chart([*values, *noise], len(points))
    ticks = [
        (number, point.block)
        for number, point in enumerate(points)
        if number == 0 or points[number - 1].block != point.block
    ]
    parts = [chart.frame(), chart.ticks(_thinned(ticks, 24))]
    if len(noise) == len(points):
        parts.append(chart.line(noise, "#a8a29e", "noise"))
    parts.append(chart.line(values, _COLOURS[0], "difference"))
    parts.append(chart.dots(values, [point.name for point in points], _COLOURS[0]))
    return chart.svg(parts)


def _positions(report: ParityReport, number: int) -> str:
    head = report.heads[number]
    rows = head.per_position
    values = [value for row in rows for value in row]
    chart = _Chart([*values, head.limits.largest], max(len(row) for row in rows))
    parts = [chart.frame(), chart.ticks([(0, "0"), (len(rows[0]) - 1, str(len(rows[0]) - 1))])]
    parts.append(chart.level(head.limits.largest))
    for row, spots in enumerate(rows):
        parts.append(chart.line(spots, _COLOURS[(number + row) % len(_COLOURS)], f"row {row}"))
    mark = "" if head.passed else " <span class='fail'>differs</span>"
    return f"<h3>{escape(head.head)}{mark}</h3>{chart.svg(parts)}"


def _thinned(ticks: Sequence[tuple[int, str]], most: int) -> list[tuple[int, str]]:
    step = -(-len(ticks) // most)
    return list(ticks[::step])


class _Chart:
    """A chart with a logarithmic vertical axis over numbered places."""

    def __init__(self, values: Sequence[float], places: int) -> None:
        finite = [max(value, FLOOR) for value in values if math.isfinite(value)] or [FLOOR]
        self._low = math.floor(math.log10(min(finite)))
        self._high = max(math.ceil(math.log10(max(finite))), self._low + 1)
        self._places = max(places - 1, 1)

    def _x(self, place: int) -> float:
        return LEFT + (WIDTH - LEFT - 12) * place / self._places

    def _y(self, value: float) -> float:
        power = self._high if not math.isfinite(value) else math.log10(max(value, FLOOR))
        power = min(max(power, self._low), self._high)
        share = (power - self._low) / (self._high - self._low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    def frame(self) -> str:
        """Horizontal lines, one for each power of ten."""
        lines = []
        for power in range(self._low, self._high + 1):
            y = self._y(10.0**power)
            lines.append(
                f"<line x1='{LEFT}' x2='{WIDTH - 12}' y1='{y:.1f}' y2='{y:.1f}' stroke='#e7e5e4'/>"
                f"<text x='{LEFT - 8}' y='{y + 4:.1f}' text-anchor='end'>1e{power}</text>"
            )
        return "".join(lines)

    def ticks(self, ticks: Sequence[tuple[int, str]]) -> str:
        """Words under places."""
        y = HEIGHT - BOTTOM + 14
        return "".join(
            f"<text transform='translate({self._x(place):.1f},{y}) rotate(45)'>"
            f"{escape(word)}</text>"
            for place, word in ticks
        )

    def line(self, values: Sequence[float], colour: str, title: str) -> str:
        """A curve."""
        path = " ".join(f"{self._x(i):.1f},{self._y(v):.1f}" for i, v in enumerate(values))
        return (
            f"<polyline fill='none' stroke='{colour}' stroke-width='1.5' points='{path}'>"
            f"<title>{escape(title)}</title></polyline>"
        )

    def dots(self, values: Sequence[float], titles: Sequence[str], colour: str) -> str:
        """A dot for each value, with its name on hovering."""
        return "".join(
            f"<circle cx='{self._x(i):.1f}' cy='{self._y(v):.1f}' r='2.5' fill='{colour}'>"
            f"<title>{escape(t)}: {v:.1e}</title></circle>"
            for i, (v, t) in enumerate(zip(values, titles, strict=True))
        )

    def level(self, value: float) -> str:
        """A dashed horizontal line."""
        if not math.isfinite(value):
            return ""
        y = self._y(value)
        return (
            f"<line x1='{LEFT}' x2='{WIDTH - 12}' y1='{y:.1f}' y2='{y:.1f}' stroke='#b91c1c' "
            "stroke-dasharray='6 4'/>"
        )

    def svg(self, parts: Sequence[str]) -> str:
        """The finished picture."""
        return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img'>{''.join(_some(parts))}</svg>"


def _some(parts: Sequence[str]) -> Iterator[str]:
    yield from (part for part in parts if part)
