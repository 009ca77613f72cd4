"""A virtual node's agent: the production agent, its edges replaced (clock, queue, processes, network) and nothing else.

What is production code here: the agent's loop, the node's state machine, the membership, the lease's judgement, the
rendezvous with its view, decisions and transactions, and the errands. What is virtual: time, threads, etcd's client,
probes, the worker parent and the workers.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from elasticrt.agent import supervisor
from elasticrt.agent.agent import Agent
from elasticrt.agent.membership import Membership
from elasticrt.agent.supervisor import Supervisor
from elasticrt.errors import ElasticError
from elasticrt.ipc.messages import Warm
from elasticrt.rendezvous.decision import Decision, Me, Publish
from elasticrt.rendezvous.member_client import MemberClient
from elasticrt.rendezvous.records import Generation, Result, Seat
from elasticrt.run_options import RunOptions
from elasticrt.settings import Command, Settings
from elasticrt.store.protocol import Address, Credentials
from elasticrt.workers import snapshot_cache
from elasticrt.workers.group import WorkerEnded
from tests.virtual.conduct import Intent
from tests.virtual.edges import (
    CURRENT,
    VirtualEvents,
    VirtualLeaseSession,
    VirtualProber,
    VirtualStorePorts,
    VirtualStoreProxy,
)
from tests.virtual.engine import Engine, Task, VirtualQueue, nanoseconds
from tests.virtual.wire import Wire
from tests.virtual.workers import VirtualGroup

if TYPE_CHECKING:
    from tests.virtual.simulator import Simulator

VirtualQueue.Empty = queue.Empty


class Process:
    """One agent process: from its start to its end or death."""

    def __init__(self, sim: Simulator, name: str, life: int) -> None:
        self.sim, self.name, self.life = sim, name, life
        index = int(name[1:])
        self.offset, self.rate = sim.plan.offsets[index], sim.plan.clock_rates[index]
        self.workers = sim.plan.workers[index]
        self.address = f"10.0.0.{index + 1}"
        self.gone = self.paused = False
        self.loses = False  # While its agent hears that a worker has ended.
        self.going_on: Generation | None = None  # While its agent seats its workers.
        self.deferred: list[tuple[Task, int]] = []
        self.code: int | None = None
        self.ended_at: float | None = None
        self.frozen_until = 0.0
        self.whole_node = False
        self.silent_death = False
        self.reached_at = self.awake_at = sim.engine.now
        self.trouble_at = sim.engine.now
        self.told_at: float | None = None
        self.began_at = sim.engine.now
        self.spec = sim.spec_of(name)
        self.attempt = 0
        self.knew = 0  # The generation that it knew when the store lost its data.
        self.incarnations: set[str] = set()
        self.fencing = ("", 0)
        self.wire = Wire(sim, self)
        self.tasks: list[Task] = []
        self.probe_port = sim.port()
        with virtual(sim):
            self.agent = VirtualAgent(self)
        self.tasks.append(sim.engine.start(self, self._main, f"{name}.{life}"))

    def clock(self) -> float:
        """This machine's monotonic clock."""
        return self.offset + self.rate * self.sim.engine.now

    def sleep(self, seconds: float) -> None:
        """`time.sleep` on this machine."""
        self.sim.engine.sleep(seconds / self.rate)

    @property
    def group(self) -> VirtualGroup:
        """Its workers."""
        return self.agent.node.group

    def _main(self) -> None:
        agent = self.agent
        try:
            agent.node.open()
            self.code = agent.work()
            agent.node.close()
        except ElasticError as error:
            self.code = error.exit_code
            self.sim.say(self, f"ends with code {error.exit_code}: {str(error).splitlines()[0]}: {error}"[:300])
            agent.node.close()
        self.ended_at = self.sim.engine.now
        self.sim.engine.after(0.0, self.sim.bury, self, "exits")

    def intent(self) -> Intent:
        """What it knows now."""
        me = getattr(self.agent, "me", None)
        if me is None:
            return Intent()
        self.incarnations.add(me.record.incarnation)
        return Intent(me.record.incarnation, self.fencing, self.agent.rendezvous.view)

    def signal(self) -> None:
        """SIGTERM."""
        self.told_at = self.sim.engine.now
        self.agent.queue.put(signal.SIGTERM)


