"""Evaluations behind a boundary, in runs of a fixed number of nodes: newcomers are needed at once, and take part."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest

from tests.cluster import TOGETHER, Cluster

Results = tuple[dict[str, list[float]], list[object]]
"""What a process has at the end: the results of evaluations by step and name; weights, variables, the scheduler."""

SCRIPT = """
import json, os, pathlib, random, signal, sys, time, torch, elasticrt
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

WAY, VICTIM, POINT, SLOW_S = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
ctx = elasticrt.init()
torch.manual_seed(0)
random.seed(0)
data = TensorDataset(torch.arange(24.0).view(24, 1))
model = DDP(torch.nn.Linear(1, 1))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
sampler = None if WAY == "steps" else elasticrt.ElasticBatchSampler(data, global_batch_size=4)
given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, **({"sampler": sampler} if sampler else {})}
loop = elasticrt.Loop("ckpt", every="1000 steps", memory=0, **given)
loop.vars["measured"] = loop.vars["between"] = 0
results, slowed = [], []

def at(point):
    if point == POINT and loop.steps_done >= 6 and ctx.rank == VICTIM and not pathlib.Path("killed").exists():
        pathlib.Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

def measure(name):
    drawn, ranks = random.random(), torch.full((3, 3), float(len(name)))
    if name == POINT and pathlib.Path("killed").exists() and not slowed:
        slowed.append(name)
        time.sleep(SLOW_S)
    dist.all_reduce(ranks)
    at(name)
    dist.all_reduce(ranks)
    assert ranks.eq(len(name) * ctx.world_size**2).all(), (name, ranks)
    loop.vars["measured"] += 1
    return [drawn, model.module.weight.item()]

def evaluate(*names):
    for name in names:
        found = loop.evaluate(measure, name)
        loop.vars["between"] += 1
        scheduler.step()
        results.append([f"{loop.steps_done} {name}", found])

def train(x):
    with loop.step():
        at("the step")
        loss = model(x).square().mean() + random.random()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

if WAY == "steps":
    for step in loop.steps(18):
        if step % 3 == 0:
            evaluate("one", "second")
        train(torch.ones(4, 1) * (step + 1))
        if loop.complete and loop.steps_done % 6 == 0:
            evaluate("behind")
else:
    for epoch in loop.epochs(3 + 2 * (WAY == "breaks")):
        for (x,) in loop.batches(DataLoader(data, batch_sampler=sampler)):
            train(x)
            if WAY == "breaks" and loop.complete and loop.steps_done % 4 == 3:
                break
        evaluate("one", "second")
        loop.vars["between"] += 1
        if loop.steps_done >= 18:
            at("the end")
            break
end = [model.module.weight.tolist(), loop.vars["measured"], loop.vars["between"], scheduler.last_epoch]
pathlib.Path(f"results-{os.getpid()}").write_text(json.dumps([results, end]))
"""


def _run(directory: Path, way: str, victim: int, point: str, slow_s: float = 0.0) -> Cluster:
    """Two nodes, of which each is needed, until their end. The evaluation after a loss takes `slow_s` longer."""
    (directory / "train.py").write_text(SCRIPT)
    script = [str(directory / "train.py"), way, str(victim), point, str(slow_s)]
    with Cluster(directory, f"full-{secrets.token_hex(4)}", ["--nnodes", "2", *TOGETHER], script) as cluster:
        cluster.start("a", "--node-rank", "0")
        cluster.start("b", "--node-rank", "1")
        assert cluster.ended(90 + slow_s) == {"a": 0, "b": 0}, cluster.story()
        return cluster


def _results(directory: Path) -> list[Results]:
    found = [json.loads(path.read_text()) for path in directory.glob("results-*")]
    assert all(len({json.dumps(each) for each in results}) == len(dict(results)) for results, _ in found), found
    return [(dict(results), end) for results, end in found]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    """What a process has at the end where nobody is lost."""
    found = {}
    for way in ("steps", "epochs", "breaks"):
        directory = tmp_path_factory.mktemp(way)
        _run(directory, way, -1, "")
        one, other = _results(directory)
        assert one == other
        found[way] = one
    return found


@pytest.mark.parametrize(
    ("way", "victim", "point", "slow_s"),
    [
        ("steps", 1, "one", 0),
        ("epochs", 0, "second", 0),
        ("epochs", 1, "the end", 0),
        ("breaks", 1, "second", 0),
        ("steps", 0, "behind", 0),
        pytest.param("steps", 1, "behind", 0, marks=pytest.mark.slow),
        pytest.param("steps", 1, "behind", 65, marks=pytest.mark.slow),
        *(
            pytest.param(way, victim, point, 0, marks=pytest.mark.slow)
            for way in ("steps", "epochs", "breaks")
            for victim in (0, 1)
            for point in ("one", "second", "the step")
            if (way, victim, point) not in (("steps", 1, "one"), ("epochs", 0, "second"), ("breaks", 1, "second"))
        ),
    ],
)
@pytest.mark.timeout(200)
def test_a_newcomer_evaluates_with_the_survivors(
    tmp_path: Path,
    undisturbed: dict[str, Results],
    *,
    way: str,
    victim: int,
    point: str,
    slow_s: float,
) -> None:
    """W02: a worker is lost in an evaluation, or in the step behind it: the newcomer makes it with the others, who live
    on. Behind the block of a step, the others make it alone, however long it takes. All have the results and the
    weights of a run in which nobody was lost."""
    cluster = _run(tmp_path, way, victim, point, slow_s)
    ends = [each["failure"] for each in cluster.events("worker_ended") if each["failure"]]
    assert len(ends) == 1 and "killed by SIGKILL" in ends[0], cluster.story()
    results, end = undisturbed[way]
    found = _results(tmp_path)
    assert len(found) == 2
    for mine, own in found:
        assert own == end, cluster.story()
        assert mine == {name: results[name] for name in list(results)[-len(mine) :]}, cluster.story()
    assert any(mine == results for mine, _ in found), "a survivor has all"
