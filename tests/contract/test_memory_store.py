"""What only the model can do: virtual time, replacement, synchronous delivery. The rest is in tests/contract."""

from __future__ import annotations

import pytest

from elasticrt.store.protocol import Changes, Compare, Delete, LeaseLost, Put, Resync, StoreRefused, Txn
from tests.memory_store import MemoryServer, MemoryStore


def write(store: MemoryStore, *keys: str, lease: int = 0) -> int:
    """One transaction."""
    return store.commit(Txn((), tuple(Put(key, b"", lease) for key in keys))).revision


def test_leases_end_in_virtual_time() -> None:
    """A lease ends when an operation looks after its deadline, to the instant, unless it was renewed."""
    clock = [0.0]
    server = MemoryServer(lambda: clock[0])
    store = MemoryStore(server)
    kept, left = store.grant(5), store.grant(2.5)
    assert left.ttl_s == 3.0
    write(store, "/kept", lease=kept.lease_id)
    write(store, "/left", lease=left.lease_id)
    clock[0] = 2.9
    assert len(store.read("/").keys) == 2
    assert store.keep_alive(kept.lease_id) == 5.0
    clock[0] = 3.0
    assert [kv.key for kv in store.read("/").keys] == ["/kept"]
    with pytest.raises(LeaseLost):
        store.keep_alive(left.lease_id)


def test_sinks_are_called_in_order() -> None:
    """Watches hear of a change in the order in which they were made, before the writing returns."""
    server = MemoryServer(lambda: 0.0)
    store = MemoryStore(server)
    heard: list[str] = []
    for name, range_ in (("one", "/a/"), ("two", "/a/b"), ("three", "/"), ("four", "/b/")):
        store.watch(range_, lambda _, name=name: heard.append(name), from_revision=2)  # type: ignore[misc]  # The default binds the loop's name.
    write(store, "/a/b", "/a/c")
    assert heard == ["one", "two", "three"]


def test_sink_that_writes() -> None:
    """A sink may write: everybody hears of the first change before the second."""
    server = MemoryServer(lambda: 0.0)
    store = MemoryStore(server)
    heard: list[tuple[str, int]] = []

    def answer(notice: object) -> None:
        assert isinstance(notice, Changes)
        heard.append(("answering", notice.revision))
        if notice.revision == 2:
            write(store, "a/answer")

    def listen(notice: object) -> None:
        assert isinstance(notice, Changes)
        heard.append(("listening", notice.revision))

    store.watch("a/", answer, from_revision=2)
    store.watch("a/", listen, from_revision=2)
    write(store, "a/question")
    assert heard == [("answering", 2), ("listening", 2), ("answering", 3), ("listening", 3)]


def test_replaced_store() -> None:
    """After a replacement nothing is left, the identity differs, and every watch is told once, in order (E05)."""
    server = MemoryServer(lambda: 0.0, "old")
    store = MemoryStore(server)
    lease = store.grant(5)
    write(store, "k", lease=lease.lease_id)
    heard: list[tuple[int, object]] = []
    for number in range(3):
        store.watch("k", lambda notice, number=number: heard.append((number, notice)), from_revision=3)  # type: ignore[misc]  # The default binds the loop's number.
    server.replace("new")
    assert heard == [(number, Resync("replaced")) for number in range(3)]
    snapshot = store.read("/")
    assert (snapshot.store_id, snapshot.revision, snapshot.keys) == ("new", 1, ())
    with pytest.raises(LeaseLost):
        store.keep_alive(lease.lease_id)
    write(store, "k")
    assert len(heard) == 3


def test_compaction_bounds() -> None:
    """Only revisions between the last compaction and now can be compacted, as in etcd."""
    server = MemoryServer(lambda: 0.0)
    store = MemoryStore(server)
    for _ in range(3):
        write(store, "k")
    server.compact(3)
    for revision in (3, 2, 5):
        with pytest.raises(StoreRefused):
            server.compact(revision)
    server.compact(4)


def test_ten_thousand_keys() -> None:
    """A large store stays exact: reads, guarded writes and a prefix deletion over 10,000 keys with leases."""
    server = MemoryServer(lambda: 0.0)
    store = MemoryStore(server)
    for number in range(10_000):
        lease = store.grant(5).lease_id
        absent = Compare(f"/m/{number}", "create", 0)
        assert store.commit(Txn((absent,), (Put(f"/m/{number}", b"", lease),))).succeeded
    assert len(store.read("/m/").keys) == 10_000
    assert [kv.key for kv in store.read("/m/", by_create=True, limit=3).keys] == ["/m/0", "/m/1", "/m/2"]
    assert [kv.key for kv in store.read("/m/999").keys] == ["/m/999"]
    store.commit(Txn((), (Delete("/m/"),)))
    assert len(store.read("/").keys) == 0
