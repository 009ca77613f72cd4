"""From zero_first, where local rank 0 builds the cache while the others wait in a barrier, to prepare."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_utils import torch_distributed_zero_first

RANK = int(os.getenv("RANK", "-1"))
LOCAL_RANK = int(os.getenv("LOCAL_RANK", "-1"))


def build_cache(directory):
    """Read all images and labels once."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(256, 8, generator=generator)
    torch.save([x, x.sin().sum(1, keepdim=True)], Path(directory) / "labels.cache")


class LoadImagesAndLabels(TensorDataset):
    def __init__(self, path):
        if not Path(path, "labels.cache").exists():
            Path(path).mkdir(exist_ok=True)
            build_cache(path)
        super().__init__(*torch.load(Path(path, "labels.cache"), weights_only=True))


def create_dataloader(path, batch_size, rank):
    with torch_distributed_zero_first(LOCAL_RANK):
        dataset = LoadImagesAndLabels(path)
    sampler = None if rank == -1 else torch.utils.data.distributed.DistributedSampler(dataset)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler)


dist.init_process_group("gloo")
loader = create_dataloader(f"data-{os.getenv('GROUP_RANK', '0')}", 64 // dist.get_world_size(), RANK)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(20):
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # A step takes a moment, so that there is time to kill the process.
        time.sleep(0.02)
    if RANK in {-1, 0}:
        print(f"epoch {epoch}", flush=True)
if RANK in {-1, 0}:
    print(f"result: {[p.double().norm().item() for p in model.parameters()]}", flush=True)
