"""Measures the progress of this node's workers, and where the time of a recovery goes.

A recovery lasts from the last step before a change of generation to the first step after it, by this machine's
monotonic clock. Agent and workers set marks in between. A phase is the time from one mark to the next, so the phases
add up to the pause.
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
WRITE_EVERY_S = 5.0
# When no step follows, the last one gets an event of its own after this time, so that its number and age are known.
WRITE_LAST_S = 1.0
# The phases end, in this order, when: the change is known; the next generation is agreed; the old workers have ended;
# the new workers run; `elasticrt.init` is called; the process group exists; the Loop is entered; the state is restored;
# the first step is finished.
PHASES = ("detect", "agree", "stop", "start", "script", "init", "loop", "restore", "first_step")


def phases(since_ns: int, marks: Mapping[str, int]) -> dict[str, float]:
    """The milliseconds of each phase, by name. The time of a phase without a mark counts for the next phase.

    Args:
        since_ns: when the first phase began; 0: with its own mark, so it takes no time.
        marks: the ends of the phases, by name. Both are nanoseconds of CLOCK_MONOTONIC.
    """
    set_marks = [(name, marks[name]) for name in PHASES if marks.get(name)]
    at = since_ns or (set_marks[0][1] if set_marks else 0)
    parts = {}
    for name, mark in set_marks:
        # A mark may be before the mark of an earlier phase: the last step may end after its handover was asked for.
        # Such a phase took no time, and the next one begins at the later mark.
        parts[name] = max(0, mark - at) / 1e6
        at = max(at, mark)
    return parts


@dataclass(frozen=True)
class OwnWork:
    """A worker's own work in a step: the time of the step without the wait for the other ranks' gradients.

    Attributes:
        step: the last finished step at the last look that saw a new measurement.
        at_ns: the time of that look (CLOCK_MONOTONIC).
        besides_ns: the total time of saves and pauses until then.
        waited_ns: the total time of waiting for gradients until then, in the `waits` steps in which DDP measured it.
        waits: the number of these steps.
        own_s: the own work in one step, between the last two such looks; 0.0 while it is unknown.
    """

    step: int
    at_ns: int
    besides_ns: int
    waited_ns: int
    waits: int
    own_s: float = 0.0

    def looked(self, step: int, at_ns: int, besides_ns: int, waited_ns: int, waits: int) -> OwnWork:
        """Return the work after another look, which saw these values. Unchanged if DDP has measured no step since."""
        if step <= self.step or waits <= self.waits:
            return self
        wait_s = (waited_ns - self.waited_ns) / (waits - self.waits) / 1e9
        step_s = max(0, at_ns - self.at_ns - (besides_ns - self.besides_ns)) / (step - self.step) / 1e9
        return OwnWork(step, at_ns, besides_ns, waited_ns, waits, max(0.0, step_s - wait_s))


class Progress:
    """The progress of one node's workers.

    Args:
        pages: returns the status pages of the workers that run, in the order of local ranks.
        event_log: takes the events.
        clock: the agent's clock.

    Attributes:
        pause_s: the seconds of the last recovery; 1.0 before the first. For a recovery in place, the detection and the
            first step do not count: to let a newcomer in causes no failure, and the step would have been made anyway.
    """

    def __init__(self, pages: Callable[[], Sequence[StatusPage]], event_log: EventLog, clock: Clock) -> None:
        self._clock = clock
        self._pages = pages
        self._events = event_log
        # The last step before the present change of generation, and its end.
        self._last, self._last_ns = 0, 0
        self._has_loop = False
        # The ends of the present recovery's phases, by name; empty while the training runs.
        self._marks: dict[str, int] = {}
        self._began_at = 0.0
        # The newest generation in which this node has had a seat.
        self._generation = 0
        # What each worker had spent on data, saves and pauses when this generation began to count.
        self._spent: dict[StatusPage, tuple[int, ...]] = {}
        self._work: dict[StatusPage, OwnWork] = {}
        # The event to write next.
        self._newest: events.Progress | None = None
        self._write_at = 0.0
        # The last step as `look` last wrote it.
        self._written_step = 0
        self.pause_s = 1.0

    # Marks, in the order of time. A mark that is set keeps its time until the marks of the recovery are dropped.

    def generation_ending(self) -> None:
        """Note that the present generation is about to end: a worker has failed, or a handover was asked for."""
        # The recovery before never came to a step. Its time becomes a part of this one, which begins at the same step.
        if "start" in self._marks:
            self._marks = {}
        asked = any(page.stop and not 0 < page.go <= page.step for page in self._pages())
        if asked and not self._marks.keys() & {"agree", "broken_off"}:
            # A handover is broken off, because workers did not come to the step after which they were to leave. Until
            # now the nodes had nothing else to agree on, so the time since the last step counts as detection.
            self._marks = {}
            self._mark("broken_off")
        self._mark("detect")

    def generation_kept(self) -> None:
        """Note that the handover was given up, and the generation goes on."""
        self._marks = {}

    def replaced(self, generation: int, *, waits: bool = False) -> None:
        """Note that `generation` is agreed and is to be run.

        A generation that `waits` trains no step: the one that trains again is still to be agreed.
        """
        self.look_and_write()
        self._spent = {}
        # A node without a seat in the generation before is new. It had no step, so its wait was no pause.
        if generation != self._generation + 1:
            self._last, self._last_ns, self._marks = 0, 0, {}
        self._generation = generation
        self.generation_ending()
        if not waits:
            self._mark("agree")

    def write_waiting(self) -> None:
        """Write how the time since the last step was spent, because the present generation waits for nodes."""
        now_ns = self._clock.monotonic_ns()
        self._events.write(events.Restarted(self._generation, phases(self._last_ns, {**self._marks, "agree": now_ns})))
        self._count_from(now_ns)

    def began(self) -> None:
        """Note that the old workers have ended, and new workers are being started or get their seats."""
        self._began_at = self._clock.monotonic()
        self._mark("stop")

    def started(self, generation: int, at_ns: int) -> None:
        """Note that all workers of `generation` run, since `at_ns` (CLOCK_MONOTONIC)."""
        self._mark("start", at_ns)
        # From now on `progress` events are written again: they show readers that this agent lives.
        self._count_from(at_ns)
        if self._last_ns or generation > 1:
            parts = phases(self._last_ns, self._marks)
            self._events.write(events.Restarted(generation, parts))

    def note_last_step(self) -> None:
        """Note the last step of the workers, while their pages can still be read."""
        own = self._pages()
        if own and own[0].step_at_ns:
            self._last, self._last_ns = own[0].step, own[0].step_at_ns
        elif own and own[0].beat_at_ns and not (self._has_loop or own[0].entered):
            self._last, self._last_ns = 0, own[0].beat_at_ns
        # If workers with a Loop have made no step in this generation, the last step stays that of an earlier one.
        self._count(own)

    def stepped(self, generation: int, step: Step) -> None:
        """Note the first `step` of a Loop. If it is the first step of `generation`, the recovery is over."""
        self._has_loop = True
        # A second Loop of the same script: the recovery was over with the first step of the first one.
        if "agree" not in self._marks:
            return
        pause_s = self._pause_until(step.at_ns)
        # In a healthy run the first step is `resumed_from` + 1, and nothing is done again.
        redone = None if pause_s is None else max(0, self._last - step.resumed_from)
        self._events.write(events.FirstStep(generation, step.step, step.resumed_from, pause_s, redone))
        self._recovered(generation, pause_s, step.at_ns)

    def look(self, generation: int, now: float) -> None:
        """Write the event `progress` if it is due at `now`, in seconds of the monotonic clock.

        A new last step is also written as soon as no other one has followed it for WRITE_LAST_S.
        """
        step = self.step() or 0
        if now >= self._write_at or (step != self._written_step and self.age_s() >= WRITE_LAST_S):
            self._write_at, self._written_step = now + WRITE_EVERY_S, step
            self.look_and_write()
        # A worker with a Loop sends a message about the first step, which ends the recovery. Without a Loop only the
        # page shows it: an optimizer's step sends no message.
        own = self._pages() if "start" in self._marks else ()
        if not own or not all(page.first_beat_at_ns for page in own) or any(page.entered for page in own):
            return
        at_ns = max(page.first_beat_at_ns for page in own)
        # If workers have ended already, `note_last_step` has noted a step of this generation. It is no step before the
        # recovery, so the pause is unknown.
        before = self._last_ns < self._marks["start"]
        self._recovered(generation, self._pause_until(at_ns) if before else None, at_ns)

    def look_and_write(self) -> None:
        """Look at the workers, and write the event `progress`."""
        self._count(self._pages())
        self.write()

    def write(self) -> None:
        """Write the event `progress` of the last look, unless it was written already."""
        if self._newest is not None:
            self._events.write(self._newest)
        self._newest = None

    def _pause_until(self, at_ns: int) -> float | None:
        """The seconds from the last step to the one that ended at `at_ns`; None if this node had no step before."""
        return (at_ns - self._last_ns) / 1e9 if 0 < self._last_ns < at_ns else None

    def _recovered(self, generation: int, pause_s: float | None, at_ns: int) -> None:
        """Write how the time of the recovery, which ended at `at_ns`, was spent. Then begin anew."""
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
        # What a change costs those that train: not the wait for nodes, which is in `agree`.
        others = ("agree",) if "start" in parts else ("detect", "agree", "first_step")
        self.pause_s = pause_s - sum(parts.get(each, 0.0) for each in others) / 1000
        self._events.write(events.Recovery(generation, pause_s, parts, age_s))
        log.info("recovery: %s", ", ".join(f"{name} {took:.1f} ms" for name, took in parts.items()))

    def _count_from(self, at_ns: int) -> Sequence[StatusPage]:
        """Count what workers spend from `at_ns` on for this generation. Returns the pages of all workers."""
        own = self._pages()
        self._spent = {page: page.spent(at_ns) for page in own}
        self._work = {
            page: OwnWork(page.step, at_ns, sum(self._spent[page][1:]), page.waited_ns, page.waits) for page in own
        }
        return own

    def _count(self, own: Sequence[StatusPage]) -> None:
        """Make the next `progress` event: what the workers of these pages have spent since `_count_from`."""
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
            saving=any(page.halted_ns for page in known),
        )

    # Questions.

    def step(self) -> int | None:
        """The last step that all workers of this node have finished in this generation; None before the first."""
        own = self._pages()
        return min(page.step for page in own) if own and all(page.step_at_ns for page in own) else None

    @property
    def reached(self) -> int:
        """The last step that all workers of this node have finished, also after they have ended; 0 before the first."""
        return self.step() or self._last

    @property
    def own_s(self) -> float:
        """The seconds of own work in a step of the slowest worker of this node; 0.0 while they are unknown."""
        return max((self._work[page].own_s for page in self._pages() if page in self._work), default=0.0)

    @property
    def last(self) -> tuple[int, int]:
        """The last step before the present generation, and its end (CLOCK_MONOTONIC, ns); 0, 0 if unknown."""
        return self._last, self._last_ns

    def age_s(self) -> float:
        """The seconds since the last step of this node's workers; 0.0 if there was none."""
        newest_ns = max([self._last_ns, *(page.step_at_ns or page.beat_at_ns for page in self._pages())])
        return max(0, self._clock.monotonic_ns() - newest_ns) / 1e9 if newest_ns else 0.0

    def starting(self, now: float) -> bool:
        """Whether the workers have not come to their first step at `now`, but probably will.

        Nothing can be handed over before that, so newcomers wait.
        """
        own = self._pages()
        self._has_loop = self._has_loop or any(page.entered for page in own)
        if not own or all(page.step_at_ns for page in own):
            return False
        # A script in which no worker was ever in a Loop soon counts as one without a Loop. Newcomers need not wait for
        # it.
        return now < self._began_at + (START_S_MAX if self._has_loop else START_UNKNOWN_S)

    def can_hand_over(self) -> bool:
        """Whether all workers of this node are inside a Loop."""
        own = self._pages()
        return bool(own) and all(page.entered for page in own)

    def _mark(self, name: str, at_ns: int = 0) -> None:
        """Set the mark `name` at `at_ns`, or now, unless it is set already."""
        self._marks.setdefault(name, at_ns or self._clock.monotonic_ns())
