"""What a rendezvous of N members costs, in counts: requests, messages and bytes grow like N, never like N squared."""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from elasticrt.agent.store_driver import StoreDriver
from elasticrt.errors import StoreError
from elasticrt.rendezvous import transactions
from elasticrt.rendezvous.decide import decide
from elasticrt.rendezvous.decision import Announce, Me, Publish, Run, Wait
from elasticrt.rendezvous.member import JoinOptions, Member
from elasticrt.rendezvous.records import SEATS_PER_CHUNK, Keys, Report, Seat, roster_chunks
from elasticrt.rendezvous.records import Member as MemberRecord
from elasticrt.rendezvous.requests import Notice
from elasticrt.rendezvous.view import Stored, Verdict, View, apply, apply_range
from elasticrt.spec import RunSpec
from elasticrt.store.protocol import Changes, Event, KeyValue, Put, RangeRead, Txn, TxnResult
from tests.memory_store import MemoryServer, MemoryStore
from tests.virtual.world import running

KEYS = Keys("run")


class CountedStore(MemoryStore):
    """A client that counts its requests, and the bytes of the values that it reads and writes."""

    requests = size = 0

    def read(self, range_: str, *, limit: int = 0, by_create: bool = False) -> RangeRead:
        """See `protocol.Store`."""
        found = super().read(range_, limit=limit, by_create=by_create)
        self.requests += 1
        self.size += sum(len(kv.value) for kv in found.keys)
        return found

    def commit(self, txn: Txn) -> TxnResult:
        """See `protocol.Store`."""
        self.requests += 1
        self.size += sum(len(operation.value) for operation in txn.operations if isinstance(operation, Put))
        return super().commit(txn)


class Standing:
    """A clock that stands still."""

    def monotonic(self) -> float:
        """See `Clock`."""
        return 0.0

    def monotonic_ns(self) -> int:
        """See `Clock`."""
        return 0

    def sleep(self, seconds: float) -> None:
        """See `Clock`."""


class One:
    """A member without workers."""

    def __init__(self, server: MemoryServer, spec: RunSpec, index: int) -> None:
        self.store = CountedStore(server)
        record = _member(index)
        self.notices: deque[Notice] = deque()
        self.messages = 0
        self.member = Member(
            Me(record=record, spec=spec),
            "run",
            token=lambda: "0" * 16,
            say=lambda _: None,
            note=lambda _: None,
        )
        self.driver = StoreDriver(self.store, self.notices.append, Standing(), grant=lambda: self.store.grant(60.0))
        how = JoinOptions(60.0, 60.0, again=False, named=True, too_late=StoreError("it could not join"))
        assert self.driver.run(self.member.join(how)) is None

    def live(self) -> bool:
        """Do all there is to do; whether there was anything."""
        seen = bool(self.notices)
        while self.notices:
            notice = self.notices.popleft()
            assert isinstance(notice.item, Changes)
            self.messages += 1
            self.store.size += sum(len(event.value.value) for event in notice.item.events if event.value)
            self.member.handle(notice, 0.0)
        self.driver.run(self.member.replica.complete())
        while True:
            decision = self.member.decide(0.0)
            match decision:
                case Wait():
                    return seen
                case Publish() | Announce():
                    assert self.driver.run(self.member.carry_out(decision))
                case Run(generation=generation):
                    number = generation.number
                    me = self.member.me
                    record = me.record.model_copy(update={"generation": number, "seen": number})
                    self.member.me = replace(
                        me,
                        record=record,
                        highest_generation=number,
                        started_generation=number,
                        running_generation=number,
                    )
                case _:
                    raise AssertionError(f"nothing else is to be done: {decision}")
            seen = True


@dataclass(frozen=True)
class Cost:
    """Of one member: requests, watch messages, bytes."""

    requests: int
    messages: int
    size: int

    @classmethod
    def of(cls, member: One) -> Cost:
        """So far."""
        return cls(member.store.requests, member.messages, member.store.size)


def _form(count: int) -> tuple[Cost, Cost]:
    """Form a generation of so many members: what it cost the leader, and the dearest of the others."""
    server = MemoryServer(lambda: 0.0)
    spec = RunSpec(min_nodes=count, max_nodes=count, command=("x",))
    members = [One(server, spec, index) for index in range(count)]
    while sum(member.live() for member in members):
        pass
    assert {member.member.me.running_generation for member in members} == {1}
    costs = [Cost.of(member) for member in members]
    others = costs[1:]
    dearest = Cost(*(max(getattr(cost, name) for cost in others) for name in ("requests", "messages", "size")))
    return costs[0], dearest


def test_forming_costs_a_member_the_same_however_many_there_are() -> None:
    """L1 at scale: a follower's requests and messages do not depend on N, its bytes only on how full its chunk is."""
    _, few = _form(40)
    _, many = _form(320)
    assert (many.requests, many.messages) == (few.requests, few.messages)
    assert many.size <= 2 * few.size


