"""Many agents in one process, for `tests/bench/rendezvous.py`: the production rendezvous without workers.

Each virtual agent has its own lease, member key, watches, view and decisions (`Member`), and a port
that answers probes. What they share is what a machine of its own would give each of them: the connections to etcd, the
threads that run their loops in turn, the thread that keeps their leases alive, and the one that answers.

Started as `python -m tests.bench.crowd JSON`; commands come as lines on stdin, events go as JSON lines to stdout.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import json
import queue
import resource
import secrets
import selectors
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from elasticrt.agent.store_driver import StoreDriver
from elasticrt.errors import StoreError
from elasticrt.ipc.failure import Failure
from elasticrt.liveness.probe import Answer
from elasticrt.liveness.prober import Prober
from elasticrt.rendezvous.decision import Announce, Fence, Finish, Me, Probe, Publish, Register, Run, Wait, WriteReport
from elasticrt.rendezvous.member import JoinOptions, Member, ProbeResult
from elasticrt.rendezvous.records import Member as MemberRecord
from elasticrt.rendezvous.records import Report, Seat
from elasticrt.rendezvous.requests import Notice
from elasticrt.rendezvous.view import Verdict
from elasticrt.spec import RunSpec
from elasticrt.store.etcd import EtcdStore
from elasticrt.store.protocol import Address

REGISTER_AT_ONCE = 8
ANSWER_S = 0.5
LIVE_AT_ONCE = 4
"""Loops that run at the same time in one process: while one waits for etcd, another computes."""


class Answers:
    """Answers probes for many agents, from one thread: port by port the incarnation that lives there."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._listeners: dict[int, socket.socket] = {}
        self.incarnations: dict[int, str] = {}
        threading.Thread(target=self._serve, daemon=True).start()

    def open(self, incarnation: str) -> int:
        """A new port that answers for this life."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        port = int(listener.getsockname()[1])
        self._listeners[port], self.incarnations[port] = listener, incarnation
        self._selector.register(listener, selectors.EVENT_READ, port)
        return port

    def close(self, port: int) -> None:
        """The agent is gone: its port refuses."""
        listener = self._listeners.pop(port)
        self._selector.unregister(listener)
        listener.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(0.2):
                try:
                    connection, _ = self._listeners[key.data].accept()
                    with connection:
                        connection.settimeout(ANSWER_S)
                        question = json.loads(connection.recv(512))
                        answer = {"nonce": question["nonce"], "incarnation": self.incarnations[key.data]}
                        connection.sendall(json.dumps(answer).encode() + b"\n")
                except (OSError, KeyError, ValueError):
                    continue  # Closed in between, or asked by somebody else.


class VirtualAgent:
    """One agent's own state."""

    def __init__(self, crowd: Crowd, index: int, store: EtcdStore) -> None:
        self.index, self._crowd, self.store = index, crowd, store
        self.node = f"node-{index:05d}"
        incarnation = secrets.token_hex(8)
        self.port = crowd.answers.open(incarnation)
        record = MemberRecord(
            node=self.node,
            incarnation=incarnation,
            address="127.0.0.1",
            pid=index + 1,
            workers=1,
            probe_port=self.port,
            port=self.port,
            warm=True,
        )
        self.member = Member(
            Me(record=record, spec=crowd.spec),
            crowd.run_id,
            token=lambda: secrets.token_hex(8),
            say=lambda _: None,
            note=lambda _: None,
        )
        self.driver = StoreDriver(
            store, lambda notice: crowd.queue.put((self, notice)), time, grant=lambda: store.grant(crowd.ttl_s)
        )
        self._prober: Prober | None = None
        self.lost = self.pausing = False

    def _answered(self, seat: Seat, answer: Answer, asked_at: float) -> None:
        self._crowd.queue.put((self, ProbeResult(seat.incarnation, Verdict(answer, asked_at))))

    def register(self) -> float:
        """Become a member; when its key was there and its first view read."""
        how = JoinOptions(600.0, 60.0, again=False, named=True, too_late=StoreError("it could not join"))
        self.driver.run(self.member.join(how))
        return time.monotonic()

    def fold(self, event: Any) -> None:
        """As `EventLoop.handle`."""
        match event:
            case Notice() | ProbeResult():
                self.member.handle(event, time.monotonic())
            case "fail":
                failure = Failure(rank=0, code=1, collateral=True, summary="the connection was reset")
                record = self.member.me.record
                report = Report(
                    generation=self.member.me.started_generation,
                    node=record.node,
                    incarnation=record.incarnation,
                    status="failed",
                    failure=failure,
                )
                self.member.me = replace(
                    self.member.me, report=report, failed_at=time.monotonic(), running_generation=0
                )

    def live(self) -> float | None:
        """As `EventLoop.take_part`, until there is nothing to do; until when.

        After reading its seat an agent pauses until all of this process have read theirs: what it writes then would
        take time from the others that on machines of their own they would have.
        """
        self.driver.run(self.member.replica.complete())
        while not self.pausing:
            decision = self.member.decide(time.monotonic())
            match decision:
                case Wait(until=until):
                    return until
                case Run(generation=generation):
                    number = generation.number
                    record = self.member.me.record.model_copy(update={"generation": number, "seen": number})
                    self.member.me = replace(
                        self.member.me,
                        record=record,
                        highest_generation=number,
                        started_generation=number,
                        running_generation=number,
                        report=None,
                        failed_at=None,
                    )
                    self.pausing = True
                    self._crowd.seated(number)
                    return None
                case Probe(seats=seats):
                    self._prober = self._prober or Prober(self._answered)
                    self._prober.ask(seats)
                    return time.monotonic() + 2.0
                case Register() | Announce() | WriteReport() | Fence() | Publish():
                    self.driver.run(self.member.carry_out(decision))
                case Finish():
                    raise SystemExit(f"the run ended: {decision.reason}")
                case _:
                    raise SystemExit(f"unexpected in this benchmark: {decision}")
        return None


