"""The model of etcd: revisions, leases, transactions, watches and compaction, in memory and deterministic.

It is the store of the deterministic simulator and the reference in the contract suite, which runs the same tests
against it and against real servers. It has no thread, clock or random source of its own: `now` is given, leases expire
when an operation looks, and watch sinks are called synchronously after the change, in the order in which the watches
were made.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from elasticrt.store.protocol import (
    Changes,
    Compare,
    Delete,
    Event,
    KeyValue,
    Lease,
    LeaseLost,
    Put,
    RangeRead,
    Resync,
    StoreRefused,
    StoreUnavailable,
    Txn,
    TxnResult,
    WatchSink,
    covers,
)

OPERATIONS_MAX = 128
"""etcd's --max-txn-ops."""

REQUEST_BYTES_MAX = 1_572_864
"""etcd's --max-request-bytes, 1.5 MiB."""


@dataclass
class _LeaseState:
    ttl_s: float
    expires_at: float
    keys: set[str] = field(default_factory=set)


class MemoryWatch:
    """A watch on a `MemoryServer`."""

    def __init__(self, server: MemoryServer, number: int, range_: str, sink: WatchSink) -> None:
        self.number = number
        self.range = range_
        self.sink = sink
        self.active = True
        self._server = server

    def cancel(self) -> None:
        """See `protocol.Watch`. Cancelling twice is harmless."""
        self._server.forget(self)


COMPARED = {"create": "create_revision", "mod": "mod_revision", "lease": "lease", "value": "value"}


