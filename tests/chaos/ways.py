"""Ways to write a training loop, each as a user would write it, in which a rank is killed and the others live on.

    python ways.py NAME DIRECTORY [VICTIM STEP POINT]       one of them, under `elasticrt run`
    python ways.py DIRECTORY NAME...                        undisturbed and alone, one after the other

Everything is computed in double precision, so that equal means equal.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  Everybody calls it F.
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  Everybody calls it DDP.
from torch.utils.data import DataLoader, Dataset, IterableDataset

import elasticrt
from elasticrt.distributed import regroup
from elasticrt.distributed.agent_client import status_page, worker_env

SAMPLES, BATCH, EPOCHS = 120, 12, 4
STEPS = EPOCHS * SAMPLES // BATCH
LET_IN = 30
"""The step in which the replacement of the killed rank is waited for."""


class Trial:
    """What a test wants of a script: somebody dies at `point` of the step after `step`; what was done is written down.

    Attributes:
        directory: for checkpoints and notes.
    """

    def __init__(self, ctx: elasticrt.Context, directory: Path, fault: tuple[int, int, str] | None) -> None:
        self._ctx, self.directory, self._fault = ctx, directory, fault
        self._notes = (directory / f"{os.getpid()}.jsonl").open("a", buffering=1)
        self._loop: elasticrt.Loop | None = None
        self._step = 0
        self._went_on = directory / "went-on"
        self.note(beside=worker_env().beside)
        deadline = time.monotonic() + 60
        # On a busy machine a replacement can be ready before the loss is dealt with, and would take part from then on.
        while worker_env().beside and not self._went_on.exists() and time.monotonic() < deadline:
            time.sleep(0.002)

    def loop(self, **arguments: Any) -> elasticrt.Loop:
        """The script's Loop."""
        self._loop = elasticrt.Loop(self.directory / "ckpt", every="1000 steps", **arguments)
        return self._loop

    def at(self, point: str) -> None:
        """The script has come to `point` of a step."""
        assert self._loop is not None
        step, page = self._loop.steps_done, status_page()
        self._step = step + 1
        if self._fault is None or page is None:
            return
        if self._fault == (self._ctx.rank, step, point) and self._ctx.generation == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        deadline = time.monotonic() + 60
        while step == LET_IN and self._ctx.world_size < 3 and not page.stop and time.monotonic() < deadline:
            time.sleep(0.002)

    def waits_for_the_loss(self) -> None:
        """Where the victim dies now, the others go on when they have lost it."""
        assert self._loop is not None
        deadline = time.monotonic() + 60
        if self._fault is not None and self._fault[1] == self._loop.steps_done and self._ctx.generation == 1:
            while not regroup.SOCKETS.lost_a_peer() and time.monotonic() < deadline:
                time.sleep(0.002)

    def done(self, **more: Any) -> None:
        """The block of a step has ended, one way or the other."""
        assert self._loop is not None
        if self._loop.complete:
            self.note(step=self._step, **more)
        if self._ctx.generation == 2:
            self._went_on.touch()

    def note(self, **values: Any) -> None:
        """Write something down."""
        place = {"rank": self._ctx.rank, "world": self._ctx.world_size, "generation": self._ctx.generation}
        self._notes.write(json.dumps({**place, **values}) + "\n")

    def end(self, *modules: nn.Module) -> None:
        """The script is over."""
        assert self._loop is not None
        tensors = [each.detach().double().flatten() for module in modules for each in module.state_dict().values()]
        self.note(end=torch.cat(tensors).tolist(), steps=self._loop.steps_done)
        self._notes.close()


class Numbers(Dataset[Any]):
    """Samples that know their number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
        self.y = torch.randn(SAMPLES, 2, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return i, self.x[i], self.y[i]


class Centred(nn.Module):
    """Takes away the running mean of all ranks' samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x of shape (samples, 5)."""
        sums = torch.cat([x.sum(0), x.new_tensor([len(x)])])
        dist.all_reduce(sums)
        self.mean.mul_(0.9).add_(0.1 * sums[:5] / sums[5])
        return x - self.mean


