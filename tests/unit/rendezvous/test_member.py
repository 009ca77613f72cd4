"""A member without I/O: its requests are answered by hand, and time is a number."""

from __future__ import annotations

from typing import TypeVar

import pytest

from elasticrt.errors import EXIT_STORE, DuplicateError, StoreError
from elasticrt.rendezvous.decision import Halt, Me, Rejoin, Wait, WriteReport
from elasticrt.rendezvous.member import JoinOptions, Member
from elasticrt.rendezvous.records import Generation, Keys, Report, decode
from elasticrt.rendezvous.records import Member as MemberRecord
from elasticrt.rendezvous.requests import Conversation, Grant, Pause, ProbeOwner, Read, Transact
from elasticrt.rendezvous.seats import seats_for
from elasticrt.rendezvous.view import Stored
from elasticrt.spec import RunSpec
from elasticrt.store.lease_session import SessionState
from elasticrt.store.protocol import (
    KeyValue,
    Lease,
    LeaseLost,
    Put,
    RangeRead,
    StoreBlocked,
    StoreUnavailable,
    Txn,
    TxnResult,
)
from tests.memory_store import MemoryServer, MemoryStore

T = TypeVar("T")

SPEC = RunSpec(min_nodes=1, max_nodes=2, command=("script", "train.py"))
HOW = JoinOptions(60.0, 5.0, again=False, named=True, too_late=StoreError("too late"))
EMPTY = RangeRead((), 1, "store")


def _member(said: list[str]) -> Member:
    record = MemberRecord(node="n0", incarnation="a" * 16, address="127.0.0.1", pid=1, workers=1, probe_port=1, port=2)
    me = Me(record=record, spec=SPEC)
    return Member(me, "run", token=lambda: "b" * 16, say=said.append, note=said.append)


def test_a_newcomer_asks_for_a_lease_looks_around_and_registers() -> None:
    """What it asks for, in order, when nobody is there."""
    coming, asked, now = _member([]).join(HOW), [], 10.0
    request = next(coming)
    while not isinstance(request, Transact):
        asked.append(request)
        answer = Lease(7, 5.0) if isinstance(request, Grant) else EMPTY if isinstance(request, Read) else None
        request = coming.send((answer, now))
    assert [type(each).__name__ for each in asked if each != Pause(0.0)] == ["Grant", "Read", "Read", "Read", "Read"]
    assert request.txn.why == "n0 joins"


@pytest.mark.parametrize("lost", [StoreUnavailable("silence"), LeaseLost("gone")])
def test_a_registration_that_fails_is_tried_again(lost: StoreError) -> None:
    """Whatever became of it: it looks before it writes again, and a lost lease is replaced first."""
    coming, commits, grants = _member([]).join(HOW), 0, 0
    request = next(coming)
    while commits < 2:
        grants += isinstance(request, Grant)
        commits += isinstance(request, Transact)
        if isinstance(request, Transact) and commits == 1:
            request = coming.throw(lost)
            continue
        answer = Lease(6 + grants, 5.0) if isinstance(request, Grant) else EMPTY
        request = coming.send((TxnResult(False, 1) if isinstance(request, Transact) else answer, 10.0))
    assert grants == 1 + isinstance(lost, LeaseLost)


@pytest.mark.parametrize(
    ("said", "waits"), [(["alive"], 0), (["silent", "alive"], 1), (["silent"] * 12, 11), (["silent", "dead"], 1)]
)
def test_an_agent_of_the_same_name(said: list[str], waits: int) -> None:
    """S02: a live one keeps the name. A silent one, as after a power loss, is waited for until its lease is over."""
    other = MemberRecord(node="n0", incarnation="c" * 16, address="10.0.0.9", pid=7, workers=1, probe_port=1, port=2)
    key = KeyValue(Keys("run").member("n0"), other.encode(), 3, 3, 9)
    coming, answers, now, waited = _member([]).join(HOW), iter(said), 10.0, 0
    request = next(coming)
    try:
        while not isinstance(request, Transact):
            answer: object = None
            if isinstance(request, Grant):
                answer = Lease(7, 5.0)
            elif isinstance(request, ProbeOwner):
                answer, now = next(answers), now + 1.0
            elif isinstance(request, Read):
                answer = RangeRead((key,) if key.key.startswith(request.range) else (), 4, "store")
            elif request != Pause(0.0):
                waited += 1
            request = coming.send((answer, now))
    except DuplicateError as error:
        assert "pid 7 at 10.0.0.9" in str(error)
        assert said[-1] != "dead"
    else:
        assert said[-1] == "dead"
    assert waited == waits


def test_a_newcomer_ends_when_etcd_has_not_answered_for_long_enough() -> None:
    """It says for how long, and why."""
    coming = _member([]).join(HOW)
    assert next(coming) == Pause(0.0)
    assert coming.send((None, 10.0)) == Grant()
    assert coming.throw(StoreUnavailable("silence")) == Pause(0.0)
    with pytest.raises(StoreError, match="etcd has not answered for 5 s"):
        coming.send((None, 15.0))


def test_what_is_not_known_is_read_before_anything_is_decided_upon_it() -> None:
    """After a request without an answer, and after a lease in doubt; too long an outage ends the member."""
    member = _member([])
    assert member.note_failure(StoreUnavailable("silence"), 10.0) == 10.5
    assert not member.outage.is_due(10.4)
    assert member.outage.is_due(10.5)
    assert member.decide(910.1) == Halt("etcd has not answered for 900 s", EXIT_STORE)
    member.outage.end(11.0)
    member.handle(SessionState("suspended", 0, "no answer"), 12.0)
    assert member.me.lease == "suspended"
    assert member.outage.is_due(12.0)


