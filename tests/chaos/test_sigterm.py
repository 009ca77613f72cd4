"""SIGTERM that reaches more, or other, processes than the agent alone."""

from __future__ import annotations

import os
import secrets
import signal
from pathlib import Path

import psutil
import pytest

from tests.cluster import Cluster

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
for epoch in loop.epochs(2):
    for x, y in loop.batches(loader):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script with a Loop of 200 steps; its argument is the number of DataLoader workers."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("loaders", [0, 2])
def test_every_process_of_a_node_gets_sigterm_at_once(tmp_path: Path, script: Path, loaders: int) -> None:
    """A02, as SLURM's scancel does it: workers and DataLoader processes stay for the handover; no step is lost."""
    options = ["--min-nodes", "1", "--max-nodes", "2", "--join", "now", "--settle", "2"]
    with Cluster(tmp_path, f"term-{secrets.token_hex(4)}", options, [str(script), str(loaders)]) as cluster:
        keeper = cluster.start("node-0")  # It starts this machine's etcd, which nobody else would.
        cluster.wait("an etcd", lambda: bool(cluster.events("registered")))
        leaver = cluster.start("node-1")
        cluster.wait("both", lambda: any(len(event["nodes"]) == 2 for event in cluster.events("generation")))
        together = cluster.number()
        cluster.wait_for_commits(1, generation=together)
        agent = psutil.Process(leaver.pid)
        processes = [agent, *agent.children(recursive=True)]
        assert len(processes) == 3 + loaders  # Agent, worker parent, worker.
        for process in processes:
            os.kill(process.pid, signal.SIGTERM)
        assert leaver.process.wait(60) == 143
        assert keeper.process.wait(60) == 0
    generations = {event["number"]: event for event in cluster.events("generation")}
    assert max(generations) == together + 1
    assert generations[together + 1]["kind"] == "drain"
    again = {event["redone"] for event in cluster.events("first_step") if event["generation"] == together + 1}
    assert again == {0}


def test_sigterm_to_a_worker_alone_ends_it(tmp_path: Path, script: Path) -> None:
    """K08: a SIGTERM of which its agent knows nothing was meant for the worker: it dies of it, and is restarted."""
    with Cluster(tmp_path, f"term-{secrets.token_hex(4)}", [], [str(script), "0"]) as cluster:
        agent = cluster.start("node-0")
        cluster.wait_for_commits(1)
        os.kill(agent.worker_pids()[0], signal.SIGTERM)
        assert cluster.ended() == {"node-0": 0}
    assert [event["code"] for event in cluster.events("worker_ended")] == [-signal.SIGTERM, 0]
