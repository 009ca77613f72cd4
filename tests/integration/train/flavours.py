"""Ways to use DDP, each trained by one function; the weights at the end must not depend on the number of ranks."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import Numbered
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import elasticrt
from tests.bench.curve_ddp import HostSyncBatchNorm

SAMPLES, EPOCHS = 27, 2


@dataclass
class Answer:
    """An output that is no container torch knows."""

    y: torch.Tensor
    extra: torch.Tensor


class Net(nn.Module):
    """Two layers and a branch; `form` says what it returns, and whether the branch can be left out."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.first = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6) if form == "syncnorm" else nn.Identity()
        self.second = nn.Linear(6, 2)
        self.branch = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> Any:
        """x of shape (samples, 5)."""
        hidden = torch.tanh(self.norm(self.first(x)))
        y = self.second(hidden)
        chosen = x[:, 0] > 0.6  # Of few samples, so that some slices have none.
        if self.form != "unused" or chosen.any():
            y = y + self.branch(x) * chosen[:, None]
        extra = hidden.square().mean()
        if self.form == "nested":
            return {"y": [y], "more": (extra, {"none": None})}
        if self.form == "several":
            return y, extra
        return Answer(y, extra) if self.form == "object" else y


def _loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    extra: Any = 0.0
    if isinstance(output, dict):
        output, extra = output["y"][0], output["more"][0]
    elif isinstance(output, tuple):
        output, extra = output
    elif isinstance(output, Answer):
        output, extra = output.y, output.extra
    loss: torch.Tensor = (output.to(target.dtype) - target).square().mean() + 0.1 * extra
    return loss


OPTIONS: dict[str, dict[str, bool]] = {
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "view": {"gradient_as_bucket_view": True},
    "all": {"gradient_as_bucket_view": True, "static_graph": True, "find_unused_parameters": True},
}


class Counted:
    """A communication hook of the user's own: the mean over the ranks, in a way torch does not have."""

    def __init__(self) -> None:
        self.buckets = 0

    def mean(self, state, bucket):
        """Twice the half of it. Torch reads the annotations, and knows none that are texts."""
        del state
        self.buckets += 1
        work = dist.all_reduce(bucket.buffer().div_(2 * dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda done: done.value()[0].mul_(2))


def _network(form: str) -> tuple[nn.Module, DistributedDataParallel]:
    """The module to call, and the DDP module in it."""
    torch.manual_seed(0)
    net: Any = Net(form).to(torch.float32 if form == "autocast" else torch.float64)
    backend = "inductor" if form.endswith("inductor") else "aot_eager"
    if form.startswith("compiled in"):
        net = torch.compile(net, backend=backend)
    ddp = DistributedDataParallel(net, **OPTIONS.get(form, {}))
    HostSyncBatchNorm.put_into(ddp)
    return (torch.compile(ddp, backend=backend) if form.startswith("compiled out") else ddp), ddp


def train(directory: Path, *, form: str, batch_size: int, micro: int | None) -> dict[str, Any]:
    """Two epochs, as a user of this form would write them."""
    data = Numbered(SAMPLES)
    sampler = elasticrt.ElasticBatchSampler(data, batch_size, micro_batch_size=micro, seed=1)
    model, ddp = _network(form)
    hook = Counted()
    if form == "hook":
        ddp.register_comm_hook(None, hook.mean)
    # Adam would make a step of a gradient that is nothing but rounding; in bfloat16 there are such.
    make = torch.optim.SGD if form == "autocast" else torch.optim.Adam
    optimizer = make(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=form in ("scaler", "overflow"), init_scale=1024.0, growth_interval=3)
    loop = elasticrt.Loop(
        directory / f"{form}-{dist.get_world_size()}-{micro}", sampler=sampler, model=model, optimizer=optimizer,
        scaler=scaler, every="1000 steps", resume="fresh",
    )  # fmt: skip
    for epoch in loop.epochs(EPOCHS):
        for _, x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
            waits = form == "no_sync" and not loop.complete
            waits = waits or (form == "accumulate" and loop.steps_done % 2 == 0)
            with ddp.no_sync() if waits else contextlib.nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=form == "autocast"):
                    output = model(x.float() if form == "autocast" else x)
                loss = _loss(output, y.float() if form == "autocast" else y)
                if form == "overflow" and loop.steps_done == 1 and epoch == 0 and dist.get_rank() == 0:
                    loss = loss * torch.inf
                scaler.scale(loss).backward()
            if loop.complete and (form != "accumulate" or loop.steps_done % 2 == 1):
                if scaler.is_enabled():
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return {
        "parameters": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
        "steps": loop.steps_done,
        "buckets": hook.buckets,
        "scale": scaler.get_scale(),
    }


def train_all(directory: Path, *, forms: list[tuple[str, int, int | None]]) -> dict[str, dict[str, Any]]:
    """Each of them with its batch and micro-batch sizes, one after the other."""
    return {form: train(directory, form=form, batch_size=batch, micro=micro) for form, batch, micro in forms}


def refused(directory: Path, *, batch_size: int) -> dict[str, str]:
    """What those that can't have micro-batches say."""
    said = {}
    for form in ("static", "syncnorm"):
        try:
            train(directory, form=form, batch_size=batch_size, micro=3)
        except elasticrt.ConfigError as error:
            said[form] = str(error)
    return said
