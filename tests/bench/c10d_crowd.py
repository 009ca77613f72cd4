"""torchrun's own rendezvous with N agents in one process: `python -m tests.bench.c10d_crowd N` prints seconds.

N threads, each with a `DynamicRendezvousHandler` on its own client of one TCPStore, as `--rdzv-backend c10d`
makes them.
"""

from __future__ import annotations

import sys
import threading
import time

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler


def main() -> None:
    """Let N agents meet; the time from the last one's arrival until all have their ranks."""
    count = int(sys.argv[1])
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parameters = RendezvousParameters("c10d", f"127.0.0.1:{server.port}", "bench", count, count, local_addr="127.0.0.1")
    began, ended = [], []

    def agent() -> None:
        store = TCPStore("127.0.0.1", server.port, is_master=False)
        handler = create_handler(store, C10dRendezvousBackend(store, "bench"), parameters)
        began.append(time.monotonic())
        handler.next_rendezvous()
        ended.append(time.monotonic())

    threads = [threading.Thread(target=agent, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(max(ended) - max(began), flush=True)


if __name__ == "__main__":
    main()
