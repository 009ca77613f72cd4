"""Calls DistributedSampler.set_epoch: each epoch has an order of its own, which is the same after a restart.

    elasticrt run --nnodes 2 --nproc-per-node 2 examples/styles/set_epoch.py

All ranks list the samples that they see. At the end rank 0 checks that each epoch had every sample once.
"""

import os

import torch
import torch.distributed as dist
import toy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, CHECKPOINT = 20, "set_epoch.pt"

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
dataset = TensorDataset(*toy.data().tensors, torch.arange(toy.SAMPLES))
sampler = DistributedSampler(dataset, seed=3)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)
model = DistributedDataParallel(toy.model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
orders = torch.zeros(EPOCHS, toy.SAMPLES, dtype=torch.int64)
first = 0
if os.path.exists(CHECKPOINT):
    state = torch.load(CHECKPOINT, weights_only=True)
    model.module.load_state_dict(state["model"])
    first, orders = state["epoch"], state["orders"]

for epoch in range(first, EPOCHS):
    sampler.set_epoch(epoch)
    seen = []
    for x, y, index in loader:
        toy.step(model, optimizer, x, y)
        seen.append(index)
    parts = [torch.empty(toy.SAMPLES // world_size, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(parts, torch.cat(seen))
    orders[epoch] = torch.cat(parts)
    if rank == 0:
        toy.save(CHECKPOINT, model=model.module.state_dict(), epoch=epoch + 1, orders=orders)
        print(f"epoch {epoch}", flush=True)
if rank == 0:
    everything = torch.arange(toy.SAMPLES)
    assert all(torch.equal(order.sort().values, everything) for order in orders), "a sample is missing from an epoch"
    assert len({tuple(order.tolist()) for order in orders}) == EPOCHS, "two epochs had the same order"
    toy.result(model.module)
dist.destroy_process_group()