class Crowd:
    """The agents of one process."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.run_id: str = order["run_id"]
        total = order["total"]
        self.ttl_s = order["ttl_s"]
        self.spec = RunSpec(
            # Everybody is waited for, and some may get lost.
            min_nodes=max(1, total - order["spare"]),
            max_nodes=total,
            command=("bench",),
            join="now",
            lease_ttl_s=self.ttl_s,
            settle_quiet_s=60.0,
            settle_max_s=600.0,
        )
        self.queue: queue.SimpleQueue[tuple[VirtualAgent | None, Any]] = queue.SimpleQueue()
        self.answers = Answers()
        address = Address("http", "127.0.0.1", order["port"])
        stores = [EtcdStore((address,), timeout_s=10.0) for _ in range(order["connections"])]
        self.agents = [
            VirtualAgent(self, index, stores[index % len(stores)]) for index in range(order["first"], order["last"])
        ]
        self._lives = ThreadPoolExecutor(LIVE_AT_ONCE)
        self._lock = threading.Lock()
        self._alive = len(self.agents)
        self._seats: dict[int, int] = {}
        self._alarms: list[tuple[float, int, VirtualAgent]] = []
        self._serial = itertools.count()  # Orders alarms of the same time.

    def seated(self, number: int) -> None:
        """An agent has read its seat; when it is the last one of this process, that is said, and all go on."""
        with self._lock:
            self._seats[number] = self._seats.get(number, 0) + 1
            if self._seats[number] < self._alive:
                return
        say("seated", generation=number, at=time.monotonic())
        for agent in self.agents:
            agent.pausing = False
            self.queue.put((agent, None))

    def run(self) -> None:
        """Obey until "quit"."""
        threading.Thread(target=self._listen, daemon=True).start()
        say("ready")
        while True:
            timeout = max(0.0, self._alarms[0][0] - time.monotonic()) if self._alarms else None
            events = []
            try:
                events.append(self.queue.get(timeout=timeout))
                while True:
                    events.append(self.queue.get_nowait())
            except queue.Empty:
                pass
            touched: dict[int, VirtualAgent] = {}
            while self._alarms and self._alarms[0][0] <= time.monotonic():
                woken = heapq.heappop(self._alarms)[2]
                touched[woken.index] = woken
            for agent, event in events:
                if agent is None:
                    self._obey(event)
                elif not agent.lost:
                    agent.fold(event)
                    touched[agent.index] = agent
            living = [agent for agent in touched.values() if not agent.lost]
            for alarms in self._lives.map(_live, (living[start::LIVE_AT_ONCE] for start in range(LIVE_AT_ONCE))):
                for until, sleeper in alarms:
                    heapq.heappush(self._alarms, (until, next(self._serial), sleeper))

    def _obey(self, words: list[str]) -> None:
        match words:
            case ["register"]:
                threading.Thread(target=self._keep_alive, daemon=True).start()  # Thousands take longer than a lease.
                with ThreadPoolExecutor(REGISTER_AT_ONCE) as pool:
                    ats = list(pool.map(VirtualAgent.register, self.agents))
                say("registered", at=max(ats), first=min(ats))
                for agent in self.agents:
                    self.queue.put((agent, None))
            case ["lose", number]:
                for agent in self.agents:
                    if agent.index == int(number):
                        agent.lost = True
                        self._alive -= 1
                        agent.driver.close()
                        self.answers.close(agent.port)
            case ["fail", count]:
                at = time.monotonic()
                for agent in [agent for agent in self.agents if not agent.lost][: int(count)]:
                    self.queue.put((agent, "fail"))
                say("failed", at=at)
            case ["quit"]:
                raise SystemExit(0)

    def _listen(self) -> None:
        for line in sys.stdin:
            self.queue.put((None, line.split()))
        self.queue.put((None, ["quit"]))

    def _keep_alive(self) -> None:
        while True:
            began = time.monotonic()
            for index, agent in enumerate(self.agents):
                if agent.member.lease_id and not agent.lost:
                    agent.store.keep_alive(agent.member.lease_id)
                due = began + (index + 1) * self.ttl_s / 3 / len(self.agents)
                time.sleep(max(0.0, due - time.monotonic()))


def _live(agents: list[VirtualAgent]) -> list[tuple[float, VirtualAgent]]:
    """Let some agents live, one after the other; who wants to be woken, and when."""
    untils = [(agent.live(), agent) for agent in agents]
    return [(until, agent) for until, agent in untils if until is not None]


def say(event: str, **fields: Any) -> None:
    """One JSON line."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    crowd = Crowd(json.loads(sys.argv[1]))
    if len(crowd.agents) > 1:
        gc.disable()  # Walking over the memory of a thousand agents is a cost that no single agent has.
    crowd.run()
