"""The environment of workers: their ranks, where they meet, which network they use. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elasticrt.ipc.env import WorkerEnv, inherited
from elasticrt.rendezvous.records import Generation, Seat
from elasticrt.settings import Settings

# Variables that the user's environment overrides.
DEFAULTS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    # Lets torch use huge pages for large tensors on the host. After a change of the membership, gradients, buckets and
    # received states are new memory, and touching small pages takes several times as long as writing to them.
    "THP_MEM_ALLOC_ENABLE": "1",
}


def worker_environment(env: Mapping[str, str], workers: int, *, fresh: bool) -> dict[str, str]:
    """The environment that `workers` processes on one node and their parent share, made from the user's `env`.

    `fresh`: a new run does not resume from a directory.
    """
    # As under torchrun, each of several workers gets one thread, unless the user's variables say otherwise.
    threads = {"OMP_NUM_THREADS": "1"} if workers > 1 else {}
    return {**({"ELASTICRT_FRESH": "1"} if fresh else {}), **threads, **DEFAULTS, **inherited(env)}


def worker_env(
    settings: Settings, generation: Generation, seat: Seat, local_rank: int, place: int | None = None
) -> WorkerEnv:
    """The environment of the worker with `local_rank` in `generation`, in its node's `seat`; `place`: its number there,
    if some workers of it are missing."""
    return _env(
        settings,
        generation,
        local_rank=local_rank,
        node=seat.node,
        rank=seat.rank_offset + (local_rank if place is None else place),
        world_size=generation.world_size,
        local_world_size=settings.workers if generation.in_place else seat.workers,
        group_rank=seat.index,
        group_world_size=generation.nodes,
        generation=generation.number,
        resume=generation.resume,
        copy=generation.memory,
        waits=generation.waits,
    )


def _env(settings: Settings, of: Generation, *, local_rank: int, **place: Any) -> WorkerEnv:
    """The environment of any worker; `place`: its rank and the sizes of its world."""
    return WorkerEnv(
        local_rank=local_rank,
        master_addr=of.master_address,
        master_port=of.master_port,
        restart_count=of.restarts.total,
        max_restarts=settings.max_restarts,
        run_id=settings.run_id,
        attempt=of.attempt,
        nonce=of.nonce,
        cause=of.cause,
        run_dir=str(settings.run_dir),
        role=settings.options.role,
        as_srun=settings.options.as_srun,
        gpu=settings.gpus[local_rank] if settings.gpus else "",
        signals=",".join(number.name for number in settings.options.signals),
        **place,
    )


def beside_env(settings: Settings, generation: Generation, index: int, local_rank: int) -> WorkerEnv:
    """The environment of a worker that sets up beside `generation`: the ranks that it would get if it joined now, with
    its node's `index` there, or the next free one."""
    return _env(
        settings,
        generation,
        local_rank=local_rank,
        node=settings.node,
        rank=generation.world_size + local_rank,
        world_size=generation.world_size + local_rank + 1,
        local_world_size=settings.workers,
        group_rank=index,
        group_world_size=max(generation.nodes, index + 1),
        generation=0,
        beside=True,
    )


def network(interface: str, env: Mapping[str, str], *, told: bool) -> dict[str, str]:
    """Variables that make workers use the `interface` with this node's address, unless the user's `env` sets them.

    Without them gloo announces what the host name resolves to, often 127.0.1.1 or nothing. NCCL may use several
    interfaces at once: it is bound to one only if the user gave the address (`told`).
    """
    found = {"GLOO_SOCKET_IFNAME": interface, **({"NCCL_SOCKET_IFNAME": f"={interface}"} if told else {})}
    return {name: value for name, value in found.items() if interface and name not in env}
