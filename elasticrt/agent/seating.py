"""How a node's workers get their seats: new ones are started in them, living ones are told of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from elasticrt.agent.network_interfaces import interface_of
from elasticrt.ipc.env import WorkerEnv
from elasticrt.rendezvous.records import Generation, Seat
from elasticrt.settings import Settings
from elasticrt.workers.environment import network, worker_env, worker_environment
from elasticrt.workers.group import WorkerGroup
from elasticrt.workers.snapshot_cache import SnapshotCache

if TYPE_CHECKING:
    from elasticrt.agent.edges import Edges


class Seating:
    """One node's. Used by the agent's thread.

    Attributes:
        env: the environment that all workers and their parent share.
        ports: where stores of generations will listen, if rank 0 is on this node.
        memory: the states that workers may resume from.
    """

    def __init__(self, settings: Settings, edges: Edges) -> None:
        self._settings = settings
        self.env = worker_environment(os.environ, settings.workers)
        self.ports = edges.store_ports()
        self.memory = SnapshotCache(edges.close_file)

    def start(self, group: WorkerGroup, generation: Generation, seat: Seat, *, shared: bool) -> None:
        """Start new workers for all of a seat. `shared`: they inherit the store's socket; else they bind it anew."""
        copy = generation.memory
        self.memory.renew(copy)
        envs = [worker_env(self._settings, generation, seat, local_rank) for local_rank in range(seat.workers)]
        listen = self.ports.take(generation.master_port, shared=shared) if seat.index == 0 else None
        state = self.memory.descriptors(copy if seat.index == 0 else None)
        self._start(group, generation.number, envs, listen, state)
        if listen is not None:
            self.ports.bind(self.ports.address)

    def start_beside(self, group: WorkerGroup, envs: Sequence[WorkerEnv]) -> None:
        """Start workers that set up beside the training."""
        self._start(group, 0, envs, None, {})

    def reseat(
        self, group: WorkerGroup, generation: Generation, seat: Seat, chosen: Sequence[tuple[int, int]]
    ) -> dict[int, int]:
        """Give living workers new seats; the global ranks, by local rank, of those that had not ended meanwhile.

        `chosen`: the local rank of each, and the generation that it is in now.
        """
        ranks = {}
        for place, (local_rank, was) in enumerate(sorted(chosen)):
            env = worker_env(self._settings, generation, seat, local_rank, place)
            listen = self.ports.take(generation.master_port, shared=True) if env.rank == 0 else None
            if group.reseat(local_rank, was, env, listen):
                ranks[local_rank] = env.rank
            if env.rank == 0:
                self.ports.bind(self.ports.address)
        return ranks

    def close(self) -> None:
        """Give sockets and memory back."""
        self.ports.close()
        self.memory.close()

    def _start(
        self,
        group: WorkerGroup,
        number: int,
        envs: Sequence[WorkerEnv],
        listen: socket.socket | None,
        state: dict[str, int],
    ) -> None:
        settings, address = self._settings, self.ports.address
        interface = network(interface_of(address), self.env, told=settings.address is not None)
        group.start(number, envs, settings.command, listen, {**self.env, **interface}, Path.cwd(), {0: state})
