"""Divides the time of each agent's life into buckets: every moment is in exactly one. Pure.

A life is painted from left to right with a cursor. Each event assigns the time between the cursor and itself to a
bucket and moves the cursor, so the spans always add up to the life, whatever the events are and whichever are missing.
Two things are known late. A pause (`loop.pause`) is reported at its end, so training is painted only up to the point
where the next pause could begin. The time that workers spend besides their steps (`Progress`) is an amount of seconds
without a position; it is painted at the beginning of the interval in which it was spent.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass

from elasticrt import events
from elasticrt.story.buckets import (
    AGREE,
    DATA,
    DETECT,
    PAUSE,
    REDONE,
    REFORM,
    RESTORE,
    SAVE,
    SET_UP,
    SPANS_MAX,
    STANDBY,
    START,
    TRAIN,
    WAITING,
    Span,
    append,
    coarse,
)
from elasticrt.story.generations import Chapter

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


class LifeSpans:
    """The spans of one agent's life.

    Events must come in the order of time. What is painted is final; what is not known yet is guessed by `spans_until`.

    Args:
        begin: when the agent started, in seconds since 1970.
        courses: the courses of all generations by number. The nodes of a run share this mapping, and `Generations`
            changes it.
    """

    def __init__(self, begin: float, courses: Mapping[int, Chapter]) -> None:
        self.begin = self._cursor = begin
        self._courses = courses
        # The course of the generation `_generation`.
        self._course = Chapter(0)
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
            known._left_out(end, min(end, self._course.last_step_at or end))
        known._finish(end)
        return tuple(known._spans)

    @property
    def _newest_course(self) -> Chapter:
        """The course of the newest generation that this node has heard of."""
        return self._courses.get(self._newest, self._course)

    @property
    def _pauses(self) -> tuple[_Mark, ...]:
        """The newest mark, as a tuple of one, if it is in a pause after which no step is known. Else empty."""
        return tuple(mark for mark in self._marks[-1:] if mark.pausing and self._course.last_step <= mark.step)

    # Events.

    def _seated(self, event: events.Generation, at: float) -> None:
        # The set-up so far belongs to the generation before. Later a wait or the new course would claim its time.
        if self._mode == "seated" and (event.waits or self._newest_course.stands_since is not None):
            self._set_up_to(at)
        # This node has missed a generation: the others had gone on without it.
        if self._mode == "training" and event.number != self._newest + 1:
            self._left_out(at, self._course.last_step_at or at)
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
            self._paint_to(min(end, self._newest_course.end) if stands_by else end, AGREE)
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
            self._paint_to(min(at, self._newest_course.end), DETECT)
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
        stands = [(each.stands_since, each.end) for each in between if each.stands_since is not None]
        self._course = self._courses.get(event.generation) or Chapter(0)
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
        append(self._spans, Span(self._cursor, end, bucket))
        self._cursor = end
        if len(self._spans) > SPANS_MAX:
            self._spans = coarse(self._spans, SPANS_MAX // 8)

    def _train_to(self, end: float) -> None:
        """Paint training from the cursor to `end`, less the amounts in the marks.

        A node that has not heard that the others went on without it trains no longer than they did: from the last step
        of its generation to the next generation the time is `detect`, and after that `standby`.
        """
        course, last = self._course, end
        if course.end < end:
            last = min(end, course.last_step_at or course.end)
        for mark in self._marks:
            self._paint_piece(min(mark.at, last), mark.seconds)
        self._marks = tuple(mark for mark in self._marks if mark.at > last)
        self._paint_piece(last, self._painted)
        self._paint_to(min(end, course.end), DETECT)
        self._paint_to(end, STANDBY)

    def _stand_from(self, end: float, phases: Mapping[str, float]) -> None:
        """Paint training up to the last step, made at `end`, and after it the time until the change was known.

        `phases` are milliseconds, from that step on.
        """
        self._course.last_step_at = max(self._course.last_step_at, end)
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
