"""Every transaction that changes a run's shared state, as values. Pure.

Everything that leaves a generation is fenced. The transaction compares the value of the generation's key, which has a
nonce, so it takes effect only while that generation is the current one. Comparing a revision would not do: a store that
was wiped counts anew, and comes to the same numbers when the same run begins again. A lease is a sign of life, never a
permission to write.

A `View` is the writer's knowledge: the keys with their revisions as the writer read them. A failed transaction means
that this knowledge is old: the writer reads again and decides again. An unknown outcome is handled in the same way:
after reading again, either the effect is there (with our nonce), or it is not and the transaction may be tried again.
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
"""This many roster chunks fit into one request of etcd (1.5 MiB, 128 operations), even with the longest of names."""

ABSENT_MAX = 64
"""The most compares of missing keys in one transaction. etcd takes 128 compares of all kinds. Further missing keys are
not compared."""


def mod_revision_of(seen: Stored[Any] | KeyValue | None) -> int:
    """The mod revision of a key as the writer has seen it; 0 for an absent key, as etcd has it in compares."""
    return seen.mod_revision if seen is not None else 0


def _unchanged(key: str, mod_revision: int) -> Compare:
    """The key is as the writer has seen it."""
    return Compare(key, "mod", mod_revision)


def _absent(key: str) -> Compare:
    """The key does not exist."""
    return Compare(key, "create", 0)


def _generation_unchanged(keys: Keys, generation_value: bytes) -> Compare:
    """`generation` is still the value of the generation's key; with an empty value there is no generation yet."""
    return Compare(keys.generation, "value", generation_value) if generation_value else _absent(keys.generation)


def _own_key_kept(keys: Keys, view: View) -> Compare:
    """The writer's own member key still is the one that it created: the writer is not fenced, its lease lives."""
    mine = view.members.get(view.node)
    return Compare(keys.member(view.node), "create", mine.create_revision if mine else 0)


def _own_lease_kept(keys: Keys, view: View) -> Compare:
    """The writer's own member key is bound to the writer's lease.

    Before the first generation there is no nonce to compare. Then only the lease tells a key from one with the same
    revision in a store that was wiped.
    """
    mine = view.members.get(view.node)
    return Compare(keys.member(view.node), "lease", mine.lease if mine else 0)


def register(
    keys: Keys, member: Member, lease: int, spec: SpecRecord | None = None, *, generation_value: bytes, seen_mod: int
) -> Txn:
    """Enter a run whose spec is as it was read, under a name that no member has.

    Args:
        keys: the names of the run's keys.
        member: the record to store.
        lease: the lease to bind the key to.
        spec: if given, it is stored as well: the run begins with it. Its attempt must not have ended.
        generation_value: the value of the generation's key as it was read.
        seen_mod: the mod revision of the spec as it was read.
    """
    own = Put(keys.member(member.node), member.encode(), lease)
    compares = (
        _unchanged(keys.spec, seen_mod),
        _generation_unchanged(keys, generation_value),
        _absent(keys.member(member.node)),
    )
    if spec is None:
        return Txn(compares, (own,), why=f"{member.node} registers again")
    begins = (*compares, _absent(keys.result(spec.attempt)))
    return Txn(begins, (Put(keys.spec, spec.encode()), own), why=f"{member.node} joins")


def announce(keys: Keys, view: View, member: Member, lease: int) -> Txn:
    """Bring the writer's own key up to date, if it still is the one that was created."""
    # Only the creation of the key is compared, so this may overwrite an operator's request to drain that the member has
    # not seen yet. `elasticrt drain` asks again until the node has left.
    return Txn(
        compares=(_own_key_kept(keys, view),),
        operations=(Put(keys.member(member.node), member.encode(), lease),),
        why=f"{member.node} announces its state",
    )


def drain(keys: Keys, member: KeyValue, record: Member) -> Txn:
    """Ask a member to drain by changing its key, if the key is as it was read.

    `member` is the key as it was read, `record` what it shall say. The key stays bound to its owner's lease.
    """
    return Txn(
        compares=(_unchanged(member.key, member.mod_revision),),
        operations=(Put(keys.member(record.node), record.encode(), member.lease),),
        why=f"{record.node} is asked to drain",
    )