def test_a_full_store_is_waited_for_and_then_ends_the_member() -> None:
    """People are told once."""
    said: list[str] = []
    member = _member(said)
    assert member.note_failure(StoreBlocked("no space"), 10.0) == 10.5
    assert member.note_failure(StoreBlocked("no space"), 10.5) == 11.0
    assert len(said) == 1
    with pytest.raises(StoreBlocked):
        member.note_failure(StoreBlocked("no space"), 910.1)
    member.outage.note_write()
    assert member.note_failure(StoreBlocked("no space"), 920.0) == 920.5


def test_a_life_that_was_left_out_is_followed_by_another() -> None:
    """It has another incarnation and needs another lease; nothing of the old one is reported."""
    member = _member([])
    member.begin_life()
    assert (member.me.record.incarnation, member.me.lease, member.me.report) == ("b" * 16, "lost", None)
    assert not isinstance(member.decide(1.0), Wait)


@pytest.mark.parametrize("word", ["connected", "suspended"])
def test_a_lease_that_was_given_up_does_not_come_back(word: str) -> None:
    """Its keeper may have more to say of it: the next life needs another lease all the same."""
    member = _member([])
    member.lease_id = 7
    member.begin_life()
    member.handle(SessionState(word, 7, "etcd answers"), 2.0)
    assert member.me.lease == "lost"


def test_a_goodbye_that_was_refused_is_not_sent_again_as_it_was() -> None:
    """L8: its key has gone already. Only a goodbye with a report is followed by one without."""
    goodbye = _member([]).leave(seat_too=False)
    assert isinstance(next(goodbye), Transact)
    with pytest.raises(StopIteration):
        goodbye.send((TxnResult(False, 1), 10.0))


def _sent(filing: Conversation[T], store: MemoryStore) -> T:
    """Carry a conversation out on a store; whether it took effect."""
    try:
        request = next(filing)
        while True:
            if isinstance(request, Transact):
                answer = store.commit(request.txn)
            else:
                answer = store.read(request.range) if isinstance(request, Read) else None
            request = filing.send((answer, 10.0))
    except StopIteration as done:
        return done.value


@pytest.mark.parametrize("arrives", ["before the next", "after the next"])
def test_a_report_without_an_answer_never_replaces_the_next_one(arrives: str) -> None:
    """Whenever it arrives: the report that is there in the end is the one that was made last."""
    store, keys = MemoryStore(MemoryServer(lambda: 0.0)), Keys("run")
    member = _member([])
    first, last = (
        WriteReport(status, Report(generation=1, node="n0", incarnation="a" * 16, status=status))
        for status in ("holding", "held")
    )
    filing = member.carry_out(first)
    lost = next(filing)
    assert isinstance(lost, Transact)
    with pytest.raises(StoreUnavailable):
        filing.throw(StoreUnavailable("silence"))
    if arrives == "before the next":
        assert store.commit(lost.txn).succeeded
    assert _sent(member.carry_out(last), store)
    if arrives == "after the next":
        assert not store.commit(lost.txn).succeeded
    (found,) = store.read(keys.report(1, "n0")).keys
    assert decode(Report, found.key, found.value).status == "held"


def test_a_report_is_not_filed_in_a_store_that_has_begun_anew() -> None:
    """E05: a report about a generation of the store that was lost, and whose first try was not answered there."""
    keys, member = Keys("run"), _member([])
    generation = Generation(
        number=1, attempt=1, nonce="0" * 16, nodes=1, world_size=1, master_address="127.0.0.1", master_port=1,
        cause="start", kind="start", chunks=0, seats=seats_for([Stored(member.me.record, 1, 1, since=0.0)]),
    )  # fmt: skip
    store, fresh = (MemoryStore(MemoryServer(lambda: 0.0)) for _ in range(2))
    store.commit(
        Txn((), (Put(keys.generation, generation.encode()), Put(keys.member("n0"), member.me.record.encode())))
    )
    _sent(member.replica.refresh(), store)
    assert member.view.generation_number == 1
    decision = WriteReport("failed", Report(generation=1, node="n0", incarnation="a" * 16, status="holding"))
    filing = member.carry_out(decision)
    next(filing)
    with pytest.raises(StoreUnavailable):
        filing.throw(StoreUnavailable("silence"))
    assert not _sent(member.carry_out(decision), fresh)
    assert not fresh.read(keys.report(1, "n0")).keys


@pytest.mark.parametrize("of_another_process", [False, True])
def test_an_agent_takes_only_its_own_key_out(*, of_another_process: bool) -> None:
    """S02: when it comes back after a silence, and leaves or begins a new life, the key of its name may be that of the
    agent that has taken its place."""
    keys, member, store = Keys("run"), _member([]), MemoryStore(MemoryServer(lambda: 0.0))
    record = member.me.record.model_copy(update={"incarnation": "c" * 16, "pid": 7 if of_another_process else 1})
    for goodbye in (lambda: member.leave(seat_too=True), lambda: member.carry_out(Rejoin("left out"))):
        store.commit(Txn((), (Put(keys.member("n0"), record.encode()),)))
        _sent(member.replica.refresh(), store)
        _sent(goodbye(), store)
        assert len(store.read(keys.member("n0")).keys) == int(of_another_process)
