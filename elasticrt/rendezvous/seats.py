"""Assigns ranks: from members to seats. Pure.

Survivors keep their order and newcomers go last. So rank 0, its caches and its logs stay where they are as long as
their node lives. Names and addresses do not matter. Newcomers may ask for a place (`--node-rank`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from elasticrt.rendezvous.records import Member, Seat
from elasticrt.rendezvous.view import Stored


def seat_order(ready: Iterable[Stored[Member]], before: Iterable[Seat], most: int) -> list[Stored[Member]]:
    """At most `most` members in rank order: those seated before in their old order, then newcomers.

    Among newcomers the oldest keys get in. Those that get in sit in the order of the node ranks that they asked for.
    Newcomers without a wish come after them, by age.

    Args:
        ready: the members to choose from.
        before: the seats whose members keep their order.
        most: the largest number of members.
    """
    old = {(seat.node, seat.incarnation): seat.index for seat in before}

    def place(entry: Stored[Member]) -> tuple[int, int]:
        index = old.get((entry.record.node, entry.record.incarnation))
        return (0, index) if index is not None else (1, entry.create_revision)

    def wish(entry: Stored[Member]) -> float:
        seated = (entry.record.node, entry.record.incarnation) in old
        return -1 if seated else math.inf if entry.record.node_rank is None else entry.record.node_rank

    # The inner sort decides who gets in, the outer one who sits where. It is stable, so equal wishes keep the order of
    # `place`.
    return sorted(sorted(ready, key=place)[:most], key=wish)


def seats_for(members: Iterable[Stored[Member]], *, in_place: bool = False) -> tuple[Seat, ...]:
    """Seats in the order given, with ranks counted through: a permutation of 0 ... W - 1 by construction.

    A seat has as many ranks as its node has workers; with `in_place`, as many as are ready to go on.
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
