r"""Has ten seconds of set-up, and a kill that does not cost them again.

    elasticrt simulate --nodes 3 --nnodes 1:4 \
        --fault "step 40: kill worker 1" --fault "step 120: add node" examples/slow_start.py

A real script builds the index of its dataset, compiles its model and warms its loaders before the first step. Here a
sleep stands for all of that. Processes that survive a kill keep what they have built, and their newest step. A
replacement or a new node sets up while the others train, and they let it in when it is ready.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  Everybody calls it DDP.
from torch.utils.data import DataLoader, TensorDataset

import elasticrt

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--set-up", type=float, default=10.0, metavar="SECONDS", help="before the first step")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--step-time", type=float, default=0.1, metavar="SECONDS", help="of each step")
parser.add_argument("--checkpoint-dir", type=Path, default=Path("ckpt-slow-start"))
args = parser.parse_args()

ctx = elasticrt.init()
torch.manual_seed(0)
x = torch.randn(4096, 8)
data = TensorDataset(x, x[:, :1] * x[:, 1:2])
# Stands for the set-up: an index, a compiled model, warm loaders.
time.sleep(args.set_up)

sampler = elasticrt.ElasticBatchSampler(data, global_batch_size=64)
loader = DataLoader(data, batch_sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).to(ctx.device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loop = elasticrt.Loop(args.checkpoint_dir, sampler=sampler, model=model, optimizer=optimizer)

loss = torch.tensor(0.0)
for epoch in loop.epochs(-(-args.steps // len(sampler)), max_steps=args.steps):
    for inputs, targets in loop.batches(loader):
        with loop.step():
            loss = F.mse_loss(model(inputs.to(ctx.device)), targets.to(ctx.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loop.report(loss=loss)
            # Stands for a larger model.
            time.sleep(args.step_time)
    if ctx.is_first:
        print(f"epoch {epoch}  step {loop.steps_done}  loss {loss:.4f}  world size {ctx.world_size}", flush=True)
