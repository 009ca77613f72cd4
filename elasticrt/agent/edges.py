"""What an agent touches besides its own state: time, random numbers, network, processes, files. One value.

No other file of the agent reads a clock, opens a connection or starts a thread, so the simulator in `tests/virtual`
runs the production agent with other edges.
"""

from __future__ import annotations

import os
import queue
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elasticrt.agent.store_discovery import Meeting, how_to_join, meet
from elasticrt.agent.store_proxy import StoreProxy
from elasticrt.agent.supervisor import Supervisor
from elasticrt.clock import Clock
from elasticrt.event_log import EventLog
from elasticrt.ipc import proc
from elasticrt.liveness import stacks
from elasticrt.liveness.probe import ProbeServer
from elasticrt.liveness.prober import Prober, ask
from elasticrt.rendezvous.records import SEATS_PER_CHUNK
from elasticrt.settings import Settings
from elasticrt.spec import RunSpec
from elasticrt.store.lease_session import LeaseSession
from elasticrt.workers.group import WorkerGroup
from elasticrt.workers.store_ports import StorePorts


@dataclass(frozen=True)
class Edges:
    """The edges of one agent; the defaults are the real ones.

    Attributes:
        clock: the monotonic clock of this machine.
        queue: makes the queue that the agent's loop reads.
        token: draws 64 random bits, as 16 hex digits: an incarnation, a nonce.
        meet: finds an etcd or starts an embedded one.
        how_to_join: the lines that tell people how to add nodes.
        lease_session: grants a lease and keeps it alive.
        store_proxy: carries out what workers ask of the store.
        prober: asks other agents whether they are alive, in the background.
        probe: asks one agent the same, and waits for the answer.
        probe_server: answers such questions.
        store_ports: holds the sockets for the stores of future generations.
        event_log: writes events for programs.
        supervisor: decides when workers start and stop.
        worker_group: starts and signals their processes.
        take_stacks: asks workers for their stacks.
        state_of: the kernel's letter for what a process is doing.
        close_file: closes a file descriptor that a worker has sent.
        seats_per_chunk: how many seats a chunk of a roster has on average.
    """

    clock: Clock = time
    queue: Callable[[], queue.SimpleQueue[Any]] = queue.SimpleQueue
    token: Callable[[], str] = lambda: secrets.token_hex(8)
    meet: Callable[[Settings, Callable[[], bool]], Meeting] = meet
    how_to_join: Callable[[Settings, RunSpec, Meeting], list[str]] = how_to_join
    lease_session: Callable[..., LeaseSession] = LeaseSession
    store_proxy: Callable[..., StoreProxy] = StoreProxy
    prober: Callable[..., Prober] = Prober
    probe: Callable[[str, int, str], str] = ask
    probe_server: Callable[..., ProbeServer] = ProbeServer
    store_ports: Callable[[], StorePorts] = StorePorts
    event_log: Callable[..., EventLog] = EventLog
    supervisor: Callable[..., Supervisor] = Supervisor
    worker_group: Callable[..., WorkerGroup] = WorkerGroup
    take_stacks: Callable[..., None] = stacks.take
    state_of: Callable[[int], str] = proc.state_of
    close_file: Callable[[int], None] = os.close
    seats_per_chunk: int = SEATS_PER_CHUNK
