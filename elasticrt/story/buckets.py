"""Divides the time of each agent's life into buckets: every moment is in exactly one. Pure.

A life is painted from left to right with a cursor. Each event assigns the time between the cursor and itself to a
bucket and moves the cursor, so the spans always add up to the life, whatever the events are and whichever are missing.
Two things are known late. A pause (`loop.pause`) is reported at its end, so training is painted only up to the point
where the next pause could begin. The time that workers spend besides their steps (`Progress`) is an amount of seconds
without a position; it is painted at the beginning of the interval in which it was spent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

from elasticrt import events
from elasticrt.ipc.failure import NOT_LET_GO

TRAIN, REDONE, DATA, SAVE, PAUSE = "train", "redone steps", "data wait", "checkpoint stall", "pause"
DETECT, AGREE, REFORM, SET_UP, RESTORE = "detect", "agree", "re-form", "set-up", "restore"
START, WAITING, STANDBY = "start", "waiting for nodes", "standby"

BUCKETS: Mapping[str, str] = {
    TRAIN: "steps that count",
    REDONE: "steps that had been done before, and are done again",
    DATA: "waiting for the data loader",
    SAVE: "training was blocked by a checkpoint or a copy of the state",
    PAUSE: "in `loop.pause`: evaluation, for example",
    DETECT: "from the last step until the failure or change was noticed; all of a hang",
    AGREE: "until the next generation was agreed",
    REFORM: "old workers ended, survivors took their new ranks, the process group was created",
    SET_UP: "workers started, and the script came to its first step",
    RESTORE: "the state was loaded, or taken over from another worker",
    START: "the agent or the worker parent started, or the agent ended",
    WAITING: "there were fewer nodes than the run needs",
    STANDBY: "other nodes trained without this one",
}
"""Each bucket with its meaning, the best use of time first. docs/events.md shows this table."""

# The bucket of each phase of a `Recovery` or `SetUp` event. Some depend on the kind of restart: see `_stepped`.
_PHASES = {
    "detect": DETECT,
    "agree": AGREE,
    "stop": REFORM,
    "start": SET_UP,
    "script": SET_UP,
    "init": REFORM,
    "loop": SET_UP,
    "restore": RESTORE,
    "first_step": SET_UP,
}

SPANS_MAX = 4000
"""How many spans one life keeps. Beyond that, short ones are merged (`coarse`): no second is lost, but within a piece
the buckets stand in their own order."""

STANDSTILLS_KEPT = 64
"""How many standstills are kept of one generation, the newest ones."""

LATE_S = 1.0
"""How long after a step its report may arrive."""

PACE_S = 30.0
"""The window over which the current steps per second are measured, within the newest generation."""


@dataclass(frozen=True)
class Span:
    """An interval of time, in one bucket."""

    # `begin` and `end` are in seconds since 1970.
    begin: float
    end: float
    bucket: str  # A key of `BUCKETS`.


@dataclass(frozen=True)
class _Mark:
    """A `Progress` event as a point in time.

    `step` is the last step that all workers of the node have finished. `seconds` are the amounts by bucket, summed
    since the node's first step in the generation. With `pausing`, a worker is in `loop.pause`.
    """

    at: float
    step: int
    seconds: tuple[tuple[str, float], ...]
    pausing: bool

    def later(self, at: float) -> _Mark:
        """This mark moved to `at`, a later time in the same pause."""
        seconds = tuple((name, spent_s + (at - self.at) * (name == PAUSE)) for name, spent_s in self.seconds)
        return _Mark(at, self.step, seconds, pausing=True)


@dataclass
class Standstill:
    """A time in which no step was made."""

    # `since` and `until` are in seconds since 1970. `until` is infinity while the standstill lasts, and stays so if its
    # generation ends before another step.
    since: float
    until: float = math.inf
    # The newest finding about which ranks the others wait for; None: there is none.
    culprit: events.Culprit | None = None


def is_failure(event: events.WorkerEnded) -> bool:
    """Whether a worker's end counts as a failure: it is no mere consequence of another one."""
    return bool(event.failure) and (not event.collateral or NOT_LET_GO in event.failure)


