"""The training of `plain_ddp.py` under torchft: every node is a replica of its own, and a lighthouse holds the quorum.

    TORCHFT_LIGHTHOUSE=http://HOST:PORT torchrun --nnodes 1 --nproc-per-node 1 ... torchft_ddp.py DIRECTORY

Marks as in plain_ddp.py; rank and size are those of the replicas taking part, `world` is made of the quorum's number
and that size, because a quorum's first step is taken without a replica that has yet to be sent the state.
Nothing is saved: a replica that comes back is sent the state of another.
"""

import os
import sys
import time
from datetime import timedelta

DIRECTORY = sys.argv[1]
PAUSE_S = float(sys.argv[3]) if len(sys.argv) > 3 else 0.02
SETUP_S = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
MARKS = os.open(f"{DIRECTORY}/marks/{os.getppid()}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def mark(world, rank, size, step):
    """As in plain_ddp.py."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    os.write(MARKS, f"{time.monotonic():.6f} {world} {restart} {rank} {size} {step}\n".encode())


mark(0, 0, 1, -1)

import torch  # noqa: E402  The first line has to be written before this takes its time.
from torch import nn  # noqa: E402
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # noqa: E402


def main():
    """Train until somebody ends it."""
    time.sleep(SETUP_S)
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    inner = torch.optim.AdamW(bare.parameters())

    def load(state):
        bare.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": bare.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"replica_{os.environ['REPLICA']}",
        heartbeat_interval=timedelta(milliseconds=100),
    )
    model = DistributedDataParallel(manager, bare)
    optimizer = Optimizer(manager, inner)
    while True:
        optimizer.zero_grad()
        x, y = torch.randn(32, 64), torch.randint(10, (32,))
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        rank, size = manager.participating_rank(), manager.num_participants()
        if rank is not None:  # None while it is being sent the state.
            mark(manager._quorum_id * 1000 + size, rank, size, manager.current_step())
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
