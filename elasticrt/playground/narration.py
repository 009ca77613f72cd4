"""What a simulation tells: a fold from the agents' events to lines. Pure.

`tell` takes the story so far and one event and gives the story after it and the lines to print; `tick` does the same
for the time that passes. A change of membership is told in one line, when its cost is known: the agents' first steps
of a generation arrive within milliseconds of each other, and the line waits for them. Scripts without a `Loop` have
no steps to report; their line comes without a cost.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elasticrt.errors import EXIT_TERMINATED, EXIT_WORKERS
from elasticrt.ipc.wording import counted

OFFER_AFTER_STEPS = 30
STATUS_EVERY_S = 5.0
COST_COMPLETE_S = 1.0  # How long a line waits for the other members' first steps.
COST_NONE_S = 3.0  # How long it waits for any first step.


@dataclass(frozen=True)
class Line:
    """One line to print; `node` is whose words these are, "" for the simulation's own."""

    text: str
    node: str = ""


@dataclass(frozen=True)
class Chapter:
    """One generation as it was told.

    `cause` is the leader's; `first_step` is None until a member has reported one; `pause_s` and `redone` are the
    largest that members reported.
    """

    number: int
    nodes: tuple[str, ...]
    world_size: int
    cause: str
    resume_step: int
    at: float
    step_before: int
    reported: frozenset[str] = frozenset()
    reported_at: float = 0.0
    first_step: int | None = None
    pause_s: float | None = None
    redone: int = 0
    announced: bool = False
    costed: bool = False


@dataclass(frozen=True)
class Narration:
    """Everything known so far.

    `pids` are agents by node; `ended` are agents' exit codes by node (negative: signal); `workers` are, by node, the
    generation and the workers' pids by rank. `step` is the highest, `newest` the one reported last (lower while steps
    are done again).
    """

    started_at: float
    nodes: int
    min_nodes: int
    pids: Mapping[str, int] = field(default_factory=dict)
    ended: Mapping[str, int] = field(default_factory=dict)
    workers: Mapping[str, tuple[int, Mapping[int, int]]] = field(default_factory=dict)
    chapters: tuple[Chapter, ...] = ()
    step: int = 0
    newest: int = 0
    epoch: int = 0
    scalars: Mapping[str, float] = field(default_factory=dict)
    committed: int = 0
    first_step_at: float | None = None
    last_step_at: float = 0.0
    status_at: float = 0.0
    status_step: int = 0
    offered: int = 0
    result: Mapping[str, Any] | None = None

    @property
    def chapter(self) -> Chapter | None:
        """The newest generation."""
        return self.chapters[-1] if self.chapters else None

    def alive(self) -> tuple[str, ...]:
        """Nodes whose agent runs."""
        return tuple(node for node in self.pids if node not in self.ended)

    def worker(self, rank: int) -> int | None:
        """The pid of a worker of the newest generation, None when there is none of that rank."""
        for generation, pids in self.workers.values():
            if self.chapter is not None and generation == self.chapter.number and rank in pids:
                return pids[rank]
        return None


Told = tuple[Narration, tuple[Line, ...]]


def tell(story: Narration, event: Mapping[str, Any]) -> Told:
    """Fold one event into the story: one line of an agent's event log, or a `fault` or `agent_exited` of our own."""
    node, at = event["node"], event["at"]
    match event["event"]:
        case "agent_started":
            return _agent_started(story, event)
        case "generation":
            return _generation(story, event)
        case "workers_started":
            pids = dict(zip(event["ranks"], event["pids"], strict=False))
            return replace(story, workers={**story.workers, node: (event["generation"], pids)}), ()
        case "first_step":
            return _first_step(story, event)
        case "step":
            story = replace(story, epoch=event["epoch"], scalars=event["scalars"])
            return _offer(_stepped(story, event["step"], at))
        case "failure":
            return story, tuple(Line(text) for text in event["text"].splitlines())
        case "committed":
            return replace(story, committed=max(story.committed, event["step"])), ()
        case "result":
            return _result(story, event)
        case "agent_exited":
            return _agent_exited(story, event)
        case "fault":
            return story, (Line(f"!! {event['text']}  ({event['done']})"),)
    return story, ()  # What is known and says nothing that is worth a line.


