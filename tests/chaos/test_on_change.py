"""What `loop.on_change` tells when a worker is lost and replaced."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from tests.cluster import Cluster

SCRIPT = """
import json, os, pathlib, signal, time, torch, elasticrt
from torch.nn.parallel import DistributedDataParallel as DDP

ctx = elasticrt.init()
model = DDP(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.3)
loop = elasticrt.Loop("ckpt", every="1000 steps", memory=0, model=model, optimizer=optimizer)
told = []

def changed(change):
    told.append([change.world_size_before, change.world_size])
    if change.world_size_before:
        optimizer.param_groups[0]["lr"] *= change.world_size / change.world_size_before
    if change.world_size == 3 and loop.steps_done:
        loop.vars["last"] = loop.steps_done + 5

loop.on_change(changed)
for step in loop.steps(100_000):
    if step == loop.vars.get("last"):
        break
    with loop.step():
        if step == 5 and ctx.rank == 1 and len(told) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(2, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
pathlib.Path(f"end-{os.getpid()}").write_text(json.dumps([optimizer.param_groups[0]["lr"], told]))
"""


def test_a_newcomer_is_told_the_world_that_its_state_comes_from(tmp_path: Path) -> None:
    """A script that scales by the world size has the same learning rate on a newcomer as on the others."""
    (tmp_path / "train.py").write_text(SCRIPT)
    script = [str(tmp_path / "train.py")]
    with Cluster(tmp_path, f"change-{secrets.token_hex(4)}", ["--nnodes", "1", "--nproc-per-node", "3"], script) as run:
        run.start("a")
        assert run.ended(60) == {"a": 0}, run.story()
    found = sorted(json.loads(path.read_text()) for path in tmp_path.glob("end-*"))
    assert [told for _, told in found] == [[[0, 3], [3, 2], [2, 3]]] * 2 + [[[2, 3]]], found
    assert {round(rate, 12) for rate, _ in found} == {0.3}
