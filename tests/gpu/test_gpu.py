"""On a GPU: copies beside the training, groups on nccl and gloo, a worker that is lost, one that its GPU has failed."""

from __future__ import annotations

import io
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from elasticrt.checkpoint.snapshot import Snapshots
from elasticrt.torch_versions import bound_to
from tests.cluster import kill
from tests.gpu.runs import Run, agents_lack, missing

GPU = pytest.mark.skipif(bool(missing(real=True)), reason=missing(real=True))
WORKERS = pytest.mark.skipif(
    bool(missing(real=False) or agents_lack()), reason=missing(real=False) or agents_lack() or "runs"
)
pytestmark = pytest.mark.gpu


def shared_nccl() -> str:
    """Why several ranks of nccl cannot share this GPU, "" if they can."""
    if missing(real=True) or not dist.is_nccl_available():
        return missing(real=True) or "NOT RUN: torch without nccl"
    version = torch.cuda.nccl.version()
    alone = torch.cuda.device_count() < 2
    return f"NOT RUN: one GPU, and NCCL {version} has no ranks that share it" if alone and version < (2, 30) else ""


@GPU
def test_a_copy_is_of_the_step_that_it_was_taken_after() -> None:
    """Training that goes on at once changes nothing of it; memory on the host is pinned, and used again."""
    state = {"w": torch.arange(1 << 22, device="cuda", dtype=torch.float32), "n": torch.ones(3, device="cuda")}
    taken, found, places = Snapshots(), [], set()
    for number in range(3):
        expected = state["w"].cpu()
        buffer = io.BytesIO()

        def keep(snapshot: object, buffer: io.BytesIO = buffer) -> None:
            snapshot._fetch()
            assert snapshot._copied["w"].is_pinned()
            places.add(snapshot._copied["w"].data_ptr())
            torch.save(snapshot._copied, buffer)

        taken.take(state, [keep])
        for _ in range(50):
            state["w"].mul_(-1.5)  # At once, on the stream of the training.
        assert taken.wait(30)
        found.append(torch.equal(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)["w"], expected))
        assert number or found == [True]
    assert found == [True] * 3
    assert len(places) == 1


@GPU
def test_a_world_of_one_on_nccl() -> None:
    """Its communicator is made on the GPU that the process was told of."""
    device = torch.device("cuda", 0)
    bound = bound_to(device, "nccl")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, **bound)
    try:
        value = torch.ones(8, device=device)
        dist.all_reduce(value)
        assert value.sum().item() == 8
    finally:
        dist.destroy_process_group()


@WORKERS
@pytest.mark.timeout(300)
def test_a_worker_is_lost_one_joins_one_leaves(tmp_path: Path) -> None:
    """Workers of gloo share a GPU: survivors go on in place, and no loss of a finished step is told twice."""
    with Run(tmp_path, "gloo", 12) as run:
        began = time.monotonic()
        run.start("a")
        run.start("b")
        run.first_step(2, began)
        (victim,) = run.agents["b"].worker_pids().values()
        (survivor,) = run.agents["a"].worker_pids().values()
        killed = time.monotonic()
        kill(victim)
        run.first_step(2, run.first_step(1, killed, more=1))
        joined = time.monotonic()
        run.start("c")
        run.first_step(3, joined)
        left = time.monotonic()
        run.agents["b"].process.send_signal(signal.SIGTERM)
        run.first_step(2, left)
        assert run.agents["a"].worker_pids() == {0: survivor}
        losses: dict[int, set[float]] = {}
        for _, _, _, step, loss in run.steps():
            losses.setdefault(step, set()).add(round(loss, 4))
        assert {step: each for step, each in losses.items() if len(each) > 1} == {}
        assert sorted(losses) == list(range(1, max(losses) + 1))


@pytest.mark.skipif(bool(shared_nccl() or agents_lack()), reason=shared_nccl() or agents_lack() or "runs")
@pytest.mark.timeout(300)
def test_a_worker_of_nccl_is_lost(tmp_path: Path) -> None:
    """All workers start anew, from the newest copy, and train on."""
    with Run(tmp_path, "nccl", 12, nodes="2") as run:
        began = time.monotonic()
        run.start("a")
        run.start("b")
        run.first_step(2, began)
        (victim,) = run.agents["b"].worker_pids().values()
        kill(victim)
        run.first_step(2, time.monotonic())


@GPU
@pytest.mark.skipif(bool(agents_lack()), reason=agents_lack() or "runs")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("trouble", "said"),
    [("kernel", "a CUDA error that stays until the process ends"), ("memory", "out of GPU memory")],
)
def test_the_end_of_a_worker_names_its_trouble(tmp_path: Path, trouble: str, said: str) -> None:
    """A kernel's assertion, and more memory than there is; the others go on, and the worker is replaced."""
    with Run(tmp_path, "gloo", 12, trouble) as run:
        began = time.monotonic()
        run.start("a")
        run.start("b")
        run.wait(
            "a generation that names the trouble",
            lambda: any(said in event["cause"] for event in run.events("generation")),
        )
        run.first_step(2, began + 1)
