"""The generations of a run, as the chapters of its story: why each was made, how its steps go, what it cost. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Set
from dataclasses import dataclass, field
from typing import Any

from elasticrt import events
from elasticrt.ipc.failure import NOT_LET_GO

_FINISHED = (
    events.FirstStep | events.Step | events.Progress | events.Committed | events.Copied | events.WorkerEnded
    | events.Stalled | events.Culprit
)  # fmt: skip
"""Events whose `step` was finished in their `generation`."""

STANDSTILLS_KEPT = 64
"""How many standstills are kept of one generation, the newest ones."""

LATE_S = 1.0
"""How long after a step its report may arrive."""

FROZEN_S = 10.0
"""When all agents have been silent for longer than this, and no step was made meanwhile, they were frozen. Otherwise
each writes its progress every 5 s."""

PACE_S = 30.0
"""The window over which the current steps per second are measured, within the newest generation."""


UNKNOWN = events.Culprit(generation=0, step=0, age_s=0.0, ranks=(), nodes=(), reason="")
"""Stands for a finding while there is none."""


@dataclass
class Standstill:
    """A time in which no step was made."""

    # `since` and `until` are in seconds since 1970. `until` is infinity while the standstill lasts, and stays so if its
    # generation ends before another step.
    since: float
    until: float = math.inf
    culprit: events.Culprit = UNKNOWN  # The newest finding about which ranks or nodes the others wait for.

    @property
    def is_explained(self) -> bool:
        """Whether there is a finding."""
        return self.culprit is not UNKNOWN

    def sentence(self, now: float, *, numbered: bool) -> str:
        """The sentence about it at `now`: `no step for 3 s after step 58: rank 1 on node-1 sleeps`.

        With `numbered`, the step counts over the whole run. Else it is the number of optimizer steps of the present
        processes, and is not shown.
        """
        after = f" after step {self.culprit.step:,}" if numbered else ""
        return f"no step for {now - self.since:.0f} s{after}: {self.culprit.reason}"


def is_failure(event: events.WorkerEnded) -> bool:
    """Whether a worker's end counts as a failure: it is no mere consequence of another one."""
    return bool(event.failure) and (not event.collateral or NOT_LET_GO in event.failure)


