"""A payload from one rank to all others: who keeps it, who reads what another keeps, and what is refused."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elasticrt.distributed import regroup, shared_payload
from elasticrt.distributed.group_store import GroupStore, GroupStoreServer
from elasticrt.distributed.shared_payload import Payload, share_payload

PAYLOAD = bytes(range(256)) * 300
DIGEST = hashlib.sha256(PAYLOAD).hexdigest()


def _rank(number: int, world: int, listening: socket.socket, work: Callable[[int], Any], answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if number == 0:
        GroupStoreServer(listening, "nonce")
    store = GroupStore("127.0.0.1", listening.getsockname()[1], "nonce", 60, bool)
    dist.init_process_group("gloo", store=store, rank=number, world_size=world)
    try:
        answer = work(number)
    except RuntimeError as error:
        answer = str(error)
    answers.put((number, answer))
    answers.close()
    answers.join_thread()
    dist.barrier()  # The others may still be asking the store.
    os._exit(0)


def ranks(work: Callable[[int], Any], world: int) -> list[Any]:
    """What `work` gives in each process of a group, by rank."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        processes = [context.Process(target=_rank, args=(n, world, listening, work, answers)) for n in range(world)]
        for process in processes:
            process.start()
        found = dict(answers.get(timeout=60) for _ in range(world))
    for process in processes:
        process.join(30)
        process.kill()
    return [found[number] for number in range(world)]


def _shared(rank: int, machines: str, *, opens: bool = True, damaged: int = -1, has: bytes = PAYLOAD) -> Any:
    """Rank 1 has it, and the ranks are on these machines. What came, and how many bytes this rank took part in.

    The groups that are made for it are gone afterwards: one that stays would be taken for the script's own.
    """
    regroup.note_groups()
    shared_payload.LARGE_BYTES, shared_payload.PIECE_BYTES = 1000, 30_000
    shared_payload.machine = lambda: machines[rank]
    if not opens:
        shared_payload._opened = lambda *_: None
    real, took = dist.broadcast, []

    def broadcast(tensor: torch.Tensor, source: int, **more: Any) -> None:
        real(tensor, source, **more)
        if tensor.dtype == torch.uint8 and tensor.numel() > 1:
            took.append(tensor.numel())
            tensor[5] ^= 8 if rank == damaged else 0

    dist.broadcast = broadcast
    mine = Payload() if rank == 1 and has else None
    if mine is not None:
        mine.write(has)
    found = share_payload(mine, len(PAYLOAD), DIGEST, 1)
    assert not regroup.has_subgroups()
    assert (b"" if found is None else found.path.read_bytes()) == has
    return sum(took)


@pytest.mark.parametrize(
    ("machines", "opens", "took"),
    [
        ("aab", True, [0, len(PAYLOAD), len(PAYLOAD)]),  # Rank 0 reads what rank 1 has.
        ("abbb", True, [len(PAYLOAD), len(PAYLOAD), 0, 0]),
        ("bbbb", True, [0, 0, 0, 0]),
        ("abbb", False, [len(PAYLOAD)] * 4),
        ("cba", True, [len(PAYLOAD)] * 3),
    ],
)
def test_each_machine_gets_it_once(machines: str, opens: bool, took: list[int]) -> None:
    """All ranks have it; those that can read what another one of their machine keeps receive nothing."""
    assert ranks(partial(_shared, machines=machines, opens=opens), len(machines)) == took


def test_what_has_changed_on_its_way_is_refused_by_all() -> None:
    """One bit at the rank that keeps it for its machine: no rank makes anything of it."""
    told = ranks(partial(_shared, machines="baa", damaged=0), 3)
    assert "the state was corrupted on its way to this rank" in told[0]
    assert all("the state was corrupted on its way to another rank" in each for each in told[1:])


def test_nothing_to_send() -> None:
    """The rank that was to send has found its payload damaged: all are told, and nothing is sent."""
    assert ranks(partial(_shared, machines="abb", has=b""), 3) == [0, 0, 0]
