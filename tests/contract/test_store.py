"""What every store promises: the same tests for the model in memory and for real etcd servers."""

from __future__ import annotations

from typing import Literal

import pytest

from elasticrt.store.protocol import Changes, Compare, Delete, LeaseLost, Put, StoreError, StoreRefused, Txn
from tests.contract.conftest import Inbox, World, values
from tests.servers import wait_until


def test_revisions(world: World) -> None:
    """A key carries create and mod revision, and a deletion starts them anew."""
    store = world.store()
    key = world.prefix + "k"
    first = world.put(store, "k", b"1")
    second = world.put(store, "k", b"2")
    entry = store.read(key).get(key)
    assert entry is not None
    assert (entry.value, entry.create_revision, entry.mod_revision) == (b"2", first, second)
    assert second == first + 1
    store.commit(Txn((), (Delete(key),)))
    third = world.put(store, "k", b"3")
    entry = store.read(key).get(key)
    assert entry is not None
    assert (entry.create_revision, entry.mod_revision) == (third, third)


def test_reading(world: World) -> None:
    """A read gives the keys of a prefix in order, cut to the limit, with the store's revision."""
    store = world.store()
    for key in ("b", "a", "c/1", "c/2"):
        revision = world.put(store, key, key.encode())
    world.put(store, "b", b"again")
    revision += 1
    everything = store.read(world.prefix)
    assert [kv.key[len(world.prefix) :] for kv in everything.keys] == ["a", "b", "c/1", "c/2"]
    assert everything.revision == revision
    assert values(store.read(world.prefix + "c/").keys) == {
        world.prefix + "c/1": b"c/1",
        world.prefix + "c/2": b"c/2",
    }
    limited = store.read(world.prefix, limit=2)
    assert [kv.key[len(world.prefix) :] for kv in limited.keys] == ["a", "b"]
    oldest = store.read(world.prefix, limit=1, by_create=True)
    assert [kv.key[len(world.prefix) :] for kv in oldest.keys] == ["b"]
    assert [kv.key[len(world.prefix) :] for kv in store.read(world.prefix, by_create=True).keys] == [
        "b",
        "a",
        "c/1",
        "c/2",
    ]
    assert store.read(world.prefix + "c").keys == ()
    assert len(store.read(world.prefix + "none").keys) == 0


def test_one_identity(world: World) -> None:
    """All reads of one store name the same identity, and a second client sees what the first wrote."""
    one, two = world.store(), world.store()
    world.put(one, "k", b"v")
    snapshot = two.read(world.prefix)
    assert values(snapshot.keys) == {world.prefix + "k": b"v"}
    assert snapshot.store_id
    assert snapshot.store_id == one.read(world.prefix).store_id


@pytest.mark.parametrize(
    ("key", "target", "back", "expected"),
    [
        ("there", "create", 1, True),
        ("there", "create", 0, False),
        ("there", "mod", 0, True),
        ("there", "mod", 1, False),
        ("absent", "create", None, True),
        ("absent", "mod", None, True),
        ("there", "create", None, False),
        ("there", "mod", None, False),
    ],
)
def test_compare(world: World, key: str, target: Literal["create", "mod"], back: int | None, expected: bool) -> None:
    """A guard holds exactly when the key has this revision (`back` before its newest, None: 0, as of no key)."""
    store = world.store()
    world.put(store, "there", b"old")
    revision = world.put(store, "there", b"new")
    compare = Compare(world.prefix + key, target, 0 if back is None else revision - back)
    assert store.commit(Txn((compare,), (Put(world.prefix + "mark", b""),))).succeeded is expected
    assert len(store.read(world.prefix + "mark").keys) == int(expected)


def test_compare_value_and_lease(world: World) -> None:
    """A guard by value or by lease holds for exactly this value or lease, and for no key only where it is lease 0."""
    store = world.store()
    world.put(store, "there", b"value")
    lease = store.grant(30.0).lease_id
    store.commit(Txn((), (Put(world.prefix + "leased", b"", lease),)))
    guards: list[tuple[str, Literal["lease", "value"], int | bytes, bool]] = [
        ("there", "value", b"value", True),
        ("there", "value", b"valu", False),
        ("absent", "value", b"value", False),
        ("leased", "lease", lease, True),
        ("leased", "lease", lease + 1, False),
        ("there", "lease", 0, True),
        ("absent", "lease", lease, False),
        ("absent", "lease", 0, True),
    ]
    for key, target, expected, holds in guards:
        compare = Compare(world.prefix + key, target, expected)
        assert store.commit(Txn((compare,), (Put(world.prefix + "mark", b""),))).succeeded is holds, compare
    store.revoke(lease)


