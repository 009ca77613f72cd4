"""`init` and `Context`: this process's rank, device and process group. `init` is the first call of a training script.

The same script runs under `elasticrt run`, under torchrun and alone. `init` reads the variables that either launcher
sets (RANK, WORLD_SIZE ...). It never reads those of a scheduler: SLURM_* describes the allocation, not this process.
"""

from __future__ import annotations

import atexit
import datetime
import json
import math
import os
import sys
import time
from collections.abc import Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, Subset

from elasticrt.distributed import agent_client, collectives, regroup
from elasticrt.distributed.barrier import Barrier
from elasticrt.errors import ConfigError, explain
from elasticrt.ipc.env import WorkerEnv
from elasticrt.torch_versions import bound_to

SURVIVE = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "NCCL_RAS_ENABLE": "0",
}
"""Settings of torch and NCCL for a process that outlives its group. Under an agent only `regroup` ends the work of
NCCL, and the agent notices hangs.

Torch's watchdog would end a process that has lost a peer. Torch's monitor would end a process whose watchdog waits for
a communicator that is being aborted. With dumps on timeout, the monitor looks into the store of a group that was left,
and complains that the store is gone. NCCL's service for diagnosis (RAS) listens outside of any communicator; once its
socket is shut down, the service tries again without end."""

# The timeout of a meeting under an agent: as good as none.
_MEETING = datetime.timedelta(days=7)


@dataclass(frozen=True)
class Context:
    """This process's place in the run. The object is live: after a change of the membership it has the new values.

    Attributes:
        rank: the rank of this process, 0 to world_size - 1 over all nodes.
        local_rank: the rank of this process on its node, 0 to local_world_size - 1.
        world_size: the number of processes in the world.
        local_world_size: the number of processes on this node.
        group_rank: the number of this node, from 0.
        generation: the number of the agreed membership that this process belongs to, from 1; 0 without an elasticrt
            agent.
        restart_count: how often the run was restarted after a failure.
        device: the device on which this process computes: a GPU of its own where there is one, else the CPU.
        run_dir: the run's directory for logs; None without an elasticrt agent.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    group_rank: int
    generation: int
    restart_count: int
    device: torch.device
    run_dir: Path | None

    @property
    def is_first(self) -> bool:
        """Whether this process has rank 0, which usually does the printing."""
        return self.rank == 0

    def shard(self, dataset: Dataset[Any]) -> Subset[Any]:
        """This rank's part of `dataset`: every world_size-th sample, without repetition and padding.

        Use this for evaluation. The parts of two ranks may differ in size by one sample, so ranks may have different
        numbers of batches: call the bare model, not DDP's forward. Raises TypeError for a dataset without a length.
        """
        if not isinstance(dataset, Sized):
            raise TypeError(explain("a dataset without a length can't be sharded", "shard", got=type(dataset).__name__))
        return Subset(dataset, range(self.rank, len(dataset), self.world_size))

    def sum(self, *numbers: float | torch.Tensor) -> Any:
        """The sum of each number over all ranks: a number for one argument, a tuple for several. Collective.

        Whole numbers are added exactly, others in double precision. A tensor must hold one element. Raises TypeError
        for anything else.
        """
        mine = [each.item() if isinstance(each, torch.Tensor) and each.numel() == 1 else each for each in numbers]
        for number in mine:
            if not isinstance(number, (int, float)):
                expected = "int, float or a tensor of one element"
                raise TypeError(explain("not a number", "sum", got=number, expected=expected))
        gathered = [json.loads(each) for each in collectives.gather_bytes(json.dumps(mine).encode())]
        sums = tuple(map(sum, zip(*gathered, strict=True)))
        return sums[0] if len(sums) == 1 else sums


_context: Context | None = None
_timeout_s = 1800.0
_group_pid = 0
"""The process id for which `init` has made a group; 0 for none. A forked child inherits this memory, but not the
group."""


def has_own_group() -> bool:
    """Whether `init` has made this process's group. The group's connections are then known, and it can be renewed."""
    return _group_pid == os.getpid() and dist.is_initialized()


def make_group(backend: str, **options: Any) -> None:
    """Call `init_process_group` with the settings that this process's device and agent need.

    `options` are further arguments of that function.
    """
    if backend == "nccl" and agent_client.worker_env().has_agent:
        os.environ.update(SURVIVE)
    device = torch.device("cuda", torch.cuda.current_device()) if backend.startswith("nccl") else torch.device("cpu")
    dist.init_process_group(backend, **options, **bound_to(device, backend))


def timeout_s() -> float:
    """How long a collective may take, in seconds: the `timeout_s` of `init`."""
    return _timeout_s


def renew(worker: WorkerEnv) -> None:
    """Give the Context the values of this process's new seat. Every holder of the Context sees them."""
    moves = ("rank", "world_size", "local_world_size", "group_rank", "generation", "restart_count")
    for name in moves if _context is not None else ():
        # The dataclass is frozen for all other code.
        object.__setattr__(_context, name, getattr(worker, name))


