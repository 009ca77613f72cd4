"""What is said of a run in sentences, wherever it is said. Pure."""

from __future__ import annotations

import signal

from elasticrt import events
from elasticrt.ipc.wording import counted
from elasticrt.story.fold import Chapter, Story


def size(chapter: Chapter) -> str:
    """`3 nodes, world size 6`."""
    return f"{counted(len(chapter.nodes), 'node')}, world size {chapter.world_size}"


def beginning(chapter: Chapter, *, first: bool) -> str:
    """What a generation is and why it was made; of the `first` of a run, what it is."""
    name = f"generation {chapter.number}: {size(chapter)}"
    if first:
        return name + (f", from step {chapter.resume_step:,}" if chapter.resume_step else "")
    return chapter.cause + (f" at step {chapter.step:,}" if chapter.step else "") + f". {name}"


def cost(chapter: Chapter, since: float) -> str:
    """What it has cost until its first step: a pause and steps, or the time since `since` where there was no pause."""
    assert chapter.stepped_at is not None
    step = chapter.first_step or 0
    if chapter.pause_s is None:
        return f"first step {step:,} after {chapter.stepped_at - since:.2f} s"
    again = f"{counted(chapter.redone, 'step')} done again" if chapter.redone else "no step lost"
    return f"next step {step:,} after {chapter.pause_s:.2f} s; {again}"


def ending(result: events.Result) -> str:
    """`the run failed (code 1): rank 0 on node-1: ValueError`."""
    text = f"the run {result.status}" + ("" if result.status == "succeeded" else f" (code {result.code})")
    return text + (f": {result.reason}" if result.reason else "")


def now_at(story: Story, speed: float | None) -> str:
    """Where a run stands: step, epoch, scalars, `speed` in steps/s, nodes, newest checkpoint."""
    parts = [f"step {story.newest:,}", f"epoch {story.epoch}"]
    parts += [f"{name} {value:.4g}" for name, value in story.scalars.items() if isinstance(value, int | float)]
    parts += [f"{speed:.1f} steps/s"] if speed is not None else []
    if story.chapter is not None:
        parts.append(counted(len(story.chapter.nodes), "node"))
    if story.checkpoint:
        parts.append(f"checkpoint {story.checkpoint:,}")
    return "  ".join(parts)


def code_in_words(code: int) -> str:
    """An exit code in words; negative is a signal."""
    if code >= 0:
        return f"code {code}"
    try:
        return "killed" if code == -signal.SIGKILL else signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
