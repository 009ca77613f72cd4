"""Which agents are asked where workers are, and when, as far as a member knows its generation."""

from __future__ import annotations

import pytest

from elasticrt.agent.agent import whom_to_ask
from elasticrt.ipc.time_bounds import FOUND_S, PLACES_S
from elasticrt.liveness.culprit_search import question_times
from elasticrt.rendezvous.records import Member, Seat
from elasticrt.rendezvous.view import Stored, View

SEATS = {
    name: Seat(node=name, incarnation=name * 16, index=index, rank_offset=index, workers=1, address=name, probe_port=9)
    for index, name in enumerate("abcd")
}
LEADER = Member(node="b", incarnation="b" * 16, address="b", pid=7, workers=1, probe_port=9, port=8)


@pytest.mark.parametrize(
    ("node", "known", "asked"),
    [
        pytest.param("a", "abcd", "bcd", id="the node of rank 0 asks all others"),
        pytest.param("d", "abcd", "a", id="every other one asks that node"),
        pytest.param("d", "cd", "b", id="of many nodes it may know only the leader"),
        pytest.param("b", "abcd", "a", id="the leader knows all"),
    ],
)
def test_who_is_asked(node: str, known: str, asked: str) -> None:
    """W09: each node hears who is waited for, whichever part of the roster it has read."""
    members = {"b": Stored(LEADER, 1, 1, 0.0)}
    view = View(node, members=members, leader_node="b", seats={name: SEATS[name] for name in known})
    assert "".join(seat.node for seat in whom_to_ask(view, first=node == "a")) == asked


@pytest.mark.parametrize(
    ("first", "asks_leader", "later"),
    [(True, False, 0), (False, False, 1), (False, True, 2)],
    ids=["rank 0 is here", "rank 0 is known", "only the leader is known"],
)
def test_those_are_asked_when_they_know(first: bool, asks_leader: bool, later: int) -> None:
    """W09: the node of rank 0 finds it first, the leader hears it from there, and the rest from the leader."""
    expected = [places_s + later * found_s for places_s, found_s in zip(PLACES_S, FOUND_S, strict=True)]
    assert question_times(first=first, asks_leader=asks_leader) == expected
