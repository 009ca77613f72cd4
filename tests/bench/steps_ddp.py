"""The very training of `plain_ddp.py`, data included, with `loop.steps` and `loop.step()` in place of its snapshots.

elasticrt run ... steps_ddp.py DIRECTORY [STEPS_PER_SAVE] [PAUSE_S]
"""

import os
import sys
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  Everybody calls it so.

import elasticrt

DIRECTORY, STEPS_PER_SAVE, PAUSE_S = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
MARKS = os.open(f"{DIRECTORY}/marks/{os.getppid()}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def mark(world, rank, size, step):
    """As in plain_ddp.py."""
    os.write(MARKS, f"{time.monotonic():.6f} {world} 0 {rank} {size} {step}\n".encode())


def main():
    """Train until somebody ends it."""
    ctx = elasticrt.init(backend="gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.AdamW(model.parameters())
    loop = elasticrt.Loop(f"{DIRECTORY}/ckpt", every=f"{STEPS_PER_SAVE} steps", model=model, optimizer=optimizer)
    for _ in loop.steps(1_000_000_000):
        with loop.step():
            x, y = torch.randn(32, 64), torch.randint(10, (32,))
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mark(ctx.generation, ctx.rank, ctx.world_size, loop.steps_done + 1)
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
