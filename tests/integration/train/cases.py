"""What a rank does in the tests of this folder. Everything in double precision, so that equal means equal."""

from __future__ import annotations

import contextlib
import io
import logging
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import elasticrt

SAMPLES = 53


class Numbered(Dataset[Any]):
    """Samples that know their number: (number, features, target)."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
        self.y = torch.randn(samples, 2, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return i, self.x[i], self.y[i]


class Branching(nn.Module):
    """Returns a nested output of which one part is computed from the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 2)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        """A loss can be made of each of the parts."""
        hidden = torch.tanh(self.first(x))
        return {"hidden": hidden, "more": (self.second(hidden), [hidden.square().mean()])}


def networks() -> tuple[nn.Module, nn.Module]:
    """The same weights in every process."""
    torch.manual_seed(0)
    return DistributedDataParallel(Branching().double()), DistributedDataParallel(nn.Linear(2, 2).double())


def gradients(directory: Path, *, batch_size: int, micro: int | None) -> dict[str, Any]:
    """Two epochs of two chained DDP modules with a penalty on the parameters; the final parameters."""
    data = Numbered(SAMPLES)
    sampler = elasticrt.ElasticBatchSampler(data, batch_size, micro_batch_size=micro, seed=1)
    encoder, decoder = networks()
    parameters = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    loop = elasticrt.Loop(
        directory / f"ckpt-{batch_size}-{micro}-{dist.get_world_size()}",
        sampler=sampler,
        encoder=encoder,
        decoder=decoder,
        optimizer=optimizer,
    )
    forwards = 0
    for _ in loop.epochs(2):
        for _, x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
            forwards += 1
            output = encoder(x)
            loss = (decoder(output["more"][0]) - y).square().mean() + 0.1 * output["more"][1][0]
            loss = loss + 0.01 * sum(p.square().sum() for p in parameters)
            loss.backward()
            if loop.complete:
                optimizer.step()
                optimizer.zero_grad()
    return {"parameters": torch.cat([p.detach().flatten() for p in parameters]).tolist(), "forwards": forwards}


def train(directory: Path, *, steps: int | None, epochs: int, name: str, batch_size: int = 8) -> dict[str, Any]:
    """Train up to `steps`, going on from the checkpoint in `name`; which samples the model saw in which step."""
    data = Numbered(SAMPLES)
    sampler = elasticrt.ElasticBatchSampler(data, batch_size, micro_batch_size=3, seed=1)
    model, _ = networks()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=epochs * len(sampler))
    loop = elasticrt.Loop(
        directory / name, sampler=sampler, model=model, optimizer=optimizer, scheduler=scheduler, every="1000 steps"
    )
    seen: list[tuple[int, int, list[int]]] = []
    ends: list[int] = []
    began = None
    for epoch in loop.epochs(epochs, max_steps=steps):
        began = loop.steps_done if began is None else began
        for i, x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
            ids = i.tolist() if loop._tracker.slice is not None and loop._tracker.slice.weight else []
            seen.append((epoch, loop.steps_done + 1, ids))
            (model(x)["more"][0] - y).square().mean().backward()
            if loop.complete:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        ends.append(epoch)
        loop.vars["epochs ended"] = [*loop.vars.get("epochs ended", []), epoch]
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return {
        "parameters": parameters,
        "steps": loop.steps_done,
        "began": began,
        "seen": seen,
        "ends": loop.vars["epochs ended"],
    }


def first_and_sum(directory: Path) -> dict[str, Any]:
    """local_first's order, ctx.sum's exactness, ctx.shard's completeness."""
    ctx = elasticrt.init()
    path = directory / "order.txt"
    with elasticrt.local_first() as first:
        if first:
            time.sleep(0.1)
        with path.open("a") as file:
            file.write(f"{ctx.rank}\n")
    elasticrt.barrier()
    shard = ctx.shard(Numbered(10))
    return {
        "order": path.read_text().split(),
        "first": first,
        "sum": ctx.sum(2**60, 0 if ctx.rank else 0.5, True),
        "one": ctx.sum(torch.tensor(ctx.rank)),
        "shard": [shard[i][0] for i in range(len(shard))],
        "again": elasticrt.init() is ctx,
        "place": [ctx.rank, ctx.local_rank, ctx.world_size, ctx.local_world_size, ctx.generation],
    }


