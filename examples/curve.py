r"""Draws one TensorBoard curve of a run, whatever happens to its nodes.

    elasticrt simulate --nodes 2 --nnodes 1:3 --fault "step 50: kill node 0" examples/curve.py
    tensorboard --logdir curve

Rank 0 writes the curve. After a change of the membership another process may be rank 0, and it goes on in the same
directory. Steps that are made again after a restart are cut off the curve (`purge_step`), so no step is drawn twice.
If tensorboard is not installed, no curve is written. `elasticrt report` and `elasticrt dashboard` show the numbers of
`loop.report` in any case.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  Everybody calls it DDP.

import elasticrt

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:
    SummaryWriter = None

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--curve-dir", type=Path, default=Path("curve"))
parser.add_argument("--checkpoint-dir", type=Path, default=Path("ckpt-curve"))
args = parser.parse_args()

ctx = elasticrt.init()
torch.manual_seed(0)
model = DDP(nn.Linear(8, 1).to(ctx.device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
loop = elasticrt.Loop(args.checkpoint_dir, model=model, optimizer=optimizer)
if SummaryWriter is None and ctx.is_first:
    print("no curve is written: tensorboard is not installed (pip install tensorboard)", flush=True)


class Curve:
    # Only rank 0 has a writer.
    writer = None

    # Called when the loop begins, and after each change of the membership.
    def go_on(self, change):
        self.close()
        if SummaryWriter is not None and ctx.is_first:
            self.writer = SummaryWriter(args.curve_dir, purge_step=loop.steps_done + 1)
            self.write("world size", change.world_size, loop.steps_done + 1)

    def write(self, name, value, step):
        if self.writer is not None:
            self.writer.add_scalar(name, value, step)

    def close(self):
        if self.writer is not None:
            self.writer.close()
        self.writer = None


curve = Curve()
loop.on_change(curve.go_on)
for step in loop.steps(args.steps):
    with loop.step():
        x = torch.randn(32, 8, device=ctx.device)
        loss = F.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.report(loss=loss)
    # Not after a try that is undone: the step comes again.
    if loop.complete:
        curve.write("loss", loss.item(), step + 1)
curve.close()
if ctx.is_first:
    print(f"{loop.steps_done} steps, loss {loss.item():.2e}", flush=True)
