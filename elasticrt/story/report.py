"""The report of a run as text: how it ended, where its time went, what each change cost, what failed. Pure."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from elasticrt.ipc.wording import counted, listed
from elasticrt.story.buckets import BUCKETS, TRAIN, totals
from elasticrt.story.fold import Story
from elasticrt.story.generations import Chapter
from elasticrt.story.sentences import (
    happened,
    pace,
    seconds,
    slow,
    state,
    steps_made,
    to_go_on,
    unsaved,
)

NODES_SHOWN = 4
"""With more nodes than this, the time table has no column for each."""

# How many phases of a pause are shown, and the shortest one that is.
PHASES_SHOWN = 3
PHASE_S_MIN = 0.005
# How many different failures of a node are shown.
FAILURES_SHOWN = 3
# The width of a column with causes.
CAUSE_SHOWN = 72
# The width of a line, and the indent of its continuation: that of a date.
LINE_SHOWN, DATE_WIDTH = 120, 21


def report(story: Story, now: float | None = None) -> list[str]:
    """The whole report.

    Args:
        story: of the run.
        now: the present, for a run that goes on; None: it has ended. The same in all functions below.
    """
    return [*head(story, now), "", *body(story, now)]


def head(story: Story, now: float | None = None) -> list[str]:
    """The run's name, how it ended, how far it came, and its goodput."""
    nodes = sorted(story.lives.nodes)
    gone = sorted(story.lives.nodes - {*story.lives.alive()}) if now is not None else []
    told = f"; {listed(gone)} {'is' if len(gone) == 1 else 'are'} gone" if gone else ""
    lines = [f"run {story.run.run_id}: {state(story, now)}", f"{counted(len(nodes), 'node')}: {listed(nodes)}{told}"]
    # Without a result, `state` says how to go on.
    remedy = to_go_on(story) if story.run.result is not None else ""
    return [*lines, *sums(story, now), *([remedy] if remedy else [])]


def sums(story: Story, now: float | None = None) -> list[str]:
    """A slow node, how far the run came, its goodput, what changes cost, outages of etcd."""
    found = slow(story.straggler) if story.straggler is not None and now is not None else ""
    return [*filter(None, (found, paces(story, now), worth(story, now), changes(story), outages(story, now)))]


def summary(story: Story) -> list[str]:
    """A few lines for the end of an agent, from its own events. They say that this is one node's view."""
    if not any(life.node in chapter.nodes for life in story.lives.all for chapter in story.generations.all):
        return []
    alone = all(len(chapter.nodes) == 1 for chapter in story.generations.all)
    pace, *more = sums(story)
    return [pace if alone else "seen from this node: " + pace.removesuffix("; no checkpoint"), *more]


def body(story: Story, now: float | None = None) -> list[str]:
    """Where the time went, the generations, what failed, and what happened."""
    parts = (time_table(story, now), generation_table(story), failure_lines(story), happened_lines(story, now))
    return [line for part in parts if part for line in ("", *part)][1:]


def outages(story: Story, now: float | None = None) -> str:
    """For how long etcd did not answer; "" if it always did."""
    times = story.lives.times_without_etcd(now)
    often = "once" if len(times) == 1 else counted(len(times), "time")
    total_s = sum(end - begin for begin, end in times)
    return (
        f"etcd did not answer {often}, for {seconds(total_s)}" + (" in all" if len(times) > 1 else "") if times else ""
    )


def paces(story: Story, now: float | None = None) -> str:
    """The number of steps, their speed (see `speed`), and the newest checkpoint."""
    if not story.has_step_numbers:
        has_stepped = any(chapter.stepped_at is not None for chapter in story.generations.all)
        return "steps are not counted: the script has no Loop" if has_stepped else "no step was seen"
    chapter, scalars = story.generations.newest, story.steps.scalars
    saved, missed = story.checkpoints.newest, story.checkpoints.unsaved
    text = ", ".join(filter(None, (counted(steps_made(story), "step"), speed(story, now))))
    # A node without a seat knows only the scalars of an earlier generation, which would stand beside the newest step.
    if scalars and not story.lives.nodes.isdisjoint(chapter.nodes):
        text += ", " + ", ".join(f"{name} {value:.4g}" for name, value in scalars.items())
    # A node with a run directory of its own may have saved more.
    whole = not story.nodes_without_events()
    text += f"; newest checkpoint: step {saved:,}" if saved else "; no checkpoint" if whole else ""
    # The script ended inside its loop. The node of rank 0 saves, so without the end of its events that is not known.
    first = story.lives.last_seat(chapter.nodes[0], chapter) if chapter.nodes else None
    whole = whole and first is not None and first.result_at < math.inf
    if story.run.succeeded and 0 < saved < story.steps.newest and whole:
        text += ", and nothing after it is saved"
    return text + (f"; {unsaved(missed)}" if missed is not None else "")


