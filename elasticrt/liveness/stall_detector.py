"""Whether a node's workers get on: standing steps are evidence that somebody is gone, and too long a stand a failure.

Pure. The agent looks at the status pages of its workers a few times a second (`Sight`), and `StallDetector` remembers
what matters of it. Steps of a Loop are expected only from an epoch's first batch to its last: not in a pause, while
saving, or while a generation starts. Of a script without a Loop only the steps of its optimizers are seen, and nothing
is known of what it does between two of them: there the second of these is never said. Two things can be said of steps
that are expected and do not come:

* `standing_since`: for several times as long as usual. When a machine loses its power nobody is told, and the others
  hang in their collective: this is what they can see of it. It is a reason to ask around, no more.
* `stalled_s`: for so long that it cannot be right. Everybody may be alive; still nothing moves, and only new workers
  will help.

How long is long follows from the run's own pace. A watcher that was away itself (a process that was stopped, a machine
that was suspended) counts anew from its return.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from elasticrt.ipc.time_bounds import AWAY_S, PLACES_S, SAY_AFTER_S, STOPPED_S, STOPPED_UNEXPECTED_S

STEPS_KEPT = 9
"""The usual time of a step is the median of so many measurements: neither one slow step nor a fast one matters."""


@dataclass(frozen=True)
class StallLimits:
    """What is too long, in seconds.

    Attributes:
        standing_s, standing_factor: steps stand when none came for so long, and for so many times the usual.
        hang_s, hang_factor: nothing moves when none came for so long, and for so many times the longest time that was
            seen in this generation; `hang_s` 0: that is never said.
        hang_from, early_factor: before a generation's step with this number it takes so many times as long. First steps
            compile, and do other things for the first time; nothing tells that from a hang.
    """

    standing_s: float = 0.75
    standing_factor: float = 4.0
    hang_s: float = 600.0
    hang_factor: float = 20.0
    hang_from: int = 20
    early_factor: float = 3.0


IDLE_SHARE = 0.01
"""Of one core: threads of torch that only wait use less, and any work uses more."""


@dataclass(frozen=True)
class Sight:
    """All workers of a node at one moment, by the one that is furthest behind.

    `step` was finished at `at` (seconds of this machine's monotonic clock; both 0 before the first of this generation);
    `expected`: steps are to be expected of all of them; `ready_at`: when the worker was ready for its first step (of a
    script without a Loop: when it began), 0 when that is not known.
    """

    step: int
    at: float
    expected: bool
    ready_at: float = 0.0


@dataclass(frozen=True)
class StallDetector:
    """What has been seen of one generation's steps.

    Attributes:
        limits: what is too long.
        step: the newest step; `since`: from when on the next one is waited for.
        first: the first step that was seen, 0 before.
        expected: whether it was expected at the last look, at `looked_at`.
        recent: how long single steps have taken lately.
        longest: the longest time between two steps.
    """

    limits: StallLimits = StallLimits()
    step: int = 0
    since: float = 0.0
    first: int = 0
    expected: bool = False
    looked_at: float = 0.0
    recent: tuple[float, ...] = ()
    longest: float = 0.0

    def looked(self, sight: Sight, now: float) -> StallDetector:
        """After another look at `now` (seconds of the monotonic clock), which saw `sight`."""
        away = self.looked_at > 0 and now - self.looked_at > AWAY_S
        pace = replace(self, looked_at=now, expected=sight.expected)
        if not sight.step:
            return pace
        moved = sight.step - self.step
        if not self.first:
            # Until more is known: all there was since then, with what is done for the first time, is taken for a step.
            known = (sight.at - sight.ready_at,) if sight.ready_at else ()
            return replace(pace, step=sight.step, first=sight.step, since=sight.at, recent=known)
        if away:
            return replace(pace, step=sight.step, since=now)
        if not (self.expected and sight.expected):
            return replace(pace, step=sight.step, since=now)
        if moved == 0:
            return pace
        took = max(0.0, sight.at - self.since)
        recent = (*self.recent, took / moved)[-STEPS_KEPT:]
        return replace(pace, step=sight.step, since=sight.at, recent=recent, longest=max(self.longest, took))

    def standing_since(self, now: float) -> float | None:
        """From when on the steps have been standing still for longer than usual; None while they do not, at `now`.

        The same answer as long as they stand: whoever was asked after that time was asked for this reason.
        """
        if not self.expected or not self.recent:
            return None
        at = self.since + max(self.limits.standing_s, self.limits.standing_factor * statistics.median(self.recent))
        return at if now >= at else None

    def stalled_s(self, now: float, *, part: float = 1.0) -> float | None:
        """For how long nothing has moved at `now`, if that is too long to be right (or `part` of too long)."""
        if not self.expected or not self.limits.hang_s or not self.first:
            return None
        age, limit = now - self.since, max(self.limits.hang_s, self.limits.hang_factor * self.longest)
        if self.step - self.first + 1 < self.limits.hang_from:
            limit *= self.limits.early_factor
        return age if age >= part * limit else None


@dataclass(frozen=True)
class Stand:
    """How often it was looked closer at steps that stand still, and when the other nodes are to be asked next.

    `step` names the stand: the sum of all workers' steps.
    """

    step: int = 0
    times: int = 0
    ask_at: float | None = None

    def looked(self, step: int, at: float, now: float, bound_s: float) -> Stand:
        """After a look at `now`: the newest step ended `at`. A closer look is due after `bound_s`, twice that, ..."""
        before = self if step == self.step else Stand(step)
        if now - at < bound_s * 2**before.times:
            return before
        return Stand(step, before.times + 1, now + PLACES_S)


@dataclass(frozen=True)
class Stopped:
    """Which workers a signal has stopped: local ranks, with when that was first seen; `looked_at`: the last look."""

    since: Mapping[int, float] = field(default_factory=dict)
    looked_at: float = 0.0

    def looked(self, stopped: Collection[int], now: float) -> Stopped:
        """After another look at `now`, which saw these ranks `stopped`. One that was away itself has seen nothing."""
        before = {} if now - self.looked_at > AWAY_S else self.since
        return Stopped({rank: before.get(rank, now) for rank in stopped}, now)

    def over(self, now: float, awaited: Collection[int]) -> list[int]:
        """Those that have been stopped for too long by `now`; the `awaited` ones, for whom others wait, sooner."""
        bounds = {rank: STOPPED_S if rank in awaited else STOPPED_UNEXPECTED_S for rank in self.since}
        return sorted(rank for rank, at in self.since.items() if now - at >= bounds[rank])


@dataclass(frozen=True)
class Idle:
    """What has been seen of workers that others wait for, since `since`.

    Attributes:
        cpu_s: the processor time that they had used at `idle_since`, and have not exceeded by much since.
        said: people were told.
        over: they have done nothing for too long.
    """

    since: float
    cpu_s: float
    idle_since: float
    said: bool = False
    over: bool = False

    def looked(self, cpu_s: float, now: float, limit_s: float) -> Idle:
        """After another look at `now`, which saw `cpu_s`. `limit_s`: how long workers may do nothing, 0 for ever."""
        said = self.said or now >= self.since + SAY_AFTER_S
        if cpu_s - self.cpu_s >= IDLE_SHARE * (now - self.idle_since):
            return replace(self, cpu_s=cpu_s, idle_since=now, said=said)
        over = self.over or (limit_s > 0 and now - self.idle_since >= limit_s)
        return replace(self, said=said, over=over)
