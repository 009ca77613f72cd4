"""A member's conversations with the store: what it reads, follows and writes. No I/O: see `requests`. Pure.

`Conversations` owns the view. It folds what watches deliver, asks for what the view says is missing, and writes what
was decided. Every decision about it is made elsewhere.

Any request may fail with StoreUnavailable; then nothing is known about its effect, and `refresh` has to come before the
next decision. That is the whole treatment of unknown outcomes: what happened is in the store.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TypeVar

from elasticrt.errors import DuplicateError, StoreError, explain
from elasticrt.ipc.env import Commit
from elasticrt.rendezvous import transactions
from elasticrt.rendezvous.decision import Ask, Fence, File, Finish, Publish
from elasticrt.rendezvous.records import (
    SEATS_PER_CHUNK,
    Keys,
    Member,
    Record,
    Report,
    Result,
    SpecRecord,
    decode,
    seal,
)
from elasticrt.rendezvous.requests import Conversation, Follow, Notice, Read, Transact, Unfollow
from elasticrt.rendezvous.view import (
    View,
    apply,
    apply_range,
    apply_written,
    awaited,
    followed,
    wanted_reads,
    with_oldest,
)
from elasticrt.spec import RunSpec, difference, resized
from elasticrt.store.protocol import Changes, Event, KeyValue, RangeRead, Txn, TxnResult

R = TypeVar("R", bound=Record)

READS_MAX = 20
"""Reads in a row to complete one view. Each answers a question the last one raised; more means a bug or a livelock."""


@dataclass(frozen=True)
class Entered:
    """What registering found: the attempt this member belongs to, and the run's options (it may have been resized)."""

    attempt: int
    spec: RunSpec


