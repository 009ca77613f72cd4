"""Trains on handwritten digits with DistributedDataParallel, elastic: nodes may come, go and die while this runs.

    python examples/mnist_ddp.py                                        # one process
    torchrun --standalone --nproc-per-node 2 examples/mnist_ddp.py      # two, started by torchrun
    elasticrt run --nnodes 1:4 examples/mnist_ddp.py                    # any number, and any number later

Interrupt it and start it again, with any number of processes: it resumes from the newest checkpoint.
"""

import argparse
import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from digits import Net, build, load
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  Everybody calls it DDP.
from torch.utils.data import DataLoader

import elasticrt

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--global-batch-size", type=int, default=64, help="samples per step, over all processes")
parser.add_argument("--micro-batch-size", type=int, default=None, help="the most samples in one forward")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--data-dir", type=Path, default=Path("data"), help="with MNIST's IDX files, if you have them")
parser.add_argument("--checkpoint-dir", type=Path, default=Path("ckpt"))
parser.add_argument("--save-every", default="30s", help='such as "30s", "200 steps" or "1 epoch"')
args = parser.parse_args()

# Make the process group. `ctx` has this process's rank, the world size and the device.
ctx = elasticrt.init()
torch.manual_seed(args.seed)

# One process of each node builds the data, and the others wait.
data = elasticrt.prepare(args.data_dir / "digits", functools.partial(build, source=args.data_dir))
train, test = load(data)

# The sampler cuts the epoch into global batches. They are the same for any number of processes.
sampler = elasticrt.ElasticBatchSampler(
    train, args.global_batch_size, micro_batch_size=args.micro_batch_size, seed=args.seed
)
loader = DataLoader(train, batch_sampler=sampler)

# As in any DDP script: a model, an optimizer, and a schedule. The learning rate rises for 50 steps, then falls to the
# end.
model = DDP(Net(args.dropout).to(ctx.device))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
total = args.epochs * len(sampler)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, min((step + 1) / 50, 1 - step / total)))


@torch.no_grad()
def evaluate() -> float:
    """The accuracy on the test set. Each process evaluates a part, and no sample is counted twice."""
    model.eval()
    hits = samples = 0
    for x, y in DataLoader(ctx.shard(test), batch_size=256):
        hits += int((model.module(x.to(ctx.device)).argmax(1) == y.to(ctx.device)).sum())
        samples += len(y)
    model.train()
    hits, samples = ctx.sum(hits, samples)
    return hits / samples


# The loop saves all of these objects, and resumes from the newest checkpoint.
loop = elasticrt.Loop(
    args.checkpoint_dir,
    sampler=sampler,
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    every=args.save_every,
)

for epoch in loop.epochs(args.epochs):
    # Between two steps, where the next batch is asked for, the loop saves, and nodes join and leave.
    for x, y in loop.batches(loader):
        # If another process is lost in this block, the step is undone and made again, and this process lives on.
        with loop.step():
            loss = F.cross_entropy(model(x.to(ctx.device)), y.to(ctx.device))
            # Gradients are weighted: they are those of the mean over the global batch, for any number of processes.
            loss.backward()
            # True in the last micro-batch of a step; without --micro-batch-size in every batch.
            if loop.complete:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                loop.report(loss=loss)
    # If a process is lost in the evaluation, the others make it again.
    accuracy = loop.evaluate(evaluate)
    if ctx.is_first:
        print(
            f"epoch {epoch}  step {loop.steps_done}  accuracy {accuracy:.4f}  world size {ctx.world_size}", flush=True
        )
