"""An operator's hand in etcd: a lease revoked, keys deleted, history compacted, space used up, data wiped.

What belongs to one agent it puts right by itself; what belongs to the run and cannot be known any more ends the run in
words (code 4), and never begins a second history.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrt.store.etcd import EtcdStore
from elasticrt.store.protocol import Put, StoreRefused, Txn
from tests.cluster import kill
from tests.integration.trouble.clusters import etcdctl
from tests.integration.trouble.stepping import History, Stepping, alive, leases_of, raw_delete
from tests.servers import EtcdServer, Proxy, wheel_binary

TTL = ("--lease-ttl", "2")


def _run(tmp_path: Path, etcd: EtcdServer) -> Stepping:
    return Stepping(tmp_path, "--nnodes", "2", *TTL, "--etcd", str(etcd.address))


def _goes_on(run: Stepping, before: dict[str, dict[int, int]]) -> None:
    """The same workers commit again and end well, in generation 1."""
    run.wait_for_commits(len(run.events("committed")) + 2)
    assert run.pids() == before
    run.finish()
    assert set(run.ended().values()) == {0}, run.story()
    assert run.started() == [1]


@pytest.mark.slow
@pytest.mark.parametrize("whose", [pytest.param("n0", id="leader"), pytest.param("n1", id="follower")])
def test_a_lease_is_revoked(tmp_path: Path, etcd: EtcdServer, whose: str) -> None:
    """E08: a live agent's lease is revoked by hand: it takes a new one, registers again, and no worker notices."""
    with _run(tmp_path, etcd) as run:
        run.start_many(["n0", "n1"])
        run.wait_for_commits(1)
        before, leases = run.pids(), leases_of(etcd.address, run.run_id)
        etcdctl(etcd, "lease", "revoke", f"{leases[whose]:x}")
        run.wait(
            "it is back on another lease",
            lambda: leases_of(etcd.address, run.run_id).get(whose) not in (None, leases[whose]),
        )
        _goes_on(run, before)
        history = History.read(etcd.address, run.run_id)
        history.check(run.marks())
        assert len(history.lives(whose)) == 1, "the same life: nothing was decided without it"


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["n0", "n1"])
def test_a_member_key_is_deleted(tmp_path: Path, etcd: EtcdServer, whose: str) -> None:
    """E08: a live agent's member key is deleted by hand: its owner is asked, registers again, and nobody restarts."""
    with _run(tmp_path, etcd) as run:
        run.start_many(["n0", "n1"])
        run.wait_for_commits(1)
        before = run.pids()
        raw_delete(etcd.address, f"/elasticrt/{run.run_id}/members/{whose}")
        run.wait("it is back", lambda: whose in leases_of(etcd.address, run.run_id))
        _goes_on(run, before)
        history = History.read(etcd.address, run.run_id)
        history.check(run.marks())
        assert len(history.lives(whose)) == 1


@pytest.mark.slow
def test_all_member_keys_are_deleted(tmp_path: Path, etcd: EtcdServer) -> None:
    """E08: every member key goes at once, as when etcd drops all leases: all register again and nobody restarts."""
    with _run(tmp_path, etcd) as run:
        run.start_many(["n0", "n1"])
        run.wait_for_commits(1)
        before = run.pids()
        raw_delete(etcd.address, f"/elasticrt/{run.run_id}/members/")
        run.wait("both are back", lambda: len(leases_of(etcd.address, run.run_id)) == 2)
        _goes_on(run, before)
        History.read(etcd.address, run.run_id).check(run.marks())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "words"),
    [
        pytest.param("generation", "etcd has generation 0, and had generation 1: data lost", id="generation"),
        pytest.param("", "data lost", id="whole-prefix"),
    ],
)
def test_the_runs_own_keys_are_deleted(tmp_path: Path, etcd: EtcdServer, *, key: str, words: str) -> None:
    """E08: without its generation a run never begins a second history: all stop with code 4 and say what is gone."""
    with _run(tmp_path, etcd) as run:
        run.start_many(["n0", "n1"])
        run.wait_for_commits(1)
        workers = [pid for pids in run.pids().values() for pid in pids.values()]
        raw_delete(etcd.address, f"/elasticrt/{run.run_id}/{key}")
        assert run.ended() == {"n0": 4, "n1": 4}, run.story()
        assert not [pid for pid in workers if alive(pid)]
        for agent in run.agents.values():
            assert words in agent.text()
            assert "submit the run again with the same --run-id" in agent.text()
            assert "Traceback" not in agent.text()
        assert run.started() == [1]


@pytest.mark.slow
def test_the_data_is_wiped(tmp_path: Path, etcd: EtcdServer) -> None:
    """E05: etcd comes back empty, as another store: the run stops with code 4, and the same command resumes it."""
    with _run(tmp_path, etcd) as run:
        run.start_many(["n0", "n1"])
        run.wait_for_commits(2)
        head = run.events("committed")[-1]["step"]
        etcd.stop()
        etcd.wipe()
        etcd.restart()
        assert run.ended() == {"n0": 4, "n1": 4}, run.story()
        assert all("data lost" in agent.text() for agent in run.agents.values()), run.story()
        steps = run.newest_step()
        for name in ("n0", "n1"):
            run.start(name)
        run.wait("training goes on where the directory says", lambda: run.newest_step() > steps + 3)
        run.finish()
        assert sorted(run.ended().values()) == [0, 0, 4, 4], run.story()
        first = next(event for event in run.events("first_step") if event["resumed_from"])
        assert first["resumed_from"] >= head


