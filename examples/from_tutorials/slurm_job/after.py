"""From `srun python`, where each task is the rank that SLURM gives it, to `srun elasticrt run`.

The batch script exports MASTER_ADDR (the first host of `scontrol show hostnames`) and MASTER_PORT.
"""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elasticrt

ctx = elasticrt.init()
rank, local_rank, world_size = ctx.rank, ctx.local_rank, ctx.world_size
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")

generator = torch.Generator().manual_seed(7)
x = torch.randn(256, 8, generator=generator)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
sampler = elasticrt.ElasticBatchSampler(dataset, 64)
loader = DataLoader(dataset, batch_sampler=sampler)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loop = elasticrt.Loop("ckpt", sampler=sampler, every="1 epoch", model=model, optimizer=optimizer)
for epoch in loop.epochs(20):
    for x, y in loop.batches(loader):
        with loop.step():
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
