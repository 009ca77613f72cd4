"""Looks at the pages of this node's workers a few times a second, and says when their steps stand still for too long.

No message and no system call on the workers' side, and nothing to do while there are no workers: `wake_at` is then
None.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elasticrt.event_log import EventLog
from elasticrt.ipc.status_page import StatusPage
from elasticrt.liveness.stacks import Stacks, keep
from elasticrt.liveness.stall_detector import (
    LOOK_IN_PLACE_S,
    LOOK_S,
    STANDING_IN_PLACE_S,
    Sight,
    StallDetector,
    StallLimits,
)
from elasticrt.settings import Settings
from elasticrt.workers.failures import WorkerFailure, stalled
from elasticrt.workers.group import WorkerGroup

IDLE_S = 1.0
"""Between two looks for the first sign of life of a script without a Loop."""

WARN_PART = 0.5
"""At this part of the time after which nothing moves for sure, people are warned."""


class HangMonitor:
    """One node's. `look` gives the pages of all its running workers, none when there are none; `group` the workers.

    Used by the agent's thread. What `put` gets comes back to `told`.
    """

    def __init__(  # noqa: PLR0917  The node's own parts; each has a type of its own.
        self,
        look: Callable[[], Sequence[StatusPage]],
        group: Callable[[], WorkerGroup],
        settings: Settings,
        put: Callable[[Any], None],
        events: EventLog,
        say: Callable[[str], None],
        take: Callable[..., None],
    ) -> None:
        self._take = take
        self._look = look
        self._group = group
        self._limits = StallLimits(hang_s=settings.hang_timeout_s)
        self._directory = settings.run_dir
        self._put = put
        self._events = events
        self._say = say
        self._renew()

    def began(self) -> None:
        """New workers are being started: nothing is known of their pace."""
        self._renew()

    def _renew(self) -> None:
        self._pace = StallDetector(self._limits)
        self._asked = (0, 0.0)  # After which step stacks were asked for, and at which part of the time.
        self._looped = False
        self._look_at: float | None = None  # None with nothing to look at: a Loop's first step wakes the agent.
        self._idle_until: float | None = None

    @property
    def wake_at(self) -> float | None:
        """When to look again; None when there is nothing to look at."""
        return self._look_at or self._idle_until

    def look(self, now: float, *, held: bool) -> None:
        """Look, if it is time. `held`: the workers were told to stop after their step, so that none is awaited."""
        if self._look_at is not None and now < self._look_at:
            return
        own = self._look()
        in_loop = bool(own) and all(page.entered for page in own)
        if in_loop or (own and all(page.beats for page in own)):
            if in_loop and not self._looped:
                self._looped, self._pace = (
                    True,
                    StallDetector(self._limits),
                )  # Beats that came before are not its steps.
            in_place = all(page.in_place for page in own)
            if in_place and self._pace.limits is self._limits:
                self._pace = replace(self._pace, limits=replace(self._limits, standing_s=STANDING_IN_PLACE_S))
            self._look_at = now + (LOOK_IN_PLACE_S if in_place else LOOK_S)
            self._pace = self._pace.looked(_sight(own, held=held) if in_loop else _sight_of_beats(own, held=held), now)
        else:
            self._look_at = None
        self._idle_until = now + IDLE_S if own else None

    def standing_since(self, now: float) -> float | None:
        """See `StallDetector`."""
        return self._pace.standing_since(now)

    def ask_if_stalled(self, now: float, generation: int) -> None:
        """When nothing has moved for too long, or for half of that, ask the workers for their stacks, once each."""
        for part in (1.0, WARN_PART):
            age_s = self._pace.stalled_s(now, part=part) if self._looped else None
            if age_s is None or self._asked >= (self._pace.step, part):
                continue
            self._asked = (self._pace.step, part)
            group = self._group()
            workers = {rank: (pid, group.page(rank, generation)) for rank, pid in group.pids(generation).items()}
            signal = functools.partial(group.signal, generation=generation)
            self._take(workers, signal, self._put, Stacks(generation, self._pace.step, age_s, part == 1.0, {}))
            return

    def told(self, stacks: Stacks, node: str, of: Mapping[int, int]) -> tuple[WorkerFailure, ...]:
        """The stacks are here: tell people. The failures that they are when it was too long, else none. `of`: global
        ranks by local rank.
        """
        if stacks.step != self._pace.step:
            return ()  # It has moved meanwhile.
        ranks = {local_rank: of.get(local_rank, local_rank) for local_rank in stacks.lines}
        keep(stacks, ranks, node, self._directory)
        self._events.write(
            "stalled",
            generation=stacks.generation,
            step=stacks.step,
            age_s=round(stacks.age_s, 3),
            final=stacks.final,
            stacks={ranks[local_rank]: lines for local_rank, lines in stacks.lines.items()},
        )
        if not stacks.final:
            where = f"{self._directory}/logs/generation-{stacks.generation}"
            self._say(f"no step for {stacks.age_s:.0f} s after step {stacks.step:,}; stacks are in {where}")
            return ()
        return tuple(
            stalled(
                rank=ranks[local_rank],
                local_rank=local_rank,
                node=node,
                generation=stacks.generation,
                step=stacks.step,
                age_s=stacks.age_s,
                stacks=lines,
            )
            for local_rank, lines in sorted(stacks.lines.items())
        )


def _sight(own: Sequence[StatusPage], *, held: bool) -> Sight:
    """All workers by the one that is furthest behind."""
    last = min(own, key=lambda page: page.step if page.step_at_ns else 0)
    if not last.step_at_ns:
        return Sight(0, 0.0, False)
    expected = not held and all(page.stepping for page in own)
    return Sight(last.step, last.step_at_ns / 1e9, expected, last.restored_at_ns / 1e9)


def _sight_of_beats(own: Sequence[StatusPage], *, held: bool) -> Sight:
    """The same of workers without a Loop, where one may take more steps than another: the oldest newest beat counts."""
    last = min(own, key=lambda page: page.beat_at_ns)
    return Sight(sum(page.beats for page in own), last.beat_at_ns / 1e9, not held, last.begun_at_ns / 1e9)
