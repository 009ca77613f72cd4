"""The sentences about a run, for all views. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import groupby
from typing import NamedTuple

from elasticrt import events
from elasticrt.errors import EXIT_CHECKPOINT, EXIT_DUPLICATE, EXIT_TERMINATED
from elasticrt.ipc.wording import counted, how_to_go_on, listed, slow_node
from elasticrt.story.fold import Story
from elasticrt.story.generations import Chapter
from elasticrt.story.lives import ends

STILL_S, STILL_STEPS, STILL_SHARE = 5.0, 4, 0.002
"""A line shows the pace until no step was reported for this many seconds, usual step times and share of the run's time,
whichever is longest. The share is because files keep at least one line of progress in each thousandth of the run."""


_WAITS = {
    "saves its state": "saving the state",
    "waits for new workers": "waiting for new workers",
    "waits for nodes": "waiting for nodes",
}
"""What a generation without a step does (`doing`), in the words of `state`."""


def size(chapter: Chapter) -> str:
    """`3 nodes, world size 6`."""
    return f"{counted(len(chapter.nodes), 'node')}, world size {chapter.world_size}"


def beginning(chapter: Chapter, *, first: bool) -> str:
    """A generation with its cause and size. The `first` one of a run has no cause."""
    name = f"generation {chapter.number}: "
    if first:
        # With a first step, the cost says from where.
        begins = chapter.resume_step > 0 and chapter.stepped_at is None
        return name + size(chapter) + (f", from step {chapter.resume_step:,}" if begins else "")
    if chapter.waits:
        return f"{name}{chapter.cause}, {waiting(chapter)}"
    return f"{name}{chapter.cause}, {size(chapter)}"


def waiting(chapter: Chapter) -> str:
    """`1 node of at least 2: the run waits with the state after step 66`, or that it first saves the state."""
    state = f"the state after step {chapter.step:,}" if chapter.step else "its state"
    if chapter.saves:
        return f"{counted(len(chapter.nodes), 'node')}: saving {state} first"
    return f"{counted(len(chapter.nodes), 'node')} of at least {chapter.needed}: the run waits with {state}"


def cost(chapter: Chapter) -> str:
    """What a generation cost until its first step: its pause and the steps done again, or the time since it began.

    A script without a Loop has no step numbers. Where the last step before the generation is not known, the sentence
    does not claim that no step was lost.
    """
    assert chapter.stepped_at is not None
    took_s = chapter.stepped_at - chapter.begin
    if chapter.first_step is None and chapter.pause_s is None:
        return f"first step after {took_s:.2f} s"
    if chapter.first_step is None:
        return f"paused {chapter.pause_s:.2f} s; what the script had not saved is done again"
    resumed = f"resumed after step {chapter.resume_step:,}"
    if chapter.passed_over:
        resumed += f", as the checkpoint of step {chapter.passed_over:,} could not be used"
    if chapter.pause_s is not None and chapter.redone is None:
        return f"paused {chapter.pause_s:.2f} s, {resumed}"
    again = f"{counted(chapter.redone, 'step')} done again" if chapter.redone else "no step lost"
    if chapter.pause_s is not None:
        return f"paused {chapter.pause_s:.2f} s after step {chapter.step:,}, {again}"
    if not chapter.resume_step and not chapter.redone:
        return f"first step {chapter.first_step:,} after {took_s:.2f} s"
    known = "" if chapter.redone is None else f", {again}"
    return f"{resumed}, first step after {took_s:.2f} s{known}"


def slow(event: events.Straggler) -> str:
    """That a node is slow (see `slow_node`), or that none is slow any more."""
    return slow_node(event.slow, event.own_s, event.others_s) if event.slow else "no node is slow any more"


def unsaved(event: events.Unsaved) -> str:
    """`step 60 could not be saved: No space left on device`."""
    return f"step {event.step:,} could not be saved: {event.reason}"


def saved_again(event: events.Committed) -> str:
    """`step 72 is saved: checkpoints can be saved again`."""
    return f"step {event.step:,} is saved: checkpoints can be saved again"


def etcd_away(story: Story, now: float) -> str:
    """`etcd has not answered for 12 s: no commits, no changes of membership`; "" if etcd answers.

    What a node says that the newest generation has left out says nothing of the run: the node may be cut off.
    """
    lives = story.seated_lives() or story.lives.living()
    away = [life.away_since for life in lives if life.away_since is not None]
    return f"etcd has not answered for {lasted(now - min(away))}: no commits, no changes of membership" if away else ""


def doing(story: Story) -> str:
    """What the nodes of the newest generation do, as words before its number."""
    chapter = story.generations.newest
    if story.waits_since is None:
        return "trains" if story.standstill is None else "stands still"
    if chapter.lacks_nodes:
        return "waits for nodes"
    # Until the state is in a checkpoint, as far as is known.
    return "saves its state" if story.checkpoints.newest < chapter.step else "waits for new workers"


def trouble(story: Story, now: float) -> str:
    """What keeps a running run from its pace or from saving, at `now`; "" if nothing is known."""
    found, missed = story.standstill_sentence(now), story.checkpoints.unsaved
    found = found or (slow(story.straggler) if story.straggler is not None else "")
    return found or (unsaved(missed) if missed is not None else "")


def steps_made(story: Story) -> int:
    """How many steps the run has advanced from its first resume point.

    After a failure the run may have gone back behind some of them.

    `Step` events come at most four times a second, so the last step may be known only by its commit. A run that starts
    at its end commits what it has found, and makes no step.
    """
    if story.steps.first_at is None:
        return 0
    chapters = story.generations.all
    stepped = [chapter for chapter in chapters if chapter.first_step is not None] or chapters
    return max(0, max(story.steps.newest, story.checkpoints.newest) - (stepped[0].resume_step if stepped else 0))


def state(story: Story, now: float | None = None) -> str:
    """How the run ended, or its state now. `now` is what `Story.now_if_running` returns."""
    result, chapter = story.run.result, story.generations.newest
    if result is not None:
        return f"{result.status}: {result.reason}" if result.reason else result.status
    if now is not None:
        return "; ".join(filter(None, (_state_now(story, now), etcd_away(story, now))))
    if story.lives.alive():
        last = datetime.fromtimestamp(story.last, timezone.utc)
        return f"no event since {last:%Y-%m-%d %H:%M:%S} UTC, and no end was recorded"
    newest = story.lives.newest
    how = ends(newest.values())
    if others := story.nodes_without_events():
        return f"no agent of this directory is left ({how}); it has no events of {listed(others)}"
    first = newest.get(chapter.nodes[0]) if chapter.nodes else None
    # The node of rank 0 saves for all. If its agent ended with this code after some steps, the run was stopped in
    # order, and only its last checkpoint failed.
    unsaved = first is not None and first.code == EXIT_CHECKPOINT and steps_made(story) > 0
    # The last generation decides: nodes of earlier ones may have left long before its agents were killed.
    last_ones = [newest[life.node] for life in story.lives.seated(chapter)]
    left = {
        life.code for life in last_ones or newest.values() if life.gone_at is None and not (unsaved and life is first)
    }
    if left == {EXIT_TERMINATED} or (unsaved and not left):
        failed = "the last checkpoint could not be saved; " if unsaved else ""
        return f"stopped; {failed}{to_go_on(story)}"
    if not story.lives.all:
        return "no node has joined it"
    return f"ended without a result ({how}); {to_go_on(story)}"


def to_go_on(story: Story) -> str:
    """How to go on with a run that has ended before its script did; "" if it need not or cannot go on.

    A checkpoint that can't be used can't be used again either, nor a directory that another run saves to. Then the
    failure's own text has the remedy.
    """
    run, saved = story.run, story.checkpoints.newest
    if run.succeeded or (run.result is not None and run.result.code in (EXIT_CHECKPOINT, EXIT_DUPLICATE)):
        return ""
    return how_to_go_on(run.run_id, f"step {saved:,} is saved" if saved else "")


def _state_now(story: Story, now: float) -> str:
    """What the nodes of a running run do at `now`."""
    chapter, here, needed = story.generations.newest, len(story.lives.alive()), story.run.min_nodes
    if story.waits_since is not None:
        text = f"{_WAITS[doing(story)]} for {seconds(now - story.waits_since)}, after step {chapter.step:,}"
        return f"{text}: {len(chapter.nodes)} of at least {needed} here" if chapter.lacks_nodes else text
    # Before the first generation, or after all nodes of the last one have ended.
    if not story.seated_lives():
        return f"waiting for nodes: {here} of at least {needed} here" if here < needed else "starting"
    return story.standstill_sentence(now) or "running"


def ending(result: events.Result) -> str:
    """`the run failed (code 1): rank 0 on node-1: ValueError`."""
    text = f"the run {result.status}" + ("" if result.status == "succeeded" else f" (code {result.code})")
    return text + (f": {result.reason}" if result.reason else "")


class Happened(NamedTuple):
    """Something that happened."""

    at: float  # In seconds since 1970.
    kind: str  # "good", "bad", or "" for neither.
    text: str  # A sentence.


def happened(story: Story, now: float | None = None) -> list[Happened]:
    """What happened in a run, in the order of time. `now` is the present, for a run that goes on."""
    found, result = list[Happened](), story.run.result
    for each in story.failures.all:
        # A hang with a known node is a standstill, and told as that below.
        if not (each.hang and each.node):
            found.append(Happened(each.at, "bad", each.what if each.node in each.what else f"{each.node}: {each.what}"))
    for stand in story.explained_standstills(now):
        found.append(Happened(stand.since, "bad", stand.sentence(stand.until, numbered=story.has_step_numbers)))
    for at, event in story.failures.straggler_findings:
        found.append(Happened(at, "bad" if event.slow else "good", slow(event)))
    found += _missed(story)
    for begin, end, how in story.lives.breaks:
        found.append(Happened(begin, "bad", f"all agents had ended ({how}): none ran for {seconds(end - begin)}"))
    for begin, end in story.lives.times_without_etcd(story.last if now is None else now):
        found.append(Happened(begin, "bad", f"etcd did not answer for {seconds(end - begin)}"))
    for place, chapter in enumerate(story.generations.all):
        found.append(Happened(chapter.begin, "", beginning(chapter, first=place == 0)))
        if chapter.stepped_at is not None:
            found.append(Happened(chapter.stepped_at, "good", cost(chapter)))
    if result is not None:
        found.append(Happened(story.run.ended_at, "good" if result.code == 0 else "bad", ending(result)))
    elif story.lives.all and not story.lives.alive():
        found.append(Happened(story.last, "", state(story)))
    return sorted(found, key=lambda each: each.at)


def _missed(story: Story) -> Iterator[Happened]:
    """The checkpoints that could not be saved. Consecutive ones share one sentence, with the reason of the first."""
    for _, group in groupby(story.checkpoints.outcomes, lambda each: type(each[1])):
        (at, first), *more = group
        if isinstance(first, events.Committed):
            yield Happened(at, "good", saved_again(first))
        else:
            yield Happened(at, "bad", unsaved(first) + (f", nor any up to step {more[-1][1].step:,}" if more else ""))


def pace(story: Story, now: float) -> str:
    """`12.3 steps/s`, lately, or `no step for 9 s`; "" if not known, or if the line has another sentence about it."""
    still_s, speed = now - story.steps.last_at, story.generations.newest.speed
    usual_s = 1 / speed if speed else 0.0
    if story.standstill is not None or story.steps.first_at is None:
        return ""
    if still_s > max(STILL_S, STILL_STEPS * usual_s, STILL_SHARE * (now - story.begin)):
        return f"no step for {lasted(still_s)}"
    return f"{speed:.1f} steps/s" if speed is not None else ""


def now_at(story: Story, now: float, goodput: float | None = None, *, step: int | None = None) -> str:
    """The state of a run at `now`, in one line that is shown while it changes.

    `goodput` is from 0 to 1; None: not shown. If the story lacks events of other nodes, the line says "here". `step` is
    the newest one; None: the story's.
    """
    chapter, step, parts = story.generations.newest, story.steps.newest if step is None else step, []
    if story.generations.all:
        least, most = story.run.min_nodes, story.run.max_nodes
        room = f" ({least} to {most})" if least != most else ""
        parts.append(f"generation {chapter.number}  {counted(len(chapter.nodes), 'node')}{room}")
    if story.standstill is not None:
        parts.append(story.standstill_sentence(now))
    elif step:
        parts += filter(None, (f"step {step:,}", pace(story, now), f"epoch {story.steps.epoch}"))
    parts += [f"{name} {value:.4g}" for name, value in story.steps.scalars.items() if isinstance(value, int | float)]
    if (saved_at := story.checkpoints.newest_at) is not None:
        parts.append(f"checkpoint {story.checkpoints.newest:,} ({lasted(now - saved_at)} ago)")
    if goodput is not None:
        parts.append(f"goodput {goodput:.0%}" + (" here" if story.nodes_without_events() else ""))
    return "  ".join(parts)


def seconds(value_s: float) -> str:
    """A duration for people: `0.07 s`, `41.2 s`, `1 h 04 min`."""
    if value_s < 1:
        return f"{value_s:.2f} s"
    if value_s < 1000:
        return f"{value_s:.1f} s"
    minutes = round(value_s / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


def lasted(value_s: float) -> str:
    """A duration in whole seconds, for a line that changes: `9 s`, `4 min 05 s`, `2 h 10 min`."""
    whole = max(0, round(value_s))
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60:02} s" if whole < 7200 else f"{whole // 3600} h {whole // 60 % 60:02} min"
