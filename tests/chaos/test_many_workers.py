"""Sixteen nodes with four workers each on one machine, of which some are lost on the way. Real processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

STEPS, SAMPLES = 150, 64
SCRIPT = f"""
import torch, elasticrt
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
ctx = elasticrt.init()
torch.manual_seed(0)
data = TensorDataset(torch.arange({STEPS * SAMPLES}.0, dtype=torch.float64).unsqueeze(1))
sampler = elasticrt.ElasticBatchSampler(data, {SAMPLES})
model = DDP(torch.nn.Linear(1, 1).double())
optimizer = torch.optim.SGD(model.parameters(), 1e-9)
loop = elasticrt.Loop("ckpt", sampler=sampler, every="1000 steps", ledger="ledger", model=model, optimizer=optimizer)
for epoch in loop.epochs(1):
    for (x,) in loop.batches(DataLoader(data, batch_sampler=sampler)):
        with loop.step():
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
if ctx.is_first:
    print("ended with", loop.steps_done, ctx.world_size, model.module.weight.item(), flush=True)
"""


def _trained(directory: Path, *faults: str) -> tuple[str, float, int]:
    """The report of a run with these faults, the weight at its end, and its world size then."""
    directory.mkdir()
    (directory / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "elasticrt", "simulate", "-q", "--nodes", "16", "--nproc-per-node", "4"]
    command += ["--nnodes", "12:16", *(word for fault in faults for word in ("--fault", fault)), "train.py"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    found = re.search(r"ended with (\d+) (\d+) (\S+)\n", done.stdout)
    assert found is not None, done.stdout[-4000:]
    assert int(found[1]) == STEPS
    check = [sys.executable, "-m", "elasticrt", "ledger", "check", "ledger"]
    assert subprocess.run(check, cwd=directory, capture_output=True, timeout=60, check=False).returncode == 0
    return done.stdout, float(found[3]), int(found[2])


@pytest.mark.slow
def test_64_workers_lose_no_step(tmp_path: Path) -> None:
    """A worker and a node are killed, and a node drains: no step is lost, and the weight is that of a quiet run."""
    _, quiet, world_size = _trained(tmp_path / "quiet")
    assert world_size == 64
    faults = ("step 30: kill worker 5", "step 60: kill node 7", "step 90: drain node 2")
    report, weight, world_size = _trained(tmp_path / "faults", *faults)
    assert world_size == 56
    assert report.count("no step lost") > len(faults)
    assert weight == pytest.approx(quiet, rel=1e-9)
