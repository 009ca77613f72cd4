"""A member's copy of its run's keys in etcd: read, followed by watches, changed by transactions. Pure.

`Replica` owns the view. It reads what the view lacks, folds the deliveries of watches, and folds the writes of its own
transactions. It does no I/O: a method that returns a `Conversation` yields requests (see `requests`).

Any request may fail with StoreUnavailable. Its effect is then unknown, and `refresh` has to come before the next
decision: the store knows what happened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

from elasticrt.errors import StoreError
from elasticrt.rendezvous.records import Keys, R, decode
from elasticrt.rendezvous.requests import CancelWatch, Conversation, Notice, Read, StartWatch, Transact
from elasticrt.rendezvous.view import (
    View,
    apply,
    apply_oldest_member,
    apply_range,
    apply_written,
    is_essential,
    wanted_reads,
    watched_ranges,
)
from elasticrt.store.protocol import Changes, KeyValue, RangeRead, Txn, TxnResult, covers

READS_MAX = 20
"""The most reads in a row to complete one view. Each read answers a question that the last one raised, so more of them
mean a livelock."""


class Replica:
    """One member's copy of its run's keys.

    Args:
        node: the member's name.
        keys: the names of the run's keys.
        note: takes messages that an operator may want to see.

    Attributes:
        view: the keys as they were last seen.
        store_id: the identity of the store that has them; "" before the first read.
    """

    def __init__(self, node: str, keys: Keys, note: Callable[[str], None]) -> None:
        self.keys = keys
        self.view = View(node)
        self._note = note
        # The store and the revision of the newest read or delivery. A store that goes back behind them has lost data.
        self.store_id, self._revision = "", 0
        # The number of the watch of each range that is followed.
        self._watches: dict[str, int] = {}
        # The numbers of watches that have still to be cancelled.
        self._dropped_watches: list[int] = []
        self._numbers = count(1)
        # Unreadable keys that have been reported already.
        self._warned: set[str] = set()

    def refresh(self) -> Conversation[None]:
        """Read everything that is followed, then whatever the view still lacks."""
        for range_ in watched_ranges(self.view, self.keys):
            # `complete` reads any other range when it begins to follow it.
            if range_ in self._watches:
                yield from self.fold_range(range_)
        yield from self.complete()

    def complete(self) -> Conversation[None]:
        """Read what the view lacks and follow what it should, until it lacks nothing.

        Raises StoreError when a record of this run has been overwritten.
        """
        for _ in range(READS_MAX):
            yield from self._update_watches()
            wanted = wanted_reads(self.view, self.keys)
            if not wanted:
                break
            for range_ in wanted:
                if range_ == self.keys.members and not self.view.members_complete:
                    found, now = yield from self.read(range_, limit=1, by_create=True)
                    self.view = apply_oldest_member(self.view, self.keys, next(iter(found.keys), None), now)
                else:
                    found = yield from self.fold_range(range_)
                    if not found.keys and range_.startswith(self.keys.rosters):
                        # The roster may have gone with its generation while the watch is late. A seat in the next
                        # generation counts.
                        yield from self.fold_range(self.keys.generation)
            if wanted == (self.keys.members,) and not found.keys:
                # No member is registered, not even this one, so the view cannot be complete.
                return
        else:
            raise StoreError(f"the view of {self.keys.prefix} does not settle after {READS_MAX} reads")
        self._check_unreadable()

    def fold_notice(self, notice: Notice, now: float) -> None:
        """Fold one delivery of a watch. A delivery of a watch that has ended is dropped."""
        if self._watches.get(notice.range) != notice.watch:
            return
        if isinstance(notice.item, Changes):
            self.view = apply(self.view, self.keys, notice.item.events, now)
            self._revision = max(self._revision, notice.item.revision)
        else:
            # The watch is over. `complete` reads the range again, and begins another watch from there.
            self._note(f"reading {notice.range} again: {notice.item.reason}")
            self._drop_watch(notice.range)

    def write(self, txn: Txn, otherwise: Txn | None = None) -> Conversation[int]:
        """Carry out a transaction, and fold its writes to keys that are followed.

        Args:
            txn: the transaction.
            otherwise: a transaction to carry out if `txn` has no effect.

        Returns:
            The revision of the effect, 0 if there was none. Then everything has been read again.
        """
        done: TxnResult
        done, now = yield Transact(txn)
        if not done.succeeded:
            if otherwise is not None:
                yield Transact(otherwise)
            yield from self.refresh()
            return 0
        for operation in txn.operations:
            # This member's own watch may be slow to deliver the write, and the next decision must not be made without
            # it.
            single = not operation.key.endswith("/")
            if single and any(covers(range_, operation.key) for range_ in self._watches):
                self.view = apply_written(self.view, self.keys, operation, done.revision, now)
        return done.revision

    def read(self, range_: str, *, limit: int = 0, by_create: bool = False) -> Conversation[tuple[RangeRead, float]]:
        """Read a range. Returns the answer and its time.

        A store that has lost what it had acknowledged is noticed here: the view is emptied and says so in `data_loss`.
        """
        found, now = yield Read(range_, limit, by_create)
        lost = ""
        if self.store_id and found.store_id != self.store_id:
            lost = "another etcd answers"
        # Reads are linearizable, so the revisions of an intact store never go back.
        elif found.revision < self._revision:
            lost = f"etcd is at revision {found.revision}, and was at {self._revision}"
        if lost:
            self._note(lost)
            self.view = View(self.view.node, data_loss=lost if self.view.generation_number else "")
            # Without their watches all ranges are read anew.
            for watched in list(self._watches):
                self._drop_watch(watched)
        self.store_id, self._revision = found.store_id, found.revision
        return found, now

    def read_key(self, key: str) -> Conversation[KeyValue | None]:
        """Read one key, without folding it into the view."""
        found, _ = yield from self.read(key)
        return found.get(key)

    def read_record(self, kind: type[R], key: str) -> Conversation[tuple[R, int] | None]:
        """Read one record of a `kind`, without folding it into the view. Returns the record and its mod revision."""
        found = yield from self.read_key(key)
        return None if found is None else (decode(kind, key, found.value), found.mod_revision)

    def fold_range(self, range_: str) -> Conversation[RangeRead]:
        """Read a range and fold it into the view."""
        found, now = yield from self.read(range_)
        self.view = apply_range(self.view, self.keys, range_, found, now)
        return found

    def _update_watches(self) -> Conversation[None]:
        """Begin and end watches as the view asks for."""
        ranges = watched_ranges(self.view, self.keys)
        for range_ in [known for known in self._watches if known not in ranges]:
            self._drop_watch(range_)
            if range_ == self.keys.members:
                self.view = replace(self.view, members_complete=False)
        while self._dropped_watches:
            yield CancelWatch(self._dropped_watches.pop())
        for range_ in ranges:
            if range_ not in self._watches:
                found = yield from self.fold_range(range_)
                number = next(self._numbers)
                yield StartWatch(number, range_, found.revision + 1)
                self._watches[range_] = number

    def _drop_watch(self, range_: str) -> None:
        """Drop what the watch of a range delivers from now on.

        `_update_watches` cancels it before the next watch begins.
        """
        self._dropped_watches.append(self._watches.pop(range_))

    def _check_unreadable(self) -> None:
        """Ignore foreign keys, and say so once. Raises StoreError if one is where a record of this run belongs."""
        ruined = [key for key in self.view.unreadable if is_essential(self.view, self.keys, key)]
        if ruined:
            raise StoreError(
                "this run's own record in etcd has been overwritten",
                ", ".join(sorted(ruined)),
                expected="what this run has written",
                remedy="The checkpoints are intact: delete the run's keys, or use another run id",
            )
        for key in sorted(self.view.unreadable - self._warned):
            self._note(f"{key} holds something that is not ours; it is ignored")
        self._warned |= self.view.unreadable