def net(inputs: int = 5, outputs: int = 2) -> nn.Module:
    """The same weights in every process."""
    torch.manual_seed(inputs)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def parts() -> tuple[Numbers, elasticrt.ElasticBatchSampler, DDP, torch.optim.Optimizer]:
    """What most of the scripts begin with."""
    data = Numbers()
    model = DDP(net())
    return data, elasticrt.ElasticBatchSampler(data, BATCH), model, torch.optim.Adam(model.parameters(), lr=0.01)


# --- The scripts ------------------------------------------------------------------------------------------------------


def plain(trial: Trial, *, loader: Callable[..., Any] = DataLoader, micro: int | None = None, **options: Any) -> None:
    """The README's script."""
    data, _, model, optimizer = parts()
    sampler = elasticrt.ElasticBatchSampler(data, BATCH, micro_batch_size=micro)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=STEPS)
    loop = trial.loop(sampler=sampler, model=model, optimizer=optimizer, scheduler=scheduler)
    batches = loader(data, batch_sampler=sampler, **options)
    for epoch in loop.epochs(EPOCHS):
        for i, x, y in loop.batches(batches):
            with loop.step():
                trial.at("begin")
                loss = F.mse_loss(model(x), y)
                trial.at("forward")
                loss.backward()
                trial.at("backward")
                if loop.complete:
                    optimizer.step()
                    trial.at("stepped")
                    optimizer.zero_grad()
                    scheduler.step()
                    loop.report(loss=loss)
            trial.done(**({"epoch": epoch, "samples": i.tolist()} if micro is None else {}))
    trial.end(model)


def micro_batches(trial: Trial) -> None:
    """At most 3 samples in one forward."""
    plain(trial, micro=3)


