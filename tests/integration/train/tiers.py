"""What a rank does in the tests of what is saved: on disk or in memory, and given back to whoever needs it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from cases import SAMPLES, Numbered
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import elasticrt
from elasticrt.checkpoint import stateful
from elasticrt.checkpoint.snapshot import Snapshot
from elasticrt.ipc.env import Copy, WorkerEnv
from tests.fake_worker import forget

BATCH = 8
EPOCHS = 3


class Enough(Exception):  # noqa: N818  It is no error.
    """Leaves a loop without its last save."""


class Script:
    """One start of a script with everything that people give to a Loop."""

    def __init__(self, directory: Path, *, seed: int | None = None) -> None:
        torch.manual_seed(0)
        self.data = Numbered(SAMPLES)
        self.sampler = elasticrt.ElasticBatchSampler(self.data, BATCH, seed=1, drop_last=True)
        network = nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Linear(16, 2)).double()
        model = DistributedDataParallel(network)
        # Its scale grows with every second step, so that what comes back is not what it begins with.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        self.objects = {
            "model": model,
            "optimizer": optimizer,
            "schedule": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=100),
            "scaler": self.scaler,
            "ema": AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        }
        self.loop = elasticrt.Loop(directory, sampler=self.sampler, seed=seed, every="1000 steps", **self.objects)

    def batches(self, max_steps: int | None = None) -> Iterator[Any]:
        """All that is left."""
        for _ in self.loop.epochs(EPOCHS, max_steps=max_steps):
            yield from self.loop.batches(DataLoader(self.data, batch_sampler=self.sampler))

    def train(self, batch: Any) -> None:
        """One step."""
        _, x, y = batch
        loss = (self.objects["model"](x) - y).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.objects["optimizer"])
        self.scaler.update()
        self.objects["optimizer"].zero_grad()
        self.objects["schedule"].step()
        self.objects["ema"].update_parameters(self.objects["model"].module)

    def prints(self) -> dict[str, str]:
        """A digest of each object's state, to the last bit."""
        return {name: _digest(state) for name, state in stateful.collect(stateful.checked(self.objects)).items()}


def _digest(value: Any) -> str:
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode() + value.contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key, each in value.items():
                digest.update(f"{key!r}:".encode())
                add(each)
        elif isinstance(value, (list, tuple)):
            digest.update(f"{len(value)}[".encode())
            for each in value:
                add(each)
        else:
            digest.update(repr(value).encode())

    add(value)
    return digest.hexdigest()


def leave_behind(directory: Path, *, steps: int) -> dict[str, str]:
    """Train, save to disk, and leave a copy as a handover does; what both hold."""
    script = Script(directory / "disk")
    for batch in script.batches(steps):
        script.train(batch)
    if dist.get_rank() == 0:
        with (directory / "copy").open("w+b") as file:
            size, digest = Snapshot(script.loop._state.collect()).write_to(file.fileno())
        copy = Copy(steps, script.loop.epoch, size, digest, dist.get_world_size())
        (directory / "copy.json").write_text(json.dumps(asdict(copy)))
    return script.prints()


def from_disk(directory: Path, *, name: str, damaged: int = -1) -> dict[str, Any]:
    """What a start from the checkpoint finds. On rank `damaged` a bit of what arrives is another one."""
    if dist.get_rank() == 0:
        shutil.copytree(directory / "disk", directory / name)
    dist.barrier()
    return _found(Script(directory / name), damaged)


def from_copy(directory: Path, *, damaged: int = -1) -> dict[str, Any]:
    """What a start from the copy finds: rank 0 has it in memory, the others have nothing."""
    with _worker(directory, dist.get_rank()):
        return _found(Script(directory / "nothing here"), damaged)


def _found(script: Script, damaged: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if dist.get_rank() == damaged:
        _arrives_damaged()
    try:
        for batch in script.batches():
            found = {"prints": script.prints(), "steps": script.loop.steps_done, "scale": script.scaler.get_scale()}
            if damaged < 0:  # It can be trained on, by all together.
                script.train(batch)
            raise Enough  # noqa: TRY301  The way out of a loop without its last save.
    except Enough:
        return found
    except RuntimeError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    raise AssertionError("there is nothing left to train")


@contextmanager
def _worker(directory: Path, rank: int) -> Iterator[None]:
    """This process is a worker whose generation resumes from the copy; rank 0's node holds it."""
    copy = Copy(**json.loads((directory / "copy.json").read_text()))
    fd = -1
    if rank == 0:
        fd = os.memfd_create("test", os.MFD_CLOEXEC)
        os.write(fd, (directory / "copy").read_bytes())
    world_size = dist.get_world_size()
    worker = WorkerEnv(
        rank=rank, local_rank=0, world_size=world_size, local_world_size=1, group_rank=rank,
        group_world_size=world_size, master_addr="127.0.0.1", master_port=1, restart_count=0, max_restarts=3,
        run_id="run", attempt=1, generation=2, nonce="n2", node=f"node-{rank}", run_dir="", copy=copy, state_fd=fd,
    )  # fmt: skip
    os.environ.update(worker.to_env())
    forget()
    yield
    if fd >= 0:
        os.close(fd)


def _arrives_damaged() -> None:
    """A bit changes on the way to this rank: only in what is long enough to be the state."""
    broadcast = dist.broadcast

    def damaging(tensor: torch.Tensor, *arguments: Any, **more: Any) -> Any:
        done = broadcast(tensor, *arguments, **more)
        if tensor.dtype == torch.uint8 and tensor.numel() > 2000:
            tensor[tensor.numel() // 2] ^= 8
        return done

    dist.broadcast = damaging


def numbers(directory: Path, *, steps: int, name: str, seeds: str, begins_as: str = "") -> list[list[float]]:
    """The random numbers of each step, as a script with dropout draws them; starts with the checkpoint of another.

    `seeds`: of each rank's "own", "alike" on all, or, in spite of seeds of each rank's own, those of the "loop".
    """
    rank = dist.get_rank()
    if begins_as and rank == 0:
        shutil.copytree(directory / begins_as, directory / name)
    dist.barrier()
    script = Script(directory / name, seed=5 if seeds == "loop" else None)
    seed = 0 if seeds == "alike" else rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    drawn: list[list[float]] = []
    for batch in script.batches(steps):
        script.train(batch)
        drawn.append([random.random(), float(np.random.rand()), torch.rand(1).item()])
    return drawn
