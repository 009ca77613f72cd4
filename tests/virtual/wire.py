"""The way to etcd, with everything that can go wrong on it: a `Store` for one process over the shared memory server.

A request takes time, finds etcd unreachable, loses its answer, takes effect after its sender has given up, or its
sender is stopped in the middle of it. Every watch is a channel of its own, with its own delay: order is kept within
one, not between two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from elasticrt.errors import StoreError
from elasticrt.store.protocol import (
    Changes,
    Lease,
    RangeRead,
    Resync,
    StoreUnavailable,
    Txn,
    TxnResult,
    WatchSink,
)
from tests.memory_store import MemoryWatch

if TYPE_CHECKING:
    from tests.virtual.conduct import Intent
    from tests.virtual.invariants import Invariants
    from tests.virtual.plan import Snag
    from tests.virtual.process import Process
    from tests.virtual.simulator import Simulator

T = TypeVar("T")


class Channel:
    """The deliveries of one watch to one process."""

    def __init__(self, sim: Simulator, process: Process, sink: WatchSink, what: str) -> None:
        self.active = True
        self.watch: MemoryWatch | None = None
        self._sim = sim
        self._process = process
        self._sink = sink
        self.what = what
        self._items: deque[Changes | Resync] = deque()
        self._due = 0.0
        self._missing = False
        self.lag_s = 0.0
        rates = sim.plan.rates
        self._late_s = sim.net.uniform(0.0, rates.late_s) if sim.chance("late", rates.late) else 0.0

    def receive(self, item: Changes | Resync) -> None:
        """From the server, at the moment of the change."""
        if not self.active:
            return
        delay = self.lag_s + self._sim.plan.latency_s * self._sim.net.uniform(0.3, 1.5)
        if self._late_s:
            delay += self._sim.net.uniform(0.0, self._late_s) * (0.0 if self._sim.calm else 1.0)
        self._due = max(self._due, self._sim.engine.now + delay)
        self._items.append(item)
        self._sim.engine.at(self._due, self._deliver)

    def _deliver(self) -> None:
        if not self.active or self._process.gone or not self._items or self._missing:
            return
        if self._sim.unreachable(self._process):
            self._sim.engine.after(0.25, self._deliver)
            return
        item = self._items.popleft()
        if isinstance(item, Changes) and self._sim.chance("resync", self._sim.plan.rates.resync):
            self.cancel()
            self._sink(Resync("compacted"))
            return
        self._sink(item)
        if isinstance(item, Changes) and self._sim.chance("doubled", self._sim.plan.rates.doubled):
            self._sink(item)

    def miss(self, for_s: float) -> None:
        """The connection is gone for a while, and what happens meanwhile is compacted before it is back."""
        if self.active and not self._missing:
            self._missing = True
            self._sim.engine.after(for_s, self._catch_up)

    def _catch_up(self) -> None:
        if self.active and not self._process.gone:
            self.cancel()
            self._sink(Resync("compacted"))

    def cancel(self) -> None:
        """See `protocol.Watch`."""
        self.active = False
        self._items.clear()
        if self.watch is not None:
            self.watch.cancel()


class Wire:
    """One process's client; implements `protocol.Store`."""

    def __init__(self, sim: Simulator, process: Process) -> None:
        self.process = process
        self._sim = sim
        self._channels: list[Channel] = []

    def read(self, range_: str, *, limit: int = 0, by_create: bool = False) -> RangeRead:
        """See `protocol.Store`."""
        server = self._sim.server
        return self._ask(lambda: server.read(range_, limit=limit, by_create=by_create))

    def commit(self, txn: Txn) -> TxnResult:
        """See `protocol.Store`."""
        intent = self.process.intent()
        done = self._ask(lambda: self._sim.commit(self.process, txn, intent), txn)
        if not done.succeeded:
            self._sim.invariants.conduct.refused(self.process, txn)
        return done

    def grant(self, ttl_s: float) -> Lease:
        """See `protocol.Store`."""
        return self._ask(lambda: self._sim.server.grant(ttl_s))

    def keep_alive(self, lease_id: int) -> float:
        """See `protocol.Store`."""
        return self._ask(lambda: self._sim.server.keep_alive(lease_id))

    def revoke(self, lease_id: int) -> None:
        """See `protocol.Store`."""
        self._ask(lambda: self._sim.server.revoke(lease_id))

    def watch(self, range_: str, sink: WatchSink, *, from_revision: int) -> Channel:
        """See `protocol.Store`."""
        channel = Channel(self._sim, self.process, sink, range_)
        channel.watch = self._sim.server.watch(range_, channel.receive, from_revision=from_revision)
        self._channels = [other for other in self._channels if other.active] + [channel]
        return channel

    def miss(self, for_s: float, what: str = "") -> None:
        """All watches of ranges whose name ends so miss what happens in this time."""
        for channel in self._channels:
            if channel.what.endswith(what):
                channel.miss(for_s)

    def delay(self, by_s: float, what: str) -> None:
        """All watches of ranges whose name ends so tell what happens later by so much."""
        for channel in self._channels:
            if channel.what.endswith(what):
                channel.lag_s = by_s

    def close(self) -> None:
        """See `protocol.Store`."""
        for channel in self._channels:
            channel.cancel()

    def _ask(self, act: Callable[[], T], txn: Txn | None = None) -> T:
        sim, plan = self._sim, self._sim.plan
        sim.engine.sleep(plan.latency_s * sim.net.uniform(0.2, 1.0))
        if sim.unreachable(self.process):
            sim.engine.sleep(plan.timeout_s)
            raise StoreUnavailable("no answer (etcd cannot be reached)")
        snag = sim.snag(self.process, txn) if txn is not None else None
        if txn is not None:
            self._trouble_before(txn, snag)
        result = act()
        if txn is not None:
            if sim.chance("unheard", plan.rates.unheard) or (snag and snag.how == "unheard"):
                self._unheard(txn, "answer lost")
            self._maybe_freeze("after", txn, snag)
        sim.engine.sleep(plan.latency_s * sim.net.uniform(0.1, 0.5))
        return result

    def _trouble_before(self, txn: Txn, snag: Snag | None) -> None:
        sim, plan = self._sim, self._sim.plan
        self._maybe_freeze("before", txn, snag)
        if snag is not None and snag.how == "slow":
            sim.say(self.process, f"slow: {txn.why} (for {snag.for_s:.1f} s)")
            sim.engine.sleep(snag.for_s)
        if sim.chance("unsent", plan.rates.unsent) or (snag and snag.how == "unsent"):
            self._unheard(txn, "never arrived")
        belated = snag is not None and snag.how == "belated"
        if sim.chance("belated", plan.rates.belated) or belated:
            late_s = snag.for_s if snag is not None and belated else plan.timeout_s + sim.net.uniform(0.0, 4.0)
            sim.engine.after(late_s, self._belated, txn, self.process.intent(), sim.invariants)
            self._unheard(txn, "will arrive late")

    def _unheard(self, txn: Txn, how: str) -> None:
        self._sim.say(self.process, f"no answer to: {txn.why} ({how})")
        self.process.trouble_at = max(self.process.trouble_at, self._sim.engine.now)
        self._sim.engine.sleep(self._sim.plan.timeout_s)
        raise StoreUnavailable("no answer within the deadline")

    def _belated(self, txn: Txn, intent: Intent, history: Invariants) -> None:
        if history is not self._sim.invariants:
            return  # It was on its way to a server that is no more.
        try:
            done = self._sim.commit(self.process, txn, intent)
        except StoreError as error:
            self._sim.say(self.process, f"arrived late: {txn.why}: {error}")
            return
        self._sim.say(self.process, f"arrived late: {txn.why}: {'done' if done.succeeded else 'refused'}")

    def _maybe_freeze(self, when: str, txn: Txn, snag: Snag | None) -> None:
        rates = self._sim.plan.rates
        asked = snag is not None and snag.how == when
        if asked or self._sim.chance("frozen", rates.frozen):
            for_s = snag.for_s if snag is not None and asked else self._sim.net.uniform(0.5, rates.frozen_s)
            self._sim.say(self.process, f"stops {when}: {txn.why} (for {for_s:.1f} s)")
            self._sim.pause(self.process, for_s)
            self._sim.engine.sleep(0.0)
