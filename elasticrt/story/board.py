"""The values that the dashboard shows of a run, as JSON, from the run's story. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from elasticrt.ipc.wording import counted
from elasticrt.story import report, sentences
from elasticrt.story.buckets import BUCKETS, Span, coarse
from elasticrt.story.fold import Story
from elasticrt.story.sentences import happened, seconds

COLOURS = dict(
    zip(
        BUCKETS,
        ("#3a9d5d", "#d9822b", "#c9b12f", "#2f8fc9", "#7e6fd0", "#c0392b", "#d6597b", "#b0569f", "#4f79b8", "#55b5b0",
         "#8a8f98", "#5f6670", "#b4b8be"),
        strict=True,
    )
)  # fmt: skip
"""A colour for each bucket. They can be told apart on white and on black."""

# How much a page shows, so that its size does not grow with the run.
NODES_SHOWN = 40
POINTS_SHOWN = 400
RANKS_SHOWN = 64
SENTENCES_SHOWN = 60

PIECES_SHOWN = 200
"""How many pieces a ribbon of a long run has, each divided between its buckets."""


def board(story: Story, now: float) -> dict[str, Any]:
    """All values of the page at `now`."""
    until, chapter = story.now_if_running(now), story.generations.newest
    by_node = islice(story.spans_by_node(until).items(), NODES_SHOWN)
    # Of the points only each `step`-th is sent.
    spent, step = story.spent(until), len(story.steps.points) // POINTS_SHOWN + 1
    saved_at = story.checkpoints.newest_at if story.run.result is None else None
    age_s = now - saved_at if saved_at is not None else None
    return {
        "run": story.run.run_id,
        "state": sentences.state(story, until),
        "tiles": {
            "step": f"{story.steps.newest:,}",
            "steps/s": report.speed(story, until).removesuffix(" steps/s") or "-",
            "epoch": str(story.steps.epoch),
            "world size": str(chapter.world_size),
            "generation": str(chapter.number),
            "goodput": f"{story.goodput(until):.1%}",
            "checkpoint": f"{story.checkpoints.newest:,}" + (f", {seconds(age_s)} ago" if age_s is not None else ""),
        },
        "nodes": _nodes(story)[:NODES_SHOWN],
        "begin": story.begin,
        "end": min(story.last if until is None else until, story.run.ended_at),
        "ribbons": {name: _pieces(each) for name, each in by_node},
        "buckets": [
            {
                "name": name,
                "text": text,
                "colour": COLOURS[name],
                "spent": report.share(spent[name], sum(spent.values())),
            }
            for name, text in BUCKETS.items()
            if name in spent
        ],
        "saves": {"text": _saved(story), "at": [at for at, _ in story.checkpoints.committed]},
        "work": {
            f"rank {rank}": [[at, round(own_s * 1e3, 2)] for at, own_s in story.steps.work[rank]]
            for rank in sorted(story.steps.work)[:RANKS_SHOWN]
        },
        "points": [[at, each.step, each.scalars] for at, each in story.steps.points[::step]],
        "sentences": [list(each) for each in happened(story, until)[-SENTENCES_SHOWN:]],
    }


def _saved(story: Story) -> str:
    """The checkpoints, in words."""
    if not story.checkpoints.committed:
        return ""
    (_, last), number = story.checkpoints.committed[-1], counted(story.checkpoints.count, "checkpoint")
    took = f" in {seconds(last.took_s)}" if last.took_s else ""
    return f"{number}; the newest: step {last.step:,}, {last.bytes / 1e6:,.1f} MB{took}"


def _pieces(spans: Sequence[Span]) -> list[list[Any]]:
    shown = coarse(spans, PIECES_SHOWN)
    return [[round(span.begin, 3), round(span.end, 3), COLOURS[span.bucket]] for span in shown]


def _nodes(story: Story) -> list[dict[str, str]]:
    """Each node with its state and ranks, those with a seat first."""
    chapter, alive, found = story.generations.newest, story.lives.alive(), []
    trains_now = {life.node for life in story.seated_lives()}
    blamed = story.standstill.culprit.nodes if story.standstill is not None else None
    for name in dict.fromkeys([*chapter.nodes, *(life.node for life in story.lives.all)]):
        trains = name in trains_now
        ranks = ", ".join(map(str, story.generations.ranks(name, chapter.number))) if trains else ""
        seated_word = "waiting" if chapter.waits else "training"
        if blamed is not None:
            seated_word = "waited for" if name in blamed else "standing still"
        word = seated_word if trains else "standing by" if name in alive else "gone"
        found.append({"name": name, "state": word if story.run.result is None else "ended", "ranks": ranks})
    return found
