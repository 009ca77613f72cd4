"""The status of a lease: as a table, and from when an answer counts."""

from __future__ import annotations

import queue

import pytest

from elasticrt.store.lease_session import SUSPENDED_SHARE, LeaseSession, SessionState, judge
from elasticrt.store.protocol import Lease
from tests.memory_store import MemoryServer, MemoryStore


@pytest.mark.parametrize(
    ("acked_at", "looked_at", "now", "lost", "expected"),
    [
        # TTL is 6 s throughout, so that two thirds are 4 s.
        (0.0, 0.0, 0.0, False, ("connected", "etcd answers")),
        (0.0, 3.5, 3.9, False, ("connected", "etcd answers")),
        (0.0, 3.9, 4.0, False, ("suspended", "no answer from etcd for 4.0 s")),
        (0.0, 4.0, 4.1, False, ("suspended", "no answer from etcd for 4.1 s")),
        (0.0, 100.0, 100.1, False, ("suspended", "no answer from etcd for 100.1 s")),
        # This process stood still: nothing it knows counts, not even an answer read after it woke up.
        (0.0, 0.0, 6.1, False, ("suspended", "paused for 6.1 s")),
        (10.0, 2.0, 10.0, False, ("suspended", "paused for 8.0 s")),
        # At most one TTL between two looks is the scheduler's, not a pause.
        (10.0, 4.0, 10.0, False, ("connected", "etcd answers")),
        # etcd's own word is final, whatever the clock says.
        (9.9, 9.9, 10.0, True, ("lost", "etcd says that the lease is gone")),
        (0.0, 0.0, 99.0, True, ("lost", "etcd says that the lease is gone")),
    ],
)
def test_judge(acked_at: float, looked_at: float, now: float, lost: bool, expected: tuple[str, str]) -> None:
    """A lease is connected for two thirds of its TTL after the last answer, unless etcd or the clock say otherwise."""
    assert judge(ttl_s=6.0, acked_at=acked_at, looked_at=looked_at, now=now, lost=lost) == expected


class SlowStore(MemoryStore):
    """A store whose answers to questions about leases are under way for `delay_s` on the session's clock."""

    def __init__(self) -> None:
        self.now = self.delay_s = 0.0
        super().__init__(MemoryServer(lambda: self.now))

    def grant(self, ttl_s: float) -> Lease:
        """See `protocol.Store`."""
        lease = super().grant(ttl_s)
        self.now += self.delay_s
        return lease

    def keep_alive(self, lease_id: int) -> float:
        """See `protocol.Store`."""
        ttl_s = super().keep_alive(lease_id)
        self.now += self.delay_s
        return ttl_s


@pytest.mark.parametrize("asked", ["grant", "keep-alive"])
def test_an_answer_counts_from_when_its_question_was_sent(asked: str) -> None:
    """S1: etcd started the TTL anew before it answered, so an answer that was long under way is old when it comes."""
    store, states = SlowStore(), queue.Queue[SessionState]()
    session = LeaseSession(store, 1.0, states.put, now=lambda: store.now)
    late_s = SUSPENDED_SHARE + 0.1
    try:
        if asked == "grant":
            store.delay_s = late_s
        session.grant()
        if asked == "keep-alive":
            assert states.get(timeout=20).status == "connected"
            store.delay_s = late_s
        state = states.get(timeout=20)
        assert (state.status, state.reason) == ("suspended", f"no answer from etcd for {late_s:.1f} s")
    finally:
        session.close(timeout_s=20)
