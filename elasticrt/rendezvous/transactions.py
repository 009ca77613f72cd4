"""Every transaction that changes a run's shared state, as values. Pure.

Everything that leaves a generation is fenced: the transaction compares the generation's value, which has a nonce, so it
can only take effect while that generation is the current one. A revision would not do: a store that was wiped counts
anew, and comes to the same numbers when the same run begins again. A lease is a sign of life, never a permission to
write.

A `View` is what the writer knows: the keys with their revisions as it read them. A transaction that fails means that
this is old; the writer reads again and decides again. One whose outcome is unknown is handled the same way: after
reading again, either its effect is there (with our nonce), or it is not and may be tried again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def mod(seen: Stored[Any] | KeyValue | None) -> int:
    """The mod revision of a key as the writer has seen it: 0 for an absent one, which is what etcd compares as well."""
    return seen.mod_revision if seen is not None else 0


def _unchanged(key: str, mod_revision: int) -> Compare:
    return Compare(key, "mod", mod_revision)


def _absent(key: str) -> Compare:
    return Compare(key, "create", 0)


def _current(keys: Keys, generation: bytes) -> Compare:
    return Compare(keys.generation, "value", generation) if generation else _absent(keys.generation)


def _alive(keys: Keys, view: View) -> Compare:
    mine = view.members.get(view.node)
    return Compare(keys.member(view.node), "create", mine.create_revision if mine else 0)


def _own(keys: Keys, view: View) -> Compare:
    """Before the first generation only the lease tells a key from one of the same revision in a wiped store."""
    mine = view.members.get(view.node)
    return Compare(keys.member(view.node), "lease", mine.lease if mine else 0)


def register(
    keys: Keys, member: Member, lease: int, spec: SpecRecord | None = None, *, generation: bytes, seen_mod: int
) -> Txn:
    """Come into a run whose spec is as read, under a name that no member has. With `spec`, which is written, begin it:
    then it has not ended either.
    """
    own = Put(keys.member(member.node), member.encode(), lease)
    compares = (
        _unchanged(keys.spec, seen_mod),
        _current(keys, generation),
        _absent(keys.member(member.node)),
    )
    if spec is None:
        return Txn(compares, (own,), why=f"{member.node} registers again")
    begins = (*compares, _absent(keys.result(spec.attempt)))
    return Txn(begins, (Put(keys.spec, spec.encode()), own), why=f"{member.node} joins")


def announce(keys: Keys, view: View, member: Member, lease: int) -> Txn:
    """Bring the own key up to date, if it is still the one that was created."""
    return Txn(
        compares=(_alive(keys, view),),
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


def file(keys: Keys, view: View, report: Report, before: int) -> Txn:
    """Store a report about the current generation. It is true of the workers, whatever became of the member's key.

    `before` is the mod revision of this node's last report: a report whose answer was lost may arrive after the next.
    """
    key = keys.report(report.generation, report.node)
    return Txn(
        compares=(_current(keys, view.fence), _unchanged(key, before)),
        operations=(Put(key, report.encode()),),
        why=f"{report.node} reports {report.status} in generation {report.generation}",
    )


def leave(keys: Keys, view: View, report: Report | None) -> Txn:
    """Take the own key out; with `report` (a seated member's "left") the others need not ask whether it lives."""
    operations: tuple[Put | Delete, ...] = (Delete(keys.member(view.node)),)
    compares: tuple[Compare, ...] = (_alive(keys, view),)
    if report is not None:
        operations = (Put(keys.report(report.generation, view.node), report.encode()), *operations)
        compares = (*compares, _current(keys, view.fence))
    return Txn(compares, operations, why=f"{view.node} leaves")


def roster(keys: Keys, nonce: str, chunks: tuple[RosterChunk, ...]) -> tuple[Txn, ...]:
    """Write a roster ahead of its generation, under a new nonce: no member reads it until the generation names it."""
    puts = [Put(keys.chunk(nonce, k), chunk.encode()) for k, chunk in enumerate(chunks)]
    parts = [tuple(puts[first : first + CHUNKS_PER_TXN]) for first in range(0, len(puts), CHUNKS_PER_TXN)]
    return tuple(Txn((), part, why=f"{len(part)} of {len(puts)} roster chunks") for part in parts)


def publish(
    keys: Keys, view: View, generation: Generation, before: Generation | None, absent: Sequence[str] = ()
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
            _unchanged(keys.spec, mod(view.spec)),
            _current(keys, view.fence),
            _unchanged(keys.checkpoint, mod(view.head)),
            _alive(keys, view),
            _own(keys, view),
            _absent(keys.result(generation.attempt)),
            *(_absent(keys.member(node)) for node in absent[:ABSENT_MAX]),
        ),
        operations=(Put(keys.generation, generation.encode()), *cleanup),
        why=f"generation {generation.number}: {generation.cause}",
    )


def ask(keys: Keys, view: View, handover: HandoverRecord) -> Txn:
    """Ask for a handover of the current generation, or go on with the one that stands."""
    return Txn(
        compares=(
            _current(keys, view.fence),
            _unchanged(keys.handover, mod(view.handover)),
            _alive(keys, view),
        ),
        operations=(Put(keys.handover, handover.encode()),),
        why=f"handover of generation {handover.generation}: "
        + (f"all leave after step {handover.step}" if handover.step else "hold"),
    )


def withdraw(keys: Keys, view: View) -> Txn:
    """Give a handover up."""
    return Txn(
        compares=(_unchanged(keys.handover, mod(view.handover)), _alive(keys, view)),
        operations=(Delete(keys.handover),),
        why="the handover is given up",
    )


def discard_roster(keys: Keys, nonce: str) -> Txn:
    """Take back a roster whose generation was not published."""
    return Txn((), (Delete(keys.roster(nonce)),), why="discard an unused roster")


def evict(keys: Keys, generation: bytes, node: str, seen_mod: int) -> Txn:
    """Fence a member: its key is as it was before it was probed, and the generation still is the same."""
    key = keys.member(node)
    return Txn(
        compares=(_unchanged(key, seen_mod), _current(keys, generation)),
        operations=(Delete(key),),
        why=f"{node} is fenced",
    )


def finish(keys: Keys, view: View, result: Result) -> Txn:
    """Write the one result of an attempt, and clear what only a living run needs."""
    return Txn(
        compares=(
            _absent(keys.result(result.attempt)),
            _unchanged(keys.spec, mod(view.spec)),
            _current(keys, view.fence),
            _alive(keys, view),
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


def commit(keys: Keys, generation: bytes, head_mod: int, attempt: int, head: Commit, *, beside: bool = False) -> Txn:
    """Make a checkpoint the head: its generation is current, the head before it is the one its writer knew.

    It is the head of its directory as well, of which a run may have several; `beside` a Loop's only of that.
    """
    changed = keys.place(head.place) if beside else keys.checkpoint
    heads = {changed, keys.place(head.place)} if head.place else {changed}
    return Txn(
        compares=(_current(keys, generation), _unchanged(changed, head_mod), _absent(keys.result(attempt))),
        operations=tuple(Put(key, head.to_json().encode()) for key in sorted(heads)),
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
