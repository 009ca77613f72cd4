"""One job that is disturbed, once or again and again, and what each disturbance cost."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.marks import Mark, Recovery, formed, new_ground_at, newest_whole, recovery, step_s, stepping
from tests.bench.places import Loopback, Namespaces
from tests.bench.rows import Row
from tests.bench.runtimes import Job, Node, Pace, Runtime, kill_all

START_S_MAX = 150.0
"""Until a job that is not measured has made its first step."""

POLL_S = 0.02
AFTERWARDS_S = 1.5
"""How long a recovered job is watched for a second world, at the least ..."""

NEW_GROUND_S_MAX = 20.0
"""... and at the most, until it has done again what was lost, and a few steps tell what one takes."""


MEMORY_S = 10.0
"""Marks that are older than this when the next disturbance comes are forgotten: reading must not cost the job time."""


@dataclass(frozen=True)
class Outcome:
    """What a disturbance cost, None when training did not go on; what happened besides; what our agents say of it."""

    cost: Recovery | None
    note: str = ""
    phases_ms: dict[str, float] = field(default_factory=dict)


class Disturbed:
    """A job of one runtime. Use it as a context manager.

    Attributes:
        job: what is disturbed.
        size: how many nodes there should be; changes with what is done.
        well: whether it has come through everything so far, and can be disturbed again.
    """

    def __init__(
        self,
        runtime: Runtime,
        row: Row,
        nodes: int,
        pace: Pace,
        timeout_s: float,
        *,
        stop: threading.Event,
        keep: Path | None = None,
        torchft: Path | None = None,
    ) -> None:
        self._full = nodes
        self._timeout_s = timeout_s
        self._stop = stop
        place = Namespaces() if row.network else Loopback()
        self.job = Job(runtime, nodes + row.room, pace, place, keep, torchft)
        self.size = 0
        self.well = True

    def __enter__(self) -> Disturbed:
        self.job.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.job.__exit__(*error)

    def begin(self, nodes: int, timeout_s: float) -> Outcome:
        """Start that many nodes at once, and wait for the first step."""
        self.size = nodes
        at = time.monotonic()
        for _ in range(nodes):
            self.job.start_node()
        return self._await(at, timeout_s)

    def suits(self, row: Row) -> bool:
        """Whether this row could come next: all is well, and as many nodes are there as it takes."""
        return self.well and self.size == self._full - max(0, row.change)

    def disturb(self, row: Row) -> Outcome:
        """Do it, and watch. `ready` has just been true."""
        world = newest_whole(self.job.marks.read(), self.size)
        holder = {mark.rank: mark.pid for mark in self.job.marks.read() if mark.world == world}
        at, size = self._do(row, holder)
        self.size += row.change
        return self._await(at, self._timeout_s, size)

    def ready(self, steps: int) -> bool:
        """Train until so many steps past the first ones, or past what has been reached. False: the job is not well."""
        if not self._until(self._whole, self._timeout_s):
            self.well = False
            return False
        marks = self.job.marks
        marks.forget(time.monotonic() - MEMORY_S)
        target = max(self.job.pace.least_steps, *(mark.step for mark in marks.read())) + steps
        self.well = self._until(
            lambda now: self._whole(now) and max(mark.step for mark in now) >= target, self._timeout_s
        )
        return self.well

    def _whole(self, marks: list[Mark]) -> bool:
        return newest_whole(marks, self.size) is not None

    def _do(self, row: Row, holder: dict[int, int]) -> tuple[float, int]:
        """Do it; when, and how many ranks there should be afterwards."""
        job = self.job
        if row.event == "join":
            at = time.monotonic()
            job.start_node()
            return at, self.size + 1
        victim = self._victim(row, holder)
        match row.event:
            case "worker":
                below = set(victim.processes())
                left = self.size - 1 if job.runtime.survives else self.size
                return kill_all([pid for pid in holder.values() if pid in below]), left
            case "leave":
                at = time.monotonic()
                victim.process.send_signal(signal.SIGTERM)
                return at, self.size - 1
            case "store":
                return kill_all([*victim.processes(), *job.store_processes()]), self.size - 1
            case "power":
                return job.power_off(victim), self.size - 1
        assert row.event in ("node", "rank0"), row.event
        return kill_all(victim.processes()), self.size - 1

    def _victim(self, row: Row, holder: dict[int, int]) -> Node:
        """torchrun's store is on the first node; ours is on none, unless the row is about that."""
        living, zero = self.job.living(), self.job.node_of(holder[0])
        first = self.job.nodes[0]
        if row.event == "store":
            return living[0]
        if row.event == "rank0":
            assert self.job.runtime.lasts or zero is not first, "rank 0 is on the node that hosts the store"
            return zero
        return next(node for node in reversed(living) if node is not zero and node is not first)

    def _await(self, at: float, timeout_s: float, size: int | None = None) -> Outcome:
        size = self.size if size is None else size
        self._until(lambda marks: formed(marks, at, size) is not None or self.job.ended(), timeout_s)
        found = formed(self.job.marks.read(), at, size)
        if found is None:
            self.well = False
            return Outcome(None, self._why_not())
        self._until(lambda _: False, AFTERWARDS_S)
        world, _ = found
        self._until(
            lambda marks: new_ground_at(marks, *found) is not None and step_s(marks, world) is not None,
            NEW_GROUND_S_MAX,
        )
        cost = recovery(self.job.marks.read(), at, *found)
        self.well = not cost.two_worlds
        phases = slowest_phases(self.job.events(), at, cost.pause_s or 0.0)
        return Outcome(cost, "two worlds" if cost.two_worlds else "", phases)

    def _until(self, condition: Callable[[list[Mark]], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if condition(self.job.marks.read()):
                return True
            if self._stop.wait(POLL_S):
                raise SystemExit("told to stop")
        return False

    def _why_not(self) -> str:
        if self.job.ended():
            return "job lost"
        alive = stepping(self.job.marks.read(), time.monotonic() - 1.0)
        if len(alive) > 1:
            return "two worlds"
        return "another world size" if alive else "no steps"


def slowest_phases(events: list[dict[str, Any]], since: float, pause_s: float) -> dict[str, float]:
    """Of the recoveries after `since` the slowest, phase by phase, in ms; {} when no agent wrote of any.

    Of a script without Loop agents know what there was until its workers had been started; "script" is then all that is
    left of the pause.
    """
    for name in ("recovery", "restarted"):
        found = [event for event in events if event["event"] == name and event["at"] > since]
        phases = [_numbers(event["phases"]) for event in found if isinstance(event.get("phases"), dict)]
        slowest = max(phases, key=lambda each: sum(each.values()), default={})
        if slowest and name == "restarted":
            slowest["script"] = max(0.0, pause_s * 1000 - sum(slowest.values()))
        if slowest:
            return slowest
    return {}


def _numbers(phases: dict[str, Any]) -> dict[str, float]:
    """Without the phases that were not reached."""
    return {name: float(value) for name, value in phases.items() if isinstance(value, (int, float))}