def stateful_loader(trial: Trial) -> None:
    """torchdata's loader."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    plain(trial, loader=StatefulDataLoader)


def loader_workers(trial: Trial) -> None:
    """Batches are drawn ahead, by other processes."""
    plain(trial, num_workers=2)


def persistent_workers(trial: Trial) -> None:
    """The same processes in every epoch."""
    plain(trial, num_workers=2, persistent_workers=True, prefetch_factor=4)


def subgroups(trial: Trial) -> None:
    """The script has groups of its own, and makes them again when the world changes."""
    ctx = elasticrt.init()
    data, sampler, model, optimizer = parts()
    loop = trial.loop(sampler=sampler, model=model, optimizer=optimizer)
    groups: list[Any] = []

    def make_groups(_: object = None) -> None:
        halves = [list(range(ctx.world_size))[part::2] for part in range(2)]
        made = [dist.new_group(half) for half in halves if half]
        groups[:] = [made[ctx.rank % 2 % len(made)], dist.new_group()]

    loop.on_change(make_groups)
    for _ in loop.epochs(EPOCHS):
        for _, x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
            with loop.step():
                trial.at("begin")
                seen = torch.tensor([len(x)])
                dist.all_reduce(seen, group=groups[1])
                assert int(seen) == BATCH
                trial.at("forward")
                dist.all_reduce(seen, group=groups[0])
                F.mse_loss(model(x), y).backward()
                trial.at("backward")
                optimizer.step()
                optimizer.zero_grad()
            trial.done()
    trial.end(model)


def gan(trial: Trial) -> None:
    """Two models, two optimizers, several backward passes in a step, one of the models frozen in the last."""
    data = Numbers()
    sampler = elasticrt.ElasticBatchSampler(data, BATCH)
    generator, judge = DDP(net(5, 2)), DDP(net(2, 1))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.01)
    optimizer_d = torch.optim.Adam(judge.parameters(), lr=0.01)
    loop = trial.loop(
        sampler=sampler, generator=generator, judge=judge, optimizer_g=optimizer_g, optimizer_d=optimizer_d
    )
    for _ in loop.epochs(EPOCHS):
        for _, x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
            with loop.step():
                trial.at("begin")
                fake = generator(x)
                optimizer_d.zero_grad()
                (judge(fake.detach()).square().mean() + (judge(y) - 1).square().mean()).backward()
                optimizer_d.step()
                trial.at("stepped")
                optimizer_g.zero_grad()
                judge.requires_grad_(False)
                (judge.module(fake) - 1).square().mean().backward()
                trial.at("backward")
                judge.requires_grad_(True)
                optimizer_g.step()
            trial.done()
    trial.end(generator, judge)


def two_optimizers(trial: Trial) -> None:
    """One backward pass, and two optimizers one after the other. Numbers of numpy lie in the state."""
    import numpy as np

    data = Numbers()
    sampler = elasticrt.ElasticBatchSampler(data, BATCH)
    model = DDP(net(5, 2))
    first, *rest = model.parameters()
    optimizers = [torch.optim.SGD([first], lr=0.05), torch.optim.Adam(rest, lr=0.01)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda step: 0.5 * (1 + np.cos(step / STEPS)))
    loop = trial.loop(sampler=sampler, model=model, first=optimizers[0], second=optimizers[1], schedule=schedule)
    for _ in loop.epochs(EPOCHS):
        for _, x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
            with loop.step():
                trial.at("begin")
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizers[0].step()
                trial.at("stepped")
                trial.waits_for_the_loss()
                optimizers[1].step()
                model.zero_grad()
                schedule.step()
                loop.vars["best"] = np.float64(min(loop.vars.get("best", 1e9), loop.steps_done))
            trial.done()
    trial.end(model)


def averaged(trial: Trial) -> None:
    """An exponential average of the weights."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    data, sampler, model, optimizer = parts()
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    loop = trial.loop(sampler=sampler, model=model, optimizer=optimizer, ema=ema)
    for _ in loop.epochs(EPOCHS):
        for _, x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
            with loop.step():
                trial.at("begin")
                F.mse_loss(model(x), y).backward()
                trial.at("backward")
                optimizer.step()
                trial.at("stepped")
                optimizer.zero_grad()
                ema.update_parameters(model.module)
            trial.done()
    trial.end(model, ema)


def scaled(trial: Trial) -> None:
    """GradScaler; some steps overflow."""
    ctx = elasticrt.init()
    data, sampler, model, optimizer = parts()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    loop = trial.loop(sampler=sampler, model=model, optimizer=optimizer, scaler=scaler)
    for _ in loop.epochs(EPOCHS):
        for _, x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
            with loop.step():
                trial.at("begin")
                loss = F.mse_loss(model(x), y)
                if loop.steps_done % 5 == 0 and ctx.is_first:
                    loss = loss * torch.inf
                scaler.scale(loss).backward()
                trial.at("backward")
                scaler.step(optimizer)
                trial.at("stepped")
                scaler.update()
                optimizer.zero_grad()
            trial.done(scale=scaler.get_scale())
    trial.end(model)


def accumulated(trial: Trial, *, no_sync: bool = False) -> None:
    """Gradients of three steps are added up by hand."""
    data, sampler, model, optimizer = parts()
    loop = trial.loop(sampler=sampler, model=model, optimizer=optimizer)
    for _ in loop.epochs(EPOCHS):
        for number, (_, x, y) in enumerate(loop.batches(DataLoader(data, batch_sampler=sampler))):
            del number
            with loop.step():
                trial.at("begin")
                last = loop.steps_done % 3 == 2
                with model.no_sync() if no_sync and not last else contextlib.nullcontext():
                    (F.mse_loss(model(x), y) / 3).backward()
                trial.at("backward")
                if last:
                    optimizer.step()
                    trial.at("stepped")
                    optimizer.zero_grad()
            trial.done()
    trial.end(model)


def no_sync(trial: Trial) -> None:
    """The same, exchanged once in three steps."""
    accumulated(trial, no_sync=True)


