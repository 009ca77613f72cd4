"""The words of a session, on a real server: connected, suspended, lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from elasticrt.store.etcd import EtcdStore
from elasticrt.store.lease_session import LeaseSession, SessionState
from elasticrt.store.protocol import Address, LeaseLost, StoreUnavailable
from tests.servers import EtcdServer, Proxy, free_port, wait_until


class Words:
    """A session's sink."""

    def __init__(self) -> None:
        self.states: list[SessionState] = []

    def __call__(self, state: SessionState) -> None:
        """Be the sink."""
        self.states.append(state)

    def __str__(self) -> str:
        return " ".join(state.status for state in self.states)

    def wait(self, words: str) -> None:
        """Until exactly these words have come."""
        wait_until(lambda: str(self) == words, f"the words were {words!r}, got {self.states}")


@contextmanager
def session_at(
    address: Address, words: Words, *, ttl_s: float = 1.0, **options: object
) -> Iterator[tuple[EtcdStore, LeaseSession]]:
    """A session and its store."""
    store = EtcdStore((address,), timeout_s=1.0)
    session = LeaseSession(store, ttl_s, words, **options)  # type: ignore[arg-type]  # Only `now`, which a test gives.
    try:
        yield store, session
    finally:
        session.close(timeout_s=5)
        store.close()


def test_kept_alive(etcd: EtcdServer) -> None:
    """A session outlives its TTL and says so once; closing it ends the lease at once."""
    words = Words()
    with session_at(etcd.address, words) as (store, session):
        lease = session.grant()
        end = time.monotonic() + 2.5 * lease.ttl_s
        while time.monotonic() < end:
            assert store.keep_alive(lease.lease_id) > 0
            time.sleep(0.2)  # Time itself is what is tested here.
        assert str(words) == "connected"
        assert words.states[0].lease_id == lease.lease_id
        session.close(timeout_s=5)
        with pytest.raises(LeaseLost):
            store.keep_alive(lease.lease_id)


def test_lease_revoked_by_hand(etcd: EtcdServer) -> None:
    """A revocation by hand is noticed with the next keep-alive; a new lease makes it connected again (E08)."""
    words = Words()
    with session_at(etcd.address, words) as (store, session):
        first = session.grant()
        store.revoke(first.lease_id)
        words.wait("connected lost")
        second = session.grant()
        assert second.lease_id != first.lease_id
        words.wait("connected lost connected")
        assert words.states[-1].lease_id == second.lease_id
        store.revoke(second.lease_id)
        words.wait("connected lost connected lost")


def test_silent_server(etcd: EtcdServer) -> None:
    """When answers stop coming the session is suspended by its own clock, before the lease is gone (E13)."""
    words = Words()
    # A question goes out every 1.25 s at most, and etcd gets it: the lease lives throughout.
    with Proxy(etcd.address) as proxy, session_at(proxy.address, words, ttl_s=3.0) as (_, session):
        lease = session.grant()
        proxy.set("swallow")
        words.wait("connected suspended")
        assert "no answer from etcd for" in words.states[-1].reason
        proxy.set("refuse")
        proxy.set("forward")
        words.wait("connected suspended connected")
        assert {state.lease_id for state in words.states} == {lease.lease_id}


def test_server_killed_and_restarted(etcd: EtcdServer) -> None:
    """A restart longer than the TTL suspends; leases start anew with the server, so the session recovers (E04)."""
    words = Words()
    with session_at(etcd.address, words) as (_, session):
        session.grant()
        etcd.stop()
        words.wait("connected suspended")
        etcd.restart()
        words.wait("connected suspended connected")


def test_paused_process(etcd: EtcdServer) -> None:
    """A process that stood still is suspended before it believes anything, and connected by a fresh answer (A05)."""
    words, jump = Words(), [0.0]
    with session_at(etcd.address, words, now=lambda: time.monotonic() + jump[0]) as (_, session):
        session.grant()
        jump[0] = 60.0
        words.wait("connected suspended connected")
        assert words.states[1].reason.startswith("paused for 60.")


def test_no_server() -> None:
    """A session that can't be opened says why and has no thread or word."""
    words = Words()
    with (
        session_at(Address("http", "127.0.0.1", free_port()), words) as (_, session),
        pytest.raises(StoreUnavailable, match="grant a lease"),
    ):
        session.grant()
    assert words.states == []