class Conversations:
    """One member's. Each method that returns a `Conversation` is to be run, by whoever has a store.

    Args:
        node: the member's name.
        keys: of its run.
        token: draws 64 random bits.
        note: takes what an operator may want to know.
        seats_per_chunk: of the rosters that it writes.
    """

    def __init__(
        self,
        node: str,
        keys: Keys,
        token: Callable[[], str],
        note: Callable[[str], None],
        seats_per_chunk: int = SEATS_PER_CHUNK,
    ) -> None:
        self.keys = keys
        self.view = View(node)
        self._token = token
        self._note = note
        self._seats_per_chunk = seats_per_chunk
        self._store_id, self._revision = "", 0
        self._followed: dict[str, int] = {}  # Numbers of watches by range.
        self._dropped: list[int] = []  # Those that have still to be ended.
        self._next_watch = 1
        self._warned: set[str] = set()
        self._filed: dict[str, int] = {}  # This node's newest report: its key and mod revision.

    # Reading.

    def refresh(self) -> Conversation[None]:
        """Read everything that is followed, then whatever the view still lacks."""
        for range_ in followed(self.view, self.keys):
            if range_ in self._followed:  # Any other is read when `complete` begins to follow it.
                yield from self._fold_range(range_)
        yield from self.complete()

    def complete(self) -> Conversation[None]:
        """Read what the view lacks and follow what it should, until it lacks nothing."""
        for _ in range(READS_MAX):
            yield from self._follow()
            wanted = wanted_reads(self.view, self.keys)
            if not wanted:
                break
            for range_ in wanted:
                if range_ == self.keys.members and not self.view.complete:
                    found, now = yield from self._read(range_, limit=1, by_create=True)
                    self.view = with_oldest(self.view, self.keys, next(iter(found.keys), None), now)
                else:
                    found = yield from self._fold_range(range_)
            if wanted == (self.keys.members,) and not found.keys:
                return  # Nobody is registered, not even we: there is nothing to be complete about.
        else:
            raise StoreError(f"the view of {self.keys.prefix} does not settle after {READS_MAX} reads")
        self._warn_of_unreadable()

    def absorb(self, notice: Notice, now: float) -> None:
        """Fold one delivery. Those of a watch that has been ended are dropped."""
        if self._followed.get(notice.range) != notice.watch:
            return
        if isinstance(notice.item, Changes):
            self.view = apply(self.view, self.keys, notice.item.events, now)
            self._revision = max(self._revision, notice.item.revision)
        else:
            self._note(f"reading {notice.range} again: {notice.item.reason}")
            self._unfollow(notice.range)

    # Registering.

    def enter(
        self, spec: RunSpec, member: Member, lease: int, *, again: bool
    ) -> Conversation[Entered | Result | KeyValue | None]:
        """One try to register for the first time.

        Returns:
            Entered: registered. Result: the run has succeeded before, nothing to do. KeyValue: another life's key
            stands under this name (the caller finds out whether it lives). None: somebody else was faster, or a
            finished attempt's members are still leaving; try again soon.

        Raises DuplicateError when live members run with other options.
        """
        keys, own = self.keys, self.keys.member(member.node)
        # In this order: an earlier try whose answer was lost, and which arrives only now, writes the spec and the key.
        mine = yield from self._look_up(own)
        stored = yield from self._record(SpecRecord, keys.spec)
        if mine is not None:
            if decode(Member, mine.key, mine.value).incarnation != member.incarnation:
                return mine
            return Entered(stored[0].attempt, stored[0].spec) if stored else None
        generation = yield from self._look_up(keys.generation)
        alive = (yield from self._read(keys.members, limit=1))[0].keys
        if own in (kv.key for kv in alive):
            return None
        attempt = 1
        if stored is not None:
            attempt = stored[0].attempt
            result = yield from self._record(Result, keys.result(attempt))
            if alive:
                spec = resized(spec, stored[0].spec) if stored[0].resized else spec
                unlike = difference(spec, stored[0].spec)
                if unlike:
                    raise DuplicateError(_other_options(keys.run_id, unlike))
                if result is not None:
                    return None
            elif result is not None:
                if result[0].status == "succeeded" and not again:
                    return result[0]
                attempt += 1
        guard = transactions.Guard(
            spec=stored[1] if stored else 0, generation=generation.mod_revision if generation else 0, checkpoint=0, me=0
        )
        if stored is None or not alive:
            # Also where it is written as it was: of two that see nobody alive, with two specs, one has to be refused.
            same = stored is not None and (stored[0].spec, stored[0].attempt) == (spec, attempt)
            record = stored[0] if stored is not None and same else SpecRecord(spec=spec, attempt=attempt)
            txn = transactions.register(keys, guard, record, member, lease)
        else:
            txn = transactions.register_again(keys, guard, member, lease)
        done, _ = yield from self._commit(txn)
        return Entered(attempt, spec) if done.succeeded else None

    def register_again(self, member: Member, lease: int) -> Conversation[bool]:
        """Come back with a key, after the last one was lost. False: the view was old (it has been read anew)."""
        decided_by = (self.view.number, self._guard().spec)
        yield from self.refresh()
        if (self.view.number, self._guard().spec) != decided_by:
            # A generation may have left this life out, or the run may have other options: that is decided anew.
            return False
        mine = self.view.members.get(member.node)
        if mine is not None and mine.record.incarnation == member.incarnation:
            # The key is still there, on the old lease: replace it by one on the new lease.
            return (yield from self._write(transactions.announce(self.keys, self._guard(), member, lease), member))
        if mine is not None and _same_process(mine.record, member):
            # A former life of this very agent. Its farewell did not reach etcd, and its lease may be ours still.
            yield from self.leave(None)
            yield from self.refresh()
        return (yield from self._write(transactions.register_again(self.keys, self._guard(), member, lease), member))

    def evict_stale(self, stale: KeyValue) -> Conversation[None]:
        """Delete a dead life's key under this name, if it is unchanged."""
        # In a view of its own: this one may know already that the key is gone, and would not take it up.
        seen = apply(View(self.view.node), self.keys, [Event(stale.key, stale, stale.mod_revision)], 0.0)
        generation = yield from self._look_up(self.keys.generation)
        guard = transactions.Guard(spec=0, generation=generation.mod_revision if generation else 0, checkpoint=0, me=0)
        yield from self._commit(transactions.evict(self.keys, guard, seen.members[self.view.node]))
        self.view = View(self.view.node)

    # Carrying out decisions. Each returns whether it took effect; if not, the view has been read anew.

    def announce(self, member: Member, lease: int) -> Conversation[bool]:
        """Bring the member key up to date."""
        return (yield from self._write(transactions.announce(self.keys, self._guard(), member, lease), member))

    def file(self, decision: File) -> Conversation[bool]:
        """Store the report."""
        report = decision.report
        key = self.keys.report(report.generation, report.node)
        before = self._filed.get(key, 0)
        done, now = yield from self._commit(transactions.file(self.keys, self._guard(), report, before))
        if not done.succeeded:
            yield from self.refresh()
            if self.view.number <= report.generation:  # An earlier one has arrived, though its answer did not.
                found = yield from self._look_up(key)
                self._filed = {key: found.mod_revision} if found is not None else {}
            return False
        self._filed = {key: done.revision}
        if self.keys.all_reports in self._followed:
            # A leader decides by its own report as well, and its watch may be slow to deliver it.
            self._fold(now, _put(key, report, done.revision))
        return True

    def evict(self, decision: Fence) -> Conversation[bool]:
        """Fence a member."""
        revision, now = yield from self._done(transactions.evict(self.keys, self._guard(), decision.member))
        if revision:
            self._fold(now, Event(self.keys.member(decision.member.record.node), None, revision))
        return bool(revision)

    def publish(self, decision: Publish) -> Conversation[bool]:
        """Write the roster, then swap the generation; take the roster back if somebody else was faster."""
        generation, chunks = seal(decision.draft, decision.seats, self._token(), self._seats_per_chunk)
        for txn in transactions.roster(self.keys, generation.nonce, chunks):
            yield from self._commit(txn)
        txn = transactions.publish(self.keys, self._guard(), self.view.node, generation, self.view.generation)
        done, now = yield from self._commit(txn)
        if not done.succeeded:
            yield from self._commit(transactions.discard_roster(self.keys, generation.nonce))
            yield from self.refresh()
            return False
        self._fold(now, _put(self.keys.generation, generation, done.revision))
        yield from self._fold_range(self.keys.roster(generation.nonce))
        return True

    def ask(self, decision: Ask) -> Conversation[bool]:
        """Ask for a handover, or say after which step it happens."""
        seen = self.view.handover
        revision, now = yield from self._done(
            transactions.ask(
                self.keys, self._guard(), self.view.node, decision.handover, seen.mod_revision if seen else 0
            )
        )
        if revision:
            self._fold(
                now, _put(self.keys.handover, decision.handover, revision, seen.create_revision if seen else None)
            )
        return bool(revision)

    def withdraw(self) -> Conversation[bool]:
        """Give the handover up."""
        seen = self.view.handover
        revision, now = yield from self._done(
            transactions.withdraw(self.keys, self._guard(), self.view.node, seen.mod_revision if seen else 0)
        )
        if revision:
            self._fold(now, Event(self.keys.handover, None, revision))
        return bool(revision)

    def finish(self, decision: Finish, step: int) -> Conversation[bool]:
        """Write the run's result."""
        assert self.view.spec is not None
        result = Result(
            attempt=self.view.spec.record.attempt,
            status=decision.status,
            code=decision.code,
            reason=decision.reason,
            generation=self.view.number,
            step=step,
            text=decision.text,
        )
        revision, now = yield from self._done(transactions.finish(self.keys, self._guard(), self.view.node, result))
        if revision:
            self._fold(now, _put(self.keys.result(result.attempt), result, revision))
        return bool(revision)

    def leave(self, report: Report | None) -> Conversation[None]:
        """Take the own key out at once, telling the others why."""
        done, _ = yield from self._commit(transactions.leave(self.keys, self._guard(), self.view.node, report))
        if not done.succeeded:
            # The generation has moved on, or the key is gone already: then leaving needs no report.
            yield from self._commit(transactions.leave(self.keys, self._guard(), self.view.node, None))

    def newest(self) -> Conversation[Commit | None]:
        """The newest committed checkpoint, which only the leader follows."""
        answer, _ = yield Read(self.keys.checkpoint)
        found = answer.get(self.keys.checkpoint)
        return decode(Commit, self.keys.checkpoint, found.value) if found is not None else None

    def give_up(self, node: str, choose: Callable[[Collection[Member]], str]) -> Conversation[str]:
        """Ask `node` to drain, if `choose` finds a member that can take its place; that one's name, else ""."""
        answer, _ = yield Read(self.keys.members)
        found = {value.key: (decode(Member, value.key, value.value), value) for value in answer.keys}
        successor = choose([member for member, _ in found.values()])
        member, value = found.get(self.keys.member(node), (None, None))
        if not successor or member is None or value is None:
            return ""
        drained = member.model_copy(update={"draining": True})
        done, _ = yield from self._commit(transactions.drain(self.keys, value, drained))
        return successor if done.succeeded else ""

    # Details.

    def _guard(self) -> transactions.Guard:
        return transactions.Guard.of(self.view)

    def _commit(self, txn: Txn) -> Conversation[tuple[TxnResult, float]]:
        return (yield Transact(txn))

    def _done(self, txn: Txn) -> Conversation[tuple[int, float]]:
        """The revision at which it took effect, and when; 0 if it did not, and then the view has been read anew."""
        done, now = yield from self._commit(txn)
        if done.succeeded:
            return done.revision, now
        yield from self.refresh()
        return 0, now

    def _write(self, txn: Txn, member: Member) -> Conversation[bool]:
        revision, now = yield from self._done(txn)
        if revision:
            old = self.view.members.get(member.node)
            created = old.create_revision if old is not None else None
            self._fold(now, _put(self.keys.member(member.node), member, revision, created))
        return bool(revision)

    def _fold(self, now: float, event: Event) -> None:
        self.view = apply_written(self.view, self.keys, event, now)

    def _read(self, range_: str, *, limit: int = 0, by_create: bool = False) -> Conversation[tuple[RangeRead, float]]:
        found, now = yield Read(range_, limit, by_create)
        lost = ""
        if self._store_id and found.store_id != self._store_id:
            lost = "another store answers"
        elif found.revision < self._revision:  # Reads are linearizable: a store that is whole never goes back.
            lost = f"the store is at revision {found.revision} and was at {self._revision}"
        if lost:
            self._note(lost)
            self.view = View(self.view.node, lost=lost if self.view.number else "")
            for followed_ in list(self._followed):  # Then all is read anew.
                self._unfollow(followed_)
        self._store_id, self._revision = found.store_id, found.revision
        return found, now

    def _look_up(self, key: str) -> Conversation[KeyValue | None]:
        found, _ = yield from self._read(key)
        return found.get(key)

    def _record(self, kind: type[R], key: str) -> Conversation[tuple[R, int] | None]:
        found = yield from self._look_up(key)
        return None if found is None else (decode(kind, key, found.value), found.mod_revision)

    def _fold_range(self, range_: str) -> Conversation[RangeRead]:
        found, now = yield from self._read(range_)
        self.view = apply_range(self.view, self.keys, range_, found, now)
        return found

    def _follow(self) -> Conversation[None]:
        ranges = followed(self.view, self.keys)
        for range_ in [known for known in self._followed if known not in ranges]:
            self._unfollow(range_)
            if range_ == self.keys.members:
                self.view = replace(self.view, complete=False)  # Nobody tells us of the others any more.
        while self._dropped:
            yield Unfollow(self._dropped.pop())
        for range_ in ranges:
            if range_ not in self._followed:
                found = yield from self._fold_range(range_)
                number, self._next_watch = self._next_watch, self._next_watch + 1
                yield Follow(number, range_, found.revision + 1)
                self._followed[range_] = number

    def _unfollow(self, range_: str) -> None:
        """No delivery of its watch counts any more; it is ended before the next one begins."""
        self._dropped.append(self._followed.pop(range_))

    def _warn_of_unreadable(self) -> None:
        """Foreign keys are left alone. Raises StoreError for a key that somebody of this run waits for."""
        ruined = [key for key in self.view.unreadable if awaited(self.view, self.keys, key)]
        if ruined:
            raise StoreError(
                explain(
                    "this run's own record in etcd has been overwritten",
                    ", ".join(sorted(ruined)),
                    expected="what this run has written",
                    remedy="The checkpoints are intact: delete the run's keys, or use another run id",
                )
            )
        for key in sorted(self.view.unreadable - self._warned):
            self._note(f"{key} holds something that is not ours; it is ignored")
        self._warned |= self.view.unreadable


def _put(key: str, record: Record, revision: int, created: int | None = None) -> Event:
    value = KeyValue(key, record.encode(), created if created is not None else revision, revision, 1)
    return Event(key, value, revision)


def _same_process(one: Member, other: Member) -> bool:
    """Whether two lives are those of one agent: it holds its probe port from its start to its end."""
    return (one.address, one.probe_port, one.pid) == (other.address, other.probe_port, other.pid)


def _other_options(run_id: str, unlike: str) -> str:
    return explain(
        "this run is alive with other options",
        f"run {run_id}",
        got=unlike,
        expected="the same options on every node",
        remedy="Start this node with the run's options, or choose another --run-id",
    )
