"""The ledger after kills, joins and drains: `elasticrt ledger check` proves that no sample was lost or repeated."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrt.audit.exactly_once import AuditResult, check
from elasticrt.cli.audit import books
from tests.chaos.test_storm import Storm
from tests.cluster import AgentProcess

SAMPLES, BATCH = 1010, 20

SCRIPT = f"""
import os, time
from pathlib import Path
import torch, torch.nn.functional as F, elasticrt
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

ctx = elasticrt.init()
data = TensorDataset(torch.randn({SAMPLES}, 8), torch.randn({SAMPLES}, 1))
sampler = elasticrt.ElasticBatchSampler(data, global_batch_size={BATCH}, micro_batch_size=4)
loader = DataLoader(data, batch_sampler=sampler)
model = DDP(torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loop = elasticrt.Loop("ckpt", sampler=sampler, model=model, optimizer=optimizer, every="15 steps", memory=0.05,
                      ledger=os.environ["LEDGER"])
for epoch in loop.epochs(1000):
    for x, y in loop.batches(loader):
        F.mse_loss(model(x), y).backward()
        if loop.complete:
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
    if ctx.sum(int(Path("enough").exists())):
        break
"""


class SharedDisk(Storm):
    """Nodes that write one ledger together."""

    ledger = "ledger"

    def wrap(self, name: str, command: list[str]) -> list[str]:
        """With the directory of its ledger."""
        return ["env", f"LEDGER={self.ledger.format(name)}", *command]


class OwnDisks(SharedDisk):
    """Nodes that each have a ledger of their own."""

    ledger = "ledgers/{}"


def _under_faults(
    tmp_path: Path, seed: int, *, faults: int, nodes: int, kind: type[Storm] = SharedDisk
) -> tuple[list[str], AuditResult]:
    """Train while `faults` things happen, drawn from the seed; what happened, and what the ledger says."""
    draw = random.Random(seed)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ["--nnodes", "1:4", "--join", "now", "--max-restarts", "1000"]
    told: list[str] = []
    with kind(tmp_path, options, [str(script)]) as storm:
        for _ in range(nodes):
            storm.add()
        storm.wait_for_commits(1)
        for _ in range(faults):
            told.append(storm.disturb(draw))
            storm.wait_for_step_after(storm.last_step() + draw.randrange(2, 20))
        storm.wait("everybody's arrival", lambda: all(map(_has_arrived, storm.agents.values())))
        (tmp_path / "enough").write_text("")
        codes = storm.ended(200)
        survivors = [code for code in codes.values() if code not in (-signal.SIGKILL, 143)]
        assert set(survivors) == {0}, f"{told}\n{storm.story()}"
    return told, check(books(*_directories(tmp_path)))


def _directories(tmp_path: Path) -> list[Path]:
    """The ledger that all nodes share, or those of the nodes."""
    return sorted((tmp_path / "ledgers").glob("*")) or [tmp_path / "ledger"]


def _has_arrived(agent: AgentProcess) -> bool:
    """Whether it has joined, or is gone again: one that comes after the end of the run finds nobody."""
    return agent.process.poll() is not None or any(event["event"] == "agent_started" for event in agent.events)


def _proven(tmp_path: Path, told: list[str], verdict: AuditResult) -> None:
    assert verdict.problems == (), told
    assert verdict.steps == len(verdict.epochs) * -(-SAMPLES // BATCH)
    assert {(each.trained, each.left_out) for each in verdict.epochs} == {(SAMPLES, 0)}
    command = [sys.executable, "-m", "elasticrt", "ledger", "check", *map(str, _directories(tmp_path))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("each sample counts exactly once\n")
    print(f"{len(told)} faults: {', '.join(told)}\n{done.stdout}")


@pytest.mark.slow
def test_five_faults(tmp_path: Path) -> None:
    """S5, D09: five faults; the ledger proves each sample of each epoch exactly once."""
    told, verdict = _under_faults(tmp_path, 5, faults=5, nodes=3)
    _proven(tmp_path, told, verdict)
    assert verdict.starts > 3


def test_five_faults_with_a_ledger_on_each_node(tmp_path: Path) -> None:
    """S5: nodes that share no directory; their ledgers together prove the same, and without one of them nothing."""
    told, verdict = _under_faults(tmp_path, 5, faults=5, nodes=3, kind=OwnDisks)
    _proven(tmp_path, told, verdict)
    first, *others = _directories(tmp_path)
    assert len(others) >= 2
    assert any("nothing was written by rank" in problem for problem in check(books(*others)).problems), first


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("seed", "kind"), [(1, SharedDisk), (2, SharedDisk), (1, OwnDisks), (2, OwnDisks)])
def test_twenty_four_faults(tmp_path: Path, seed: int, kind: type[Storm]) -> None:
    """S5, X01, D09: 24 kills of workers and nodes, drains and joins; each sample of each epoch counts exactly once."""
    told, verdict = _under_faults(tmp_path, seed, faults=24, nodes=3, kind=kind)
    _proven(tmp_path, told, verdict)
    assert verdict.starts > 15
    assert verdict.redone > 0