def evaluated(trial: Trial) -> None:
    """Between epochs everybody evaluates a part, after what else belongs to the end of an epoch."""
    ctx = elasticrt.init()
    data, sampler, model, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loop = trial.loop(sampler=sampler, model=model, optimizer=optimizer, scheduler=scheduler)
    for epoch in loop.epochs(EPOCHS):
        model.train()
        for _, x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
            with loop.step():
                trial.at("begin")
                F.mse_loss(model(x), y).backward()
                trial.at("backward")
                optimizer.step()
                trial.at("stepped")
                optimizer.zero_grad()
            trial.done()
        scheduler.step()
        loop.vars["tails"] = loop.vars.get("tails", 0) + 1
        with loop.pause("evaluate"), torch.no_grad():
            model.eval()
            trial.at("evaluate")
            errors = [F.mse_loss(model.module(x), y).item() for _, x, y in ctx.shard(data)]
            total, count = ctx.sum(sum(errors), len(errors))
            assert count == SAMPLES
        loop.vars.setdefault("errors", []).append(total / count)
        trial.note(epoch_end=epoch, error=total / count)
    assert len(loop.vars["errors"]) == loop.vars["tails"] == scheduler.last_epoch == EPOCHS
    trial.end(model)


def early(trial: Trial) -> None:
    """Training ends when the loss is small enough, which all ranks find out together."""
    ctx = elasticrt.init()
    data, sampler, model, optimizer = parts()
    loop = trial.loop(sampler=sampler, model=model, optimizer=optimizer)
    enough = False
    for _ in loop.epochs(100):
        for _, x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
            with loop.step():
                trial.at("begin")
                loss = F.mse_loss(model(x), y)
                total = ctx.sum(loss * len(x))
                loss.backward()
                trial.at("backward")
                optimizer.step()
                trial.at("stepped")
                optimizer.zero_grad()
                enough = loop.steps_done >= STEPS - 3 and total > 0
            trial.done()
            if enough:
                break
        if enough:
            break
    trial.end(model)


def summed_late(trial: Trial) -> None:
    """Ranks tell each other their losses at the end of the step: after the optimizer's."""
    ctx = elasticrt.init()
    data, sampler, model, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
    loop = trial.loop(sampler=sampler, model=model, optimizer=optimizer, scheduler=scheduler)
    for _ in loop.epochs(EPOCHS):
        for _, x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
            with loop.step():
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                trial.at("stepped")
                loop.report(loss=ctx.sum(loss * len(x)) / BATCH)
            trial.done()
    trial.end(model)


class Book:
    """An object of the script's own that counts."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        """What it has counted."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.steps = state["steps"]


