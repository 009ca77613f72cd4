"""From `srun python`, where each task is the rank that SLURM gives it, to `srun elasticrt run`.

The batch script exports MASTER_ADDR (the first host of `scontrol show hostnames`) and MASTER_PORT.
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

rank, local_rank, world_size = (int(os.environ[f"SLURM_{name}"]) for name in ("PROCID", "LOCALID", "NTASKS"))
torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")

generator = torch.Generator().manual_seed(7)
x = torch.randn(256, 8, generator=generator)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
sampler = torch.utils.data.distributed.DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=64 // world_size, sampler=sampler)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(20):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # A step takes a moment, so that there is time to kill the process.
        time.sleep(0.02)
    if rank == 0:
        print(f"epoch {epoch}", flush=True)
if rank == 0:
    print(f"result: {[p.double().norm().item() for p in model.parameters()]}", flush=True)
