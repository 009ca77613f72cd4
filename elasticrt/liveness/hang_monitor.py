"""Notices workers that do not make progress.

A worker that a signal has stopped is ended soon (`stopped`). In all other cases the agent first takes the workers'
stacks, for one of these reasons (`Stacks.why`):

* "closer": no step for longer than usual. The stacks tell for which rank the others wait, see `culprit_search`.
* "stalled": no step for much longer. The first finding is a warning, the second one a failure.
* "late": workers have not taken their new seats.
* "paused": no step was expected for `--hang-timeout`: `loop.pause`, a save, code between two epochs. This is reported,
  and has no other consequence.
* "waited_for": workers run on after others have ended. One rank may rightly save or evaluate alone, so this is a
  failure only if the sessions of these workers use next to no processor time for `--hang-timeout`. The same if all
  workers are behind their Loop and do not end, after END_FACTOR times as long: they may wait in a collective for a rank
  that is busy on another node.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from elasticrt import events
from elasticrt.ipc.failure import Failure
from elasticrt.ipc.time_bounds import LOOK_IDLE_S, LOOK_S, SAY_AFTER_S, STOPPED_S
from elasticrt.liveness.culprit import doing
from elasticrt.liveness.culprit_search import CulpritSearch
from elasticrt.liveness.stacks import Stacks, keep, main_thread
from elasticrt.liveness.stall_detector import IDLE_SHARE, WARN_PART, IdleWorkers, stopped_since
from elasticrt.liveness.step_watch import StepWatch
from elasticrt.liveness.watched_workers import WatchedWorkers
from elasticrt.workers.failures import stalled_failure

END_FACTOR = 3.0
"""How many times --hang-timeout all workers may do nothing behind their Loop. By default this is half an hour, as
long as a collective may take."""


_TRAINING = "the training"
"""Stands for what has ended where all workers are behind their Loop."""


class HangMonitor:
    """Watches the workers of one node. Only the agent's main thread uses it. Times are seconds of the monotonic clock.

    Attributes:
        steps: reads the workers' steps from their status pages.
        search: finds the ranks for which the others wait.
    """

    def __init__(self, workers: WatchedWorkers) -> None:
        self._workers = workers
        self.steps = StepWatch(workers)
        self.search = CulpritSearch(workers, self.steps)
        self._hang_s = workers.settings.options.hang_timeout_s
        self._stopped_since: dict[int, float] = {}
        self._stopped_looked_at = 0.0
        self._stopped_look_at: float | None = None
        self.began(0.0)

    def began(self, now: float) -> None:
        """Begin anew, because workers are being started or get new seats at `now`."""
        self.steps.began(now)
        self.search.began()
        # The step and the part of the limit for which stacks were taken last.
        self._stacks_taken_at = (0, 0.0)
        # The begin of the pause that has been reported.
        self._reported_pause: float | None = None
        self._idle: IdleWorkers | None = None
        self._idle_look_at: float | None = None
        # Whether these workers did nothing when their stacks were asked for.
        self._is_idle = False
        # When `are_busy` was called last, and the processor time that the late workers had used by then. The infinity
        # makes the first answer False.
        self._cpu_used = now, math.inf

    def wake_at(self) -> list[float | None]:
        """The times at which to look again, or None."""
        return [self.steps.wake_at(), self._idle_look_at, *self.search.wake_at(), self._stopped_look_at]

    def stopped(self, now: float, pids: Collection[int]) -> frozenset[int]:
        """Return those of the worker processes `pids` that a signal has stopped for at least STOPPED_S.

        Without --hang-timeout, and between two looks, there are none.
        """
        if not self._hang_s or now - self._stopped_looked_at < LOOK_S:
            return frozenset()
        # A process in a debugger is in state "t" and is left alone. `began` does not reset `_stopped_since`, because a
        # worker may get another seat while it is stopped.
        stopped = [pid for pid in pids if self._workers.state_of(pid) == "T"]
        self._stopped_since = stopped_since(self._stopped_since, self._stopped_looked_at, stopped, now)
        self._stopped_looked_at, self._stopped_look_at = now, now + LOOK_S if pids else None
        return frozenset(pid for pid, at in self._stopped_since.items() if now - at >= STOPPED_S)

    def are_busy(self, now: float, pids: Collection[int], age_s: float) -> bool:
        """Whether the workers `pids`, which have been late for `age_s`, have used processor time since the last call.

        False at the first call, and when the workers have been late for --hang-timeout.
        """
        (at, before_s), self._cpu_used = self._cpu_used, (now, self._workers.cpu_s(pids))
        too_long = 0 < self._hang_s <= age_s
        return bool(pids) and not too_long and self._cpu_used[1] - before_s >= IDLE_SHARE * (now - at)

    def stopped_event(self, now: float) -> events.Stalled:
        """The event `stalled` about workers that a signal has stopped, as of `now`."""
        age_s = round(now - self.steps.detector.since, 1) if self.steps.detector.step else 0.0
        return events.Stalled(self._workers.state().number, self.steps.detector.step, age_s, True, {})

    def ask_if_stalled(self, now: float) -> None:
        """Take stacks at `now` if the steps have stood still for half of the limit of a stall, or for all of it.

        In a pause, take stacks once it has lasted for --hang-timeout.
        """
        generation, detector, paused_since = self._workers.state().number, self.steps.detector, self.steps.paused_since
        paused_s = now - paused_since if paused_since is not None else 0.0
        if 0 < self._hang_s <= paused_s and self._reported_pause != paused_since:
            self._reported_pause = paused_since
            self._workers.ask_for_stacks(Stacks("paused", generation, detector.step, paused_s, False))
            return
        # The whole limit first: if both parts are exceeded at once, the failure replaces the warning.
        for part in (1.0, WARN_PART):
            age_s = detector.stalled_s(now, part=part) if self.steps.looped else None
            if age_s is not None and self._stacks_taken_at < (detector.step, part):
                self._stacks_taken_at = (detector.step, part)
                self._workers.ask_for_stacks(Stacks("stalled", generation, detector.step, age_s, part == 1.0))
                return

    def ask_if_waited_for(self, now: float, ended: Sequence[str], left: Mapping[int, int]) -> None:
        """Look at `now` at workers that run on after others have ended.

        Args:
            now: seconds of the monotonic clock.
            ended: descriptions of the workers that have ended; empty if none has.
            left: the process ids of the workers that run on, by local rank.
        """
        is_over = not ended and self.steps.is_over
        if not (ended or is_over) or not left:
            self._idle, self._idle_look_at = None, None
        elif self._idle_look_at is None or now >= self._idle_look_at:
            self._idle_look_at = now + LOOK_IDLE_S
            used_s = self._workers.cpu_s(left.values())
            before = self._idle or IdleWorkers(now, used_s, now)
            who = " and ".join(ended) or _TRAINING
            self._idle = before.looked(used_s, now, self._hang_s * _times_hang_timeout(who), may_work=is_over)
            over = self._idle.is_over and not before.is_over
            if over or (self._idle.is_reported and not before.is_reported):
                age_s = now - (before.idle_since if over else before.since)
                # A rank that works, such as one that evaluates alone, is no reason for the others to complain of it.
                self._is_idle = now - self._idle.idle_since > SAY_AFTER_S / 2
                self._workers.ask_for_stacks(
                    Stacks("waited_for", self._workers.state().number, 0, age_s, over, ended=who), left
                )

    def report(self, stacks: Stacks) -> Failure | None:
        """Report `stacks`. Returns the failure of the workers if `stacks` are final, else None."""
        # The steps go on again, or the workers have ended meanwhile.
        if (stacks.why == "stalled" and stacks.step != self.steps.detector.step) or not stacks.lines:
            return None
        node, generation, ranks = self._workers.settings.node, stacks.generation, self._workers.state().ranks
        lines = {ranks.get(local_rank, local_rank): each for local_rank, each in stacks.lines.items()}
        report = self._report_waited_for if stacks.why == "waited_for" else self._report_stand
        message = report(stacks, lines)
        return (
            stalled_failure(node=node, generation=generation, message=message, stacks=lines) if stacks.final else None
        )

    def _report_waited_for(self, stacks: Stacks, lines: Mapping[int, Sequence[str]]) -> str:
        """Say which ranks run on after others have ended. Returns the failure's message."""
        age, bound = f"{stacks.age_s:.0f} s", ""
        node, step, age_s = self._workers.settings.node, self.steps.detector.step, round(stacks.age_s, 1)
        if self._is_idle:
            reason = "; ".join(f"rank {rank} on {node} has not ended: {where(each)}" for rank, each in lines.items())
            self._workers.event_log.write(
                events.Culprit(stacks.generation, step, age_s, tuple(sorted(lines)), (node,), reason)
            )
        if stacks.final:
            self._write(stacks, lines, step)
        if self._hang_s:
            times = _times_hang_timeout(stacks.ended)
            by = "--hang-timeout" if times == 1 else f"{times:g} x --hang-timeout"
            bound = f" (it is ended after doing nothing for {times * self._hang_s:g} s: {by})"
        what = "has done nothing since" if stacks.final else f"still runs{bound}"
        for rank, each in lines.items():
            self._workers.say(f"{stacks.ended} ended {age} ago; rank {rank} {what}: {where(each)}")
        who = f"rank {min(lines)} on {node}"
        return f"{who} did not end, and did nothing for {age}, after {stacks.ended} had"

    def _report_stand(self, stacks: Stacks, lines: Mapping[int, Sequence[str]]) -> str:
        """Keep the stacks of workers that make no step, and say where they are. Returns the failure's message."""
        age_s, directory = stacks.age_s, self._workers.settings.run_dir
        keep(stacks, lines, self._workers.settings.node, directory)
        if stacks.why == "stalled":
            self._write(stacks, lines, stacks.step)
            if not stacks.final:
                logs = f"{directory}/logs/generation-{stacks.generation}"
                self._workers.say(f"no step for {age_s:.0f} s after step {stacks.step:,}; stacks are in {logs}")
                self.search.note_reported(stacks.step)
        for rank, each in lines.items() if stacks.why == "paused" else ():
            what = f"no step was expected for {age_s:.0f} s (loop.pause, a save)"
            self._workers.say(f"{what}: rank {rank} is at {where(each)}")
        culprit = f": {self.search.reason}" if self.search.reason else ""
        return f"no progress for {age_s:.0f} s after step {stacks.step:,}{culprit}"

    def _write(self, stacks: Stacks, lines: Mapping[int, Sequence[str]], step: int) -> None:
        by_rank = {str(rank): tuple(each) for rank, each in lines.items()}
        age_s = round(stacks.age_s, 3)
        self._workers.event_log.write(events.Stalled(stacks.generation, step, age_s, stacks.final, by_rank))


def _times_hang_timeout(ended: str) -> float:
    """How many times --hang-timeout workers may do nothing after `ended` has ended."""
    return END_FACTOR if ended == _TRAINING else 1.0


def where(lines: Sequence[str]) -> str:
    """The place in the script that the `lines` of a stack tell; the first two lines if there is no frame."""
    return doing(main_thread(lines))[1] or "; ".join(lines[:2])