def changed_early(trial: Trial, since: int = 0) -> None:
    """An average, a schedule and a count go on before the optimizer steps, and ranks communicate after that."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    ctx = elasticrt.init()
    data, sampler, model, optimizer = parts()
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    scheduler, book = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7), Book()
    loop = trial.loop(sampler=sampler, model=model, optimizer=optimizer, ema=ema, scheduler=scheduler, book=book)
    for _ in loop.epochs(EPOCHS):
        for _, x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
            with loop.step():
                loss = F.mse_loss(model(x), y)
                loss.backward()
                if not since:
                    ema.update_parameters(model.module)
                if loop.steps_done >= since:
                    optimizer._opt_called = True  # type: ignore[attr-defined]  # The schedule warns of its order.
                    scheduler.step()
                    book.steps += 1
                trial.at("backward")
                loop.report(loss=ctx.sum(loss * len(x)) / BATCH)
                optimizer.step()
                optimizer.zero_grad()
            trial.done()
    assert book.steps == loop.steps_done - since
    trial.end(model, ema)


def changed_since(trial: Trial) -> None:
    """The same, but nothing changes early before the step in which a rank is lost."""
    changed_early(trial, 25)


def in_a_closure(trial: Trial) -> None:
    """The optimizer calls forward and backward itself, and several times."""
    data, sampler, model, _ = parts()
    # No tolerance ends it early: ranks, which see losses of their own, would differ in that.
    optimizer = torch.optim.LBFGS(model.parameters(), 0.01, max_iter=2, tolerance_grad=0, tolerance_change=0)
    loop = trial.loop(sampler=sampler, model=model, optimizer=optimizer)
    for _ in loop.epochs(EPOCHS):
        for _, x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):

            def loss(x: torch.Tensor = x, y: torch.Tensor = y) -> float:
                trial.at("begin")
                optimizer.zero_grad()
                found = F.mse_loss(model(x), y)
                found.backward()
                trial.at("backward")
                return found.item()

            with loop.step():
                optimizer.step(loss)
            trial.done()
    trial.end(model)


def outside(trial: Trial) -> None:
    """A schedule and a counter after the block, where they do not belong."""
    data, sampler, model, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
    loop = trial.loop(sampler=sampler, model=model, optimizer=optimizer, scheduler=scheduler)
    for _ in loop.epochs(EPOCHS):
        for _, x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
            with loop.step():
                trial.at("begin")
                F.mse_loss(model(x), y).backward()
                trial.at("backward")
                optimizer.step()
                optimizer.zero_grad()
            trial.done()
            scheduler.step()
            loop.vars["count"] = loop.vars.get("count", 0) + 1
    assert loop.vars["count"] == STEPS
    trial.end(model)


def own_rate(trial: Trial) -> None:
    """The learning rate is set by hand, from the step that is done."""
    data, sampler, model, optimizer = parts()
    loop = trial.loop(sampler=sampler, model=model, optimizer=optimizer)
    for epoch in loop.epochs(EPOCHS):
        for _, x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
            with loop.step():
                for group in optimizer.param_groups:
                    group["lr"] = 0.01 / (1 + epoch) * min(1.0, (loop.steps_done + 1) / 10)
                trial.at("begin")
                F.mse_loss(model(x), y).backward()
                trial.at("backward")
                optimizer.step()
                trial.at("stepped")
                optimizer.zero_grad()
            trial.done()
    trial.end(model)


def scheduled_after(trial: Trial) -> None:
    """The learning rate falls by a factor after each block, also after one that will be done again."""
    _, sampler, model, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    _train(trial, sampler, model, model, optimizer, after=scheduler.step, scheduler=scheduler)


def frozen(trial: Trial) -> None:
    """A layer is frozen in every other epoch, and so when the rank is lost."""
    inner = net()
    model = DDP(inner, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def head(epoch: int) -> nn.Module:
        inner.get_submodule("0").requires_grad_(epoch % 2 == 0)
        return model

    _train(trial, elasticrt.ElasticBatchSampler(Numbers(), BATCH), model, model, optimizer, head=head)


def caught(trial: Trial) -> None:
    """The script skips every batch that fails."""
    data, sampler, model, optimizer = parts()
    loop = trial.loop(sampler=sampler, model=model, optimizer=optimizer)
    for _ in loop.epochs(EPOCHS):
        for _, x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
            with loop.step():
                trial.at("begin")
                try:
                    F.mse_loss(model(x), y).backward()
                    trial.at("backward")
                    optimizer.step()
                except RuntimeError:
                    optimizer.zero_grad()
                    continue
                optimizer.zero_grad()
            trial.done()
    trial.end(model)


def caught_and_stepped(trial: Trial) -> None:
    """The script catches what fails in the backward pass, and lets its optimizer step all the same."""
    data, sampler, model, optimizer = parts()
    loop = trial.loop(sampler=sampler, model=model, optimizer=optimizer)
    for _ in loop.epochs(EPOCHS):
        for _, x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
            with loop.step():
                trial.at("begin")
                try:
                    F.mse_loss(model(x), y).backward()
                except RuntimeError:
                    optimizer.zero_grad()
                trial.at("backward")
                optimizer.step()
                optimizer.zero_grad()
            trial.done()
    trial.end(model)


class Stream(IterableDataset[Any]):
    """Each rank's own samples, in an order that only it knows."""

    def __iter__(self) -> Iterator[Any]:
        yield from (Numbers()[index] for index in range(dist.get_rank(), SAMPLES, dist.get_world_size()))


