"""The script of `tests.bench.step_cost`.

elasticrt run ... step_cost_ddp.py DIRECTORY BLOCKS PAUSE_S
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  Everybody calls it so.

import elasticrt

DIRECTORY, BLOCKS, PAUSE_S = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
BLOCK = 50
WARM_UP = 5
"""Blocks that are not counted."""


def network():
    """A small network in DDP, and its optimizer."""
    model = DDP(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    return model, torch.optim.AdamW(model.parameters())


def train(model, optimizer):
    """One step."""
    x, y = torch.randn(32, 64), torch.randint(10, (32,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(PAUSE_S)


def main():
    """Train both in turn, and write the microseconds of a step in each block, with and without the Loop."""
    ctx = elasticrt.init(backend="gloo")
    torch.manual_seed(0)
    model, optimizer = network()
    loop = elasticrt.Loop(DIRECTORY / "ckpt", every="1000000000 steps", model=model, optimizer=optimizer)
    pairs, other, began = [], None, time.perf_counter()
    for step in loop.steps((BLOCKS + WARM_UP) * BLOCK + 1):
        if step and step % BLOCK == 0:
            ours = time.perf_counter() - began
            # Made late: a Loop whose first step finds a network that it was not given would not go on in place.
            other = other or network()
            began = time.perf_counter()
            for _ in range(BLOCK):
                train(*other)
            pairs.append([each / BLOCK * 1e6 for each in (ours, time.perf_counter() - began)])
            began = time.perf_counter()
        with loop.step():
            train(model, optimizer)
    if ctx.rank == 0:
        (DIRECTORY / "pairs.json").write_text(json.dumps(pairs[WARM_UP:]))


if __name__ == "__main__":
    main()