@dataclass(eq=False)
class Chapter:
    """One generation, as the run's story tells it. Times are in seconds since 1970. Each is equal to itself alone."""

    # Up to `restarts`, and `waits`: as the leader published them. The cause also names nodes that joined on this
    # occasion.
    number: int
    cause: str = ""
    kind: str = ""
    world_size: int = 0
    nodes: tuple[str, ...] = ()
    in_place: bool = False
    restarts: int = 0
    begin: float = 0.0  # When its first node began it.
    # The step that it resumes after, at first as published, then as the workers agreed.
    resume_step: int = 0
    # The last step before this generation that any node's events tell of.
    step_before: int = 0
    # The nodes of the generation before; None if that one has no events.
    follows: tuple[str, ...] | None = None
    waits: bool = False
    # The run's minimum of nodes when it was published.
    needed: int = 1
    # The highest step finished in it that any node's events tell of; 0: none.
    reached: int = 0
    end: float = math.inf  # When the next one began.
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

    # The rest is how its steps go. `told` leaves it out.

    # The last step while it was the newest generation, and when it was done; 0 before the first.
    last_step: int = 0
    last_step_at: float = 0.0
    # When the last of its agents ended, if none of them lived on into the next generation. An agent that started later
    # has waited for others to come.
    left_at: float = math.inf
    failed_at: float = math.inf  # When a worker failed or was lost, if no step was made since.
    # Until this time it repeats steps that an earlier generation had done. Minus infinity: it repeats none; infinity:
    # it still does.
    redone_until: float = -math.inf
    redone_to: int = 0  # The last of the repeated steps.
    # Whether it had to wait for more nodes, because too few of the generation before were left.
    short: bool = False
    # Since when all agents were silent for long, until a step tells whether they have trained; None: they were not.
    silent_since: float | None = None
    # The newest standstills. The last one may still last.
    standstills: deque[Standstill] = field(default_factory=lambda: deque(maxlen=STANDSTILLS_KEPT))
    # Recent steps with their times: those of the last `PACE_S` seconds, since the last standstill.
    recent_steps: deque[tuple[int, float]] = field(default_factory=deque)
    # The first `Stalled` event that ends this generation as hung, with its time; None: there is none.
    hung: tuple[float, events.Stalled] | None = None

    def told(self) -> dict[str, Any]:
        """What programs are told of it: the fields up to `phases`, by name."""
        names = list(vars(self))
        told = {name: getattr(self, name) for name in names[: names.index("last_step")]}
        return {**told, "end": self.end if self.end < math.inf else None}

    @property
    def saves(self) -> bool:
        """Whether it only saves the state: it has enough nodes, makes no step, and the next generation follows."""
        return self.waits and len(self.nodes) >= self.needed

    @property
    def lacks_nodes(self) -> bool:
        """Whether it waits because there are fewer nodes than the run needs."""
        return self.waits and not self.saves

    @property
    def step(self) -> int:
        """The step after which the run stood when this generation began.

        That is what its nodes' reports say; before these, the newest step known from earlier generations.
        """
        return self.resume_step + self.redone if self.redone is not None else self.step_before

    @property
    def speed(self) -> float | None:
        """The current steps per second; None: not known."""
        if len(self.recent_steps) < 2 or self.recent_steps[-1][1] <= self.recent_steps[0][1]:
            return None
        (first, since), (last, until) = self.recent_steps[0], self.recent_steps[-1]
        return (last - first) / (until - since)

    @property
    def standstill(self) -> Standstill | None:
        """The present standstill; None: steps are made, as far as is known."""
        return self.standstills[-1] if self.standstills and self.standstills[-1].until == math.inf else None

    def standstills_within(self, begin: float, end: float) -> list[tuple[float, float]]:
        """The parts of the time from `begin` to `end` in which the steps stood still."""
        times = [(max(begin, each.since), min(end, each.until)) for each in self.standstills]
        return [(since, until) for since, until in times if since < until]

    def fold(self, event: events.Event, at: float) -> None:
        """Fold in an event of this generation about its steps, which happened at `at`."""
        match event:
            case events.WorkerEnded() if is_failure(event):
                self.failed_at = at
            case events.GoesOn():
                self.goes_on(at)
            case events.Culprit():
                self.stood_still(event.step, at - event.age_s, event)
            case events.Stalled():
                self.stood_still(event.step, at - event.age_s)
                self.hung = self.hung or ((at, event) if event.final else None)

    def over(self, at: float) -> None:
        """Note that the next generation begins at `at`."""
        self.end = at
        self.recent_steps.clear()

    def reported_first(self, node: str, at: float) -> None:
        """Note that `node` reported its first step `at` this time."""
        self.reported.setdefault(node, at)
        self.stepped_at = at if self.stepped_at is None else self.stepped_at

    def count_redone(self, told: Set[str]) -> None:
        """Correct how many steps it does again, if only those nodes that have `told` their events are known.

        A node's own report may lack steps that other nodes had finished.
        """
        if self.first_step is None:
            return
        # Only if all nodes of the generation before have told their events is its last step known.
        if self.redone is not None or (self.follows is not None and told >= {*self.follows}):
            self.redone = max(self.redone or 0, self.step_before - self.resume_step)

    def resumed(self, step: int, highest: int) -> None:
        """Note that a node has resumed after `step`. Steps up to `highest` were done before: they are repeated."""
        if self.redone_until == math.inf or (not self.last_step and highest > step):
            self.redone_until, self.redone_to = math.inf, max(self.redone_to, highest)

    def stepped(self, step: int, at: float) -> None:
        """Note that `step` is done at `at`. A step that is not the newest changes nothing."""
        if step <= self.last_step:
            return
        if self.redone_until == math.inf and step >= self.redone_to:
            # Not every step has an event. The steps between two events are assumed to come at an even pace.
            before_at = self.last_step_at or at
            share = (self.redone_to - self.last_step) / (step - self.last_step) if self.last_step else 1.0
            self.redone_until = before_at + share * (at - before_at)
        self._end_silence(step, at)
        self.goes_on(at)
        # A step that was done before the failure may be reported up to `LATE_S` after it.
        if at > self.failed_at + LATE_S:
            self.failed_at = math.inf
        self.last_step, self.last_step_at = step, at
        self.recent_steps.append((step, at))
        while at - self.recent_steps[0][1] > PACE_S and len(self.recent_steps) > 2:
            self.recent_steps.popleft()

    def was_awake(self, at: float) -> None:
        """Note that a node made a step at `at`, so it was not frozen before that."""
        for stand in self.standstills:
            if not stand.is_explained and stand.since < at < stand.until < math.inf:
                stand.since = at

    def _end_silence(self, step: int, at: float) -> None:
        """The first step known after all agents were silent is `step`, done at `at`.

        The steps until then took as long as usual. If they do not fill the silence, the workers stood still with their
        agents.
        """
        silent_since, self.silent_since = self.silent_since, None
        # Until the first step agents may be silent for long, while worker parents start for example.
        if silent_since is None or not self.last_step:
            return
        # That step was done before the silence, and no event had told of it. The next one ends the silence.
        if at - silent_since <= FROZEN_S:
            self.silent_since = at
            return
        made, speed = step - self.last_step, self.speed
        since = silent_since + (made / speed if speed else 0.0)
        if at - since > FROZEN_S and (speed or made == 1) and self.standstill is None:
            self.standstills.append(Standstill(since, at))
            self.recent_steps.clear()

    def goes_on(self, at: float) -> None:
        """Note that steps are made again at `at`. Ends the standstill, if there is one."""
        if self.standstill is not None:
            self.standstill.until = at
            self.recent_steps.clear()

    def stood_still(self, step: int, since: float, culprit: events.Culprit = UNKNOWN) -> None:
        """Note that no step was made from `since` on, after `step`. `culprit` is the finding about it, if any."""
        # A report from before the newest step is out of date. Ranks that wait for the blamed ones may have made one
        # step more, so a finding may be one step behind.
        if step + (culprit is not UNKNOWN) < self.last_step:
            return
        step = max(step, self.last_step)
        # An age is measured a moment before its event is written, so `since` may come out too late.
        if self.last_step and step == self.last_step:
            since = min(since, self.last_step_at)
        if not self.standstills or self.standstills[-1].until < since:
            self.standstills.append(Standstill(since))
        stand = self.standstills[-1]
        stand.since, stand.until = min(since, stand.since), math.inf
        if culprit is not UNKNOWN:
            stand.culprit = culprit
        if self.last_step:
            self.last_step, self.last_step_at = step, stand.since