def test_forming_costs_the_leader_in_proportion() -> None:
    """Only the leader follows all members, and even it gets O(N) messages and bytes and makes few requests."""
    few, _ = _form(40)
    many, _ = _form(320)
    assert many.messages <= 8 * few.messages
    assert many.size <= 8 * few.size
    assert many.requests <= few.requests + 320 // (SEATS_PER_CHUNK * transactions.CHUNKS_PER_TXN) + 1


def test_the_longest_of_rosters_fits_into_requests_of_etcd() -> None:
    """Ten thousand nodes with the longest names and addresses: no transaction is too large, and there are few."""
    node = partial("{:05d}{}".format)
    seats = tuple(
        Seat(
            node=node(index, "n" * 123),
            incarnation=f"{index:016x}",
            index=index,
            rank_offset=index * 4096,
            workers=4096,
            address="a" * 253,
            probe_port=65535,
        )
        for index in range(10_000)
    )
    store = MemoryStore(MemoryServer(lambda: 0.0))
    txns = transactions.write_roster(KEYS, "0" * 16, roster_chunks(seats))
    assert all(store.commit(txn).succeeded for txn in txns)  # It refuses what etcd refuses.
    assert len(txns) == -(-len(seats) // (SEATS_PER_CHUNK * transactions.CHUNKS_PER_TXN))


class Filed(dict[str, Stored[Report]]):
    """Reports that count how often all of them are gone through."""

    looks = 0

    def values(self) -> Any:
        """See `dict`."""
        self.looks += 1
        return super().values()


def _looks(count: int) -> int:
    """How often the leader goes through the reports when so many nodes have lost a worker, and all answer."""
    world = running(count, max_nodes=count)
    leader = world.members["n0"]
    leader.fail()
    lost = leader.me.report
    assert lost is not None
    lives = {seat.node: seat.incarnation for seat in leader.view.seats.values()}
    reports = {node: lost.model_copy(update={"node": node, "incarnation": life}) for node, life in lives.items()}
    filed = Filed({KEYS.report(1, node): Stored(each, 1, 10**6, world.now) for node, each in reports.items()})
    verdicts = {life: Verdict("alive", world.now) for life in lives.values()}
    view = replace(leader.view, reports_by_key=filed, verdicts=verdicts)
    decision = decide(replace(leader.me, stored_report=lost), view, world.now)
    assert isinstance(decision, Publish)
    return filed.looks


def test_a_leader_goes_through_all_reports_once_a_decision() -> None:
    """A thousand nodes report at once after a loss: their reports are not looked through again for each of them."""
    assert _looks(24) == _looks(4)


@pytest.mark.parametrize("leads", [False, True])
def test_many_changes_at_once_fold_like_one_by_one(leads: bool) -> None:
    """A fold of many changes gives the same view as many folds, and leaves the view before as it was."""
    start = View("n00000", leader_node="n00000" if leads else "n00003")
    start = apply_range(
        start, KEYS, KEYS.members, RangeRead(tuple(_kv(index, 10 + index) for index in range(4)), 14, "s"), 0.0
    )
    members = dict(start.members)
    changes = [Event(kv.key, kv, kv.mod_revision) for kv in (_kv(index, 20 + index) for index in range(8))]
    changes += [Event(KEYS.member("n00003"), None, 30), Event(KEYS.member("n00000"), None, 31)]
    changes += [Event(KEYS.member("n00005"), KeyValue(KEYS.member("n00005"), b"not ours", 32, 32), 32)]
    at_once = apply(start, KEYS, changes, 1.0)
    one_by_one = start
    for change in changes:
        one_by_one = apply(one_by_one, KEYS, [change], 1.0)
    assert at_once == one_by_one
    assert start.members == members
    assert set(at_once.members) == {"n00001", "n00002", "n00004", "n00006", "n00007"}


def test_a_view_remembers_no_reads_of_former_rosters() -> None:
    """What a member keeps does not grow with the number of generations that it has lived through."""
    view = View("n00000")
    for _ in range(5):
        chunk = KEYS.chunk(secrets.token_hex(8), 0)
        view = apply_range(view, KEYS, chunk, RangeRead((), 5, "s"), 0.0)
    assert list(view.read_revisions) == [chunk]


def _member(index: int) -> MemberRecord:
    return MemberRecord(
        node=f"n{index:05d}",
        incarnation=f"{index:016x}",
        address="127.0.0.1",
        pid=1,
        workers=1,
        probe_port=1,
        port=1,
        warm=True,
    )


def _kv(index: int, revision: int) -> KeyValue:
    record = _member(index)
    return KeyValue(KEYS.member(record.node), record.encode(), revision, revision)
