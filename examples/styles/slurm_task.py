"""A script for `srun python train.py`: each task is a rank, as SLURM_PROCID and SLURM_NTASKS give it.

elasticrt run --as-srun --nnodes 2 --nproc-per-node 2 examples/styles/slurm_task.py
"""

import os

import torch
import torch.distributed as dist
import toy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS, CHECKPOINT = 20, "slurm_task.pt"

rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
local_rank = int(os.environ["SLURM_LOCALID"])
assert world_size == int(os.environ["SLURM_NNODES"]) * int(os.environ["SLURM_NTASKS_PER_NODE"])
assert rank == int(os.environ["SLURM_NODEID"]) * int(os.environ["SLURM_NTASKS_PER_NODE"]) + local_rank
dist.init_process_group("gloo", rank=rank, world_size=world_size)
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