def test_transaction_is_atomic(world: World) -> None:
    """All operations of a transaction happen at one revision; with one guard failing none does."""
    store = world.store()
    guard = Compare(world.prefix + "x", "mod", world.put(store, "x", b"old"))
    for key in ("d/1", "d/2", "stay"):
        before = world.put(store, key, b"old")
    operations = (
        Put(world.prefix + "x", b"new"),
        Put(world.prefix + "y", b"new"),
        Delete(world.prefix + "d/"),
    )
    result = store.commit(Txn((guard,), operations))
    assert (result.succeeded, result.revision) == (True, before + 1)
    snapshot = store.read(world.prefix)
    assert values(snapshot.keys) == {
        world.prefix + "stay": b"old",
        world.prefix + "x": b"new",
        world.prefix + "y": b"new",
    }
    assert {kv.mod_revision for kv in snapshot.keys if kv.value == b"new"} == {before + 1}
    again = store.commit(Txn((guard, Compare(world.prefix + "y", "mod", before + 1)), operations))
    assert (again.succeeded, again.revision) == (False, before + 1)


def test_nothing_changed_is_no_revision(world: World) -> None:
    """Deleting what is not there, and an empty transaction, succeed and leave the revision."""
    store = world.store()
    revision = world.put(store, "k")
    for operations in ((Delete(world.prefix + "none"),), ()):
        result = store.commit(Txn((), operations))
        assert (result.succeeded, result.revision) == (True, revision)


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        ((Put("k", b"1"), Put("k", b"2")), "duplicate key"),
        ((Put("k/1", b"1"), Delete("k/")), "duplicate key"),
        (tuple(Put(f"k{n}", b"") for n in range(129)), "too many operations"),
        ((Put("k", b"x" * 1_600_000),), "too large"),
        ((Put("", b"x"),), "key is not provided"),
    ],
)
def test_refused_transactions(world: World, operations: tuple[Put | Delete, ...], words: str) -> None:
    """What etcd refuses is refused with its words, and changes nothing."""
    store = world.store()
    revision = world.put(store, "before")
    with pytest.raises(StoreRefused, match=words):
        store.commit(Txn((), operations))
    assert store.read(world.prefix).revision == revision


def test_largest_transaction(world: World) -> None:
    """128 operations and a value of 1 MiB are accepted."""
    store = world.store()
    assert store.commit(Txn((), tuple(Put(f"{world.prefix}{n}", b"") for n in range(128)))).succeeded
    world.put(store, "large", b"x" * (1 << 20))
    snapshot = store.read(world.prefix)
    assert len(snapshot.keys) == 129
    assert sum(len(kv.value) for kv in snapshot.keys) == 1 << 20


def test_large_reads(world: World) -> None:
    """A read of more than 4 MiB, gRPC's usual limit, arrives whole."""
    store = world.store()
    for n in range(6):
        world.put(store, str(n), bytes([n]) * (1 << 20))
    assert sum(len(kv.value) for kv in store.read(world.prefix).keys) == 6 << 20


def test_keys_are_any_text(world: World) -> None:
    """Keys and prefixes may hold any character; values any byte."""
    store = world.store()
    names = ["grün/ключ", "\U0010ffff", "a b\n", "\x7f"]
    for name in names:
        world.put(store, name, bytes(range(256)))
    assert {kv.key for kv in store.read(world.prefix).keys} == {world.prefix + name for name in names}
    assert len(store.read(world.prefix + "\U0010ffff").keys) == 1
    assert len(store.read(world.prefix + "grün/").keys) == 1