@dataclass
class GenerationCourse:
    """How one generation went, from the events of all its nodes. Times are in seconds since 1970."""

    # The last step, and when it was done; 0 before the first.
    step: int = 0
    step_at: float = 0.0
    over_at: float = math.inf  # When the next generation began.
    # When the last of the generation's agents ended, if none of them lived on into the next generation. An agent that
    # started later has waited for others to come.
    left_at: float = math.inf
    # When a worker failed or was lost, if no step was made since.
    failed_at: float = math.inf
    # Until this time the generation repeats steps that an earlier one had done. Minus infinity: it repeats none;
    # infinity: it still does.
    redone_until: float = -math.inf
    redone_to: int = 0  # The last of the repeated steps.
    waits: bool = False  # Whether it makes no steps because there are too few nodes.
    # Whether it had to wait for more nodes, because too few of the generation before were left.
    short: bool = False
    # The newest standstills. The last one may still last.
    standstills: deque[Standstill] = field(default_factory=lambda: deque(maxlen=STANDSTILLS_KEPT))
    # Recent steps with their times: those of the last `PACE_S` seconds, since the last standstill.
    recent_steps: deque[tuple[int, float]] = field(default_factory=deque)
    # The first `Stalled` event that ends this generation as hung, with its time; None: there is none.
    hung: tuple[float, events.Stalled] | None = None

    def fold(self, event: events.Event, at: float) -> None:
        """Fold in an event of this generation, which happened at `at`."""
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
        self.over_at = at
        self.recent_steps.clear()

    def resumed(self, step: int, highest: int) -> None:
        """Note that a node has resumed after `step`. Steps up to `highest` were done before: they are repeated."""
        if self.redone_until == math.inf or (not self.step and highest > step):
            self.redone_until, self.redone_to = math.inf, max(self.redone_to, highest)

    def stepped(self, step: int, at: float) -> None:
        """Note that `step` is done at `at`. A step that is not the newest changes nothing."""
        if step <= self.step:
            return
        if self.redone_until == math.inf and step >= self.redone_to:
            # Not every step has an event. The steps between two events are assumed to come at an even pace.
            before_at = self.step_at or at
            share = (self.redone_to - self.step) / (step - self.step) if self.step else 1.0
            self.redone_until = before_at + share * (at - before_at)
        self.goes_on(at)
        # A step that was done before the failure may be reported up to `LATE_S` after it.
        if at > self.failed_at + LATE_S:
            self.failed_at = math.inf
        self.step, self.step_at = step, at
        self.recent_steps.append((step, at))
        while at - self.recent_steps[0][1] > PACE_S and len(self.recent_steps) > 2:
            self.recent_steps.popleft()

    def still_made_steps(self, at: float) -> None:
        """Note that a node made its last step at `at`, whose number is not known."""
        self.step_at = max(self.step_at, at)

    @property
    def speed(self) -> float | None:
        """The current steps per second; None: not known."""
        if len(self.recent_steps) < 2 or self.recent_steps[-1][1] <= self.recent_steps[0][1]:
            return None
        (first, since), (last, until) = self.recent_steps[0], self.recent_steps[-1]
        return (last - first) / (until - since)

    def goes_on(self, at: float) -> None:
        """Note that steps are made again at `at`. Ends the standstill, if there is one."""
        if self.stands_since is not None:
            self.standstills[-1].until = at
            self.recent_steps.clear()

    def stood_still(self, step: int, since: float, blamed: events.Culprit | None = None) -> None:
        """Note that no step was made from `since` on, after `step`. `blamed` is the finding about it, if any."""
        # A report from before the newest step is out of date. Ranks that wait for the blamed ones may have made one
        # step more, so a finding may be one step behind.
        if step + (blamed is not None) < self.step:
            return
        step = max(step, self.step)
        # An age is measured a moment before its event is written, so `since` may come out too late.
        if self.step and step == self.step:
            since = min(since, self.step_at)
        if not self.standstills or self.standstills[-1].until < since:
            self.standstills.append(Standstill(since))
        stand = self.standstills[-1]
        stand.since, stand.until = min(since, stand.since), math.inf
        if blamed is not None:
            stand.culprit = blamed
        if self.step:
            self.step, self.step_at = step, stand.since

    @property
    def stands_since(self) -> float | None:
        """When the present standstill began; None: steps are made, as far as is known."""
        return self.standstills[-1].since if self.standstills and self.standstills[-1].until == math.inf else None

    @property
    def blamed(self) -> events.Culprit | None:
        """The newest finding about which ranks the others wait for; None: steps are made, or there is no finding."""
        return self.standstills[-1].culprit if self.stands_since is not None else None

    def standstills_within(self, begin: float, end: float) -> list[tuple[float, float]]:
        """The parts of the time from `begin` to `end` in which the steps stood still."""
        times = [(max(begin, each.since), min(end, each.until)) for each in self.standstills]
        return [(since, until) for since, until in times if since < until]


