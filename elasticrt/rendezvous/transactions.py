"""Every transaction that changes a run's shared state, as values. Pure.

Everything that leaves a generation is fenced: the transaction compares the generation's value, which has a nonce, so it
can only take effect while that generation is the current one. A revision would not do: a store that was wiped counts
anew, and comes to the same numbers when the same run begins again. A lease is a sign of life, never a permission to
write.

`Guard` collects what the writer knows: the revisions of the keys as it read them. A transaction that fails means that
the writer's knowledge is old; it reads again and decides again. One whose outcome is unknown is handled the same way:
after reading again, either its effect is there (with our nonce), or it is not and may be tried again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elasticrt.ipc.env import Commit
from elasticrt.rendezvous.records import (
    Generation,
    HandoverRecord,
    Keys,
    Member,
    Preparation,
    Report,
    Result,
    RosterChunk,
    SpecRecord,
)
from elasticrt.rendezvous.view import Stored, View
from elasticrt.store.protocol import Compare, Delete, KeyValue, Put, Txn

CHUNKS_PER_TXN = 64
"""As many fit into one request of etcd (1.5 MiB, 128 operations), even with the longest of names."""

ABSENT_MAX = 64
"""Compares of missing keys in one transaction; etcd takes 128 of all kinds."""


@dataclass(frozen=True)
class Guard:
    """The run's keys as the writer knows them. 0 stands for an absent key, which is what etcd compares as well.

    Attributes:
        node: the writer.
        me, lease: the create revision of the writer's own member key, and its lease.
        generation: its value; empty if there is none.
        spec, checkpoint, handover: mod revisions.
    """

    node: str
    me: int = 0
    lease: int = 0
    generation: bytes = b""
    spec: int = 0
    checkpoint: int = 0
    handover: int = 0

    @classmethod
    def of(cls, view: View) -> Guard:
        """What the observer of a view knows."""
        mine = view.members.get(view.node)
        return cls(
            node=view.node,
            me=mine.create_revision if mine else 0,
            lease=mine.lease if mine else 0,
            generation=view.generation.value if view.generation else b"",
            spec=view.spec.mod_revision if view.spec else 0,
            checkpoint=view.head.mod_revision if view.head else 0,
            handover=view.handover.mod_revision if view.handover else 0,
        )


def _unchanged(key: str, mod_revision: int) -> Compare:
    return Compare(key, "mod", mod_revision)


def _absent(key: str) -> Compare:
    return Compare(key, "create", 0)


def _current(keys: Keys, generation: bytes) -> Compare:
    return Compare(keys.generation, "value", generation) if generation else _absent(keys.generation)


def _alive(keys: Keys, guard: Guard) -> Compare:
    return Compare(keys.member(guard.node), "create", guard.me)


def _own(keys: Keys, guard: Guard) -> Compare:
    """Before the first generation only the lease tells a key from one of the same revision in a wiped store."""
    return Compare(keys.member(guard.node), "lease", guard.lease)


def register(keys: Keys, guard: Guard, member: Member, lease: int, spec: SpecRecord | None = None) -> Txn:
    """Come into a run whose spec is as read, under a name that no member has. With `spec`, which is written, begin it:
    then it has not ended either.
    """
    own = Put(keys.member(member.node), member.encode(), lease)
    compares = (
        _unchanged(keys.spec, guard.spec),
        _current(keys, guard.generation),
        _absent(keys.member(member.node)),
    )
    if spec is None:
        return Txn(compares, (own,), why=f"{member.node} registers again")
    begins = (*compares, _absent(keys.result(spec.attempt)))
    return Txn(begins, (Put(keys.spec, spec.encode()), own), why=f"{member.node} joins")


def announce(keys: Keys, guard: Guard, member: Member, lease: int) -> Txn:
    """Bring the own key up to date, if it is still the one that was created."""
    return Txn(
        compares=(_alive(keys, guard),),
        operations=(Put(keys.member(member.node), member.encode(), lease),),
        why=f"{member.node} announces its state",
    )


def drain(keys: Keys, member: KeyValue, record: Member) -> Txn:
    """Ask a member to drain, by its own key, which is as it was read."""
    return Txn(
        compares=(_unchanged(member.key, member.mod_revision),),
        operations=(Put(keys.member(record.node), record.encode(), member.lease),),
        why=f"{record.node} is asked to drain",
    )


def resize(keys: Keys, spec: SpecRecord, seen_mod: int) -> Txn:
    """Change how many nodes a live run may have: it is as it was read, and has not ended."""
    return Txn(
        compares=(_unchanged(keys.spec, seen_mod), _absent(keys.result(spec.attempt))),
        operations=(Put(keys.spec, spec.encode()),),
        why=f"the run may have {spec.spec.min_nodes} to {spec.spec.max_nodes} nodes",
    )


def file(keys: Keys, guard: Guard, report: Report, before: int) -> Txn:
    """Store a report about the current generation. It is true of the workers, whatever became of the member's key.

    `before` is the mod revision of this node's last report: a report whose answer was lost may arrive after the next.
    """
    key = keys.report(report.generation, report.node)
    return Txn(
        compares=(_current(keys, guard.generation), _unchanged(key, before)),
        operations=(Put(key, report.encode()),),
        why=f"{report.node} reports {report.status} in generation {report.generation}",
    )


def leave(keys: Keys, guard: Guard, report: Report | None) -> Txn:
    """Take the own key out; with `report` (a seated member's "left") the others need not ask whether it lives."""
    operations: tuple[Put | Delete, ...] = (Delete(keys.member(guard.node)),)
    compares: tuple[Compare, ...] = (_alive(keys, guard),)
    if report is not None:
        operations = (Put(keys.report(report.generation, guard.node), report.encode()), *operations)
        compares = (*compares, _current(keys, guard.generation))
    return Txn(compares, operations, why=f"{guard.node} leaves")


def roster(keys: Keys, nonce: str, chunks: tuple[RosterChunk, ...]) -> tuple[Txn, ...]:
    """Write a roster ahead of its generation, under a new nonce: no member reads it until the generation names it."""
    puts = [Put(keys.chunk(nonce, k), chunk.encode()) for k, chunk in enumerate(chunks)]
    parts = [tuple(puts[first : first + CHUNKS_PER_TXN]) for first in range(0, len(puts), CHUNKS_PER_TXN)]
    return tuple(Txn((), part, why=f"{len(part)} of {len(puts)} roster chunks") for part in parts)


def publish(
    keys: Keys, guard: Guard, generation: Generation, before: Generation | None, absent: Sequence[str] = ()
) -> Txn:
    """Replace the generation: number = previous + 1, by a leader whose key lives, from a head that still is the head.

    Comparing the head makes the resume point exact: a commit accepted since the leader read it makes this fail, and
    the leader decides again. So does a node of `absent`, which the leader leaves out because it has no key, if it has
    registered again and the leader's watch is late. The roster and the reports of the generation before go with it.
    """
    cleanup: tuple[Put | Delete, ...] = ()
    if before is not None:
        cleanup = (Delete(keys.reports(before.number)), Delete(keys.handover))
        if before.chunks:
            cleanup = (Delete(keys.roster(before.nonce)), *cleanup)
    return Txn(
        compares=(
            _unchanged(keys.spec, guard.spec),
            _current(keys, guard.generation),
            _unchanged(keys.checkpoint, guard.checkpoint),
            _alive(keys, guard),
            _own(keys, guard),
            _absent(keys.result(generation.attempt)),
            *(_absent(keys.member(node)) for node in absent[:ABSENT_MAX]),
        ),
        operations=(Put(keys.generation, generation.encode()), *cleanup),
        why=f"generation {generation.number}: {generation.cause}",
    )


def ask(keys: Keys, guard: Guard, handover: HandoverRecord) -> Txn:
    """Ask for a handover of the current generation, or go on with the one that stands."""
    return Txn(
        compares=(
            _current(keys, guard.generation),
            _unchanged(keys.handover, guard.handover),
            _alive(keys, guard),
        ),
        operations=(Put(keys.handover, handover.encode()),),
        why=f"handover of generation {handover.generation}: "
        + (f"all leave after step {handover.step}" if handover.step else "hold"),
    )


def withdraw(keys: Keys, guard: Guard) -> Txn:
    """Give a handover up."""
    return Txn(
        compares=(_unchanged(keys.handover, guard.handover), _alive(keys, guard)),
        operations=(Delete(keys.handover),),
        why="the handover is given up",
    )


def discard_roster(keys: Keys, nonce: str) -> Txn:
    """Take back a roster whose generation was not published."""
    return Txn((), (Delete(keys.roster(nonce)),), why="discard an unused roster")


def evict(keys: Keys, guard: Guard, member: Stored[Member]) -> Txn:
    """Fence a member: its key is as it was before it was probed, and the generation still is the same."""
    key = keys.member(member.record.node)
    return Txn(
        compares=(_unchanged(key, member.mod_revision), _current(keys, guard.generation)),
        operations=(Delete(key),),
        why=f"{member.record.node} is fenced",
    )


def finish(keys: Keys, guard: Guard, result: Result) -> Txn:
    """Write the one result of an attempt, and clear what only a living run needs."""
    return Txn(
        compares=(
            _absent(keys.result(result.attempt)),
            _unchanged(keys.spec, guard.spec),
            _current(keys, guard.generation),
            _alive(keys, guard),
        ),
        operations=(
            Put(keys.result(result.attempt), result.encode()),
            Delete(keys.rosters),
            Delete(keys.all_reports),
            Delete(keys.preparations),
            Delete(keys.handover),
        ),
        why=f"result: {result.status}",
    )


def commit(keys: Keys, generation: bytes, head_mod: int, attempt: int, head: Commit) -> Txn:
    """Make a checkpoint the head: its generation is current, the head before it is the one its writer knew.

    It is the head of its directory as well, of which a run may have several.
    """
    places = (Put(keys.place(head.place), head.to_json().encode()),) if head.place else ()
    return Txn(
        compares=(
            _current(keys, generation),
            _unchanged(keys.checkpoint, head_mod),
            _absent(keys.result(attempt)),
        ),
        operations=(Put(keys.checkpoint, head.to_json().encode()), *places),
        why=f"commit step {head.step} of generation {head.generation}",
    )


def claim(keys: Keys, name: str, record: Preparation, *, generation: bytes, seen_mod: int, lease: int) -> Txn:
    """Become the builder of a shared preparation that has no builder and is not done."""
    key = keys.preparation(name)
    return Txn(
        compares=(_unchanged(key, seen_mod), _current(keys, generation)),
        operations=(Put(key, record.encode(), lease),),
        why=f"{record.node} builds",
    )


def settle(keys: Keys, name: str, record: Preparation, *, claimed_mod: int) -> Txn:
    """End a preparation as "done" or "failed": only its builder can, and only while its claim stands."""
    key = keys.preparation(name)
    return Txn(
        compares=(_unchanged(key, claimed_mod),),
        operations=(Put(key, record.encode()),),
        why=f"{record.node} has built: {record.state}",
    )