def tick(story: Narration, now: float) -> Told:
    """What is to be said because time has passed: a cost that is complete enough, and the status line."""
    lines: tuple[Line, ...] = ()
    chapter = story.chapter
    if chapter is not None and not chapter.costed:
        complete = chapter.reported and now - chapter.reported_at >= COST_COMPLETE_S
        overdue = not chapter.reported and not chapter.announced and now - chapter.at >= COST_NONE_S
        if complete or overdue:
            story, lines = _announce(story)
    if now - max(story.status_at, story.started_at) >= STATUS_EVERY_S:
        lines += (Line(_status(story, now)),)
        story = replace(story, status_at=now, status_step=story.newest)
    return story, lines


def verdict(story: Narration) -> tuple[int, str]:
    """The exit code of the whole and one sentence. 0 only when agents survived and all of them ended with 0.

    Agents ended by a signal, or by the SIGTERM of a drain (143), are what the run had to survive.
    """
    survivors = {n: c for n, c in story.ended.items() if c >= 0 and c != EXIT_TERMINATED}
    bad = {node: code for node, code in survivors.items() if code != 0}
    if story.result is not None and story.result["status"] != "succeeded":
        code = story.result["code"] or next(iter(bad.values()), EXIT_WORKERS)
        return code, f"the run failed (code {code}): {story.result['reason']}"
    if bad:
        node, code = next(iter(bad.items()))
        return code, f"the agent of {node} ended with code {code}"
    if not survivors:
        drained = bool(story.ended) and all(code == EXIT_TERMINATED for code in story.ended.values())
        return (EXIT_TERMINATED if drained else EXIT_WORKERS), "no agent survived: the run did not end, it stopped"
    return 0, "the run succeeded"


