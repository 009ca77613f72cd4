"""Gives a node's workers their seats: starts new workers in them, or sends living workers new ones."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from elasticrt.agent.network_interfaces import interface_of
from elasticrt.ipc.env import WorkerEnv
from elasticrt.rendezvous.records import Generation, Seat
from elasticrt.settings import Settings
from elasticrt.workers.environment import beside_env, network, worker_env, worker_environment
from elasticrt.workers.group import WorkerGroup
from elasticrt.workers.snapshot_cache import SnapshotCache

if TYPE_CHECKING:
    from elasticrt.agent.edges import Edges


class Seating:
    """The seats of one node. Only the agent's main thread uses it.

    Args:
        settings: the agent's settings.
        group: the worker processes.
        edges: makes the listening sockets, and closes memory files.

    Attributes:
        env: the environment that all workers and their parent share.
        ports: the sockets on which the stores of later generations listen, if rank 0 is on this node.
        memory: the copies of the state from which workers may resume.
    """

    def __init__(self, settings: Settings, group: WorkerGroup, edges: Edges) -> None:
        self._settings = settings
        self._group = group
        self.env = worker_environment(os.environ, settings.workers, fresh=settings.options.fresh)
        self.ports = edges.store_ports()
        self.memory = SnapshotCache(edges.close_file)

    def start(self, generation: Generation, seat: Seat, last: tuple[int, int], *, shared: bool) -> None:
        """Start new workers for all places of a seat.

        Args:
            generation: the generation of the workers.
            seat: this node's seat there.
            last: the last step before the generation, and its end, as `Progress.last` has them.
            shared: whether rank 0 inherits the store's socket. Otherwise it binds the port anew.
        """
        copy, leads = generation.memory, seat.index == 0
        self.memory.renew(copy)
        step, at_ns = last
        envs = [
            replace(worker_env(self._settings, generation, seat, rank), last_step=step, last_step_at_ns=at_ns)
            for rank in range(seat.workers)
        ]
        listen = self.ports.take(generation.master_port, shared=shared) if leads else None
        self._start(generation.number, envs, listen, self.memory.descriptor(copy) if leads else -1)
        # The next generation needs another port, and the member key announces that before ranks are agreed on.
        if listen is not None:
            self.ports.bind(self.ports.address)

    def start_beside(self, generation: Generation, index: int, local_ranks: Sequence[int]) -> None:
        """Start workers that set up beside `generation`. `index`: the group rank of this node there."""
        self._start(0, [beside_env(self._settings, generation, index, rank) for rank in local_ranks], None, -1)

    def reseat(self, generation: Generation, seat: Seat, chosen: Sequence[tuple[int, int]]) -> dict[int, int]:
        """Send living workers their seats in `generation`.

        Returns the global ranks, by local rank, of the workers that still lived.

        Args:
            generation: the new generation.
            seat: this node's seat there.
            chosen: the local rank of each worker that gets a place, and the worker's present generation.
        """
        ranks = {}
        # No worker's end is reported before all have their seats: see `WorkerGroup.seating`.
        with self._group.seating:
            for place, (local_rank, was) in enumerate(sorted(chosen)):
                env = worker_env(self._settings, generation, seat, local_rank, place)
                listen = self.ports.take(generation.master_port, shared=True) if env.rank == 0 else None
                if self._group.reseat(local_rank, was, env, listen):
                    ranks[local_rank] = env.rank
                if env.rank == 0:
                    self.ports.bind(self.ports.address)
        return ranks

    def close(self) -> None:
        """Close sockets and memory files."""
        self.ports.close()
        self.memory.close()

    def _start(self, number: int, envs: Sequence[WorkerEnv], listen: socket.socket | None, state_fd: int) -> None:
        settings = self._settings
        interface = network(interface_of(self.ports.address), self.env, told=settings.address is not None)
        self._group.start(number, envs, settings.command, listen, {**self.env, **interface}, Path.cwd(), state_fd)