def streamed(trial: Trial) -> None:
    """The samples come from a stream."""
    _, _, model, optimizer = parts()
    loop = trial.loop(model=model, optimizer=optimizer)
    for _ in loop.epochs(EPOCHS):
        for _, x, y in loop.batches(DataLoader(Stream(), batch_size=2)):
            with loop.step():
                F.mse_loss(model(x), y).backward()
                trial.at("backward")
                optimizer.step()
                optimizer.zero_grad()
            trial.done()


def grouped(trial: Trial) -> None:
    """A process group of the script's own, made once, adds up the gradients."""
    model, group = net(), dist.new_group()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def exchange() -> None:
        for each in model.parameters():
            dist.all_reduce(each.grad, group=group)
            each.grad /= dist.get_world_size()

    _train(trial, elasticrt.ElasticBatchSampler(Numbers(), BATCH), model, model, optimizer, exchange=exchange)


def wrapped_anew(trial: Trial) -> None:
    """Every epoch makes a DDP module, which the Loop does not know."""
    inner = net()
    optimizer = torch.optim.Adam(inner.parameters(), lr=0.01)
    sampler = elasticrt.ElasticBatchSampler(Numbers(), BATCH)
    _train(trial, sampler, inner, inner, optimizer, head=lambda _: DDP(inner))


def simple(trial: Trial) -> None:
    """Nothing but a step."""
    _, sampler, model, optimizer = parts()
    _train(trial, sampler, model, model, optimizer)


def compiled(trial: Trial) -> None:
    """torch.compile around DDP."""
    _, sampler, model, optimizer = parts()
    _train(trial, sampler, torch.compile(model), model, optimizer)


def _train(
    trial: Trial,
    sampler: Any,
    called: Any,
    model: nn.Module,
    optimizer: Any,
    *,
    head: Callable[[int], Any] | None = None,
    exchange: Callable[[], object] = bool,
    after: Callable[[], object] = bool,
    **objects: Any,
) -> None:
    """`head` begins an epoch, and gives what is called in it; `exchange` follows a backward, `after` a block."""
    data = Numbers()
    loop = trial.loop(sampler=sampler, model=called, optimizer=optimizer, **objects)
    for epoch in loop.epochs(EPOCHS):
        called = called if head is None else head(epoch)
        for _, x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
            with loop.step():
                trial.at("begin")
                F.mse_loss(called(x), y).backward()
                exchange()
                trial.at("backward")
                optimizer.step()
                trial.at("stepped")
                optimizer.zero_grad()
            after()
            trial.done()
    trial.end(model)


def compiled_inside(trial: Trial) -> None:
    """DDP around a compiled module."""
    data = Numbers()
    model = DDP(torch.compile(net()))  # type: ignore[arg-type]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    _train(trial, elasticrt.ElasticBatchSampler(data, BATCH), model, model, optimizer)


def norm_of_all(trial: Trial) -> None:
    """A layer with a collective in its forward and a buffer that every forward changes."""
    data = Numbers()
    sampler = elasticrt.ElasticBatchSampler(data, BATCH)
    model = DDP(nn.Sequential(Centred(), net()).double())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loop = trial.loop(sampler=sampler, model=model, optimizer=optimizer)
    for _ in loop.epochs(EPOCHS):
        for _, x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
            with loop.step():
                trial.at("begin")
                loss = F.mse_loss(model(x), y)
                trial.at("forward")
                loss.backward()
                trial.at("backward")
                optimizer.step()
                trial.at("stepped")
                optimizer.zero_grad()
            trial.done()
    trial.end(model)


