"""What workers are told by their environment: who they are, whom they meet, which network they use. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elasticrt.ipc.env import WorkerEnv, inherited
from elasticrt.rendezvous.records import Generation, Seat
from elasticrt.settings import Settings

DEFAULTS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    # Torch asks for huge pages for large tensors on the host. After a change of the membership gradients, buckets and
    # what a newcomer receives are new memory: touching small pages takes several times as long as writing to them.
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""What workers have in their environment, unless the user's says otherwise."""


def worker_environment(env: Mapping[str, str], workers: int, *, fresh: bool = False) -> dict[str, str]:
    """The user's environment as `workers` processes on one node get it; the worker parent is started with the same.

    As under torchrun, several workers share the cores by using one thread each, and errors of NCCL end the process that
    meets them, unless the variables for that say otherwise. `fresh`: a new run does not resume from a directory.
    """
    result = {**({"ELASTICRT_FRESH": "1"} if fresh else {}), **DEFAULTS, **inherited(env)}
    if workers > 1:
        result.setdefault("OMP_NUM_THREADS", "1")
    return result


def worker_env(
    settings: Settings, generation: Generation, seat: Seat, local_rank: int, place: int | None = None
) -> WorkerEnv:
    """What the worker with `local_rank` is told of `generation` and its `seat`, and of the node's `settings`.

    `place`: its number among the seat's workers, where some are missing.
    """
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
    )


def _env(settings: Settings, of: Generation, *, local_rank: int, **place: Any) -> WorkerEnv:
    """What any worker is told of its run and node; `place`: who it is there."""
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
    """What a worker is told that sets up beside `generation`: where it would be if it were let in now.

    `index`: its node's in that generation; `local_rank`: its own there; `settings`: the node's.
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
    """Variables that make workers use the `interface` with this node's address, unless the user's `env` says otherwise.

    Left alone, gloo announces whatever the host name resolves to on this machine: often 127.0.1.1, or nothing. NCCL
    chooses for itself among all interfaces, and may use several: it is only bound to one when the address was `told`.
    """
    found = {"GLOO_SOCKET_IFNAME": interface, **({"NCCL_SOCKET_IFNAME": f"={interface}"} if told else {})}
    return {name: value for name, value in found.items() if interface and name not in env}