def other_batches(directory: Path) -> str:
    """What each rank raises when rank 1 has another batch size."""
    data = Numbered(SAMPLES)
    sampler = elasticrt.ElasticBatchSampler(data, 5 + dist.get_rank() % 2)
    loop = elasticrt.Loop(directory / "ckpt-other-batches", sampler=sampler, model=nn.Linear(1, 1))
    try:
        next(loop.epochs(1))
    except elasticrt.CheckpointError as error:
        return str(error)
    return "nothing"


def other_loaders(directory: Path) -> str:
    """What each rank raises when the loader of rank 1, whose sampler knows no batches, has another batch size."""
    data = Numbered(SAMPLES)
    sampler = elasticrt.ElasticDistributedSampler(data)
    loader = DataLoader(data, 5 + dist.get_rank() % 2, sampler=sampler)
    loop = elasticrt.Loop(directory / "ckpt-other-loaders", sampler=sampler, model=nn.Linear(1, 1))
    try:
        for _ in loop.epochs(1):
            next(loop.batches(loader))
    except elasticrt.CheckpointError as error:
        return str(error)
    return "nothing"


def first_fails(directory: Path) -> str:
    """What the ranks raise when the one that goes first does."""
    del directory
    try:
        with elasticrt.global_first() as first:
            if first:
                Path("no such file").read_text()
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def apart(directory: Path) -> dict[str, str]:
    """What is said of a step with and without an exchange of gradients."""
    said: dict[str, str] = {}
    for name in ("alone", "wrapped"):
        model: nn.Module = nn.Linear(1, 1)
        model = DistributedDataParallel(model) if name == "wrapped" else model
        lines = io.StringIO()
        handler = logging.StreamHandler(lines)
        logging.getLogger("elasticrt").addHandler(handler)
        optimizer = torch.optim.SGD(model.parameters())
        loop = elasticrt.Loop(directory / f"apart-{name}", model=model, optimizer=optimizer)
        for _ in loop.steps(2):
            with loop.step():
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
        said[name] = lines.getvalue()
        logging.getLogger("elasticrt").removeHandler(handler)
    return said


def damaged(directory: Path) -> str:
    """What each rank gets to see when no checkpoint can be used."""
    folder = directory / "damaged"
    try:
        elasticrt.Checkpointer(folder).restore()
    except elasticrt.CheckpointError as error:
        return str(error)
    return "nothing"


def waits(directory: Path) -> dict[str, Any]:
    """What the ranks see while they wait long in `barrier`, `local_first` and `prepare`; nothing is in their store."""
    from elasticrt.distributed import barrier

    barrier._PROGRESS_S = 0.3
    ctx = elasticrt.init()
    lines = io.StringIO()
    late_s = 1.6

    def build(folder: Path) -> None:
        time.sleep(late_s)
        (folder / "x").touch()

    with contextlib.redirect_stderr(lines):
        if ctx.rank == 2:
            time.sleep(late_s)
        elasticrt.barrier()
        with elasticrt.global_first() as first:
            if first:
                time.sleep(late_s)
            # Ranks are here one after the other: nobody waits for all.
            elasticrt.prepare(directory / "waits-a", lambda folder: (folder / "x").touch())
        # As on nodes of which one has its data already.
        path = directory / f"waits-{ctx.rank}"
        elasticrt.prepare(path, build if ctx.rank == 1 else lambda folder: (folder / "x").touch())
        there = (directory / "waits-1" / "x").exists()
        try:
            elasticrt.prepare(directory / f"fails-{ctx.rank}", _refuse if ctx.rank == 1 else build)
            failed = ""
        except elasticrt.PreparationError as error:
            failed = str(error)
        elasticrt.barrier()
    for _ in range(3):
        elasticrt.barrier()
    return {"lines": lines.getvalue().splitlines(), "there": there, "failed": failed, "kept": len(barrier._written)}


def _refuse(folder: Path) -> None:
    raise ValueError(f"no corpus for {folder.name[:7]}")
