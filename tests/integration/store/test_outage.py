"""The store while its server is killed, paused, replaced or unreachable."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from elasticrt.store.etcd import EtcdStore
from elasticrt.store.protocol import (
    Address,
    Compare,
    LeaseLost,
    Put,
    StoreRefused,
    StoreUnavailable,
    Txn,
)
from tests.contract.conftest import Inbox, compact_etcd
from tests.servers import EtcdServer, Proxy, etcd_server, free_port, wait_until


@contextmanager
def connected(*addresses: Address, timeout_s: float = 10.0) -> Iterator[EtcdStore]:
    """A client."""
    store = EtcdStore(addresses, timeout_s=timeout_s)
    try:
        yield store
    finally:
        store.close()


def put(store: EtcdStore, key: str, value: bytes = b"", lease: int = 0) -> int:
    """Write one key; the new revision."""
    return store.commit(Txn((), (Put(key, value, lease),), "write for a test")).revision


def test_restarted_server(etcd: EtcdServer) -> None:
    """A server that is stopped and comes back with its data costs nothing: leases live, watches miss nothing (E04)."""
    with connected(etcd.address) as store:
        lease = store.grant(60)
        start = put(store, "/a", b"1", lease.lease_id) + 1
        inbox, late = Inbox(), Inbox()
        store.watch("/", inbox, from_revision=start)
        put(store, "/b", b"2")
        inbox.wait(1)
        etcd.stop()
        etcd.restart()
        # Somebody else writes before this client's watch is back.
        with connected(etcd.address) as other:
            put(other, "/c", b"3")
        assert [event.key for event in inbox.wait(2)] == ["/b", "/c"]
        store.watch("/", late, from_revision=start)
        assert [event.key for event in late.wait(2)] == ["/b", "/c"]
        assert store.keep_alive(lease.lease_id) > 0
        assert store.read("/a").keys[0].lease == lease.lease_id
        assert not inbox.resyncs


def test_operations_while_the_server_is_down(etcd: EtcdServer) -> None:
    """Without a server every operation ends at its deadline, naming operation and endpoint; the watch does not spin."""
    with connected(etcd.address, timeout_s=0.5) as store:
        inbox = Inbox()
        store.watch("/", inbox, from_revision=put(store, "/a") + 1)
        # etcd 3.5.1 acknowledges a write before it has saved it (etcd-io/etcd#14370), but answers a read only then.
        store.read("/a")
        etcd.kill()
        before = resource.getrusage(resource.RUSAGE_SELF)
        for operation in (
            lambda: store.read("/"),
            lambda: put(store, "/a"),
            lambda: store.grant(5),
            lambda: store.keep_alive(1),
            lambda: store.revoke(1),
        ):
            with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{etcd.port}.*Connection refused"):
                operation()
        after = resource.getrusage(resource.RUSAGE_SELF)
        # 2.5 s have passed; a client that spins takes more than a second of processor time for them.
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
        etcd.restart()
        wait_until(lambda: _written(store, "/b"), "the store works again")
        assert inbox.wait(1)[0].key == "/b"


def _written(store: EtcdStore, key: str) -> bool:
    try:
        put(store, key)
    except StoreUnavailable:
        return False
    return True


def test_paused_server(etcd: EtcdServer) -> None:
    """A server that stands still is unavailable by the deadline, and everything goes on when it does."""
    with connected(etcd.address, timeout_s=0.5) as store:
        inbox = Inbox()
        store.watch("/", inbox, from_revision=put(store, "/a") + 1)
        etcd.pause()
        try:
            with pytest.raises(StoreUnavailable, match=r"read /.*Deadline Exceeded"):
                store.read("/")
            with pytest.raises(StoreUnavailable, match=r"effect is unknown.*Deadline Exceeded"):
                put(store, "/a")
        finally:
            etcd.resume()
        wait_until(lambda: _written(store, "/b"), "the store works again")
        wait_until(lambda: any(event.key == "/b" for event in inbox.events), "the watch goes on")
        assert not inbox.resyncs


def test_dead_endpoint_in_the_list(etcd: EtcdServer) -> None:
    """With one endpoint refusing and one silent, every operation and watch uses the one that answers (N14)."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        dead = Address("http", "127.0.0.1", free_port())
        mute = Address("http", "127.0.0.1", silent.getsockname()[1])
        with connected(dead, mute, etcd.address, timeout_s=3.0) as store:
            inbox = Inbox()
            watch = store.watch("/", inbox, from_revision=1)
            assert len(store.read("/").keys) == 0
            assert put(store, "/a") == 2
            lease = store.grant(60)
            assert store.keep_alive(lease.lease_id) > 0
            store.revoke(lease.lease_id)
            assert [event.key for event in inbox.wait(1)] == ["/a"]
            watch.cancel()
            assert store._connections.names == (str(dead), str(mute), str(etcd.address))


def test_transaction_moves_on_only_if_it_was_not_sent(etcd: EtcdServer) -> None:
    """A first transaction passes over a dead endpoint and happens once (N14, E11)."""
    dead = Address("http", "127.0.0.1", free_port())
    with connected(dead, etcd.address) as store:
        guard = Compare("/a", "create", 0)
        assert store.commit(Txn((guard,), (Put("/a", b""),))).succeeded
        entry = store.read("/a").keys[0]
        assert entry.create_revision == entry.mod_revision