class Generations:
    """The generations of a run."""

    def __init__(self) -> None:
        self.all: list[Chapter] = []  # The generations, in order.
        self._none = Chapter(0, begin=-math.inf)
        # The same by number. Only those of the present etcd: a fresh one counts from 1 again.
        self.numbers: dict[int, Chapter] = {}
        # By node: the newest generation with workers there, and their pids by rank.
        self.workers: dict[str, tuple[int, dict[int, int]]] = {}

    @property
    def newest(self) -> Chapter:
        """The newest generation. Before the first: one with number 0 and without nodes."""
        return self.all[-1] if self.all else self._none

    def is_over(self, number: int) -> bool:
        """Whether another generation has followed the one with `number`."""
        return number < self.newest.number

    def is_known(self, number: int) -> bool:
        """Whether an event has told of a generation with `number`, or of a later one."""
        return number in self.numbers or self.is_over(number)

    def worker(self, rank: int) -> int | None:
        """The pid of the worker with `rank` in the newest generation; None if there is none."""
        for generation, pids in self.workers.values():
            if generation == self.newest.number and rank in pids:
                return pids[rank]
        return None

    def ranks(self, node: str, number: int) -> Collection[int]:
        """The ranks of the workers of `node`, if generation `number` is its newest one with workers."""
        generation, pids = self.workers.get(node, (0, {}))
        return pids if generation == number else ()

    # A new generation.

    def follows(self, number: int) -> tuple[str, ...] | None:
        """The nodes of the newest generation, if a new one with `number` comes right after it; else None."""
        after = self.is_known(number) or number == self.newest.number + 1
        return self.newest.nodes if self.all and after else None

    def begin(self, event: events.Generation, at: float, *, cause: str, kind: str, needed: int) -> Chapter:
        """Begin the generation that `event` tells of. The other arguments are fields of `Chapter`, `at` its `begin`."""
        before, follows = self.newest, self.follows(event.number)
        before.over(at)
        step = before.reached if before.first_step is not None else before.step_before
        # A fresh etcd counts from 1 again.
        if self.is_known(event.number):
            self.numbers.clear()
        chapter = Chapter(
            number=event.number,
            cause=cause,
            kind=kind,
            world_size=event.world_size,
            nodes=event.nodes,
            in_place=event.in_place,
            restarts=event.restarts,
            begin=at,
            # Workers that go on in place keep the state that they have, which may be newer than what was published.
            resume_step=max(event.resume_step, step) if event.in_place else event.resume_step,
            step_before=step,
            follows=follows,
            waits=event.waits,
            needed=needed,
        )
        self.all.append(chapter)
        self.numbers[event.number] = chapter
        return chapter

    def learn_nodes(self, event: events.Generation) -> Chapter | None:
        """Take over the nodes of a known generation from `event`, if it names more. Returns the generation if it does.

        Every member reports the generation. In a large one most members know only some of its nodes; the leader knows
        all.
        """
        chapter = self.numbers.get(event.number)
        if chapter is None or len(event.nodes) <= len(chapter.nodes):
            return None
        chapter.nodes = event.nodes
        return chapter

    # The events of a generation.

    def fold(self, event: events.Event, node: str, at: float, told: Set[str]) -> None:
        """Fold in an event that `node` has written, and that happened at `at`. `told` are all nodes with events."""
        if isinstance(event, _FINISHED) and event.step:
            self._finished(event.generation, event.step, told)
        match event:
            case events.WorkersStarted():
                self.workers[node] = (event.generation, dict(zip(event.ranks, event.pids, strict=False)))
            case events.WorkerEnded() | events.Culprit() | events.Stalled() | events.GoesOn() if (
                event.generation in self.numbers
            ):
                self.numbers[event.generation].fold(event, at)

    def first_step(self, event: events.FirstStep, node: str, at: float, *, highest: int, told: Set[str]) -> bool:
        """Note the first step of `node` in the newest generation. The `highest` step of the run may be a later one.

        Returns whether the workers have resumed earlier than published: the checkpoint of the resume point could not be
        used.
        """
        chapter = self.numbers[event.generation]
        chapter.reported_first(node, at)
        earlier = event.resumed_from < chapter.resume_step and not chapter.in_place
        if earlier:
            chapter.passed_over = chapter.resume_step
        chapter.first_step, chapter.resume_step = event.step, event.resumed_from
        if event.pause_s is not None:
            chapter.pause_s = max(chapter.pause_s or 0.0, event.pause_s)
        if event.redone is not None:
            chapter.redone = max(chapter.redone or 0, event.redone)
        chapter.count_redone(told)
        chapter.resumed(event.resumed_from, max(highest, event.resumed_from + (event.redone or 0)))
        return earlier

    def _finished(self, number: int, step: int, told: Set[str]) -> None:
        """Note that `step` was finished in generation `number`. The event may come after a later one has begun."""
        chapter = self.numbers.get(number)
        if chapter is None or step <= chapter.reached:
            return
        chapter.reached = step
        # Later generations up to the first one with a step continue after this step: correct their beginning.
        for later in self.all[self.all.index(chapter) + 1 :] if chapter is not self.newest else ():
            later.step_before = max(later.step_before, step)
            later.count_redone(told)
            if later.first_step is not None:
                return
            # Its workers keep the state that they have.
            if later.in_place:
                later.resume_step = max(later.resume_step, step)
