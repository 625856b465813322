"""The goals as one small SVG: a bar for each, its rounds as dots, the limit as a line."""

from __future__ import annotations

from html import escape

from benchmarks.goals import Goal
from benchmarks.measure import median

_ROW, _LEFT, _WIDTH, _MOST = 20, 330, 330, 3.0


def plot(rows: list[tuple[Goal, list[float]]]) -> str:
    """Scores: 1 is the limit, right of it is better; cut at 3."""
    height = _ROW * len(rows) + 34
    total = _LEFT + _WIDTH + 90
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}"',
        f' width="{total}" height="{height}" font-family="sans-serif" font-size="12">',
        "<title>What was measured, as a multiple of what was asked for</title>",
        f'<rect width="{total}" height="{height}" fill="#ffffff"/>',
    ]
    for number, (goal, values) in enumerate(rows):
        y = _ROW * number + 8
        value = median(values)
        colour = "#2a7f9e" if goal.met(values) else "#c4622d"
        out.append(
            f'<text x="{_LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(goal.what)}</text>'
            f'<rect x="{_LEFT}" y="{y + 2}" width="{_x(goal.score(value)) - _LEFT:.1f}" height="12"'
            f' fill="{colour}" fill-opacity="0.45"/>'
        )
        for one in values:
            x = _x(goal.score(one))
            out.append(f'<circle cx="{x:.1f}" cy="{y + 8}" r="2.5" fill="{colour}"/>')
        text = f"{value:.3g}{goal.unit}"
        out.append(f'<text x="{_LEFT + _WIDTH + 8}" y="{y + 12}">{escape(text)}</text>')
    limit, bottom = _x(1.0), height - 22
    out.append(
        f'<line x1="{limit:.1f}" x2="{limit:.1f}" y1="4" y2="{bottom}" stroke="#333333"/>'
        f'<text x="{limit:.1f}" y="{height - 8}" text-anchor="middle">asked for</text>'
        f'<text x="{_LEFT + _WIDTH}" y="{height - 8}" text-anchor="end">'
        f"better, cut at {_MOST:g} times</text></svg>\n"
    )
    return "\n".join(out)


def _x(score: float) -> float:
    return _LEFT + _WIDTH * min(score, _MOST) / _MOST
