"""How long ranks take to form a group anew, in two ways: `python -m tests.bench.reform [--ranks 3] [--times 50]`.

destroy: `destroy_process_group`, then `init_process_group` under another prefix of the store, as survivors do.
reconfigure: torch's own `_reconfigure` of a group that was made with `enable_reconfigure=True` (torch 2.14 and later).

Each time ends with an all-reduce, so that connections are made. The slowest rank counts. The two ways take turns.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PORT = 29613
TIMEOUT = datetime.timedelta(seconds=20)


def form(way: str, number: int, rank: int, ranks: int, store: dist.Store) -> None:
    """Form the group once, and use it."""
    if way == "destroy":
        if dist.is_initialized():
            dist.destroy_process_group()
        named = dist.PrefixStore(f"{way}/{number}", store)
        dist.init_process_group("gloo", store=named, rank=rank, world_size=ranks, timeout=TIMEOUT)
    else:
        store.set(f"handle/{number}/{rank}", dist._get_reconfigure_handle())
        handles = [store.get(f"handle/{number}/{each}").decode() for each in range(ranks)]
        dist._reconfigure(uuid=number + 1, handles=handles, timeout=TIMEOUT).wait()
    dist.all_reduce(torch.ones(1))


def worker(rank: int, ranks: int, times: int, results: mp.Queue) -> None:
    """One rank: the times of each way, in seconds."""
    store = dist.TCPStore("127.0.0.1", PORT, ranks, rank == 0, timeout=TIMEOUT)
    taken: dict[str, list[float]] = {}
    for way in ("destroy", "reconfigure"):
        if dist.is_initialized():
            dist.destroy_process_group()
        if way == "reconfigure":
            if not hasattr(dist, "_reconfigure"):
                continue
            dist.init_process_group("gloo", store=dist.PrefixStore("reconfigured", store), rank=rank, world_size=ranks,
                                    timeout=TIMEOUT, enable_reconfigure=True)  # fmt: skip
        for number in range(times):
            store.add(f"gate/{way}/{number}", 1)
            while store.add(f"gate/{way}/{number}", 0) < ranks:
                time.sleep(0.0005)
            began = time.monotonic()
            form(way, number, rank, ranks, store)
            taken.setdefault(way, []).append(time.monotonic() - began)
    results.put(taken)
    store.add("over", 1)
    while rank == 0 and store.add("over", 0) < ranks:
        time.sleep(0.01)


def main() -> None:
    """As above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--times", type=int, default=50)
    given = parser.parse_args()
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=worker, args=(rank, given.ranks, given.times, results)) for rank in range(given.ranks)
    ]
    for each in processes:
        each.start()
    found = [results.get(timeout=300) for _ in processes]
    for each in processes:
        each.join(30)
    print(f"torch {torch.__version__}, {given.ranks} ranks, {given.times} times")
    for way in found[0]:
        slowest = [max(times) for times in zip(*(each[way] for each in found), strict=True)]
        print(f"{way:12} median {1e3 * statistics.median(slowest):6.1f} ms, worst {1e3 * max(slowest):6.1f} ms")


if __name__ == "__main__":
    main()
