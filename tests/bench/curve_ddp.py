"""A small digits classifier whose loss over every global batch is written down, for `loss_curve.py` and its tests.

    elasticrt run ... curve_ddp.py DIRECTORY EPOCHS PAUSE_S [KIND]

In double precision, so that what is compared is not how 1e-7 grows in hundreds of steps. KIND is one of

    whole       two linear layers (the default)
    single      the same in single precision, as people train
    syncnorm    with a batch norm over all ranks
    localnorm   with a batch norm of each rank's own: its result depends on how many ranks share a batch
    unweighted  broken on purpose: gradients are averaged over ranks as if all slices were equal
    shifted     broken on purpose: one batch is skipped after every restart
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  Everybody calls it so.
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  Everybody calls it so.
from torch.utils.data import DataLoader, TensorDataset

import elasticrt

SLOW_S = 1.0
"""For a step while the file DIRECTORY/slow is there: somebody waits for a node to come."""


class CrashError(Exception):
    """The process is to end as if killed, after the step that is being trained."""


class _Sum(torch.autograd.Function):
    """The sum over all ranks; its gradient is the sum of theirs."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Collective."""
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Collective as well."""
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class HostSyncBatchNorm(nn.SyncBatchNorm):
    """Torch's own refuses tensors on the host; this is its arithmetic with two sums over all ranks."""

    @classmethod
    def put_into(cls, model: nn.Module) -> None:
        """Let every BatchNorm1d of `model` be one of these: after DDP is made, which refuses them on the host, too."""
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm1d):
                layer.__class__ = cls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` has shape (samples of this rank, features)."""
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        count = torch.tensor(float(len(x)))
        dist.all_reduce(count)
        samples = count.item()
        mean = _Sum.apply(x.sum(0)) / samples
        variance = _Sum.apply((x - mean).square().sum(0)) / samples
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * samples / max(1.0, samples - 1.0), self.momentum)
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


def network(kind: str) -> nn.Module:
    """The same weights in every process."""
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(64)] if kind in ("syncnorm", "localnorm") else []
    return nn.Sequential(nn.Linear(64, 64), *norms, nn.ReLU(), nn.Linear(64, 10))


def digits(dtype: torch.dtype) -> TensorDataset:
    """1,797 pictures of 8 x 8 points."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return TensorDataset(torch.tensor(found.data, dtype=dtype) / 16, torch.tensor(found.target))


def train(
    directory: str,
    epochs: int,
    pause_s: float,
    kind: str = "whole",
    *,
    every: str = "10 steps",
    until: int | None = None,
    crash: int | None = None,
) -> None:
    """Train; each line of the record is one global batch as one process would have seen it.

    `until`: stop, and save, after so many steps. `crash`: raise CrashError in this step, after it was written down.
    """
    ctx = elasticrt.init()
    dtype = torch.float32 if kind == "single" else torch.float64
    data = digits(dtype)
    sampler = elasticrt.ElasticBatchSampler(data, global_batch_size=100)
    loader = DataLoader(data, batch_sampler=sampler)
    model = DDP(network(kind).to(dtype))
    if kind == "syncnorm":
        HostSyncBatchNorm.put_into(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    loop = elasticrt.Loop(
        f"{directory}/ckpt", sampler=sampler, model=model, optimizer=optimizer, every=every, memory=0.05
    )
    record = os.open(f"{directory}/losses.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    first = True
    for _epoch in loop.epochs(epochs, max_steps=until):
        if first and kind == "shifted" and loop.steps_done and sampler.remaining:
            sampler.advance()
        first = False
        for x, y in loop.batches(loader):
            if kind == "unweighted":
                loop._weighting._factor = 1.0
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = ctx.sum(loss.item() * loop._tracker.slice.weight / ctx.world_size)
            if ctx.is_first:
                line = {
                    "step": loop.steps_done + 1,
                    "loss": total,
                    "world": ctx.world_size,
                    "generation": ctx.generation,
                }
                os.write(record, (json.dumps(line) + "\n").encode())
            if loop.steps_done + 1 == crash:
                loop._saving.checkpointer.wait()  # So that it is known how many steps are done again.
                raise CrashError
            time.sleep(SLOW_S if Path(directory, "slow").exists() else pause_s)
    if ctx.is_first:
        weights = {name: value.flatten().tolist() for name, value in model.module.state_dict().items()}
        os.write(record, (json.dumps({"weights": weights}) + "\n").encode())
    os.close(record)


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:5])
