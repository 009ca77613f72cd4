"""The report of a run as one HTML file, which needs nothing else: plots by matplotlib, inside it as SVG."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import islice
from typing import Any

from elasticrt.errors import ConfigError
from elasticrt.story import report
from elasticrt.story.board import COLOURS, coarse
from elasticrt.story.buckets import BUCKETS, Span
from elasticrt.story.fold import Story
from elasticrt.story.sentences import seconds

INK = "#010203"
"""matplotlib draws lines and words in it; then it becomes the colour of the page's text."""

UNITS = ((1.0, "seconds", 300.0), (60.0, "minutes", 18_000.0), (3600.0, "hours", math.inf))
"""The axis of time: seconds of a unit, its name, and for runs shorter than what it is used."""

NODES_SHOWN = 8
CURVES_SHOWN = 3

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
svg { width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
td, th { padding: .2rem .7rem .2rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #8884; }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .5em; border-radius: 2px; }
"""


def page(story: Story, now: float | None = None) -> str:
    """The whole file. `now`: the present, for a run that goes on. Raises ConfigError if matplotlib is not installed."""
    head = report.head(story, now)
    parts = [f"<h1>{escape(head[0])}</h1>", "<p>" + "<br>".join(map(escape, head[1:])) + "</p>"]
    if story.text:
        parts.append(f'<h2>Report</h2><div class="wide"><pre>{escape(story.text)}</pre></div>')
    parts.append(plots(story, now))
    parts += ["<h2>Where the time went</h2>", buckets(story, now), "<h2>Generations</h2>", generations(story)]
    failures = report.failure_lines(story)[1:]
    if failures:
        items = "".join(f"<li>{escape(line.strip())}</li>" for line in failures)
        parts.append(f"<h2>Failures by node</h2><ul>{items}</ul>")
    told = "".join(f"<li>{escape(line)}</li>" for line in report.dated(story, now))
    parts.append(f"<h2>What happened (UTC)</h2><ul>{told}</ul>")
    title = escape(f"elasticrt: run {story.run_id}")
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    top = f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{view}<title>{title}</title>'
    return f"{top}<style>{STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"


def buckets(story: Story, now: float | None) -> str:
    """Seconds and shares, with the colours of the ribbon."""
    found = report.columns(story, now)
    rows = []
    for name, meaning in BUCKETS.items():
        if any(name in spent for spent in found.values()):
            key = (
                f'<span class="key" style="background:{COLOURS[name]}" title="{escape(meaning)}"></span>{escape(name)}'
            )
            cells = (report.share(spent.get(name, 0.0), sum(spent.values())) for spent in found.values())
            rows.append([key, *map(escape, cells)])
    rows.append(["in all", *(escape(seconds(sum(spent.values()))) for spent in found.values())])
    return _table(["", *map(escape, found)], rows)


def generations(story: Story) -> str:
    """A row for each generation."""
    head = ("", "cause", "nodes", "world size", "in place", "from step", "pause", "steps done again", "phases")
    rows = []
    for chapter in story.chapters:
        pause = "" if chapter.pause_s is None else f"{chapter.pause_s:.2f} s"
        redone = "" if chapter.redone is None else f"{chapter.redone:,}"
        phases = ", ".join(f"{name} {took_s:.3f}" for name, took_s in chapter.phases.items())
        cells = (chapter.number, chapter.cause, ", ".join(chapter.nodes), chapter.world_size)
        more = ("yes" if chapter.in_place else "", f"{chapter.resume_step:,}", pause, redone, phases)
        rows.append([escape(str(cell)) for cell in (*cells, *more)])
    return _table(head, rows)


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    return '<div class="wide"><table>' + "\n".join(lines) + "</table></div>"


def plots(story: Story, now: float | None) -> str:
    """The ribbon of the time, the world size, and the curves of what was reported, over one axis of time."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        got, remedy = "matplotlib is not installed", "pip install matplotlib, or leave --html out for text"
        raise ConfigError("the plots cannot be drawn", "--html", got=got, remedy=remedy) from None

    begin, end = story.begin, max(now or story.last, story.begin + 1e-3)
    unit_s, unit = next(each for each in UNITS if end - begin < each[2])[:2]
    names = list(dict.fromkeys(name for _, point in story.points for name in point.scalars))[:CURVES_SHOWN]
    ribbons = {"run": story.spans(now), **dict(islice(story.spans_by_node(now).items(), NODES_SHOWN))}
    inks = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    settings: dict[Any, Any] = dict.fromkeys(inks, INK)
    settings |= {"svg.fonttype": "none", "svg.hashsalt": "elasticrt", "axes.spines.top": False, "font.size": 9}
    settings |= {"axes.spines.right": False, "axes.titlelocation": "left", "axes.titlesize": 9}
    with rc_context(settings):
        heights = [0.5 + 0.25 * len(ribbons), 1.1, *[1.6] * len(names)]
        figure = Figure(figsize=(5.4, sum(heights) + 0.3), layout="constrained")
        axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        _ribbon(axes[0], ribbons, lambda at: (at - begin) / unit_s)
        at = [(chapter.begin - begin) / unit_s for chapter in story.chapters]
        last = (end - begin) / unit_s
        if at:
            sizes = [chapter.world_size for chapter in story.chapters]
            axes[1].step([*at, last], [*sizes, sizes[-1]], where="post", color=COLOURS["restore"])
        axes[1].set_title("world size")
        axes[1].set_ylim(bottom=0)
        for axis, name in zip(axes[2:], names, strict=True):
            known = [(when, point.scalars[name]) for when, point in story.points if name in point.scalars]
            axis.plot([(when - begin) / unit_s for when, _ in known], [value for _, value in known],
                      color=COLOURS["set-up"], linewidth=1)  # fmt: skip
            axis.set_title(name)
        for axis in axes[1:]:
            for chapter, place in zip(story.chapters[1:], at[1:], strict=True):
                colour = COLOURS["detect"] if chapter.kind in ("failure", "lost") else COLOURS["train"]
                axis.axvline(place, color=colour, linewidth=0.8, linestyle=":")
        axes[-1].set_xlabel(f"{unit}; dotted: the membership has changed (red: a failure)")
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    drawn = text.getvalue()
    return drawn[drawn.index("<svg") :].replace(INK, "currentColor")


def _ribbon(axis: Any, ribbons: Mapping[str, Sequence[Span]], place: Any) -> None:
    for row, spans in enumerate(ribbons.values()):
        for bucket, colour in COLOURS.items():
            mine = [span for span in coarse(spans) if span.bucket == bucket]
            bars = [(place(span.begin), place(span.end) - place(span.begin)) for span in mine]
            axis.broken_barh(bars, (-row - 0.4, 0.8), facecolors=colour, linewidth=0)
    axis.set_yticks([-row for row in range(len(ribbons))], list(ribbons))
    axis.set_title("where the time went")
