"""How often gloo leaves a survivor waiting for ever: `python -m tests.bench.lost_messages [--kills 1000] [--ranks 2]`.

Ranks do nothing but sum a small tensor. One is killed, the others' sockets are cut some milliseconds later, as their
agents do it, and a collective that has not ended a second after that never will. Nothing of the product is in it but
`regroup.cut`. Run several at once: it happens more often where the cores are busy.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from elasticrt.distributed import regroup

ENDS_S = 1.2
"""As the product waits (`STUCK_S` and `STUCK_AGAIN_S` of `train.in_place`)."""

NUMBERS = 9
STUCK = 3
"""The exit code of a survivor that hangs."""


def rank_of(rank: int, ranks: int, path: Path, ready: int, cut: int) -> None:
    """One rank: it sums until its group is lost, or ends with STUCK. `ready` and `cut`: pipes to write to, to read."""
    store = dist.FileStore(str(path), ranks)
    with regroup.SOCKETS.noting_group(ranks):
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=60)
        )
    numbers, free = torch.zeros(NUMBERS), threading.Event()

    def end() -> None:
        os.read(cut, 1)
        regroup.cut()
        if not free.wait(ENDS_S):
            os._exit(STUCK)

    dist.all_reduce(numbers)
    ending = threading.Thread(target=end)
    ending.start()
    os.write(ready, b"r")
    try:
        while True:
            dist.all_reduce(numbers)
    except RuntimeError:
        free.set()
    ending.join()
    os._exit(0)


def kill(ranks: int, directory: Path) -> bool:
    """Kill one rank of a new group. Returns whether a survivor hangs."""
    ready, cuts, pids = os.pipe(), [os.pipe() for _ in range(ranks)], []
    path = Path(tempfile.mkstemp(dir=directory)[1])
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            rank_of(rank, ranks, path, ready[1], cuts[rank][0])
        pids.append(pid)
    there = 0
    while there < ranks:
        there += len(os.read(ready[0], ranks))
    time.sleep(random.uniform(0.001, 0.02))
    victim = random.randrange(ranks)
    os.kill(pids[victim], signal.SIGKILL)
    time.sleep(random.choice([0.0, 0.001, 0.005, 0.02]))
    for rank, (_, end) in enumerate(cuts):
        if rank != victim:
            os.write(end, b"c")
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    for end in (*ready, *(end for pipe in cuts for end in pipe)):
        os.close(end)
    return STUCK in codes


def main() -> None:
    """As above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ertb-") as name:
        stuck = sum(kill(options.ranks, Path(name)) for _ in range(options.kills))
    print(f"torch {torch.__version__}, {options.ranks} ranks: {stuck} of {options.kills} kills left a survivor waiting")


if __name__ == "__main__":
    main()