def speed(story: Story, now: float | None = None) -> str:
    """`12.3 steps/s`; "" if not known.

    For a run that goes on at `now` the present speed, otherwise that between its first and its last step.
    """
    if now is not None:
        return pace(story, now)
    first = story.steps.last_at if story.steps.first_at is None else story.steps.first_at
    # Without the time in which no agent ran.
    took_s, until = 0.0, first
    for begin, end in sorted((life.begin, life.last) for life in story.lives.all):
        took_s += max(0.0, min(end, story.steps.last_at) - max(begin, until))
        until = max(until, end)
    # Steps after the last reported one, known only by a commit, lie outside of `took_s`.
    steps = steps_made(story) - max(0, story.checkpoints.newest - story.steps.newest)
    return f"{(steps - 1) / took_s:.1f} steps/s" if took_s > 0 and steps > 1 else ""


def worth(story: Story, now: float | None = None) -> str:
    """The goodput, and the buckets with most of the other time; "" for a run that has trained nothing."""
    spent, number = story.spent(now), len(story.lives.nodes)
    if TRAIN not in spent and not steps_made(story):
        return ""
    total_s = sum(spent.values())
    rest = sorted((spent_s, name) for name, spent_s in spent.items() if name != TRAIN)[: -PHASES_SHOWN - 1 : -1]
    shares = ", ".join(f"{name} {spent_s / total_s:.1%}" for spent_s, name in rest)
    of = f"{seconds(total_s)} on {number} nodes" if number > 1 else seconds(total_s)
    return f"goodput {story.goodput(now):.1%} of {of}" + (f"; {shares}" if shares else "")


def changes(story: Story) -> str:
    """The number of changes of membership, the longest pause, and the steps that were done again or not saved."""
    chapters, told = story.generations.all, story.lives.nodes
    lost, last = sum(each.redone or 0 for each in chapters), None if story.run.succeeded else story.generations.newest
    # A generation that ended before its first step has lost none, as far as its own nodes have told. The newest one,
    # and one of which no node has told, may have.
    unknown = [each for each in chapters if each is last or told.isdisjoint(each.nodes)]
    trained = [each for each in chapters if not each.waits and (each.first_step is not None or each in unknown)]
    known = steps_made(story) > 0 and all(chapter.redone is not None for chapter in trained[1:] or trained)
    again = f"; {counted(lost, 'step')} done again" if lost else "; no step lost" if known else ""
    open_end = story.run.succeeded or story.lives.alive() or story.nodes_without_events()
    if not open_end and story.steps.newest > story.checkpoints.newest:
        again = f"{again if lost else ''}; {counted(story.steps.newest - story.checkpoints.newest, 'step')} not saved"
    pauses = [chapter.pause_s for chapter in chapters if chapter.pause_s is not None]
    longest_s = f", the longest pause {max(pauses):.2f} s" if pauses else ""
    return f"{counted(max(0, len(chapters) - 1), 'change')} of membership{longest_s}{again}"


def as_object(story: Story, now: float | None = None) -> dict[str, Any]:
    """The report for programs, as JSON values."""
    result, stand, missed = story.run.result, story.standstill, story.checkpoints.unsaved
    chapters = [{**chapter.told(), "reported": sorted(chapter.reported)} for chapter in story.generations.all]
    return {
        "run_id": story.run.run_id,
        "run_dir": story.run.run_dir,
        "state": state(story, now),
        "result": None if result is None else vars(result),
        "begin": story.begin,
        "last": story.last,
        "nodes_alive": list(story.lives.alive()),
        "standing": None if stand is None else {"since": stand.since, **vars(stand.culprit)},
        "slow": None if story.straggler is None else vars(story.straggler),
        "without_etcd": story.lives.times_without_etcd(now),
        "step": story.steps.newest,
        "epoch": story.steps.epoch,
        "scalars": dict(story.steps.scalars),
        "checkpoint": story.checkpoints.newest,
        "unsaved": None if missed is None else vars(missed),
        "goodput": story.goodput(now),
        "seconds": story.spent(now),
        "seconds_by_node": {node: totals(spans) for node, spans in story.spans_by_node(now).items()},
        "generations": chapters,
        "failures": [vars(failure) for failure in story.failures.all],
    }


