"""Data preparation under real agents: nodes join, die and are paused while one of them builds."""

from __future__ import annotations

import secrets
import signal
from pathlib import Path

import pytest

from tests.cluster import Cluster, kill

pytestmark = pytest.mark.timeout(240)

SCRIPT = Path(__file__).with_name("prepare_script.py")


class Preparing(Cluster):
    """A run whose script does nothing but prepare its data."""

    def __init__(self, directory: Path, scope: str, *options: str) -> None:
        given = ["--nnodes", "1:4", "--join", "now", *options]
        super().__init__(directory, f"prep-{secrets.token_hex(4)}", given, [str(SCRIPT), str(directory), scope])

    def lines(self, name: str) -> list[list[str]]:
        """What the workers have noted: builds (node, pid, generation), seen (node, rank, world, generation, 2 pids)."""
        path = self.directory / name
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def builds(self, number: int) -> list[list[str]]:
        """Wait for so many builds to have begun."""
        self.wait(f"{number} builds", lambda: len(self.lines("builds")) >= number)
        return self.lines("builds")

    def world(self, size: int) -> None:
        """Wait for a generation of so many ranks."""

        def reached() -> bool:
            generations = self.events("generation")
            return bool(generations) and generations[-1]["world_size"] == size

        self.wait(f"a world of {size}", reached)

    def seated(self, name: str) -> None:
        """Wait until a node's workers are started. A node that builds starts those of a new generation when it has."""
        agent = self.agents[name]
        self.wait(f"a seat for {name}", lambda: any(event["event"] == "generation" for event in agent.events))

    def go(self) -> None:
        """Let builders finish."""
        (self.directory / "go").touch()

    def whole(self) -> None:
        """Every rank of the last generation has seen one and the same complete result."""
        seen = self.lines("seen")
        newest = max(int(line[3]) for line in seen)
        last = [line for line in seen if int(line[3]) == newest]
        assert sorted(int(line[1]) for line in last) == list(range(int(last[0][2])))
        assert all(line[4] == line[5] for line in seen)


def _other(cluster: Cluster, node: str) -> str:
    return next(name for name in cluster.agents if name != node)


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["shared", "node"])
def test_a_builder_outlives_changes_of_the_membership(tmp_path: Path, scope: str) -> None:
    """D06, L1: a node dies and another joins while one builds; it builds on, once, and the others use what it made."""
    with Preparing(tmp_path, scope, "--nproc-per-node", "2") as cluster:
        cluster.start("a")
        ((_, pid, _),) = cluster.builds(1)
        cluster.start("b")
        cluster.seated("b")
        kill(cluster.agents["b"].pid)
        cluster.wait("b's loss", lambda: bool(cluster.events("member_lost")))
        cluster.start("c")
        cluster.seated("c")
        cluster.go()
        codes = cluster.ended()
        assert codes == {"a": 0, "b": -signal.SIGKILL, "c": 0}, cluster.story()
        assert [line for line in cluster.lines("builds") if line[0] == "a"] == [["a", pid, "1"]], cluster.story()
        if scope == "shared":
            assert len(cluster.lines("builds")) == 1
        cluster.whole()


@pytest.mark.slow
def test_a_builder_that_raises_ends_the_run_with_its_error(tmp_path: Path) -> None:
    """D05: one node's build function fails; all nodes end with its words and code 6, and nothing is tried again."""
    with Preparing(tmp_path, "shared") as cluster:
        (tmp_path / "fail").touch()
        cluster.start("a")
        cluster.start("b")
        cluster.world(2)
        cluster.go()
        assert set(cluster.ended().values()) == {6}, cluster.story()
        results = cluster.events("result")
        assert {result["node"] for result in results} == {"a", "b"}
        assert all("ValueError: no such corpus" in result["reason"] for result in results), cluster.story()
        assert len({line[2] for line in cluster.lines("builds")}) <= 2
        assert not (tmp_path / "data").exists()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "agent"])
