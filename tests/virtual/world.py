"""A small world for tests: members with the production view, handler and decisions, over the memory store.

Time stands still unless a test moves it, members act in the order they were made, and workers are a field. Each member
acts until it waits; `settle` lets all of them act until nobody does anything any more.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TypeVar

from elasticrt.agent.store_driver import StoreDriver
from elasticrt.errors import StoreError
from elasticrt.ipc.env import Copy
from elasticrt.ipc.failure import Failure
from elasticrt.rendezvous.decision import (
    Decision,
    Drain,
    End,
    Go,
    Halt,
    Hold,
    Leave,
    Me,
    Probe,
    Register,
    Rejoin,
    ReleaseHold,
    Run,
    Wait,
)
from elasticrt.rendezvous.member import JoinOptions, Member, ProbeResult
from elasticrt.rendezvous.records import Generation, Keys, Report, Result, Seat
from elasticrt.rendezvous.records import Member as MemberRecord
from elasticrt.rendezvous.requests import Conversation, Notice
from elasticrt.rendezvous.view import Verdict, View
from elasticrt.spec import RunSpec
from elasticrt.store.protocol import Lease, LeaseLost
from tests.memory_store import MemoryServer, MemoryStore

T = TypeVar("T")


@dataclass
class VirtualMember:
    """One member and what it has been told to do so far."""

    world: World
    name: str
    life: int = 0
    story: list[Decision] = field(default_factory=list)
    alive: bool = True
    silent: bool = False
    entered: int = 0  # How far its workers have got, for a handover; 0 for scripts without a Loop.
    ran: list[tuple[Generation, Seat]] = field(default_factory=list)
    ended: End | Halt | None = None
    said: list[str] = field(default_factory=list)
    drawn: int = 0

    def __post_init__(self) -> None:
        self.notices: deque[Notice] = deque()
        self.keys = Keys("run")
        self.member = Member(
            Me(record=self._record(), spec=self.world.spec),
            "run",
            token=self._token,
            say=self.said.append,
            note=self.said.append,
            seats_per_chunk=2,  # So that rosters are to be read, as in large runs.
        )
        self.store = self.world.connect()
        self.driver = StoreDriver(self.store, self.notices.append, self.world, grant=self._grant, probe=self._probe)

    def connect(self, store: MemoryStore) -> None:
        """Talk to the store by this client from now on."""
        self.store = self.driver.store = store

    def _grant(self) -> Lease:
        return self.store.grant(self.world.spec.lease_ttl_s)

    def _probe(self, address: str, port: int, incarnation: str) -> str:
        seat = Seat(
            node="asked", incarnation=incarnation, index=0, rank_offset=0, workers=1, address=address, probe_port=port
        )
        return self.world.probe(seat, self.name)

    def run(self, conversation: Conversation[T]) -> T:
        """Have a conversation with the store."""
        return self.driver.run(conversation)

    @property
    def me(self) -> Me:
        """The member's own state."""
        return self.member.me

    @me.setter
    def me(self, me: Me) -> None:
        self.member.me = me

    @property
    def view(self) -> View:
        """What it knows."""
        return self.member.view

    def _token(self) -> str:
        self.drawn += 1
        return hashlib.sha256(f"{self.name}/{self.life}/{self.drawn}".encode()).hexdigest()[:16]

    def _record(self) -> MemberRecord:
        incarnation = hashlib.sha256(f"{self.name}/{self.life}".encode()).hexdigest()[:16]
        port = 10_000 + int(incarnation[:3], 16)
        return MemberRecord(
            node=self.name, incarnation=incarnation, address="127.0.0.1", pid=1, workers=1, probe_port=port, port=port
        )

    def enter(self, *, again: bool = False, wait_s: float = 5.0) -> Result | None:
        """Join, warm at once; etcd is waited for up to `wait_s`. Returns and raises as `Member.join`."""
        late = StoreError("it could not join")
        return self.run(self.member.join(JoinOptions(5.0, wait_s, again=again, named=True, too_late=late)))

    def warm(self) -> None:
        """The worker parent is ready."""
        self.me = replace(self.me, record=self.me.record.model_copy(update={"warm": True}))

    def report(self, status: str, failure: Failure | None = None, **more: object) -> None:
        """This node's workers have ended."""
        self.me = replace(
            self.me,
            report=Report(
                generation=self.me.started_generation,
                node=self.name,
                incarnation=self.me.record.incarnation,
                status=status,
                failure=failure,
                **more,
            ),
            running_generation=self.me.running_generation if status in ("finishing", "holding") else 0,
            failed_at=self.world.clock() if status == "failed" else None,
        )

    def fail(
        self, *, collateral: bool = False, final_code: int = 0, beats: int = 0, loaded: int = 0, early: str = ""
    ) -> None:
        """This node's workers have failed."""
        rank = self.ran[-1][1].rank_offset
        self.report(
            "failed",
            Failure(
                rank=rank,
                code=1,
                collateral=collateral,
                final_code=final_code,
                summary=f"rank {rank} on {self.name}",
                beats=beats,
                loaded=loaded,
                early=early,
            ),
        )

    def crash(self) -> None:
        """The agent is gone: nothing answers at its port; its lease runs on."""
        self.alive = False

    def step(self) -> bool:
        """Fold what has come, decide, do. False when it waits (or is gone)."""
        if not self.alive or self.silent or self.ended is not None:
            return False
        while self.notices:
            self.member.handle(self.notices.popleft(), self.world.clock())
        self.run(self.member.replica.complete())
        decision = self.member.decide(self.world.clock())
        if not self.story or self.story[-1].reason != decision.reason:
            self.story.append(decision)
        return self._do(decision)

    def _do(self, decision: Decision) -> bool:  # noqa: PLR0912  One case per decision.
        match decision:
            case Wait(until=until):
                assert until is None or until > self.world.clock(), "a wait that is over at once would spin"
                return False
            case End() | Halt():
                self.ended = decision
            case Leave():
                self.run(self.member.leave(seat_too=True))
                self.alive = False
            case Run(_, generation, seat):
                self.ran.append((generation, seat))
                record = self.me.record.model_copy(
                    update={"generation": generation.number, "seen": generation.number, "port": self.me.record.port + 1}
                )
                self.me = replace(
                    self.me,
                    record=record,
                    started_generation=generation.number,
                    running_generation=generation.number,
                    seated_generation=generation.number,
                    highest_generation=generation.number,
                    report=None,
                    failed_at=None,
                    hold_revision=0,
                    leave_after_step=0,
                )
            case Rejoin():
                self.life += 1
                self.me = replace(self.me, running_generation=0, seated_generation=0)
                self.run(self.member.carry_out(decision))
            case Drain():
                self.member.drain()
            case Probe(_, seats):
                for seat in seats:
                    verdict = Verdict(self.world.probe(seat, self.name), self.world.clock())
                    self.member.handle(ProbeResult(seat.incarnation, verdict), self.world.clock())
            case Hold(_, handover):
                self.me = replace(self.me, hold_revision=handover)
                self.report("holding", handover=handover, entered=self.entered)
            case Go(_, step):
                self.me = replace(self.me, leave_after_step=step)
                copy = Copy(step=step, epoch=0, size=1, digest="d" * 64, world_size=1)
                self.report("held", handover=self.me.hold_revision, memory=copy)
            case ReleaseHold():
                self.me = replace(self.me, hold_revision=0, leave_after_step=0, report=None)
            case _:
                if isinstance(decision, Register):
                    self.world.now += 0.001  # A key that comes back is younger than a question asked before.
                self.run(self.member.carry_out(decision))
        return True