@pytest.mark.slow
def test_history_is_compacted_while_the_watches_are_away(tmp_path: Path, etcd: EtcdServer) -> None:
    """E06: while the agents cannot reach etcd its history is compacted: they read everything again and go on."""
    with Proxy(etcd.address) as proxy, Stepping(tmp_path, "--nnodes", "1:3", *TTL) as run:
        run.start("n0", "--etcd", str(proxy.address))
        run.start("n1", "--etcd", str(proxy.address))
        run.wait_for_commits(1)
        run.wait("both are in", lambda: run.events("generation") and len(run.events("generation")[-1]["nodes"]) == 2)
        number = run.number()
        proxy.set("refuse")
        store = EtcdStore((etcd.address,))
        try:
            for k in range(20):
                newest = store.commit(Txn((), (Put(f"/elasticrt/{run.run_id}/foreign", b"%d" % k),), "")).revision
        finally:
            store.close()
        etcdctl(etcd, "compact", str(newest))
        proxy.set("forward")
        # The watches work again: a newcomer is seen and let in, and a failure is seen by all.
        run.start("n2", "--etcd", str(etcd.address))
        run.wait_for_steps(3, generation=number + 1)
        run.fail(number + 1, 1)
        run.wait_for_steps(3, generation=number + 2)
        run.finish()
        assert run.ended() == {"n0": 0, "n1": 0, "n2": 0}, run.story()
        assert run.number() == number + 2


@pytest.mark.slow
def test_etcd_has_no_space(tmp_path: Path) -> None:
    """E07: with etcd full the workers step on and are told of refused commits; a newcomer is told why it cannot come.

    A failure meanwhile can't be settled and is not given up either: once there is space all go on.
    """
    quota = ("--quota-backend-bytes", str(2 << 20))
    with EtcdServer(wheel_binary(), tmp_path / "etcd", options=quota) as etcd:
        options = ("--nnodes", "1:3", *TTL, "--etcd", str(etcd.address))
        with Stepping(tmp_path, *options, every="10 steps") as run:
            run.start("n0")
            run.start("n1")
            run.wait_for_commits(1)
            run.wait("both are in", lambda: len(run.events("generation")[-1]["nodes"]) == 2)
            number, before = run.number(), run.pids()
            _fill(etcd)
            run.wait_for_steps(25)
            assert run.pids() == before
            assert any("etcd is full" in missed["reason"] for missed in run.events("unsaved"))
            late = run.start("n2")
            assert late.process.wait(30) == 4
            assert (
                "etcd is full: compact and defragment it or raise its quota, then `etcdctl alarm disarm`" in late.text()
            )
            kill(run.holder_of_rank(1).worker_pids()[1])
            run.wait("both workers have ended", lambda: len(run.events("worker_ended")) >= 2)
            run.wait_for_silence(2.0)
            assert run.agents["n0"].process.poll() is None, run.story()
            assert run.agents["n1"].process.poll() is None, run.story()
            _make_space(etcd)
            run.wait_for_steps(12, generation=number + 1)
            run.finish()
            assert run.ended() == {"n0": 0, "n1": 0, "n2": 4}, run.story()
            assert run.number() == number + 1


@pytest.mark.slow
def test_etcd_has_no_space_at_the_end(tmp_path: Path) -> None:
    """E07: the last save waits for space: nobody restarts, and no step is done again."""
    quota = ("--quota-backend-bytes", str(2 << 20))
    with EtcdServer(wheel_binary(), tmp_path / "etcd", options=quota) as etcd:
        options = ("--nnodes", "2", *TTL, "--etcd", str(etcd.address))
        with Stepping(tmp_path, *options, every="10 steps") as run:
            run.start("n0")
            run.start("n1")
            run.wait_for_commits(1)
            number = run.number()
            _fill(etcd)
            run.finish()
            run.wait_for_silence(3.0)
            assert [each.process.poll() for each in run.agents.values()] == [None, None], run.story()
            assert 0 not in [each["rank"] for each in run.events("worker_ended")], run.story()
            _make_space(etcd)
            assert run.ended() == {"n0": 0, "n1": 0}, run.story()
            assert run.number() == number


def _fill(etcd: EtcdServer) -> None:
    """Write until etcd raises its alarm."""
    store = EtcdStore((etcd.address,))
    try:
        with pytest.raises(StoreRefused, match="space exceeded"):
            for k in range(200):  # etcd looks at its size only now and then, so a few more are let in.
                store.commit(Txn((), (Put(f"/filler/{k % 4}", b"x" * (1 << 20)),), "fill"))
    finally:
        store.close()


def _make_space(etcd: EtcdServer) -> None:
    """What an operator does about it."""
    etcdctl(etcd, "del", "--prefix", "/filler/")
    store = EtcdStore((etcd.address,))
    try:
        revision = store.read("/filler/").revision
    finally:
        store.close()
    etcdctl(etcd, "compact", str(revision))
    etcdctl(etcd, "defrag")
    etcdctl(etcd, "alarm", "disarm")
