"""The recovery benchmark's table and bar chart, from what was measured. Nothing is measured here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from tests.bench.marks import Recovery

TITLES = {
    "start": "start, below max",
    "worker": "worker SIGKILL",
    "node": "node SIGKILL",
    "rank0": "rank-0 node SIGKILL",
    "store": "store's node SIGKILL",
    "join": "a node joins",
    "leave": "a node leaves (SIGTERM)",
}
PAUSE_COUNTS = ("join", "leave")
"""Where the others train on meanwhile, the pause is what the event costs."""


@dataclass(frozen=True)
class Cell:
    """All repetitions of one event under one rival; a cost is None where training did not go on, `notes` say why."""

    event: str
    rival: str
    costs: tuple[Recovery | None, ...]
    notes: tuple[str, ...]

    def values(self, of: Callable[[Recovery], float | None]) -> list[float]:
        """One number of each repetition that recovered."""
        return [value for cost in self.costs if cost is not None and (value := of(cost)) is not None]

    def shown(self, of: Callable[[Recovery], float | None]) -> tuple[str, str]:
        """Median and worst as text; a repetition that never recovered is worse than any number."""
        values = sorted(self.values(of))
        missing = sum(cost is None for cost in self.costs)
        if not values and not missing:
            return "-", "-"
        everything = [*values, *[math.inf] * missing]
        return _text(statistics.median_high(everything) if missing else statistics.median(values)), _text(
            everything[-1]
        )

    def note(self) -> str:
        """What happened besides."""
        counts = {note: self.notes.count(note) for note in sorted(set(self.notes)) if note}
        return ", ".join(note if len(self.notes) == 1 else f"{note} ({n}x)" for note, n in counts.items())

    def line(self) -> str:
        """The row of the table."""
        step, pause = self.shown(lambda cost: cost.next_step_s), self.shown(lambda cost: cost.pause_s)
        ground = self.shown(lambda cost: cost.new_ground_s)[0] if self.event != "start" else "-"
        lost, attempts = self.values(lambda cost: cost.lost), self.values(lambda cost: cost.attempts)
        return "{:24} {:38} {:>8} {:>8}  {:>8} {:>8}  {:>8}  {:>6} {:>6} {:>4}  {}".format(
            TITLES[self.event],
            self.rival,
            *step,
            *pause,
            ground,
            f"{statistics.median(lost):g}" if lost and self.event != "start" else "-",
            f"{max(attempts):g}" if attempts else "-",
            len(self.costs),
            self.note(),
        ).rstrip()


def _text(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def table(cells: list[Cell], head: str) -> str:
    """The results as text."""
    names = "{:24} {:38} {:>8} {:>8}  {:>8} {:>8}  {:>8}  {:>6} {:>6} {:>4}".format(
        "event", "", "next step", "worst", "pause", "worst", "new step", "lost", "tries", "reps"
    )
    lines = ["Seconds until training goes on. " + head, "", names, "-" * len(names)]
    before = None
    for cell in cells:
        if before not in (None, cell.event):
            lines.append("")
        before = cell.event
        lines.append(cell.line())
    lines += [
        "",
        "next step: from the kill (or start) until all ranks have finished a step in the new world. pause: from the",
        "last step before until then. new step: until a step that nobody had finished before. lost: steps done again.",
        "tries: the most times that a node had to start its workers. torchrun's rank-0 node is never its store's host.",
        "",
    ]
    return "\n".join(lines)


COLOURS = ("#0b7a75", "#4fb3a9", "#c9a227", "#c8553d", "#6d3b47", "#5b7db1", "#8a8a8a")
LEFT, WIDTH, BAR, GAP, TOP = 190, 560, 13, 14, 64


def chart(cells: list[Cell], timeout_s: float) -> str:
    """Medians as bars on a logarithmic scale: the pause where the others train on, else the next step."""
    rivals = list(dict.fromkeys(cell.rival for cell in cells))
    colours = dict(zip(rivals, COLOURS, strict=False))
    least, most = 0.05, max(100.0, timeout_s * 1.2)

    def x(value: float) -> float:
        return LEFT + WIDTH * math.log(max(value, least) / least) / math.log(most / least)

    body, y, event = [], TOP, ""
    for cell in cells:
        if cell.event != event:
            y += GAP if event else 0
            event = cell.event
            what = " (pause)" if event in PAUSE_COUNTS else ""
            body.append(_words(LEFT - 8, y + BAR - 3, TITLES[event] + what, anchor="end", weight="bold"))
        shown = cell.shown(_pause if event in PAUSE_COUNTS else _next_step)[0]
        value = most if shown in ("never", "-") else float(shown)
        opacity = 0.35 if shown == "never" else 1.0
        body.append(
            f'<rect x="{LEFT}" y="{y}" width="{x(value) - LEFT:.1f}" height="{BAR - 2}" '
            f'fill="{colours[cell.rival]}" fill-opacity="{opacity}"/>'
        )
        body.append(
            _words(x(value) + 4, y + BAR - 4, f"{shown} {cell.note()}".strip() + (" s" if value < most else ""))
        )
        y += BAR
    ticks = []
    for tick in (0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60):
        ticks.append(f'<line x1="{x(tick):.1f}" y1="{TOP - 6}" x2="{x(tick):.1f}" y2="{y + 4}" stroke="#ddd"/>')
        ticks.append(_words(x(tick), TOP - 10, f"{tick:g} s", anchor="middle", colour="#666"))
    legend, at = [], float(LEFT)
    for rival in rivals:
        legend.append(f'<rect x="{at}" y="{22}" width="10" height="10" fill="{colours[rival]}"/>')
        legend.append(_words(at + 14, 31, rival))
        at += 26 + 6.1 * len(rival)
    size = f'width="{max(at, LEFT + WIDTH + 130):.0f}" height="{y + 20}"'
    title = _words(LEFT, 14, "Until training goes on (median, logarithmic)", weight="bold")
    style = 'font-family="sans-serif" font-size="11"'
    picture = "\n".join([title, *legend, *ticks, *body])
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n<rect width="100%" height="100%" fill="white"/>'
    return f"{start}\n{picture}\n</svg>\n"


def _pause(cost: Recovery) -> float | None:
    return cost.pause_s


def _next_step(cost: Recovery) -> float | None:
    return cost.next_step_s


def _words(
    x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", colour: str = "#222"
) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" fill="{colour}"'
    return f"<text {where}>{escape(text)}</text>"
