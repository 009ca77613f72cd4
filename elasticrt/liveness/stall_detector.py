"""Whether a node's workers make steps. Pure.

The agent looks at the status pages of its workers a few times a second (`Sight`). A Loop's steps are expected from the
wait for an epoch's first batch to its last one, except in a pause, a save, or the start of a generation. When expected
steps do not come, there are two findings, whose limits follow from the run's own pace:

* `standing_since`: none for several times as long as usual. After a power loss the other nodes see only this, because
  their collectives hang. It is a reason to probe, and no more.
* `stalled_s`: none for so long that only new workers will help, even if all nodes are alive. Not for a script without a
  Loop: of that only the steps of its optimizers are known.

An agent that was stopped or suspended itself counts from its return.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from elasticrt.ipc.time_bounds import AWAY_S, SAY_AFTER_S, STOPPED_S

# The usual time of a step is the median of this many measurements: a single slow or fast step does not matter.
STEPS_KEPT = 9
# Steps stand after this many seconds, and this many times the usual step.
STANDING_S, STANDING_FACTOR = 0.75, 4.0
# The part of the limit of a stall after which there is a warning.
WARN_PART = 0.5
# They stall after `hang_s` seconds, and this many times the generation's longest step.
HANG_FACTOR = 20.0
# In a generation's first steps the limit of a stall is longer: they compile, which cannot be told from a hang.
EARLY_STEPS, EARLY_FACTOR = 20, 3.0
# Of one core. Threads of torch that only wait use less, and any work uses more.
IDLE_SHARE = 0.01


@dataclass(frozen=True)
class Sight:
    """The worker of a node that is furthest behind, at one moment. Times are seconds of the monotonic clock."""

    # `step`, `at`: its last step, and when that ended: 0 before the first of this generation.
    step: int
    at: float
    expected: bool  # Steps are expected of all workers.
    # When it was ready for its first step (without a Loop: when the script began); 0 if not known.
    ready_at: float = 0.0


@dataclass(frozen=True)
class StallDetector:
    """The steps of one generation, as far as they have been seen."""

    hang_s: float  # The least seconds of a stall, as the user has chosen; 0: there is none.
    standing_s: float = STANDING_S  # The least seconds of standing steps.
    # `step`: the newest step; `since`: the beginning of the wait for the next one.
    step: int = 0
    since: float = 0.0
    first: int = 0  # The first step of this generation that was seen; 0 before.
    expected: bool = False  # Whether steps were expected at the last look, at `looked_at`.
    looked_at: float = 0.0
    recent: tuple[float, ...] = ()  # Seconds of single steps, lately.
    longest: float = 0.0  # The longest time between two steps, in seconds.

    @property
    def usual_s(self) -> float:
        """The median seconds of a step; 0.0 before it is known."""
        return statistics.median(self.recent) if self.recent else 0.0

    def looked(self, sight: Sight, now: float) -> StallDetector:
        """The detector after a look at `now` (seconds of the monotonic clock), which saw `sight`."""
        away = self.looked_at > 0 and now - self.looked_at > AWAY_S
        pace = replace(self, looked_at=now, expected=sight.expected)
        goes_on = self.expected and sight.expected
        if not sight.at:
            return replace(pace, step=sight.step, since=self.since if goes_on and not away else now)
        moved = sight.step - self.step
        if not self.first:
            # Until there is a second step, all the time since then counts as the time of a step.
            known = (sight.at - sight.ready_at,) if sight.ready_at else ()
            return replace(pace, step=sight.step, first=sight.step, since=sight.at, recent=known)
        if away or not goes_on:
            return replace(pace, step=sight.step, since=now)
        if moved == 0:
            return pace
        took = max(0.0, sight.at - self.since)
        recent = (*self.recent, took / moved)[-STEPS_KEPT:]
        return replace(pace, step=sight.step, since=sight.at, recent=recent, longest=max(self.longest, took))

    def standing_since(self, now: float) -> float | None:
        """Since when the steps have stood still for longer than usual; None if they do not, at `now`.

        The answer stays the same while they stand, so a probe after that time was made for this reason.
        """
        if not self.expected or not self.recent:
            return None
        at = self.since + max(self.standing_s, STANDING_FACTOR * self.usual_s)
        return at if now >= at else None

    def stalled_s(self, now: float, *, part: float = 1.0) -> float | None:
        """Seconds without a step at `now`, if they are at least `part` of the limit; else None."""
        if not self.expected or not self.hang_s:
            return None
        age, limit = now - self.since, max(self.hang_s, HANG_FACTOR * self.longest)
        if not self.first or self.step - self.first + 1 < EARLY_STEPS:
            limit *= EARLY_FACTOR
        return age if age >= part * limit else None


@dataclass(frozen=True)
class Stand:
    """The closer looks at workers whose steps stand still."""

    step: int = 0  # Identifies the stand: the sum of all workers' steps.
    times: int = 0  # The number of closer looks.
    asks: tuple[float, ...] = ()  # When to ask the other nodes.

    def looked(self, step: int, at: float, now: float, bound_s: float, ask_s: Iterable[float]) -> Stand:
        """The stand at `now`. The newest step ended `at`; looks are due after `bound_s`, twice that, and so on, and
        `ask_s` after each look the other nodes are asked."""
        before = self if step == self.step else Stand(step)
        if now - at < bound_s * 2**before.times:
            return before
        return Stand(step, before.times + 1, (*before.asks, *(now + each for each in ask_s)))

    def asked(self, now: float) -> Stand:
        """The stand once the questions that are due at `now` have been put."""
        return replace(self, asks=tuple(at for at in self.asks if at > now))


@dataclass(frozen=True)
class Stopped:
    """Workers that a signal has stopped: `since` when, by process id, as seen until the last look, at `looked_at`."""

    since: Mapping[int, float] = field(default_factory=dict)
    looked_at: float = 0.0

    def looked(self, stopped: Collection[int], now: float) -> Stopped:
        """After a look at `now`, which saw these processes `stopped`. It counts anew if the agent was away itself."""
        before = {} if now - self.looked_at > AWAY_S else self.since
        return Stopped({pid: before.get(pid, now) for pid in stopped}, now)

    def over(self, now: float) -> frozenset[int]:
        """Those that have been stopped for too long at `now`."""
        return frozenset(pid for pid, at in self.since.items() if now - at >= STOPPED_S)


@dataclass(frozen=True)
class Idle:
    """Workers that run on after others have ended."""

    since: float  # When the others ended.
    cpu_s: float  # The seconds of processor time that they had used at `idle_since`, and have hardly exceeded since.
    idle_since: float
    said: bool = False  # They are to be reported.
    over: bool = False  # They have done nothing for too long.

    def looked(self, cpu_s: float, now: float, limit_s: float) -> Idle:
        """After a look at `now`, which saw `cpu_s`. `limit_s`: how long they may do nothing; 0: for ever."""
        said = self.said or now >= self.since + SAY_AFTER_S
        if cpu_s - self.cpu_s >= IDLE_SHARE * (now - self.idle_since):
            return replace(self, cpu_s=cpu_s, idle_since=now, said=said)
        over = self.over or (limit_s > 0 and now - self.idle_since >= limit_s)
        return replace(self, said=said, over=over)
