"""etcd is away for a while, in all the ways it can be: workers step on, nobody restarts, commits go on afterwards.

Leases are short (2 s), so that an absence of a few seconds ends every lease: that no key is left is no proof that
anybody is dead.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.cluster import kill
from tests.integration.trouble.clusters import cluster_of_three
from tests.integration.trouble.stepping import History, Stepping, alive
from tests.servers import EtcdServer, Proxy, free_port

GAP_S_MAX = 1.5
"""Between two steps of one rank, at 50 ms a step, on a busy machine."""


def _options(*etcds: EtcdServer, ttl: str = "2") -> list[str]:
    return ["--nnodes", "2", "--lease-ttl", ttl, "--etcd", ",".join(str(etcd.address) for etcd in etcds)]


def undisturbed(run: Stepping, before: dict[str, dict[int, int]], since: float) -> None:
    """The same workers run, in generation 1, and have stepped without a gap since then."""
    assert run.started() == [1], run.story()
    assert run.pids() == before
    assert all(alive(pid) for pids in before.values() for pid in pids.values())
    for rank in range(2):
        times = [since, *(mark.at for mark in run.marks(1) if mark.rank == rank and mark.at > since), time.monotonic()]
        assert max(after - at for at, after in itertools.pairwise(times)) < GAP_S_MAX, f"rank {rank} stood still"


def ends_well(run: Stepping, server: EtcdServer) -> History:
    """The run commits again, ends with code 0 everywhere, and its history is sound."""
    run.wait_for_commits(len(run.events("committed")) + 2)
    run.finish()
    assert set(run.ended().values()) == {0}, run.story()
    history = History.read(server.address, run.run_id)
    history.check(run.marks())
    assert [result.status for _, result in history.results] == ["succeeded"]
    return history


def _outage(tmp_path: Path, etcd: EtcdServer, seconds: float, begin: str, end: str) -> None:
    with Stepping(tmp_path, *_options(etcd)) as run:
        run.start_many(["n0", "n1"])
        run.wait_for_commits(1)
        before, since = run.pids(), time.monotonic()
        getattr(etcd, begin)()
        run.wait_for_silence(seconds)
        undisturbed(run, before, since)
        assert not [event for event in run.events("committed") if event["at"] > since + 1], "nothing commits meanwhile"
        getattr(etcd, end)()
        history = ends_well(run, etcd)
        _undisturbed_pids(run, before)
        assert history.numbers() == [1]


def _undisturbed_pids(run: Stepping, before: dict[str, dict[int, int]]) -> None:
    assert run.pids() == before
    assert run.started() == [1]


def test_an_outage_of_three_leases_restarts_nobody(tmp_path: Path, etcd: EtcdServer) -> None:
    """E04, L7: etcd is killed, stays away for 6 s with leases of 2 s and comes back with its data: no restart."""
    _outage(tmp_path, etcd, 6.0, "kill", "restart")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "begin", "end"),
    [
        pytest.param(30.0, "kill", "restart", id="E02-G14-away-30s"),
        pytest.param(10.0, "pause", "resume", id="E03-E15-paused-10s"),
        pytest.param(0.0, "stop", "restart", id="E04-restarted-at-once"),
    ],
)
def test_an_outage_restarts_nobody(tmp_path: Path, etcd: EtcdServer, seconds: float, begin: str, end: str) -> None:
    """L7: whatever the kind and length of the outage, the same workers step on throughout and commit afterwards."""
    _outage(tmp_path, etcd, seconds, begin, end)


@pytest.mark.slow
def test_silence_is_noticed_and_survived(tmp_path: Path, etcd: EtcdServer) -> None:
    """E13, E11: requests arrive and every answer is swallowed for two leases: SUSPENDED, then on as before."""
    with Proxy(etcd.address) as proxy, Stepping(tmp_path, "--nnodes", "2", "--lease-ttl", "2") as run:
        run.options += ["--etcd", str(proxy.address)]
        run.start_many(["n0", "n1"])
        run.wait_for_commits(1)
        before, since = run.pids(), time.monotonic()
        proxy.set("swallow")
        run.wait_for_silence(4.0)
        undisturbed(run, before, since)
        # The connections stay in their state for good; what heals a real network also ends them.
        proxy.set("refuse")
        proxy.set("forward")
        history = ends_well(run, etcd)
        _undisturbed_pids(run, before)
        assert history.numbers() == [1]


@pytest.mark.slow
def test_connections_that_break_all_the_time(tmp_path: Path, etcd: EtcdServer) -> None:
    """N10: every connection to etcd is reset once a second, ten times: no lease is lost, nobody restarts."""
    with Proxy(etcd.address) as proxy, Stepping(tmp_path, "--nnodes", "2", "--lease-ttl", "2") as run:
        run.options += ["--etcd", str(proxy.address)]
        run.start_many(["n0", "n1"])
        run.wait_for_commits(1)
        before, since = run.pids(), time.monotonic()
        for _ in range(10):
            proxy.set("refuse")
            proxy.set("forward")
            run.wait_for_silence(1.0)
        undisturbed(run, before, since)
        history = ends_well(run, etcd)
        assert [member for _, _, member in history.members if member is None][:-2] == [], (
            "no key has gone before the end"
        )


@pytest.mark.slow
def test_a_worker_dies_during_an_outage(tmp_path: Path, etcd: EtcdServer) -> None:
    """E02, W02: a worker is killed while etcd is away: nothing can be agreed; then all go on."""
    with Stepping(tmp_path, *_options(etcd)) as run:
        run.start_many(["n0", "n1"])
        run.wait_for_commits(1)
        head = run.events("committed")[-1]["step"]
        etcd.kill()
        kill(run.holder_of_rank(1).worker_pids()[1])
        run.wait("both workers have ended", lambda: len(run.events("worker_ended")) == 2)
        run.wait_for_silence(3.0)
        assert run.started() == [1]
        etcd.restart()
        run.wait_for_steps(5, generation=2)
        history = ends_well(run, etcd)
        assert history.numbers() == [1, 2]
        assert history.generations[1][1].resume.step >= head
        assert history.generations[1][1].restarts.spent == 1


@pytest.mark.slow
def test_the_agents_leave_during_an_outage(tmp_path: Path, etcd: EtcdServer) -> None:
    """E02, A02, L2: agents that are told to leave while etcd is away end with code 143 and leave no process."""
    with Stepping(tmp_path, *_options(etcd)) as run:
        agents = run.start_many(["n0", "n1"])
        pids = [pid for workers in run.pids().values() for pid in workers.values()]
        etcd.kill()
        for agent in agents:
            agent.process.terminate()
        assert run.ended(40) == {"n0": 143, "n1": 143}
        assert not [pid for pid in pids if alive(pid)]


def _first(members: Sequence[EtcdServer]) -> EtcdServer:
    return members[0]


def _last(members: Sequence[EtcdServer]) -> EtcdServer:
    return members[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choose", "hurt", "heal"),
    [
        pytest.param(_first, "kill", "", id="E01-leader-killed"),
        pytest.param(_last, "kill", "", id="E01-follower-killed"),
        pytest.param(_first, "pause", "resume", id="E03-leader-paused"),
    ],
)
def test_a_member_of_three_fails(
    tmp_path: Path, choose: Callable[[Sequence[EtcdServer]], EtcdServer], hurt: str, heal: str
) -> None:
    """E01, E03, N14: one of etcd's three members fails, its leader or another: no restart, commits go on meanwhile."""
    with cluster_of_three(tmp_path) as members, Stepping(tmp_path, *_options(*members, ttl="3")) as run:
        run.start_many(["n0", "n1"])
        run.wait_for_commits(1)
        before, since = run.pids(), time.monotonic()
        victim = choose(members)
        getattr(victim, hurt)()
        run.wait_for_commits(len(run.events("committed")) + 3)
        run.wait_for_silence(6.0)
        if heal:
            getattr(victim, heal)()
            run.wait_for_silence(3.0)
        undisturbed(run, before, since)
        history = ends_well(run, next(member for member in members if member is not victim))
        assert history.numbers() == [1]
        assert run.pids() == before


