"""`env://` inside a worker: the generation's store, on the socket that the worker's node held for it, with a prefix.

With torch's own handler, rank 0 binds MASTER_PORT when it gets there, when another program may have taken the port, and
the keys of one initialisation get in the way of the next. Here the listening socket exists before the ranks are agreed,
and the prefix names the generation, so a stale worker meets no other rank in the store.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlparse

from elasticrt.ipc.env import WorkerEnv

TIMEOUT = timedelta(minutes=30)
"""torch's default for a rendezvous."""


def serve_env_rendezvous(worker: WorkerEnv) -> None:
    """From now on `init_process_group()` and `env://` in this process use the generation's own store.

    Does nothing if torch has no registry of handlers. Then rank 0 binds MASTER_PORT itself, as under torchrun.
    """
    # torch has a public function to register a scheme, but none to replace one. `torch.distributed.rendezvous` as an
    # attribute is a function of the same name, so the module is imported by its name.
    module = importlib.import_module("torch.distributed.rendezvous")
    registry = getattr(module, "_rendezvous_handlers", {})
    torchs = registry.get("env")
    if torchs is None:
        if worker.listen_fd >= 0:
            os.close(worker.listen_fd)
        return
    times = itertools.count()
    # The server is kept here, because torch drops it with its process group, and later groups need it as well.
    servers: list[Any] = []

    def rendezvous(url: str, timeout: timedelta | None = None, **options: Any) -> Iterator[tuple[Any, int, int]]:
        from torch.distributed.distributed_c10d import PrefixStore

        if not _is_of(worker, url):
            more = {} if timeout is None else {"timeout": timeout}
            yield from torchs(url, **more, **options)
            return
        # Each initialisation in the process gets a prefix of its own, because ranks count these calls alike.
        prefix = f"{worker.run_id}/{worker.generation}/{worker.nonce}/{next(times)}"
        yield PrefixStore(prefix, _connected(worker, timeout or TIMEOUT, servers)), worker.rank, worker.world_size
        raise RuntimeError("env:// cannot be used for a second rendezvous of the same call")

    registry["env"] = rendezvous


def _is_of(worker: WorkerEnv, url: str) -> bool:
    """Whether the script means the worker's own world, and not another address, or ranks of its own `mp.spawn`."""
    query = dict(parse_qsl(urlparse(url).query))
    rank = int(query.get("rank", os.environ.get("RANK", "-1")))
    world_size = int(query.get("world_size", os.environ.get("WORLD_SIZE", "-1")))
    agreed = (worker.rank, worker.world_size, worker.master_addr, str(worker.master_port))
    found = (rank, world_size, os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
    return agreed == found and (worker.rank != 0 or worker.listen_fd >= 0)


def _connected(worker: WorkerEnv, timeout: timedelta, servers: list[Any]) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # It is public, but not in its __all__.

    common: dict[str, Any] = {
        "host_name": worker.master_addr,
        "port": worker.master_port,
        "world_size": worker.world_size,
        "timeout": timeout,
        # The count of workers does not know the prefix. The process group has a barrier of its own.
        "wait_for_workers": False,
    }
    if worker.rank == 0 and not servers:
        # The store closes the descriptor that it gets, so it gets a copy.
        servers.append(TCPStore(is_master=True, master_listen_fd=os.dup(worker.listen_fd), **common))
    return TCPStore(is_master=False, **common)
