"""The training script of the recovery benchmark, as one would write it for torchrun: nothing in it knows elasticrt.

    torchrun ... plain_ddp.py DIRECTORY [STEPS_PER_SAVE] [PAUSE_S] [SETUP_S]

Rank 0 saves a snapshot every so many steps; all ranks load it when they start. After each step a rank appends a line
`monotonic world restart rank size step` to a file of its own in DIRECTORY/marks, where `world` is a number that rank 0
draws and broadcasts: ranks that agree on it are in one process group. The first line, before torch is imported, has
world 0 and step -1. The pause after a step (after its line) makes steps long enough to be counted. SETUP_S stands for
what scripts do first: reading data sets, building tokenizers, compiling.
"""

import os
import sys
import time

DIRECTORY = sys.argv[1]
STEPS_PER_SAVE = int(sys.argv[2]) if len(sys.argv) > 2 else 20
PAUSE_S = float(sys.argv[3]) if len(sys.argv) > 3 else 0.02
SETUP_S = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
SNAPSHOT = f"{DIRECTORY}/snapshot.pt"
MARKS = os.open(f"{DIRECTORY}/marks/{os.getppid()}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def mark(world, rank, size, step):
    """One line; a single write, so that a reader never sees half a line of a living process."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    os.write(MARKS, f"{time.monotonic():.6f} {world} {restart} {rank} {size} {step}\n".encode())


mark(0, os.environ["RANK"], os.environ["WORLD_SIZE"], -1)

import torch  # noqa: E402  The first line has to be written before this takes its time.
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402, N817  Everybody calls it so.


def main():
    """Train until somebody ends it."""
    time.sleep(SETUP_S)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    drawn = torch.tensor([int.from_bytes(os.urandom(6), "little") + 1])
    dist.broadcast(drawn, 0)
    world = int(drawn)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    step = 0
    if os.path.exists(SNAPSHOT):  # noqa: PTH110  As plain as scripts are.
        state = torch.load(SNAPSHOT, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    model = DDP(model)

    while True:
        x, y = torch.randn(32, 64), torch.randint(10, (32,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        mark(world, rank, size, step)
        if rank == 0 and step % STEPS_PER_SAVE == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, SNAPSHOT + ".new")
            os.replace(SNAPSHOT + ".new", SNAPSHOT)  # noqa: PTH105  As above.
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