def drawn_by_hand(trial: Trial) -> None:
    """nanoGPT's way: `get_batch` draws where it likes; here all ranks draw the same batch, and each takes its part."""
    ctx = elasticrt.init()
    data = Numbers()
    model = DDP(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loop = trial.loop(model=model, optimizer=optimizer)
    torch.manual_seed(7)

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.randint(SAMPLES, (BATCH,)).chunk(ctx.world_size)[ctx.rank]
        return data.x[chosen], data.y[chosen]

    for step in loop.steps(STEPS):
        with loop.step():
            assert step == loop.steps_done
            trial.at("begin")
            x, y = get_batch()
            F.mse_loss(model(x), y).backward()
            trial.at("backward")
            optimizer.step()
            trial.at("stepped")
            optimizer.zero_grad()
        trial.done()
    trial.end(model)


def drawn_by_rank(trial: Trial) -> None:
    """nanoGPT's way: every rank draws samples of its own, from a seed of its own."""
    ctx = elasticrt.init()
    data = Numbers()
    model = DDP(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loop = trial.loop(model=model, optimizer=optimizer)
    torch.manual_seed(7 + ctx.rank)
    for _ in loop.steps(STEPS):
        with loop.step():
            trial.at("begin")
            chosen = torch.randint(SAMPLES, (4,))
            F.mse_loss(model(data.x[chosen]), data.y[chosen]).backward()
            trial.at("backward")
            optimizer.step()
            trial.at("stepped")
            optimizer.zero_grad()
        trial.done()
    trial.end(model)


def strided(trial: Trial) -> None:
    """ElasticDistributedSampler: DistributedSampler's shape."""
    data, _, model, optimizer = parts()
    sampler = elasticrt.ElasticDistributedSampler(data)
    loop = trial.loop(sampler=sampler, model=model, optimizer=optimizer)
    for _ in loop.epochs(EPOCHS):
        for _, x, y in loop.batches(DataLoader(data, batch_size=4, sampler=sampler)):
            with loop.step():
                trial.at("begin")
                F.mse_loss(model(x), y).backward()
                trial.at("backward")
                optimizer.step()
                trial.at("stepped")
                optimizer.zero_grad()
            trial.done()
    trial.end(model)


def without_sampler(trial: Trial) -> None:
    """A plain loader that all ranks walk alike: the batch at hand is given again."""
    ctx = elasticrt.init()
    data, _, model, optimizer = parts()
    loop = trial.loop(model=model, optimizer=optimizer)
    for epoch in loop.epochs(EPOCHS):
        loader = DataLoader(data, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(epoch))
        for _, x, y in loop.batches(loader):
            with loop.step():
                trial.at("begin")
                mine = torch.arange(BATCH).chunk(ctx.world_size)[ctx.rank]
                F.mse_loss(model(x[mine]), y[mine]).backward()
                trial.at("backward")
                optimizer.step()
                trial.at("stepped")
                optimizer.zero_grad()
            trial.done()
    trial.end(model)


WAYS: dict[str, Callable[[Trial], None]] = {
    way.__name__: way
    for way in (
        plain, micro_batches, stateful_loader, loader_workers, persistent_workers, subgroups, gan, averaged, scaled,
        two_optimizers,
        accumulated, no_sync, evaluated, early, own_rate, summed_late, changed_early, changed_since, in_a_closure,
        outside, simple, compiled, compiled_inside, norm_of_all, drawn_by_hand, drawn_by_rank, strided,
        without_sampler, frozen,
        caught, caught_and_stepped, grouped, scheduled_after, streamed, wrapped_anew,
    )
}  # fmt: skip


def main(arguments: list[str]) -> None:
    """As above."""
    ctx = elasticrt.init()
    if arguments[0] in WAYS:
        name, directory, *fault = arguments
        found = (int(fault[0]), int(fault[1]), fault[2]) if fault else None
        WAYS[name](Trial(ctx, Path(directory), found))
        return
    for name in arguments[1:]:
        directory = Path(arguments[0], name)
        directory.mkdir()
        WAYS[name](Trial(ctx, directory, None))


if __name__ == "__main__":
    main(sys.argv[1:])