def summary(story: Narration, now: float, stopped_by: str = "") -> tuple[Line, ...]:
    """The table of generations, then time and speed, then the verdict, or that the simulation was stopped."""
    rows = [("generation", "cause", "nodes", "world size", "from step", "pause", "steps done again")]
    for chapter in story.chapters:
        first = chapter.number == story.chapters[0].number
        pause = "-" if first or chapter.pause_s is None else f"{chapter.pause_s:.2f} s"
        counts = (str(len(chapter.nodes)), str(chapter.world_size), f"{chapter.resume_step:,}")
        rows.append((str(chapter.number), chapter.cause, *counts, pause, f"{chapter.redone:,}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "-" * max(map(len, lines)))
    # Steps are reported ten times a second, the last one by its commit. The first resume point is where we began.
    steps = max(story.step, story.committed) - (story.chapters[0].resume_step if story.chapters else 0)
    times = f"wall time {now - story.started_at:.1f} s, {counted(steps, 'step')}"
    if story.first_step_at is not None and story.last_step_at > story.first_step_at:
        times += f", {(steps - 1) / (story.last_step_at - story.first_step_at):.1f} steps/s"
    end = f"stopped by {stopped_by}" if stopped_by else verdict(story)[1]
    return (Line(""), *map(Line, lines), Line(""), Line(f"{times}. {end}"))


def describe_code(code: int) -> str:
    """An exit code in words; negative is a signal."""
    if code >= 0:
        return f"code {code}"
    try:
        return "killed" if code == -signal.SIGKILL else signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _agent_started(story: Narration, event: Mapping[str, Any]) -> Told:
    ended = {node: code for node, code in story.ended.items() if node != event["node"]}
    first = not story.pids
    story = replace(story, pids={**story.pids, event["node"]: event["pid"]}, ended=ended)
    text = f"-- run {event['run_id']}, etcd {event['etcd']}, logs in {event['run_dir']}"
    return story, (Line(text),) if first else ()


def _agent_exited(story: Narration, event: Mapping[str, Any]) -> Told:
    node, code = event["node"], event["code"]
    story = replace(story, ended={**story.ended, node: code})
    quiet = code in (0, EXIT_TERMINATED) or (code < 0 and story.chapter is not None)
    # A killed agent is told with the generation that follows from it, an orderly end with the result.
    return story, () if quiet else (Line(f"-- the agent of {node} ended ({describe_code(code)})"),)


def _generation(story: Narration, event: Mapping[str, Any]) -> Told:
    before = story.chapter
    if before is not None and event["number"] <= before.number:
        return story, ()  # Every member says so; the first is enough, and a paused one says it late.
    lines: tuple[Line, ...] = ()
    if before is not None and not before.costed and (before.reported or not before.announced):
        story, lines = _announce(story)
    chapter = Chapter(
        number=event["number"],
        nodes=tuple(event["nodes"]),
        world_size=event["world_size"],
        cause=event["cause"],
        resume_step=event["resume_step"],
        at=event["at"],
        step_before=story.step,
    )
    return replace(story, chapters=(*story.chapters, chapter)), lines


def _first_step(story: Narration, event: Mapping[str, Any]) -> Told:
    chapter = story.chapter
    if chapter is None or event["generation"] != chapter.number:
        return story, ()  # A member that was slow to say so; the generation it speaks of is over.
    pauses = [pause for pause in (chapter.pause_s, event["pause_s"]) if pause is not None]
    chapter = replace(
        chapter,
        reported=chapter.reported | {event["node"]},
        reported_at=chapter.reported_at if chapter.reported else event["at"],
        first_step=event["step"],
        resume_step=event["resumed_from"],
        pause_s=max(pauses, default=None),
        redone=max(chapter.redone, event["redone"] or 0),
    )
    story = replace(story, chapters=(*story.chapters[:-1], chapter))
    story = _stepped(story, event["step"], event["at"])
    lines: tuple[Line, ...] = ()
    if not chapter.costed and chapter.reported >= set(chapter.nodes):
        story, lines = _announce(story)
    return story, lines


def _stepped(story: Narration, step: int, at: float) -> Narration:
    if story.first_step_at is None:
        return replace(story, step=step, newest=step, status_step=step, first_step_at=at, last_step_at=at)
    return replace(story, step=max(story.step, step), newest=step, last_step_at=max(at, story.last_step_at))


def _offer(story: Narration) -> Told:
    """Offer the kill, once for each membership, where the run would survive it."""
    chapter = story.chapter
    if chapter is None or story.offered == chapter.number or story.step - chapter.resume_step < OFFER_AFTER_STEPS:
        return story, ()
    node = chapter.nodes[-1]
    story = replace(story, offered=chapter.number)
    if len(chapter.nodes) <= story.min_nodes or node not in story.alive():
        return story, ()
    return story, (Line(f"try: kill -9 {story.pids[node]} ({node} and its workers)"),)


def _result(story: Narration, event: Mapping[str, Any]) -> Told:
    if story.result is not None:
        return story, ()
    good = event["status"] == "succeeded"
    text = f"-- the run {event['status']}" + ("" if good else f" (code {event['code']})")
    text += f": {event['reason']}" if event["reason"] else ""
    return replace(story, result=event), (Line(text),)


def _announce(story: Narration) -> Told:
    """The line of the newest generation, with its cost if that is known, or the cost alone if it comes late."""
    chapter, first = story.chapters[-1], len(story.chapters) == 1
    name = f"generation {chapter.number}"
    size = f"{counted(len(chapter.nodes), 'node')}, world size {chapter.world_size}"
    if chapter.announced:
        sentences = [name]
    elif first:
        sentences = [f"{name}: {size}" + (f", from step {chapter.resume_step:,}" if chapter.resume_step else "")]
    else:
        # The members know at which step they stood; without them, the newest step seen is close.
        step = chapter.resume_step + chapter.redone if chapter.pause_s is not None else chapter.step_before
        sentences = [chapter.cause + (f" at step {step:,}" if step else ""), f"{name}: {size}"]
    if chapter.reported:
        sentences.append(_cost(story, chapter, first=first))
    chapter = replace(chapter, announced=True, costed=bool(chapter.reported))
    return replace(story, chapters=(*story.chapters[:-1], chapter)), (Line("-- " + ". ".join(sentences)),)


def _cost(story: Narration, chapter: Chapter, *, first: bool) -> str:
    if chapter.pause_s is None:
        after = f"{chapter.reported_at - (story.started_at if first else chapter.at):.2f} s"
        return f"first step {chapter.first_step:,} after {after}"
    again = f"{counted(chapter.redone, 'step')} done again" if chapter.redone else "no step lost"
    return f"next step {chapter.first_step:,} after {chapter.pause_s:.2f} s; {again}"


def _status(story: Narration, now: float) -> str:
    chapter = story.chapter
    if story.first_step_at is None:
        waiting = f"generation {chapter.number}, no step yet" if chapter else "no generation yet"
        return f".. {now - story.started_at:.0f} s: {counted(len(story.alive()), 'agent')}, {waiting}"
    since = max(story.status_at, story.first_step_at)
    speed = max(0, story.newest - story.status_step) / (now - since) if now > since else 0.0
    parts = [f"step {story.newest:,}", f"epoch {story.epoch}"]
    parts += [f"{name} {value:.4g}" for name, value in story.scalars.items() if isinstance(value, int | float)]
    parts.append(f"{speed:.1f} steps/s")
    if chapter is not None:
        parts.append(counted(len(chapter.nodes), "node"))
    if story.committed:
        parts.append(f"checkpoint {story.committed:,}")
    return ".. " + "  ".join(parts)
