"""The same training as `plain_ddp.py`, with elasticrt's sampler and Loop in place of the script's own snapshots.

elasticrt run ... loop_ddp.py DIRECTORY [STEPS_PER_SAVE] [PAUSE_S] [SETUP_S] [STATE_MB]

`world` is the generation. STATE_MB is the size of parameters and Adam's moments together: 12 bytes for each parameter.
"""

import os
import sys
import time

DIRECTORY = sys.argv[1]
STEPS_PER_SAVE = int(sys.argv[2]) if len(sys.argv) > 2 else 20
PAUSE_S = float(sys.argv[3]) if len(sys.argv) > 3 else 0.02
SETUP_S = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
STATE_MB = float(sys.argv[5]) if len(sys.argv) > 5 else 0.0
WIDTH = 2048
MARKS = os.open(f"{DIRECTORY}/marks/{os.getppid()}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def mark(world, rank, size, step):
    """As in plain_ddp.py."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    os.write(MARKS, f"{time.monotonic():.6f} {world} {restart} {rank} {size} {step}\n".encode())


mark(0, os.environ["RANK"], os.environ["WORLD_SIZE"], -1)

import torch  # noqa: E402  The first line has to be written before this takes its time.
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402, N817  Everybody calls it so.
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import elasticrt  # noqa: E402


def network():
    """As in plain_ddp.py, or as many wide layers more as make the state so large."""
    layers = round(STATE_MB * 1e6 / 12 / WIDTH**2)
    if not layers:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    wide = [layer for _ in range(layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), *wide, nn.Linear(WIDTH, 10))


def main():
    """Train until somebody ends it."""
    time.sleep(SETUP_S)
    ctx = elasticrt.init(backend="gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4096, 64), torch.randint(10, (4096,)))
    sampler = elasticrt.ElasticBatchSampler(data, global_batch_size=96)
    loader = DataLoader(data, batch_sampler=sampler)
    model = DDP(network())
    optimizer = torch.optim.AdamW(model.parameters())
    every = f"{STEPS_PER_SAVE} steps"
    loop = elasticrt.Loop(f"{DIRECTORY}/ckpt", sampler=sampler, every=every, model=model, optimizer=optimizer)

    for _epoch in loop.epochs(1_000_000):
        for x, y in loop.batches(loader):
            with loop.step():
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                mark(ctx.generation, ctx.rank, ctx.world_size, loop.steps_done + 1)
                time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
