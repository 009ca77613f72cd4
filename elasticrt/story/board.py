"""What the dashboard shows of a run, as JSON values, from its story. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elasticrt.ipc.wording import counted
from elasticrt.story import report, sentences
from elasticrt.story.buckets import BUCKETS, Span, totals
from elasticrt.story.fold import Story
from elasticrt.story.page import COLOURS, coarse

NODES_SHOWN = 40
POINTS_SHOWN = 400
RANKS_SHOWN = 64
SENTENCES_SHOWN = 60


def board(story: Story, now: float) -> dict[str, Any]:
    """All of it, at `now`. Times are seconds since 1970."""
    spans, chapter = story.spans(now), story.chapter
    spent, step = totals(spans), len(story.points) // POINTS_SHOWN + 1
    age_s = now - story.checkpoint_at if story.checkpoint_at is not None else None
    return {
        "run": story.run_id,
        "state": report.state(story, report.present(story, now)),
        "alive": bool(story.alive()) and story.result is None,
        "now": now,
        "tiles": {
            "step": f"{story.newest:,}",
            "epoch": str(story.epoch),
            "world size": str(chapter.world_size if chapter is not None else 0),
            "generation": str(chapter.number if chapter is not None else 0),
            "goodput": f"{story.goodput(now):.1%}",
            "checkpoint": f"{story.checkpoint:,}" + (f", {report.seconds(age_s)} ago" if age_s is not None else ""),
        },
        "nodes": _nodes(story)[:NODES_SHOWN],
        "ribbons": {name: _pieces(each) for name, each in {"run": spans, **_by_node(story, now)}.items()},
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
        "saves": {"text": _saved(story), "at": [each.at for each in story.saves]},
        "work": {
            f"rank {rank}": [[at, round(own_s * 1e3, 2)] for at, own_s in story.work[rank]]
            for rank in sorted(story.work)[:RANKS_SHOWN]
        },
        "stepped": [story.last_step_at, story.newest],
        "points": [[point.at, point.step, dict(point.scalars)] for point in story.points[::step]],
        "sentences": _sentences(story)[-SENTENCES_SHOWN:],
    }


def _saved(story: Story) -> str:
    """The checkpoints, in words."""
    if not story.saves:
        return ""
    last = story.saves[-1]
    took = f" in {report.seconds(last.took_s)}" if last.took_s else ""
    return (
        f"{counted(story.checkpoints, 'checkpoint')}; the newest: step {last.step:,}, {last.bytes / 1e6:,.1f} MB{took}"
    )


def _by_node(story: Story, now: float) -> dict[str, list[Span]]:
    names = list(dict.fromkeys(life.node for life in story.lives))[:NODES_SHOWN]
    return {
        name: [span for life in story.lives if life.node == name for span in story.spans_of(life, now)]
        for name in names
    }


def _pieces(spans: Sequence[Span]) -> list[list[Any]]:
    return [[round(span.begin, 3), round(span.end, 3), COLOURS[span.bucket]] for span in coarse(spans)]


def _nodes(story: Story) -> list[dict[str, str]]:
    """Each node with what it does, those that train first."""
    chapter, alive, found = story.chapter, story.alive(), []
    seated = chapter.nodes if chapter is not None else ()
    for name in dict.fromkeys([*seated, *(life.node for life in story.lives)]):
        generation, pids = story.workers.get(name, (0, {}))
        trains = name in seated and name in alive
        ranks = ", ".join(map(str, pids)) if trains and chapter is not None and generation == chapter.number else ""
        word = "training" if trains else "standing by" if name in alive else "gone"
        found.append({"name": name, "state": word if story.result is None else "ended", "ranks": ranks})
    return found


def _sentences(story: Story) -> list[list[Any]]:
    """What has happened, in order: when, how grave, and in words."""
    told: list[tuple[float, str, str]] = []
    for each in story.troubles:
        told.append((each.at, "bad", each.what if each.node in each.what else f"{each.node}: {each.what}"))
    for place, chapter in enumerate(story.chapters):
        told.append((chapter.begin, "", sentences.beginning(chapter, first=place == 0)))
        if chapter.stepped_at is not None:
            told.append((chapter.stepped_at, "good", sentences.cost(chapter, chapter.begin)))
    if story.result is not None:
        told.append((story.last, "good" if story.result.code == 0 else "bad", sentences.ending(story.result)))
    return [list(each) for each in sorted(told, key=lambda each: each[0])]
