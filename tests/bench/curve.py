"""Lines on two logarithmic scales, as an SVG made by hand: time against the number of agents. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#c8553d", "#0b7a75", "#5b7db1", "#8a8a8a", "#c9a227")
LEFT, TOP, WIDTH, HEIGHT, BOTTOM = 60, 40, 620, 360, 50
TICKS_S = (0.001, 0.01, 0.1, 1, 10, 100, 1000)
LABEL_GAP = 14


@dataclass(frozen=True)
class Curve:
    """A line through points (agents, seconds)."""

    name: str
    points: Sequence[tuple[int, float]]


def draw(curves: Sequence[Curve]) -> str:
    """The picture. Curves without points are left out."""
    drawn = [curve for curve in curves if curve.points]
    counts = sorted({agents for curve in drawn for agents, _ in curve.points}) or [1]
    seconds = [taken for curve in drawn for _, taken in curve.points] or [1.0]
    least_s = max(tick for tick in TICKS_S if tick <= max(min(seconds), TICKS_S[0]))
    most_s = min(tick for tick in TICKS_S if tick >= min(max(seconds), TICKS_S[-1]))

    def x(agents: float) -> float:
        return LEFT + WIDTH * math.log(agents / counts[0]) / math.log(max(2.0, counts[-1] / counts[0]))

    def y(taken: float) -> float:
        return TOP + HEIGHT * math.log(most_s / max(taken, least_s)) / math.log(max(2.0, most_s / least_s))

    body = [_words(LEFT, 20, "Seconds until the last agent has its seat, against the number of agents", weight="bold")]
    for tick in (tick for tick in TICKS_S if least_s <= tick <= most_s):
        body.append(_line([(LEFT, y(tick)), (LEFT + WIDTH, y(tick))], "#ddd", 1))
        body.append(_words(LEFT - 6, y(tick) + 4, f"{tick:g} s", anchor="end", colour="#666"))
    for agents in counts:
        body.append(_line([(x(agents), TOP), (x(agents), TOP + HEIGHT)], "#eee", 1))
        body.append(_words(x(agents), TOP + HEIGHT + 16, f"{agents:,}", anchor="middle", colour="#666"))
    body.append(_words(LEFT + WIDTH / 2, TOP + HEIGHT + 36, "agents", anchor="middle", colour="#666"))
    for index, curve in enumerate(drawn):
        colour = COLOURS[index % len(COLOURS)]
        points = [(x(agents), y(taken)) for agents, taken in curve.points]
        body.append(_line(points, colour, 2))
        body += [f'<circle cx="{at:.1f}" cy="{height:.1f}" r="3" fill="{colour}"/>' for at, height in points]
        agents, taken = curve.points[-1]
        label = f"{curve.name}: {taken:.2g} s at {agents:,}"
        left, top = LEFT + WIDTH - 310, TOP + HEIGHT - LABEL_GAP * (len(drawn) - index) + 6
        body.append(f'<rect x="{left}" y="{top - 9}" width="10" height="10" fill="{colour}"/>')
        body.append(_words(left + 16, top, label))
    width, height = LEFT + WIDTH + 40, TOP + HEIGHT + BOTTOM
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([start, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>", ""])


def _line(points: Sequence[tuple[float, float]], colour: str, width: int) -> str:
    path = " ".join(f"{at:.1f},{height:.1f}" for at, height in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _words(
    x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", colour: str = "#222"
) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" fill="{colour}"'
    return f"<text {where}>{escape(text)}</text>"
