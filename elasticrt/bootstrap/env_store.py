"""`env://` inside a worker: the generation's store on the socket that its node held for it, under a prefix of its own.

With torch's own handler rank 0 binds MASTER_PORT when it gets there, so that another program may have taken it, and the
keys of one initialisation are in the way of the next. Here the listening socket has existed since before the ranks were
agreed on, and the prefix names the generation: a stale worker finds no other there.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlparse

from elasticrt.ipc.env import WorkerEnv

_Handler = Callable[..., Iterator[tuple[Any, int, int]]]


class _EnvRendezvous:
    """Torch's `env` handler for this process. Keeps the server alive, which torch would drop with the group."""

    def __init__(self, worker: WorkerEnv, fallback: _Handler) -> None:
        self._worker = worker
        self._fallback = fallback
        self._server: Any = None
        self._times = 0

    def __call__(self, url: str, timeout: timedelta | None = None, **options: Any) -> Iterator[tuple[Any, int, int]]:
        query = dict(parse_qsl(urlparse(url).query))
        rank = int(query.get("rank", os.environ.get("RANK", "-1")))
        world_size = int(query.get("world_size", os.environ.get("WORLD_SIZE", "-1")))
        if not self._is_ours(rank, world_size):
            more = {} if timeout is None else {"timeout": timeout}
            return self._fallback(url, **more, **options)
        return self._ours(timeout or timedelta(minutes=30))

    def _is_ours(self, rank: int, world_size: int) -> bool:
        # A script that has a world of its own in mind (another address, ranks of its own `mp.spawn`) gets torch's way.
        worker = self._worker
        agreed = (worker.rank, worker.world_size, worker.master_addr, str(worker.master_port))
        found = (rank, world_size, os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
        return agreed == found and (worker.rank != 0 or worker.listen_fd >= 0)

    def _ours(self, timeout: timedelta) -> Iterator[tuple[Any, int, int]]:
        from torch.distributed.distributed_c10d import PrefixStore

        worker = self._worker
        prefix = f"{worker.run_id}/{worker.generation}/{worker.nonce}/{self._times}"
        self._times += 1
        yield PrefixStore(prefix, self._connect(timeout)), worker.rank, worker.world_size
        raise RuntimeError("env:// cannot be used for a second rendezvous of the same call")

    def _connect(self, timeout: timedelta) -> Any:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # It is public, but not in its __all__.

        worker = self._worker
        common: dict[str, Any] = {
            "host_name": worker.master_addr,
            "port": worker.master_port,
            "world_size": worker.world_size,
            "timeout": timeout,
            "wait_for_workers": False,  # That count knows no prefix. The group's own barrier is what waits.
        }
        if worker.rank == 0 and self._server is None:
            # The store closes what it is given, so it gets a copy.
            self._server = TCPStore(is_master=True, master_listen_fd=os.dup(worker.listen_fd), **common)
        return TCPStore(is_master=False, **common)


def serve_env_rendezvous(worker: WorkerEnv) -> None:
    """From now on `init_process_group()` and `env://` in this process mean the generation's own store.

    Nothing changes where torch has no such registry (then rank 0 binds MASTER_PORT itself, as under torchrun).
    """
    # Torch has a public function to register a scheme, but none to replace one.
    # The module hides behind a function of the same name.
    module = importlib.import_module("torch.distributed.rendezvous")
    registry = getattr(module, "_rendezvous_handlers", None)
    if not isinstance(registry, dict) or "env" not in registry:
        if worker.listen_fd >= 0:
            os.close(worker.listen_fd)
        return
    registry["env"] = _EnvRendezvous(worker, registry["env"])
