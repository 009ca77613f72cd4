"""The sentences about a run, for all views. Pure."""

from __future__ import annotations

import signal

from elasticrt import events
from elasticrt.ipc.wording import counted, slow_node
from elasticrt.story.fold import Chapter, Story, no_step


def size(chapter: Chapter) -> str:
    """`3 nodes, world size 6`."""
    return f"{counted(len(chapter.nodes), 'node')}, world size {chapter.world_size}"


def beginning(chapter: Chapter, *, first: bool) -> str:
    """A generation with its cause and size; the `first` one of a run without a cause."""
    name = f"generation {chapter.number}: "
    if first:
        begins = chapter.resume_step > 0 and chapter.stepped_at is None  # Otherwise the cost says so.
        return name + size(chapter) + (f", from step {chapter.resume_step:,}" if begins else "")
    if chapter.waits:
        return f"{name}{chapter.cause}, {waiting(chapter)}"
    return f"{name}{chapter.cause}, {size(chapter)}"


def waiting(chapter: Chapter) -> str:
    """`1 node of at least 2: the run waits with the state after step 66`. With enough nodes it only saves that."""
    state = f"the state after step {chapter.step:,}" if chapter.step else "its state"
    if len(chapter.nodes) >= chapter.needed:
        then = " first" if chapter.kind == "drain" else ", and ends"
        return f"{counted(len(chapter.nodes), 'node')}: the run saves {state}{then}"
    return f"{counted(len(chapter.nodes), 'node')} of at least {chapter.needed}: the run waits with {state}"


def cost(chapter: Chapter, since: float) -> str:
    """The cost of a generation until its first step: its pause and steps done again, or the time since `since`.

    The numbers of steps are not known for a script without a Loop. What was lost is not claimed where the last step
    before the generation is not known.
    """
    assert chapter.stepped_at is not None
    took_s = chapter.stepped_at - since
    if chapter.first_step is None and chapter.pause_s is None:
        return f"first step after {took_s:.2f} s"
    if chapter.first_step is None:
        return f"paused {chapter.pause_s:.2f} s; what the script had not saved is done again"
    resumed = f"resumed after step {chapter.resume_step:,}"
    if chapter.pause_s is not None and chapter.redone is None:
        return f"paused {chapter.pause_s:.2f} s, {resumed}"
    again = f"{counted(chapter.redone, 'step')} done again" if chapter.redone else "no step lost"
    if chapter.pause_s is not None:
        return f"paused {chapter.pause_s:.2f} s after step {chapter.step:,}, {again}"
    if not chapter.resume_step and not chapter.redone:
        return f"first step {chapter.first_step:,} after {took_s:.2f} s"
    known = "" if chapter.redone is None else f", {again}"
    return f"{resumed}, first step after {took_s:.2f} s{known}"


def standing(event: events.Culprit) -> str:
    """`no step for 3 s after step 58: rank 1 on node-1 sleeps`."""
    return no_step(event, event.age_s)


def slow(event: events.Straggler) -> str:
    """See `slow_node`."""
    return slow_node(event.slow, event.own_s, event.others_s)


def unsaved(event: events.Unsaved) -> str:
    """`step 60 could not be saved: No space left on device`."""
    return f"step {event.step:,} could not be saved: {event.reason}"


def etcd_away(story: Story, now: float) -> str:
    """`etcd has not answered for 12 s: nothing is committed or agreed`; "" where it answers."""
    since = story.away_since()
    return "" if since is None else f"etcd has not answered for {lasted(now - since)}: nothing is committed or agreed"


def doing(story: Story) -> str:
    """What the nodes of the newest generation do, in words before its number."""
    if story.waits_since is not None:
        return "waits for nodes"
    return "trains" if story.stand is None else "stands still"


def trouble(story: Story, now: float) -> str:
    """What keeps a run that goes on from its pace, or from being saved, at `now`; "" where nothing is known to."""
    found = story.standing(now) or (slow(story.slow) if story.slow is not None else "")
    return found or (unsaved(story.unsaved) if story.unsaved is not None else "")


def ending(result: events.Result) -> str:
    """`the run failed (code 1): rank 0 on node-1: ValueError`."""
    text = f"the run {result.status}" + ("" if result.status == "succeeded" else f" (code {result.code})")
    return text + (f": {result.reason}" if result.reason else "")


def now_at(
    story: Story, now: float, speed: float | None, goodput: float | None = None, *, step: int | None = None
) -> str:
    """The state of a run at `now`, in a line that is shown while it changes.

    Args:
        story: of the run.
        now: in seconds since 1970.
        speed: steps per second; None: not known.
        goodput: from 0 to 1; None: not shown. If the story is that of one of several nodes, it says "here".
        step: the newest one; None: the story's.
    """
    chapter, step, parts = story.chapter, story.newest if step is None else step, []
    if chapter is not None:
        least, most = story.min_nodes, story.max_nodes
        room = f" ({least} to {most})" if least != most else ""
        parts.append(f"generation {chapter.number}  {counted(len(chapter.nodes), 'node')}{room}")
    if story.stand is not None:
        parts.append(story.standing(now))
    elif step:
        pace = f"{speed:.1f} steps/s" if speed else f"no step for {lasted(now - story.last_step_at)}"
        parts += [f"step {step:,}", *([pace] if speed is not None else []), f"epoch {story.epoch}"]
    parts += [f"{name} {value:.4g}" for name, value in story.scalars.items() if isinstance(value, int | float)]
    if story.checkpoint_at is not None:
        parts.append(f"checkpoint {story.checkpoint:,} ({lasted(now - story.checkpoint_at)} ago)")
    if goodput is not None:
        whole = chapter is None or {life.node for life in story.lives}.issuperset(chapter.nodes)
        parts.append(f"goodput {goodput:.0%}" + ("" if whole else " here"))
    return "  ".join(parts)


def lasted(seconds: float) -> str:
    """A time in whole seconds, for a line that changes: `9 s`, `4 min 05 s`, `2 h 10 min`."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60:02} s" if whole < 7200 else f"{whole // 3600} h {whole // 60 % 60:02} min"


def code_in_words(code: int) -> str:
    """An exit code in words; negative is a signal."""
    if code >= 0:
        return f"code {code}"
    try:
        return "killed" if code == -signal.SIGKILL else signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
