"""The story of a run: one fold over the events of all its agents. Pure.

The terminal, `simulate`, `status`, `report` and the dashboard are views of a `Story`, so they cannot disagree. Nothing
here reads a clock: what depends on the present takes `now`. Events may be late, missing or repeated, because files are
read while agents write them, and agents may be frozen or killed; so a later event can correct what was folded before.

Times are seconds since 1970, as `elasticrt.story.clocks` computes them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TypeVar

from elasticrt import events
from elasticrt.ipc.failure import NOT_LET_GO
from elasticrt.story.buckets import (
    AGREE,
    LATE_S,
    STANDSTILLS_KEPT,
    TRAIN,
    WAITING,
    GenerationCourse,
    LifeSpans,
    Span,
    Standstill,
    together,
    totals,
)
from elasticrt.story.clocks import Clocks

POINTS_MAX = 4000
"""How many points the curves of steps and scalars keep."""

WORK_MAX = 400
"""How many values are kept of each rank's own work, and how many checkpoints."""

SILENT_S, SILENT_SHARE = 60.0, 0.01
"""A run counts as ended when its agents have written nothing for this many seconds, or for this share of its time so
far, whichever is longer."""

SILENT = "(no answer"
"""The evidence against a node that was taken out because it did not answer contains these words."""

Value = TypeVar("Value")

_FINISHED = (
    events.FirstStep | events.Step | events.Progress | events.Committed | events.Copied | events.WorkerEnded
    | events.Stalled | events.Culprit
)  # fmt: skip
"""Events whose `step` was finished in their `generation`."""


class Series(list[Value]):
    """Values in the order of time, evenly thinned out to at most `most`, with the newest always among them.

    Args:
        most: how many values are kept; an even number.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most, self._every, self._count = most, 1, 0

    def add(self, value: Value) -> None:
        """Add the next value. Of each `_every` values in a row the last one is kept."""
        if self._count % self._every:
            self[-1] = value
        else:
            self.append(value)
        self._count += 1
        # When the list is full, drop every second value and keep half as many of those that follow. The newest stays.
        if len(self) > self._most:
            del self[:-1:2]
            self._every *= 2


@dataclass
class Gap:
    """A time in which a node's events could not be written to its file."""

    node: str
    begin: float
    reason: str  # The error of the file system.
    # When the file took events again; None: it has not yet.
    end: float | None = None
    # How many events of this time are in no file.
    missing: int = 0


@dataclass
class AgentLife:
    """One agent, from its start to its end."""

    node: str
    pid: int  # The agent's process id; 0: unknown, because the first lines of its file are damaged.
    begin: float  # When it started.
    # The same by its machine's monotonic clock. Event times of one machine are compared with it.
    started_at: float
    last: float  # The time of its last event.
    spans: LifeSpans  # How the node's time was spent.
    code: int | None = None  # The agent's exit code; None while it runs, and after it was killed.
    # When the leader took the node out, if the node has written nothing since. Where no node was left to notice, the
    # time of its last event. None: not known to be gone.
    gone_at: float | None = None
    is_leaving: bool = False  # Whether the agent has said that it leaves the run.
    loss: RunFailure | None = None  # The failure as which the node was taken out; None: it was not.
    result_at: float = math.inf  # When the agent told the run's result.
    # Since when etcd has not answered the agent; None while it answers.
    away_since: float | None = None
    gap: Gap | None = None  # The present gap in its event file; None while events are written.


@dataclass
class Chapter:
    """One generation, as the run's story tells it."""

    # Up to `restarts`, and `waits`: as the leader published them. The cause also names nodes that joined on this
    # occasion.
    number: int
    cause: str
    kind: str
    world_size: int
    nodes: tuple[str, ...]
    in_place: bool
    restarts: int
    begin: float  # When its first node began it.
    # The step that it resumes after, at first as published, then as the workers agreed.
    resume_step: int
    # The last step before this generation that any node's events tell of.
    step_before: int
    # The nodes of the generation before; None if that one has no events.
    follows: tuple[str, ...] | None
    waits: bool = False
    # The run's minimum of nodes when it was published.
    needed: int = 1
    # The highest step finished in it that any node's events tell of; 0: none.
    reached: int = 0
    end: float | None = None  # When the next one began; None for the newest.
    reported: dict[str, float] = field(default_factory=dict)  # By node: when it reported its first step.
    stepped_at: float | None = None  # When a first step was first reported; None before.
    # The number of that step; None before, and for a script without a Loop.
    first_step: int | None = None
    # The later step that was published as resume point, if its checkpoint could not be used; 0: it could.
    passed_over: int = 0
    # The longest pause of a node; None if no node has made steps both before and in it.
    pause_s: float | None = None
    # How many steps that were finished before are done again; None: not known, because the last step before is not.
    redone: int | None = None
    # Seconds by phase, for the node with the longest pause, or with the longest set-up if there was no pause. Events
    # count a wait for nodes as part of the phase "agree"; here it is a phase of its own, named as the bucket.
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def saves(self) -> bool:
        """Whether it only saves the state: it has enough nodes, makes no step, and the next generation follows."""
        return self.waits and len(self.nodes) >= self.needed

    @property
    def step(self) -> int:
        """The step after which the run stood when this generation began.

        That is what its nodes' reports say; before these, the newest step known from earlier generations.
        """
        return self.resume_step + self.redone if self.redone is not None else self.step_before

    def stepped(self, node: str, at: float) -> None:
        """Note that `node` reported its first step `at` this time."""
        self.reported.setdefault(node, at)
        self.stepped_at = at if self.stepped_at is None else self.stepped_at


