"""Detects that a node's workers make no steps. Pure.

The agent looks at the status pages of its workers a few times a second (`StepWatch`). The steps of a Loop are
expected from the wait for an epoch's first batch to the epoch's last batch, except in a pause, in a save, and at the
start of a generation. There are two findings about expected steps that do not come. Their limits follow from the run's
own pace:

* `standing_since`: no step for several times as long as usual. After a power loss the other nodes see only this,
  because their collectives hang. The finding is a reason to probe, and no more.
* `stalled_s`: no step for so long that only new workers help, even if all nodes are alive. This finding does not apply
  to a script without a Loop, of which only the optimizers' steps are known.

If the agent itself was stopped or suspended, it counts from its return.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from elasticrt.ipc.time_bounds import AWAY_S, SAY_AFTER_S

# The usual time of a step is the median of so many measurements, so that a single slow or fast step does not matter.
STEPS_KEPT = 9
# Steps stand still after the larger one of so many seconds and so many times the usual step.
STANDING_S, STANDING_FACTOR = 0.75, 4.0
# The part of a stall's limit after which there is a warning.
WARN_PART = 0.5
# Steps stall after the larger one of `hang_s` seconds and so many times the generation's longest step.
HANG_FACTOR = 20.0
# For a generation's first EARLY_STEPS steps the limit of a stall is EARLY_FACTOR times as long: these steps compile,
# and compiling cannot be told from a hang.
EARLY_STEPS, EARLY_FACTOR = 20, 3.0
# A worker that uses less than this share of one core does nothing. Threads of torch that only wait use less, and any
# work uses more.
IDLE_SHARE = 0.01


@dataclass(frozen=True)
class StallDetector:
    """The steps of one generation, as far as they have been seen. Times are seconds of the monotonic clock.

    Attributes:
        hang_s: the seconds without a step after which a stall is possible, as the user has chosen; 0: there is no
            stall.
        standing_s: the seconds without a step after which steps may count as standing.
        step: the newest step.
        since: when the wait for the next step began.
        first: the first step of this generation that was seen; 0 before.
        expected: whether steps were expected at the last look.
        looked_at: when that look was.
        recent: the seconds of the latest steps, at most STEPS_KEPT.
        longest: the longest time between two steps, in seconds.
    """

    hang_s: float
    standing_s: float = STANDING_S
    step: int = 0
    since: float = 0.0
    first: int = 0
    expected: bool = False
    looked_at: float = 0.0
    recent: tuple[float, ...] = ()
    longest: float = 0.0

    @property
    def usual_s(self) -> float:
        """The median of the seconds of a step; 0.0 while it is unknown."""
        return statistics.median(self.recent) if self.recent else 0.0

    def looked(self, step: int, at: float, now: float, *, expected: bool, ready_at: float = 0.0) -> StallDetector:
        """Return the detector after a look, which saw the worker that is furthest behind.

        Args:
            step: the last step of that worker.
            at: when that step ended; 0 before the first step of this generation.
            now: when the look is.
            expected: whether steps are expected of all workers.
            ready_at: when the worker was ready for its first step (without a Loop: when the script began); 0 if
                unknown.
        """
        away = self.looked_at > 0 and now - self.looked_at > AWAY_S
        looked = replace(self, looked_at=now, expected=expected)
        goes_on = self.expected and expected
        if not at:
            return replace(looked, step=step, since=self.since if goes_on and not away else now)
        moved = step - self.step
        if not self.first:
            # The first step that is seen. Until there is a second one, the time since `ready_at` counts as its length.
            known = (at - ready_at,) if ready_at else ()
            return replace(looked, step=step, first=step, since=at, recent=known)
        # The time of a pause, or of the agent's own absence, is not the time of a step. The wait begins now.
        if away or not goes_on:
            return replace(looked, step=step, since=now)
        if moved == 0:
            return looked
        took = max(0.0, at - self.since)
        recent = (*self.recent, took / moved)[-STEPS_KEPT:]
        return replace(looked, step=step, since=at, recent=recent, longest=max(self.longest, took))

    def standing_since(self, now: float) -> float | None:
        """When the steps began to stand still for longer than usual; None if they do not stand still at `now`.

        The answer stays the same for one stand. So a probe after that time counts as made for this stand.
        """
        if not self.expected or not self.recent:
            return None
        at = self.since + max(self.standing_s, STANDING_FACTOR * self.usual_s)
        return at if now >= at else None

    def stalled_s(self, now: float, *, part: float = 1.0) -> float | None:
        """The seconds without a step at `now` if they are at least `part` of a stall's limit; else None."""
        if not self.expected or not self.hang_s:
            return None
        age, limit = now - self.since, max(self.hang_s, HANG_FACTOR * self.longest)
        if not self.first or self.step - self.first + 1 < EARLY_STEPS:
            limit *= EARLY_FACTOR
        return age if age >= part * limit else None


