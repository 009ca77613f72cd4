"""A small world for tests: members with the production view, handler and decisions, over the memory store.

Time stands still unless a test moves it, members act in the order they were made, and workers are a field. Each member
acts until it waits; `settle` lets all of them act until nobody does anything any more.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field, replace

from elasticrt.ipc.failure import Failure
from elasticrt.rendezvous.decide import decide
from elasticrt.rendezvous.decision import (
    Adopt,
    Announce,
    Ask,
    Decision,
    Drain,
    End,
    Fence,
    File,
    Finish,
    Go,
    Halt,
    Hold,
    Leave,
    Me,
    Probe,
    Publish,
    Register,
    Rejoin,
    ReleaseHold,
    Run,
    Wait,
    Withdraw,
)
from elasticrt.rendezvous.member_client import Entered, MemberClient, Notice
from elasticrt.rendezvous.records import CopyRecord, Generation, Keys, Member, Report, Seat
from elasticrt.rendezvous.view import Verdict, with_verdict
from elasticrt.spec import RunSpec
from elasticrt.store.protocol import LeaseLost
from elasticrt.testing.memory_store import MemoryServer, MemoryStore


@dataclass
class VirtualMember:
    """One member and what it has been told to do so far."""

    world: World
    name: str
    life: int = 0
    me: Me = field(init=False)
    story: list[Decision] = field(default_factory=list)
    alive: bool = True
    silent: bool = False
    entered: int = 0  # How far its workers have got, for a handover; 0 for scripts without a Loop.
    ran: list[tuple[Generation, Seat]] = field(default_factory=list)
    ended: End | Halt | None = None

    def __post_init__(self) -> None:
        self.notices: deque[Notice] = deque()
        self.store = self.world.connect()
        self.keys = Keys("run")
        self.rendezvous = MemberClient(
            self.store, self.keys, self.name, self.notices.append, self.world.clock, self.world.token
        )
        self.me = Me(record=self._record(), spec=self.world.spec)

    def _record(self) -> Member:
        incarnation = hashlib.sha256(f"{self.name}/{self.life}".encode()).hexdigest()[:16]
        port = 10_000 + int(incarnation[:3], 16)
        return Member(
            node=self.name, incarnation=incarnation, address="127.0.0.1", pid=1, workers=1, probe_port=port, port=port
        )

    def enter(self, *, again: bool = False) -> object:
        """Register; warm at once."""
        self.lease = self.store.grant(self.world.spec.lease_ttl_s)
        answer = self.rendezvous.enter(self.me.spec, self.me.record, self.lease.lease_id, again=again)
        if isinstance(answer, Entered):
            self.me = replace(self.me, attempt=answer.attempt, spec=answer.spec)
            self.rendezvous.refresh()
            self.me = replace(self.me, known=self.rendezvous.view.number)
        return answer

    def warm(self) -> None:
        """The worker parent is ready."""
        self.me = replace(self.me, record=self.me.record.model_copy(update={"warm": True}))

    def report(self, status: str, failure: Failure | None = None, **more: object) -> None:
        """This node's workers have ended."""
        self.me = replace(
            self.me,
            report=Report(
                generation=self.me.started,
                node=self.name,
                incarnation=self.me.record.incarnation,
                status=status,
                failure=failure,
                **more,
            ),
            running=self.me.running if status in ("finishing", "holding") else 0,
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
            self.rendezvous.absorb(self.notices.popleft())
        self.rendezvous.complete()
        decision = decide(self.me, self.rendezvous.view, self.world.clock())
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
                seated = self.rendezvous.view.seat_of(self.name, self.me.record.incarnation)
                self.report("left") if seated else None
                self.rendezvous.leave(self.me.report if seated else None)
                self.alive = False
            case Run(generation, seat, _):
                self.ran.append((generation, seat))
                record = self.me.record.model_copy(
                    update={"generation": generation.number, "seen": generation.number, "port": self.me.record.port + 1}
                )
                self.me = replace(
                    self.me,
                    record=record,
                    started=generation.number,
                    running=generation.number,
                    seated=generation.number,
                    known=generation.number,
                    report=None,
                    failed_at=None,
                    holding=0,
                    going=0,
                )
            case Rejoin():
                self.life += 1
                record = self._record().model_copy(update={"warm": True})
                self.me = replace(self.me, record=record, running=0, seated=0, report=None, failed_at=None)
                self.rendezvous.leave(None)
            case Register():
                self.world.now += 0.001  # A key that comes back is younger than a question asked before.
                self.lease = self.store.grant(self.world.spec.lease_ttl_s)
                self.me = replace(self.me, lease="connected")
                self.rendezvous.register_again(self.me.record, self.lease.lease_id)
            case Announce():
                self.rendezvous.announce(decision, self.me, self.lease.lease_id)
            case Adopt(spec, _):
                self.me = replace(self.me, spec=spec)
            case Drain():
                self.me = replace(self.me, record=self.me.record.model_copy(update={"draining": True}))
            case File(report, _):
                if self.rendezvous.file(decision):
                    self.me = replace(self.me, filed=report)
            case Probe(seats, _):
                for seat in seats:
                    verdict = Verdict(self.world.probe(seat, self.name), self.world.clock())
                    self.rendezvous.view = with_verdict(self.rendezvous.view, seat.incarnation, verdict)
            case Fence():
                self.rendezvous.evict(decision)
            case Publish():
                self.rendezvous.publish(decision)
            case Finish():
                self.rendezvous.finish(decision, 0)
            case Ask():
                self.rendezvous.ask(decision)
            case Withdraw():
                self.rendezvous.withdraw()
            case Hold(handover, _):
                self.me = replace(self.me, holding=handover)
                self.report("holding", handover=handover, entered=self.entered)
            case Go(step, _, _):
                self.me = replace(self.me, going=step)
                copy = CopyRecord(step=step, epoch=0, size=1, digest="d" * 64, world_size=1)
                self.report("held", handover=self.me.holding, memory=copy)
            case ReleaseHold():
                self.me = replace(self.me, holding=0, going=0, report=None)
        return True


class World:
    """A store, a clock and members."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.now = 100.0
        self.drawn = 0
        self.server = MemoryServer(self.clock)
        self.members: dict[str, VirtualMember] = {}
        self.cuts: list[set[str]] = []  # Pairs that do not hear each other; etcd hears all.

    def clock(self) -> float:
        """The only clock."""
        return self.now

    def token(self) -> str:
        """64 bits that nobody has had."""
        self.drawn += 1
        return hashlib.sha256(f"token {self.drawn}".encode()).hexdigest()[:16]

    def connect(self) -> MemoryStore:
        """A client for one member."""
        return MemoryStore(self.server)

    def add(self, name: str, *, warm: bool = True) -> VirtualMember:
        """A member that has registered."""
        member = self.members[name] = VirtualMember(self, name)
        assert isinstance(member.enter(), Entered)
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
                        member.store.keep_alive(member.lease.lease_id)
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
    return replace(member.me, leaving="SIGTERM received")
