"""How long ranks take to form a group anew, in two ways: `python -m tests.bench.reform [--ranks 3] [--times 100]`.

anew: as survivors do, with `regroup.leave` and `regroup.meet`: the old group is cut and kept, another one is made.
reconfigure: the same meeting, but the one group is kept and gets new connections by torch's own `_reconfigure` (torch
2.14 and later). The handles that torch asks for are made up, which saves it an exchange.

Each time ends with an all-reduce. The ways take turns by eights; the first of eight is not counted. Rank 0 is measured.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elasticrt.distributed import regroup
from tests.fake_worker import WORKER

TIMEOUT_S = 20.0
BLOCK = 8
PORTS = 3
REST_S = regroup.RETIRED_S + 0.1


class Moving(dist.Store):  # type: ignore[name-defined,misc]  # Torch offers it without declaring it.
    """The store of the present generation. Torch keeps the one that a group was made with."""

    to: Any = None
    count = 0

    def set(self, key: str, value: bytes) -> None:
        """As the present one does."""
        self.to.set(key, value)

    def get(self, key: str) -> Any:
        """As the present one does."""
        return self.to.get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """As the present one does."""
        self.to.wait(list(keys), timeout or timedelta(seconds=TIMEOUT_S))

    def multi_get(self, keys: Sequence[str]) -> Any:
        """As the present one does."""
        return self.to.multi_get(list(keys))

    def compare_set(self, key: str, _expected: bytes, value: bytes) -> Any:
        """Torch claims a number that each generation uses once."""
        self.to.set(key, value)
        return value

    def has_extended_api(self) -> bool:
        """As the present one."""
        return True


MOVING = Moving()


def reconfigured(backend: str, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
    """The group that there is, with new connections; the first time it is made."""
    MOVING.to, MOVING.count = store, MOVING.count + 1
    if not dist.is_initialized():
        place = {"rank": rank, "world_size": world_size, "timeout": timeout}
        dist.init_process_group(backend, store=MOVING, **place, enable_reconfigure=True)
    handles = [f"gloo:{each}:-2:{each}:" for each in range(world_size)]
    handles[rank] = dist._get_reconfigure_handle()
    dist._reconfigure(uuid=MOVING.count, handles=handles, timeout=timeout).wait()


def reform(way: str, number: int, rank: int, ranks: int, listening: socket.socket) -> float:
    """Form the group once more, and use it; in seconds."""
    fd = os.dup(listening.fileno()) if rank == 0 else -1
    place = {"rank": rank, "world_size": ranks, "generation": number, "nonce": str(number)}
    worker = replace(WORKER, **place, master_addr="127.0.0.1", master_port=listening.getsockname()[1], listen_fd=fd)
    began = time.monotonic()
    if way == "anew":
        regroup.leave()
        regroup.meet(worker, "gloo", TIMEOUT_S, bool)
    else:
        regroup.cut()
        while regroup._served:
            regroup._served.pop().close()
        regroup.meet(worker, "gloo", TIMEOUT_S, bool, reconfigured)
    dist.all_reduce(torch.ones(1))
    return time.monotonic() - began


def main() -> None:
    """As above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--times", type=int, default=100, help="re-forms of each way")
    given = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    regroup.keep_groups()
    listening = [socket.create_server(("127.0.0.1", 0), backlog=given.ranks) for _ in range(PORTS)]
    rank, children = 0, []
    for each in range(1, given.ranks):
        child = os.fork()
        if not child:
            rank, children = each, []
            break
        children.append(child)
    ways = ("anew", "reconfigure") if hasattr(dist, "_reconfigure") else ("anew",)
    taken: dict[str, list[float]] = {way: [] for way in ways}
    number = 0
    while min(map(len, taken.values())) < given.times:
        for way in ways:
            if dist.is_initialized():
                dist.barrier()
                regroup.leave()
                time.sleep(REST_S)
                regroup.release_retired()
            for turn in range(BLOCK):
                if turn:
                    dist.barrier()
                number += 1
                took = reform(way, number, rank, given.ranks, listening[number % PORTS])
                if turn:
                    taken[way].append(took)
    if rank == 0:
        print(f"torch {torch.__version__}, {given.ranks} ranks")
        for way, times in taken.items():
            first, median, third = statistics.quantiles(times)
            text = f"quartiles {1e3 * first:.1f} and {1e3 * third:.1f}, worst {1e3 * max(times):.1f}"
            print(f"{way:12} {len(times)} times: median {1e3 * median:.1f} ms, {text}")
    sys.stdout.flush()
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    os._exit(max(codes, default=0))


if __name__ == "__main__":
    main()