class LifeSpans:
    """The spans of one agent's life.

    Events must come in the order of time. What is painted is final; what is not known yet is guessed by `spans_until`.

    Args:
        begin: when the agent started, in seconds since 1970.
        courses: the courses of all generations by number. The nodes of a run share this mapping, and `Generations`
            changes it.
    """

    def __init__(self, begin: float, courses: Mapping[int, GenerationCourse]) -> None:
        self.begin = self._cursor = begin
        self._courses = courses
        # The course of the generation `_generation`.
        self._course = GenerationCourse()
        self._spans: list[Span] = []
        # What the node does. "start": the agent and the worker parent start. "idle": no seat. "ready": the same, after
        # a failed worker was replaced while the others may still be in the old generation. "seated": a seat, and no
        # step yet. "waiting": a seat in a generation that waits for nodes. "training". "over": the run has a result.
        self._mode = "start"
        # The newest generation in which this node has made a step.
        self._generation = 0
        # The newest generation that this node has heard of, with a seat for it or without one.
        self._newest = 0
        # When this node heard of the generation that follows `_generation`; None: it has not.
        self._next_heard_at: float | None = None
        # When a worker of this node failed in `_generation`; None: none has.
        self._failed_at: float | None = None
        self._marks: tuple[_Mark, ...] = ()  # The marks that are later than the cursor.
        # The amounts by bucket at the cursor: what has been painted of the sums in the marks.
        self._painted: tuple[tuple[str, float], ...] = ()

    def fold(self, event: events.Event, at: float) -> None:
        """Fold in an event of this node, which happened at `at`."""
        match event:
            case events.ParentWarm() if self._mode == "start":
                self._paint_to(at, START)
                self._mode = "idle"
            # A worker that replaces a failed one has set up beside the training of the others.
            case events.Ready() if self._failed_at is not None:
                self._train_to(self._failed_at)
                self._paint_to(at, SET_UP)
                # Where this node knows a later generation already, the others have gone on without it.
                self._mode, self._failed_at = "ready" if self._newest == self._generation else "idle", None
            case events.StandsBy():
                self._left_out(at, at - event.age_s)
                if self._mode in ("idle", "ready"):
                    self._idle_to(at, event)
                    self._mode = "idle"
                self._newest = event.number
            case events.Generation():
                self._seated(event, at)
            case events.Restarted() if self._mode == "training" and self._newest_course.waits:
                self._stopped(event, at)
            case events.SetUp() | events.Recovery():
                self._stepped(event, at - event.age_s)
            case events.Progress():
                self._progressed(event, at)
            case events.WorkerEnded() if event.failure and event.generation == self._generation:
                self._failed_at = self._failed_at or at
            case events.Result():
                self._finish(at)
                self._mode = "over"

    def spans_until(self, end: float, *, lost: bool = False) -> tuple[Span, ...]:
        """All spans of the life up to `end`, without changing it.

        A node that was `lost` then has trained for as long as the others.
        """
        known = copy(self)
        known._spans = list(self._spans)
        if lost and self._next_heard_at is None:
            # Not up to this node's own last step: its worker may have been one step behind.
            known._left_out(end, min(end, self._course.step_at or end))
        known._finish(end)
        return tuple(known._spans)

    @property
    def _newest_course(self) -> GenerationCourse:
        """The course of the newest generation that this node has heard of."""
        return self._courses.get(self._newest, self._course)

    @property
    def _pauses(self) -> tuple[_Mark, ...]:
        """The newest mark, as a tuple of one, if it is in a pause after which no step is known. Else empty."""
        return tuple(mark for mark in self._marks[-1:] if mark.pausing and self._course.step <= mark.step)

    # Events.

    def _seated(self, event: events.Generation, at: float) -> None:
        # The set-up so far belongs to the generation before. Later a wait or the new course would claim its time.
        if self._mode == "seated" and (event.waits or self._newest_course.stands_since is not None):
            self._set_up_to(at)
        # This node has missed a generation: the others had gone on without it.
        if self._mode == "training" and event.number != self._newest + 1:
            self._left_out(at, self._course.step_at or at)
        if self._mode in ("idle", "ready"):
            self._idle_to(at, event)
        self._newest = event.number
        if self._mode == "waiting":
            self._paint_to(at, WAITING)
        if self._mode == "training":
            self._next_heard_at = at if self._next_heard_at is None else self._next_heard_at
        else:
            if self._mode == "start":
                self._paint_to(at, START)
            self._mode = "waiting" if event.waits else "seated"

    def _idle_to(self, end: float, until: events.Generation | None = None) -> None:
        """Paint the time without a seat up to `end`.

        After a failure of this node's worker, the others stand still too until they agree on the next generation: that
        part is `agree`. The rest is `standby` or `waiting for nodes`, by what the others do.

        `until` is the generation that ends the time without a seat, or that runs without this node as well; None: the
        time still lasts.
        """
        if self._mode == "ready" and (until is None or until.number == self._newest + 1):
            stands_by = until is None or isinstance(until, events.StandsBy)
            self._paint_to(min(end, self._newest_course.over_at) if stands_by else end, AGREE)
        course = self._courses.get(until.number - 1 if until is not None else max(self._courses, default=0))
        waits = not self._courses if course is None else course.waits or self.begin > course.left_at
        # A generation of this kind follows no other, so all nodes have waited for it.
        starts = until is not None and until.kind == "start"
        self._paint_to(end, WAITING if waits or starts else STANDBY)

    def _stopped(self, event: events.Restarted, at: float) -> None:
        """The steps have ended, and this node waits with the others for nodes, by a `Restarted` event at `at`."""
        # The phases run from the last step until now, so their sum says when the last step was.
        end = at - sum(event.phases.values()) / 1000
        self._stand_from(end, event.phases)
        self._paint_to(at, AGREE)
        self._mode, self._next_heard_at, self._failed_at = "waiting", None, None
        self._marks, self._painted = (), ()

    def _left_out(self, at: float, last: float) -> None:
        """The others have gone on without this node, as it learns `at` this time. Its `last` step was made then."""
        if self._mode == "training":
            self._train_to(last if self._failed_at is None else min(last, self._failed_at))
            self._paint_to(min(at, self._newest_course.over_at), DETECT)
            self._paint_to(at, STANDBY)
            self._mode = "idle"
        elif self._mode in ("seated", "waiting"):
            self._finish(at)
            self._mode = "idle"

    def _stepped(self, event: events.SetUp | events.Recovery, at: float) -> None:
        # The phases end with the first step, so their sum says when the pause or the set-up began.
        end = at - sum(event.phases.values()) / 1000
        if self._mode == "training":
            self._stand_from(end, event.phases)
        else:
            self._paint_to(end, SET_UP)
        # Generations in between have come to no step. If they hung, that time is `detect`, as it was shown while it
        # lasted.
        between = [course for number, course in self._courses.items() if self._generation < number < event.generation]
        stands = [(each.stands_since, each.over_at) for each in between if each.stands_since is not None]
        self._course = self._courses.get(event.generation) or GenerationCourse()
        self._generation, self._next_heard_at, self._failed_at = event.generation, None, None
        self._marks, self._painted, self._mode = (), (), "training"
        for name, took_ms in event.phases.items():
            end += took_ms / 1000
            bucket = _PHASES.get(name, SET_UP)
            if name == "first_step":
                stands = self._course.standstills_within(self._cursor, end)
            # Without a phase "start" the generation is in place: "script" is the time until the living workers got
            # their new seats, and no script has begun.
            elif name == "script" and "start" not in event.phases:
                bucket = REFORM
            elif bucket == AGREE and self._course.short and isinstance(event, events.Recovery):
                bucket = WAITING
            for since, until in stands:
                self._paint_to(min(end, since), bucket)
                self._paint_to(min(end, until), DETECT)
            self._paint_to(end, bucket)

    def _progressed(self, event: events.Progress, at: float) -> None:
        spent = ((DATA, event.data_s), (SAVE, event.save_s), (PAUSE, event.pause_s))
        mark = _Mark(at, event.step or event.beats, spent, event.pausing)
        if self._mode != "training" or event.generation != self._generation:
            return
        before = self._marks
        if before and mark.step <= before[-1].step:
            # No step has ended since the mark before. This may be a pause, which is reported only at its end.
            before = before[:-1]
        elif before and self._next_heard_at is None:
            # A step followed the mark before, so no pause that is still unreported can have begun before it.
            self._train_to(before[-1].at)
            before = self._marks
        self._marks = (*before, mark)

    # Painting.

    def _finish(self, end: float) -> None:
        """Paint the time from the cursor to `end`, by what is known now."""
        match self._mode:
            case "start" | "over":
                self._paint_to(end, START)
            case "idle" | "ready":
                self._idle_to(end)
            case "waiting":
                self._paint_to(end, WAITING)
            case "seated":
                self._set_up_to(end)
            case _:
                # Training has ended with the earliest sign of trouble. The agents need the time after that to agree.
                known = [at for at in (self._failed_at, self._next_heard_at) if at is not None]
                last = min([*known, self._course.failed_at, end])
                self._marks += tuple(mark.later(last) for mark in self._pauses if mark.at < last)
                self._train_to(last)
                self._paint_to(end if self._next_heard_at is None else min(self._next_heard_at, end), AGREE)
                self._set_up_to(end)

    def _set_up_to(self, end: float) -> None:
        """Paint the set-up up to `end`. From a standstill on the time is `detect`."""
        since = self._newest_course.stands_since
        self._paint_to(end if since is None else min(since, end), SET_UP)
        self._paint_to(end, DETECT)

    def _paint_to(self, end: float, bucket: str) -> None:
        # Events of several nodes share one course, so an end may lie before the cursor. Painted time is never changed.
        if end <= self._cursor:
            return
        _append(self._spans, Span(self._cursor, end, bucket))
        self._cursor = end
        if len(self._spans) > SPANS_MAX:
            self._spans = coarse(self._spans, SPANS_MAX // 8)

    def _train_to(self, end: float) -> None:
        """Paint training from the cursor to `end`, less the amounts in the marks.

        A node that has not heard that the others went on without it trains no longer than they did: from the last step
        of its generation to the next generation the time is `detect`, and after that `standby`.
        """
        course, last = self._course, end
        if course.over_at < end:
            last = min(end, course.step_at or course.over_at)
        for mark in self._marks:
            self._paint_piece(min(mark.at, last), mark.seconds)
        self._marks = tuple(mark for mark in self._marks if mark.at > last)
        self._paint_piece(last, self._painted)
        self._paint_to(min(end, course.over_at), DETECT)
        self._paint_to(end, STANDBY)

    def _stand_from(self, end: float, phases: Mapping[str, float]) -> None:
        """Paint training up to the last step, made at `end`, and after it the time until the change was known.

        `phases` are milliseconds, from that step on.
        """
        self._course.still_made_steps(end)
        # Later marks tell of a pause in the time of the detection, too: it stays `detect`.
        self._marks = tuple(mark for mark in self._marks if mark.at <= end)
        self._train_to(end)
        self._paint_to(end + phases.get("detect", 0.0) / 1000, DETECT)

    def _paint_piece(self, end: float, seconds: tuple[tuple[str, float], ...]) -> None:
        """Paint from the cursor to `end`: the amounts, repeated steps, standstills, and training for the rest.

        `seconds` are the sums by bucket at `end`, in the generation so far. Those at the cursor are subtracted.
        """
        if end <= self._cursor:
            return
        # Where a pause or a wait for data lies is not known, so it may be part of a standstill. Only the amounts that
        # exceed the standstills are painted before them.
        before, stands = dict(self._painted), self._course.standstills_within(self._cursor, end)
        amounts = {bucket: max(0.0, spent_s - before.get(bucket, 0.0)) for bucket, spent_s in seconds}
        besides_s = max(0.0, sum(amounts.values()) - sum(until - since for since, until in stands))
        self._painted = seconds
        for since, until in [*stands, (end, end)]:
            besides_s -= self._spend(amounts, min(since, self._cursor + besides_s))
            self._paint_to(min(since, self._course.redone_until), REDONE)
            self._paint_to(since, TRAIN)
            self._spend(amounts, until)
            self._paint_to(until, DETECT)

    def _spend(self, amounts: dict[str, float], end: float) -> float:
        """Paint `amounts` up to `end`, and take what was painted away from them. Returns the seconds that this took."""
        begin = self._cursor
        for bucket, left_s in amounts.items():
            spent_s = max(0.0, min(left_s, end - self._cursor))
            self._paint_to(self._cursor + spent_s, bucket)
            amounts[bucket] = left_s - spent_s
        return self._cursor - begin


def _append(spans: list[Span], span: Span) -> None:
    """Add `span` at the end of `spans`; if it continues the last one, make that longer."""
    last = spans[-1] if spans else None
    if last is not None and last.bucket == span.bucket and last.end == span.begin:
        span = Span(spans.pop().begin, span.end, span.bucket)
    spans.append(span)


def coarse(spans: Sequence[Span], pieces: int) -> list[Span]:
    """The same time in at most about `pieces` pieces, each divided between its buckets. Longer spans stay whole."""
    found, piece = list[Span](), list[Span]()
    piece_s = (spans[-1].end - spans[0].begin) / pieces if spans else 0.0
    for span in spans:
        # A new piece begins after a gap, when the present one is long enough, or for a long span.
        is_whole = piece and piece[-1].end - piece[0].begin >= piece_s
        if piece and (is_whole or span.begin > piece[-1].end or span.end - span.begin >= piece_s):
            _divide(piece, found)
            piece = []
        piece.append(span)
    _divide(piece, found)
    return found


def _divide(piece: Sequence[Span], found: list[Span]) -> None:
    """Add to `found` one span for each bucket of `piece`, which has no gap."""
    spent, begin = totals(piece), piece[0].begin if piece else 0.0
    for place, (bucket, spent_s) in enumerate(spent.items(), 1):
        end = piece[-1].end if place == len(spent) else min(begin + spent_s, piece[-1].end)
        if end > begin:
            _append(found, Span(begin, end, bucket))
        begin = end


def totals(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds by bucket, in the order of `BUCKETS`, without those that are empty."""
    found = dict.fromkeys(BUCKETS, 0.0)
    for span in spans:
        found[span.bucket] += span.end - span.begin
    return {name: spent_s for name, spent_s in found.items() if spent_s > 0}
