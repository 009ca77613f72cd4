"""Three agents train the digits example; something dies, comes or goes; nothing is lost and nothing counted twice.

Each story interrupts the run in the middle of an epoch, after at least two commits. What counted is taken from the
batches that the model was fed (`recorder.py`), never from a sampler.
"""

from __future__ import annotations

import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elasticrt.liveness.progress import PHASES
from tests.chaos.history import History
from tests.cluster import RECORDER, REPOSITORY, TOGETHER, AgentProcess, Cluster, gone, kill

NODES = 3
EPOCHS = 2
STEPS_PER_EPOCH = 118
BATCH = 32
EXAMPLE = REPOSITORY / "examples" / "mnist_ddp.py"

BUILD = """
import pathlib, sys
import torch

sys.path.insert(0, sys.argv[1])
import digits, elasticrt

def build(directory):
    digits.build(directory)
    whole = torch.load(directory / "train.pt", weights_only=True)
    torch.save({name: values[: int(sys.argv[3])].clone() for name, values in whole.items()}, directory / "train.pt")

elasticrt.prepare(pathlib.Path(sys.argv[2]), build)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first half of the example's data set, built once: preparation has tests of its own."""
    directory = tmp_path_factory.mktemp("data")
    argv = [sys.executable, "-c", BUILD, str(EXAMPLE.parent), str(directory / "digits"), str(STEPS_PER_EPOCH * BATCH)]
    subprocess.run(argv, check=True, timeout=60)
    return directory


@contextmanager
def _running(tmp_path: Path, data: Path, *, min_nodes: int = 1, max_nodes: int = NODES) -> Iterator[Cluster]:
    """A run whose first generation has all of its nodes, and has committed twice.

    Either all of `max_nodes` are waited for, or `min_nodes` are as many as there will be.
    """
    assert NODES in (min_nodes, max_nodes)
    (tmp_path / "records").mkdir(exist_ok=True)
    options = ["--nnodes", f"{min_nodes}:{max_nodes}", "--join", "now"]
    options += TOGETHER if max_nodes == NODES else ()
    script = [str(RECORDER), str(tmp_path / "records"), str(EXAMPLE), "--epochs", str(EPOCHS)]
    script += ["--global-batch-size", str(BATCH)]
    script += ["--data-dir", str(data), "--checkpoint-dir", str(tmp_path / "ckpt"), "--save-every", "20 steps"]
    with Cluster(tmp_path, f"kill-{secrets.token_hex(4)}", options, script) as cluster:
        for index in range(NODES):
            cluster.start(f"node-{index}")
        cluster.wait_for_commits(2)
        assert len(cluster.events("generation")[0]["nodes"]) == NODES
        yield cluster


def _check(cluster: Cluster, tmp_path: Path, *, survivors: dict[str, int], generations: int) -> History:
    """What holds at the end of every story."""
    codes = cluster.ended()
    assert codes == survivors, cluster.story()
    history = History.read(tmp_path / "records")
    history.check_ranks()
    history.check_exactly_once(STEPS_PER_EPOCH, EPOCHS)
    assert sorted(history.generations) == list(range(1, generations + 1)), cluster.story()
    for number in range(2, generations + 1):
        first = min(history.generations[number].batches, default=None)
        if first is not None:
            assert first == history.resume(number) + 1 > 1
    accuracy = _accuracy(cluster)
    assert accuracy >= 0.95
    pids = [start["pid"] for record in history.generations.values() for start in record.starts]
    assert gone([*pids, *(agent.pid for agent in cluster.agents.values())], 10.0) == []
    return history


def _accuracy(cluster: Cluster) -> float:
    found = [
        float(match)
        for agent in cluster.agents.values()
        for match in re.findall(rf"epoch {EPOCHS - 1} .*accuracy ([0-9.]+)", agent.text())
    ]
    assert len(found) == 1, cluster.story()
    return found[0]


@pytest.mark.slow
def test_undisturbed(tmp_path: Path, data: Path) -> None:
    """The reference: three nodes, one generation, every sample once in each epoch."""
    with _running(tmp_path, data) as cluster:
        _check(cluster, tmp_path, survivors={"node-0": 0, "node-1": 0, "node-2": 0}, generations=1)


def _one_worker(cluster: Cluster) -> dict[str, int]:
    agent = cluster.holder_of_rank(1)
    kill(agent.worker_pids()[1])
    return {"node-0": 0, "node-1": 0, "node-2": 0}


def _agent_of(cluster: Cluster, choose: Callable[[Cluster], AgentProcess]) -> dict[str, int]:
    agent = choose(cluster)
    workers = list(agent.worker_pids().values())
    kill(agent.pid)
    # A01, G16: its workers follow. How fast is measured elsewhere (tests/bench).
    assert gone(workers, 10.0) == []
    return {name: (-signal.SIGKILL if other is agent else 0) for name, other in cluster.agents.items()}


def _last_node(cluster: Cluster) -> dict[str, int]:
    return _agent_of(cluster, lambda cluster: cluster.holder_of_rank(2))


def _rank_zero(cluster: Cluster) -> dict[str, int]:
    return _agent_of(cluster, lambda cluster: cluster.holder_of_rank(0))


def _first_started(cluster: Cluster) -> dict[str, int]:
    return _agent_of(cluster, lambda cluster: cluster.agents["node-0"])


def _leave(cluster: Cluster) -> dict[str, int]:
    cluster.agents["node-1"].process.send_signal(signal.SIGTERM)
    return {"node-0": 0, "node-1": 143, "node-2": 0}