@pytest.mark.slow
def test_a_quorum_is_lost_and_comes_back(tmp_path: Path) -> None:
    """E02: two of three members are killed for 8 s and come back: commits are deferred, none is lost, no restart."""
    with cluster_of_three(tmp_path) as members, Stepping(tmp_path, *_options(*members)) as run:
        run.start_many(["n0", "n1"])
        run.wait_for_commits(1)
        before, since = run.pids(), time.monotonic()
        for member in members[:2]:
            member.kill()
        run.wait_for_silence(8.0)
        undisturbed(run, before, since)
        for member in members[:2]:
            member.launch()
        for member in members[:2]:
            member.wait()
        history = ends_well(run, members[2])
        assert history.numbers() == [1]
        assert run.pids() == before


@pytest.mark.slow
def test_a_dead_endpoint_in_the_list(tmp_path: Path, etcd: EtcdServer) -> None:
    """N14: the first of two endpoints refuses; the run starts, steps, commits and ends through the other."""
    endpoints = f"http://127.0.0.1:{free_port()},{etcd.address}"
    with Stepping(tmp_path, "--nnodes", "2", "--etcd", endpoints) as run:
        run.start_many(["n0", "n1"])
        run.wait_for_commits(1)
        assert ends_well(run, etcd).numbers() == [1]
