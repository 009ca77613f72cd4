"""Trains a small model, and does to itself what `culprit.py` asks for: `culprit_job.py DIRECTORY LOADER_WORKERS`.

DIRECTORY/inject names the next fault: "number kind rank". Its victim writes DIRECTORY/did-NUMBER, and goes on, where it
can, when there is DIRECTORY/end-NUMBER.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import elasticrt

DIRECTORY, LOADER_WORKERS = Path(sys.argv[1]), int(sys.argv[2])
STEP_S = 0.03


def asked(rank: int, *kinds: str) -> tuple[int, str] | None:
    """The number and kind of the fault that is this rank's to commit now, if it is one of `kinds`; it is noted."""
    try:
        number, kind, victim = (DIRECTORY / "inject").read_text().split()
    except (OSError, ValueError):
        return None
    if int(victim) != rank or kind not in kinds:
        return None
    try:
        fd = os.open(DIRECTORY / f"did-{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return None
    os.write(fd, f"{time.monotonic()} {os.getpid()} {os.environ['ELASTICRT_NODE']} {rank} .".encode())
    os.close(fd)
    return int(number), kind


def over(number: int) -> bool:
    """Whether it was named, or given up."""
    return (DIRECTORY / f"end-{number}").exists()


def sleeps(number: int) -> None:
    """In the script's own code."""
    while not over(number):
        time.sleep(0.05)


def deadlocks(number: int) -> None:
    """Waits for a lock that nobody gives back; somebody does, in the end."""
    lock = threading.Lock()
    lock.acquire()

    def give_back() -> None:
        sleeps(number)
        lock.release()

    threading.Thread(target=give_back, daemon=True).start()
    lock.acquire()


def computes(number: int) -> None:
    """Slow, not stuck."""
    x = torch.ones(200, 200)
    while not over(number):
        x = (x @ x).tanh()


def reads(number: int) -> None:
    """From a disk that does not answer: a pipe that nobody writes to."""
    path = DIRECTORY / f"disk-{number}"
    os.mkfifo(path)

    def write() -> None:
        sleeps(number)
        path.write_bytes(b"x")

    threading.Thread(target=write, daemon=True).start()
    path.read_bytes()


def runs_out_of_memory(number: int) -> None:
    """More than the limit of its address space."""
    del number
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 26), resource.RLIM_INFINITY))
    bytearray(1 << 32)


def raises(number: int) -> None:
    """An error of its own."""
    raise ValueError(f"fault {number}")


def barrier(number: int) -> None:
    """A collective more than the others."""
    del number
    dist.barrier()


def all_reduce(number: int) -> None:
    """Another one."""
    dist.all_reduce(torch.ones(number + 2))


def stops(number: int) -> None:
    """By a signal."""
    del number
    os.kill(os.getpid(), signal.SIGSTOP)


def dies(number: int) -> None:
    """As the kernel kills what takes too much memory."""
    del number
    os.kill(os.getpid(), signal.SIGKILL)


HERE = {
    each.__name__: each
    for each in (sleeps, deadlocks, computes, reads, runs_out_of_memory, raises, barrier, all_reduce, stops, dies)
}


class Numbers(Dataset):
    """Samples; drawing one may take long."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        fault = asked(self.rank, "loader")
        if fault is not None:
            sleeps(fault[0])
        return torch.full((16,), float(index % 7))


def main() -> None:
    """Train."""
    ctx = elasticrt.init()
    data = Numbers(ctx.rank)
    sampler = elasticrt.ElasticBatchSampler(data, global_batch_size=16)
    workers = {"num_workers": LOADER_WORKERS, "prefetch_factor": 2} if LOADER_WORKERS else {}
    loader = DataLoader(data, batch_sampler=sampler, **workers)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model = DistributedDataParallel(net, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    loop = elasticrt.Loop(DIRECTORY / "ckpt", sampler=sampler, model=model, optimizer=optimizer)
    for _ in loop.epochs(1000):
        data.rank = ctx.rank
        for x in loop.batches(loader):
            data.rank = ctx.rank
            with loop.step():
                fault = asked(ctx.rank, *HERE)
                if fault is not None:
                    HERE[fault[1]](fault[0])
                time.sleep(STEP_S)
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
