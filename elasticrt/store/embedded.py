"""The etcd of one machine's agents, for runs without `--etcd`: found, or started in a process that outlives us.

Agents with the same run id find each other's server through a record in the runtime directory, under the machine's
lock. What a crashed server leaves is removed here, and a fresh one, with a new identity, takes its place: the version
that can be installed with pip may lose acknowledged writes in a crash, so its data is never used again.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import elasticrt
from elasticrt.errors import ConfigError, StoreError, explain
from elasticrt.ipc.proc import start_of
from elasticrt.store import etcd_server, runtime_dir
from elasticrt.store.protocol import Address

START_S_MAX = 40.0
"""A keeper that has not answered by then is given up."""


@dataclass(frozen=True)
class Served:
    """A running embedded server. `token` tells it from any other; `started` is true for the agent that started it.

    `keeper_start` tells its keeper from a later process with the same number (kernel ticks since boot).
    """

    address: Address
    keeper_pid: int
    keeper_start: int
    token: str
    started: bool

    def lives(self) -> bool:
        """Whether its keeper still runs."""
        return start_of(self.keeper_pid) == self.keeper_start


def find(run_id: str) -> Served | None:
    """The server of this run on this machine, if there is one; it waits for the finder a while.

    Raises ConfigError when the runtime directory is unsafe.
    """
    with runtime_dir.locked(run_id) as lock:
        assert lock is not None, "we wait for the lock"
        served = _registered(lock.directory, run_id)
        if served is None:
            runtime_dir.forget(lock.directory, run_id)
        return served


def find_or_start(run_id: str, *, listen: Address | None = None, linger_s: float = 30.0) -> Served:
    """The server of this run on this machine, started if need be: on a socket of this user's, or at `listen`.

    It ends when no member of the run has been there for `linger_s` (much sooner when the run has its result).
    Raises StoreError when it does not start; ConfigError when there is no etcd to start, `listen` is not ours to serve
    or the runtime directory is unsafe.
    """
    with runtime_dir.locked(run_id) as lock:
        assert lock is not None, "we wait for the lock"
        served = _registered(lock.directory, run_id)
        if served is None:
            runtime_dir.sweep(lock.directory, but=run_id)
            try:
                _start(run_id, lock, listen, linger_s)
            except (StoreError, ConfigError):
                runtime_dir.forget(lock.directory, run_id)
                raise
            served = _registered(lock.directory, run_id, started=True)
            assert served is not None, "registered by the keeper"
        return served


def _registered(directory: Path, run_id: str, *, started: bool = False) -> Served | None:
    record = runtime_dir.read_record(directory, run_id)
    if record is None or not runtime_dir.is_alive(record):
        runtime_dir.clean_up(directory, run_id)
        return None
    runtime_dir.touch_record(directory, run_id)
    return Served(
        Address(record["scheme"], record["host"], record["port"]),
        record["keeper_pid"],
        record["keeper_start"],
        record["token"],
        started,
    )


def _start(run_id: str, lock: runtime_dir.Lock, listen: Address | None, linger_s: float) -> None:
    """Start a keeper and wait until its server is registered."""
    where = None if listen is None else asdict(etcd_server.claim(listen, "--rdzv-endpoint"))
    ready, ready_fd = os.pipe()
    order = {
        "run_id": run_id,
        "directory": str(lock.directory),
        "binary": str(etcd_server.find_binary()),
        "listen": where,
        "linger_s": linger_s,
        "ready_fd": ready_fd,
        "lock_fd": lock.fd,
    }
    try:
        with subprocess.Popen(
            [sys.executable, "-m", "elasticrt.store.embedded_supervisor", json.dumps(order)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",  # Neither a user's file called json.py nor a directory to be unmounted is in the way.
            env=_environment(),
            pass_fds=(ready_fd, lock.fd),
            start_new_session=True,
        ):
            os.close(ready_fd)
            ready_fd = -1
            # Everybody who starts a server will talk to it: load the client while it starts.
            import elasticrt.store.etcd  # noqa: F401

            answer = _answer(ready)
    except OSError as error:
        got, remedy = etcd_server.in_our_words(str(error))
        what = "the embedded etcd could not be started"
        raise StoreError(explain(what, sys.executable, got=got, remedy=remedy)) from error
    finally:
        os.close(ready)
        if ready_fd >= 0:
            os.close(ready_fd)
    if "error" in answer:
        raise StoreError(answer["error"])


def _answer(ready: int) -> dict[str, str]:
    deadline = time.monotonic() + START_S_MAX
    text = b""
    while time.monotonic() < deadline:
        if not select.select([ready], [], [], max(0.0, deadline - time.monotonic()))[0]:
            break
        piece = os.read(ready, 4096)
        text += piece
        if not piece:
            break
    try:
        answer: dict[str, str] = json.loads(text)
    except ValueError:
        what = "the keeper of the embedded etcd died while it started"
        return {"error": explain(what, sys.executable, remedy="Give --etcd HOST:PORT of a running etcd")}
    return answer


def _environment() -> dict[str, str]:
    """Ours, without etcd's variables, and so that the keeper finds this very package when it is not installed."""
    environment = etcd_server.environment()
    root = str(Path(elasticrt.__file__).parents[1])
    if root in sys.path and not {"site-packages", "dist-packages"} & set(Path(root).parts):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH", ""))))
    return environment