@dataclass(frozen=True)
class WatchedStandstill:
    """One stand of the steps, and the closer looks at the workers during the stand.

    Attributes:
        step: the sum of all workers' steps, which identifies the stand.
        looks: the number of closer looks so far.
        ask_at: the times at which to ask the other nodes.
    """

    step: int = 0
    looks: int = 0
    ask_at: tuple[float, ...] = ()

    def looked(self, step: int, at: float, now: float, bound_s: float, ask_s: Iterable[float]) -> WatchedStandstill:
        """Return the stand at `now`, with one more look if that is due.

        Args:
            step: the sum of all workers' steps. Another sum begins another stand.
            at: when the newest step ended.
            now: seconds of the monotonic clock.
            bound_s: the seconds without a step after which the first look is due. The next ones are due after twice the
                time, four times, and so on.
            ask_s: the seconds from a look to each question to the other nodes.
        """
        before = self if step == self.step else WatchedStandstill(step)
        if now - at < bound_s * 2**before.looks:
            return before
        return WatchedStandstill(step, before.looks + 1, (*before.ask_at, *(now + each for each in ask_s)))

    def without_due_questions(self, now: float) -> WatchedStandstill:
        """Return the stand without the questions that are due at `now`."""
        return replace(self, ask_at=tuple(at for at in self.ask_at if at > now))


def stopped_since(
    before: Mapping[int, float], looked_at: float, stopped: Collection[int], now: float
) -> dict[int, float]:
    """When each process that a signal has stopped was first seen stopped, by process id.

    If the agent itself was stopped or suspended since the last look, all times count from now: the workers may have
    been stopped with the agent, and may be about to go on like it.

    Args:
        before: the answer of the last look.
        looked_at: when that look was, in seconds of the monotonic clock.
        stopped: the processes that are stopped at this look.
        now: when this look is.
    """
    known = {} if now - looked_at > AWAY_S else before
    return {pid: known.get(pid, now) for pid in stopped}


@dataclass(frozen=True)
class IdleWorkers:
    """Workers that run on after others have ended.

    Attributes:
        since: when the others had ended.
        cpu_s: the seconds of processor time that the workers had used at `idle_since`. They have hardly used more
            since.
        idle_since: since when the workers do nothing.
        is_reported: whether to report that they run on: SAY_AFTER_S after the others have ended. Behind the training
            the script may rightly work on, so there they must have done nothing for so long.
        is_over: whether they have done nothing for too long.
    """

    since: float
    cpu_s: float
    idle_since: float
    is_reported: bool = False
    is_over: bool = False

    def looked(self, cpu_s: float, now: float, limit_s: float, *, may_work: bool = False) -> IdleWorkers:
        """Return the value after a look at `now`.

        Args:
            cpu_s: the seconds of processor time that the workers have used in all.
            now: seconds of the monotonic clock.
            limit_s: how long the workers may do nothing; 0: for ever.
            may_work: whether these are all workers of the node, behind the training.
        """
        reported = self.is_reported or (not may_work and now >= self.since + SAY_AFTER_S)
        if cpu_s - self.cpu_s >= IDLE_SHARE * (now - self.idle_since):
            return replace(self, cpu_s=cpu_s, idle_since=now, is_reported=reported)
        over = self.is_over or (limit_s > 0 and now - self.idle_since >= limit_s)
        return replace(self, is_reported=reported or now >= self.idle_since + SAY_AFTER_S, is_over=over)
