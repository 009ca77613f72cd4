"""Who may be asked about a silent node: others that know it."""

from __future__ import annotations

from elasticrt.rendezvous.records import Generation, Seat, chunk_of
from elasticrt.rendezvous.view import Stored, View

CHUNKS = 4


def _seat(index: int) -> Seat:
    life, name = f"{index:016x}", f"n{index}"
    return Seat(
        node=name, incarnation=life, index=index, rank_offset=index, workers=1, address="10.0.0.1", probe_port=1
    )


def _view(node: str, seats: list[Seat], chunks: int) -> View:
    generation = Generation(
        number=1,
        attempt=1,
        nonce="a" * 16,
        nodes=64,
        world_size=64,
        master_address="10.0.0.1",
        master_port=1,
        cause="start",
        kind="start",
        chunks=chunks,
    )
    return View(node, generation=Stored(generation, 1, 1, 0.0), seats={seat.node: seat for seat in seats})


def test_whom_to_ask_about_a_node() -> None:
    """N11: neither itself nor the one in doubt; of a large run who has the same part of the roster; of two nobody."""
    seats = [_seat(index) for index in range(64)]
    assert _view("n0", seats[:2], 1).witnesses(seats[1]) == []
    assert _view("n0", seats[:3], 1).witnesses(seats[1]) == [seats[2]]

    chunks = {seat.node: chunk_of(seat.node, CHUNKS) for seat in seats}
    near = [seat for seat in seats[2:] if chunks[seat.node] == chunks["n1"]]
    assert near
    assert _view("n0", seats, CHUNKS).witnesses(seats[1]) == near

    own = [seat for seat in seats if chunks[seat.node] == chunks["n0"]]
    leader = next(seat for seat in seats if seat not in own)
    assert _view("n0", own, CHUNKS).witnesses(leader) == own[1:], "all know the leader, by its key"
