"""What a member knows of its run: the store's state, folded into one immutable value. Pure.

A fold, not an event machine: `apply` takes keys as they are now, from a read or from a watch, and gives the next view.
A missed, merged or replayed change does no harm. An older revision of a key never replaces a newer one, and a fresh
read of a range replaces all of that range. Changes that the read already contains are ignored when a watch delivers
them later.

Times in a view are the observer's own monotonic clock, given as `now`: when *this* process first saw a thing. No clock
crosses a host.

Who sees what: the leader follows all of `members/` and `reports/` (`members_complete` is true). Every other member
follows its own member key and the leader's, so that a thousand members cost a thousand watches and not a million
deliveries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Generic, Literal, NamedTuple, TypeVar

from elasticrt.ipc.env import Commit
from elasticrt.rendezvous.records import (
    Generation,
    HandoverRecord,
    Keys,
    Member,
    Record,
    Report,
    Result,
    RosterChunk,
    Seat,
    SpecRecord,
    UnreadableRecord,
    chunk_of,
    decode,
)
from elasticrt.store.protocol import Delete, Event, KeyValue, Put, RangeRead, covers

R = TypeVar("R", bound=Record | Commit)


@dataclass(frozen=True)
class Stored(Generic[R]):
    """A record with its place in the store's history. Times are seconds of the observer's monotonic clock.

    Attributes:
        record: the decoded value.
        create_revision: the revision at which the key was created.
        mod_revision: the revision of the key's last change.
        since: when this observer first saw the key in this creation; of a generation: this very generation; of a
            report: this status.
        ready_since: of a member only: since when it has been warm and not draining, with as many workers ready as now.
        value: the bytes that the key holds.
        lease: the lease that the key is bound to, 0 for none.
    """

    record: R
    create_revision: int
    mod_revision: int
    since: float
    ready_since: float | None = None
    value: bytes = b""
    lease: int = 0


@dataclass(frozen=True)
class Verdict:
    """What probing a member found. Times are seconds of the observer's monotonic clock.

    Attributes:
        kind: "alive": the agent answered; "dead": its process has certainly ended; "silent": no answer came.
        asked_at: when the probe was sent.
        since: when the first probe of an unbroken row with this answer was sent, with at most a lease term between two.
    """

    kind: Literal["alive", "dead", "silent"]
    asked_at: float
    since: float = -math.inf


class Vanished(NamedTuple):
    """A member key that is gone.

    Attributes:
        at: when this observer first saw it missing.
        incarnation: the incarnation that the key was of, "" if the key was never seen.
    """

    at: float
    incarnation: str = ""


@dataclass(frozen=True)
class View:
    """All that decisions are made from, besides the member's own state.

    Attributes:
        node: the observer's node name.
        spec: the run's options and attempt.
        members: live members by node; all of them when `members_complete`, else at least the observer and the leader.
        members_complete: whether `members` has all members of the run.
        leader_node: the node whose member key is oldest, as last read; None when it has to be read again.
        generation: the current generation; None before the first.
        seats: seats of the current generation by node: all of them when `roster_complete`, else the observer's chunk.
        roster_nonce: the nonce of the generation that `seats` belong to.
        roster_complete: whether `seats` has the whole roster.
        reports_by_key: reports by key, of the current generation and of any newer one.
        head: the newest committed checkpoint, as far as the observer follows it.
        newest_handover: the handover that was asked for last, in any generation.
        newest_result: the newest result seen, of any attempt.
        vanished: nodes with a seat and without a member key.
        verdicts: answers of probes by incarnation.
        too_few_since: since when fewer than min_nodes members have been live (as far as the observer follows them).
        unreadable: keys under our prefix that hold something else.
        read_revisions: the revision of the last complete read of each range.
        written_revisions: the revision of the observer's own last write of a key, until the watch has come that far.
        data_loss: the evidence that the store has lost what it had acknowledged, "" without any.
    """

    node: str
    spec: Stored[SpecRecord] | None = None
    members: Mapping[str, Stored[Member]] = field(default_factory=dict)
    members_complete: bool = False
    leader_node: str | None = None
    generation: Stored[Generation] | None = None
    seats: Mapping[str, Seat] = field(default_factory=dict)
    roster_nonce: str = ""
    roster_complete: bool = False
    reports_by_key: Mapping[str, Stored[Report]] = field(default_factory=dict)
    head: Stored[Commit] | None = None
    newest_handover: Stored[HandoverRecord] | None = None
    newest_result: Stored[Result] | None = None
    vanished: Mapping[str, Vanished] = field(default_factory=dict)
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    too_few_since: float | None = None
    unreadable: frozenset[str] = frozenset()
    read_revisions: Mapping[str, int] = field(default_factory=dict)
    written_revisions: Mapping[str, int] = field(default_factory=dict)
    data_loss: str = ""

    @property
    def generation_number(self) -> int:
        """The current generation's number, 0 before the first."""
        return self.generation.record.number if self.generation else 0

    @property
    def generation_value(self) -> bytes:
        """The value of the current generation's key, which has a nonce; empty before the first generation."""
        return self.generation.value if self.generation else b""

    @property
    def is_leader(self) -> bool:
        """Whether the observer holds the oldest member key."""
        return self.leader_node == self.node

    @cached_property
    def reports(self) -> dict[str, Stored[Report]]:
        """The current generation's reports by node. Cached, because every member is judged by them."""
        mine = (entry for entry in self.reports_by_key.values() if entry.record.generation == self.generation_number)
        return {entry.record.node: entry for entry in mine}

    @property
    def ended_nodes(self) -> tuple[str, ...]:
        """Nodes where some or all workers of this generation ended well: all of them for the leader, else up to two."""
        if self.is_leader:
            done = (entry.record for entry in self.reports.values())
            return tuple(report.node for report in done if report.status in ("finishing", "ok"))
        # Only the leader follows the reports. The other members take its word from its key, if the key is about this
        # generation.
        leader = self.members.get(self.leader_node or "")
        return leader.record.ended if leader is not None and leader.record.seen == self.generation_number else ()

    def newest_verdict(self, seat: Seat) -> Verdict | None:
        """The newest verdict on the seat's node: on the life that has the seat, or on a later one.

        A later life counts even when its key has gone again.
        """
        key, gone = self.members.get(seat.node), self.vanished.get(seat.node)
        later = key.record.incarnation if key is not None else gone.incarnation if gone is not None else ""
        known = [self.verdicts[life] for life in (seat.incarnation, later) if life in self.verdicts]
        return max(known, key=attrgetter("asked_at"), default=None)

    @property
    def handover(self) -> Stored[HandoverRecord] | None:
        """The current generation's handover, if one is asked for.

        The key is deleted together with its generation, but this observer may see the deletion late. So the record's
        generation is compared.
        """
        newest = self.newest_handover
        return newest if newest is not None and newest.record.generation == self.generation_number else None

    @property
    def result(self) -> Result | None:
        """The result of the current attempt, if it has ended."""
        newest = self.newest_result
        if newest is None or self.spec is None or newest.record.attempt != self.spec.record.attempt:
            return None
        return newest.record

    @property
    def roster_known(self) -> bool:
        """Whether `seats` belong to the current generation. After a change the new roster is still to be read."""
        return self.generation is None or self.roster_nonce == self.generation.record.nonce

    def seats_in_rank_order(self) -> list[Seat]:
        """The known seats in rank order."""
        return sorted(self.seats.values(), key=attrgetter("index"))

    def witnesses(self, seat: Seat) -> list[Seat]:
        """Other seats of the generation whose nodes know this seat: those of its chunk.

        All nodes know the leader's seat, by its key.
        """
        others = [each for each in self.seats.values() if each.node not in (self.node, seat.node)]
        if self.generation is None or seat.node not in self.seats or not self.generation.record.chunks:
            return others
        chunks = self.generation.record.chunks
        return [each for each in others if chunk_of(each.node, chunks) == chunk_of(seat.node, chunks)]

    def seat_of(self, member: Member) -> Seat | None:
        """The seat of a member in its present life, or None. A seat of another life is not this member's."""
        seat = self.seats.get(member.node)
        return seat if seat is not None and seat.incarnation == member.incarnation else None

    @property
    def has_no_seated_member(self) -> bool:
        """Whether no known member has a seat."""
        here = {entry.record.incarnation for entry in self.members.values()}
        return here.isdisjoint(seat.incarnation for seat in self.seats.values())


