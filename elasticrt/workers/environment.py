"""Makes the environment of workers: their ranks, where they meet, which network interface they use. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elasticrt.ipc.env import WorkerEnv, inherited
from elasticrt.rendezvous.records import Generation, Seat
from elasticrt.settings import Settings

# Defaults. The user's environment overrides them.
DEFAULTS = {
    # As torchrun does: NCCL's watchdog ends a process whose collective has failed or timed out.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    # Lets torch use huge pages for large tensors on the host. After a change of the membership, gradients, buckets and
    # received states are in new memory. With small pages, the first touch of the memory takes several times as long as
    # writing to it.
    "THP_MEM_ALLOC_ENABLE": "1",
}


def worker_environment(env: Mapping[str, str], workers: int, *, fresh: bool) -> dict[str, str]:
    """The environment that all workers of a node and their parent share.

    Args:
        env: the user's environment.
        workers: the number of workers on this node.
        fresh: whether the run starts from the beginning instead of resuming from its directory (--fresh).
    """
    # As under torchrun, each of several workers gets one thread, unless the user's environment says otherwise.
    threads = {"OMP_NUM_THREADS": "1"} if workers > 1 else {}
    return {**({"ELASTICRT_FRESH": "1"} if fresh else {}), **threads, **DEFAULTS, **inherited(env)}


def worker_env(
    settings: Settings, generation: Generation, seat: Seat, local_rank: int, place: int | None = None
) -> WorkerEnv:
    """The variables of one worker in `generation`.

    Args:
        settings: the agent's settings.
        generation: the worker's generation.
        seat: the seat of the worker's node.
        local_rank: the local rank of the worker, which it keeps.
        place: the worker's number in the seat; None: its local rank. The two differ if workers of this node are
            missing.
    """
    return _env(
        settings,
        generation,
        local_rank=local_rank,
        node=seat.node,
        rank=seat.rank_offset + (local_rank if place is None else place),
        world_size=generation.world_size,
        # In place, workers keep their local ranks, also while some workers of the node are missing.
        local_world_size=settings.workers if generation.in_place else seat.workers,
        group_rank=seat.index,
        group_world_size=generation.nodes,
        generation=generation.number,
        resume=generation.resume,
        copy=generation.memory,
        waits=generation.waits,
    )


def _env(settings: Settings, of: Generation, *, local_rank: int, **place: Any) -> WorkerEnv:
    """The variables of any worker. `place`: its ranks, the sizes of its world, and what differs between workers."""
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
    """The variables of a worker that sets up beside `generation`: its ranks are as if it joined now.

    `index`: the group rank of the worker's node in `generation`, or the next free one.
    """
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
    """The variables that make workers use the network interface with this node's address.

    Without them gloo announces the address to which the host name resolves, often 127.0.1.1 or none. NCCL may use
    several interfaces at once, so it is bound to one only if the user has given the address.

    Args:
        interface: the name of the interface; "" if it is unknown.
        env: the user's environment. A variable that is set there is left out.
        told: whether the user has given this node's address.
    """
    found = {"GLOO_SOCKET_IFNAME": interface, **({"NCCL_SOCKET_IFNAME": f"={interface}"} if told else {})}
    return {name: value for name, value in found.items() if interface and name not in env}
