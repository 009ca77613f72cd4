"""Averages gradients by hand: without DDP, one dist.all_reduce for each parameter.

elasticrt run --nnodes 2 --nproc-per-node 2 examples/styles/allreduce_by_hand.py
"""

import os
import time

import torch
import torch.distributed as dist
import toy
from torch.nn.functional import mse_loss

EPOCHS, BATCH, CHECKPOINT = 20, 16, "allreduce_by_hand.pt"

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
x, y = (part[rank::world_size] for part in toy.data().tensors)
model = toy.model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
first = 0
if os.path.exists(CHECKPOINT):
    state = torch.load(CHECKPOINT, weights_only=True)
    model.load_state_dict(state["model"])
    first = state["epoch"]

for epoch in range(first, EPOCHS):
    for start in range(0, len(x), BATCH):
        optimizer.zero_grad()
        mse_loss(model(x[start : start + BATCH]), y[start : start + BATCH]).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        optimizer.step()
        time.sleep(toy.STEP_S)
    if rank == 0:
        toy.save(CHECKPOINT, model=model.state_dict(), epoch=epoch + 1)
        print(f"epoch {epoch}", flush=True)
if rank == 0:
    toy.result(model)
dist.destroy_process_group()
