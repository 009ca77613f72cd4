"""Medians as bars on a logarithmic scale, as an SVG made by hand. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#0b7a75", "#4fb3a9", "#c9a227", "#c8553d", "#6d3b47", "#5b7db1", "#8a8a8a")
LEFT, WIDTH, RIGHT = 250, 620, 150
TOP, BAR, GAP = 78, 13, 14
LEAST_S = 0.02
TICKS_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60)
LEGEND_COLUMNS = 3


@dataclass(frozen=True)
class Bar:
    """One bar: seconds, infinity for never; bars of one `group` stand together, `series` gives the colour."""

    group: str
    series: str
    seconds: float
    note: str = ""


def draw(bars: Sequence[Bar], never_s: float) -> str:
    """The picture; `never_s`: after how long it was given up."""
    most = max(100.0, never_s * 1.2)

    def x(value: float) -> float:
        return LEFT + WIDTH * math.log(max(value, LEAST_S) / LEAST_S) / math.log(most / LEAST_S)

    series = list(dict.fromkeys(bar.series for bar in bars))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(series)}
    body, y, group = [], TOP, ""
    for bar in bars:
        if bar.group != group:
            y += GAP if group else 0
            group = bar.group
            body.append(_words(LEFT - 8, y + BAR - 3, group, anchor="end", weight="bold"))
        never = math.isinf(bar.seconds)
        end = x(most if never else bar.seconds)
        body.append(
            f'<rect x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{BAR - 2}" fill="{colours[bar.series]}" '
            f'fill-opacity="{0.3 if never else 1.0}"/>'
        )
        shown = f"never ({bar.note})" if never and bar.note else "never" if never else f"{bar.seconds:.3g} s"
        body.append(_words(end + 4, y + BAR - 4, shown))
        y += BAR
    lines = []
    for tick in TICKS_S:
        lines.append(f'<line x1="{x(tick):.1f}" y1="{TOP - 6}" x2="{x(tick):.1f}" y2="{y + 4}" stroke="#ddd"/>')
        lines.append(_words(x(tick), TOP - 10, f"{tick:g} s", anchor="middle", colour="#666"))
    legend = []
    for index, name in enumerate(series):
        left = 12 + (index % LEGEND_COLUMNS) * (LEFT + WIDTH + RIGHT) / LEGEND_COLUMNS
        top = 22 + index // LEGEND_COLUMNS * 15
        legend.append(f'<rect x="{left:.0f}" y="{top}" width="10" height="10" fill="{colours[name]}"/>')
        legend.append(_words(left + 14, top + 9, name))
    title = _words(12, 14, "Seconds until training goes on (median, logarithmic scale)", weight="bold")
    size = f'width="{LEFT + WIDTH + RIGHT}" height="{y + 20}" viewBox="0 0 {LEFT + WIDTH + RIGHT} {y + 20}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([start, background, title, *legend, *lines, *body, "</svg>", ""])


def _words(
    x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", colour: str = "#222"
) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" fill="{colour}"'
    return f"<text {where}>{escape(text)}</text>"
