"""Reads the steps of this node's workers from their status pages, a few times a second.

It costs the workers no message and no system call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elasticrt.ipc.status_page import StatusPage
from elasticrt.ipc.time_bounds import LOOK_IDLE_S, LOOK_S, STANDING_IN_PLACE_S
from elasticrt.liveness.stall_detector import STANDING_S, Sight, StallDetector
from elasticrt.liveness.watched_workers import WatchedWorkers

# The usual pause is the median of this many.
PAUSES_KEPT = 9


class StepWatch:
    """The pace of the workers of one node. Times are seconds of the monotonic clock.

    Attributes:
        pace: their steps in this generation.
        looped: whether they count their steps in a Loop.
        paused_since: since when no step has been expected; None: one is.
        pauses_s: the length of the newest pauses.
    """

    def __init__(self, workers: WatchedWorkers) -> None:
        self._workers = workers
        self.pace, self._usual_before_s = self._new_pace(), 0.0
        self.began(0.0)

    def _new_pace(self) -> StallDetector:
        return StallDetector(self._workers.settings.options.hang_timeout_s)

    def began(self, now: float) -> None:
        """Workers are being started, or get new seats, at `now`: their pace will be another one."""
        self._began_at = now
        self._usual_before_s = self.usual_s
        self.pace = self._new_pace()
        self.looped = False
        self.paused_since: float | None = None
        self.pauses_s: tuple[float, ...] = ()
        self._paused_ns: int | None = None  # The time in pauses so far.
        self._look_at: float | None = None  # None before the first step, which wakes the agent.
        self._idle_until: float | None = None

    @property
    def usual_s(self) -> float:
        """The median seconds of a step; until it is known that of the generation before, 0.0 for none."""
        return self.pace.usual_s or self._usual_before_s

    def wake_at(self) -> float | None:
        """When to look again."""
        return self._look_at or self._idle_until

    def look(self, now: float, *, held: bool) -> None:
        """Look at the pages of all running workers, if it is time `now`.

        `held`: the workers stop after their step for a handover, so no step is expected.
        """
        if self._look_at is not None and now < self._look_at:
            return
        pages = self._workers.look()
        self._look_at, self._idle_until = None, now + LOOK_IDLE_S if pages else None
        in_loop = bool(pages) and all(page.entered for page in pages)
        paused_ns = max((page.pause_ns for page in pages), default=0)
        if self._paused_ns is not None and paused_ns > self._paused_ns:
            self.pauses_s = (*self.pauses_s, (paused_ns - self._paused_ns) / 1e9)[-PAUSES_KEPT:]
        self._paused_ns = paused_ns
        if in_loop and not held and not all(page.stepping for page in pages):
            self.paused_since = self.paused_since or now
        else:
            self.paused_since = None
        if not in_loop and not (pages and all(page.beats for page in pages)):
            return
        if in_loop and not self.looped:  # Steps of optimizers before the Loop do not count.
            self.looped, self.pace = True, self._new_pace()
        in_place = all(page.in_place for page in pages)
        self._look_at = now + LOOK_S
        sight = (sight_of_steps if in_loop else sight_of_beats)(pages, held=held)
        if sight.ready_at < self._began_at:
            # A page of before: its worker has not taken its new seat. The time since it was ready was many steps.
            sight = replace(sight, ready_at=0.0)
        pace = replace(self.pace, standing_s=STANDING_IN_PLACE_S if in_place else STANDING_S)
        self.pace = pace.looked(sight, now)


def last_ns(page: StatusPage) -> int:
    """When the wait for a worker's next step began, in CLOCK_MONOTONIC nanoseconds; 0 before its first one."""
    return max(page.step_at_ns, page.beat_at_ns, page.restored_at_ns)


def step_of(page: StatusPage) -> int:
    """The last step that a worker has done, or begins after; without a Loop the number of its optimizers' steps."""
    return page.entered - 1 if page.entered else page.beats


def sight_of_steps(pages: Sequence[StatusPage], *, held: bool) -> Sight:
    """The sight of workers with a Loop: the one that is furthest behind. `held`: no step is expected."""
    last = min(pages, key=lambda page: page.step if page.step_at_ns else 0)
    expected = not held and all(page.stepping for page in pages)
    return Sight(step_of(last), last.step_at_ns / 1e9, expected, last.restored_at_ns / 1e9)


def sight_of_beats(pages: Sequence[StatusPage], *, held: bool) -> Sight:
    """The same without a Loop: workers may make different numbers of steps, so the oldest newest one counts."""
    last = min(pages, key=lambda page: page.beat_at_ns)
    return Sight(sum(page.beats for page in pages), last.beat_at_ns / 1e9, not held, last.begun_at_ns / 1e9)
