"""Trains a small model, and does to itself what `culprit.py` asks for: `culprit_job.py DIRECTORY LOADER_WORKERS`.

DIRECTORY/inject names the next fault: "number kind rank point". Its victim writes DIRECTORY/did-NUMBER, and goes on,
where it can, when there is DIRECTORY/end-NUMBER. The point is one of: first (before a process's first step),
forward, backward, optimizer, evaluation.
"""

from __future__ import annotations

import ctypes
import os
import platform
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
EVALUATE_EVERY = 20


def asked(rank: int, here: str, *kinds: str) -> tuple[int, str] | None:
    """The number and kind of the fault that is this rank's to commit `here`, if it is one of `kinds`; it is noted."""
    try:
        number, kind, victim, point = (DIRECTORY / "inject").read_text().split()
    except (OSError, ValueError):
        return None
    if int(victim) != rank or kind not in kinds or point != here:
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


def sleeps_in_the_kernel(number: int) -> None:
    """As in a read from a disk that does not answer, in a file that is mapped: in state D, with the interpreter's lock.

    The parent of a process that was made by CLONE_VFORK sleeps so until that process ends.
    """
    clone, parent = {"x86_64": 56, "aarch64": 220}[platform.machine()], os.getpid()
    clone_vfork = 0x4000
    if ctypes.PyDLL(None).syscall(clone, clone_vfork | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        while not over(number) and os.getppid() == parent:
            time.sleep(0.05)
        os._exit(0)
    os.wait()


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


STUCK = (sleeps, deadlocks, computes, reads, sleeps_in_the_kernel, stops)
HERE = {each.__name__: each for each in (*STUCK, runs_out_of_memory, raises, dies, barrier, all_reduce)}


def commit(rank: int, here: str) -> None:
    """Commit the fault that is to be committed `here`, if there is one."""
    fault = asked(rank, here, *HERE)
    if fault is not None:
        HERE[fault[1]](fault[0])


class Numbers(Dataset):
    """Samples; drawing one may take long."""

    def __init__(self, rank: int) -> None:
        self.rank, self.point = rank, "first"

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        fault = asked(self.rank, self.point, "loader")
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
    optimizer.register_step_pre_hook(lambda *_: commit(ctx.rank, "optimizer"))
    loop = elasticrt.Loop(DIRECTORY / "ckpt", sampler=sampler, model=model, optimizer=optimizer)
    for _ in loop.epochs(1000):
        for x in loop.batches(loader):
            data.rank = ctx.rank
            with loop.step():
                commit(ctx.rank, data.point)
                data.point = "forward"
                time.sleep(STEP_S)
                y = model(x)
                y.register_hook(lambda _: commit(ctx.rank, "backward"))
                y.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if loop.steps_done % EVALUATE_EVERY == 0:
                with loop.pause("evaluate"):
                    commit(ctx.rank, "evaluation")
                    ctx.sum(float(net(x).detach().square().sum()), len(x))


if __name__ == "__main__":
    main()
