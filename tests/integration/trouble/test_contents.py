"""What is in etcd is not what this run wrote: it went back in time, or somebody else writes under the run's prefix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from elasticrt.store.etcd import EtcdStore
from elasticrt.store.protocol import Put, Txn
from tests.integration.trouble.clusters import etcdctl
from tests.integration.trouble.stepping import Stepping, alive
from tests.servers import EtcdServer

OPTIONS = ("--nnodes", "1:2", "--lease-ttl", "2", "--rdzv-conf", "last_call_timeout=3")


def _commit(run: Stepping) -> None:
    run.wait_for_commits(len(run.events("committed")) + 2)


def _restart_workers(run: Stepping) -> None:
    number = run.number()
    run.fail(number, 0)
    run.wait_for_steps(2, generation=number + 1)


@pytest.mark.parametrize(
    "happens",
    [
        pytest.param(_commit, id="E20-acknowledged-commits"),
        pytest.param(_restart_workers, id="E05-generations", marks=pytest.mark.slow),
    ],
)
def test_etcd_forgets_what_it_had_acknowledged(
    tmp_path: Path, etcd: EtcdServer, happens: Callable[[Stepping], None]
) -> None:
    """E20, E05, S2, S8: etcd comes back from an older state of itself: all stop with code 4 and say so.

    The same command goes on from the newest commit: the checkpoint directory still has it.
    """
    with Stepping(tmp_path, *OPTIONS, "--etcd", str(etcd.address), every="30 steps") as run:
        run.start("n0")
        run.start("n1")
        run.wait_for_commits(2)
        etcd.stop()
        etcd.save(tmp_path / "backup")
        etcd.restart()
        happens(run)
        workers = [pid for pids in run.pids().values() for pid in pids.values()]
        etcd.stop()
        head = max(event["step"] for event in run.events("committed"))
        etcd.load(tmp_path / "backup")
        etcd.restart()
        assert run.ended(30) == {"n0": 4, "n1": 4}, run.story()
        assert not [pid for pid in workers if alive(pid)]
        said = [agent.text() for agent in run.agents.values()] + [event["reason"] for event in run.events("result")]
        assert any("data lost" in text for text in said), run.story()
        for name in ("n0", "n1"):
            run.start(name)
        run.wait_for_commits(len(run.events("committed")) + 2)
        run.finish()
        assert sorted(run.ended().values()) == [0, 0, 4, 4], run.story()
        assert run.events("first_step")[-1]["resumed_from"] == head


FOREIGN = {
    "members/stranger": b"\xff\xfe is no JSON",
    "members/from-the-future": b'{"v": 99, "node": "from-the-future"}',
    "reports/1/stranger": b"[1, 2]",
    "result/9": b'{"v": 1, "attempt": "nine"}',
    "something/else": b"x" * (1 << 20),
}
"""By key under the run's prefix: no UTF-8, another version, wrong types, a megabyte."""


@pytest.mark.slow
def test_foreign_keys_under_the_prefix(tmp_path: Path, etcd: EtcdServer) -> None:
    """E17, S14: what is not ours is ignored, left alone, and named once; the same workers go on, newcomers come in."""
    with Stepping(tmp_path, *OPTIONS, "--etcd", str(etcd.address)) as run:
        run.start("n0")
        run.wait_for_commits(1)
        before = run.pids()
        prefix = f"/elasticrt/{run.run_id}/"
        _write(etcd, {prefix + key: value for key, value in FOREIGN.items()})
        # Its name is no text either; `EtcdStore` cannot write such a key.
        etcdctl(etcd, "put", f"{prefix}members/\udcff", "{}")
        _commit(run)
        assert run.pids() == before
        run.start("n1")
        run.wait_for_steps(3, generation=2)
        run.finish()
        assert run.ended() == {"n0": 0, "n1": 0}, run.story()
        for key in ("members/stranger", "members/from-the-future"):
            assert run.agents["n0"].text().count(f"{prefix}{key} holds something that is not ours") == 1, run.story()
        left = {key.removeprefix(prefix) for key in _keys(etcd, prefix)}
        assert {key for key in FOREIGN if not key.startswith("reports/")} <= left


@pytest.mark.slow
@pytest.mark.parametrize("key", ["spec", "generation", "checkpoint"])
def test_the_runs_own_record_is_overwritten(tmp_path: Path, etcd: EtcdServer, key: str) -> None:
    """E17: a record that all stands on is replaced by another version of it: all stop with code 4 and name the key."""
    with Stepping(tmp_path, *OPTIONS, "--etcd", str(etcd.address)) as run:
        run.start("n0")
        run.start("n1")
        run.wait_for_commits(1)
        workers = [pid for pids in run.pids().values() for pid in pids.values()]
        name = f"/elasticrt/{run.run_id}/{key}"
        _write(etcd, {name: b'{"v": 99}'})
        assert run.ended(30) == {"n0": 4, "n1": 4}, run.story()
        assert not [pid for pid in workers if alive(pid)]
        assert all(f"has been overwritten ({name})" in agent.text() for agent in run.agents.values()), run.story()


def _write(etcd: EtcdServer, values: dict[str, bytes]) -> None:
    store = EtcdStore((etcd.address,))
    try:
        for key, value in values.items():
            store.commit(Txn((), (Put(key, value),), "written by somebody else for a test"))
    finally:
        store.close()


def _keys(etcd: EtcdServer, prefix: str) -> list[str]:
    store = EtcdStore((etcd.address,))
    try:
        return [entry.key for entry in store.read(prefix).keys]
    finally:
        store.close()
