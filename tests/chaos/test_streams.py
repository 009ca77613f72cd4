"""An IterableDataset, whose samples come in an order that only it knows: no change of the world size in an epoch."""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from pathlib import Path

import pytest

from tests.cluster import Cluster

EPOCHS, SAMPLES = 3, 48

SCRIPT = f"""
import json, os, pathlib, signal, sys, torch, elasticrt
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

VICTIM, STEP = int(sys.argv[1]), int(sys.argv[2])
ctx = elasticrt.init()

class Stream(IterableDataset):
    def __iter__(self):
        return (float(number) for number in range(dist.get_rank(), {SAMPLES}, dist.get_world_size()))

model = DDP(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-6)
loop = elasticrt.Loop("ckpt", every="1000 steps", memory=0, model=model, optimizer=optimizer)
tried = pathlib.Path(f"tried-{{os.getpid()}}").open("w", buffering=1)
finished = pathlib.Path(f"finished-{{os.getpid()}}").open("w", buffering=1)
for epoch in loop.epochs({EPOCHS}):
    for x in loop.batches(DataLoader(Stream(), batch_size=2)):
        with loop.step():
            print(json.dumps([loop.steps_done, ctx.rank, epoch, x.tolist()]), file=tried)
            loss = model(x.float().view(-1, 1)).square().mean()
            if (ctx.rank, loop.steps_done) == (VICTIM, STEP) and not pathlib.Path("killed").exists():
                pathlib.Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if loop.complete:
            print(loop.steps_done - 1, file=finished)
"""


def _check_samples(directory: Path) -> None:
    """Each sample was trained once in each epoch: each try of a step had the same samples, and a rank has finished it.

    One rank that has finished a step is enough. Another one may have been cut off from its end by the loss of a rank,
    and then takes over the state after the step.
    """
    by_step: dict[tuple[int, int], tuple[int, list[float]]] = {}
    for path in directory.glob("tried-*"):
        for step, rank, epoch, samples in map(json.loads, path.read_text().splitlines()):
            assert by_step.setdefault((step, rank), (epoch, samples)) == (epoch, samples)
    finished = {int(line) for path in directory.glob("finished-*") for line in path.read_text().splitlines()}
    assert finished == {step for step, _ in by_step}
    found: dict[int, list[float]] = defaultdict(list)
    for epoch, samples in by_step.values():
        found[epoch] += samples
    assert {epoch: sorted(each) for epoch, each in found.items()} == {each: [*range(SAMPLES)] for each in range(EPOCHS)}


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_of_a_fixed_size_goes_on(tmp_path: Path, victim: int) -> None:
    """W02: the survivor waits for the replacement, and both go on where they were, as another rank if need be."""
    (tmp_path / "train.py").write_text(SCRIPT)
    script = [str(tmp_path / "train.py"), str(victim), "16"]
    with Cluster(tmp_path, f"stream-{secrets.token_hex(4)}", ["--nnodes", "2"], script) as cluster:
        cluster.start("a", "--node-rank", "0")
        cluster.start("b", "--node-rank", "1")
        assert cluster.ended(90) == {"a": 0, "b": 0}, cluster.story()
        assert [event["in_place"] for event in cluster.events("generation")].count(False) == 2, cluster.story()
    _check_samples(tmp_path)


def test_an_epoch_goes_on_with_as_many_as_began_it(tmp_path: Path) -> None:
    """W02: fewer can't go on in its middle: the run saves and ends, and the same command trains what is left."""
    (tmp_path / "train.py").write_text(SCRIPT)
    script, run = [str(tmp_path / "train.py"), "1", "11"], f"stream-{secrets.token_hex(4)}"
    for code in (5, 0):
        with Cluster(tmp_path, run, ["--nproc-per-node", "3"], script) as cluster:
            cluster.start("node")
            assert cluster.ended(90) == {"node": code}, cluster.story()
    _check_samples(tmp_path)
