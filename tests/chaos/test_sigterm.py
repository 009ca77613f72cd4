"""SIGTERM that reaches more, or other, processes than the agent alone."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from elasticrt.store import embedded
from tests.cluster import TOGETHER, AgentProcess, Cluster, kill

SCRIPT = """
import sys, time
import torch, torch.nn.functional as F, elasticrt
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

ctx = elasticrt.init()
data = TensorDataset(torch.randn(6400, 8), torch.randn(6400, 1))
sampler = elasticrt.ElasticBatchSampler(data, global_batch_size=64)
loader = DataLoader(data, batch_sampler=sampler, num_workers=int(sys.argv[1]))
model = DDP(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loop = elasticrt.Loop("ckpt", sampler=sampler, model=model, optimizer=optimizer, every="20 steps")
for epoch in loop.epochs(int(sys.argv[2])):
    for x, y in loop.batches(loader):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script with a Loop; its arguments are the number of DataLoader workers, and of epochs of 100 steps."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(
    ("number", "loaders"),
    [
        pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.slow),
        (signal.SIGUSR1, 2),
    ],
)
def test_every_process_of_a_node_gets_a_signal_at_once(
    tmp_path: Path, script: Path, number: signal.Signals, loaders: int
) -> None:
    """A02, as SLURM's scancel does it: workers and DataLoader processes stay for the handover; no step is lost."""
    options = ["--nnodes", "1:2", "--join", "now", "--signals-to-handle", "SIGTERM,SIGUSR1", *TOGETHER]
    with Cluster(tmp_path, f"term-{secrets.token_hex(4)}", options, [str(script), str(loaders), "2"]) as cluster:
        keeper = cluster.start("node-0")  # It starts this machine's etcd, which nobody else would.
        cluster.wait("an etcd", lambda: bool(cluster.events("agent_started")))
        leaver = cluster.start("node-1")
        cluster.wait("both", lambda: any(len(event["nodes"]) == 2 for event in cluster.events("generation")))
        together = cluster.number()
        cluster.wait_for_commits(1, generation=together)
        agent = psutil.Process(leaver.pid)
        processes = [agent, *agent.children(recursive=True)]
        assert len(processes) == 3 + loaders  # Agent, worker parent, worker.
        for process in processes:
            os.kill(process.pid, number)
        assert leaver.process.wait(60) == 143
        assert keeper.process.wait(60) == 0
    generations = {event["number"]: event for event in cluster.events("generation")}
    assert max(generations) == together + 1
    assert generations[together + 1]["kind"] == "drain"
    after = [event for event in cluster.events("first_step") if event["generation"] == together + 1]
    assert {event["redone"] for event in after if event["pause_s"] is not None} == {0}


@pytest.mark.parametrize(
    "epochs", [pytest.param("1", id="at-the-end", marks=pytest.mark.slow), pytest.param("5", id="in-the-middle")]
)
def test_sigterm_to_a_worker_alone_ends_it(tmp_path: Path, script: Path, epochs: str) -> None:
    """K08: a SIGTERM of which its agent knows nothing was meant for the worker: it leaves its step, dies of the signal,
    and is restarted from there."""
    with Cluster(tmp_path, f"term-{secrets.token_hex(4)}", [], [str(script), "0", epochs]) as cluster:
        agent = cluster.start("node-0")
        cluster.wait_for_commits(1)
        os.kill(agent.worker_pids()[0], signal.SIGTERM)
        assert cluster.ended() == {"node-0": 0}
    assert [event["code"] for event in cluster.events("worker_ended")] == [-signal.SIGTERM, 0]
    assert {event["redone"] for event in cluster.events("first_step")} <= {0, None}


def _pull_the_plug(node: AgentProcess, grace_s: float) -> int:
    """What a scheduler does: SIGTERM, a grace time, SIGKILL for whatever is left. The agent's exit code."""
    processes = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
    node.process.send_signal(signal.SIGTERM)
    try:
        return node.process.wait(grace_s)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL
    finally:
        for process in processes:
            kill(process.pid)
        node.process.wait(10)


@pytest.mark.parametrize(
    "grace_s", [pytest.param(30, marks=pytest.mark.slow), 5, pytest.param(1, marks=pytest.mark.slow)]
)
def test_a_node_is_preempted(tmp_path: Path, script: Path, grace_s: int) -> None:
    """A02: within any grace time the node hands over and ends with 143; the others repeat no step."""
    options = ["--nnodes", "1:2", "--join", "now", *TOGETHER]
    with Cluster(tmp_path, f"term-{secrets.token_hex(4)}", options, [str(script), "0", "3"]) as cluster:
        keeper = cluster.start("node-0")
        cluster.wait("an etcd", lambda: bool(cluster.events("agent_started")))
        leaver = cluster.start("node-1")
        cluster.wait("both", lambda: any(len(event["nodes"]) == 2 for event in cluster.events("generation")))
        together = cluster.number()
        cluster.wait_for_commits(1, generation=together)
        assert _pull_the_plug(leaver, grace_s) == 143
        assert keeper.process.wait(60) == 0
    after = [event for event in cluster.events("first_step") if event["generation"] == together + 1]
    assert {event["redone"] for event in after if event["pause_s"] is not None} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("grace_s", [5, 1])
def test_the_only_node_is_preempted(tmp_path: Path, script: Path, grace_s: int) -> None:
    """A03: its present step is on disk before it ends with 143: the next run of that name goes on right there."""
    run_id = f"term-{secrets.token_hex(4)}"
    with Cluster(tmp_path, run_id, [], [str(script), "0", "2"]) as cluster:
        node = cluster.start("node-0")
        cluster.wait_for_commits(1)
        assert _pull_the_plug(node, grace_s) == 143
    saved = max(event["step"] for event in cluster.events("committed"))
    reached = max(event["step"] for event in cluster.events("step"))
    assert saved >= reached
    with Cluster(tmp_path, run_id, [], [str(script), "0", "2"]) as again:
        again.start("node-0")
        assert again.ended() == {"node-0": 0}
    assert again.events("first_step")[0]["step"] == saved + 1


@pytest.mark.slow
def test_every_process_of_a_run_gets_sigterm_at_once(tmp_path: Path, script: Path) -> None:
    """K04: also the etcd that the run has started for itself: the step in hand is saved, and the next start goes on."""
    run_id = f"term-{secrets.token_hex(4)}"
    with Cluster(tmp_path, run_id, [], [str(script), "0", "3"]) as cluster:
        agent = psutil.Process(cluster.start("node-0").pid)
        cluster.wait_for_commits(1)
        served = embedded.find(run_id)
        assert served is not None
        keeper = psutil.Process(served.keeper_pid)
        processes = [agent, *agent.children(recursive=True), keeper, *keeper.children(recursive=True)]
        assert len(processes) == 5  # Agent, worker parent, worker; keeper, etcd.
        for process in processes:
            os.kill(process.pid, signal.SIGTERM)
        assert cluster.ended() == {"node-0": 143}
        stopped = cluster.last_step()
        saved = max(event["step"] for event in cluster.events("committed"))
        cluster.start("node-0")
        assert cluster.ended()["node-0#1"] == 0
    assert saved >= stopped
    assert cluster.events("first_step")[-1]["step"] == saved + 1