def _join(cluster: Cluster) -> dict[str, int]:
    cluster.start("node-3")
    return {"node-0": 0, "node-1": 0, "node-2": 0, "node-3": 0}


def _from_outside(cluster: Cluster, *command: str) -> str:
    argv = [sys.executable, "-m", "elasticrt", *command, "--run-id", cluster.run_id]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def _drain_command(cluster: Cluster) -> dict[str, int]:
    status = _from_outside(cluster, "status")
    assert "generation 1: 3 nodes, 3 workers (start)" in status
    assert "node-1: training" in status
    assert "node-1 has left" in _from_outside(cluster, "drain", "node-1")
    return {"node-0": 0, "node-1": 143, "node-2": 0}


def _resize_command(cluster: Cluster) -> dict[str, int]:
    assert "may have 1 to 2 nodes" in _from_outside(cluster, "resize", "1:2")
    cluster.wait("generation 2", lambda: cluster.number() == 2)
    cluster.wait("a standby node", lambda: "standby" in _from_outside(cluster, "status"))
    return {"node-0": 0, "node-1": 0, "node-2": 0}


@pytest.mark.parametrize(
    ("disturb", "worlds", "lossless"),
    [
        pytest.param(_one_worker, (3, 3), False, id="W02-worker", marks=pytest.mark.slow),
        pytest.param(_last_node, (3, 2), False, id="A01-node", marks=pytest.mark.slow),
        pytest.param(_rank_zero, (3, 2), False, id="W03-node-with-rank-0", marks=pytest.mark.slow),
        pytest.param(_first_started, (3, 2), False, id="A07-first-started-node", marks=pytest.mark.slow),
        pytest.param(_leave, (3, 2), True, id="A02-leave-by-SIGTERM", marks=pytest.mark.slow),
        pytest.param(_join, (3, 4), True, id="L4-join", marks=pytest.mark.slow),
        pytest.param(_drain_command, (3, 2), True, id="drain-by-command", marks=pytest.mark.slow),
        pytest.param(_resize_command, (3, 2), True, id="resize-by-command", marks=pytest.mark.slow),
    ],
)
def test_disturbed(
    disturb: Callable[[Cluster], dict[str, int]],
    worlds: tuple[int, int],
    lossless: bool,
    tmp_path: Path,
    data: Path,
) -> None:
    """One disturbance in the middle of an epoch costs one generation and no sample (S3, S5, S6).

    A planned one, a join or a leave, hands over: no step is done a second time.
    """
    grows = worlds[1] > NODES
    with _running(tmp_path, data, min_nodes=NODES if grows else 1, max_nodes=max(worlds)) as cluster:
        survivors = disturb(cluster)
        history = _check(cluster, tmp_path, survivors=survivors, generations=2)
    found = tuple(int(history.generations[g].starts[0]["env"]["WORLD_SIZE"]) for g in sorted(history.generations))
    assert found == worlds
    recoveries = cluster.events("recovery")
    assert recoveries, "every recovery says where its time went"
    for recovery in recoveries:
        assert list(recovery["phases"]) == [name for name in PHASES if name in recovery["phases"]]
        assert {"agree", "start", "script", "init", "loop", "restore", "first_step"} <= set(recovery["phases"])
        assert sum(recovery["phases"].values()) == pytest.approx(1000 * recovery["pause_s"], abs=0.01)
    again = {event["redone"] for event in cluster.events("first_step") if event["generation"] == 2}
    if lossless:
        assert again - {None} == {0}, "a newcomer does not know"


@pytest.mark.slow
def test_the_whole_run_is_killed_and_submitted_again(tmp_path: Path, data: Path) -> None:
    """A19, K04: every agent is killed; the same command again goes on from the newest checkpoint, numbers go up."""
    # The second submission meets the first one's etcd, so that numbers go on.
    with _running(tmp_path, data, min_nodes=NODES) as cluster:
        first = dict(cluster.agents)
        for agent in first.values():
            kill(agent.pid)
        for agent in first.values():
            agent.process.wait(10)
        pids = [pid for agent in first.values() for pid in agent.worker_pids().values()]
        assert gone(pids, 10.0) == []
        for index in range(NODES):
            cluster.start(f"node-{index}")
        survivors = dict.fromkeys(first, -signal.SIGKILL)
        survivors |= {name: 0 for name in cluster.agents if name not in first}
        history = _check(cluster, tmp_path, survivors=survivors, generations=2)
    assert history.resume(max(history.generations)) >= 40


@pytest.mark.slow
def test_all_nodes_are_told_to_leave(tmp_path: Path, data: Path) -> None:
    """K01, A20: SIGTERM to every node at once: the present step is saved, and the next submission goes on after it."""
    # The second submission meets the first one's etcd, so that numbers go on.
    with _running(tmp_path, data, min_nodes=NODES) as cluster:
        first = dict(cluster.agents)
        for agent in first.values():
            agent.process.send_signal(signal.SIGTERM)
        for agent in first.values():
            assert agent.process.wait(30) == 143, cluster.story()
        stopped_at = cluster.events("committed")[-1]["step"]
        done = max(
            step for record in History.read(tmp_path / "records").generations.values() for step in record.batches
        )
        assert stopped_at == done, "the last step that was trained is the one that was saved"
        for index in range(NODES):
            cluster.start(f"node-{index}")
        survivors = dict.fromkeys(first, 143)
        survivors |= {name: 0 for name in cluster.agents if name not in first}
        history = _check(cluster, tmp_path, survivors=survivors, generations=2)
    assert history.resume(max(history.generations)) == stopped_at