def apply(view: View, keys: Keys, changes: Sequence[Event], now: float) -> View:
    """Fold changes of single keys into the view, in the order given.

    Args:
        view: the view before.
        keys: the names of the run's keys.
        changes: the events of a watch. Those that the view already contains change nothing.
        now: the observer's monotonic clock, in seconds.
    """
    fresh = [change for change in changes if change.mod_revision > _known_revision(view, change.key)]
    for change in fresh:
        view = _apply_one(view, keys, change, now)
    # A watch that has come as far as an own write delivers nothing older of that key any more.
    if view.written_revisions:
        seen = {change.key: change.mod_revision for change in changes}
        view = replace(
            view, written_revisions={key: at for key, at in view.written_revisions.items() if seen.get(key, 0) < at}
        )
    return _note_too_few(view, now)


def apply_written(view: View, keys: Keys, operation: Put | Delete, revision: int, now: float) -> View:
    """Fold what the observer has just written itself, at `revision`: one key, put or deleted.

    The observer's watch delivers older changes of the same key later. The revision is kept to ignore them: otherwise
    the late deletion of an earlier key would take the new key out of the view.
    """
    key, value = operation.key, None
    if isinstance(operation, Put):
        known = {keys.handover: view.handover, keys.member(view.node): view.members.get(view.node)}
        before = view.reports_by_key.get(key) or known.get(key)
        # A transaction's answer has no create revision. A key that was there keeps its own, and a new key is created
        # now.
        created = before.create_revision if before else revision
        value = KeyValue(key, operation.value, created, revision, lease=operation.lease)
    view = apply(view, keys, [Event(key, value, revision)], now)
    return replace(view, written_revisions={**view.written_revisions, key: revision})


