"""Trains on the device that it is given, on and on: `train_on_gpu.py DIRECTORY BACKEND STATE_MB [TROUBLE]`.

Each process appends the time and number of its finished steps, its generation and world size to a file of its own.
STATE_MB: parameters and Adam's moments together. TROUBLE: what rank 1 of the first generation does to itself after ten
steps: `kernel` (an index beyond its tensor, which a kernel asserts) or `memory` (more than any GPU has).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elasticrt

DIRECTORY, BACKEND, STATE_MB = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
TROUBLE = sys.argv[4] if len(sys.argv) > 4 else ""
STEPS = 100_000
WIDTH = 1024


def main() -> None:
    """Train."""
    ctx = elasticrt.init(backend=BACKEND)
    torch.manual_seed(0)
    layers = max(1, round(STATE_MB * 1e6 / 12 / WIDTH**2))
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).to(ctx.device))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loop = elasticrt.Loop(DIRECTORY / "ckpt", model=model, optimizer=optimizer, every="50 steps")
    x = torch.ones(8, WIDTH, device=ctx.device)
    with (DIRECTORY / f"steps-{os.getpid()}").open("a", buffering=1) as out:
        for step in loop.steps(STEPS):
            with loop.step():
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                value = loss.item()
            out.write(json.dumps([time.monotonic(), ctx.generation, ctx.world_size, loop.steps_done, value]) + "\n")
            if ctx.rank == 1 and ctx.generation == 1 and step == 10:
                befall(ctx.device)
            time.sleep(0.02)


def befall(device: torch.device) -> None:
    """The trouble that was asked for."""
    if TROUBLE == "kernel":
        torch.zeros(4, device=device)[torch.tensor([10**6], device=device)].sum().item()
    elif TROUBLE == "memory":
        torch.empty(1 << 42, dtype=torch.uint8, device=device)


if __name__ == "__main__":
    main()
