"""Where the time of a node went: each moment of an agent's life is in exactly one bucket. Pure.

A life is painted from left to right with a cursor. Each event gives the time from the cursor to itself a bucket, so the
spans add up to the life, whatever the events are. Two things are known late. A pause is reported at its end, so
training is painted only up to the beginning of the next pause. The time that workers spend besides their steps
(`Progress`) is an amount, which is painted at the beginning of the interval in which it was spent.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import groupby

from elasticrt import events

TRAIN, REDONE, DATA, SAVE, PAUSE = "train", "redone steps", "data wait", "checkpoint stall", "pause"
DETECT, AGREE, REFORM, SET_UP, RESTORE = "detect", "agree", "re-form", "set-up", "restore"
START, WAITING, STANDBY = "start", "waiting for nodes", "standby"

BUCKETS: Mapping[str, str] = {
    TRAIN: "steps that count",
    REDONE: "steps that had been done before, and are done again",
    DATA: "the loader was waited for",
    SAVE: "the training stood still for a checkpoint, or a copy of the state",
    PAUSE: "in `loop.pause`: evaluation, for example",
    DETECT: "from the last step until it was known that something had happened; all of a hang",
    AGREE: "until the next generation was agreed",
    REFORM: "old workers ended, living ones took their new seats, the process group was made",
    SET_UP: "workers started, and the script came to its `Loop`",
    RESTORE: "the state was loaded, or taken over from another worker",
    START: "the agent or the worker parent started, or the agent ended",
    WAITING: "there were fewer nodes than the run needs",
    STANDBY: "other nodes trained without this one",
}
"""Each bucket with its meaning, the best use of time first."""

_PHASES = {
    "detect": DETECT,
    "agree": AGREE,
    "stop": REFORM,
    "start": SET_UP,
    "script": SET_UP,
    "init": REFORM,
    "loop": SET_UP,
    "restore": RESTORE,
    "first_step": TRAIN,
}

SPANS_MAX = 4000
"""A life with more spans gets coarser ones of training."""

ROUNDED_S = 0.001
"""Events and phases are rounded: times that differ by less are the same."""

STANDS_KEPT = 64
"""How many times in which steps stood still are kept of a generation."""

LATE_S = 1.0
"""A step may be reported so long after it was made."""

PACE_S = 30.0
"""The steps per second of a run that goes on are those of this time, as far as its newest generation has made some."""

PIECES = 2000
"""The time of a run is divided so finely where its nodes are in different buckets."""

_TRAINING = frozenset({TRAIN, REDONE, DATA, SAVE, PAUSE})
_PIECE = 64


@dataclass(frozen=True)
class Span:
    """A piece of time."""

    # `begin`, `end`: seconds.
    begin: float
    end: float
    bucket: str  # How it was spent.


@dataclass(frozen=True)
class _Mark:
    """The time and content of a `Progress` event: the step, and the `seconds` by bucket in the generation so far."""

    at: float
    step: int
    seconds: tuple[tuple[str, float], ...]
    pausing: bool

    def later(self, at: float) -> _Mark:
        """The mark `at` a later time of the same pause."""
        seconds = tuple((name, spent_s + (at - self.at) * (name == PAUSE)) for name, spent_s in self.seconds)
        return _Mark(at, self.step, seconds, pausing=True)


@dataclass
class Standstill:
    """A time in which no step was made."""

    # `since`, `until`: seconds; infinity: it goes on, or its generation has ended in it.
    since: float
    until: float = math.inf
    culprit: events.Culprit | None = None  # The newest finding about whom the others wait for; None: there is none.
    by: str = ""  # The node that has told it first.


@dataclass
class Course:
    """How a generation went, as the events of all its nodes tell. Times are in seconds."""

    # `step`, `step_at`: the last step, and when it was done; 0 before.
    step: int = 0
    step_at: float = 0.0
    over_at: float = math.inf  # When the next generation began.
    # When the last of its agents had ended, if none has gone on; whoever came later has waited for others.
    left_at: float = math.inf
    failed_at: float = math.inf  # When a worker failed or was lost, after which it has made no step.
    redone_until: float = -math.inf  # Until when its steps had been done before; minus infinity: none had.
    redone_to: int = 0  # The last of those steps.
    saved: bool = False  # Whether a checkpoint was committed in it.
    waits: bool = False  # Whether it makes no step, because there are too few nodes.
    # The times in which its steps stood still, the newest ones; the last one may have no end yet.
    stands: deque[Standstill] = field(default_factory=lambda: deque(maxlen=STANDS_KEPT))
    # The steps of the last `PACE_S` that events tell of, and when they were made, since they stood still.
    paces: deque[tuple[int, float]] = field(default_factory=deque)
    # The first word, and when it came, that it ends because its steps stand still; None: it does not.
    hung: tuple[float, events.Stalled] | None = None

    def over(self, at: float) -> None:
        """The next generation begins at `at`."""
        self.over_at = at
        self.paces.clear()

    def stepped(self, step: int, at: float) -> None:
        """A `step` is done at `at`."""
        if step <= self.step:
            return
        if self.redone_until == math.inf and step >= self.redone_to:
            # Not every step has an event: those in between are taken to come at an even pace.
            before_at = self.step_at or at
            share = (self.redone_to - self.step) / (step - self.step) if self.step else 1.0
            self.redone_until = before_at + share * (at - before_at)
        self.goes_on(at)
        if at > self.failed_at + LATE_S:
            self.failed_at = math.inf
        self.step, self.step_at = step, at
        self.paces.append((step, at))
        while at - self.paces[0][1] > PACE_S and len(self.paces) > 2:
            self.paces.popleft()

    @property
    def speed(self) -> float | None:
        """Steps per second, lately; None: not known."""
        if len(self.paces) < 2 or self.paces[-1][1] <= self.paces[0][1]:
            return None
        (first, since), (last, until) = self.paces[0], self.paces[-1]
        return (last - first) / (until - since)

    def goes_on(self, at: float) -> None:
        """There are steps again at `at`, as far as there were none."""
        if self.stands_since is not None:
            self.stands[-1].until = at
            self.paces.clear()

    def stood(self, step: int, since: float, blamed: events.Culprit | None = None, by: str = "") -> None:
        """After `step` there has been none from `since` on, `by` the word of a node.

        Some ranks may have made one step more than those that are `blamed`, and wait for them in the next.
        """
        if step + (blamed is not None) < self.step:
            return
        step = max(step, self.step)
        if self.step and step == self.step:  # The workers were looked at a moment before `now`.
            since = min(since, self.step_at)
        if not self.stands or self.stands[-1].until < since:
            self.stands.append(Standstill(since))
        stand = self.stands[-1]
        stand.since, stand.until = min(since, stand.since), math.inf
        if blamed is not None:
            known = stand.culprit is not None and stand.culprit.reason == blamed.reason
            stand.culprit, stand.by = blamed, stand.by if known else by
        if self.step:
            self.step, self.step_at = step, stand.since

    @property
    def stands_since(self) -> float | None:
        """Since when there has been no step; None: steps are made, as far as is known."""
        return self.stands[-1].since if self.stands and self.stands[-1].until == math.inf else None

    @property
    def blamed(self) -> events.Culprit | None:
        """The newest finding about whom the others wait for; None: the steps go on, or there is none."""
        return self.stands[-1].culprit if self.stands_since is not None else None

    def stood_within(self, begin: float, end: float) -> list[tuple[float, float]]:
        """The times from `begin` to `end` in which the steps stood still."""
        times = [(max(begin, each.since), min(end, each.until)) for each in self.stands]
        return [(since, until) for since, until in times if since < until]


class LifeSpans:
    """The spans of one agent's life.

    Args:
        begin: when it began, in seconds.
        courses: of the generations, by number; shared by all nodes.
    """

    def __init__(self, begin: float, courses: Mapping[int, Course]) -> None:
        self.begin = self._cursor = begin
        self._courses = courses
        self._course = Course()  # Of the newest generation that has trained here.
        self._spans: list[Span] = []
        self._spans_max = SPANS_MAX
        self._mode = "start"  # Later "idle" (without a seat), "ready" (the same, and the others may not have gone on),
        # "seated" (before the first step), "training", "waiting" (in a seat, for nodes), or "over".
        self._generation = 0  # The newest generation that has trained here.
        self._newest = 0  # The newest one with a seat for this node.
        self._workers_at: float | None = None  # When the workers of the first seat ran.
        self._turn_at: float | None = None  # When the generation after the training one was known.
        self._failed_at: float | None = None
        self._marks: tuple[_Mark, ...] = ()  # Those after the cursor.
        self._base: tuple[tuple[str, float], ...] = ()  # The seconds by bucket at the cursor.
        self._before: _Mark | None = None  # The newest mark before the first step of the newest generation.

    def tell(self, event: events.Event, at: float, *, short: bool = False) -> None:
        """Fold in an event of this node at `at`. `short`: before its generation there were too few nodes."""
        match event:
            case events.ParentWarm() if self._mode == "start":
                self._to(at, START)
                self._mode = "idle"
            case events.Ready() if self._failed_at is not None:  # This worker replaces one that has failed.
                self._train_to(self._failed_at)
                self._to(at, SET_UP)
                # The others may have agreed to go on without it before.
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
                self._stepped(event, at - event.age_s, short=short)
            case events.Progress():
                self._progressed(event, at)
            case events.WorkerEnded() if event.failure and event.generation == self._generation:
                self._failed_at = self._failed_at or at
            case events.WorkersStarted() if self._mode == "seated":
                self._workers_at = at
            case events.Result():
                unseen = self._mode == "seated" and not self._newest_course.saved  # A script without a Loop.
                if event.status == "succeeded" and unseen and self._workers_at is not None:
                    self._to(self._workers_at, SET_UP)
                    self._to(at, TRAIN)
                self._finish(at)
                self._mode = "over"

    def until(self, end: float, *, lost: bool = False) -> tuple[Span, ...]:
        """All spans of the life up to `end`. With `lost` its node was lost then, and has trained as long as others."""
        known = copy(self)
        known._spans = list(self._spans)
        if lost and self._turn_at is None:
            known._left_out(end, min(end, self._course.step_at or end))  # A worker may have been behind a step.
        known._finish(end)
        return tuple(known._spans)

    def known_at(self, now: float) -> dict[str, float]:
        """Seconds by bucket of what is final, and of what is known up to `now`: a wait without a step, a hang."""
        known = copy(self)
        known._spans = list(self._spans)
        first_since = self._newest_course.stands_since
        stands_since = self._course.stands_since
        if self._mode in ("waiting", "idle", "ready"):
            known._finish(now)
        elif self._mode == "seated" and first_since is not None:  # What its set-up was is told with its first step.
            known._cursor = max(self._cursor, first_since)
            known._to(now, DETECT)
        elif self._mode == "training" and stands_since is not None and self._turn_at is self._failed_at is None:
            known._train_to(max([stands_since, *(mark.at for mark in self._pauses)]))
            if not self._pauses:
                known._to(min(now, self._course.failed_at), DETECT)
                known._to(now, AGREE)
        return totals(known._spans)

    @property
    def _newest_course(self) -> Course:
        """That of the newest generation with a seat for this node."""
        return self._courses.get(self._newest, self._course)

    @property
    def _pauses(self) -> tuple[_Mark, ...]:
        """The newest mark, if it is in a pause after which no step is known."""
        return tuple(mark for mark in self._marks[-1:] if mark.pausing and self._course.step <= mark.step)

    # Events.

    def _seated(self, event: events.Generation, at: float) -> None:
        if self._mode == "seated" and (event.waits or self._newest_course.stands_since is not None):
            self._set_up_to(at)
        if self._mode == "training" and event.number != self._newest + 1:
            self._left_out(at, self._course.step_at or at)
        if self._mode in ("idle", "ready"):
            self._idle_to(at, event)
        self._newest, self._before = event.number, None
        if self._mode == "waiting":
            self._to(at, WAITING)
        if self._mode == "training":
            self._turn_at = at if self._turn_at is None else self._turn_at
        else:
            if self._mode == "start":
                self._to(at, START)
            self._mode = "waiting" if event.waits else "seated"

    def _idle_to(self, end: float, until: events.Generation | None = None) -> None:
        """Paint the time without a seat: what the others do, now or in the generation before `until`.

        They wait as well until they have agreed on the one that follows the failure of this node's worker.
        """
        if self._mode == "ready" and (until is None or until.number == self._newest + 1):
            stands_by = until is None or isinstance(until, events.StandsBy)
            self._to(min(end, self._newest_course.over_at) if stands_by else end, AGREE)
        course = self._courses.get(until.number - 1 if until is not None else max(self._courses, default=0))
        waits = not self._courses if course is None else course.waits or self.begin > course.left_at
        starts = until is not None and until.kind == "start"
        self._to(end, WAITING if waits or starts else STANDBY)

    def _stopped(self, event: events.Restarted, at: float) -> None:
        """The steps have ended, and this node waits with the others: the phases say since when."""
        end = at - sum(event.phases.values()) / 1000
        self._course.step_at = max(self._course.step_at, end)
        self._stand_from(end, event.phases)
        self._to(at, AGREE)
        self._mode, self._turn_at, self._failed_at = "waiting", None, None
        self._marks, self._base = (), ()

    def _left_out(self, at: float, last: float) -> None:
        """The others have gone on without this node, which knows it `at`, and has made its `last` step before."""
        if self._mode == "training":
            self._train_to(last if self._failed_at is None else min(last, self._failed_at))
            self._to(min(at, self._newest_course.over_at), DETECT)
            self._to(at, STANDBY)
            self._mode = "idle"
        elif self._mode in ("seated", "waiting"):
            self._finish(at)
            self._mode = "idle"

    def _stepped(self, event: events.SetUp | events.Recovery, at: float, *, short: bool) -> None:
        end = at - sum(event.phases.values()) / 1000
        if self._mode == "training":
            self._course.step_at = max(self._course.step_at, end)
            self._stand_from(end, event.phases)
        else:
            self._to(end, SET_UP)
        # Generations in between have come to no step. Where that was a hang, it is told as while it lasted.
        between = [course for number, course in self._courses.items() if self._generation < number < event.generation]
        stands = [(each.stands_since, each.over_at) for each in between if each.stands_since is not None]
        self._course = self._courses.get(event.generation) or Course()
        self._generation, self._turn_at, self._failed_at = event.generation, None, None
        self._marks, self._base, self._mode = (), (), "training"
        starts, loop = "start" in event.phases, "restore" in event.phases
        for name, took_ms in event.phases.items():
            end += took_ms / 1000
            bucket = _PHASES.get(name, SET_UP)
            if bucket == TRAIN and loop:
                # What the workers have spent besides their first step counts anew from then on.
                self._marks = (self._before,) if self._before is not None else ()
                self._train_to(end)
                self._marks, self._base = (), ()
                continue
            if bucket == TRAIN:  # A script without a Loop does not say when it is ready for its first step.
                bucket, stands = SET_UP, self._course.stood_within(self._cursor, end)
            elif name == "script" and not starts:  # In place: a living worker got its new seat.
                bucket = REFORM
            elif short and bucket == AGREE:
                bucket = WAITING
            for since, until in stands:
                self._to(min(end, since), bucket)
                self._to(min(end, until), DETECT)
            self._to(end, bucket)

    def _progressed(self, event: events.Progress, at: float) -> None:
        spent = ((DATA, event.data_s), (SAVE, event.save_s), (PAUSE, event.pause_s))
        mark = _Mark(at, event.step or event.beats, spent, event.pausing)
        if self._mode != "training" or event.generation != self._generation:
            self._before = mark if event.generation == self._newest else self._before
            return
        before = self._marks
        if before and mark.step <= before[-1].step:
            before = before[:-1]  # No step has ended since: this may be a pause, which is reported at its end.
        elif before and self._turn_at is None:
            self._train_to(before[-1].at)  # Steps followed that mark, so there was no pause before it.
            before = self._marks
        self._marks = (*before, mark)

    # Painting.

    def _finish(self, end: float) -> None:
        """Paint all the time up to `end`, as far as it is known now."""
        match self._mode:
            case "start" | "over":
                self._to(end, START)
            case "idle" | "ready":
                self._idle_to(end)
            case "waiting":
                self._to(end, WAITING)
            case "seated":
                self._set_up_to(end)
            case _:
                known = [at for at in (self._failed_at, self._turn_at) if at is not None]
                last = min([*known, self._course.failed_at, end])
                self._marks += tuple(mark.later(last) for mark in self._pauses if mark.at < last)
                self._train_to(last)
                self._to(end if self._turn_at is None else min(self._turn_at, end), AGREE)
                self._set_up_to(end)

    def _set_up_to(self, end: float) -> None:
        """Paint the set-up up to `end`, less pauses and the time in which the first step is known not to come."""
        if self._before is not None and (paused_s := dict(self._before.seconds)[PAUSE]):
            self._to(self._before.at - paused_s, SET_UP)
            self._to(end if self._before.pausing else self._before.at, PAUSE)
        since = self._newest_course.stands_since
        self._to(end if since is None else min(since, end), SET_UP)
        self._to(end, DETECT)

    def _to(self, end: float, bucket: str) -> None:
        if end <= self._cursor:
            return
        last = self._spans[-1] if self._spans else None
        if last is not None and last.bucket == bucket:
            self._spans[-1] = Span(last.begin, end, bucket)
        else:
            self._spans.append(Span(self._cursor, end, bucket))
        self._cursor = end
        if len(self._spans) > self._spans_max:
            self._spans = coarser(self._spans)
            self._spans_max = max(SPANS_MAX, 2 * len(self._spans))

    def _train_to(self, end: float) -> None:
        """Paint training from the cursor to `end`, less the amounts of the marks.

        A node that does not know that the others have gone on without it trains no longer than they did.
        """
        course, last = self._course, end
        if course.over_at < end:
            last = min(end, course.step_at or course.over_at)
        for mark in self._marks:
            self._piece(min(mark.at, last), mark.seconds)
        self._marks = tuple(mark for mark in self._marks if mark.at > last)
        self._piece(last, self._base)
        self._to(min(end, course.over_at), DETECT)
        self._to(end, STANDBY)

    def _stand_from(self, end: float, phases: Mapping[str, float]) -> None:
        """Paint training up to the last step, at `end`, and then the time until something was known, by the `phases`.

        A pause that is told until the next generation is agreed, and fits into that time, was in it.
        """
        detect_s, agree_s = phases.get("detect", 0.0) / 1000, phases.get("agree", 0.0) / 1000
        until, known = end + detect_s, dict(self._base)
        for mark in self._marks:
            known = dict(mark.seconds) if mark.at <= end else known
        told = [dict(mark.seconds) for mark in self._marks if end < mark.at <= until + agree_s + ROUNDED_S]
        paused_s = told[-1][PAUSE] - known.get(PAUSE, 0.0) if told else 0.0
        if 0.0 < paused_s <= detect_s + agree_s + ROUNDED_S:
            self._marks = tuple(mark for mark in self._marks if mark.at <= end)
        else:
            paused_s = 0.0
        self._train_to(end)
        self._to(min(until, end + paused_s), PAUSE)
        self._to(until, DETECT)

    def _piece(self, end: float, seconds: tuple[tuple[str, float], ...]) -> None:
        """Paint from the cursor to `end`: the amounts, what was done again, and where the steps stood still, that.

        Pauses and waits for data may be a part of the time without a step: they are not known to the moment. What
        that has no room for is painted first.
        """
        if end <= self._cursor:
            return
        before, stands = dict(self._base), self._course.stood_within(self._cursor, end)
        amounts = {bucket: max(0.0, spent_s - before.get(bucket, 0.0)) for bucket, spent_s in seconds}
        besides_s = max(0.0, sum(amounts.values()) - sum(until - since for since, until in stands))
        self._base = seconds
        for since, until in [*stands, (end, end)]:
            besides_s -= self._spend(amounts, min(since, self._cursor + besides_s))
            self._to(min(since, self._course.redone_until), REDONE)
            self._to(since, TRAIN)
            self._spend(amounts, until)
            self._to(until, DETECT)

    def _spend(self, amounts: dict[str, float], end: float) -> float:
        """Paint the amounts up to `end`, less those that were painted before. Returns the seconds that it took."""
        begin = self._cursor
        for bucket, left_s in amounts.items():
            spent_s = max(0.0, min(left_s, end - self._cursor))
            self._to(self._cursor + spent_s, bucket)
            amounts[bucket] = left_s - spent_s
        return self._cursor - begin


def coarse(spans: Sequence[Span], pieces: int) -> list[Span]:
    """The same time in at most so many `pieces`, each divided between its buckets; spans that are longer stay whole."""
    mixed = _Mixed((spans[-1].end - spans[0].begin) / pieces if spans else 0.0)
    for span in spans:
        mixed.add(span.begin, span.end, {span.bucket: 1})
    mixed.flush()
    return mixed.spans


def coarser(spans: Sequence[Span]) -> list[Span]:
    """Fewer spans with the same totals: up to 64 neighbours of training become one span for each bucket."""
    found: list[Span] = []
    for trains, group in groupby(spans, lambda span: span.bucket in _TRAINING):
        mine = list(group)
        for begin in range(0, len(mine), _PIECE):
            found += coarse(mine[begin : begin + _PIECE], 1) if trains else mine[begin : begin + _PIECE]
    return found


def together(lives: Iterable[tuple[str, Iterable[Span]]], seats: Sequence[tuple[float, Collection[str]]]) -> list[Span]:
    """The spans of the whole run: each moment is shared equally by the nodes that have a seat then.

    Where no seated node lives, all living ones share it, and those that stand by are in `detect`: they do not know yet,
    unless nothing is told of any seated node, as in one node's own events.
    A time without any has no span. What the nodes share is drawn in the order of `BUCKETS`, in pieces of a
    two-thousandth of the run.

    Args:
        lives: the node and the spans of each life.
        seats: the beginning of each generation, and its nodes.
    """
    edges: list[tuple[float, int, int, str]] = []  # When, -1: seats, 0: an end, 1: a beginning; of which; the bucket.
    names = []
    for number, (node, spans) in enumerate(lives):
        names.append(node)
        for span in spans:
            edges += [(span.begin, 1, number, span.bucket), (span.end, 0, number, span.bucket)]
    known = frozenset(names)
    first, last = (min(edges)[0], max(edges)[0]) if edges else (0.0, 0.0)
    mixed = _Mixed((last - first) / PIECES)
    edges += [(begin, -1, number, "") for number, (begin, _) in enumerate(seats)]
    seated: Collection[str] = ()
    there: dict[int, str] = {}  # The bucket of each life.
    of_all, of_seated, since = Counter[str](), Counter[str](), 0.0
    for at, kind, number, bucket in sorted(edges):
        if at > since:
            if not of_seated and not known.isdisjoint(seated):  # The others stand by for a generation that is no more.
                counts = Counter(of_all)
                counts[DETECT] += counts.pop(STANDBY, 0)
                mixed.add(since, at, +counts)
            else:
                mixed.add(since, at, of_seated or of_all)
        since = at
        if kind < 0:
            seated = seats[number][1]
            of_seated = Counter(name for life, name in there.items() if names[life] in seated)
            continue
        for counted in (of_all, of_seated) if names[number] in seated else (of_all,):
            counted[bucket] += 1 if kind else -1
            if not counted[bucket]:
                del counted[bucket]
        if kind:
            there[number] = bucket
        else:
            there.pop(number, None)
    mixed.flush()
    return mixed.spans


class _Mixed:
    """Spans in which nodes of different buckets share the time. `piece_s`: the shortest ones that are kept apart."""

    def __init__(self, piece_s: float) -> None:
        self.spans: list[Span] = []
        self._piece_s = piece_s
        self._begin = self._end = 0.0
        self._seconds: dict[str, float] = {}

    def add(self, begin: float, end: float, counts: Mapping[str, int]) -> None:
        """From `begin` to `end` there are so many nodes in each bucket."""
        if not counts:
            return
        alone = len(counts) == 1
        if self._seconds and (
            begin > self._end
            or (self._end - self._begin >= self._piece_s and not (alone and counts.keys() == self._seconds.keys()))
            or (alone and end - begin >= self._piece_s and counts.keys() != self._seconds.keys())
        ):
            self.flush()
        if not self._seconds:
            self._begin = begin
        self._end, total = end, sum(counts.values())
        for bucket, count in counts.items():
            self._seconds[bucket] = self._seconds.get(bucket, 0.0) + (end - begin) * count / total

    def flush(self) -> None:
        """What was added becomes spans."""
        at, shared = self._begin, [(name, self._seconds[name]) for name in BUCKETS if name in self._seconds]
        for place, (bucket, spent_s) in enumerate(shared):
            end = self._end if place == len(shared) - 1 else min(self._end, at + spent_s)
            last = self.spans[-1] if self.spans else None
            if last is not None and last.bucket == bucket and last.end == at:
                self.spans[-1] = Span(last.begin, end, bucket)
            elif end > at:
                self.spans.append(Span(at, end, bucket))
            at = end
        self._seconds = {}


def totals(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds by bucket, in the order of `BUCKETS`, without empty ones."""
    found = dict.fromkeys(BUCKETS, 0.0)
    for span in spans:
        found[span.bucket] += span.end - span.begin
    return {name: spent_s for name, spent_s in found.items() if spent_s > 0}