def init(*, backend: str | None = None, timeout_s: float = 1800) -> Context:
    """Join the process group, and return the Context of this process. A second call changes nothing.

    A process group that exists already is adopted. Without a launcher (`python train.py`) `init` makes a group of one,
    so that DDP works.

    Args:
        backend: torch's name of the backend; by default nccl where every local rank has a GPU of its own, else gloo.
        timeout_s: how long a collective may wait for other ranks, in seconds. Under an elasticrt agent the first
            meeting of the ranks has no timeout, because some may still be preparing their data.

    Raises ConfigError when the environment has a malformed or impossible rank, or no address; TypeError and ValueError
    for invalid arguments; torch's error when the ranks do not meet within `timeout_s`.
    """
    global _context, _timeout_s  # noqa: PLW0603  There is one process group in a process: this is our memory of it.
    _check_arguments(backend, timeout_s)
    if _context is not None and dist.is_initialized():
        return _context
    worker, page = agent_client.worker_env(), agent_client.status_page()
    page.init_at_ns = time.monotonic_ns()
    rank, world_size = collectives.rank_and_world()
    if not 0 <= rank < world_size:
        got = f"RANK={rank} WORLD_SIZE={world_size}"
        remedy = "Unset both, or start the script with a launcher that sets them"
        raise ConfigError("no such rank", "environment", got=got, expected="0 <= RANK < WORLD_SIZE", remedy=remedy)
    local_rank = collectives.launched("LOCAL_RANK", rank)
    local_world_size = collectives.launched("LOCAL_WORLD_SIZE", world_size)
    device = _device(local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        own_gpu = torch.cuda.device_count() >= local_world_size or worker.gpu != ""
        own_gpu = own_gpu and device.type == "cuda" and dist.is_nccl_available()
        regroup.note_groups()
        _join(backend or ("nccl" if own_gpu else "gloo"), rank, world_size, timeout_s)
        _timeout_s = timeout_s
    page.joined_at_ns = time.monotonic_ns()
    _context = Context(
        rank=rank,
        local_rank=collectives.local_rank_of(rank),
        world_size=world_size,
        local_world_size=local_world_size,
        group_rank=collectives.launched("GROUP_RANK", 0),
        generation=worker.generation,
        restart_count=collectives.launched("TORCHELASTIC_RESTART_COUNT", 0),
        device=device,
        run_dir=Path(worker.run_dir) if worker.run_dir else None,
    )
    return _context


def _check_arguments(backend: object, timeout_s: object) -> None:
    if not isinstance(timeout_s, (int, float)) or isinstance(timeout_s, bool):
        raise TypeError(explain("timeout_s is not a number", "init", got=timeout_s))
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ValueError(explain("timeout_s out of range", "init", got=timeout_s, expected="> 0 seconds"))
    if backend is not None and not isinstance(backend, str):
        raise TypeError(explain("backend is not a name", "init", got=backend, expected='"gloo", "nccl" or None'))


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _join(backend: str, rank: int, world_size: int, timeout_s: float) -> None:
    """Make the process group, in the way that the launcher's variables ask for."""

    def make(**options: Any) -> None:
        # Sockets are noted only while the group is made, not while this rank waits for others: connections that the
        # script opens during the wait do not belong to the group.
        with regroup.SOCKETS.noting_group(world_size, backend, collectives.launched("MASTER_PORT", 0)):
            make_group(backend, timeout=datetime.timedelta(seconds=timeout_s), **options)

    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    address = os.environ.get("MASTER_ADDR", "")
    if launched and world_size > 1 and not (address and os.environ.get("MASTER_PORT")):
        raise ConfigError(
            "MASTER_ADDR or MASTER_PORT is not set",
            "environment",
            got=f"RANK={rank} WORLD_SIZE={world_size}",
            remedy="Start the script with `elasticrt run` or `torchrun`, or unset RANK and WORLD_SIZE",
        )
    # Gloo resolves the machine's own name to find an interface, and fails if that name does not resolve. When all ranks
    # are on this machine, the loopback interface will do.
    if (not launched or _is_loopback(address)) and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    worker, torch_dist = agent_client.worker_env(), cast("Any", dist)  # It offers more than it declares.
    if worker.beside or not (launched and address):
        # A world of one: without a launcher, or beside the training of others until they let this process in. A
        # HashStore has no port, so no other process can join by accident.
        make(store=torch_dist.HashStore(), rank=0, world_size=1)
    elif world_size > 1 and worker.has_agent:
        # The ranks meet at a barrier before they make the group, because that wait has no timeout: some ranks may
        # still be preparing their data. The agent ends this process if they can't come.
        store, rank, world_size = next(torch_dist.rendezvous("env://", rank, world_size, timeout=_MEETING))
        meeting = Barrier("init()", store)
        meeting.finish()
        meeting.wait()
        store.set_timeout(datetime.timedelta(seconds=timeout_s))
        make(store=store, rank=rank, world_size=world_size)
    else:
        make()
    global _group_pid  # noqa: PLW0603  As above.
    if not _group_pid:
        atexit.register(leave_group)
    _group_pid = os.getpid()


def leave_group() -> None:
    """At exit, destroy the process group that `init` has made: its threads can abort the process then (SIGABRT).

    This is left out after an uncaught exception, where destroying would wait for a collective under way. A process that
    ends without finalizing its interpreter (`bootstrap.shutdown`) does not come here.
    """
    if getattr(sys, "last_value", None) is None and os.getpid() == _group_pid and dist.is_initialized():
        dist.destroy_process_group()


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1", "ip6-localhost") or address.startswith("127.")
