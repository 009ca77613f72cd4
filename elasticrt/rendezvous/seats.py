"""Who sits where: from members to ranks. Pure.

Survivors keep their order and newcomers go last, so that rank 0, its caches and its logs stay where they are as long as
their node lives. Nobody's name or address decides about ranks; newcomers may wish for a place (`--node-rank`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from elasticrt.rendezvous.records import (
    CopyRecord,
    Generation,
    HeadRecord,
    Member,
    RosterChunk,
    Seat,
    roster_chunks,
    roster_digest,
)
from elasticrt.rendezvous.view import Stored


@dataclass(frozen=True)
class Restarts:
    """What a generation says of failures: `spent` since there was progress, `total`; the rest as in `Generation`."""

    spent: int = 0
    total: int = 0
    step: int = 0
    beats: int = 0
    loaded: int = 0
    early: str = ""

    @classmethod
    def of(cls, before: Generation) -> Restarts:
        """The same as before, for a generation that follows it for free."""
        most = (before.restart_step, before.restart_beats, before.restart_loaded)
        return cls(before.restarts, before.restarts_total, *most, before.early)


@dataclass(frozen=True)
class Draft:
    """A generation as decided, before it has its nonce: everything but randomness."""

    number: int
    attempt: int
    kind: Literal["start", "failure", "lost", "join", "drain", "resize"]
    cause: str
    seats: tuple[Seat, ...]
    master_address: str
    master_port: int
    restarts: Restarts
    resume: HeadRecord | None
    memory: CopyRecord | None = None
    in_place: bool = False

    def seal(self, nonce: str, chunk_size: int) -> tuple[Generation, tuple[RosterChunk, ...]]:
        """The record to publish and its roster, in chunks of `chunk_size` seats on average."""
        chunks = roster_chunks(self.seats, chunk_size)
        record = Generation(
            number=self.number,
            attempt=self.attempt,
            nonce=nonce,
            nodes=len(self.seats),
            world_size=sum(seat.workers for seat in self.seats),
            master_address=self.master_address,
            master_port=self.master_port,
            cause=self.cause,
            kind=self.kind,
            in_place=self.in_place,
            restarts=self.restarts.spent,
            restarts_total=self.restarts.total,
            restart_step=self.restarts.step,
            restart_beats=self.restarts.beats,
            restart_loaded=self.restarts.loaded,
            early=self.restarts.early,
            resume=self.resume,
            memory=self.memory,
            chunks=len(chunks),
            roster_digest=roster_digest(chunks),
        )
        return record, chunks


def seat_order(ready: Iterable[Stored[Member]], before: Iterable[Seat], most: int) -> list[Stored[Member]]:
    """At most `most` ready members in rank order: those seated before in their old order, then newcomers.

    The oldest keys get in. Those that do sit by the node ranks that they were given, those without one behind, by age.
    """
    old = {(seat.node, seat.incarnation): seat.index for seat in before}

    def place(entry: Stored[Member]) -> tuple[int, int]:
        index = old.get((entry.record.node, entry.record.incarnation))
        return (0, index) if index is not None else (1, entry.create_revision)

    def wish(entry: Stored[Member]) -> float:
        seated = (entry.record.node, entry.record.incarnation) in old
        return -1 if seated else math.inf if entry.record.node_rank is None else entry.record.node_rank

    return sorted(sorted(ready, key=place)[:most], key=wish)


def seats_for(members: Iterable[Stored[Member]], *, in_place: bool = False) -> tuple[Seat, ...]:
    """Seats in the order given, ranks counted through: a permutation of 0 ... W - 1 by construction.

    With `in_place` for the workers that are ready, else for as many as each node has.
    """
    seats: list[Seat] = []
    offset = 0
    for index, entry in enumerate(members):
        member = entry.record
        workers = member.ready if in_place else member.workers
        seats.append(
            Seat(
                node=member.node,
                incarnation=member.incarnation,
                index=index,
                rank_offset=offset,
                workers=workers,
                address=member.address,
                probe_port=member.probe_port,
            )
        )
        offset += workers
    return tuple(seats)
