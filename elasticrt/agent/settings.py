"""What one agent is told by its command line: the part of the options that the other nodes need not know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from elasticrt.agent.group import Command
from elasticrt.store.protocol import Address, Credentials


@dataclass(frozen=True)
class Settings:
    """One agent's own options.

    Attributes:
        node: its name; with `node_given` false another one is taken when a live agent has this one already.
        address: what the others reach this machine at; None: found from the way to etcd.
        workers: processes on this node.
        etcd: endpoints; empty: the embedded server of this machine, found or started by the run id.
        serve: serve the embedded etcd on this address instead of loopback.
        again: start another attempt of a run that has succeeded.
        run_dir: logs and events; shared by all nodes that see the same directory.
        etcd_linger_s: how long an embedded etcd stays when no member is left and the run has not ended.
        drain_timeout_s: how long this agent tries to hand over before it leaves without.
        stop_timeout_s: grace between SIGTERM and SIGKILL for workers when this agent is told to leave.
        hang_timeout_s: how long a Loop may make no step before its workers are ended, at least; 0: for ever.
        events_fd: an inherited descriptor for events, -1 for none; with one, nothing is narrated.
    """

    run_id: str
    node: str
    node_given: bool
    address: str | None
    workers: int
    command: Command
    start_method: Literal["fork", "exec"]
    preload: tuple[str, ...]
    etcd: tuple[Address, ...]
    credentials: Credentials
    serve: Address | None
    again: bool
    run_dir: Path
    max_restarts: int = 3
    stop_timeout_s: float = 10.0
    drain_timeout_s: float = 15.0
    ride_through_s: float = 900.0
    etcd_linger_s: float = 30.0
    hang_timeout_s: float = 600.0
    role: str = "default"
    events_fd: int = -1
