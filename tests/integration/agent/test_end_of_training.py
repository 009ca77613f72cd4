"""The last step is done, and rank 0 saves it, when a worker dies. Real processes."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from elasticrt.story.run_dir import read
from elasticrt.story.sentences import to_go_on
from tests.cluster import TOGETHER, Cluster, kill

SCRIPT = """
import time
from pathlib import Path
import torch, elasticrt
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

ctx = elasticrt.init()
data = TensorDataset(torch.randn(320, 2), torch.randn(320, 1))
sampler = elasticrt.ElasticBatchSampler(data, 8)
model = DDP(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loop = elasticrt.Loop("ckpt", every="1000 steps", sampler=sampler, model=model, optimizer=optimizer)
directory = loop._saving.checkpointer._directory

def slowly(*arguments, write=directory.write):
    print("writes", flush=True)
    while not Path("go").exists():
        time.sleep(0.01)
    return write(*arguments)

directory.write = slowly
for epoch in loop.epochs(2):
    for x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
        with loop.step():
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
print("over after", loop.steps_done, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_a_worker_that_dies_during_the_last_save_costs_no_step(tmp_path: Path, rank: int) -> None:
    """The others keep their state until that is on disk: nothing is done again, and the run succeeds."""
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--nnodes", "1:3", *TOGETHER]
    with Cluster(tmp_path, f"last-{secrets.token_hex(4)}", options, ["train.py"]) as run:
        for name in ("n0", "n1", "n2"):
            run.start(name)
        run.wait("the last save", lambda: any("writes" in agent.text() for agent in run.agents.values()), 90)
        kill(run.holder_of_rank(rank).worker_pids()[rank])
        run.wait("the others go on", lambda: run.number() > 1)
        (tmp_path / "go").touch()
        assert set(run.ended().values()) == {0}, run.story()
        assert {event["generation"] for event in run.events("first_step")} == {1}, run.story()
        assert all(event["in_place"] for event in run.events("generation") if event["number"] > 1), run.story()
        assert not run.events("unsaved"), run.story()
        assert {event["step"] for event in run.events("committed")} == {80}


ENDING = """
import sys, time
from pathlib import Path
import torch, elasticrt
from torch.nn.parallel import DistributedDataParallel as DDP

steps, late = int(sys.argv[1]), "late" in sys.argv
ctx = elasticrt.init()
model = DDP(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loop = elasticrt.Loop("ckpt", every="1000 steps", model=model, optimizer=optimizer)
for _ in loop.steps(steps):
    with loop.step():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        loop.report(step=loop.steps_done)
    if loop.steps_done == 7:
        if late and ctx.generation == 1:
            print("a rank has made all its steps", flush=True)
            time.sleep(60 if ctx.rank == 0 else 0)
        if steps > 7:
            break
print("rank", ctx.rank, [path.name[:6] for path in Path("ckpt").glob("step-*.json")], flush=True)
"""


def test_after_a_break_nobody_ends_before_the_last_step_is_saved(tmp_path: Path) -> None:
    """W02: the connections of a rank that ends would end with it, and another may be in the last collective still."""
    (tmp_path / "train.py").write_text(ENDING)
    with Cluster(tmp_path, f"early-{secrets.token_hex(4)}", ["--nproc-per-node", "3"], ["train.py", "1000"]) as run:
        agent = run.start("n0")
        assert run.ended() == {"n0": 0}, run.story()
        assert sorted(line for line in agent.text().splitlines() if "rank" in line) == [
            f"rank {rank} ['step-7']" for rank in range(3)
        ], run.story()
        assert [(event["step"], event["scalars"]) for event in run.events("step")][-1] == (7, {"step": 6.0})


@pytest.mark.parametrize("steps", [7, 1000], ids=["at its end", "by a break"])
def test_rank_0_dies_after_its_last_step_and_before_it_saves_it(tmp_path: Path, steps: int) -> None:
    """W03: the others, which wait for it at the end of the loop, save it: nothing is done again."""
    (tmp_path / "train.py").write_text(ENDING)
    options = ["--nproc-per-node", "3", "--join", "failure"]
    with Cluster(tmp_path, f"late-{secrets.token_hex(4)}", options, ["train.py", str(steps), "late"]) as run:
        agent = run.start("n0")
        run.wait("the last step", lambda: agent.text().count("a rank has made all its steps") == 3, 60)
        kill(agent.worker_pids()[0])
        assert run.ended() == {"n0": 0}, run.story()
        assert [event["in_place"] for event in run.events("generation")] == [False, True], run.story()
        assert {event["generation"] for event in run.events("first_step")} == {1}, run.story()
        assert [event["step"] for event in run.events("committed")] == [7], run.story()


TWO_LOOPS = """
import torch, elasticrt

elasticrt.init()
for directory in ("warm-up", "training"):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loop = elasticrt.Loop(directory, model=model, optimizer=optimizer)
    for _ in loop.steps(5):
        with loop.step():
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
raise ValueError("after both of them")
"""


def test_the_steps_of_a_script_with_two_loops_are_those_of_the_run(tmp_path: Path) -> None:
    """Up to which step the run is saved is counted over both of them."""
    (tmp_path / "train.py").write_text(TWO_LOOPS)
    with Cluster(tmp_path, f"two-{secrets.token_hex(4)}", ["--max-restarts", "0"], ["train.py"]) as run:
        run.start("n0")
        assert run.ended() == {"n0": 1}, run.story()
        assert to_go_on(read(run.run_dir)).startswith("step 10 is saved; to go on")


RUNS_ON = """
import multiprocessing, sys, threading, time
from pathlib import Path
import torch, elasticrt
from torch.nn.parallel import DistributedDataParallel as DDP

ctx = elasticrt.init()
model = DDP(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loop = elasticrt.Loop("ckpt", every="1000 steps", model=model, optimizer=optimizer)
kinds = {"thread": threading.Thread, "process": multiprocessing.Process}
for step in loop.steps(20):
    with loop.step():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if step == 10 and ctx.rank == 1 and ctx.generation == 1:
            kinds[sys.argv[1]](target=time.sleep, args=[1000]).start()
            raise ValueError("a bad sample")
"""


@pytest.mark.parametrize("what", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_what_runs_on_after_an_error_does_not_keep_the_others(tmp_path: Path, what: str) -> None:
    """W02: Python waits for threads and processes of a script that has failed; its worker ends all the same."""
    (tmp_path / "train.py").write_text(RUNS_ON)
    with Cluster(tmp_path, f"runs-on-{secrets.token_hex(4)}", ["--nproc-per-node", "2"], ["train.py", what]) as run:
        agent = run.start("n0")
        assert run.ended(60) == {"n0": 0}, run.story()
        assert "ValueError: a bad sample" in agent.text()
        assert "this worker failed 3 s ago, and is ended now" in agent.text(), run.story()
        assert [event["in_place"] for event in run.events("generation")][:2] == [False, True], run.story()
