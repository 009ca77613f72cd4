"""An agent or a whole node stands still for longer than its lease and goes on as if nothing had been.

What it holds in memory is old by then: it must find out before it writes, and where the others have gone on without it,
its workers end first and it comes back as somebody new. There is one history of commits whatever happens.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from elasticrt.rendezvous.records import Keys, Member, decode
from elasticrt.store.etcd import EtcdStore
from elasticrt.store.protocol import Address, Changes
from tests.integration.trouble.stepping import History, Stepping, alive, node_pids, send
from tests.servers import EtcdServer, wheel_binary

TTL_S = 2.0


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """A server of the test's own."""
    with EtcdServer(wheel_binary(), tmp_path / "etcd") as server:
        yield server


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """SIGSTOP, and SIGCONT whatever happens."""
    send(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        send(pids, signal.SIGCONT)


@contextmanager
def first_writes(address: Address, run_id: str, node: str, pids: Sequence[int]) -> Iterator[dict[str, list[int]]]:
    """Which of `pids` were alive when a new life of `node` showed itself in etcd, by incarnation.

    It is looked at after the write, so a worker that is found alive had certainly not been ended before it.
    """
    found: dict[str, list[int]] = {}
    key = Keys(run_id).member(node)

    def sink(item: object) -> None:
        for event in item.events if isinstance(item, Changes) else ():
            if event.value is not None:
                life = decode(Member, key, event.value.value).incarnation
                found.setdefault(life, [pid for pid in pids if alive(pid)])

    store = EtcdStore((address,))
    try:
        store.watch(key, sink, from_revision=1)
        yield found
    finally:
        store.close()


def one_world_at_a_time(run: Stepping) -> None:
    """S4: when a generation has begun to step, none before it goes on. Who stood still ends its step at most."""
    newest, steps = 0, {0: 0}
    for mark in run.marks():
        if mark.generation < newest:
            assert mark.step <= steps[mark.generation] + 1, f"{mark} after a step of generation {newest}"
            continue
        newest = mark.generation
        steps[newest] = max(mark.step, steps.get(newest, 0))


def _run(tmp_path: Path, etcd: EtcdServer, nodes: str, **options: float) -> Stepping:
    return Stepping(tmp_path, "--nnodes", nodes, "--lease-ttl", f"{TTL_S:g}", "--etcd", str(etcd.address), **options)


def _ends_well(run: Stepping, etcd: EtcdServer) -> History:
    run.wait_for_commits(len(run.events("committed")) + 2)
    run.finish()
    assert set(run.ended().values()) == {0}, run.story()
    history = History.read(etcd.address, run.run_id)
    history.check(run.marks())
    return history


def test_a_paused_agent_whose_generation_still_stands(tmp_path: Path, etcd: EtcdServer) -> None:
    """A05, S16: nobody has decided anything meanwhile: the agent registers again, and its workers never noticed."""
    with _run(tmp_path, etcd, "1") as run:
        (agent,) = run.start_many(["n0"])
        run.wait_for_commits(1)
        before = run.pids()
        with stopped([agent.pid]):
            step = run.newest_step()
            run.wait_for_silence(3 * TTL_S)
            assert run.newest_step() > step + 20, "workers step on while their agent stands still"
        history = _ends_well(run, etcd)
        assert run.pids() == before
        assert history.numbers() == [1]
        assert len(history.lives("n0")) == 1
        assert None in [member for _, _, member in history.members[:-1]], "the lease had ended"


@pytest.mark.slow
@pytest.mark.parametrize("whole", [pytest.param(False, id="A05-agent"), pytest.param(True, id="A06-node")])
def test_a_paused_node_is_replaced_and_comes_back(tmp_path: Path, etcd: EtcdServer, whole: bool) -> None:
    """A05, A06, S2: the node of rank 0 stands still for three leases; the other goes on; it returns as a new member.

    Its workers are gone before it writes anything, and nothing that they wanted to commit was committed.
    """
    with _run(tmp_path, etcd, "1:2") as run:
        run.start("n0")
        run.start("n1")
        run.wait("both are in", lambda: run.events("generation") and len(run.events("generation")[-1]["nodes"]) == 2)
        number = run.number()
        run.wait_for_steps(7, generation=number)
        victim = run.holder_of_rank(0)
        workers = list(victim.worker_pids().values())
        with first_writes(etcd.address, run.run_id, victim.name, workers) as writes:
            with stopped(node_pids(victim) if whole else [victim.pid]):
                run.wait_for_steps(5, generation=number + 1)
                run.wait_for_silence(3 * TTL_S)
            run.wait("it is back", lambda: len(run.events("generation")[-1]["nodes"]) == 2)
            run.wait_for_steps(5, generation=number + 2)
            history = _ends_well(run, etcd)
        first, second = history.lives(victim.name)
        assert writes[second] == [], "its workers were alive when it wrote"
        assert history.rank_count() == {**dict.fromkeys(range(1, number), 1), number: 2, number + 1: 1, number + 2: 2}
        assert first != second


@pytest.mark.slow
def test_a_pause_of_17_seconds_and_a_newcomer(tmp_path: Path, etcd: EtcdServer) -> None:
    """A06, K03, S1, S2: a node stands still for 17 s, and one joins meanwhile: one world, before, during and after.

    torchrun makes two worlds of this, which both train: its rendezvous takes a node whose heartbeats are 15 s old for
    dead, and forms the next round with the newcomer; when the paused agent goes on, its round is over for the others
    but not for itself. Here the lease decides, as etcd counts it; the paused node finds out before it writes anything,
    and comes back as a new member.
    """
    options = ("--nnodes", "1:3", "--etcd", str(etcd.address))
    with Stepping(tmp_path, *options) as run:
        run.start("n0")
        run.start("n1")
        run.wait("both are in", lambda: run.events("generation") and len(run.events("generation")[-1]["nodes"]) == 2)
        number = run.number()
        run.wait_for_steps(7, generation=number)
        victim = run.agents["n0"]
        workers = list(victim.worker_pids().values())
        with first_writes(etcd.address, run.run_id, "n0", workers) as writes:
            with stopped(node_pids(victim)):
                end = time.monotonic() + 17.0
                run.wait_for_steps(3, generation=number + 1)
                run.start("n2")
                run.wait("the newcomer is in", lambda: "n2" in run.events("generation")[-1]["nodes"])
                run.wait_for_silence(max(0.0, end - time.monotonic()))
            run.wait("all three are in", lambda: len(run.events("generation")[-1]["nodes"]) == 3)
            run.wait_for_steps(5, generation=run.number())
            history = _ends_well(run, etcd)
        _, second = history.lives("n0")
        assert writes[second] == [], "its workers were alive when it wrote"
        assert history.rank_count()[max(history.numbers())] == 3
        one_world_at_a_time(run)


@pytest.mark.slow
def test_pauses_shorter_than_a_lease_cost_nothing(tmp_path: Path, etcd: EtcdServer) -> None:
    """A17, A18: an agent that stands still for a third of its lease, eight times, is not suspected."""
    with _run(tmp_path, etcd, "2") as run:
        agents = run.start_many(["n0", "n1"])
        run.wait_for_commits(1)
        before = run.pids()
        for turn in range(8):
            with stopped([agents[turn % 2].pid]):
                run.wait_for_silence(TTL_S / 3)
            run.wait_for_silence(TTL_S / 6)
        history = _ends_well(run, etcd)
        assert run.pids() == before
        assert history.numbers() == [1]
