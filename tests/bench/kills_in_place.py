"""The script of `tests.bench.kills --in-place`: two workers, of which the younger is killed as often as told.

    elasticrt run --nproc-per-node 2 ... kills_in_place.py DIRECTORY KILLS
    python kills_in_place.py DIRECTORY 0 STEPS      # undisturbed, alone

The first worker lives on through all of it. Its replaced peers die by their own hand, in turn before the backward pass,
after it, and after the optimizer's step. What the first one holds at the start and at the end, the steps and the final
weights go to DIRECTORY/result.json.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  Everybody calls it so.
from torch.utils.data import DataLoader, TensorDataset

import elasticrt

DIRECTORY, KILLS = Path(sys.argv[1]), int(sys.argv[2])
STEPS = int(sys.argv[3]) if len(sys.argv) > 3 else None
ALONE_S = 0.03
"""Between two steps while the peer is missing: the undisturbed run makes as many."""
WARM_UP = 5
"""Deaths before what is held at the start is noted."""


def held():
    """Memory, threads and descriptors of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  Names are all we need.
    memory_mb = int(status["VmRSS"].split()[0]) / 1024
    return {"memory_mb": memory_mb, "threads": int(status["Threads"]), "descriptors": descriptors}


def deaths():
    """How many there have been."""
    return sum(name.startswith("death-") for name in os.listdir(DIRECTORY))  # noqa: PTH208  As above.


def main():
    """Train until there have been as many deaths as told, or so many steps."""
    ctx = elasticrt.init(backend="gloo")
    elder = ctx.is_first and not deaths()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    inputs = torch.randn(4096, 20)
    data = TensorDataset(inputs, (inputs[:, :1] * 2 + inputs[:, 1:2]).tanh())
    sampler = elasticrt.ElasticBatchSampler(data, global_batch_size=12)
    loader = DataLoader(data, batch_sampler=sampler)
    net = nn.Linear(20, 1)
    model = DDP(net) if ctx.world_size > 1 or STEPS is None else net
    # Convex and slow: each step brings two sets of weights nearer to each other, by a 50,000th of what they
    # differ. So errors of rounding do not add up, and a gradient that was wrong shows for 300,000 steps and more.
    optimizer = torch.optim.SGD(model.parameters(), 1e-6, momentum=0.9, weight_decay=1e-3)
    directory = DIRECTORY / f"checkpoints-{STEPS}"
    loop = elasticrt.Loop(directory, sampler=sampler, every="1 h", memory=0, model=model, optimizer=optimizer)
    at_start, own_steps, is_over = None, 0, False

    for _epoch in loop.epochs(1_000_000, max_steps=STEPS):
        for x, y in loop.batches(loader):
            died = deaths()
            dies = not elder and own_steps > 1 and ctx.world_size == 2 and died < KILLS
            with loop.step():
                loss = nn.functional.mse_loss(model(x), y)
                # Before the optimizer steps: whoever has lost a peer after that has the state of no step.
                over = torch.tensor([int(STEPS is None and died >= KILLS and ctx.world_size == 2)])
                if STEPS is None:
                    dist.all_reduce(over, dist.ReduceOp.MAX)
                is_over = bool(over)
                die(died, dies and died % 3 == 0)
                loss.backward()
                die(died, dies and died % 3 == 1)
                optimizer.step()
                optimizer.zero_grad()
                die(died, dies and died % 3 == 2)
            own_steps += 1
            if STEPS is None and ctx.world_size == 1:
                time.sleep(ALONE_S)
            if elder and at_start is None and died >= min(WARM_UP, KILLS):
                at_start = held()
            if is_over:
                break
        if is_over:
            break
    if elder:
        weights = [value for each in net.parameters() for value in each.flatten().tolist()]
        result = {"start": at_start, "end": held(), "steps": loop.steps_done, "deaths": deaths(), "weights": weights}
        (DIRECTORY / "result.json").write_text(json.dumps(result))


def die(died, now):
    """Leave a mark and be gone, if it is time."""
    if now:
        (DIRECTORY / f"death-{died}").touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