def test_lease(world: World) -> None:
    """A lease binds keys; revoking deletes them at one revision, and revoking twice is no error."""
    store, inbox = world.store(), Inbox()
    lease = store.grant(60)
    assert lease.ttl_s >= 60
    world.put(store, "b", b"", lease.lease_id)
    world.put(store, "a", b"", lease.lease_id)
    revision = world.put(store, "free")
    assert 0 < store.keep_alive(lease.lease_id) <= lease.ttl_s
    entry = store.read(world.prefix + "a").keys[0]
    assert entry.lease == lease.lease_id
    watch = store.watch(world.prefix, inbox, from_revision=revision + 1)
    store.revoke(lease.lease_id)
    store.revoke(lease.lease_id)
    events = inbox.wait(2)
    assert [(event.key[-1], event.value, event.mod_revision) for event in events] == [
        ("a", None, revision + 1),
        ("b", None, revision + 1),
    ]
    assert [kv.key for kv in store.read(world.prefix).keys] == [world.prefix + "free"]
    with pytest.raises(LeaseLost):
        store.keep_alive(lease.lease_id)
    watch.cancel()


def test_key_changes_its_lease(world: World) -> None:
    """A key written again belongs to the lease of the last writing only."""
    store = world.store()
    one, two = store.grant(60), store.grant(60)
    assert one.lease_id != two.lease_id
    world.put(store, "k", b"", one.lease_id)
    world.put(store, "k", b"", two.lease_id)
    world.put(store, "l", b"", two.lease_id)
    world.put(store, "l", b"")
    store.revoke(one.lease_id)
    assert len(store.read(world.prefix).keys) == 2
    store.revoke(two.lease_id)
    assert [kv.key for kv in store.read(world.prefix).keys] == [world.prefix + "l"]


def test_dead_lease(world: World) -> None:
    """A transaction that writes under a dead lease changes nothing and says so; one whose guard fails does not care."""
    store = world.store()
    lease = store.grant(60)
    store.revoke(lease.lease_id)
    operations = (Put(world.prefix + "free", b""), Put(world.prefix + "bound", b"", lease.lease_id))
    with pytest.raises(LeaseLost):
        store.commit(Txn((), operations))
    assert len(store.read(world.prefix).keys) == 0
    unmet = Compare(world.prefix + "none", "mod", 1)
    assert not store.commit(Txn((unmet,), operations)).succeeded


def test_lease_expires(world: World) -> None:
    """A lease that nobody renews ends with its keys; granted is at least what was asked (E18)."""
    store, inbox = world.store(), Inbox()
    lease = store.grant(0.3)
    assert lease.ttl_s >= 0.3
    revision = world.put(store, "k", b"", lease.lease_id)
    watch = store.watch(world.prefix, inbox, from_revision=revision + 1)
    world.elapse(lease.ttl_s)
    assert inbox.wait(1)[0].value is None
    with pytest.raises(LeaseLost):
        store.keep_alive(lease.lease_id)
    store.revoke(lease.lease_id)
    watch.cancel()


def test_nonsense_lease(world: World) -> None:
    """A lease that was never granted is lost."""
    with pytest.raises(LeaseLost):
        world.store().keep_alive(123456789)


def test_watch_follows(world: World) -> None:
    """A watch delivers every change of its prefix in order, and nothing of its neighbours."""
    store, all_of_it, one_key = world.store(), Inbox(), Inbox()
    start = store.read(world.prefix).revision + 1
    watches = [
        store.watch(world.prefix + "w/", all_of_it, from_revision=start),
        store.watch(world.prefix + "w/1", one_key, from_revision=start),
    ]
    world.put(store, "w", b"")
    world.put(store, "w/1", b"a")
    world.put(store, "w/10", b"b")
    store.commit(Txn((), (Delete(world.prefix + "w/"), Put(world.prefix + "x", b""))))
    deletion = store.read(world.prefix).revision
    events = all_of_it.wait(4)
    assert [(event.key[len(world.prefix) :], event.value and event.value.value) for event in events] == [
        ("w/1", b"a"),
        ("w/10", b"b"),
        ("w/1", None),
        ("w/10", None),
    ]
    assert [event.mod_revision for event in events[2:]] == [deletion, deletion]
    assert [event.key for event in one_key.wait(2)] == [world.prefix + "w/1"] * 2
    for inbox in (all_of_it, one_key):
        newest = [n.events[-1].mod_revision == n.revision for n in inbox.notices if isinstance(n, Changes) and n.events]
        assert all(newest)
    for watch in watches:
        watch.cancel()