class VirtualAgent(Agent):
    """The production agent; it only tells its decisions to the story."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.published: Publish | None = None
        super().__init__(_settings(process), process.spec)

    def _decide(self) -> Decision:
        before = self.reason
        decision = super()._decide()
        if decision.reason != before:
            self.process.sim.say(self.process, f"{type(decision).__name__}: {decision.reason}")
        self.process.sim.invariants.conduct.decided(self.process, decision)
        return decision

    def _run(self, generation: Generation, seat: Seat) -> None:
        self.process.going_on = generation
        try:
            super()._run(generation, seat)
        finally:
            self.process.going_on = None

    def say(self, text: str) -> None:
        """The story has it already."""


class VirtualSupervisor(Supervisor):
    """The production node over virtual workers."""

    def __init__(self, settings: Settings, put: Callable[[Any], None], *more: Any) -> None:
        super().__init__(settings, put, *more)
        self.group = VirtualGroup(process_of(settings), put)
        self._group = self.group  # type: ignore[assignment]  It is one as far as a node can see.

    def open(self) -> None:
        """Start the worker parent: it is warm after a while."""
        sim = process_of(self._settings).sim
        sim.engine.after(sim.plan.warm_s, self._put, Warm(1, "fork", "", sim.plan.warm_s))

    def look_for_laggards(self, now: float, elsewhere: Sequence[str]) -> None:
        """Not here: there is no process whose time and stacks could be looked at."""

    def _worker_ended(self, event: WorkerEnded) -> None:
        process = process_of(self._settings)
        process.loses = True
        try:
            super()._worker_ended(event)
        finally:
            process.loses = False

    def close(self) -> None:
        """End everything that this node has started."""
        self.group.vanish("the agent ends")


class VirtualMembership(Membership):
    """The production membership; only the courier and the meeting are virtual."""

    def open(self, me: Me) -> Me | Result:
        """See `Membership`."""
        joined = super().open(me)
        if isinstance(joined, Me):
            process_of(self._settings).attempt = joined.attempt
        return joined

    def embedded_died(self) -> bool:
        """Never: etcd is outside."""
        return False


PRODUCTION = tuple(f"elasticrt.{part}." for part in ("agent", "workers", "liveness", "torchrun", "rendezvous"))


def _production() -> list[ModuleType]:
    """Where edges are replaced: modules that may name a clock, a queue, a thread or a process."""
    found = [key for key in sys.modules if key.startswith(PRODUCTION)]
    return [sys.modules[key] for key in sorted(found)]


def process_of(settings: Settings) -> Process:
    """The process that has these settings."""
    process: Process = CURRENT[0].processes[settings.node]
    return process


def _settings(process: Process) -> Settings:
    process.sim.processes[process.name] = process
    return Settings(
        options=RunOptions(
            node=process.name,
            again=process.sim.again,
            max_restarts=process.spec.max_restarts,
            drain_timeout_s=process.sim.drain_s,
            events_fd=0,  # Nothing is narrated.
        ),
        run_id="run",
        node=process.name,
        address=process.address,
        workers=process.workers,
        command=Command(("train.py",)),
        etcd=(Address("http", "virtual", 2379),),
        credentials=Credentials(),
        serve=None,
        run_dir=Path("/virtual"),
    )


@contextmanager
def virtual(sim: Simulator) -> Iterator[None]:
    """Replace the edges of the production modules: clock, queue, randomness, threads, network."""
    if CURRENT:
        yield
        return
    engine: Engine = sim.engine

    def draw(count: int) -> str:
        return hashlib.sha256(f"{sim.plan.seed}/{sim.port()}".encode()).hexdigest()[: 2 * count]

    def here() -> Process:
        place: Any = engine.task.place if engine.task is not None else engine.place
        return place

    clock = SimpleNamespace(
        monotonic=engine.clock,
        monotonic_ns=lambda: nanoseconds(engine.clock()),
        sleep=lambda seconds: here().sleep(seconds),
    )
    secrets = SimpleNamespace(token_hex=draw)
    queues = SimpleNamespace(SimpleQueue=lambda: VirtualQueue(engine, lambda: here().rate), Empty=queue.Empty)

    def rendezvous(store: Wire, keys: Any, supervisor: str, emit: Callable[[Any], None]) -> MemberClient:
        return MemberClient(store, keys, supervisor, emit, store.process.clock)

    replacing: dict[str, Any] = {
        "time": clock,
        "secrets": secrets,
        "queue": queues,
        "EventLog": VirtualEvents,
        "Supervisor": VirtualSupervisor,
        "SEATS_PER_CHUNK": sim.plan.seats_per_chunk,
        "StorePorts": VirtualStorePorts,
        "Prober": VirtualProber,
        "Membership": VirtualMembership,
        "ProbeServer": lambda *_: SimpleNamespace(port=here().probe_port, start=lambda: None, close=lambda: None),
        "own_address": lambda settings, endpoints: settings.address,
        "how_to_join": lambda settings, spec, meeting: [],
        "LeaseSession": VirtualLeaseSession,
        "StoreProxy": VirtualStoreProxy,
        "MemberClient": rendezvous,
        "ask": lambda *seat: sim.probe(here(), *seat),
        "take": lambda *_: None,  # Stacks.
        "meet": lambda settings, told_to_leave: SimpleNamespace(store=here().wire, endpoints=(), served=None),
    }
    before = [
        (module, name, vars(module)[name])
        for module in _production()
        for name in replacing
        if name in vars(module) and getattr(vars(module)[name], "__module__", "") != module.__name__
    ]
    replaced = [(module, name, replacing[name]) for module, name, _ in before]
    before += [(snapshot_cache, "os", os), (supervisor, "os", os)]
    files = SimpleNamespace(memfd_create=lambda *_: sim.port(), close=id, MFD_CLOEXEC=0, environ=os.environ)
    replaced += [(snapshot_cache, "os", files), (supervisor, "os", files)]
    CURRENT.append(sim)
    logger = logging.getLogger("elasticrt")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # The story says it all.
    for module, name, value in replaced:
        setattr(module, name, value)
    try:
        yield
    finally:
        CURRENT.clear()
        logger.setLevel(level)
        for module, name, value in before:
            setattr(module, name, value)
