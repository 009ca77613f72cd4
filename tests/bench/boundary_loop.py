"""The script of `tests.bench.boundary`: a Loop around steps in which nothing happens: only its own work is left.

elasticrt run ... boundary_loop.py RESULT_FILE STEPS [--seed] [--block] [--buffers]

With --block the steps are `with loop.step():`, with --buffers the model has four BatchNorm layers as well.

The loop has all that a real one has: DDP model, optimizer, sampler, page and link to the agent; nothing is due to be
saved. The loader hands out the same object again and again, which costs some 20 ns.
"""

import itertools
import json
import sys
import tempfile
import time
import timeit
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  Everybody calls it so.

import elasticrt

BLOCK = 1000


def main():
    """Measure both, and write them as JSON: microseconds, one value for each block of 1000."""
    steps, options = int(sys.argv[2]), sys.argv[3:]
    seed = 0 if "--seed" in options else None
    block = "--block" in options
    elasticrt.init(backend="gloo")
    sampler = elasticrt.ElasticBatchSampler(range(steps), 1, shuffle=False)
    norms = [torch.nn.BatchNorm1d(4) for _ in range(4 if "--buffers" in options else 0)]
    model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), *norms))
    optimizer = torch.optim.AdamW(model.parameters())
    with tempfile.TemporaryDirectory() as directory:
        loop = elasticrt.Loop(directory, sampler=sampler, every="1 h", seed=seed, model=model, optimizer=optimizer)
        blocks = []
        for _epoch in loop.epochs(1):
            page = loop._page
            assert page is not None, "a worker of an agent has a page"
            check = timeit.repeat("page is not None and page.stop", globals={"page": page}, number=BLOCK, repeat=200)
            at = time.perf_counter_ns()
            for number, _ in enumerate(loop.batches(itertools.repeat(None, steps)), 1):
                if block:
                    with loop.step():
                        loop._undo._after_optimizer(optimizer)  # Without it gradients would be kept as well.
                if number % BLOCK == 0:
                    now = time.perf_counter_ns()
                    blocks.append((now - at) / BLOCK / 1000)
                    at = now
    result = {"check_us": [each / BLOCK * 1e6 for each in check], "boundary_us": blocks}
    Path(sys.argv[1]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