def change_spec(keys: Keys, spec: SpecRecord, seen_mod: int) -> Txn:
    """Change what a live run has agreed on, if its spec is as it was read and the run has not ended."""
    return Txn(
        compares=(_unchanged(keys.spec, seen_mod), _absent(keys.result(spec.attempt))),
        operations=(Put(keys.spec, spec.encode()),),
        why="the run is told to stop"
        if spec.stopped
        else f"the run may have {spec.spec.min_nodes} to {spec.spec.max_nodes} nodes",
    )


def write_report(keys: Keys, view: View, report: Report, before: int) -> Txn:
    """Store a report about the current generation. Its truth does not depend on the member key, which is not compared.

    `before` is the mod revision of this node's last report, 0 for none. It keeps a report whose answer was lost from
    arriving after the next one.
    """
    key = keys.report(report.generation, report.node)
    return Txn(
        compares=(_generation_unchanged(keys, view.generation_value), _unchanged(key, before)),
        operations=(Put(key, report.encode()),),
        why=f"{report.node} reports {report.status} in generation {report.generation}",
    )


def leave(keys: Keys, view: View, report: Report | None) -> Txn:
    """Delete the writer's own key. With `report` (a seated member's "left") the other nodes need not probe it."""
    # Without a report nothing but the own key is compared: a node must be able to leave while the generation changes.
    operations: tuple[Put | Delete, ...] = (Delete(keys.member(view.node)),)
    compares: tuple[Compare, ...] = (_own_key_kept(keys, view),)
    if report is not None:
        operations = (Put(keys.report(report.generation, view.node), report.encode()), *operations)
        compares = (*compares, _generation_unchanged(keys, view.generation_value))
    return Txn(compares, operations, why=f"{view.node} leaves")


def write_roster(keys: Keys, nonce: str, chunks: tuple[RosterChunk, ...]) -> tuple[Txn, ...]:
    """Write a roster ahead of its generation, under a new nonce. No member reads it before the generation names it."""
    puts = [Put(keys.chunk(nonce, k), chunk.encode()) for k, chunk in enumerate(chunks)]
    parts = [tuple(puts[first : first + CHUNKS_PER_TXN]) for first in range(0, len(puts), CHUNKS_PER_TXN)]
    return tuple(Txn((), part, why=f"{len(part)} of {len(puts)} roster chunks") for part in parts)


def publish(
    keys: Keys, view: View, generation: Generation, before: Generation | None, absent: Sequence[str] = ()
) -> Txn:
    """Replace the generation: number = previous + 1, by a leader whose key lives, with the newest head.

    Comparing the head makes the resume point exact: after a commit that the leader has not seen, this fails and the
    leader decides again. It also fails if a node of `absent` has registered again while the leader's watch is late; the
    leader leaves these nodes out because they have no key. The roster and the reports of the generation `before` are
    deleted with it.
    """
    cleanup: tuple[Put | Delete, ...] = ()
    if before is not None:
        # A handover belongs to one generation. Its key goes here, so that the next generation does not begin with it.
        cleanup = (Delete(keys.reports(before.number)), Delete(keys.handover))
        if before.chunks:
            cleanup = (Delete(keys.roster(before.nonce)), *cleanup)
    return Txn(
        compares=(
            _unchanged(keys.spec, mod_revision_of(view.spec)),
            _generation_unchanged(keys, view.generation_value),
            _unchanged(keys.checkpoint, mod_revision_of(view.head)),
            _own_key_kept(keys, view),
            _own_lease_kept(keys, view),
            _absent(keys.result(generation.attempt)),
            *(_absent(keys.member(node)) for node in absent[:ABSENT_MAX]),
        ),
        operations=(Put(keys.generation, generation.encode()), *cleanup),
        why=f"generation {generation.number}: {generation.cause}",
    )


def write_handover(keys: Keys, view: View, handover: HandoverRecord) -> Txn:
    """Write the handover record of the current generation, for the first round or, over it, for the second."""
    return Txn(
        compares=(
            _generation_unchanged(keys, view.generation_value),
            _unchanged(keys.handover, mod_revision_of(view.handover)),
            _own_key_kept(keys, view),
        ),
        operations=(Put(keys.handover, handover.encode()),),
        why=f"handover of generation {handover.generation}: "
        + (f"all workers stop after step {handover.step}" if handover.step else "hold"),
    )


