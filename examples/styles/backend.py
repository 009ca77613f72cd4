"""Takes the backend's name as an argument: gloo, nccl or mpi, if torch was built with it.

elasticrt run --nproc-per-node 2 examples/styles/backend.py gloo
"""

import os
import sys

import torch
import torch.distributed as dist
import toy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS, CHECKPOINT = 20, "backend.pt"

dist.init_process_group(sys.argv[1])
dataset = toy.data()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)
model = DistributedDataParallel(toy.model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
first = 0
if os.path.exists(CHECKPOINT):
    state = torch.load(CHECKPOINT, weights_only=True)
    model.module.load_state_dict(state["model"])
    first = state["epoch"]

for epoch in range(first, EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in loader:
        toy.step(model, optimizer, x, y)
    if dist.get_rank() == 0:
        toy.save(CHECKPOINT, model=model.module.state_dict(), epoch=epoch + 1)
        print(f"epoch {epoch}", flush=True)
if dist.get_rank() == 0:
    toy.result(model.module)
dist.destroy_process_group()
