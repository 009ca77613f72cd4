"""A virtual node's agent: the production agent, its edges replaced (clock, queue, processes, network) and nothing else.

What is production code here: the agent's loop, the node's state machine, the membership, the lease's judgement, the
rendezvous with its view, decisions and transactions, and the errands. What is virtual: time, threads, etcd's client,
probes, the worker parent and the workers.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import queue
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from elasticrt.agent.agent import Agent
from elasticrt.agent.commit import ASK_AGAIN_S, Errand, Errands
from elasticrt.agent.group import Command
from elasticrt.agent.membership import Membership
from elasticrt.agent.memory import Memory
from elasticrt.agent.node import Node
from elasticrt.agent.settings import Settings
from elasticrt.contract.messages import Warm
from elasticrt.errors import ElasticError
from elasticrt.rendezvous.decision import Decision, Publish
from elasticrt.rendezvous.handler import Rendezvous
from elasticrt.rendezvous.records import Seat
from elasticrt.store.protocol import Lease
from elasticrt.store.session import KEEP_ALIVE_SHARE, LOOKS_PER_TTL, Session
from elasticrt.store.protocol import Address, Credentials
from tests.virtual.engine import Engine, Task, VirtualQueue
from tests.virtual.training import VirtualGroup
from tests.virtual.wire import Wire

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
        self.deferred: list[tuple[Task, int]] = []
        self.code: int | None = None
        self.ended_at: float | None = None
        self.frozen_until = 0.0
        self.whole_node = False
        self.silent_death = False
        self.reached_at = self.awake_at = sim.engine.now
        self.trouble_at = sim.engine.now
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
            self.code = agent._take_part()
            agent.node.close()
        except ElasticError as error:
            self.code = error.exit_code
            self.sim.say(self, f"ends with code {error.exit_code}: {str(error).splitlines()[0]}: {error}"[:300])
            agent.node.close()
        self.ended_at = self.sim.engine.now
        self.sim.engine.after(0.0, self.sim.bury, self, "exits")

    def signal(self) -> None:
        """SIGTERM."""
        self.agent.queue.put(signal.SIGTERM)


class VirtualAgent(Agent):
    """The production agent; it only tells its decisions to the story."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.published: Publish | None = None
        super().__init__(_settings(process), process.sim.plan.spec)

    def _decide(self) -> Decision:
        before = self.reason
        decision = super()._decide()
        if decision.reason != before:
            self.process.sim.say(self.process, f"{type(decision).__name__}: {decision.reason}")
        self.process.sim.invariants.decided(self.process, decision)
        return decision

    def say(self, text: str) -> None:
        """The story has it already."""


class VirtualEvents:
    """The agent's event log, as lines of the story."""

    KEPT = ("committed", "result", "agent_stopped", "first_step")

    def __init__(self, node: str, directory: object, fd: int = -1) -> None:
        self.sim, self.process = CURRENT[0], None
        self.node = node

    def rename(self, node: str) -> None:
        """See `EventLog`."""
        self.node = node

    def write(self, event: str, **fields: Any) -> None:
        """See `EventLog`."""
        if event in self.KEPT:
            self.sim.engine.say(self.node, f"* {event} " + " ".join(f"{k}={v}" for k, v in fields.items() if v != {}))
        if event == "committed":
            self.sim.invariants.told(self.node, fields["step"])

    def close(self) -> None:
        """See `EventLog`."""


class VirtualNode(Node):
    """The production node over virtual workers."""

    group: VirtualGroup

    def open(self) -> None:
        """Start the worker parent: it is warm after a while."""
        process = process_of(self._settings)
        if self._group is None:
            self.group = VirtualGroup(process, self._put)
            self._group = self.group  # type: ignore[assignment]
        sim = process.sim
        sim.engine.after(sim.plan.warm_s, self._put, Warm(1, "fork", "", sim.plan.warm_s, 0))

    def close(self) -> None:
        """End everything that this node has started."""
        self.group.vanish("the agent ends")


class VirtualMemory(Memory):
    """No memory for states: virtual scripts have no Loop, so that nothing is handed over."""

    def renew(self, *_: object, **__: object) -> int:
        """See `Memory`."""
        return -1


class VirtualPorts:
    """Ports are numbers."""

    def __init__(self, *_: object) -> None:
        self.port = 0
        self.address = ""

    def bind(self, address: str) -> None:
        """See `Ports`."""
        self.address, self.port = address, CURRENT[0].port()

    def take(self, port: int, *, shared: bool) -> None:
        """See `Ports`."""

    def close(self) -> None:
        """See `Ports`."""


class VirtualProber:
    """Asks agents over the virtual network."""

    def __init__(self, sink: Callable[[Seat, Any, float], None]) -> None:
        self._sink = sink
        self._asking: set[str] = set()

    def ask(self, seats: Sequence[Seat]) -> None:
        """See `Prober`."""
        sim = CURRENT[0]
        asker = sim.engine.task.place
        for seat in seats:
            if seat.incarnation not in self._asking:
                self._asking.add(seat.incarnation)
                sim.engine.start(asker, lambda seat=seat, at=asker.clock(): self._ask(asker, seat, at), "ask")

    def _ask(self, asker: Process, seat: Seat, asked_at: float) -> None:
        answer = asker.sim.probe(asker, seat.address, seat.probe_port, seat.incarnation)
        self._asking.discard(seat.incarnation)
        self._sink(seat, answer, asked_at)

    def listen(self, seats: Sequence[Seat], run_id: str, heard: Callable[[int], None]) -> None:
        """See `Prober`."""
        sim = CURRENT[0]
        asker = sim.engine.task.place
        for seat in seats:
            if seat.incarnation not in self._asking:
                self._asking.add(seat.incarnation)
                sim.engine.start(asker, lambda seat=seat: self._listen(asker, seat, heard), "listen")

    def _listen(self, asker: Process, seat: Seat, heard: Callable[[int], None]) -> None:
        number = asker.sim.newest(asker, seat.address, seat.probe_port)
        self._asking.discard(seat.incarnation)
        heard(number)

    def close(self) -> None:
        """See `Prober`."""


