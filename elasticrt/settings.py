"""The settings of one agent: its options, and what they mean on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from elasticrt.run_options import RESTARTS, STOP_TIMEOUT_S, RunOptions
from elasticrt.store.protocol import ETCD_WAIT_S, Address, Credentials


@dataclass(frozen=True)
class Command:
    """What every worker runs: a script, a module, or a program that is not Python, with its arguments."""

    # The script's path, the module's name or the program; then its arguments, verbatim.
    argv: tuple[str, ...]
    kind: str = "script"  # "script", "module" or "program".

    def of_worker(self, local_rank: int) -> list[str]:
        """The command line of one worker.

        As under torchrun, `${local_rank}` in an argument becomes the worker's local rank.
        """
        return [self.argv[0], *(word.replace("${local_rank}", str(local_rank)) for word in self.argv[1:])]


@dataclass(frozen=True)
class Settings:
    """What concerns one agent alone. What all agents of a run must agree on is a `RunSpec`."""

    # The options as given, with the console's line prefix and the notes that fit them. The other fields are derived
    # from the options and from this machine.
    options: RunOptions
    run_id: str  # The run's id.
    # This node's name. If none was given and a live agent has this one already, another one is taken.
    node: str
    # Where other nodes reach this machine; None: found from the way to etcd.
    address: str | None
    workers: int  # How many workers this node has.
    command: Command  # What each of them runs.
    # The endpoints; empty: the embedded etcd of this machine, which is found or started by the run id.
    etcd: tuple[Address, ...]
    credentials: Credentials  # How to authenticate to etcd.
    # Serve the embedded etcd at this address instead of on a socket.
    serve: Address | None
    # Logs and events. Nodes that see the same directory share it.
    run_dir: Path
    # The options that another node needs as well to join, as words of a command line; see `how_to_join`.
    shared_options: tuple[str, ...] = ()
    alone: str = ""  # The warning to print if no other node has come after a while; "" for none.
    # By local rank: the only GPU that a worker sees, with LOCAL_RANK 0. Empty: each worker sees all GPUs.
    gpus: tuple[str, ...] = ()

    @property
    def start_method(self) -> Literal["fork", "exec"]:
        """How the worker parent starts workers. A program that is not Python is always executed."""
        return "exec" if self.options.start_method == "spawn" or self.command.kind == "program" else "fork"

    @property
    def max_restarts(self) -> int:
        """The restart budget: in all, or without new commits (see `RESTARTS`)."""
        return RESTARTS if self.options.max_restarts is None else self.options.max_restarts

    @property
    def stop_timeout_s(self) -> float:
        """Seconds between SIGTERM and SIGKILL for workers when this agent leaves."""
        return STOP_TIMEOUT_S if self.options.stop_timeout_s is None else self.options.stop_timeout_s

    @property
    def restart_grace_s(self) -> float:
        """The same seconds for workers of a generation that is replaced. 0 kills them at once."""
        return self.options.stop_timeout_s or 0.0

    @property
    def etcd_wait_s(self) -> float:
        """How many seconds this agent waits for an answer of etcd until it has joined."""
        return ETCD_WAIT_S if self.options.etcd_wait_s is None else self.options.etcd_wait_s
