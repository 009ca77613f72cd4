"""What etcd and a bare client take for what N agents do at least: `python -m tests.bench.bare N PORT` prints seconds.

N watches see one key change, and each is followed by a read of 3 KiB, the size of a roster chunk. No records, no views,
no decisions: it is the floor under the rendezvous on this machine.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from elasticrt.store.etcd import EtcdStore
from elasticrt.store.protocol import Address, Changes, Put, Txn

CHUNK_BYTES = 3072
READERS = 8
STARTED_S_MAX = 60.0


def main() -> None:
    """Measure and print."""
    count, port = int(sys.argv[1]), int(sys.argv[2])
    store = EtcdStore((Address("http", "127.0.0.1", port),), timeout_s=30.0)
    store.commit(Txn((), (Put("/bare/key", b"0"), Put("/bare/chunk", b"x" * CHUNK_BYTES))))
    told: SimpleQueue[Any] = SimpleQueue()

    def seen(item: Any) -> None:
        if isinstance(item, Changes) and item.events:
            told.put(item)

    revision = store.read("/bare/key").revision
    for _ in range(count):
        store.watch("/bare/key", seen, from_revision=revision + 1)
    # etcd starts watches in order: when the last one has seen a first change, all have been started.
    store.commit(Txn((), (Put("/bare/key", b"1"),)))
    for _ in range(count):
        told.get(timeout=STARTED_S_MAX)

    began = time.monotonic()
    store.commit(Txn((), (Put("/bare/key", b"2"),)))

    def read(share: int) -> None:
        for _ in range(share):
            told.get(timeout=STARTED_S_MAX)
            store.read("/bare/chunk")

    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(read, [(count + index) // READERS for index in range(READERS)]))
    print(time.monotonic() - began)
    store.close()


if __name__ == "__main__":
    main()
