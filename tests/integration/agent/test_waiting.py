"""Too few nodes: the survivors save their newest step and wait with it; what is told of that. Real agents."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elasticrt.story.buckets import TRAIN, WAITING, totals
from elasticrt.story.run_dir import read
from elasticrt.story.sentences import state
from tests.cluster import TOGETHER, Cluster

SCRIPT = """
import time
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
import elasticrt
ctx = elasticrt.init()
model = DDP(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loop = elasticrt.Loop("ckpt", model=model, optimizer=optimizer, every="10000 steps")
for _ in loop.steps(100_000):
    with loop.step():
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
"""


def command(run: Cluster, *words: str) -> str:
    """What a command says about the run."""
    line = [sys.executable, "-m", "elasticrt", *words, "--log-dir", "run"]
    done = subprocess.run(line, cwd=run.directory, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def running(directory: Path, nnodes: str, nodes: int) -> Iterator[Cluster]:
    """A run with this `--nnodes` that has made some steps on so many nodes."""
    (directory / "train.py").write_text(SCRIPT)
    with Cluster(directory, f"waits-{secrets.token_hex(4)}", ["--nnodes", nnodes, *TOGETHER], ["train.py"]) as run:
        for number in range(nodes):
            run.start(f"n{number}")
        run.wait("steps", lambda: run.last_step() > 5)
        yield run


def waits(run: Cluster) -> bool:
    """Whether the newest generation waits for nodes."""
    begun = run.events("generation")
    return bool(begun) and begun[-1]["waits"]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["stop", "SIGTERM"])
def test_a_run_that_waits_is_stopped_and_loses_no_step(tmp_path: Path, by: str) -> None:
    """Its last node ends at once; the same run id goes on after the newest step that it had finished."""
    with running(tmp_path, "2:3", 3) as run:
        for name in ("n0", "n1"):
            run.agents[name].process.kill()
        run.wait("a generation that waits", lambda: waits(run))
        run.wait("a checkpoint", lambda: bool(run.events("committed")))
        at = time.time()
        status, told = command(run, "status"), read(run.run_dir)
        assert f"run {run.run_id}: waiting for nodes for " in status
        assert "n2: waiting" in status
        assert told.lives.alive() == ("n2",)
        assert state(told, at).startswith("waiting for nodes for ")
        if by == "stop":
            command(run, "stop")
        else:
            run.agents["n2"].process.send_signal(signal.SIGTERM)
        assert run.ended()["n2"] == 143
        told = read(run.run_dir)
        step = told.checkpoints.newest
        assert state(told) == f"stopped; step {step} is saved; to go on: the same command, with --run-id {run.run_id}"
        assert {trouble.node for trouble in told.failures.all} == {"n0", "n1"}
        spent = {node: totals(spans) for node, spans in told.spans_by_node().items()}
        assert sum(spent["n2"].values()) - spent["n2"][TRAIN] > spent["n2"][WAITING] > 0
        assert told.spans_by_node()["n2"][-1].bucket == WAITING
        before = run.events("first_step")
        for name in ("n0", "n1", "n2"):
            run.start(name)
        run.wait("steps", lambda: len(run.events("first_step")) > len(before) + 2 and run.last_step() > step)
        assert {event["resumed_from"] for event in run.events("first_step")} == {0, step}


@pytest.mark.slow
def test_what_is_told_of_a_drain_and_a_resize_below_the_minimum(tmp_path: Path) -> None:
    """The commands say that the run stands still, the run does, and each change is obeyed and shown."""
    with running(tmp_path, "2:2", 2) as run:
        said = command(run, "drain", "n1")
        assert "n1 has left run " in said
        assert ": 1 node left of at least 2, the run waits for more\n" in said
        run.wait("a generation that waits", lambda: waits(run))
        step = run.last_step()
        assert "may have 1 to 2 nodes; it has 1\n" in command(run, "resize", "1:2")
        run.wait("steps", lambda: run.last_step() > step + 3 and not waits(run))
        said = command(run, "resize", "2:3")
        assert "may have 2 to 3 nodes; it has 1: it saves, and waits for 1 more node\n" in said
        run.wait("a generation that waits", lambda: waits(run))
        told = read(run.run_dir)
        assert (told.run.min_nodes, told.run.max_nodes) == (2, 3)
        assert ", as the last node: the run has stopped; step " in command(run, "drain", "n0")
        assert run.ended() == {"n0": 143, "n1": 143}