def withdraw_handover(keys: Keys, view: View) -> Txn:
    """Give a handover up, if its record is as the leader has seen it."""
    # "Go" changes the record, so a withdrawal that comes too late fails.
    return Txn(
        compares=(_unchanged(keys.handover, mod_revision_of(view.handover)), _own_key_kept(keys, view)),
        operations=(Delete(keys.handover),),
        why="the handover is given up",
    )


def discard_roster(keys: Keys, nonce: str) -> Txn:
    """Delete a roster whose generation was not published."""
    return Txn((), (Delete(keys.roster(nonce)),), why="discard an unused roster")


def fence(keys: Keys, generation_value: bytes, node: str, seen_mod: int) -> Txn:
    """Fence a member, if its key is as it was before the probe and the generation is still the same."""
    key = keys.member(node)
    return Txn(
        compares=(_unchanged(key, seen_mod), _generation_unchanged(keys, generation_value)),
        operations=(Delete(key),),
        why=f"{node} is fenced",
    )


def finish(keys: Keys, view: View, result: Result) -> Txn:
    """Write the one result of an attempt, and delete what only a living run needs."""
    # The generation and the head stay: a later attempt with the same run id goes on from them.
    return Txn(
        compares=(
            _absent(keys.result(result.attempt)),
            _unchanged(keys.spec, mod_revision_of(view.spec)),
            _generation_unchanged(keys, view.generation_value),
            _own_key_kept(keys, view),
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


def commit(
    keys: Keys, generation_value: bytes, head_mod: int, attempt: int, head: Commit, *, beside: bool = False
) -> Txn:
    """Make a checkpoint the head, if its generation is current and the head before it is the one that its writer knew.

    Args:
        keys: the names of the run's keys.
        generation_value: the value of the generation's key as the writer knows it.
        head_mod: the mod revision of the head that the writer knew; with `beside`, of the directory's head.
        attempt: the attempt that the generation belongs to; it must not have ended.
        head: the checkpoint. It becomes the head of its directory as well, if the run has several.
        beside: the checkpoint is not a Loop's, but saved beside one: it becomes only the head of its directory.
    """
    changed = keys.place(head.place) if beside else keys.checkpoint
    heads = {changed, keys.place(head.place)} if head.place else {changed}
    return Txn(
        compares=(
            _generation_unchanged(keys, generation_value),
            _unchanged(changed, head_mod),
            _absent(keys.result(attempt)),
        ),
        operations=tuple(Put(key, head.to_json().encode()) for key in sorted(heads)),
        why=f"commit step {head.step} of generation {head.generation}",
    )


def claim_preparation(
    keys: Keys, name: str, record: Preparation, *, generation_value: bytes, seen_mod: int, lease: int
) -> Txn:
    """Become the builder of a shared data preparation, if its record is as it was read.

    The record lives on the builder's `lease`, so that a builder that dies leaves the preparation free.
    """
    key = keys.preparation(name)
    return Txn(
        compares=(_unchanged(key, seen_mod), _generation_unchanged(keys, generation_value)),
        operations=(Put(key, record.encode(), lease),),
        why=f"{record.node} builds",
    )


def free_preparation(keys: Keys, name: str, *, claimed_mod: int) -> Txn:
    """Give up a claim whose builder has ended, if it still stands."""
    key = keys.preparation(name)
    return Txn(
        compares=(_unchanged(key, claimed_mod),), operations=(Delete(key),), why=f"nobody builds {name} any more"
    )


def end_preparation(keys: Keys, name: str, record: Preparation, *, claimed_mod: int) -> Txn:
    """End a preparation as "done" or "failed". Only its builder can, and only while its claim stands."""
    key = keys.preparation(name)
    # The revision of the claim is proof enough: if the builder's lease had ended, the claim would be gone.
    return Txn(
        compares=(_unchanged(key, claimed_mod),),
        operations=(Put(key, record.encode()),),
        why=f"{record.node} has built: {record.state}",
    )
