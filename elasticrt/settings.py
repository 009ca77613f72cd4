"""What one agent is told by its command line: the part of the options that the other nodes need not know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM, Signals
from typing import Literal

from elasticrt.store.protocol import ETCD_WAIT_S, Address, Credentials

SIGNALS = (SIGTERM, SIGINT, SIGHUP, SIGQUIT)
"""What makes an agent leave, if nothing else is said: the same as torchrun."""


OUT, ERR = "out", "err"


@dataclass(frozen=True)
class Command:
    """What every worker runs: a script with its arguments, a module with its arguments, or a program of its own.

    Attributes:
        argv: the script's path, the module's name or the program, then its arguments, verbatim.
        kind: "script", "module" or "program" (then the parent must have been started with `no_python`).
    """

    argv: tuple[str, ...]
    kind: str = "script"

    def of_worker(self, local_rank: int) -> list[str]:
        """The words for one worker: as under torchrun, `${local_rank}` in an argument stands for its local rank."""
        return [self.argv[0], *(word.replace("${local_rank}", str(local_rank)) for word in self.argv[1:])]


@dataclass(frozen=True)
class Streams:
    """Streams of workers: those of `some`, by local rank, and `others` of everybody else."""

    others: frozenset[str] = frozenset()
    some: Mapping[int, frozenset[str]] = field(default_factory=dict)

    def of(self, local_rank: int) -> frozenset[str]:
        """The streams of one worker."""
        return self.some.get(local_rank, self.others)


@dataclass(frozen=True)
class LogOptions:
    """Where output goes.

    Attributes:
        prefix: put before each line on the console, with ${node}, ${rank}, ${local_rank}, ${role_name} and
            ${generation} filled in.
        console_ranks: local ranks whose output is shown on the console; None for all.
        redirected: streams that are not shown there.
        files: whether output is also kept in files.
        file_max_bytes: a file that has reached this size is closed with a note at its end.
    """

    prefix: str = ""
    console_ranks: frozenset[int] | None = None
    redirected: Streams = Streams()
    files: bool = True
    file_max_bytes: int = 256 * 1024 * 1024


@dataclass(frozen=True)
class Settings:
    """One agent's own options.

    Attributes:
        node: its name; with `node_given` false another one is taken when a live agent has this one already.
        node_rank: where it would like to sit among newcomers; None: behind those that say.
        address: what the others reach this machine at; None: found from the way to etcd.
        shared_options: options that a node needs as well to join, as words of a command line; see `how_to_join`.
        workers: processes on this node.
        etcd: endpoints; empty: the embedded server of this machine, found or started by the run id.
        serve: serve the embedded etcd on this address instead of loopback.
        again: start another attempt of a run that has succeeded.
        run_dir: logs and events; shared by all nodes that see the same directory.
        logs: what of the workers' output is kept and shown.
        notes: what people should know of their options.
        etcd_linger_s: how long an embedded etcd stays when no member is left and the run has not ended.
        etcd_runs: an etcd is said to run at its endpoints: where nothing listens, nothing is waited for.
        etcd_wait_s: how long this agent waits for an answer of etcd until it has joined.
        fresh: whether the user has asked for a start from the beginning; workers read that from their environment.
        alone: what to say if no other node has come after a while, "" for nothing.
        drain_timeout_s: how long this agent tries to hand over before it leaves without.
        stop_timeout_s: grace between SIGTERM and SIGKILL for workers when this agent is told to leave.
        restart_grace_s: the same for workers of a generation that is replaced; 0: they are killed at once.
        signals: what tells this agent to leave.
        hang_timeout_s: how long a Loop may make no step before its workers are ended, at least; 0: for ever.
        as_srun: give workers the variables that `srun` gives its tasks.
        gpus: the one GPU that each worker sees, which then is told that its local rank is 0; empty: all see all.
        health_port: answer questions about health there, 0: at any free port; None: nowhere.
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
    logs: LogOptions = field(default_factory=LogOptions)
    notes: tuple[str, ...] = ()
    shared_options: tuple[str, ...] = ()
    node_rank: int | None = None
    max_restarts: int = 3
    stop_timeout_s: float = 10.0
    restart_grace_s: float = 0.0
    signals: tuple[Signals, ...] = SIGNALS
    drain_timeout_s: float = 15.0
    ride_through_s: float = 900.0
    etcd_linger_s: float = 30.0
    etcd_runs: bool = False
    etcd_wait_s: float = ETCD_WAIT_S
    fresh: bool = False
    alone: str = ""
    hang_timeout_s: float = 600.0
    role: str = "default"
    as_srun: bool = False
    gpus: tuple[str, ...] = ()
    health_port: int | None = None
    health_host: str = "127.0.0.1"
    events_fd: int = -1
