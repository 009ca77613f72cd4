"""A node that is slow for long is named, and nothing else is done to it."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from elasticrt.event_log import records
from tests.cluster import Cluster
from tests.unit.story.told import story_of

SCRIPT = """
import os, sys, time
import torch, torch.nn.functional as F, elasticrt
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

ctx = elasticrt.init()
data = TensorDataset(torch.randn(640, 8), torch.randn(640, 1))
sampler = elasticrt.ElasticBatchSampler(data, 16)
model = DDP(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.001)
loop = elasticrt.Loop(os.path.join(sys.argv[1], "ckpt"), sampler=sampler, model=model, optimizer=optimizer)
for epoch in loop.epochs(10_000):
    for x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
        with loop.step():
            time.sleep(0.06 if os.environ["ELASTICRT_NODE"] == "slow" else 0.01)
            F.mse_loss(model(x), y).backward()
            optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_slow_node_is_named(tmp_path: Path) -> None:
    """W18: it is named; when it is told to leave, the node that stands by takes its place, as the report tells."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ["--nnodes", "2", "--rdzv-conf", "last_call_timeout=60"]
    with Cluster(tmp_path, f"slow-{secrets.token_hex(4)}", options, [str(script), str(tmp_path)]) as run:
        run.start("a")
        run.start("slow")
        run.wait("two train", lambda: bool(run.events("step")), timeout_s=120)
        run.start("b")
        run.wait("it is named", lambda: bool(run.events("straggler")), timeout_s=120)
        assert run.number() == 1, "nobody restarts for it"
        run.agents["slow"].process.terminate()
        run.wait("it makes room", lambda: run.number() > 1, timeout_s=60)
        run.wait_for_step_after(run.last_step() + 5)
        last = run.events("generation")[-1]
        assert (sorted(last["nodes"]), last["kind"]) == (["a", "b"], "drain"), run.story()
        told = story_of(*map(records, run.run_dir.glob("events-*.jsonl")))
        assert "slow was slow" in told.generations.all[1].cause, run.story()
        assert {each["slow"] for each in run.events("straggler")} - {""} == {"slow"}
        assert run.agents["slow"].process.wait(30) == 143
        assert not any(each["redone"] for each in run.events("first_step"))
