"""Raises an agent's limit of open files to what it needs, or says that this is impossible before anything starts."""

from __future__ import annotations

import resource

from elasticrt.errors import ConfigError
from elasticrt.ipc.wording import counted
from elasticrt.liveness.probe import CONNECTIONS_MAX
from elasticrt.liveness.prober import OPEN_AT_ONCE

FILES_OF_AGENT = 64
"""Descriptors for modules being loaded, etcd, the worker parent, logs, and copies in memory. About 30 are in use."""

FILES_OF_WORKER = 9
"""Descriptors for each worker: two pipes, two logs and the channel; while the worker starts, also its ends of the pipes
and of the channel, and its status page."""


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
