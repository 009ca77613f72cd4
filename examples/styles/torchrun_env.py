"""A script for torchrun: it reads everything from its environment. `elasticrt launch --use-env` runs it as well.

elasticrt run --standalone --nproc-per-node 2 examples/styles/torchrun_env.py
elasticrt run --nnodes 2 --nproc-per-node 2 examples/styles/torchrun_env.py
"""

import os

import torch
import torch.distributed as dist
import toy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS, CHECKPOINT = 20, "torchrun_env.pt"

dist.init_process_group("gloo")
assert dist.get_rank() == int(os.environ["RANK"])
assert dist.get_world_size() == int(os.environ["WORLD_SIZE"])
assert dist.is_torchelastic_launched()
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
