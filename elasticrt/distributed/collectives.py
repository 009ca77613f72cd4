"""Collectives of bytes and whole numbers, and what this process knows of its group. Nothing is ever pickled.

`gather_numbers`, `gather_bytes` and `broadcast_bytes` are collective: all ranks of the default process group call them,
in the same order. Without a group, or in a group of one, they return what they got.
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
    """Rank and world size: from the process group, else from the launcher's variables, else (0, 1).

    Raises ConfigError when RANK or WORLD_SIZE is malformed.
    """
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return launched("RANK", 0), launched("WORLD_SIZE", 1)


def local_rank_of(rank: int) -> int:
    """The local rank of this process, which has `rank` in the world; without a launcher `rank` itself.

    Where each worker sees one GPU only, LOCAL_RANK is 0 for all of them. The local rank is then the agent's.
    """
    worker = agent_client.worker_env()
    return worker.local_rank if worker.gpu else launched("LOCAL_RANK", rank)


def launched(name: str, default: int) -> int:
    """The whole number in the environment variable `name`, which a launcher sets; `default` if it is not set.

    Raises ConfigError when the variable is malformed.
    """
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
    """Raise ConfigError if there are several processes but no process group. `where` is the caller's name."""
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
    """Whether this process has no other ranks beside it."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def sequence_number() -> int:
    """How many collectives this rank has begun in the default group."""
    # None without a group. This is called twice in each step, so it takes the shortest way to the group.
    world: Any = dist.GroupMember.WORLD
    return 0 if world is None else int(world._get_sequence_number_for_group())


def device() -> torch.device:
    """The device on which tensors must lie for a collective: the GPU if NCCL is the only backend, else the CPU."""
    backend = dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def gather_numbers(numbers: Sequence[int]) -> list[list[int]]:
    """The `numbers` of each rank, by rank. Collective.

    All ranks pass the same number of them, each a signed integer of 64 bits.
    """
    if alone():
        return [list(numbers)]
    mine = torch.tensor(list(numbers), dtype=torch.int64, device=device())
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return [each.tolist() for each in torch.stack(gathered).cpu()]


def gather_bytes(data: bytes) -> list[bytes]:
    """The `data` of each rank, by rank. Collective. Sizes may differ."""
    if alone():
        return [data]
    # `all_gather` needs tensors of one size: all are padded to the largest.
    sizes = [size for (size,) in gather_numbers([len(data)])]
    mine = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
    # `frombuffer` refuses an empty buffer.
    if data:
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    travelling = mine.to(device())
    gathered = [torch.empty_like(travelling) for _ in sizes]
    dist.all_gather(gathered, travelling)
    # By a list, because `Tensor.numpy` needs numpy, which torch does not require.
    return [bytes(each[:size].tolist()) for each, size in zip(gathered, sizes, strict=True)]


def broadcast_bytes(data: bytes) -> bytes:
    """The `data` of rank 0, on every rank. Collective. Meant for small data: every rank gathers as much from each."""
    rank, _ = rank_and_world()
    return gather_bytes(data if rank == 0 else b"")[0]