def _known_revision(view: View, key: str) -> int:
    """The revision up to which a key's changes are in the view, by a read of its range or by an own write."""
    read = (at for range_, at in view.read_revisions.items() if covers(range_, key))
    return max(view.written_revisions.get(key, 0), *read, 0)


def apply_range(view: View, keys: Keys, range_: str, found: RangeRead, now: float) -> View:
    """Fold a complete read of a range: a key that is not in `found` no longer exists.

    A read of `keys.members` makes the view's members complete, and a read of a roster makes its seats complete.
    """
    present = {kv.key: kv for kv in found.keys}
    absent = [key for key in _known_keys(view, keys) if covers(range_, key) and key not in present]
    changes = [Event(key, None, 0) for key in absent] + [Event(kv.key, kv, kv.mod_revision) for kv in present.values()]
    for change in changes:
        view = _apply_one(view, keys, change, now)
    if range_ == keys.members:
        # While only some keys were followed, a key that was seen to go may have come back, and gone again, unseen.
        if not view.members_complete:
            view = replace(view, vanished={node: gone._replace(at=now) for node, gone in view.vanished.items()})
        oldest_key = min(present.values(), key=lambda kv: kv.create_revision, default=None)
        view = replace(
            view, members_complete=True, leader_node=oldest_key.key[len(keys.members) :] if oldest_key else None
        )
    nonce = view.generation.record.nonce if view.generation else ""
    if nonce and range_.startswith(keys.roster(nonce)):
        # An empty answer counts: a deleted roster has no seats. Otherwise it would be read again and again.
        if view.roster_nonce != nonce:
            view = replace(view, seats={}, roster_nonce=nonce)
        view = replace(view, roster_complete=view.roster_complete or range_ == keys.roster(nonce))
    if view.members_complete and view.roster_complete:
        view = replace(view, vanished=_vanished_seats(view, now))
    read_revisions = {**view.read_revisions, range_: found.revision}
    # Rosters of older generations are not looked at again, so their revisions are dropped.
    if range_.startswith(keys.rosters):
        read_revisions = {
            known: at for known, at in read_revisions.items() if known == range_ or not known.startswith(keys.rosters)
        }
    written_revisions = {key: at for key, at in view.written_revisions.items() if not covers(range_, key)}
    return _note_too_few(replace(view, read_revisions=read_revisions, written_revisions=written_revisions), now)


def _vanished_seats(view: View, now: float) -> dict[str, Vanished]:
    """The seats without a member key. A new leader counts their lease term from now, as it has not seen the keys go."""
    return {node: view.vanished.get(node, Vanished(now)) for node in view.seats if node not in view.members}


def apply_oldest_member(view: View, keys: Keys, oldest: KeyValue | None, now: float) -> View:
    """Fold the answer to "who holds the oldest member key?": that key, or None if there is no member."""
    if oldest is None:
        return replace(view, leader_node=None)
    change = Event(oldest.key, oldest, oldest.mod_revision)
    view = _apply_one(view, keys, change, now)
    return replace(view, leader_node=oldest.key[len(keys.members) :])


