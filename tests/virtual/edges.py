"""The edges of a virtual agent: all that it touches, in virtual time."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from elasticrt import events
from elasticrt.agent.edges import Edges
from elasticrt.agent.store_discovery import OpenStore
from elasticrt.agent.store_proxy import StoreProxy, StoreRequest
from elasticrt.liveness.prober import Witnesses, no_witnesses
from elasticrt.rendezvous.records import Seat
from elasticrt.store.lease_session import KEEP_ALIVE_SHARE, LeaseSession
from tests.virtual.engine import VirtualQueue, nanoseconds
from tests.virtual.wire import Wire
from tests.virtual.workers import VirtualGroup

if TYPE_CHECKING:
    from tests.virtual.process import Process
    from tests.virtual.simulator import Simulator


class VirtualClock:
    """One machine's clock."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.monotonic = process.clock
        self.sleep = process.sleep

    def monotonic_ns(self) -> int:
        """See `Clock`."""
        return nanoseconds(self._process.clock())


def edges(process: Process, supervisor: Callable[..., Any]) -> Edges:
    """Everything that a virtual agent touches."""
    sim = process.sim

    def token() -> str:
        return hashlib.sha256(f"{sim.plan.seed}/{sim.port()}".encode()).hexdigest()[:16]

    return Edges(
        clock=VirtualClock(process),
        queue=lambda: VirtualQueue(sim.engine, lambda: process.rate),
        token=token,
        open_store=lambda *_: OpenStore(process.wire, (), None, process.address),
        how_to_join=lambda *_: [],
        lease_session=VirtualLeaseSession,
        store_proxy=VirtualStoreProxy,
        prober=functools.partial(VirtualProber, process),
        probe=functools.partial(sim.probe, process),
        probe_server=lambda *_: SimpleNamespace(port=process.probe_port, start=lambda: None, close=lambda: None),
        store_ports=lambda: VirtualStorePorts(sim),
        event_log=functools.partial(VirtualEvents, sim),
        supervisor=supervisor,
        worker_group=lambda put, **_: VirtualGroup(process, put),
        take_stacks=lambda *_: None,
        state_of=process.state_of,
        cpu_s=process.cpu_s,
        close_file=lambda _: None,
        seats_per_chunk=sim.plan.seats_per_chunk,
    )


class VirtualEvents:
    """The agent's event log, as lines of the story."""

    KEPT = (events.Committed, events.Result, events.AgentStopped, events.FirstStep)

    def __init__(self, sim: Simulator, node: str, directory: object, fd: int = -1) -> None:
        del directory, fd
        self.sim = sim
        self.node = node

    def follow(self, heard: Callable[[events.Record], object]) -> None:
        """See `EventLog`. What a virtual agent knows of its story is never asked for."""

    def rename(self, node: str) -> None:
        """See `EventLog`."""
        self.node = node

    def write(self, event: events.Event) -> None:
        """See `EventLog`."""
        if isinstance(event, self.KEPT):
            said = " ".join(f"{name}={value}" for name, value in vars(event).items())
            self.sim.engine.say(self.node, f"* {events.kind_of(event)} {said}")
        if isinstance(event, events.Committed):
            self.sim.invariants.work.told(self.node, event.step)

    def close(self) -> None:
        """See `EventLog`."""


class VirtualStorePorts:
    """Ports are numbers."""

    def __init__(self, sim: Simulator) -> None:
        self._sim = sim
        self.port = 0
        self.address = ""

    def bind(self, address: str) -> None:
        """See `Ports`."""
        self.address, self.port = address, self._sim.port()

    def take(self, port: int, *, shared: bool) -> None:
        """See `Ports`."""

    def close(self) -> None:
        """See `Ports`."""


class VirtualProber:
    """Asks agents over the virtual network."""

    def __init__(self, process: Process, sink: Callable[[Seat, Any, float], None]) -> None:
        self._process = process
        self._sink = sink
        self._asking: set[str] = set()

    def ask(self, seats: Sequence[Seat], witnesses: Witnesses = no_witnesses) -> None:
        """See `Prober`. Here nobody is asked about others: whoever is silent is so after 1.5 s."""
        del witnesses
        asker, sim = self._process, self._process.sim
        for seat in seats:
            if seat.incarnation not in self._asking:
                self._asking.add(seat.incarnation)
                sim.engine.start(asker, functools.partial(self._ask, asker, seat, asker.clock()), "ask")

    def _ask(self, asker: Process, seat: Seat, asked_at: float) -> None:
        answer = asker.sim.probe(asker, seat.address, seat.probe_port, seat.incarnation)
        self._asking.discard(seat.incarnation)
        self._sink(seat, answer, asked_at)

    def ask_for_generation(self, seats: Sequence[Seat], run_id: str, heard: Callable[[int], None]) -> None:
        """See `Prober`."""
        asker, sim = self._process, self._process.sim
        for seat in seats:
            if seat.incarnation not in self._asking:
                self._asking.add(seat.incarnation)
                sim.engine.start(asker, lambda seat=seat: self._listen(asker, seat, heard), "listen")

    def _listen(self, asker: Process, seat: Seat, heard: Callable[[int], None]) -> None:
        number = asker.sim.newest(asker, seat.address, seat.probe_port)
        self._asking.discard(seat.incarnation)
        heard(number)

    def ask_for_workers(
        self, seats: Sequence[Seat], done: Callable[[dict[str, object]], None], _witnesses: Witnesses
    ) -> None:
        """See `Prober`. There is nothing to be said of workers here."""

    def close(self) -> None:
        """See `Prober`."""


class VirtualLeaseSession(LeaseSession):
    """The production lease, its thread replaced by a task."""

    def __init__(self, store: Wire, ttl_s: float, sink: Callable[[Any], None]) -> None:
        super().__init__(store, ttl_s, sink, now=store.process.clock)
        self._process = store.process

    def _start(self) -> None:
        process = self._process
        process.tasks.append(process.sim.engine.start(process, self._keep, "keep"))

    def _keep(self) -> None:
        pause_s = 0.0
        while not self._closed:
            assert self._lease is not None
            self._process.sleep(pause_s or self._lease.ttl_s * KEEP_ALIVE_SHARE)
            while self._lost and not self._closed:
                self._process.sleep(0.25)
            if not self._closed:
                pause_s = self._ask(self._lease, self._process.clock())


class VirtualStoreProxy(StoreProxy):
    """The store proxy's thread as a task."""

    def __init__(self, wire: Wire, *more: Any) -> None:
        super().__init__(wire, *more)
        process = wire.process
        self._sim = process.sim
        self._process = process
        self._asks = False
        self._waiting = VirtualQueue(process.sim.engine, lambda: process.rate)
        process.tasks.append(process.sim.engine.start(process, self._work, "store proxy"))

    def send(self, errand: StoreRequest) -> None:
        """See `Courier`."""
        self._waiting.put(errand)

    def close(self, timeout_s: float) -> None:
        """See `Courier`."""
        self._waiting.put(None)
        until = self._sim.engine.now + timeout_s
        while self._asks and self._sim.engine.now < until:
            self._sim.engine.sleep(0.005)

    def _work(self) -> None:
        while (errand := self._waiting.get()) is not None:
            self._asks = True
            reply = self.carry_out(errand)
            self._asks = False
            self._sim.invariants.work.answered(self._process, errand, reply)
            errand.answer(reply)
