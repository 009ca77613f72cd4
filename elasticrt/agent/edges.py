"""The edges of an agent, as one value: time, random numbers, network, processes, files.

An agent takes its clock, connections, processes and threads from this value, so the simulator in `tests/virtual` runs
the production agent with other edges. There are two exceptions, which decide nothing: the health port and the last line
of a terminal read the clock themselves.
"""

from __future__ import annotations

import os
import queue
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from elasticrt.agent.store_discovery import OpenStore, how_to_join, open_store
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
    """The edges of one agent. The defaults are this machine's; most are the functions and classes of the same name."""

    clock: Clock = time
    queue: Callable[[], queue.SimpleQueue[Any]] = queue.SimpleQueue
    # Makes an incarnation, or a nonce.
    token: Callable[[], str] = lambda: secrets.token_hex(8)
    open_store: Callable[[Settings, Callable[[], bool]], OpenStore] = open_store
    how_to_join: Callable[[Settings, RunSpec, OpenStore], list[str]] = how_to_join
    lease_session: Callable[..., LeaseSession] = LeaseSession
    store_proxy: Callable[..., StoreProxy] = StoreProxy
    prober: Callable[..., Prober] = Prober
    # Waits for the answer of one agent, while a newcomer has no loop yet. `prober` asks in the background.
    probe: Callable[[str, int, str], str] = ask
    probe_server: Callable[..., ProbeServer] = ProbeServer
    store_ports: Callable[[], StorePorts] = StorePorts
    event_log: Callable[..., EventLog] = EventLog
    supervisor: Callable[..., Supervisor] = Supervisor
    worker_group: Callable[..., WorkerGroup] = WorkerGroup
    take_stacks: Callable[..., None] = stacks.take
    state_of: Callable[[int], str] = proc.state_of
    cpu_s: Callable[[Iterable[int]], float] = proc.cpu_s
    # Closes a memory file that a worker has sent.
    close_file: Callable[[int], None] = os.close
    # The average number of seats in a chunk of a roster.
    seats_per_chunk: int = SEATS_PER_CHUNK
