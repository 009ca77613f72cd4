"""A torchrun script for the plug-in's tests: it writes down each step, and can be told to crash once.

    torchrun ... node_steps.py DIRECTORY [CRASH_RANK]

Each process appends lines `rank size restart step port` to a file of its own. When a file DIRECTORY/end is there, all
ranks end together; the rank CRASH_RANK exits with code 3 after its fifth step, once in a run.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

directory, crash_rank = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else -1
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
restart, port = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["MASTER_PORT"]
file = os.open(directory / f"steps-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
step = 0
while True:
    step += 1
    over = torch.tensor([float((directory / "end").exists())])
    dist.all_reduce(over)
    os.write(file, f"{rank} {size} {restart} {step} {port}\n".encode())
    if over.item() == size:
        break
    if step == 5 and rank == crash_rank and not (directory / "crashed").exists():
        (directory / "crashed").touch()
        sys.exit(3)
    time.sleep(0.02)
dist.destroy_process_group()
