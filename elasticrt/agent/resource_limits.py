"""Raises the limit of open files to what a node needs, or says before anything starts that a limit is too low."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

from elasticrt.errors import ConfigError
from elasticrt.ipc.proc import all_pids
from elasticrt.ipc.wording import counted
from elasticrt.liveness.probe import CONNECTIONS_MAX
from elasticrt.liveness.prober import OPEN_AT_ONCE

FILES_OF_AGENT = 64
"""Descriptors for modules being loaded, etcd, the worker parent, logs, and copies in memory. About 30 are in use."""

FILES_OF_WORKER = 9
"""Descriptors for each worker: two pipes, two logs and the channel; while the worker starts, also its ends of the pipes
and of the channel, and its status page."""

THREADS_OF_NODE = 16
"""Threads of the agent and of the worker parent. The kernel counts each thread as a process."""

THREADS_OF_ETCD = 8
"""Threads of an embedded etcd and its keeper."""

THREADS_OF_WORKER = 6
"""Threads of a worker that does next to nothing."""


def files_needed(workers: int, nodes: int) -> int:
    """The number of files that an agent with so many `workers` opens, in a run of up to so many `nodes`. Pure.

    In the worst case the agent probes all other nodes, and all others probe it.
    """
    return FILES_OF_AGENT + FILES_OF_WORKER * workers + min(nodes, OPEN_AT_ONCE) + min(nodes, CONNECTIONS_MAX)


def allow_files(workers: int, nodes: int) -> None:
    """Raise this process's soft limit to `files_needed` for these `workers` and `nodes`. Workers inherit the limit.

    Raises ConfigError if the hard limit is lower.
    """
    needed = files_needed(workers, nodes)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            "the limit of open files is too low",
            "ulimit -n",
            got=f"a hard limit of {hard:,}",
            expected=f"{needed:,} for {counted(workers, 'worker')} in a run of up to {nodes:,} nodes",
            remedy="Raise the limit, or start fewer workers on this node",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def threads_needed(workers: int, *, serves: bool) -> int:
    """How many threads a node with so many `workers` needs at least, with an etcd of its own if it `serves` one. Pure.

    Less than this ends badly: gRPC and torch abort their processes, or wait for ever, where they get no thread.
    """
    return THREADS_OF_NODE + THREADS_OF_ETCD * serves + THREADS_OF_WORKER * workers


def check_processes(workers: int, *, serves: bool) -> None:
    """Raise ConfigError if this user may not start `threads_needed` for these `workers`. Root has no such limit."""
    limit, needed = resource.getrlimit(resource.RLIMIT_NPROC)[0], threads_needed(workers, serves=serves)
    if os.getuid() == 0 or limit == resource.RLIM_INFINITY:
        return
    used = _threads_of(os.getuid())
    if limit - used < needed:
        raise ConfigError(
            "the limit of processes is too low",
            "ulimit -u",
            got=f"{limit:,}, of which this user has {used:,} in use (each thread counts)",
            expected=f"{needed:,} more for {counted(workers, 'worker')}",
            remedy="Raise the limit, or end other processes of this user",
        )


def _threads_of(uid: int) -> int:
    """How many threads the processes of user `uid` have."""
    found = 0
    for pid in all_pids():
        # The process may end meanwhile.
        with suppress(OSError):
            where = Path(f"/proc/{pid}")
            if where.stat().st_uid == uid:
                found += len(os.listdir(where / "task"))  # noqa: PTH208  Names are all we need.
    return found