def apply_verdict(view: View, incarnation: str, verdict: Verdict) -> View:
    """Fold the answer to a probe of the life `incarnation`."""
    before, term_s = view.verdicts.get(incarnation), view.spec.record.spec.lease_ttl_s if view.spec else 0.0
    in_a_row = before is not None and before.kind == verdict.kind and verdict.asked_at - before.asked_at <= term_s
    since = before.since if before is not None and in_a_row else verdict.asked_at
    return replace(view, verdicts={**view.verdicts, incarnation: replace(verdict, since=since)})


def wanted_reads(view: View, keys: Keys) -> tuple[str, ...]:
    """The ranges to read before decisions make sense: the oldest member, the observer's roster chunk or all chunks."""
    wanted = []
    if view.leader_node is None:
        wanted.append(keys.members)
    if view.generation is not None:
        record = view.generation.record
        if view.roster_nonce != record.nonce:
            wanted.append(keys.chunk(record.nonce, chunk_of(view.node, record.chunks)))
        if view.is_leader and not (view.roster_complete and view.roster_nonce == record.nonce):
            wanted.append(keys.roster(record.nonce))
    return tuple(wanted)


def watched_ranges(view: View, keys: Keys) -> tuple[str, ...]:
    """The ranges to follow with watches: O(1) of them for a member, everything for the leader."""
    if view.is_leader:
        return (
            keys.generation,
            keys.results,
            keys.spec,
            keys.handover,
            keys.members,
            keys.all_reports,
            keys.checkpoint,
        )
    # Each member watches the leader's key, so that its deletion makes the member look for the next leader.
    leader = () if view.leader_node is None else (keys.member(view.leader_node),)
    return (keys.generation, keys.results, keys.spec, keys.handover, keys.member(view.node), *leader)


def is_essential(view: View, keys: Keys, key: str) -> bool:
    """Whether the run cannot go on while `key` holds something unreadable: a record of its own belongs there."""
    own = {keys.spec, keys.generation, keys.checkpoint, keys.handover, keys.member(view.node)}
    if view.spec is not None:
        own.add(keys.result(view.spec.record.attempt))
    if view.generation is not None and key.startswith(keys.roster(view.generation.record.nonce)):
        return True
    return key in own or key in {keys.report(view.generation_number, node) for node in view.seats}


def _known_keys(view: View, keys: Keys) -> list[str]:
    """The keys that are folded into the view: a complete read of their range may show that they are gone."""
    known = [keys.member(node) for node in view.members]
    known += list(view.reports_by_key)
    singles = ((keys.spec, view.spec), (keys.generation, view.generation), (keys.checkpoint, view.head))
    known += [key for key, entry in singles if entry is not None]
    known += [keys.handover] if view.newest_handover is not None else []
    if view.newest_result is not None:
        known.append(keys.result(view.newest_result.record.attempt))
    return known + list(view.unreadable)


def _apply_one(view: View, keys: Keys, change: Event, now: float) -> View:
    key = change.key
    if key in view.unreadable:
        view = replace(view, unreadable=view.unreadable - {key})
    try:
        if key.startswith(keys.members):
            return _apply_member(view, key, key[len(keys.members) :], change.value, now)
        if key == keys.generation:
            return _apply_generation(view, key, change.value, now)
        if key.startswith(keys.rosters):
            return _apply_roster(view, keys, key, change.value)
        if key.startswith(keys.all_reports):
            return _apply_report(view, keys, key, change.value, now)
        if key == keys.checkpoint:
            gone = change.value is None and view.head is not None
            lost = "the record of the newest checkpoint is gone" if gone else view.data_loss
            return replace(view, head=_stored(Commit, key, change.value, view.head, now), data_loss=lost)
        if key == keys.handover:
            return replace(view, newest_handover=_stored(HandoverRecord, key, change.value, view.newest_handover, now))
        if key == keys.spec:
            return replace(view, spec=_stored(SpecRecord, key, change.value, view.spec, now))
        if key.startswith(keys.results):
            return _apply_result(view, key, change.value, now)
    except UnreadableRecord:
        # A foreign value must not stop a run. It counts as absent, and the `Replica` says so once.
        if key.startswith(keys.members):
            view = _apply_member(view, key, key[len(keys.members) :], None, now)
        return replace(view, unreadable=view.unreadable | {key})
    return view


def _stored(kind: type[R], key: str, value: KeyValue | None, old: Stored[R] | None, now: float) -> Stored[R] | None:
    """The record of a key after a change: None after a deletion, the old one if the change is not newer.

    Raises UnreadableRecord for a value that is no record of this `kind`.
    """
    if value is None:
        return None
    if old is not None and old.mod_revision >= value.mod_revision:
        return old
    same_creation = old is not None and old.create_revision == value.create_revision
    since = old.since if old is not None and same_creation else now
    record = decode(kind, key, value.value)
    return Stored(record, value.create_revision, value.mod_revision, since, value=value.value, lease=value.lease)


