"""A worker that dies, stops or is cut off in the middle of one large message: of a collective, or of a state.

Elsewhere messages are small: they are there, or they are not. Here a part of one has come when the rest never does.
"""

from __future__ import annotations

import json
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.test_in_place import SCRIPT, Run, check_weights, fault, run
from tests.cluster import TOGETHER, Cluster, kill
from tests.netns import Network, missing
from tests.servers import EtcdServer, wheel_binary

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_in_a_large_all_reduce(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """W02: 64 MB are being added up when a rank is killed: all survivors come back, and do the step again."""
    draw = random.Random(1)
    plan = [fault("large", rank, after=draw.uniform(0, 0.05)) for rank in (1, 0, 2)]
    found = run(tmp_path, plan, "large=all_reduce", workers=3, epochs=6, timeout_s=300)
    found.check_all()
    check_weights(found, tmp_path_factory)


def check_nothing_lost(found: Run, factory: pytest.TempPathFactory) -> None:
    """No finished step was done again, whoever had to go on from it."""
    found.check_steps()
    found.check_ledger()
    found.check_replicas()
    check_weights(found, factory)


@pytest.mark.parametrize("workers", [2, 3])
def test_in_a_large_broadcast(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, workers: int) -> None:
    """W02: gloo lets nobody go that waits for the rest of a message: such a survivor leaves its newest step behind for
    whoever takes its place."""
    draw = random.Random(workers)
    plan = [fault("large", rank, after=draw.uniform(0, 0.05)) for rank in (0, 1, 0)]
    found = run(tmp_path, plan, "large=broadcast", workers=workers, epochs=6, timeout_s=300)
    check_nothing_lost(found, tmp_path_factory)


@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("point", ["sent", "received"])
def test_in_a_large_state(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, point: str, how: str) -> None:
    """W02, W08: who gives its 400 MB to a newcomer is lost in the middle of it, or the newcomer is: another rank gives
    them, or they go to the next newcomer."""
    lost = fault("last bucket", 1)
    plan = [lost, fault(point, -1, how, world=0, step=0, skip=20), dict(lost)]
    words = ("ballast=400", "every=1000 steps", "memory=0")
    found = run(tmp_path, plan, *words, workers=3, epochs=6, timeout_s=300)
    found.check_all()
    check_weights(found, tmp_path_factory)


class Site(Cluster):
    """A run whose nodes, of one worker each, have a network namespace each; etcd is on the host."""

    def __init__(self, directory: Path, network: Network, etcd: EtcdServer, plan: list[Any], *words: str) -> None:
        (directory / "faults.json").write_text(json.dumps(plan))
        options = ["--nnodes", "1:3", "--join", "now", "--lease-ttl", "60"]
        options += ["--etcd", str(etcd.address), "--insecure-etcd"]
        super().__init__(directory, f"large-{secrets.token_hex(4)}", options, [str(SCRIPT), str(directory), *words])
        self.network = network

    def wrap(self, name: str, command: list[str]) -> list[str]:
        """See `Cluster`: on the node of that name."""
        return self.network.add(name).command(command)

    def together(self, *names: str) -> None:
        """Wait until just these nodes train."""
        self.wait(f"{', '.join(names)} are together", lambda: self.nodes() == sorted(names))
        self.wait_for_step_after(self.last_step())

    def nodes(self) -> list[str]:
        """Those of the newest generation."""
        started = self.events("generation")
        return sorted(started[-1]["nodes"]) if started else []

    def cut_off(self, name: str) -> None:
        """As soon as the fault is due, let nothing reach this node any more, and nothing leave it."""
        deadline = time.monotonic() + 60
        while not (self.directory / "fault-0").exists():
            assert time.monotonic() < deadline, self.story()
            time.sleep(0.001)
        others = [node for node in self.network.nodes.values() if node.name != name]
        self.network.cut([self.network.nodes[name]], [*others, self.network.host])


@contextmanager
def site(tmp_path: Path, plan: list[Any], *words: str) -> Iterator[Site]:
    """A run without nodes. Skips, loudly, where there can be no network namespaces."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    with Network() as network:
        server = EtcdServer(wheel_binary(), tmp_path / "etcd")
        server.address = type(server.address)("http", network.host, server.port)
        with server as etcd, Site(tmp_path, network, etcd, plan, *words) as run:
            yield run


@pytest.mark.root
@pytest.mark.parametrize("large", ["all_reduce", "broadcast"])
def test_cut_off_in_a_large_message(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, large: str) -> None:
    """N11: a node's link is cut while a message of 256 MB is under way: the others go on without it."""
    plan = [fault("large", 2, "mark", world=3, step=4)]
    with site(tmp_path, plan, "1", f"large={large}", "megabytes=256") as run:
        for name in "abc":
            run.start(name, *TOGETHER)
        run.wait("all have workers", lambda: len(run.events("workers_started")) == 3)
        victim = run.holder_of_rank(2)
        run.cut_off(victim.name)
        run.wait("the others go on", lambda: len(run.nodes()) == 2)
        codes = [agent.process.wait(120) for agent in run.agents.values() if agent is not victim]
        assert codes == [0, 0], run.story()
        kill(victim.pid)
        check_nothing_lost(Run(tmp_path, run, plan, 1), tmp_path_factory)


@pytest.mark.root
def test_a_newcomer_that_is_cut_off_in_a_large_state(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """N11: a newcomer's link is cut while it gets 400 MB: the others train on, and it comes when the link is back."""
    plan = [fault("received", -1, "mark", world=0, step=0, skip=20)]
    words = ("60", "ballast=400", "every=1000 steps", "memory=0", "nap=0.02")
    with site(tmp_path, plan, *words) as run:
        run.start("a")
        run.start("b")
        run.together("a", "b")
        run.start("c")
        run.cut_off("c")
        run.together("a", "b")
        run.network.heal()
        run.together("a", "b", "c")
        assert run.ended(200) == {"a": 0, "b": 0, "c": 0}, run.story()
        found = Run(tmp_path, run, plan, 60)
        check_nothing_lost(found, tmp_path_factory)
        found.check_processes()