# Tables.


def columns(story: Story, now: float | None = None) -> dict[str, dict[str, float]]:
    """Seconds by bucket, for all nodes together and, if there are few nodes, for each."""
    nodes = {node: totals(spans) for node, spans in sorted(story.spans_by_node(now).items())}
    return {"all nodes": story.spent(now), **(nodes if len(nodes) <= NODES_SHOWN else {})}


def time_table(story: Story, now: float | None = None) -> list[str]:
    """Where the time went: seconds and shares by bucket."""
    found = columns(story, now)
    names = [name for name in BUCKETS if any(name in spent for spent in found.values())]
    rows = [("where the time went", *found)]
    sums = {column: sum(spent.values()) for column, spent in found.items()}
    for name in names:
        rows.append((name, *(share(spent.get(name, 0.0), sums[column]) for column, spent in found.items())))
    rows.append(("total", *(share(total_s, total_s) for total_s in sums.values())))
    return table(rows)


def share(spent_s: float, total_s: float) -> str:
    """`12.1 s  4.20%`, or a dash for nothing."""
    return f"{seconds(spent_s):>8} {spent_s / total_s:>7.2%}" if spent_s and total_s else "-"


def generation_table(story: Story) -> list[str]:
    """A row for each generation, with its cost."""
    rows = [("generation", "cause", "nodes", "world size", "from step", "pause", "steps done again", "longest phases")]
    for chapter in story.generations.all:
        pause = "-" if chapter.pause_s is None else f"{chapter.pause_s:.2f} s"
        counts = (str(len(chapter.nodes)), str(chapter.world_size), f"{chapter.resume_step:,}")
        redone = "-" if chapter.redone is None else f"{chapter.redone:,}"
        cause, *more = textwrap.wrap(chapter.cause, CAUSE_SHOWN) or [""]
        rows.append((str(chapter.number), cause, *counts, pause, redone, longest(chapter)))
        rows += [("", part, "", "", "", "", "", "") for part in more]
    return table(rows)


def longest(chapter: Chapter) -> str:
    """The longest phases of a generation's pause, or of its set-up."""
    ordered = sorted(chapter.phases.items(), key=lambda phase: -phase[1])
    shown = [f"{name} {took_s:.2f} s" for name, took_s in ordered[:PHASES_SHOWN] if took_s >= PHASE_S_MIN]
    return ", ".join(shown)


def failure_lines(story: Story) -> list[str]:
    """The failures by node, the node with most failures first."""
    by_node: dict[str, list[str]] = {}
    for failure in story.failures.all:
        by_node.setdefault(failure.node, []).append(failure.what)
    lines = ["failures by node"] if by_node else []
    for node, what in sorted(by_node.items(), key=lambda item: -len(item[1])):
        kinds = list(dict.fromkeys(what))
        more = f"; and {len(kinds) - FAILURES_SHOWN} more" if len(kinds) > FAILURES_SHOWN else ""
        lines.append(f"  {node or 'not known'}: {len(what)} ({'; '.join(kinds[:FAILURES_SHOWN])}{more})")
    return lines


def happened_lines(story: Story, now: float | None = None) -> list[str]:
    """What happened, with the time of each."""
    happened_at = ((datetime.fromtimestamp(each.at, timezone.utc), each.text) for each in happened(story, now))
    told = [f"{at:%F %T}  {text}" for at, text in happened_at]
    lines = [part for each in told for part in textwrap.wrap(each, LINE_SHOWN, subsequent_indent=" " * DATE_WIDTH)]
    return ["what happened (UTC)", *lines] if lines else []


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows with aligned columns, and a rule below the first row."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]