def _apply_member(view: View, key: str, node: str, value: KeyValue | None, now: float) -> View:
    old = view.members.get(node)
    entry = _stored(Member, key, value, old, now)
    if entry is not None and entry.record.node != node:
        raise UnreadableRecord(f"{key} holds the record of {entry.record.node}")
    if entry is not None and entry is old:
        return view
    members, vanished = dict(view.members), dict(view.vanished)
    members.pop(node, None)
    gone = vanished.pop(node, None) or Vanished(now, old.record.incarnation if old is not None else "")
    if entry is None:
        if node in view.seats:
            vanished[node] = gone
        leader_node = None if view.leader_node == node else view.leader_node
        return replace(view, members=members, vanished=vanished, leader_node=leader_node)
    ready = entry.record.warm and not entry.record.draining
    same = old is not None and old.create_revision == entry.create_revision and old.record.ready == entry.record.ready
    was_ready = old.ready_since if old is not None and same else None
    members[node] = replace(entry, ready_since=(was_ready if was_ready is not None else now) if ready else None)
    # A key that was created again between two looks has lost its seniority, even if its deletion was never seen.
    is_created_anew = old is not None and old.create_revision != entry.create_revision
    leader_node = None if is_created_anew and view.leader_node == node else view.leader_node
    return replace(view, members=members, vanished=vanished, leader_node=leader_node)


def _apply_generation(view: View, key: str, value: KeyValue | None, now: float) -> View:
    entry = _stored(Generation, key, value, view.generation, now)
    if entry is None or (view.generation and view.generation.record.nonce == entry.record.nonce):
        return replace(view, generation=entry)
    # Verdicts, missing keys and older reports were about the generation before. Reports about a newer generation may
    # have come before it, and stay.
    reports_by_key = {
        key: report for key, report in view.reports_by_key.items() if report.record.generation >= entry.record.number
    }
    # The key is created once and then only replaced, so `since` of its creation would be that of the first generation.
    entry = replace(entry, since=now)
    view = replace(
        view, generation=entry, roster_complete=False, reports_by_key=reports_by_key, vanished={}, verdicts={}
    )
    if entry.record.chunks:
        return view
    seats = {seat.node: seat for seat in entry.record.seats}
    view = replace(view, seats=seats, roster_nonce=entry.record.nonce, roster_complete=True)
    return replace(view, vanished=_vanished_seats(view, now)) if view.members_complete else view


def _apply_roster(view: View, keys: Keys, key: str, value: KeyValue | None) -> View:
    if value is None or view.generation is None or not key.startswith(keys.roster(view.generation.record.nonce)):
        return view
    nonce = view.generation.record.nonce
    seats = {seat.node: seat for seat in decode(RosterChunk, key, value.value).seats}
    known = view.seats if view.roster_nonce == nonce else {}
    return replace(view, seats={**known, **seats}, roster_nonce=nonce)


def _apply_report(view: View, keys: Keys, key: str, value: KeyValue | None, now: float) -> View:
    number, _, node = key[len(keys.all_reports) :].partition("/")
    reports_by_key = dict(view.reports_by_key)
    old = reports_by_key.pop(key, None)
    entry = _stored(Report, key, value, old, now)
    if entry is not None and old is not None and entry.record.status != old.record.status:
        # A failure counts from its own report, not from the hold that was reported before it.
        entry = replace(entry, since=now)
    # A record whose content does not match its key is not ours, and is left out.
    ours = entry is not None and (entry.record.node, str(entry.record.generation)) == (node, number)
    if entry is not None and ours and entry.record.generation >= view.generation_number:
        reports_by_key[key] = entry
    return replace(view, reports_by_key=reports_by_key)


def _apply_result(view: View, key: str, value: KeyValue | None, now: float) -> View:
    entry = _stored(Result, key, value, None, now)
    if entry is None or (view.newest_result is not None and view.newest_result.record.attempt > entry.record.attempt):
        return view
    return replace(view, newest_result=entry)


def _note_too_few(view: View, now: float) -> View:
    """Note since when there have been fewer members than min-nodes."""
    if view.spec is None or not view.members_complete:
        return view
    short = len(view.members) < view.spec.record.spec.min_nodes
    return replace(
        view, too_few_since=(view.too_few_since if view.too_few_since is not None else now) if short else None
    )