class MemoryServer:
    """One etcd server as a value that changes. Several `MemoryStore`s can share it, as agents share an etcd.

    `now` returns seconds on any monotonic scale. Beyond what `MemoryStore` offers there is what an operator can do:
    `compact`, `replace`, and `expire` for whoever drives virtual time.
    """

    def __init__(self, now: Callable[[], float], store_id: str = "memory", *, lease_ttl_s_min: int = 1) -> None:
        self.store_id = store_id
        self.revision = 1  # An empty etcd answers with revision 1; the first write makes revision 2.
        self.compacted = 0
        self._now = now
        self._lease_ttl_s_min = lease_ttl_s_min
        self._keys: list[str] = []
        self._values: dict[str, KeyValue] = {}
        self._history: list[Event] = []
        self._leases: dict[int, _LeaseState] = {}
        self._expiries: list[tuple[float, int]] = []
        self._lease_count = 0
        self._watch_count = 0
        self._watches: dict[str, dict[int, MemoryWatch]] = {}
        self._outbox: deque[tuple[MemoryWatch, Changes | Resync]] = deque()
        self._delivering = False

    # Reading and writing.

    def read(self, range_: str, *, limit: int = 0, by_create: bool = False) -> RangeRead:
        """See `protocol.Store.read`."""
        self.expire()
        found = [self._values[key] for key in self._range(range_)]
        if by_create:
            oldest_first = attrgetter("create_revision", "key")
            found = heapq.nsmallest(limit, found, key=oldest_first) if limit else sorted(found, key=oldest_first)
        elif limit:
            found = found[:limit]
        return RangeRead(tuple(found), self.revision, self.store_id)

    def commit(self, txn: Txn) -> TxnResult:
        """See `protocol.Store.commit`."""
        self.expire()
        _check_request(txn)
        if not all(self._holds(compare) for compare in txn.compares):
            return TxnResult(False, self.revision)
        for operation in txn.operations:
            if isinstance(operation, Put) and operation.lease and operation.lease not in self._leases:
                raise LeaseLost(f"lease {operation.lease:x} does not exist (memory store, {txn.why or 'transaction'})")
        revision = self.revision + 1
        events: list[Event] = []
        for operation in txn.operations:
            if isinstance(operation, Put):
                events.append(self._put(operation, revision))
            else:
                doomed = list(self._range(operation.key))
                events.extend(self._remove(key, revision) for key in doomed)
        self._publish(events, revision)
        return TxnResult(True, self.revision)

    # Leases.

    def grant(self, ttl_s: float) -> Lease:
        """See `protocol.Store.grant`. Lease numbers count from 1, so that a run is reproducible."""
        self.expire()
        self._lease_count += 1
        granted_s = float(max(math.ceil(ttl_s), self._lease_ttl_s_min))
        self._leases[self._lease_count] = _LeaseState(granted_s, 0.0)
        self._renew(self._lease_count)
        return Lease(self._lease_count, granted_s)

    def keep_alive(self, lease_id: int) -> float:
        """See `protocol.Store.keep_alive`."""
        self.expire()
        if lease_id not in self._leases:
            raise LeaseLost(f"lease {lease_id:x} does not exist (memory store)")
        self._renew(lease_id)
        return self._leases[lease_id].ttl_s

    def revoke(self, lease_id: int) -> None:
        """See `protocol.Store.revoke`."""
        self.expire()
        if lease_id in self._leases:
            self._end_lease(lease_id)

    def expire(self) -> None:
        """End every lease whose time is over. Every operation does this first."""
        now = self._now()
        while self._expiries and self._expiries[0][0] <= now:
            _, lease_id = heapq.heappop(self._expiries)
            state = self._leases.get(lease_id)
            # An entry is stale when the lease was renewed or revoked since it was pushed.
            if state is not None and state.expires_at <= now:
                self._end_lease(lease_id)

    # Watches.

    def watch(self, range_: str, sink: WatchSink, *, from_revision: int) -> MemoryWatch:
        """See `protocol.Store.watch`. Old changes are delivered before this returns, later ones as they happen."""
        self.expire()
        self._watch_count += 1
        watch = MemoryWatch(self, self._watch_count, range_, sink)
        if from_revision > self.revision + 1:
            self._outbox.append((watch, Resync("replaced")))
        elif from_revision <= self.compacted:
            self._outbox.append((watch, Resync("compacted")))
        else:
            self._watches.setdefault(range_, {})[watch.number] = watch
            start = bisect_left(self._history, from_revision, key=attrgetter("mod_revision"))
            old = tuple(event for event in self._history[start:] if covers(range_, event.key))
            if old:
                self._outbox.append((watch, Changes(old, old[-1].mod_revision)))
        self._deliver()
        return watch

    def forget(self, watch: MemoryWatch) -> None:
        """Cancel one watch."""
        watch.active = False
        group = self._watches.get(watch.range, {})
        group.pop(watch.number, None)
        if not group:
            self._watches.pop(watch.range, None)

    # What an operator can do.

    def compact(self, revision: int) -> None:
        """Forget the history up to `revision`; watches that still need it are told to resync when they are made."""
        self.expire()
        if not self.compacted < revision <= self.revision:
            raise StoreRefused(
                f"compaction to {revision} (memory store): expected {self.compacted + 1}..{self.revision}"
            )
        self.compacted = revision
        self._history = self._history[bisect_left(self._history, revision + 1, key=attrgetter("mod_revision")) :]

    def replace(self, store_id: str) -> None:
        """Another, empty store answers from now on, as after a wipe: every watch is told to resync."""
        self.store_id = store_id
        self.revision = 1
        self.compacted = 0
        self._keys, self._values, self._history = [], {}, []
        self._leases, self._expiries = {}, []
        orphans = sorted((w for group in self._watches.values() for w in group.values()), key=attrgetter("number"))
        self._watches = {}
        self._outbox.extend((watch, Resync("replaced")) for watch in orphans)
        self._deliver()

    def _range(self, range_: str) -> Iterator[str]:
        for index in range(bisect_left(self._keys, range_), len(self._keys)):
            if not covers(range_, self._keys[index]):
                return
            yield self._keys[index]

    def _holds(self, compare: Compare) -> bool:
        entry = self._values.get(compare.key)
        actual = 0 if entry is None else getattr(entry, COMPARED[compare.target])
        return bool(actual == compare.expected)

    def _put(self, put: Put, revision: int) -> Event:
        old = self._values.get(put.key)
        if old is None:
            insort(self._keys, put.key)
            entry = KeyValue(put.key, put.value, revision, revision, put.lease)
        else:
            entry = KeyValue(put.key, put.value, old.create_revision, revision, put.lease)
            self._detach(old)
        if put.lease:
            self._leases[put.lease].keys.add(put.key)
        self._values[put.key] = entry
        return Event(put.key, entry, revision)

    def _remove(self, key: str, revision: int) -> Event:
        self._detach(self._values.pop(key))
        del self._keys[bisect_left(self._keys, key)]
        return Event(key, None, revision)

    def _detach(self, entry: KeyValue) -> None:
        if entry.lease in self._leases:
            self._leases[entry.lease].keys.discard(entry.key)

    def _renew(self, lease_id: int) -> None:
        state = self._leases[lease_id]
        state.expires_at = self._now() + state.ttl_s
        heapq.heappush(self._expiries, (state.expires_at, lease_id))

    def _end_lease(self, lease_id: int) -> None:
        state = self._leases.pop(lease_id)
        revision = self.revision + 1
        self._publish([self._remove(key, revision) for key in sorted(state.keys)], revision)

    def _publish(self, events: list[Event], revision: int) -> None:
        if not events:
            return  # As in etcd: a transaction that changes nothing makes no revision.
        self.revision = revision
        self._history.extend(events)
        for watch, mine in self._interested(events):
            self._outbox.append((watch, Changes(tuple(mine), revision)))
        self._deliver()

    def _interested(self, events: list[Event]) -> list[tuple[MemoryWatch, list[Event]]]:
        # Few prefixes have different lengths, so each event asks for its own prefixes instead of all watches.
        lengths = {len(range_) for range_ in self._watches if range_.endswith("/")}
        mine: dict[int, tuple[MemoryWatch, list[Event]]] = {}
        for event in events:
            candidates = [event.key[:length] for length in lengths if event.key[length - 1 : length] == "/"]
            for candidate in [event.key, *candidates]:
                for watch in self._watches.get(candidate, {}).values():
                    mine.setdefault(watch.number, (watch, []))[1].append(event)
        return [mine[number] for number in sorted(mine)]

    def _deliver(self) -> None:
        # A sink that writes to the store adds to the outbox of the delivery under way: order is kept, nothing nests.
        if self._delivering:
            return
        self._delivering = True
        try:
            while self._outbox:
                watch, notice = self._outbox.popleft()
                if not watch.active:
                    continue
                if isinstance(notice, Resync):
                    self.forget(watch)  # A resync is the last word of a watch.
                watch.sink(notice)
        finally:
            self._delivering = False


