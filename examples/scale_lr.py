r"""Scales the learning rate with the world size: each process brings samples of its own, so the global batch grows.

    elasticrt simulate --nodes 2 --nnodes 1:3 --join now --fault "step 50: kill node 1" --fault "step 120: add node" \
        examples/scale_lr.py --steps 20000

With a global batch of a fixed size (`global_batch_size=...`, as in `mnist_ddp.py`) nothing has to be scaled: the loss
curve is the same at any world size.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  Everybody calls it DDP.

import elasticrt

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--lr", type=float, default=0.02, help="of one process")
parser.add_argument("--checkpoint-dir", type=Path, default=Path("ckpt-scale-lr"))
args = parser.parse_args()

ctx = elasticrt.init()
torch.manual_seed(0)
model = DDP(nn.Linear(8, 1).to(ctx.device))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
loop = elasticrt.Loop(args.checkpoint_dir, model=model, optimizer=optimizer)


def scale(change):
    # The state has been restored by now. So this overwrites the learning rate that was saved.
    for group in optimizer.param_groups:
        group["lr"] = args.lr * change.world_size
    if ctx.is_first:
        cost = "" if change.pause_s is None else f", after {change.pause_s:.2f} s and {change.steps_lost} steps lost"
        sizes = f"{change.world_size_before} to {change.world_size}"
        print(
            f"world size {sizes} ({change.cause or 'start'}){cost}: learning rate {args.lr * change.world_size:g}",
            flush=True,
        )


loop.on_change(scale)
for _ in loop.steps(args.steps):
    with loop.step():
        x = torch.randn(32, 8, device=ctx.device)
        loss = F.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.report(loss=loss)
