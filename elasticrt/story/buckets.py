"""Divides the time of each agent's life into buckets: every moment is in exactly one. Pure.

A life is a list of parts, each from its beginning to that of the next one: training, a wait, a phase of a pause. An
event begins a part, and may tell that it began before the event itself. Then it takes the place of what seemed to
follow. Parts of which no event can tell any more are painted as spans of time. So the spans always add up to the life,
whatever the events are and whichever are missing.

What all nodes of a generation share is not in the parts, but drawn over them when they are painted: standstills, and
steps that are done again. The time that workers spend besides their steps (`Progress`) is an amount of seconds without
a position. It is painted at the beginning of the interval in which it was spent. A pause or a save is reported at its
end, so training is painted only up to the point where the next one could begin.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

from elasticrt import events
from elasticrt.story.generations import Chapter

TRAIN, REDONE, DATA, SAVE, PAUSE = "train", "redone steps", "data wait", "checkpoint stall", "pause"
DETECT, AGREE, REFORM, SET_UP, RESTORE = "detect", "agree", "re-form", "set-up", "restore"
START, WAITING, STANDBY = "start", "waiting for nodes", "standby"

BUCKETS: Mapping[str, str] = {
    TRAIN: "steps that count",
    REDONE: "steps that had been done before, and are done again",
    DATA: "waiting for the data loader",
    SAVE: "training was blocked by a checkpoint or a copy of the state",
    PAUSE: "in `loop.pause`, such as an evaluation, or behind the training",
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

# The bucket of each phase of a `Recovery` or `SetUp` event. Some depend on the kind of restart: see `_resumed`.
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


@dataclass(frozen=True)
class Span:
    """An interval of time, in one bucket."""

    # `begin` and `end` are in seconds since 1970.
    begin: float
    end: float
    bucket: str  # A key of `BUCKETS`.


_IDLE, _READY = "idle", "ready"
"""What a node without a seat does. "ready": it has replaced a failed worker, while the others may still be in the old
generation. The bucket depends on what the others do, so it is known later."""


@dataclass(frozen=True)
class _Part:
    """What a node does from `begin` on, until its next part begins."""

    begin: float
    bucket: str  # A bucket, `_IDLE` or `_READY`.
    chapter: Chapter | None = None  # The generation whose standstills are `detect` in this part, if there is one.


@dataclass(frozen=True)
class _Mark:
    """A `Progress` event as a point in time.

    `step` is the last step that all workers of the node have finished. `seconds` are the amounts by bucket, summed
    since the node's first step in the generation. `under_way` is PAUSE or SAVE while a worker is in one, otherwise "".
    """

    at: float
    step: int
    seconds: Mapping[str, float]
    under_way: str

    def moved(self, at: float) -> _Mark:
        """The mark as it is at another time: what is under way has lasted until then."""
        spent = dict(self.seconds)
        if self.under_way:
            spent[self.under_way] = max(0.0, spent[self.under_way] + at - self.at)
        return replace(self, at=at, seconds=spent)


class LifeSpans:
    """The spans of one agent's life.

    Events must come in the order of time. What is painted is final. The parts of the life after that are corrected by
    each event that tells of an earlier time: the phases of a `Recovery` begin at the last step before it.

    Args:
        begin: when the agent started, in seconds since 1970.
        chapters: all generations by number. The nodes of a run share this mapping, and `Generations` changes it.
    """

    def __init__(self, begin: float, chapters: Mapping[int, Chapter]) -> None:
        self.begin = self._cursor = begin
        self._chapters = chapters
        self._spans: list[Span] = []  # What is painted: the time up to the cursor.
        # The rest of the life, from the cursor on. Training is always the first part.
        self._parts = [_Part(begin, START)]
        # The newest generation in which this node has made a step.
        self._chapter = Chapter(0)
        # The newest generation that this node has heard of, with a seat for it or without one.
        self._newest = Chapter(0)
        # When a worker of this node failed in `_chapter`; infinity: none has.
        self._failed_at = math.inf
        self._mark: _Mark | None = None  # The newest mark, if it is later than the cursor.
        # The amounts by bucket at the cursor: what has been painted of the sums in the marks.
        self._painted: Mapping[str, float] = {}

    def fold(self, event: events.Event, at: float) -> None:
        """Fold in an event of this node, which happened at `at`."""
        match event:
            case events.ParentWarm() if self._bucket == START:
                self._turn(at, _IDLE)
            # A worker that replaces a failed one has set up beside the training of the others.
            case events.Ready() if self._failed_at < math.inf:
                self._end_idle(at)
                self._turn(self._failed_at, SET_UP)
                # Where this node knows a later generation already, the others have gone on without it.
                self._turn(at, _READY if self._newest is self._chapter else _IDLE)
                self._settle(at)
                self._failed_at = math.inf
            case events.StandsBy():
                self._end_idle(at, event)
                self._chapter.was_awake(at - event.age_s)
                self._leave_out(at, at - event.age_s)
                self._settle(at)
                self._newest = self._known(event.number)
            case events.Generation():
                self._seated(event, at)
            case events.Restarted() if self._trains and self._newest.waits:
                self._resumed(event, at)
            case events.SetUp() | events.Recovery():
                self._resumed(event, at - event.age_s)
            case events.Progress() if self._trains and event.generation == self._chapter.number:
                self._progressed(event, at)
            case events.WorkerEnded() if event.failure and 0 < event.generation == self._chapter.number:
                self._failed_at = min(self._failed_at, at)
            case events.Result():
                self._close(at)
                self._turn(at, START)

    def spans_until(self, end: float, *, lost: bool = False) -> tuple[Span, ...]:
        """All spans of the life up to `end`, without changing it.

        A node that was `lost` then has trained for as long as the others.
        """
        known = copy(self)
        known._spans = list(self._spans)
        if lost and self._bucket == TRAIN:
            # Not up to this node's own last step: its worker may have been one step behind.
            known._leave_out(end, self._chapter.last_step_at or end)
        known._close(end)
        return tuple(known._spans)

    @property
    def _bucket(self) -> str:
        """What the node does now."""
        return self._parts[-1].bucket

    @property
    def _trains(self) -> bool:
        """Whether the node has trained since the cursor, and nothing final is known of the time after that."""
        return self._parts[0].bucket == TRAIN

    def _known(self, number: int) -> Chapter:
        """The generation with `number`."""
        return self._chapters.get(number) or Chapter(number)

    # Events.

    def _seated(self, event: events.Generation, at: float) -> None:
        before = self._newest
        # This node has missed a generation: the others had gone on without it.
        if self._trains and event.number != before.number + 1:
            self._leave_out(at, self._chapter.last_step_at or at)
            self._settle(at)
        self._end_training(at)
        self._end_idle(at, event)
        self._newest = self._known(event.number)
        # The next step tells when training has ended, and how a set-up went that goes on. But if a generation hung
        # without a step, that time is `detect`, whatever is told later.
        goes_on = self._trains or (self._bucket == SET_UP and not event.waits)
        hung = self._bucket == SET_UP and before.standstill is not None
        if hung or not goes_on:
            self._settle(at)
        if event.waits and not self._trains:
            self._wait(at)
        else:
            self._turn(at, SET_UP, self._newest)

    def _wait(self, at: float) -> None:
        """The newest generation makes no step. With enough nodes it waits until another one is agreed."""
        if self._newest.lacks_nodes:
            self._turn(at, WAITING)
        else:
            self._turn(at, AGREE, self._newest)

    def _leave_out(self, at: float, last: float) -> None:
        """The others have gone on without this node, as it learns `at` this time. Its `last` step was made then."""
        if self._trains:
            last = min(last, self._chapter.end, self._failed_at)
            # Now it is known until when the node has trained.
            self._parts = self._parts[:1]
            self._turn(last, DETECT)
            self._turn(max(last, min(at, self._newest.end)), STANDBY)
        if self._bucket != START:
            self._turn(at, _IDLE)

    def _resumed(self, event: events.SetUp | events.Recovery | events.Restarted, at: float) -> None:
        """A pause or the set-up has ended with a step at `at`, or the node waits from then on for more nodes."""
        # The phases end then, so their sum says when the pause or the set-up began.
        end = at - sum(event.phases.values()) / 1000
        if self._trains:
            # Now it is known until when the node has trained.
            self._parts = self._parts[:1]
            self._chapter.last_step_at = max(self._chapter.last_step_at, end)
            self._chapter.was_awake(end)
            # A later mark tells of a pause in the time of the detection, too: it stays `detect`.
            self._mark = self._mark if self._mark is not None and self._mark.at <= end else None
        chapter = self._known(event.generation)
        for name, took_ms in event.phases.items():
            bucket = _PHASES.get(name, SET_UP)
            # Without a phase "start" the generation is in place: "script" is the time until the living workers got
            # their new seats, and no script has begun.
            if name == "script" and "start" not in event.phases:
                bucket = REFORM
            elif bucket == AGREE and chapter.short and isinstance(event, events.Recovery):
                bucket = WAITING
            self._turn(end, bucket, chapter if name == "first_step" else None)
            end += took_ms / 1000
        if isinstance(event, events.Restarted):
            self._wait(at)
        else:
            self._turn(at, TRAIN)
        self._settle(at)
        if self._trains:
            self._chapter = chapter
        self._mark, self._painted, self._failed_at = None, {}, math.inf

    def _progressed(self, event: events.Progress, at: float) -> None:
        """Another mark. What lies before the mark before it is final, unless that time may be a pause or a save."""
        step, before = event.step or event.beats, self._mark
        # If a step followed the mark before, none that is still unreported can have begun before that mark.
        if before is not None and step > before.step and self._bucket == TRAIN and before.at <= self._chapter.end:
            self._settle(before.at)
        spent = {DATA: event.data_s, SAVE: event.save_s, PAUSE: event.pause_s}
        self._mark = _Mark(at, step, spent, PAUSE if event.pausing else SAVE if event.saving else "")

    # What is known only later, as it seems now.

    def _end_training(self, at: float) -> None:
        """Training has ended with the earliest sign of trouble up to `at`. The agents need the time after it to agree.

        A node that has not heard that the others went on without it trains no longer than they did: from the last step
        of its generation to the next generation the time is `detect`, and after that `standby`.
        """
        if self._bucket != TRAIN:
            return
        chapter, mark = self._chapter, self._mark
        last = min(at, chapter.failed_at, self._failed_at)
        # A pause or a save lasts until a step is known.
        lasts = mark is not None and bool(mark.under_way) and chapter.last_step <= mark.step
        if mark is not None and lasts and mark.at < last:
            self._mark = mark.moved(last)
        if chapter.end < last:
            self._turn(chapter.end if lasts else chapter.last_step_at or chapter.end, DETECT)
            self._turn(chapter.end, STANDBY)
        self._turn(last, AGREE)

    def _end_idle(self, at: float, until: events.Generation | None = None) -> None:
        """The time without a seat ends at `at`, or lasts until then.

        After a failure of this node's worker, the others stand still too until they agree on the next generation: that
        part is `agree`. The rest is `standby` or `waiting for nodes`, by what the others do.

        `until` is the generation that ends the time without a seat, or that runs without this node as well; None: the
        time still lasts.
        """
        if self._bucket not in (_IDLE, _READY):
            return
        begin = self._parts[-1].begin
        if self._bucket == _READY and (until is None or until.number == self._newest.number + 1):
            stands_by = until is None or isinstance(until, events.StandsBy)
            self._turn(begin, AGREE)
            begin = max(begin, min(at, self._newest.end)) if stands_by else at
        before = self._chapters.get(until.number - 1 if until is not None else max(self._chapters, default=0))
        waits = not self._chapters if before is None else before.lacks_nodes or self.begin > before.left_at
        # A generation of this kind follows no other, so all nodes have waited for it.
        starts = until is not None and until.kind == "start"
        self._turn(begin, WAITING if waits or starts else STANDBY)

    # Painting.

    def _turn(self, at: float, bucket: str, chapter: Chapter | None = None) -> None:
        """The node is in `bucket` from `at` on, whatever seemed to follow. What is painted stays."""
        at = max(at, self._cursor)
        first, *more = self._parts
        self._parts = [first, *(part for part in more if part.begin < at), _Part(at, bucket, chapter)]

    def _close(self, end: float) -> None:
        """Paint all up to `end`, by what is known now."""
        self._end_training(end)
        self._end_idle(end)
        self._settle(end)

    def _settle(self, end: float) -> None:
        """Paint all parts up to `end`. The last one goes on."""
        last = self._parts[-1]
        for part, until in zip(self._parts, [*(each.begin for each in self._parts[1:]), end], strict=True):
            if part.bucket == TRAIN and self._mark is not None:
                mark = self._mark.moved(until) if self._mark.at > until else self._mark
                self._paint_training(mark.at, mark.seconds)
            if part.bucket == TRAIN:
                self._paint_training(until, self._painted)
                continue
            for since, goes_on in part.chapter.standstills_within(part.begin, until) if part.chapter else ():
                self._paint_to(since, part.bucket)
                self._paint_to(goes_on, DETECT)
            self._paint_to(until, part.bucket)
        self._parts = [replace(last, begin=self._cursor)]

    def _paint_to(self, end: float, bucket: str) -> None:
        # Events of several nodes share one generation, so an end may lie before the cursor. Painted time is never
        # changed.
        if end <= self._cursor:
            return
        _append(self._spans, Span(self._cursor, end, bucket))
        self._cursor = end
        if len(self._spans) > SPANS_MAX:
            self._spans = coarse(self._spans, SPANS_MAX // 8)

    def _paint_training(self, end: float, seconds: Mapping[str, float]) -> None:
        """Paint from the cursor to `end`: the amounts, repeated steps, standstills, and training for the rest.

        `seconds` are the sums by bucket at `end`, in the generation so far. Those at the cursor are subtracted.
        """
        if end <= self._cursor:
            return
        # Where a pause or a wait for data lies is not known, so it may be part of a standstill. Only the amounts that
        # exceed the standstills are painted before them.
        stands = self._chapter.standstills_within(self._cursor, end)
        amounts = {bucket: max(0.0, spent_s - self._painted.get(bucket, 0.0)) for bucket, spent_s in seconds.items()}
        besides_s = max(0.0, sum(amounts.values()) - sum(until - since for since, until in stands))
        self._painted = seconds
        for since, until in [*stands, (end, end)]:
            besides_s -= self._spend(amounts, min(since, self._cursor + besides_s))
            self._paint_to(min(since, self._chapter.redone_until), REDONE)
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
