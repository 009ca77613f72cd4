"""A script for torch.distributed.launch: it needs its local rank as the argument --local_rank.

elasticrt run --nnodes 2 --nproc-per-node 2 examples/styles/launch_underscore.py '--local_rank=${local_rank}'
"""

import argparse
import os

import torch
import torch.distributed as dist
import toy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, required=True)
parser.add_argument("--epochs", type=int, default=20)
args = parser.parse_args()
EPOCHS, CHECKPOINT = args.epochs, "launch_underscore.pt"

dist.init_process_group("gloo", init_method="env://")
assert args.local_rank == int(os.environ["LOCAL_RANK"])
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
