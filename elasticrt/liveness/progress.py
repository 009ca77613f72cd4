"""How far this node's workers are, and where the time of a recovery goes.

A recovery is the time between the last step before a change of generation and the first one after it, by this
machine's monotonic clock. Agent and workers set marks in between. A phase is the time from one mark to the next, so the
phases add up to the pause.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elasticrt import events
from elasticrt.clock import Clock
from elasticrt.event_log import EventLog
from elasticrt.ipc.messages import Step
from elasticrt.ipc.status_page import StatusPage
from elasticrt.ipc.time_bounds import START_S_MAX, START_UNKNOWN_S

log = logging.getLogger(__name__)

# The interval of the events `progress`.
TELL_EVERY_S = 5.0
# The last step before a time without one has an event after this many seconds, so that its number and age are known.
TELL_LAST_S = 1.0
# A phase ends when: the change is known; another generation is agreed; the old workers are gone; the new ones run;
# `elasticrt.init` is called; there is a process group; the Loop is entered; the state is restored; a step is done.
PHASES = ("detect", "agree", "stop", "start", "script", "init", "loop", "restore", "first_step")


def phases(since_ns: int, marks: Mapping[str, int]) -> dict[str, float]:
    """The milliseconds of each phase, by the ends of phases in `marks`; the first one begins `since_ns`, or with its
    mark if that is 0. The time of a phase without a mark counts for the next one."""
    set_marks = [(name, marks[name]) for name in PHASES if marks.get(name)]
    at = since_ns or (set_marks[0][1] if set_marks else 0)
    parts = {}
    for name, mark in set_marks:
        # Some marks are before that of an earlier phase: a step may end after its handover was asked for.
        parts[name] = max(0, mark - at) / 1e6
        at = max(at, mark)
    return parts


@dataclass(frozen=True)
class OwnWork:
    """A worker's own work in a step: the step without the wait for the others' gradients."""

    # `step`, `at_ns`: the last step at the last look, and the time of that look.
    step: int
    at_ns: int
    besides_ns: int  # The time spent on saves and pauses until then.
    # `waited_ns`, `waits`: the time waited until then, and the number of steps in which it was measured.
    waited_ns: int
    waits: int
    wait_s: float = 0.0  # The wait in a step, by the newest measurement.
    own_s: float = 0.0  # Seconds of own work in a step, lately; 0 before it is known.

    def looked(self, step: int, at_ns: int, besides_ns: int, waited_ns: int, waits: int) -> OwnWork:
        """The work after another look, with new values of the attributes. Unchanged if there was no step."""
        if step <= self.step:
            return self
        wait_s = (waited_ns - self.waited_ns) / (waits - self.waits) / 1e9 if waits > self.waits else self.wait_s
        step_s = max(0, at_ns - self.at_ns - (besides_ns - self.besides_ns)) / (step - self.step) / 1e9
        own_s = max(0.0, step_s - wait_s) if waits else 0.0
        return OwnWork(step, at_ns, besides_ns, waited_ns, waits, wait_s, own_s)


class Progress:
    """The progress of one node's workers. `look` returns the pages of all of them, by local rank.

    `pause_s` are the seconds of the last recovery. Of one in place the detection and the first step do not count: a
    newcomer that is let in causes neither a failure nor a step that would not have been made.
    """

    def __init__(self, look: Callable[[], Sequence[StatusPage]], event_log: EventLog, clock: Clock) -> None:
        self._clock = clock
        self._look = look
        self._events = event_log
        self._last, self._last_ns = 0, 0  # The last step before a change, and its end.
        self._has_loop = False
        self._marks: dict[str, int] = {}
        self._began_at = 0.0
        self._generation = 0  # The newest one in which this node has had a seat.
        self._spent: dict[StatusPage, tuple[int, ...]] = {}  # By worker, at the generation's first step.
        self._work: dict[StatusPage, OwnWork] = {}
        self._newest: events.Progress | None = None  # The event that is to be written next.
        self._tell_at = 0.0
        self._told = 0  # The last step when `look` has written it.
        self.pause_s = 1.0

    # Marks, in order. A mark that is set stays as it is, but for one.

    def disturbed(self) -> None:
        """The present generation is about to end: a worker has failed, or a handover was asked for."""
        if "start" in self._marks:  # A recovery that never came to a step: its time is a part of this one.
            self._marks = {}
        asked = any(page.stop and not 0 < page.go <= page.step for page in self._look())
        if asked and not self._marks.keys() & {"agree", "broken_off"}:
            # Workers that do not come to the step after which they leave hang: until now nothing was to be agreed.
            self._marks = {}
            self._mark("broken_off")
        self._mark("detect")

    def undisturbed(self) -> None:
        """The handover was given up, and the generation goes on."""
        self._marks = {}

    def replaced(self, generation: int, *, waits: bool = False) -> None:
        """Another `generation` is to be run. If it `waits`, the one that trains again is still to be agreed.

        A node without a seat in the one before is new: its wait was no pause of the training.
        """
        self.tell_anew()
        self._spent = {}
        if generation != self._generation + 1:
            self._last, self._last_ns, self._marks = 0, 0, {}
        self._generation = generation
        self.disturbed()
        if not waits:
            self._mark("agree")

    def waits(self) -> None:
        """The present generation waits for nodes: say how the time since the last step was spent until now."""
        now_ns = self._clock.monotonic_ns()
        self._events.write(events.Restarted(self._generation, phases(self._last_ns, {**self._marks, "agree": now_ns})))
        self._count_from(now_ns)

    def began(self) -> None:
        """The old workers are gone, the new ones are being started."""
        self._began_at = self._clock.monotonic()
        self._mark("stop")

    def started(self, generation: int, at_ns: int) -> None:
        """All workers of `generation` run, since `at_ns` (CLOCK_MONOTONIC)."""
        self._mark("start", at_ns)
        self._count_from(at_ns)  # `progress` is written on: who reads it sees that this agent lives.
        if self._last_ns or generation > 1:
            parts = phases(self._last_ns, self._marks)
            self._events.write(events.Restarted(generation, parts))

    def remember(self) -> None:
        """Note how far the workers are, while their pages can still be read."""
        own = self._look()
        if own and own[0].step_at_ns:
            self._last, self._last_ns = own[0].step, own[0].step_at_ns
        elif own and own[0].beat_at_ns and not (self._has_loop or own[0].entered):
            self._last, self._last_ns = 0, own[0].beat_at_ns
        # Workers with a Loop that have made no step in this generation leave the last step as it was before.
        self._count(own)

    def stepped(self, generation: int, step: Step) -> None:
        """The first `step` of a Loop is done. If it is the first of `generation`, the recovery is over."""
        self._has_loop = True
        if "agree" not in self._marks:  # A second Loop of the same script.
            return
        pause_s = self._pause_until(step.at_ns)
        # In a healthy run the first step is `resumed_from` + 1, and nothing is done again.
        redone = None if pause_s is None else max(0, self._last - step.resumed_from)
        self._events.write(events.FirstStep(generation, step.step, step.resumed_from, pause_s, redone))
        self._recovered(generation, pause_s, step.at_ns)

    def look(self, generation: int, now: float) -> None:
        """Write the event `progress`, if it is time `now` (seconds of the monotonic clock), or steps stand still."""
        step = self.step() or 0
        if now >= self._tell_at or (step != self._told and self.age_s() >= TELL_LAST_S):
            self._tell_at, self._told = now + TELL_EVERY_S, step
            self.tell_anew()
        # Without a Loop the first step, which ends the recovery, is known by the page alone: an optimizer's beat sends
        # no message.
        own = self._look() if "start" in self._marks else ()
        if not own or not all(page.first_beat_at_ns for page in own) or any(page.entered for page in own):
            return
        at_ns = max(page.first_beat_at_ns for page in own)
        # Workers that have ended already were remembered: their only step is none before this generation.
        before = self._last_ns < self._marks["start"]
        self._recovered(generation, self._pause_until(at_ns) if before else None, at_ns)

    def tell_anew(self) -> None:
        """Look, and write the event `progress`."""
        self._count(self._look())
        self.tell()

    def tell(self) -> None:
        """Write the event `progress` of the last look, if it has not been written."""
        if self._newest is not None:
            self._events.write(self._newest)
        self._newest = None

    def _pause_until(self, at_ns: int) -> float | None:
        """Seconds from the last step to the one that was done `at_ns`; None on a node that had none before."""
        return (at_ns - self._last_ns) / 1e9 if 0 < self._last_ns < at_ns else None

    def _recovered(self, generation: int, pause_s: float | None, at_ns: int) -> None:
        """Tell how the recovery until `at_ns` was spent, and begin anew."""
        self._count(self._look())
        if self._newest is not None and self._newest.pause_s:  # An evaluation before the first step.
            self.tell()
        self._newest = None
        own = self._count_from(at_ns)
        if own:
            self._marks.update(script=own[0].init_at_ns, init=own[0].joined_at_ns)
            self._marks.update(loop=own[0].loop_at_ns, restore=own[0].restored_at_ns)
        self._mark("first_step", at_ns)
        parts = phases(0 if pause_s is None else self._last_ns, self._marks)
        self._marks = {}
        age_s = round((self._clock.monotonic_ns() - at_ns) / 1e9, 3)
        if pause_s is None:
            self._events.write(events.SetUp(generation, parts, age_s))
            return
        self.pause_s = pause_s
        if "start" not in parts:
            self.pause_s -= (parts.get("detect", 0.0) + parts["first_step"]) / 1000
        self._events.write(events.Recovery(generation, pause_s, parts, age_s))
        log.info("recovery: %s", ", ".join(f"{name} {took:.1f} ms" for name, took in parts.items()))

    def _count_from(self, at_ns: int) -> Sequence[StatusPage]:
        """From `at_ns` on, what workers spend is of this generation. Returns the pages of all."""
        own = self._look()
        self._spent = {page: page.spent(at_ns) for page in own}
        self._work = {
            page: OwnWork(page.step, at_ns, sum(self._spent[page][1:]), page.waited_ns, page.waits) for page in own
        }
        return own

    def _count(self, own: Sequence[StatusPage]) -> None:
        """Sum up what the workers of these pages have spent since their first step in this generation."""
        known = [page for page in own if page in self._spent]
        if not known:
            return
        now_ns = self._clock.monotonic_ns()
        spent = {page: page.spent(now_ns) for page in known}
        since = ([now - then for now, then in zip(spent[page], self._spent[page], strict=True)] for page in known)
        data_s, save_s, pause_s = (max(each) / 1e9 for each in zip(*since, strict=True))
        for page in known:
            besides_ns = sum(spent[page][1:])
            self._work[page] = self._work[page].looked(page.step, now_ns, besides_ns, page.waited_ns, page.waits)
        last = min(known, key=lambda page: page.step if page.step_at_ns else 0)
        self._newest = events.Progress(
            generation=self._generation,
            step=last.step if last.step_at_ns else 0,
            data_s=round(data_s, 6),
            save_s=round(save_s, 6),
            pause_s=round(pause_s, 6),
            samples=max(page.samples for page in known),
            own_s=tuple(round(self._work[page].own_s, 5) for page in known) if len(known) == len(own) else (),
            beats=0 if any(page.entered for page in known) else min(page.beats for page in known),
            age_s=round(max(0, now_ns - last.step_at_ns) / 1e9, 3) if last.step_at_ns else 0.0,
            pausing=any(page.pausing_ns for page in known),
        )

    # Questions.

    def step(self) -> int | None:
        """The last step that all workers of this node have finished; None before the first."""
        own = self._look()
        return min(page.step for page in own) if own and all(page.step_at_ns for page in own) else None

    @property
    def reached(self) -> int:
        """The same, or what it was before they ended; 0 before the first."""
        return self.step() or self._last

    @property
    def last(self) -> tuple[int, int]:
        """The last step before the present generation, and its end in CLOCK_MONOTONIC nanoseconds; 0, 0: not known."""
        return self._last, self._last_ns

    def age_s(self) -> float:
        """Seconds since the last step of this node's workers; 0.0 if there was none."""
        newest_ns = max([self._last_ns, *(page.step_at_ns or page.beat_at_ns for page in self._look())])
        return max(0, self._clock.monotonic_ns() - newest_ns) / 1e9 if newest_ns else 0.0

    def starting(self, now: float) -> bool:
        """Whether the workers have not reached their Loop at `now`, so that there is nothing to hand over."""
        own = self._look()
        self._has_loop = self._has_loop or any(page.entered for page in own)
        if not own or all(page.step_at_ns for page in own):
            return False
        # If no worker was ever in a Loop, the script soon counts as one without a Loop.
        return now < self._began_at + (START_S_MAX if self._has_loop else START_UNKNOWN_S)

    def can_hand_over(self) -> bool:
        """Whether all workers of this node are inside a Loop."""
        own = self._look()
        return bool(own) and all(page.entered for page in own)

    def _mark(self, name: str, at_ns: int = 0) -> None:
        self._marks.setdefault(name, at_ns or self._clock.monotonic_ns())
