"""From download=True on every rank, where all processes of a node write the same files at once, to prepare.

before.py URL          of a file of 256 rows of 9 numbers
"""

import os
import sys
import time
import urllib.request
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elasticrt


class Rows(TensorDataset):
    """A dataset as libraries have them: with `download` it downloads its files, if there are none."""

    def __init__(self, root, download=False):
        if download and not Path(root, "rows.csv").exists():
            Path(root).mkdir(exist_ok=True)
            self.download(root)
        rows = [[float(n) for n in line.split(",")] for line in Path(root, "rows.csv").read_text().splitlines()]
        table = torch.tensor(rows)
        super().__init__(table[:, :8], table[:, 8:])

    @staticmethod
    def download(root):
        print(f"rank {os.environ['RANK']} downloads", flush=True)
        with urllib.request.urlopen(sys.argv[1], timeout=60) as answer:
            Path(root, "rows.csv").write_bytes(answer.read())


# Stands for this node's own disk.
root = f"data-{os.environ['GROUP_RANK']}"
dist.init_process_group("gloo")
dataset = Rows(elasticrt.prepare(root, Rows.download))
sampler = elasticrt.ElasticBatchSampler(dataset, 64)
loader = DataLoader(dataset, batch_sampler=sampler)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loop = elasticrt.Loop("ckpt", sampler=sampler, every="1 epoch", model=model, optimizer=optimizer)
for epoch in loop.epochs(20):
    for x, y in loop.batches(loader):
        with loop.step():
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # A step takes a moment, so that there is time to kill the process.
            time.sleep(0.02)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}", flush=True)
if dist.get_rank() == 0:
    print(f"result: {[p.double().norm().item() for p in model.parameters()]}", flush=True)
