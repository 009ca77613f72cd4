"""Collectives of bytes and whole numbers, in tensors. Nothing is ever pickled.

Every function here is collective: all ranks of the default process group call it, in the same order. Without a group,
or alone, each is the identity.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from elasticrt.distributed import agent_client
from elasticrt.errors import ConfigError


def rank_and_world() -> tuple[int, int]:
    """Rank and world size: of the process group, else of the launcher's environment, else (0, 1).

    Raises ConfigError when RANK or WORLD_SIZE is malformed.
    """
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return launched("RANK", 0), launched("WORLD_SIZE", 1)


def local_rank_of(rank: int) -> int:
    """The number on its node of this process, which is `rank` of the world.

    Also where each worker sees one GPU only, and LOCAL_RANK is 0 for all.
    """
    worker = agent_client.worker_env()
    return worker.local_rank if worker.gpu else launched("LOCAL_RANK", rank)


def launched(name: str, default: int) -> int:
    """The number that the launcher has set in the environment; `default` without one. Raises ConfigError."""
    text = os.environ.get(name, "")
    try:
        value = int(text) if text else default
    except ValueError:
        value = -1
    if value < 0:
        expected, remedy = "a whole number >= 0", "Unset it, or start the script with a launcher that sets it"
        raise ConfigError(f"{name} is malformed", "environment", got=text, expected=expected, remedy=remedy)
    return value


def require_group(where: str) -> None:
    """Raise ConfigError if there are several processes but no process group."""
    _, world_size = rank_and_world()
    if world_size > 1 and not dist.is_initialized():
        raise ConfigError(
            "no process group",
            where,
            got=f"WORLD_SIZE={world_size}",
            expected="elasticrt.init() or torch.distributed.init_process_group() before",
            remedy="Call elasticrt.init() first",
        )


def alone() -> bool:
    """Whether there are no other ranks."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def sequence_number() -> int:
    """How many collectives this rank has begun in the default group."""
    world: Any = dist.GroupMember.WORLD  # None without a group. Asked for twice in each step, so by the shortest way.
    return 0 if world is None else int(world._get_sequence_number_for_group())


def device() -> torch.device:
    """Where tensors must lie to travel: the GPU with plain NCCL, the host otherwise."""
    backend = dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def gather_numbers(numbers: Sequence[int]) -> list[list[int]]:
    """What each rank passed in, by rank: as many whole numbers of 64 bits with a sign everywhere."""
    if alone():
        return [list(numbers)]
    mine = torch.tensor(list(numbers), dtype=torch.int64, device=device())
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return [each.tolist() for each in torch.stack(gathered).cpu()]


def gather_bytes(data: bytes) -> list[bytes]:
    """What each rank passed in, by rank."""
    if alone():
        return [data]
    sizes = [size for (size,) in gather_numbers([len(data)])]
    mine = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
    if data:  # `frombuffer` refuses an empty buffer.
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    travelling = mine.to(device())
    gathered = [torch.empty_like(travelling) for _ in sizes]
    dist.all_gather(gathered, travelling)
    # Not by way of numpy, which torch does not require.
    return [bytes(each[:size].tolist()) for each, size in zip(gathered, sizes, strict=True)]


def broadcast_bytes(data: bytes) -> bytes:
    """The bytes that rank 0 passed in, on every rank. They should be few: all ranks' are gathered for that."""
    rank, _ = rank_and_world()
    return gather_bytes(data if rank == 0 else b"")[0]
