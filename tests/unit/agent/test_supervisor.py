"""When the agent starts a node's workers, and starts them again."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticrt import events
from elasticrt.agent.edges import Edges
from elasticrt.agent.supervisor import Supervisor
from elasticrt.event_log import EventLog
from elasticrt.ipc.env import WorkerEnv
from elasticrt.ipc.messages import Step, Warm
from elasticrt.ipc.status_page import IN_PLACE, READY, StatusPage
from elasticrt.rendezvous.records import Generation, Seat
from elasticrt.workers.failures import Remains, failure_of
from elasticrt.workers.worker_io import GroupEnded, WorkerEnded, WorkerMessage
from tests.unit.settings import settings_of
from tests.unit.workers.states import worker


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        """See `Clock`."""
        return self.now

    def monotonic_ns(self) -> int:
        """See `Clock`."""
        return round(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        """See `Clock`."""
        self.now += seconds


class Ports:
    """No sockets."""

    port, address = 1, "127.0.0.1"

    def bind(self, address: str) -> None:
        """See `StorePorts`."""

    def take(self, port: int, *, shared: bool) -> None:
        """See `StorePorts`."""


class Group:
    """Workers without processes: notes which were started, by generation, and which were killed."""

    def __init__(self) -> None:
        self.pages: dict[tuple[int, int], StatusPage] = {}
        self.started: list[tuple[int, list[int]]] = []
        self.killed: list[int] = []

    def start(self, generation: int, envs: Any, *_: Any) -> None:
        """See `WorkerGroup`."""
        self.started.append((generation, [env.local_rank for env in envs]))
        self.pages |= {(env.local_rank, generation): StatusPage(-1) for env in envs}

    def page(self, local_rank: int, generation: int) -> StatusPage:
        """See `WorkerGroup`."""
        return self.pages[local_rank, generation]

    def pids(self, generation: int) -> dict[int, int]:
        """See `WorkerGroup`. A process id is a hundred above the local rank."""
        return {rank: 100 + rank for rank, number in self.pages if number == generation}

    seating = contextlib.nullcontext()

    def reseat(self, local_rank: int, was: int, env: WorkerEnv, _: Any) -> bool:
        """See `WorkerGroup`."""
        self.pages[local_rank, env.generation] = self.pages.pop((local_rank, was))
        return True

    def kill(self, generation: int, local_ranks: Any = ()) -> None:
        """See `WorkerGroup`."""
        self.killed += [generation, *local_ranks]

    def terminate(self, generation: int, number: int = 15) -> None:
        """See `WorkerGroup`."""


SEAT = Seat(node="n0", incarnation="0" * 16, index=0, rank_offset=0, workers=2, address="127.0.0.1", probe_port=1)


def generation(number: int, **fields: Any) -> Generation:
    """One of this node alone."""
    common = {"attempt": 1, "nodes": 1, "world_size": 2, "master_address": "127.0.0.1", "master_port": 1}
    return Generation(number=number, cause="c", kind="start", nonce="0" * 16, chunks=1, **common | fields)


@pytest.fixture
def rig(tmp_path: Path) -> SimpleNamespace:
    """The supervisor of a node with a warm parent; its clock, its workers, the stopped processes, what it says."""
    clock, group, stopped, said = Clock(), Group(), set(), list[str]()
    edges = Edges(
        clock=clock,
        store_ports=Ports,
        worker_group=lambda *_, **__: group,
        state_of=lambda pid: "T" if pid in stopped else "S",
    )
    settings = settings_of(tmp_path)
    settings = replace(settings, workers=2, options=replace(settings.options, stop_timeout_s=30.0))
    log = EventLog("n0", None)
    supervisor = Supervisor(settings, lambda _: None, log, said.append, edges)
    supervisor.fold(Warm("fork", "", 0.0))
    return SimpleNamespace(supervisor=supervisor, clock=clock, group=group, stopped=stopped, log=log, said=said)


def test_a_generation_starts_after_stopped_workers_of_the_last_one_are_gone(rig: SimpleNamespace) -> None:
    """W08: workers that have time to end, and are given up meanwhile because a signal has stopped the last of them, are
    followed by those of the next generation."""
    rig.supervisor.run(generation(1), SEAT, ("n0",))
    rig.stopped |= {100, 101}
    rig.supervisor.run(generation(2), SEAT, ("n0",))
    while not rig.group.killed:
        rig.clock.now += 0.1
        rig.supervisor.do_what_is_due(rig.clock.now, (), leaves=False)
    assert rig.clock.now < 130.0, "before its time is over"
    assert rig.group.started == [(1, [0, 1])]
    rig.supervisor.fold(GroupEnded(1))
    assert rig.group.started == [(1, [0, 1]), (2, [0, 1])]


def test_what_a_worker_raises_after_another_was_killed_is_written(rig: SimpleNamespace) -> None:
    """It is an event of its own, and may tell more than the first; one that its agent has ended has no failure."""
    supervisor, written = rig.supervisor, []
    rig.log.follow(written.append)
    supervisor.run(generation(1), SEAT, ("n0",))
    raises = ("Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "ValueError: empty")
    for rank, left in enumerate((Remains(-9), Remains(1, last_lines=raises))):
        failure = failure_of(worker("n0", rank, 1), left)
        supervisor.fold(WorkerEnded(1, rank, rank, 100 + rank, left.code, failure))
    told = [each.event.failure for each in written if isinstance(each.event, events.WorkerEnded)]
    assert told == ["rank 0 on n0: killed by SIGKILL", "rank 1 on n0: exit code 1: ValueError: empty"]


@pytest.mark.parametrize("hangs", [False, True])
def test_a_worker_that_dies_whenever_it_is_let_in_comes_back_later_each_time(rig: SimpleNamespace, hangs: bool) -> None:
    """W09: also when a signal kills or stops it, and although the node's other worker makes a first step each time."""
    supervisor, group, alone = rig.supervisor, rig.group, SEAT.model_copy(update={"workers": 1})
    supervisor.run(generation(1), SEAT, ("n0",))
    group.page(0, 1).in_place = IN_PLACE
    waits, number = [], 1
    while number < 9:
        failure = failure_of(worker("n0", 1, number), Remains(-11))
        if hangs and number > 1:
            failure, group.killed[:] = None, []
            rig.stopped.add(101)
            while not group.killed:
                rig.clock.now += 0.1
                supervisor.do_what_is_due(rig.clock.now, (), leaves=False)
            rig.stopped.clear()
        died_at = rig.clock.now
        del group.pages[1, number]
        supervisor.fold(WorkerEnded(number, 1, 1, 101, -11, failure))
        supervisor.run(generation(number + 1, in_place=True), alone, ("n0",))
        supervisor.fold(WorkerMessage(number + 1, 0, 0, Step(1, 0, 0, 0, True, {}), lambda _: None))
        while (1, 0) not in group.pages:
            supervisor.do_what_is_due(rig.clock.now, (), leaves=False)
            rig.clock.now += 0.5
        waits.append(rig.clock.now - died_at - 0.5)
        group.page(1, 0).in_place = READY
        number += 2
        supervisor.run(generation(number, in_place=True), SEAT, ("n0",))
    assert waits == [0.0, 1.0, 2.0, 4.0]


def test_a_newcomer_whose_step_was_heard_of_too_late_has_trained(rig: SimpleNamespace) -> None:
    """W09: it dies in the generation after that of its first step, and it is not told that it failed before that."""
    supervisor, group = rig.supervisor, rig.group
    supervisor.run(generation(1), SEAT, ("n0",))
    group.page(0, 1).in_place = IN_PLACE
    del group.pages[1, 1]
    supervisor.fold(WorkerEnded(1, 1, 1, 101, -9, failure_of(worker("n0", 1, 1), Remains(-9, stepped=True))))
    supervisor.run(generation(2, in_place=True), SEAT.model_copy(update={"workers": 1}), ("n0",))
    supervisor.do_what_is_due(rig.clock.now, (), leaves=False)
    group.page(1, 0).in_place = READY
    supervisor.run(generation(3, in_place=True), SEAT, ("n0",))
    page = group.page(1, 3)
    page.step, page.in_place = 7, IN_PLACE
    supervisor.run(generation(4, in_place=True), SEAT, ("n0",))
    supervisor.fold(WorkerEnded(4, 1, 1, 102, -9, failure_of(worker("n0", 1, 4), Remains(-9, stepped=True))))
    assert not [line for line in rig.said if "before its first step" in line]