def test_ambiguous_transaction(etcd: EtcdServer) -> None:
    """When the answer to a transaction is lost its effect is unknown, and it is not sent a second time (E11)."""
    with (
        Proxy(etcd.address) as proxy,
        connected(proxy.address, timeout_s=0.5) as store,
        connected(etcd.address) as other,
    ):
        put(store, "/n", b"0")
        proxy.set("swallow")
        with pytest.raises(StoreUnavailable, match="effect is unknown"):
            put(store, "/n", b"1")
        entry = other.read("/n").keys[0]
        assert (entry.value, entry.mod_revision) == (b"1", entry.create_revision + 1)
        proxy.set("refuse")
        proxy.set("forward")
        wait_until(lambda: _readable(store), "the way is free again")
        assert store.read("/n").keys[0] == entry


def _readable(store: EtcdStore) -> bool:
    try:
        store.read("/")
    except StoreUnavailable:
        return False
    return True


def test_replaced_store(etcd: EtcdServer) -> None:
    """An empty store in place of the old one has another identity, and every watch is told (E05)."""
    with connected(etcd.address) as store:
        lease = store.grant(60)
        for number in range(3):
            revision = put(store, f"/{number}", b"", lease.lease_id)
        before = store.read("/")
        inbox = Inbox()
        store.watch("/", inbox, from_revision=revision + 1)
        put(store, "/3")
        inbox.wait(1)
        etcd.stop()
        etcd.wipe()
        etcd.restart()
        wait_until(lambda: inbox.resyncs, "the watch was told")
        assert inbox.resyncs == ["replaced"]
        after = store.read("/")
        assert after.keys == ()
        assert after.store_id != before.store_id
        with pytest.raises(LeaseLost):
            store.keep_alive(lease.lease_id)


def test_store_gone_back(etcd: EtcdServer) -> None:
    """A store of the same identity whose revisions went back, as after restoring a backup, is a replaced one (E05)."""
    with connected(etcd.address) as store:
        for number in range(5):
            revision = put(store, f"/{number}")
        before = store.read("/")
        inbox = Inbox()
        store.watch("/", inbox, from_revision=revision + 1)
        put(store, "/last")
        inbox.wait(1)
        etcd.stop()
        token = etcd.token
        etcd.wipe()
        etcd.token = token  # The same cluster id, then: it is made of the token and the addresses.
        etcd.restart()
        wait_until(lambda: inbox.resyncs, "the watch was told")
        assert inbox.resyncs == ["replaced"]
        after = store.read("/")
        assert (after.store_id, after.revision) == (before.store_id, 1)


def test_compaction_while_the_watch_is_away(etcd: EtcdServer) -> None:
    """History that is compacted while a watch has lost its server is not skipped silently (E06)."""
    with Proxy(etcd.address) as proxy, connected(proxy.address) as store, connected(etcd.address) as other:
        inbox = Inbox()
        store.watch("/", inbox, from_revision=put(store, "/a") + 1)
        put(store, "/b")
        inbox.wait(1)
        proxy.set("refuse")
        for _ in range(3):
            revision = put(other, "/c")
        compact_etcd(etcd.address, revision)
        proxy.set("forward")
        wait_until(lambda: inbox.resyncs, "the watch was told")
        assert inbox.resyncs == ["compacted"]
        assert store.read("/c").keys[0].mod_revision == revision


def test_many_watches_share_one_stream(etcd: EtcdServer) -> None:
    """A hundred watches cost no more threads than one; after the last, another goes on; closing ends the thread."""
    with connected(etcd.address) as store:
        start = put(store, "/a") + 1
        inboxes = [Inbox() for _ in range(100)]
        watches = [store.watch("/", inboxes[0], from_revision=start)]
        wait_until(lambda: any(t.name == "elasticrt-watch" for t in threading.enumerate()), "the thread runs")
        put(store, "/b")
        inboxes[0].wait(1)
        threads = threading.active_count()
        watches += [store.watch("/", inbox, from_revision=start) for inbox in inboxes[1:]]
        for inbox in inboxes:
            inbox.wait(1)
        assert threading.active_count() <= threads
        for watch in watches:
            watch.cancel()
        again = Inbox()
        store.watch("/", again, from_revision=start)
        put(store, "/c")
        again.wait(2)
    assert not any(t.name == "elasticrt-watch" for t in threading.enumerate())


def test_watches_come_and_go_quickly(etcd: EtcdServer) -> None:
    """A watch that is made while the last one ends is served all the same."""
    with connected(etcd.address) as store:
        start = put(store, "/a")
        for _ in range(30):
            inbox = Inbox()
            watch = store.watch("/", inbox, from_revision=start)
            assert [event.key for event in inbox.wait(1)] == ["/a"]
            watch.cancel()


def test_not_etcd() -> None:
    """A web server in etcd's place is refused with a hint, not taken for an outage (FAULTS.md section 4, etcd)."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        address = Address("http", "127.0.0.1", web.server_port)
        try:
            with connected(address) as store, pytest.raises(StoreRefused, match=r"not etcd.*Check host and port"):
                store.read("/")
        finally:
            web.shutdown()
            thread.join(10)


def test_full_server() -> None:
    """A server out of space refuses writes in words and still answers reads and keeps leases (E07)."""
    with etcd_server(options=("--quota-backend-bytes", str(2 << 20))) as etcd, connected(etcd.address) as store:
        lease = store.grant(60)
        with pytest.raises(StoreRefused, match=r"space exceeded.*compact and defragment"):
            for number in range(200):  # etcd looks at its size only now and then, so a few more are let in.
                put(store, f"/{number % 4}", b"x" * (1 << 20))
        assert len(store.read("/").keys) >= 1
        assert store.keep_alive(lease.lease_id) > 0