class World:
    """A store, a clock and members."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.now = 100.0
        self.server = MemoryServer(self.clock)
        self.members: dict[str, VirtualMember] = {}
        self.cuts: list[set[str]] = []  # Pairs that do not hear each other; etcd hears all.

    def clock(self) -> float:
        """The only clock."""
        return self.now

    monotonic = clock

    def monotonic_ns(self) -> int:
        """See `Clock`."""
        return int(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        """See `Clock`."""
        self.now += seconds

    def connect(self) -> MemoryStore:
        """A client for one member."""
        return MemoryStore(self.server)

    def add(self, name: str, *, warm: bool = True) -> VirtualMember:
        """A member that has registered."""
        member = self.members[name] = VirtualMember(self, name)
        assert member.enter() is None
        if warm:
            member.warm()
        return member

    def probe(self, seat: Seat, asker: str = "") -> str:
        """What asking the agent at this seat would find."""
        for member in self.members.values():
            if member.me.record.probe_port == seat.probe_port and {asker, member.name} in self.cuts:
                return "silent"
            if member.me.record.probe_port == seat.probe_port and member.alive:
                if member.silent:
                    return "silent"
                return "alive" if member.me.record.incarnation == seat.incarnation else "dead"
        return "dead"

    def settle(self) -> None:
        """Let everybody act until all wait."""
        for _ in range(10_000):
            acted = [member.step() for member in self.members.values()]  # All of them, in order, not until the first.
            if not any(acted):
                return
        raise AssertionError("the members never come to rest")

    def pass_time(self, seconds: float, tick: float = 0.25) -> None:
        """Time passes; living members keep their leases."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + tick)
            for member in self.members.values():
                if member.alive and not member.silent and member.ended is None:
                    try:
                        member.store.keep_alive(member.member.lease_id)
                    except LeaseLost:  # The session would say so.
                        member.me = replace(member.me, lease="lost")
            self.settle()

    def generations(self) -> list[int]:
        """All generation numbers that were ever published, in order."""
        seen: list[int] = []
        for member in self.members.values():
            seen += [generation.number for generation, _ in member.ran]
        return sorted(set(seen))


def spec(**changes: object) -> RunSpec:
    """A spec for tests."""
    values = {"min_nodes": 1, "max_nodes": 4, "command": ("script", "train.py"), "join": "now", **changes}
    return RunSpec(**values)


def running(nodes: int, **changes: object) -> World:
    """A world in which `nodes` members run generation 1."""
    world = World(spec(**changes))
    for index in range(nodes):
        world.add(f"n{index}")
    world.settle()
    world.pass_time(1.0)
    return world


def check_ranks(world: World, number: int, names: list[str]) -> None:
    """S3: ranks are a permutation of 0..W-1, and everybody agrees on everything else."""
    seats = {
        member.name: seat
        for member in world.members.values()
        for generation, seat in member.ran
        if generation.number == number
    }
    records = {
        generation for member in world.members.values() for generation, _ in member.ran if generation.number == number
    }
    assert sorted(seats) == sorted(names)
    assert len(records) == 1
    (record,) = records
    assert (record.nodes, record.world_size) == (len(names), len(names))
    assert sorted(seat.rank_offset for seat in seats.values()) == list(range(len(names)))


def told_to_leave(member: VirtualMember) -> Me:
    """This member's state after SIGTERM."""
    return replace(member.me, leave_reason="SIGTERM received")