def test_watch_replays(world: World) -> None:
    """A watch from an old revision delivers what happened since, once, and goes on."""
    store, inbox = world.store(), Inbox()
    world.put(store, "k", b"0")
    start = world.put(store, "k", b"1")
    world.put(store, "k", b"2")
    watch = store.watch(world.prefix, inbox, from_revision=start)
    inbox.wait(2)
    world.put(store, "k", b"3")
    assert [event.value and event.value.value for event in inbox.wait(3)] == [b"1", b"2", b"3"]
    watch.cancel()


@pytest.mark.parametrize("back", [0, 1])
def test_watch_of_compacted_history(world: World, back: int) -> None:
    """A watch that needs forgotten history says so and ends; after a new read it works (E06)."""
    store, inbox = world.store(), Inbox()
    world.put(store, "k", b"0")
    start = world.put(store, "k", b"1")
    # The deletion is the compacted revision itself: etcd keeps no trace of it, and would skip it without a word.
    compacted = store.commit(Txn((), (Delete(world.prefix + "k"),))).revision
    world.compact(compacted)
    store.watch(world.prefix, inbox, from_revision=compacted if back == 0 else start)
    wait_until(lambda: inbox.resyncs, "the watch was told")
    assert inbox.resyncs == ["compacted"]
    world.put(store, "k", b"2")
    snapshot = store.read(world.prefix)
    after = Inbox()
    watch = store.watch(world.prefix, after, from_revision=snapshot.revision + 1)
    world.put(store, "k", b"3")
    assert [event.value and event.value.value for event in after.wait(1)] == [b"3"]
    assert inbox.events == []
    watch.cancel()


def test_watch_from_the_future(world: World) -> None:
    """A revision that this store has not reached was read from another store: the watch is told (E05)."""
    store, inbox = world.store(), Inbox()
    store.watch(world.prefix, inbox, from_revision=store.read(world.prefix).revision + 1000)
    wait_until(lambda: inbox.resyncs, "the watch was told")
    assert inbox.resyncs == ["replaced"]


def test_cancelled_watch_is_silent(world: World) -> None:
    """After `cancel` a sink hears nothing; other watches go on."""
    store, cancelled, other = world.store(), Inbox(), Inbox()
    start = world.put(store, "k") + 1
    watch = store.watch(world.prefix, cancelled, from_revision=start)
    other_watch = store.watch(world.prefix, other, from_revision=start)
    world.put(store, "k", b"1")
    cancelled.wait(1)
    watch.cancel()
    watch.cancel()
    world.put(store, "k", b"2")
    other.wait(2)
    other_watch.cancel()
    late = Inbox()
    late_watch = store.watch(world.prefix, late, from_revision=start)
    late.wait(2)
    late_watch.cancel()
    assert len(cancelled.events) == 1
    assert not cancelled.resyncs


def test_closed_store(world: World) -> None:
    """A closed store refuses to work, silences its watches, and leaves leases alive."""
    store, inbox = world.store(), Inbox()
    lease = store.grant(60)
    start = world.put(store, "k", b"", lease.lease_id) + 1
    store.watch(world.prefix, inbox, from_revision=start)
    store.close()
    store.close()
    with pytest.raises(StoreError):
        store.read(world.prefix)
    with pytest.raises(StoreError):
        store.watch(world.prefix, inbox, from_revision=1)
    other, witness = world.store(), Inbox()
    watch = other.watch(world.prefix, witness, from_revision=start)
    world.put(other, "l")
    witness.wait(1)
    assert len(other.read(world.prefix).keys) == 2
    assert inbox.notices == []
    other.revoke(lease.lease_id)
    watch.cancel()


def test_compare_and_swap_counts(world: World) -> None:
    """Two clients that increment by compare-and-swap lose no increment."""
    stores = [world.store(), world.store()]
    world.put(stores[0], "n", b"0")
    key = world.prefix + "n"
    for turn in range(20):
        stale = stores[turn % 2].read(key).keys[0]
        for store in stores:
            fresh = int(stale.value) + 1
            guard = Compare(key, "mod", stale.mod_revision)
            store.commit(Txn((guard,), (Put(key, str(fresh).encode()),)))
    assert stores[0].read(key).keys[0].value == b"20"
