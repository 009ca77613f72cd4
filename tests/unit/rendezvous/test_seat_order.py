"""Who sits where: survivors keep their places, newcomers wish for theirs."""

from __future__ import annotations

import pytest

from elasticrt.rendezvous.records import Member, Seat
from elasticrt.rendezvous.seats import seat_order, seats_for
from elasticrt.rendezvous.view import Stored


def _member(name: str, created: int, node_rank: int | None = None) -> Stored[Member]:
    record = Member(
        node=name,
        incarnation=f"{created:016x}",
        address="127.0.0.1",
        pid=1,
        workers=2,
        probe_port=1,
        port=2,
        node_rank=node_rank,
    )
    return Stored(record, create_revision=created, mod_revision=created, since=0.0)


def _names(entries: list[Stored[Member]]) -> list[str]:
    return [entry.record.node for entry in entries]


@pytest.mark.parametrize(
    ("members", "most", "expected"),
    [
        ([("a", 3, None), ("b", 1, None), ("c", 2, None)], 9, ["b", "c", "a"]),
        ([("a", 3, 0), ("b", 1, 2), ("c", 2, 1)], 9, ["a", "c", "b"]),
        ([("a", 1, None), ("b", 2, 7), ("c", 3, None)], 9, ["b", "a", "c"]),
        ([("a", 1, 1), ("b", 2, 1)], 9, ["a", "b"]),
        ([("a", 3, 0), ("b", 1, 2), ("c", 2, 1)], 2, ["c", "b"]),
    ],
)
def test_newcomers_sit_as_they_wish(members: list[tuple[str, int, int | None]], most: int, expected: list[str]) -> None:
    """The oldest get in; those who do sit by --node-rank, those without one behind, equal ones by age."""
    assert _names(seat_order([_member(*each) for each in members], [], most)) == expected


def test_survivors_keep_their_places() -> None:
    """A node rank moves nobody who sits already: rank 0 stays where it is, newcomers come behind."""
    old = [_member("a", 1, 5), _member("b", 2, 4)]
    before: tuple[Seat, ...] = seats_for(old)
    assert _names(seat_order([_member("c", 3, 0), *reversed(old)], before, 9)) == ["a", "b", "c"]
