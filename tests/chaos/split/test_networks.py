"""Nodes in network namespaces, and cables cut between them and etcd in every way (DEPLOY.md, section C).

A cut is silent: packets vanish, nobody is told, and connections stay as they were. What is asked of every story: one
history of commits (S1, S2), no generation without a cause, and all nodes together again at the end.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster import AgentProcess
from tests.integration.trouble.stepping import History, Stepping, alive
from tests.netns import Network, NetworkNode, missing
from tests.servers import EtcdServer, wheel_binary

pytestmark = [pytest.mark.root]

TTL_S = 2.0
GROUP_TIMEOUT_S = 6.0
"""Of a collective that hears nothing: the only thing that ends one when packets vanish."""


class Site(Stepping):
    """A run whose nodes have a network namespace each; etcd is on the host."""

    def __init__(
        self, tmp_path: Path, network: Network, etcd: EtcdServer, nodes: str, ttl_s: float = TTL_S, **options: float
    ) -> None:
        self.network = network
        self.etcd = etcd
        flags = [
            "--nnodes",
            nodes,
            "--lease-ttl",
            f"{ttl_s:g}",
            "--rdzv-conf",
            "last_call_timeout=3",
            "--insecure-etcd",
        ]
        flags += ["--etcd", str(etcd.address)]
        super().__init__(tmp_path, *flags, timeout_s=GROUP_TIMEOUT_S, **options)
        self.host = network.host

    def wrap(self, name: str, command: list[str]) -> list[str]:
        """See `Cluster`: on the node of that name."""
        return self.node(name).command(command)

    def node(self, name: str) -> NetworkNode:
        """The machine of that name; a new one the first time."""
        node = self.network.nodes.get(name)
        return node if node is not None and node.exists else self.network.add(name)

    def nodes_of(self, *names: str) -> list[NetworkNode]:
        """Their machines."""
        return [self.network.nodes[name] for name in names]

    def together(self, *names: str, timeout_s: float = 60.0) -> int:
        """Wait until exactly these nodes are in the newest generation and have done some steps in it; its number."""

        def newest() -> bool:
            started = self.events("generation")
            return bool(started) and sorted(started[-1]["nodes"]) == sorted(names)

        self.wait(f"{', '.join(names)} are together", newest, timeout_s)
        number = self.number()
        self.wait(
            f"steps of generation {number} or a later one",
            lambda: len({mark.step for mark in self.marks(self.number())}) >= 4,
            timeout_s,
        )
        return self.number()

    def ends_well(self, *lost: str) -> History:
        """New commits, code 0 from all (but those whose power was cut), a sound history."""
        self.wait_for_commits(len(self.events("committed")) + 2)
        self.finish()
        codes = self.ended()
        assert {code for name, code in codes.items() if name not in lost} == {0}, self.story()
        history = History.read(self.etcd.address, self.run_id)
        history.check(self.marks())
        return history


@contextmanager
def site(
    tmp_path: Path, nodes: str, names: tuple[str, ...], *, kind: type[Site] = Site, **options: float
) -> Iterator[Site]:
    """Nodes that train together. Skips, loudly, where there can be no network namespaces."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    with Network() as network:
        server = EtcdServer(wheel_binary(), tmp_path / f"etcd-{secrets.token_hex(2)}")
        server.address = type(server.address)("http", network.host, server.port)
        with server as etcd, kind(tmp_path, network, etcd, nodes, **options) as run:
            for name in names:
                run.start(name)
            run.together(*names)
            run.wait_for_commits(1)
            yield run


def _other_than_rank_0(run: Site) -> AgentProcess:
    return next(agent for agent in run.agents.values() if 0 not in agent.worker_pids())


def _leader(run: Site) -> str:
    """The holder of the oldest member key."""
    history = History.read(run.etcd.address, run.run_id)
    return min((revision, name) for revision, name, member in history.members if member is not None)[1]


@pytest.mark.slow
def test_power_loss(tmp_path: Path) -> None:
    """N11, A01: a machine is gone without a word, not even a reset: the other finds out by its lease and goes on."""
    with site(tmp_path, "1:2", ("a", "b")) as run:
        victim = _other_than_rank_0(run).name
        (survivor,) = {"a", "b"} - {victim}
        number = run.number()
        run.network.nodes[victim].power_off()
        run.together(survivor)
        assert run.number() == number + 1
        history = run.ends_well(victim)
        assert history.rank_count()[number + 1] == 1


@pytest.mark.slow
def test_cut_from_etcd_only(tmp_path: Path) -> None:
    """N01, S16: a node loses etcd but not its peers: the others go on after its lease; it stops and returns anew."""
    with site(tmp_path, "1:3", ("a", "b", "c")) as run:
        victim = _other_than_rank_0(run)
        others = {"a", "b", "c"} - {victim.name}
        workers = list(victim.worker_pids().values())
        run.network.cut(run.nodes_of(victim.name), [run.host])
        number = run.together(*others)
        run.wait("its workers have ended", lambda: not any(map(alive, workers)), 20)
        run.wait_for_silence(TTL_S)
        assert run.number() == number, "no generation while it is away"
        run.network.heal()
        run.together("a", "b", "c")
        history = run.ends_well()
        assert len(history.lives(victim.name)) == 2
        assert all(len(history.lives(name)) == 1 for name in others)


