"""The answer to a transaction is lost, or the request, or it arrives when its sender has given up: one effect.

Whoever sent it cannot know which of these happened. It reads again, and what is in etcd decides. Each test plays a run
through every kind of change there is, loses messages on the way, and asks for exactly the history of a run that lost
none.
"""

from __future__ import annotations

import secrets
import signal
from pathlib import Path

import pytest

from tests.cluster import Cluster, gone, kill
from tests.integration.trouble.lossy import KINDS, Loss, Lossy
from tests.integration.trouble.stepping import History, Stepping
from tests.servers import EtcdServer

TOUR = tuple(kind for kind in KINDS if kind not in ("claim", "settle", "roster"))
"""The kinds of transaction that `_tour` passes, in every run. The seats of so few nodes are in the generation."""


def _tour(run: Stepping) -> None:
    """Start, join, worker failure, join, death of a node, drain, success: generations 1 to 6."""
    run.start("n0")
    run.wait_for_steps(3, generation=1)
    run.start("n1")
    run.wait_for_steps(3, generation=2)
    run.fail(2, 1)
    run.wait_for_steps(3, generation=3)
    victim = run.start("n2")
    run.wait_for_steps(3, generation=4)
    workers = list(victim.worker_pids().values())
    kill(victim.pid)
    run.wait_for_steps(3, generation=5)
    assert not gone(workers, 5), "its workers outlived the agent"
    run.agents["n1"].process.send_signal(signal.SIGTERM)
    run.wait_for_steps(3, generation=6)
    run.wait_for_commits(1, generation=6)
    run.finish()
    assert run.ended() == {"n0": 0, "n1": 143, "n2": -signal.SIGKILL}, run.story()


def _as_if_nothing_was_lost(run: Stepping, etcd: EtcdServer) -> None:
    """One effect of each transaction: no number twice or skipped, one restart counted, one life each, one result."""
    history = History.read(etcd.address, run.run_id)
    history.check(run.marks())
    assert list(history.rank_count().items()) == [(1, 1), (2, 2), (3, 2), (4, 3), (5, 2), (6, 1)]
    kinds = [generation.kind for _, generation in history.generations]
    assert kinds == ["start", "join", "failure", "join", "lost", "drain"]
    assert history.generations[-1][1].restarts.total == 1
    assert [len(history.lives(name)) for name in ("n0", "n1", "n2")] == [1, 1, 1]
    assert [result.status for _, result in history.results] == ["succeeded"]
    # Whoever was told that its checkpoint is committed was told the truth, and the other way round.
    assert {event["step"] for event in run.events("committed")} == {head.step for _, head in history.commits}


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["answer", "request", "late"])
def test_one_of_every_kind_is_lost(tmp_path: Path, etcd: EtcdServer, loss: Loss) -> None:
    """E11, S1, S2, S12: lost answers, lost requests, and requests that arrive after their sender has tried again."""
    with Stepping(tmp_path, "--nnodes", "1:3", "--lease-ttl", "5") as run, Lossy(etcd.address, run.run_id) as lossy:
        run.options += ["--etcd", str(lossy.address)]
        for kind in TOUR:
            lossy.lose(kind, loss)
        _tour(run)
        assert sorted(lossy.lost) == sorted(TOUR)
        _as_if_nothing_was_lost(run, etcd)


@pytest.mark.slow
def test_a_lease_ends_just_before_it_is_used(tmp_path: Path, etcd: EtcdServer) -> None:
    """A17, E08: a machine stands still while it joins, and its first lease is over: it registers with another one."""
    with Stepping(tmp_path, "--nnodes", "2", "--lease-ttl", "5") as run, Lossy(etcd.address, run.run_id) as lossy:
        run.options += ["--etcd", str(lossy.address)]
        kinds = ("join", "register", "announce")
        for kind in kinds:
            lossy.lose(kind, "lease")
        run.start_many(["n0", "n1"])
        run.wait_for_commits(1)
        run.finish()
        assert run.ended() == {"n0": 0, "n1": 0}, run.story()
        assert sorted(lossy.lost) == sorted(kinds)
        history = History.read(etcd.address, run.run_id)
        history.check(run.marks())
        assert history.numbers() == [1]


BUILDER = """
import pathlib, sys
import elasticrt

directory = pathlib.Path(sys.argv[1])

def build(workshop):
    with open(directory / "built", "a") as file:
        file.write("once\\n")
    (workshop / "data").write_text("whole")

path = elasticrt.prepare(directory / "data", build, scope="shared")
assert (path / "data").read_text() == "whole"
assert elasticrt.init().sum(1) == 2
"""


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["answer", "request", "late"])
def test_a_message_about_a_preparation_is_lost(tmp_path: Path, etcd: EtcdServer, loss: Loss) -> None:
    """E11, S9, D01: the builder's claim and its "done" are lost: it is built once, all use it, and nobody fails."""
    (tmp_path / "builder.py").write_text(BUILDER)
    options = ["--nnodes", "2", "--max-restarts", "0"]
    run_id = f"build-{secrets.token_hex(4)}"
    with (
        Cluster(tmp_path, run_id, options, [str(tmp_path / "builder.py"), str(tmp_path)]) as run,
        Lossy(etcd.address, run_id) as lossy,
    ):
        run.options += ["--etcd", str(lossy.address)]
        for kind in ("claim", "settle"):
            lossy.lose(kind, loss)
        run.start("n0")
        run.start("n1")
        assert run.ended() == {"n0": 0, "n1": 0}, run.story()
        assert sorted(lossy.lost) == ["claim", "settle"]
        assert (tmp_path / "built").read_text() == "once\n"
        assert run.number() == 1