class MemoryStore:
    """One client of a `MemoryServer`; implements `protocol.Store`. After `close` every operation is refused."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self._watches: list[MemoryWatch] = []
        self._closed = False

    def read(self, range_: str, *, limit: int = 0, by_create: bool = False) -> RangeRead:
        """See `protocol.Store`."""
        return self._open().read(range_, limit=limit, by_create=by_create)

    def commit(self, txn: Txn) -> TxnResult:
        """See `protocol.Store`."""
        return self._open().commit(txn)

    def grant(self, ttl_s: float) -> Lease:
        """See `protocol.Store`."""
        return self._open().grant(ttl_s)

    def keep_alive(self, lease_id: int) -> float:
        """See `protocol.Store`."""
        return self._open().keep_alive(lease_id)

    def revoke(self, lease_id: int) -> None:
        """See `protocol.Store`."""
        self._open().revoke(lease_id)

    def watch(self, range_: str, sink: WatchSink, *, from_revision: int) -> MemoryWatch:
        """See `protocol.Store`."""
        watch = self._open().watch(range_, sink, from_revision=from_revision)
        self._watches = [other for other in self._watches if other.active] + [watch]
        return watch

    def close(self) -> None:
        """See `protocol.Store`."""
        for watch in self._watches:
            watch.cancel()
        self._watches = []
        self._closed = True

    def _open(self) -> MemoryServer:
        if self._closed:
            raise StoreUnavailable("this client of the memory store is closed")
        return self._server


def _check_request(txn: Txn) -> None:
    """What etcd refuses before it looks at any key. Raises StoreRefused with etcd's words."""
    where = f"memory store, {txn.why or 'transaction'}"
    if max(len(txn.operations), len(txn.compares)) > OPERATIONS_MAX:
        raise StoreRefused(f"too many operations in txn request ({where}): expected at most {OPERATIONS_MAX}")
    puts = [operation for operation in txn.operations if isinstance(operation, Put)]
    deletes = [operation for operation in txn.operations if isinstance(operation, Delete)]
    if not all(put.key for put in puts) or not all(delete.key for delete in deletes):
        raise StoreRefused(f"key is not provided ({where})")
    keys = [put.key for put in puts]
    overlap = any(covers(delete.key, key) for key in keys for delete in deletes)
    if len(set(keys)) < len(keys) or overlap:
        raise StoreRefused(f"duplicate key given in txn request ({where})")
    if sum(len(put.key) + len(put.value) for put in puts) > REQUEST_BYTES_MAX:
        raise StoreRefused(f"request is too large ({where}): expected at most {REQUEST_BYTES_MAX} bytes")
