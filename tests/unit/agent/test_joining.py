"""Joining a run while etcd stands still or gives leases up: at every call that a newcomer makes, it joins."""

from __future__ import annotations

import functools
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticrt.agent.edges import Edges
from elasticrt.agent.membership import Membership
from elasticrt.agent.store_discovery import OpenStore
from elasticrt.agent.store_driver import StoreDriver, ToldToLeaveError
from elasticrt.errors import StoreError
from elasticrt.rendezvous.decision import Me
from elasticrt.rendezvous.member import Member
from elasticrt.rendezvous.outage import ride_out
from elasticrt.rendezvous.records import Keys, decode
from elasticrt.rendezvous.records import Member as MemberRecord
from elasticrt.rendezvous.requests import Conversation, Read
from elasticrt.run_options import RunOptions
from elasticrt.settings import Command, Settings
from elasticrt.spec import RunSpec
from elasticrt.store.protocol import Credentials, Lease, RangeRead, StoreUnavailable, Txn, TxnResult
from elasticrt.torchrun.participant import Participant
from tests.memory_store import MemoryServer, MemoryStore

SPEC = RunSpec(min_nodes=1, max_nodes=2, command=("script", "train.py"))


class Troubled(MemoryStore):
    """Of the calls of the thread that made it the one with number `at` goes wrong.

    `how`: "unsent", "unheard" (it took effect, and the answer is lost), or "lapsed" (all leases end before it).
    """

    def __init__(self, server: MemoryServer, how: str, at: int) -> None:
        super().__init__(server)
        self.server, self.how, self.at = server, how, at
        self.calls = 0
        self.leases: list[int] = []

    def _call(self, act: Callable[[], Any]) -> Any:
        self.calls += 1
        if self.calls != self.at:
            return act()
        if self.how == "lapsed":
            for lease in self.leases:
                self.server.revoke(lease)
            return act()
        if self.how == "unheard":
            act()
        raise StoreUnavailable("no answer within the deadline")

    def read(self, range_: str, *, limit: int = 0, by_create: bool = False) -> RangeRead:
        """See `protocol.Store`."""
        act = functools.partial(super().read, range_, limit=limit, by_create=by_create)
        found: RangeRead = self._call(act)
        return found

    def commit(self, txn: Txn) -> TxnResult:
        """See `protocol.Store`."""
        done: TxnResult = self._call(functools.partial(super().commit, txn))
        return done

    def grant(self, ttl_s: float) -> Lease:
        """See `protocol.Store`."""
        lease: Lease = self._call(functools.partial(super().grant, ttl_s))
        self.leases.append(lease.lease_id)
        return lease


def _joined(server: MemoryServer, node: str) -> bool:
    """Whether a key of this node is there, on a lease."""
    found = server.read(Keys("run").members).keys
    return any(decode(MemberRecord, kv.key, kv.value).node == node and kv.lease for kv in found)


def _agent_joins(store: Troubled) -> str:
    settings = Settings(
        options=RunOptions(node="alpha"),
        run_id="run",
        node="alpha",
        address="127.0.0.1",
        workers=1,
        command=Command(("train.py",)),
        etcd=(),
        credentials=Credentials(),
        serve=None,
        run_dir=Path("/nowhere"),
    )
    record = MemberRecord(
        node="alpha", incarnation="a" * 16, address="127.0.0.1", pid=7, workers=1, probe_port=5, port=6, warm=True
    )
    member = Member(Me(record=record, spec=SPEC), "run", token=lambda: "b" * 16, say=print, note=print)
    edges = Edges(open_store=lambda *_: OpenStore(store, (), None, "127.0.0.1"))
    one = Membership(settings, queue.SimpleQueue(), edges, told_to_leave=lambda: False)
    try:
        assert one.open(member) is None
        return member.view.node if _joined(store.server, "alpha") else ""
    finally:
        one.close()


def _participant_joins(store: Troubled) -> str:
    one = Participant(store, "run", SPEC, node="alpha", address="127.0.0.1")
    try:
        one.open(30.0)
        return one.member.me.record.node if _joined(store.server, "alpha") else ""
    finally:
        one.close(run_too=False)


@pytest.mark.parametrize("join", [_agent_joins, _participant_joins])
@pytest.mark.parametrize("how", ["unsent", "unheard", "lapsed"])
def test_etcd_stands_still_at_any_call(how: str, join: Callable[[Troubled], str]) -> None:
    """E01, E02: any one call of a newcomer is not answered, or its lease has ended by then: it joins all the same."""
    at = 1
    while True:
        store = Troubled(MemoryServer(time.monotonic), how, at)
        name = join(store)
        if store.calls < at:
            break
        # A lease that ends after registering is the member's business: it registers again.
        assert name == "alpha" or how == "lapsed", f"call {at}"
        at += 1
    assert at > 6, "it makes more calls than these"


def test_no_answer_for_long_enough() -> None:
    """L2: who waits in vain says for how long, and why; one that is told to leave does not wait any longer."""

    store = MemoryStore(MemoryServer(time.monotonic))
    store.close()

    def ask() -> Conversation[None]:
        yield Read("key")

    with pytest.raises(StoreError, match=r"etcd has not answered for 0 s .--etcd.: got this client"):
        StoreDriver(store, print, time).run(ride_out(ask, 0.0, print))
    with pytest.raises(ToldToLeaveError, match="told to leave before the run was joined"):
        StoreDriver(store, print, time, told_to_leave=lambda: True).run(ride_out(ask, 600.0, print))
