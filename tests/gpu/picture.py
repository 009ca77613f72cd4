"""Seconds against the size of the state, both logarithmic, a picture of each result: `python -m tests.gpu.picture`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tests.gpu.station import ROOT

RESULTS = Path(__file__).resolve().parent / "results"
PICTURES = ROOT / "docs" / "img"
SHOWN = ("recovery", "pause", "save", "restore", "stall")
COLOURS = ("#0b7a75", "#c8553d", "#c9a227", "#5b7db1", "#6d3b47", "#4fb3a9", "#8a8a8a")
LEFT, TOP, WIDTH, HEIGHT = 60, 20, 460, 300
MB_MIN, MB_MAX = 10.0, 10_000.0
S_MIN, S_MAX = 0.001, 100.0


def lines_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """By name, pairs of megabytes and seconds, from rows as `python -m tests.gpu --write` has written them."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name in SHOWN:
            if row["size_mb"] and name in row["seconds"]:
                place = lines.setdefault(f"{row['what']}: {name} ({row['where']})", [])
                place.append((row["size_mb"], row["seconds"][name]))
    return lines


def draw(lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """The picture. `lines`: by name, pairs of megabytes and seconds."""
    body = []
    for power in range(1, 5):
        x = _x(10.0**power)
        body.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{TOP + HEIGHT}" stroke="#ddd"/>')
        body.append(_words(x, TOP + HEIGHT + 16, f"{10**power:,} MB", anchor="middle"))
    for power in range(-3, 3):
        y = _y(10.0**power)
        body.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + WIDTH}" y2="{y:.1f}" stroke="#ddd"/>')
        body.append(_words(LEFT - 6, y + 4, f"{10.0**power:g} s", anchor="end"))
    for index, (name, points) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        places = [(_x(size_mb), _y(seconds)) for size_mb, seconds in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dashes = ' stroke-dasharray="6 4"' if index >= len(COLOURS) else ""
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        top = TOP + 12 + 16 * index
        body.append(f'<rect x="{LEFT + WIDTH + 14}" y="{top - 9}" width="10" height="10" fill="{colour}"/>')
        body.append(_words(LEFT + WIDTH + 30, top, name))
    width, height = LEFT + WIDTH + 300, max(TOP + HEIGHT + 30, TOP + 20 + 16 * len(lines))
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([start, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>", ""])


def _x(size_mb: float) -> float:
    return LEFT + WIDTH * math.log(max(size_mb, MB_MIN) / MB_MIN) / math.log(MB_MAX / MB_MIN)


def _y(seconds: float) -> float:
    return TOP + HEIGHT * (1 - math.log(max(seconds, S_MIN) / S_MIN) / math.log(S_MAX / S_MIN))


def _words(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#222">{escape(text)}</text>'


def main() -> None:
    """Draw the pictures that the documentation shows."""
    for path in sorted(RESULTS.glob("*.json")):
        picture = PICTURES / f"sizes-{path.stem}.svg"
        picture.write_text(draw(lines_of(json.loads(path.read_text())["rows"])))
        print(picture)


if __name__ == "__main__":
    main()