def test_a_builder_that_is_killed_is_replaced(tmp_path: Path, victim: str) -> None:
    """D01, L1: another process, or another node after the builder's lease has ended, builds all anew."""
    with Preparing(tmp_path, "shared") as cluster:
        cluster.start("a")
        cluster.start("b")
        cluster.world(2)
        node, pid, _ = cluster.builds(1)[-1]
        kill(int(pid) if victim == "worker" else cluster.agents[node].pid)
        again = cluster.builds(2)[-1]
        assert victim == "worker" or again[0] != node
        cluster.go()
        codes = cluster.ended()
        assert set(codes.values()) <= {0, -signal.SIGKILL}, cluster.story()
        assert codes[_other(cluster, node)] == 0
        cluster.whole()
        assert not list(tmp_path.glob(".data.shared-*"))


@pytest.mark.slow
def test_a_builder_paused_beyond_its_lease_publishes_nothing(tmp_path: Path) -> None:
    """D02, S9: agent and builder stand still; another node builds; the first wakes up, and uses what is there."""
    with Preparing(tmp_path, "shared", "--lease-ttl", "2s") as cluster:
        cluster.start("a")
        cluster.start("b")
        cluster.world(2)
        node, pid, _ = cluster.builds(1)[-1]
        for each in (cluster.agents[node].pid, int(pid)):
            kill(each, signal.SIGSTOP)
        other, second, _ = cluster.builds(2)[-1]
        assert other != node
        cluster.go()
        cluster.wait("the other's result", (tmp_path / "data").is_dir)
        for each in (int(pid), cluster.agents[node].pid):
            kill(each, signal.SIGCONT)
        assert set(cluster.ended().values()) == {0}, cluster.story()
        cluster.whole()
        assert (tmp_path / "data" / "first").read_text() == second


DIES_IN_A_PAUSE = """
import os, signal, torch, elasticrt
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel as DDP

def build(directory):
    print(os.getpid(), file=Path("builds").open("a"), flush=True)
    if len(Path("builds").read_text().split()) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    (directory / "data").write_text("all of it")

ctx = elasticrt.init()
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loop = elasticrt.Loop("ckpt", model=model, optimizer=optimizer)
for step in loop.steps(10):
    if step == 5:
        with loop.pause("data"):
            elasticrt.prepare("data", build, scope="shared")
        assert Path("data/data").read_text() == "all of it"
    with loop.step():
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(("nodes", "workers"), [(1, 2), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_a_builder_that_dies_in_a_pause_is_replaced(tmp_path: Path, nodes: int, workers: int) -> None:
    """D01, L1: its agent lives, so its lease does not end; the survivors wait in the pause, and one of them builds."""
    (tmp_path / "train.py").write_text(DIES_IN_A_PAUSE)
    options = ["--nnodes", str(nodes), "--nproc-per-node", str(workers)]
    names = [f"n{number}" for number in range(nodes)]
    with Cluster(tmp_path, f"pause-{secrets.token_hex(4)}", options, ["train.py"]) as cluster:
        for name in names:
            cluster.start(name)
        assert cluster.ended(90) == dict.fromkeys(names, 0), cluster.story()
    assert len((tmp_path / "builds").read_text().split()) == 2


def test_a_build_that_raises_is_not_repeated_on_its_node(tmp_path: Path) -> None:
    """D05: the other workers of the node, which wait for it, fail with its error."""
    script = """
import os, elasticrt
from pathlib import Path

def build(directory):
    print(os.getpid(), file=Path("builds").open("a"), flush=True)
    raise OSError("the server is busy")

elasticrt.prepare("data", build)
"""
    (tmp_path / "train.py").write_text(script)
    options = ["--nnodes", "1", "--nproc-per-node", "3"]
    with Cluster(tmp_path, f"raises-{secrets.token_hex(4)}", options, ["train.py"]) as cluster:
        cluster.start("n0")
        assert cluster.ended(60) == {"n0": 6}, cluster.story()
        (result,) = cluster.events("result")
    assert "OSError: the server is busy" in result["reason"]
    assert len((tmp_path / "builds").read_text().split()) == 1
