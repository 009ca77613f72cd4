"""Reads the steps of this node's workers from their status pages, a few times a second.

The workers send no message and make no system call for that.
"""

from __future__ import annotations

from dataclasses import replace

from elasticrt.ipc.status_page import StatusPage
from elasticrt.ipc.time_bounds import LOOK_IDLE_S, LOOK_S, STANDING_IN_PLACE_S
from elasticrt.liveness.stall_detector import STANDING_S, StallDetector
from elasticrt.liveness.watched_workers import WatchedWorkers

# The usual pause is the median of so many pauses.
PAUSES_KEPT = 9


class StepWatch:
    """Watches the steps of one node's workers. Times are seconds of the monotonic clock.

    Args:
        workers: the node's workers.

    Attributes:
        detector: the steps of this generation, as far as they have been seen.
        looped: whether the workers count their steps in a Loop.
        paused_since: since when no step has been expected; None while one is expected, and behind the Loop.
        is_over: whether all workers are behind their Loop.
        pauses_s: the seconds of the newest pauses.
    """

    def __init__(self, workers: WatchedWorkers) -> None:
        self._workers = workers
        self.detector, self._usual_before_s = self._new_detector(), 0.0
        self.began(0.0)

    def _new_detector(self) -> StallDetector:
        return StallDetector(self._workers.settings.options.hang_timeout_s)

    def began(self, now: float) -> None:
        """Begin anew, because workers are being started or get new seats at `now`: their pace will change."""
        self._began_at = now
        self._usual_before_s = self.usual_s
        self.detector = self._new_detector()
        self.looped = False
        self.paused_since: float | None = None
        self.is_over = False
        self.pauses_s: tuple[float, ...] = ()
        # The total time of pauses at the last look.
        self._paused_ns: int | None = None
        # When to look again. None before the first step: the message about that step wakes the agent.
        self._look_at: float | None = None
        # The same for workers that may have no Loop, and send no message: the agent wakes up for them now and then.
        self._idle_until: float | None = None

    @property
    def usual_s(self) -> float:
        """The median of the seconds of a step; in a new generation first that of the one before; 0.0 if unknown."""
        return self.detector.usual_s or self._usual_before_s

    def wake_at(self) -> float | None:
        """When to look again; None if no worker runs."""
        return self._look_at or self._idle_until

    def look(self, now: float, *, held: bool) -> None:
        """Look at the pages of all running workers, if that is due at `now`.

        `held`: whether the workers hold for a handover or wait for nodes, so that no step is expected.
        """
        if self._look_at is not None and now < self._look_at:
            return
        pages = self._workers.pages()
        self._look_at, self._idle_until = None, now + LOOK_IDLE_S if pages else None
        in_loop = bool(pages) and all(page.entered for page in pages)
        paused_ns = max((page.pause_ns for page in pages), default=0)
        if self._paused_ns is not None and paused_ns > self._paused_ns:
            self.pauses_s = (*self.pauses_s, (paused_ns - self._paused_ns) / 1e9)[-PAUSES_KEPT:]
        self._paused_ns = paused_ns
        pauses = in_loop and not held and not all(page.stepping or page.is_meeting for page in pages)
        self.is_over = in_loop and all(page.over for page in pages)
        self.paused_since = self.paused_since or now if pauses and not self.is_over else None
        if not in_loop and not (pages and all(page.beats for page in pages)):
            # Such as of workers that have ended.
            self.detector = replace(self.detector, expected=False)
            return
        # Optimizer steps before the Loop do not count: they have another pace.
        if in_loop and not self.looped:
            self.looped, self.detector = True, self._new_detector()
        in_place = all(page.in_place for page in pages)
        self._look_at = now + LOOK_S
        if in_loop:
            last = min(pages, key=lambda page: page.step if page.step_at_ns else 0)
            step, at_ns, ready_ns = step_of(last), last.step_at_ns, last.restored_at_ns
        else:
            # Workers may make different numbers of optimizer steps, so the numbers cannot tell which worker is behind.
            # The worker whose newest step is oldest counts.
            last = min(pages, key=lambda page: page.beat_at_ns)
            step, at_ns, ready_ns = sum(page.beats for page in pages), last.beat_at_ns, last.begun_at_ns
        # Otherwise the page is still that of the generation before: its worker has not taken its new seat. The time
        # since it was ready then lasted for many steps, and must not count as the length of one.
        ready_at = ready_ns / 1e9 if ready_ns / 1e9 >= self._began_at else 0.0
        detector = replace(self.detector, standing_s=STANDING_IN_PLACE_S if in_place else STANDING_S)
        self.detector = detector.looked(step, at_ns / 1e9, now, expected=not (held or pauses), ready_at=ready_at)


def last_ns(page: StatusPage) -> int:
    """When the wait for a worker's next step began (CLOCK_MONOTONIC, ns); 0 before the first step can come."""
    return max(page.step_at_ns, page.beat_at_ns, page.restored_at_ns)


def step_of(page: StatusPage) -> int:
    """The last step that a worker has finished, or resumes from; without a Loop the number of its optimizers' steps."""
    return page.entered - 1 if page.entered else page.beats
