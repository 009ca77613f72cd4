"""torchmetrics over all ranks, TensorBoard and wandb (offline) in the run's directory, beside elasticrt's own Loop."""

import os

import torch
import torchmetrics
import toy
import wandb
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

import elasticrt

ctx = elasticrt.init()
dataset = toy.data()
sampler = elasticrt.ElasticBatchSampler(dataset, 32)
loader = DataLoader(dataset, batch_sampler=sampler)
model = DistributedDataParallel(toy.model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loop = elasticrt.Loop("ckpt", sampler=sampler, every="1 epoch", model=model, optimizer=optimizer)
metric = torchmetrics.MeanSquaredError()
if ctx.is_first:
    writer = SummaryWriter(ctx.run_dir / "tensorboard")
    run = wandb.init(project="toy", dir=ctx.run_dir, mode="offline", id=os.environ["TORCHELASTIC_RUN_ID"])

for epoch in loop.epochs(toy.EPOCHS):
    for x, y in loop.batches(loader):
        loss = toy.loss(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with loop.pause("evaluate"):
        metric.reset()
        with torch.no_grad():
            for x, y in DataLoader(ctx.shard(dataset), batch_size=32):
                metric.update(model.module(x), y)
        error = metric.compute().item()
    if ctx.is_first:
        writer.add_scalar("error", error, epoch)
        run.log({"error": error, "epoch": epoch})
        print(f"epoch {epoch}", flush=True)
if ctx.is_first:
    writer.close()
    run.finish()
    x, y = dataset.tensors
    with torch.no_grad():
        assert abs(error - torch.nn.functional.mse_loss(model.module(x), y).item()) < 1e-5, "over all ranks"
    assert list((ctx.run_dir / "tensorboard").glob("events.*"))
    assert list((ctx.run_dir / "wandb").glob("offline-run-*"))
    toy.result(model)