@dataclass(frozen=True)
class RunFailure:
    """A failure."""

    at: float  # When.
    node: str  # The node where it was; "": not known.
    what: str  # A description, for people.
    generation: int  # The generation in which it was.
    # Whether steps stood still. All nodes report such a failure, and it is counted once.
    hang: bool = False


@dataclass(frozen=True)
class ExplainedStandstill:
    """A standstill whose reason is known: which ranks or nodes the others wait for."""

    since: float  # When the last step was made.
    culprit: events.Culprit  # The newest finding.
    # Whether `culprit.step` counts over the whole run. Else it is the number of optimizer steps of the present
    # processes, and is not shown.
    has_step_numbers: bool = True
    # The node that does not hear the others, if the finding is one-sided: this node may be the one that is cut off. ""
    # otherwise.
    by: str = ""

    def sentence(self, now: float) -> str:
        """The sentence about it at `now`: `no step for 3 s after step 58: rank 1 on node-1 sleeps`."""
        after = f" after step {self.culprit.step:,}" if self.has_step_numbers else ""
        seen = f", as {self.by} sees it" if self.by else ""
        return f"no step for {now - self.since:.0f} s{after}{seen}: {self.culprit.reason}"


class Story:
    """What is known of a run.

    `fold` takes the events of all its agents, best in the order of `clocks.when`. The attributes are what the events so
    far say; views only read them.

    Args:
        clocks: computes when events happened. None: the machines' wall clocks are taken to agree.
    """

    def __init__(self, clocks: Clocks | None = None) -> None:
        self.clocks = clocks or Clocks({})
        # `run_id` and `run_dir` are from the first agent that started, `etcd` (an address) is from the newest; ""
        # before.
        self.run_id = self.run_dir = self.etcd = ""
        self.min_nodes = self.max_nodes = 1  # The limits of the run.
        self.lives: list[AgentLife] = []  # All agents, in the order of their starts.
        self.chapters: list[Chapter] = []  # The generations, in order.
        # By node: the newest generation with workers there, and their pids by rank.
        self.workers: dict[str, tuple[int, dict[int, int]]] = {}
        # The highest step so far, and the latest one. The latest is lower while steps are done again.
        self.step = self.newest = 0
        self.first_step_at: float | None = None  # When the run's first step was made, by its report.
        self.last_step_at = 0.0  # When the latest step was made, by its report.
        # The epoch and the scalars (`loop.report`) of the latest step.
        self.epoch = 0
        self.scalars: Mapping[str, float] = {}
        # Steps, each with the time of its report.
        self.points: Series[tuple[float, events.Step]] = Series(POINTS_MAX)
        # The step of the newest checkpoint, 0 for none; and how many checkpoints were committed.
        self.checkpoint = self.checkpoints = 0
        self.checkpoint_at: float | None = None  # When the newest checkpoint was committed.
        # Checkpoints, each with the time of its commit.
        self.saves: Series[tuple[float, events.Committed]] = Series(WORK_MAX)
        self.samples = 0  # Trained on so far, in all epochs; 0 if not known.
        # By rank: the seconds of the rank's own work in a step, each with the time of its report.
        self.work: dict[int, Series[tuple[float, float]]] = {}
        self.failures: list[RunFailure] = []  # The failures, in the order of time.
        # The newest findings about slow nodes, each with its time.
        self.straggler_findings: deque[tuple[float, events.Straggler]] = deque(maxlen=STANDSTILLS_KEPT)
        # The newest checkpoints that could not be saved, and the first one that was saved after such, with their times.
        self.save_outcomes: deque[tuple[float, events.Unsaved | events.Committed]] = deque(maxlen=2 * STANDSTILLS_KEPT)
        # The times in which a node's events could not be written, unless all were written later.
        self.gaps: list[Gap] = []
        # From when until when etcd did not answer a node.
        self.outages: list[tuple[float, float]] = []
        # From when until when no agent ran, between two generations, and how the agents of the first had ended, in
        # words.
        self.breaks: list[tuple[float, float, str]] = []
        self.result: events.Result | None = None  # How the run ended; None: it goes on.
        self.ended_at = math.inf  # When the last node told the result.
        self.text = ""  # The report of a failed run.
        # The times of the first and the last event; 0 before the first.
        self.begin = self.last = 0.0
        self._newest_lives: dict[str, AgentLife] = {}  # The newest life of each node.
        # By number. Only those of the present etcd: a fresh one counts from 1 again.
        self._numbers: dict[int, Chapter] = {}
        self._courses: dict[int, GenerationCourse] = {}  # By generation.
        # The generations that had to wait for more nodes, because too few of the one before were left.
        self._short: set[int] = set()
        # The newest standstills with a finding, each with the course of its generation.
        self._explained: deque[tuple[Standstill, GenerationCourse]] = deque(maxlen=STANDSTILLS_KEPT)
        # How many chapters belong to earlier attempts that succeeded.
        self._done_before = 0
        # When another etcd took the place of one that had died.
        self._fresh_at = -math.inf

    @property
    def chapter(self) -> Chapter | None:
        """The newest generation; None before the first."""
        return self.chapters[-1] if self.chapters else None

    @property
    def waits_since(self) -> float | None:
        """Since when the newest generations in a row have waited for nodes; None: the newest does not wait."""
        waiting = list(takewhile(lambda chapter: chapter.waits, reversed(self.chapters)))
        return waiting[-1].begin if waiting and self.result is None else None

    @property
    def standstill(self) -> ExplainedStandstill | None:
        """The present standstill, if its reason is known; None: steps are made, or the reason is not known."""
        hang, chapter, last = self._blamed_standstill, self.chapter, self.failures[-1] if self.failures else None
        if hang is not None or chapter is None or last is None or self.result is not None or not self.alive():
            return hang
        # No step or generation has followed the last failure. Steps from before it may be reported up to `LATE_S`
        # later.
        if last.generation != chapter.number or last.at < self.last_step_at - LATE_S:
            return None
        return ExplainedStandstill(
            last.at,
            events.Culprit(chapter.number, self.newest, 0.0, (), (last.node,), last.what),
            self.has_step_numbers,
        )

    @property
    def _blamed_standstill(self) -> ExplainedStandstill | None:
        """The present standstill, if a node has found whom the others wait for."""
        course = self._courses.get(self.chapter.number) if self.chapter is not None else None
        since = course.stands_since if course is not None else None
        # The cheap conditions come first: this is asked at every `Progress`, and few of them find a culprit.
        if course is None or course.blamed is None or since is None or self.result is not None or not self.alive():
            return None
        return ExplainedStandstill(since, course.blamed, self.has_step_numbers)

    @property
    def succeeded(self) -> bool:
        """Whether the run has a result, and it is success."""
        return self.result is not None and self.result.status == "succeeded"

    @property
    def has_step_numbers(self) -> bool:
        """Whether `step` counts over the whole run, as far as is known. It does for a script with a Loop.

        That is assumed until a script succeeds without a step or a checkpoint, or makes steps without numbers.
        """
        if self.first_step_at is not None or self.checkpoints:
            return True
        return not self.succeeded and all(chapter.stepped_at is None for chapter in self.chapters)

    def open_gaps(self) -> list[Gap]:
        """The present gaps of nodes that have not told their end: what these nodes did since is not known."""
        return [life.gap for life in self._newest_lives.values() if life.gap is not None and life.code is None]

    def times_without_etcd(self, now: float | None = None) -> list[tuple[float, float]]:
        """From when until when etcd did not answer some node. Times that overlap are merged.

        Args:
            now: up to when an outage of a living node lasts; None: up to the node's last event.
        """
        away = [(life, life.away_since) for life in self.lives if life.away_since is not None]
        living = {id(life) for life in self.living()}
        still = [(since, life.last if now is None or id(life) not in living else now) for life, since in away]
        found: list[tuple[float, float]] = []
        for begin, end in sorted([*self.outages, *still]):
            if found and begin <= found[-1][1]:
                found[-1] = (found[-1][0], max(end, found[-1][1]))
            else:
                found.append((begin, end))
        return found

    def standstill_sentence(self, now: float) -> str:
        """The sentence about `standstill` at `now`; "" if it is None."""
        return self.standstill.sentence(now) if self.standstill is not None else ""

    def explained_standstills(self, now: float | None = None) -> list[tuple[ExplainedStandstill, float]]:
        """The newest standstills whose reason was found, each with its end.

        One that outlives its generation is told once, with its newest reason.

        Args:
            now: the end of one that still lasts; None: the time of the last event.
        """
        last, before = self.last if now is None else max(now, self.last), -math.inf
        found: dict[float, tuple[ExplainedStandstill, float]] = {}
        for stand, course in self._explained:
            assert stand.culprit is not None
            # A standstill that goes on in the next generation has the same beginning, to within the delay of reports.
            before = before if abs(stand.since - before) < LATE_S else stand.since
            # No shorter than the finding says: the others may have gone on without the node that reports it.
            until = max(min(stand.until, course.over_at, self.ended_at, last), stand.since + stand.culprit.age_s)
            # A finding without a rank, about other nodes that do not answer, is only the view of the node that reports
            # it.
            named = stand.culprit.ranks or not stand.culprit.nodes or stand.by in stand.culprit.nodes
            by = "" if named else stand.by
            found[before] = (
                ExplainedStandstill(before, stand.culprit, self.has_step_numbers, by),
                self._witnessed_end(before, until),
            )
        return list(found.values())

    def _witnessed_end(self, since: float, until: float) -> float:
        """The end of a standstill, as far as an agent was there to see it.

        That is `until`, or the last event of the agents of that time, if all of these have ended.
        """
        there = [life for life in self.lives if life.begin <= since]
        left = [life for life in there if life is not self._newest_lives[life.node] or life.code is not None]
        return min(until, max(life.last for life in there)) if there and left == there else until

    @property
    def unsaved(self) -> events.Unsaved | None:
        """The newest checkpoint, if it could not be saved; None: it was saved."""
        newest = self.save_outcomes[-1][1] if self.save_outcomes else None
        return newest if isinstance(newest, events.Unsaved) else None

    @property
    def straggler(self) -> events.Straggler | None:
        """The finding about the node that is slow now, in the newest generation; None: no node is known to be slow."""
        at, event = self.straggler_findings[-1] if self.straggler_findings else (0.0, None)
        now = event is not None and event.slow and self.chapter is not None and at >= self.chapter.begin
        return event if now else None

    @property
    def speed(self) -> float | None:
        """The current steps per second of the newest generation; None: not known."""
        course = self._courses.get(self.chapter.number) if self.chapter is not None else None
        return course.speed if course is not None else None

    def standstill_s(self, now: float) -> float:
        """For how many seconds no step has been made at `now`.

        0 if steps are made, or if neither a reason is known nor nodes are waited for.
        """
        since = self.standstill.since if self.standstill is not None else self.waits_since
        return max(0.0, now - since) if since is not None else 0.0

    def alive(self) -> tuple[str, ...]:
        """The nodes whose agents run, as far as is known."""
        return tuple(life.node for life in self.living())

    def living(self) -> list[AgentLife]:
        """The agents that run, as far as is known."""
        return [life for life in self._newest_lives.values() if life.code is None and life.gone_at is None]

    def note_killed(self, node: str) -> None:
        """Note that the newest agent of `node` ended with its last event, as is known from elsewhere."""
        life = self._newest_lives[node]
        life.gone_at = life.last
        if self.chapter is not None and not self.seated_lives():
            last = max((each.last for each in self.lives_in(self.chapter)), default=life.last)
            self._courses[self.chapter.number].left_at = last

    def worker(self, rank: int) -> int | None:
        """The pid of the worker with `rank` in the newest generation; None if there is none."""
        for generation, pids in self.workers.values():
            if self.chapter is not None and generation == self.chapter.number and rank in pids:
                return pids[rank]
        return None

    # The events.

    def fold(self, record: events.Record) -> float:  # noqa: PLR0912, PLR0915  One table of kinds.
        """Fold `record` into the story. Returns when it happened."""
        at, event, node = self.clocks.when(record), record.event, record.node
        self.clocks.fold(record)
        self.begin = min(self.begin or at, at)
        self.last = max(self.last, at)
        if isinstance(event, events.AgentStarted):
            self._agent_started(event, record, at)
        # Without a start before it: the file's first lines are damaged.
        elif node not in self._newest_lives:
            self._begin_life(node, 0, record.at, at)
        life = self._newest_lives[node]
        if isinstance(event, _FINISHED) and event.step:
            self._finished(event.generation, event.step)
        match event:
            case events.Generation():
                self._generation(event, node, at)
            case events.Resized():
                self.min_nodes, self.max_nodes = event.min_nodes, event.max_nodes
            case events.WorkersStarted():
                self.workers[node] = (event.generation, dict(zip(event.ranks, event.pids, strict=False)))
            case events.FirstStep():
                self._first_step(event, node, at)
            case events.Recovery() | events.SetUp():
                self._phases(event, node, at - event.age_s)
            case events.Step():
                self._step(event, at)
            case events.Progress():
                self._progressed(event, node, at)
            case events.WorkerEnded() if event.failure and (not event.collateral or NOT_LET_GO in event.failure):
                self.failures.append(RunFailure(at, node, event.failure, event.generation))
                if event.generation in self._courses:
                    self._courses[event.generation].failed_at = at
            case events.Committed():
                self._committed(event, at)
            case events.Unsaved():
                self.save_outcomes.append((at, event))
            case events.Culprit() | events.Stalled() | events.GoesOn():
                self._stood_or_went_on(event, node, at)
            case events.Straggler() if self.chapter is not None and event.generation == self.chapter.number:
                self.straggler_findings.append((at, event))
            case events.MemberLost():
                self._member_lost(event, life, at)
            case events.EtcdAway():
                self._etcd_away(life, event, at)
            case events.Unwritten():
                self._unwritten(life, event, at)
            case events.Failure():
                self.text = event.text
            case events.Result():
                self.result, self.ended_at, life.result_at = event, at, at
            case events.Leaves() | events.AgentStopped():
                self._leaves(life, event)
        short = isinstance(event, events.Recovery) and event.generation in self._short
        life.spans.fold(event, at, short=short)
        # An event of a node that was taken out shows that its agent lives.
        life.last, life.gone_at = max(life.last, at), None
        return at

    def _agent_started(self, event: events.AgentStarted, record: events.Record, at: float) -> None:
        if not self.run_dir:
            self.run_id, self.run_dir = event.run_id, event.run_dir
        # A run that goes on later may meet in another etcd.
        self.etcd = event.etcd
        self.min_nodes, self.max_nodes = event.min_nodes, event.max_nodes
        self._begin_life(record.node, event.pid, record.at, at)
        # The run is run `--again` after a success: its steps are new ones, not repeated ones.
        if self.succeeded:
            self._done_before, self.step = len(self.chapters), 0
            self.checkpoint, self.checkpoint_at = 0, None
        # The result was an earlier attempt's.
        self.result, self.ended_at = None, math.inf

    def _begin_life(self, node: str, pid: int, started_at: float, at: float) -> None:
        life = AgentLife(node, pid, at, started_at, at, LifeSpans(at, self._courses))
        self.lives.append(life)
        self._newest_lives[node] = life

    def _generation(self, event: events.Generation, node: str, at: float) -> None:
        before, life = self.chapter, self._newest_lives.get(node)
        known = before is not None and (event.number in self._numbers or event.number < before.number)
        # A fresh etcd counts generations from 1 again. It is recognised by a known number from an agent that started
        # after the newest generation began: no agent has a seat in a generation older than itself.
        later = before is not None and life is not None and life.pid != 0 and life.begin > before.begin
        anew = known and later and not isinstance(event, events.StandsBy)
        if known and not anew:
            # Every member reports the generation. In a large one most members know only some of its nodes; the leader
            # knows all.
            chapter = self._numbers.get(event.number)
            if chapter is not None and len(event.nodes) > len(chapter.nodes):
                chapter.nodes = event.nodes
                self._note_short(chapter)
            return
        cause, kind = event.cause, event.kind
        step, follows = 0, None
        # The leader publishes a cause in its own words. Add what only the story knows: whom the last generation waited
        # for, who joined on this occasion, who was slow, whether etcd was replaced.
        if before is not None:
            stand, before.end = self._blamed_standstill, at
            self._courses[before.number].over(at)
            if kind == "start" and self._fresh_at >= before.begin:
                cause = "etcd had died, and a fresh one was started"
            elif kind == "start":
                cause, kind = self._cause_of_restart(before, event, at)
            if stand is not None:
                cause = self._cause_with_standstill(stand, cause, at)
            # A run that is started again after a success has no step before.
            if len(self.chapters) > self._done_before:
                step = before.reached if before.first_step is not None else before.step_before
            follows = before.nodes if anew or event.number == before.number + 1 else None
            if event.kind in ("failure", "lost", "drain") and follows is not None:
                known_nodes = frozenset(follows)
                newcomers = [name for name in event.nodes if name not in known_nodes and name not in cause]
                cause = "; ".join([cause, *(f"{name} joined" for name in newcomers)])
            if event.kind == "drain" and self.straggler is not None and self.straggler.slow not in event.nodes:
                cause = f"{cause}; {self.straggler.slow} was slow"
            self._interrupted(before)
        if anew:
            self._numbers.clear()
            self._courses.clear()
            self._short.clear()
        chapter = Chapter(
            number=event.number,
            cause=cause,
            kind=kind,
            world_size=event.world_size,
            nodes=event.nodes,
            in_place=event.in_place,
            restarts=event.restarts,
            begin=at,
            # Workers that go on in place keep the state that they have, which may be newer than the published resume
            # point.
            resume_step=max(event.resume_step, step) if event.in_place else event.resume_step,
            step_before=step,
            follows=follows,
            waits=event.waits,
            needed=self.min_nodes,
        )
        self.chapters.append(chapter)
        self._numbers[event.number] = chapter
        self._courses[event.number] = GenerationCourse(waits=event.waits)
        self._note_short(chapter)

    def _interrupted(self, before: Chapter) -> None:
        """Another generation follows `before`. Note when its agents had ended, if none of them has lived on."""
        seated = self.lives_in(before)
        ended_at = max((life.last for life in seated), default=before.begin)
        later = [life for life in self.lives if life.begin > ended_at]
        if not seated or any(self._newest_lives[life.node] is life for life in seated):
            return
        self._courses[before.number].left_at = ended_at
        # All agents of the present started later, so there was a time without any agent.
        if len(later) == len(self._newest_lives):
            self.breaks.append((ended_at, min(life.begin for life in later), ends(seated)))

    def lives_in(self, chapter: Chapter) -> list[AgentLife]:
        """The agents that have a seat in `chapter`, as far as they are known."""
        nodes = frozenset(chapter.nodes)
        lives = [life for life in self.lives if life.node in nodes and life.begin <= chapter.begin]
        return list({life.node: life for life in lives}.values())

    def nodes_without_events(self) -> list[str]:
        """The nodes of the newest generation that have no event here.

        Nodes without a shared disk write to run directories of their own.
        """
        known = self.nodes_with_events
        return [node for node in (self.chapter.nodes if self.chapter is not None else ()) if node not in known]

    @property
    def nodes_with_events(self) -> set[str]:
        """The nodes that have written events of this run."""
        return {life.node for life in self.lives}

    def seated_lives(self) -> list[AgentLife]:
        """The running agents that have a seat in the newest generation."""
        living = {id(life) for life in self.living()}
        return [life for life in self.lives_in(self.chapter) if id(life) in living] if self.chapter is not None else []

    def _first_step(self, event: events.FirstStep, node: str, at: float) -> None:
        chapter = self.chapter
        # A late report: its generation is over.
        if chapter is None or event.generation != chapter.number:
            return
        chapter.stepped(node, at)
        # The workers have resumed earlier than published: the checkpoint of the resume point could not be used.
        if event.resumed_from < chapter.resume_step and not chapter.in_place:
            chapter.passed_over = chapter.resume_step
            self.checkpoint = min(self.checkpoint, event.resumed_from)
        chapter.first_step, chapter.resume_step = event.step, event.resumed_from
        if event.pause_s is not None:
            chapter.pause_s = max(chapter.pause_s or 0.0, event.pause_s)
        if event.redone is not None:
            chapter.redone = max(chapter.redone or 0, event.redone)
        self._count_redone(chapter)
        course = self._courses[chapter.number]
        # Steps up to `highest` were done before. The course shows them as repeated, until it is past them.
        highest = max(self.step, event.resumed_from + (event.redone or 0))
        if course.redone_until == math.inf or (not course.step and highest > event.resumed_from):
            course.redone_until, course.redone_to = math.inf, max(course.redone_to, highest)
        self._stepped(event.generation, event.step, at)

    def _count_redone(self, chapter: Chapter) -> None:
        """Correct how many steps `chapter` does again.

        A node's own report may lack steps that other nodes had finished.
        """
        if chapter.first_step is None:
            return
        # Only if all nodes of the generation before have told their events is its last step known.
        if chapter.redone is not None or (
            chapter.follows is not None and self._newest_lives.keys() >= {*chapter.follows}
        ):
            chapter.redone = max(chapter.redone or 0, chapter.step_before - chapter.resume_step)

    def _finished(self, generation: int, step: int) -> None:
        """Note that `step` was finished in `generation`. The event may come after a later generation has begun."""
        chapter = self._numbers.get(generation)
        if chapter is None or step <= chapter.reached:
            return
        chapter.reached = step
        # Later generations up to the first one with a step continue after this step: correct their beginning.
        for later in self.chapters[self.chapters.index(chapter) + 1 :] if chapter is not self.chapter else ():
            later.step_before = max(later.step_before, step)
            self._count_redone(later)
            if later.first_step is not None:
                return
            # Its workers keep the state that they have.
            if later.in_place:
                later.resume_step = max(later.resume_step, step)

    def _phases(self, event: events.Recovery | events.SetUp, node: str, at: float) -> None:
        chapter = self._numbers.get(event.generation)
        if chapter is None:
            return
        # A script without a Loop reports no first step.
        if chapter is self.chapter:
            chapter.stepped(node, at)
        seconds: dict[str, float] = {}
        for name, took_ms in event.phases.items():
            waited_s = self._waited_s(chapter, took_ms / 1000) if name == AGREE else 0.0
            seconds |= {WAITING: waited_s} if waited_s else {}
            seconds[name] = took_ms / 1000 - waited_s
        if isinstance(event, events.Recovery) and event.pause_s >= (chapter.pause_s or 0.0):
            chapter.pause_s, chapter.phases = event.pause_s, seconds
        elif chapter.pause_s is None:
            chapter.phases = max(chapter.phases, seconds, key=lambda each: sum(each.values()))

    def _step(self, event: events.Step, at: float) -> None:
        self._stepped(event.generation, event.step, at)
        self.epoch, self.scalars = event.epoch, event.scalars
        self.points.add((at, event))

    def _committed(self, event: events.Committed, at: float) -> None:
        if event.generation in self._courses:
            self._courses[event.generation].saved = True
        if self.unsaved is not None:
            self.save_outcomes.append((at, event))
        if event.step >= self.checkpoint:
            self.checkpoint, self.checkpoint_at = event.step, at
        self.checkpoints += 1
        self.saves.add((at, event))

    def _progressed(self, event: events.Progress, node: str, at: float) -> None:
        blamed = self._blamed_standstill.culprit if self._blamed_standstill is not None else None
        # The nodes that wait for the blamed one had made one step more. It does not end the standstill.
        ahead = blamed is not None and node not in blamed.nodes and event.step == blamed.step + 1
        # A file leaves out most `Step` events, so progress may be news.
        if event.step > self.newest and not ahead:
            self._stepped(event.generation, event.step, at - event.age_s)
        self.samples = event.samples or self.samples
        generation, pids = self.workers.get(node, (0, {}))
        for rank, own_s in zip(pids, event.own_s, strict=False):
            if own_s and generation == event.generation:
                self.work.setdefault(rank, Series(WORK_MAX)).add((at, own_s))

    def _stepped(self, generation: int, step: int, at: float) -> None:
        self.first_step_at = at if self.first_step_at is None else self.first_step_at
        self.step = max(self.step, step)
        # An agent that was frozen tells of its last steps when it wakes up.
        if self.chapter is not None and generation < self.chapter.number:
            return
        self.newest, self.last_step_at = step, max(at, self.last_step_at)
        course = self._courses.get(generation)
        if course is not None:
            course.stepped(step, at)

    def _etcd_away(self, life: AgentLife, event: events.EtcdAway, at: float) -> None:
        """Etcd does not answer the agent of `life`, or answers again."""
        life.away_since = at - event.away_s if event.problem else None
        if not event.problem:
            self.outages.append((at - event.away_s, at))
        if event.fresh:
            self._fresh_at, self.etcd = at, event.etcd or self.etcd

    def _unwritten(self, life: AgentLife, event: events.Unwritten, at: float) -> None:
        """Events of a node cannot be written to its file, or are written again."""
        gap = life.gap or Gap(life.node, at - event.for_s, event.reason)
        if gap is not life.gap:
            self.gaps.append(gap)
        gap.missing, gap.end = event.missing, at if event.over else None
        life.gap = None if event.over else gap
        # Nothing is missing: the events of that time were kept in memory and written later.
        if event.over and not event.missing:
            self.gaps.remove(gap)

    def _stood_or_went_on(self, event: events.Culprit | events.Stalled | events.GoesOn, node: str, at: float) -> None:
        """Steps stand still, or go on again, by the report of `node`."""
        course = self._courses.get(event.generation)
        if course is None:
            return
        if isinstance(event, events.GoesOn):
            course.goes_on(at)
        elif isinstance(event, events.Culprit):
            course.stood_still(event.step, at - event.age_s, event, node)
            # A rank has been known to be lost for so long, so its failure counts from then.
            if event.unagreed_s:
                course.failed_at = min(course.failed_at, at - event.unagreed_s)
            if course.blamed is event and not any(stand is course.standstills[-1] for stand, _ in self._explained):
                self._explained.append((course.standstills[-1], course))
        else:
            course.stood_still(event.step, at - event.age_s)
            course.hung = course.hung or ((at, event) if event.final else None)
        # Without stacks the worker's own end is the failure that is told.
        if course.hung is not None and course.hung[1].stacks:
            self._count_hang(*course.hung, course.blamed)

    def _count_hang(self, at: float, event: events.Stalled, culprit: events.Culprit | None) -> None:
        """Count a hang as one failure of each node that is waited for, whichever node has reported it first.

        Args:
            at: the time of the first report.
            event: the first report.
            culprit: the finding about whom the others wait for; None: not known yet. Then the failure has no node.
        """
        nodes: tuple[str, ...] = ()
        what = f"no progress for {event.age_s:.0f} s" + (f" after step {event.step:,}" if self.has_step_numbers else "")
        # The finding may be one step behind: see `GenerationCourse.stood_still`.
        if culprit is not None and abs(event.step - culprit.step) <= 1:
            what, nodes = f"{what}: {culprit.reason}", culprit.nodes
        self._add_hang(at, what, event.generation, nodes or ("",), since=at - event.age_s)

    def _add_hang(self, at: float, what: str, generation: int, nodes: Iterable[str], *, since: float) -> None:
        """Note a hang as a failure of each of these `nodes`, "" if none is known.

        Earlier failures of the same hang, those from `since` on, are replaced: it may go on in generations that come to
        no step.
        """
        self.failures = [each for each in self.failures if not (each.hang and each.at >= since)]
        self.failures += [RunFailure(at, each, what, generation, hang=True) for each in nodes]

    def _cause_with_standstill(self, stand: ExplainedStandstill, cause: str, at: float) -> str:
        """The `cause` of the generation that ended the standstill `stand` at `at`, with the standstill's reason added.

        The standstill counts as a failure, too.
        """
        culprit = stand.culprit
        course = self._courses[culprit.generation]
        # A hang that ended its generation is in the cause already; nodes that do not answer are reported as lost.
        if course.hung or (culprit.nodes and not culprit.ranks):
            return cause
        until = self._witnessed_end(stand.since, at)
        self._add_hang(at, stand.sentence(until), culprit.generation, culprit.nodes, since=stand.since)
        return f"{cause}; before that no step for {until - stand.since:.0f} s: {culprit.reason}"

    def _member_lost(self, event: events.MemberLost, teller: AgentLife | None, at: float) -> None:
        """A node was taken out.

        If the agent that reports it, `teller`, started only after the lost node's last event, the moment of the loss is
        unknown. The loss then counts from the last event.
        """
        begin = self.chapter.begin if self.chapter is not None else -math.inf
        # Not an agent that started after the newest generation began: it has no seat that it could lose.
        lives = [life for life in self.lives if life.node == event.lost and life.begin <= begin]
        life = lives[-1] if lives else None
        # An agent that ended or left of its own accord is no loss, unless it stopped answering.
        if life is not None and (life.code is not None or (life.is_leaving and SILENT not in event.how)):
            return
        late = life is not None and teller is not None and teller.begin > life.last
        number = self.chapter.number if self.chapter is not None else 0
        self._lost(RunFailure(at, event.lost, event.how, number), life, at if not late else 0.0)

    def _lost(self, loss: RunFailure, life: AgentLife | None, gone_at: float) -> None:
        self.failures.append(loss)
        if life is not None:
            life.gone_at, life.loss = max(gone_at, life.last), loss

    def _leaves(self, life: AgentLife, event: events.Leaves | events.AgentStopped) -> None:
        """An agent leaves the run, or has ended.

        If it left before its node was taken out, nothing has failed. The two events may come in either order, because
        the clocks of two machines differ.
        """
        if isinstance(event, events.AgentStopped):
            life.code = event.code
            return
        life.is_leaving = True
        if life.loss in self.failures and SILENT not in life.loss.what:
            self.failures.remove(life.loss)

    def _cause_of_restart(self, before: Chapter, event: events.Generation, at: float) -> tuple[str, str]:
        """The cause and kind of a generation that `event` reports as a "start".

        Its leader may have found an empty etcd, and does not know which agents were killed together with the etcd
        before.
        """
        killed = [life for life in self.lives_in(before) if life.code is None and not (life.is_leaving or life.loss)]
        for life in killed:
            self._lost(RunFailure(at, life.node, f"{life.node} lost (killed)", before.number), life, life.last)
        names = ", ".join(life.node for life in killed)
        return (f"{names} lost (killed)", "lost") if killed else (event.cause, event.kind)

    def _waited_s(self, chapter: Chapter, agree_s: float) -> float:
        """For how many of the `agree_s` seconds that it took to agree on `chapter` there were too few nodes for it."""
        before = takewhile(lambda each: each.waits, reversed(self.chapters[: self.chapters.index(chapter)]))
        # A generation that waits with enough nodes only saves.
        short = [each for each in before if len(each.nodes) < each.needed]
        if short:
            return min(agree_s, chapter.begin - short[-1].begin)
        return agree_s if chapter.number in self._short else 0.0

    def _note_short(self, chapter: Chapter) -> None:
        """Note whether `chapter` had to wait for more nodes: too few of the one before kept their agents."""
        before = self._numbers.get(chapter.number - 1)
        lives = [self._newest_lives.get(node) for node in {*before.nodes}.intersection(chapter.nodes)] if before else []
        stayed = [life for life in lives if before and (life is None or life.begin <= before.begin)]
        self._short.discard(chapter.number)
        if before is not None and len(stayed) < self.min_nodes:
            self._short.add(chapter.number)

    # Sums.

    def spans_of(self, life: AgentLife, now: float | None = None) -> tuple[Span, ...]:
        """How the time of `life` was spent, from its start.

        The spans reach up to the last event; for a running agent up to `now`, if given; for a lost node up to the
        moment at which the others noticed the loss.
        """
        if life.gone_at is not None:
            return life.spans.spans_until(life.gone_at, lost=life.gone_at > life.last)
        runs = life.code is None and self._newest_lives[life.node] is life
        return life.spans.spans_until(max(now, life.last) if runs and now is not None else life.last)

    def _spent(self, now: float | None) -> list[tuple[str, list[Span]]]:
        """For each agent its node and spans, cut at the run's result."""
        found = []
        for life in self.lives:
            end, spans = min(self.ended_at, life.result_at), self.spans_of(life, now)
            found.append((life.node, [replace(span, end=min(span.end, end)) for span in spans if span.begin < end]))
        return found

    def spans(self, now: float | None = None) -> list[Span]:
        """How the time of the whole run was spent. Each moment is shared by the nodes that have a seat then.

        Args:
            now: up to when running agents count; None: up to their last events.
        """
        return together(self._spent(now), [(chapter.begin, frozenset(chapter.nodes)) for chapter in self.chapters])

    def now_if_running(self, now: float) -> float | None:
        """`now` if the run still goes on then, as far as its events tell; else None.

        The result is the `now` of `spans` and of the other sums.
        """
        silent_s = max(SILENT_S, SILENT_SHARE * (self.last - self.begin))
        return now if self.result is None and self.alive() and now - self.last < silent_s else None

    def spans_by_node(self, now: float | None = None) -> dict[str, list[Span]]:
        """How each node's time was spent: the spans of all its agents, one after the other."""
        found: dict[str, list[Span]] = {}
        for node, spans in self._spent(now):
            found.setdefault(node, []).extend(spans)
        return found

    def goodput(self, now: float | None = None) -> float:
        """The share of the run's time spent on steps that count (`train`), from 0 to 1."""
        spent = totals(self.spans(now))
        return spent.get(TRAIN, 0.0) / sum(spent.values()) if spent else 0.0


def ends(lives: Iterable[AgentLife]) -> str:
    """With which exit codes these agents ended, in words."""
    return ", ".join(sorted({"killed" if life.code is None else f"code {life.code}" for life in lives}))


def cause_of(story: Story | None, generation: int, said: str) -> str:
    """The cause of the newest generation.

    Args:
        story: if it knows this generation, its cause is taken, which may say more.
        generation: the number of the newest generation.
        said: the cause in the leader's words.
    """
    chapter = story.chapter if story is not None else None
    return chapter.cause if chapter is not None and chapter.number == generation else said
