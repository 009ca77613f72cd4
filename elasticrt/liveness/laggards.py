"""Workers that still run when others of their generation have ended: people are told, and it has a bound.

A script may well save or evaluate on one rank alone, so that running on is no failure. Nothing is done about it before
the worker and all it has started have used next to no processor time for as long as a hang may last.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elasticrt.ipc.proc import stat
from elasticrt.ipc.status_page import StatusPage
from elasticrt.liveness.stacks import Stacks, take
from elasticrt.workers.failures import WorkerFailure, stalled

SAY_AFTER_S = 5.0
LOOK_S = 1.0
IDLE_SHARE = 0.01
"""Of one core: threads of torch that only wait use less, and any work uses more."""


@dataclass(frozen=True)
class AtEnd(Stacks):
    """Stacks of the workers that have not ended. `ended`: who has, in words."""

    ended: str = ""


@dataclass(frozen=True)
class Waiting:
    """How long others have been waiting. Pure.

    `since` when; `said` whether people were told; since `idle_since` the processor time, `cpu_s` then, has stood.
    """

    since: float
    cpu_s: float
    idle_since: float
    said: bool = False
    over: bool = False

    def looked(self, cpu_s: float, now: float, limit_s: float) -> Waiting:
        """After another look. `limit_s`: how long a worker may do nothing, 0 for ever."""
        if cpu_s - self.cpu_s >= IDLE_SHARE * (now - self.idle_since):
            return replace(self, cpu_s=cpu_s, idle_since=now, said=self.said or now >= self.since + SAY_AFTER_S)
        over = self.over or (limit_s > 0 and now - self.idle_since >= limit_s)
        return replace(self, said=self.said or now >= self.since + SAY_AFTER_S, over=over)


class Laggards:
    """One agent's look. Used by the agent's thread; what `put` gets comes back to `told`."""

    def __init__(self, limit_s: float, put: Callable[[Any], None], say: Callable[[str], None]) -> None:
        self._limit_s = limit_s
        self._put = put
        self._say = say
        self._generation = 0
        self._waiting: Waiting | None = None
        self.at: float | None = None
        """When to look again; None when nobody is waited for."""

    def look(
        self,
        now: float,
        generation: int,
        ended: Sequence[str],
        left: Mapping[int, tuple[int, StatusPage]],
        signal: Callable[[int], None],
    ) -> None:
        """`ended`: who has, in words; `left`: process and page of each worker here that has not, by local rank."""
        if generation != self._generation or not ended or not left:
            self._generation, self._waiting, self.at = generation, None, None
        if not ended or not left or (self.at is not None and now < self.at):
            return
        self.at = now + LOOK_S
        used_s = cpu_s(pid for pid, _ in left.values())
        before = self._waiting or Waiting(now, used_s, now)
        self._waiting = before.looked(used_s, now, self._limit_s)
        over = self._waiting.over and not before.over
        if over or (self._waiting.said and not before.said):
            age_s = now - (before.idle_since if over else before.since)
            take(left, signal, self._put, AtEnd(generation, 0, age_s, over, {}, " and ".join(ended)))

    def told(self, stacks: AtEnd, node: str, of: Mapping[int, int]) -> tuple[WorkerFailure, ...]:
        """The stacks are here: tell people. The failures that they are when it was too long, else none. `of`: global
        ranks by local rank.
        """
        ranks = {local_rank: of.get(local_rank, local_rank) for local_rank in stacks.lines}
        for local_rank, lines in stacks.lines.items():
            bound = f", until it has done nothing for {self._limit_s:g} s (--hang-timeout)" if self._limit_s else ""
            what = "has done nothing since" if stacks.final else f"is waited for{bound}"
            self._say(f"{stacks.ended} ended {stacks.age_s:.0f} s ago; rank {ranks[local_rank]} {what}: {where(lines)}")
        if not stacks.final:
            return ()
        return tuple(
            replace(
                stalled(
                    rank=ranks[local_rank], local_rank=local_rank, node=node, generation=stacks.generation,
                    step=0, age_s=stacks.age_s, stacks=lines,
                ),
                message=f"rank {ranks[local_rank]} did not end, and did nothing for {stacks.age_s:.0f} s, "
                f"after {stacks.ended} had",
            )
            for local_rank, lines in sorted(stacks.lines.items())
        )  # fmt: skip


def where(lines: Sequence[str]) -> str:
    """The place in a stack's text: its innermost line, or all that is known."""
    places = [line.strip() for line in lines if line.startswith("  File ")]
    return places[0] if places else "; ".join(lines[:2])


def cpu_s(sessions: Iterable[int]) -> float:
    """The processor time of all processes of these sessions, with that of their children that have ended."""
    wanted, ticks = set(sessions), 0
    for name in os.listdir("/proc"):  # noqa: PTH208  Names are all we need.
        with contextlib.suppress(OSError):  # One that ends meanwhile.
            if name.isdigit() and os.getsid(int(name)) in wanted and (found := stat(name)) is not None:
                ticks += found.ticks
    return ticks / os.sysconf("SC_CLK_TCK")