class VirtualMembership(Membership):
    """The production membership; only the courier and the meeting are virtual."""

    def embedded_died(self) -> bool:
        """Never: etcd is outside."""
        return False


class VirtualSession(Session):
    """The production lease, its two threads replaced by tasks."""

    def __init__(self, store: Wire, ttl_s: float, sink: Callable[[Any], None]) -> None:
        super().__init__(store, ttl_s, sink, now=store.process.clock)
        self._process = store.process

    def open(self) -> Lease:
        """See `Session`."""
        lease = self._grant()
        engine, process = self._process.sim.engine, self._process
        process.tasks.append(engine.start(process, self._keep, "keep"))
        process.tasks.append(engine.start(process, self._watch_clock, "look"))
        return lease

    def _keep(self) -> None:
        pause_s = 0.0
        while not self._closed:
            assert self._lease is not None
            self._process.sleep(pause_s or self._lease.ttl_s * KEEP_ALIVE_SHARE)
            while self._lost and not self._closed:
                self._process.sleep(0.25)
            if not self._closed:
                pause_s = self._ask(self._lease, self._process.clock())

    def _watch_clock(self) -> None:
        assert self._lease is not None
        while not self._closed:
            self._process.sleep(self._lease.ttl_s / LOOKS_PER_TTL)
            with self._lock:
                if not self._closed:
                    self._judge()


class VirtualCourier:
    """The courier's thread as a task."""

    def __init__(self, store: Wire, keys: Any, committed: Callable[[Any], None]) -> None:
        process = store.process
        self._errands = Errands(store, keys, committed, self._pause)
        self._sim = process.sim
        self._process = process
        self._closing = False
        self._waiting = VirtualQueue(process.sim.engine, lambda: process.rate)
        process.tasks.append(process.sim.engine.start(process, self._work, "courier"))

    def send(self, errand: Errand) -> None:
        """See `Courier`."""
        self._waiting.put(errand)

    def close(self, timeout_s: float) -> None:
        """See `Courier`."""
        self._closing = True
        self._waiting.put(None)

    def _pause(self) -> bool:
        self._process.sleep(ASK_AGAIN_S)
        return not self._closing

    def _work(self) -> None:
        while (errand := self._waiting.get()) is not None:
            reply = self._errands.carry_out(errand)
            self._sim.invariants.answered(self._process, errand, reply)
            errand.answer(reply)


PRODUCTION = [
    importlib.import_module(f"elasticrt.{name}")
    for name in ("agent.agent", "agent.membership", "agent.node", "agent.outage", "agent.voice", "rendezvous.handler")
]
"""Where edges are replaced: modules that name a clock, a queue, a thread or a process."""

CURRENT: list[Any] = []
"""The simulator that is running: what replaces module globals has to find it."""


def process_of(settings: Settings) -> Process:
    """The process that has these settings."""
    process: Process = CURRENT[0].processes[settings.node]
    return process


def _settings(process: Process) -> Settings:
    process.sim.processes[process.name] = process
    return Settings(
        run_id="run",
        node=process.name,
        node_given=True,
        address=process.address,
        workers=process.workers,
        command=Command(("train.py",)),
        start_method="fork",
        preload=(),
        etcd=(Address("http", "virtual", 2379),),
        credentials=Credentials(),
        serve=None,
        again=False,
        run_dir=Path("/virtual"),
        max_restarts=process.sim.plan.spec.max_restarts,
        stop_timeout_s=2.0,
        events_fd=0,  # Nothing is narrated.
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
        monotonic_ns=lambda: int(engine.clock() * 1e9),
        sleep=lambda seconds: here().sleep(seconds),
    )
    secrets = SimpleNamespace(token_hex=draw)
    queues = SimpleNamespace(SimpleQueue=lambda: VirtualQueue(engine, lambda: here().rate), Empty=queue.Empty)

    def rendezvous(store: Wire, keys: Any, node: str, emit: Callable[[Any], None]) -> Rendezvous:
        return Rendezvous(store, keys, node, emit, store.process.clock)

    replacing: dict[str, Any] = {
        "time": clock,
        "secrets": secrets,
        "queue": queues,
        "EventLog": VirtualEvents,
        "Node": VirtualNode,
        "Memory": VirtualMemory,
        "Ports": VirtualPorts,
        "Prober": VirtualProber,
        "Membership": VirtualMembership,
        "ProbeServer": lambda *_: SimpleNamespace(port=here().probe_port, close=lambda: None),
        "own_address": lambda settings, endpoints: settings.address,
        "how_to_join": lambda settings, spec, meeting: [],
        "Session": VirtualSession,
        "Courier": VirtualCourier,
        "Rendezvous": rendezvous,
        "ask": lambda *seat: sim.probe(here(), *seat),
        "meet": lambda settings: SimpleNamespace(store=here().wire, endpoints=(), served=None),
    }
    before = [
        (module, name, vars(module)[name])
        for module in PRODUCTION
        for name in replacing
        if name in vars(module) and not (isinstance(vars(module)[name], type) and vars(module)[name].__module__ == module.__name__)
    ]
    replaced = [(module, name, replacing[name]) for module, name, _ in before]
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