@pytest.mark.slow
def test_full_isolation(tmp_path: Path) -> None:
    """N03: a node hears nothing of anybody for three leases, comes back, and joins as a new member."""
    with site(tmp_path, "1:3", ("a", "b", "c")) as run:
        victim = run.holder_of_rank(0).name
        others = {"a", "b", "c"} - {victim}
        run.network.cut(run.nodes_of(victim), [*run.nodes_of(*others), run.host])
        run.together(*others)
        run.wait_for_silence(3 * TTL_S)
        run.network.heal()
        run.together("a", "b", "c")
        history = run.ends_well()
        assert len(history.lives(victim)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("leads", [pytest.param(False, id="N02-follower"), pytest.param(True, id="N02-leader")])
def test_cut_from_its_peers_only(tmp_path: Path, leads: bool) -> None:
    """N02, L5: a node that all can see in etcd but nobody can reach is left out, leader or not; the majority stays.

    While it is away it is not let in again and again: the number of generations is bounded.
    """
    with site(tmp_path, "1:3", ("a", "b", "c")) as run:
        leader = _leader(run)
        victim = leader if leads else max({"a", "b", "c"} - {leader})
        others = {"a", "b", "c"} - {victim}
        number = run.number()
        run.network.cut(run.nodes_of(victim), run.nodes_of(*others))
        run.together(*others, timeout_s=30)
        assert run.number() - number <= 2
        run.wait_for_silence(3 * TTL_S)
        assert run.number() - number <= 2, run.story()
        run.network.heal()
        run.together("a", "b", "c")
        history = run.ends_well()
        assert all(len(history.lives(name)) == 1 for name in others), "the healthy majority was evicted"


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["out", "in"])
@pytest.mark.parametrize("whom", ["etcd", "peer"])
def test_one_way_cuts(tmp_path: Path, direction: str, whom: str) -> None:
    """N04: only one direction of one link is cut: nobody is stuck, and after it is mended all are together again."""
    with site(tmp_path, "1:2", ("a", "b")) as run:
        number = run.number()
        if whom == "etcd":
            node = run.network.nodes["b"]
            drops = [f"{direction} {run.host}"]
        else:
            node = run.network.nodes["b"]
            drops = [f"{direction} {run.network.nodes['a'].address}"]
        node.rules(drops)
        run.wait("somebody has gone on", lambda: run.number() > number, 30)
        run.wait_for_silence(TTL_S)
        node.rules([])
        run.together("a", "b")
        run.ends_well()


@pytest.mark.slow
def test_two_halves_with_etcd_on_one_side(tmp_path: Path) -> None:
    """N05, S1, S2: two nodes and two, etcd with the first two, min-nodes 2: only that side trains and commits."""
    with site(tmp_path, "2:4", ("a", "b", "c", "d")) as run:
        near, far = ("a", "b"), ("c", "d")
        number = run.number()
        run.network.cut(run.nodes_of(*far), [*run.nodes_of(*near), run.host])
        run.together(*near)
        side = run.number()
        assert side == number + 1
        far_agents = {run.agents[name].pid for name in far}
        assert all(run.agents[name].process.poll() is None for name in far), far_agents
        run.network.heal()
        run.together("a", "b", "c", "d")
        history = run.ends_well()
        assert history.rank_count()[side] == 2
        assert all(len(history.lives(name)) == 2 for name in far)
        assert all(len(history.lives(name)) == 1 for name in near)


@pytest.mark.slow
def test_two_halves_that_both_reach_etcd(tmp_path: Path) -> None:
    """N05, L5: two nodes and two, etcd in reach of all: the leader's half goes on, the other comes back."""
    with site(tmp_path, "1:4", ("a", "b", "c", "d")) as run:
        leader = _leader(run)
        near = (leader, next(name for name in "abcd" if name != leader))
        far = tuple(name for name in "abcd" if name not in near)
        number = run.number()
        run.network.cut(run.nodes_of(*near), run.nodes_of(*far))
        run.together(*near)
        run.wait_for_silence(3 * TTL_S)
        assert run.number() == number + 1, "the other half is not let in while nobody reaches it"
        run.network.heal()
        run.together("a", "b", "c", "d")
        history = run.ends_well()
        assert all(len(history.lives(name)) == 1 for name in near), "nobody healthy begins anew"
        assert all(len(history.lives(name)) == 2 for name in far)


@pytest.mark.slow
def test_a_group_that_ran_on_and_comes_back(tmp_path: Path) -> None:
    """S2, A06: a world without etcd runs on for a thousand steps while another takes its place: nothing of it counts.

    Its state is further than the other's, and must not win.
    """
    with site(tmp_path, "1:3", ("a", "b"), pace_s=0.002) as run:
        cut_at = run.newest_step()
        run.network.cut(run.nodes_of("a", "b"), [run.host])
        run.network.add("c")
        run.network.cut(run.nodes_of("a", "b"), run.nodes_of("c"))
        old = run.number()
        run.start("c")
        run.together("c")
        run.wait("a thousand steps that nobody wants", lambda: run.newest_step(old) > cut_at + 1000)
        head = max(event["step"] for event in run.events("committed"))
        assert run.newest_step(old) > cut_at + 1000
        run.network.heal()
        run.together("a", "b", "c")
        history = run.ends_well()
        assert [len(history.lives(name)) for name in ("a", "b", "c")] == [2, 2, 1]
        lost = [commit for revision, commit in history.commits if commit.generation == old]
        assert max(commit.step for commit in lost) <= cut_at + 100, "no commit of the cut-off group after the cut"
        assert head
