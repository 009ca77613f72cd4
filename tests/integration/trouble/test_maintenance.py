"""What an operator does to an etcd in use, and a server that is slow or has other limits: no worker notices."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.integration.trouble.clusters import cluster_of_three, etcdctl, members_of_three, replace
from tests.integration.trouble.stepping import Stepping, send
from tests.integration.trouble.test_away import ends_well, undisturbed
from tests.servers import EtcdServer, wait_until, wheel_binary


@pytest.mark.slow
def test_defragmented_saved_and_members_replaced(tmp_path: Path) -> None:
    """E16: defragmentation, a snapshot, and one of three members replaced by a new one elsewhere: no restart.

    The agents were told of three endpoints; one of them is gone for good afterwards.
    """
    with cluster_of_three(tmp_path) as members:
        endpoints = ",".join(str(member.address) for member in members)
        with Stepping(tmp_path, "--nnodes", "2", "--lease-ttl", "3", "--etcd", endpoints) as run:
            run.start_many(["n0", "n1"])
            run.wait_for_commits(1)
            before, since = run.pids(), time.monotonic()
            for member in members:
                etcdctl(member, "defrag")
            etcdctl(members[1], "snapshot", "save", str(tmp_path / "snapshot"))
            with replace(members, members[0], tmp_path / "etcd-new"):
                run.wait_for_commits(len(run.events("committed")) + 3)
                run.wait_for_silence(3.0)
                undisturbed(run, before, since)
                assert ends_well(run, members[1]).numbers() == [1]


@pytest.mark.slow
def test_members_of_etcd_that_start_beside_the_agents(tmp_path: Path) -> None:
    """E02: one member of three takes connections and has no majority: --etcd-wait is for the first answer."""
    with members_of_three(tmp_path) as members:
        members[0].launch()
        options = ["--etcd", str(members[0].address), "--etcd-wait", "5m", "--no-python"]
        with Cluster(tmp_path, "beside", options, ["true"]) as cluster:
            agent = cluster.start("alpha")
            wait_until(lambda: "etcd does not answer" in agent.text(), "it waits for an answer", 60)
            for member in members[1:]:
                member.launch()
            assert cluster.ended(60) == {"alpha": 0}


@pytest.mark.slow
def test_a_slow_disk(tmp_path: Path, etcd: EtcdServer) -> None:
    """E15: etcd stands still for half a second, and works for half a second, ten times: no false restart."""
    options = ("--nnodes", "2", "--lease-ttl", "2", "--etcd", str(etcd.address))
    with Stepping(tmp_path, *options) as run:
        run.start_many(["n0", "n1"])
        run.wait_for_commits(1)
        before, since = run.pids(), time.monotonic()
        for _ in range(10):
            etcd.pause()
            run.wait_for_silence(0.5)
            etcd.resume()
            run.wait_for_silence(0.5)
        undisturbed(run, before, since)
        history = ends_well(run, etcd)
        assert history.numbers() == [1]
        assert run.pids() == before


@pytest.mark.slow
def test_etcd_grants_longer_leases_than_asked_for(tmp_path: Path) -> None:
    """E18: the TTL is what etcd grants, and is said: a pause longer than the TTL asked for costs nothing."""
    # etcd's shortest lease is one and a half of its election timeouts.
    slow = ("--heartbeat-interval", "400", "--election-timeout", "4000")
    with EtcdServer(wheel_binary(), tmp_path / "etcd", options=slow) as etcd:
        options = ("--nnodes", "2", "--lease-ttl", "1", "--etcd", str(etcd.address))
        with Stepping(tmp_path, *options) as run:
            agents = run.start_many(["n0", "n1"])
            run.wait_for_commits(1)
            before = run.pids()
            for agent in agents:
                assert "etcd grants leases of 6 s; asked for 1 s" in agent.text()
            send([agents[1].pid], signal.SIGSTOP)
            try:
                run.wait_for_silence(2.5)
            finally:
                send([agents[1].pid], signal.SIGCONT)
            history = ends_well(run, etcd)
            assert run.pids() == before
            assert history.numbers() == [1]
            assert [member for _, _, member in history.members if member is None][:-2] == [], "no key has gone"
