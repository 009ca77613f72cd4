"""Rank 0 saves `model.module.state_dict()`. After a barrier every rank loads that onto its own device.

elasticrt run --nnodes 2 --nproc-per-node 2 examples/styles/rank0_save.py
"""

import os

import torch
import torch.distributed as dist
import toy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = 20

dist.init_process_group("gloo")
rank, device = dist.get_rank(), torch.device("cpu")
dataset = toy.data()
loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset, shuffle=False))
model = DistributedDataParallel(toy.model().to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def checkpoint(epoch: int) -> str:
    return f"rank0_save-{epoch}.pt"


first = max((epoch for epoch in range(1, EPOCHS + 1) if os.path.exists(checkpoint(epoch))), default=0)
if first:
    model.module.load_state_dict(torch.load(checkpoint(first), map_location=device, weights_only=True))
for epoch in range(first, EPOCHS):
    for x, y in loader:
        toy.step(model, optimizer, x, y)
    if rank == 0:
        torch.save(model.module.state_dict(), "rank0_save.tmp")
        os.rename("rank0_save.tmp", checkpoint(epoch + 1))
        print(f"epoch {epoch}", flush=True)
    dist.barrier()
    model.module.load_state_dict(torch.load(checkpoint(epoch + 1), map_location=device, weights_only=True))
if rank == 0:
    toy.result(model.module)
dist.destroy_process_group()
