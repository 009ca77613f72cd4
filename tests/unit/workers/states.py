"""What a node reports whose workers have ended somehow."""

from __future__ import annotations

from typing import Any

from elasticrt.rendezvous.records import Generation, Report, Seat
from elasticrt.workers.group_state import GroupState


def ended(workers: int, **ends: Any) -> Report:
    """The report of a node with so many workers in generation 1; `ends` as in `GroupState`."""
    generation = Generation(
        number=1,
        attempt=1,
        nonce="0" * 16,
        nodes=1,
        world_size=workers,
        master_address="127.0.0.1",
        master_port=5,
        cause="start",
        kind="start",
        chunks=1,
        roster_digest="0" * 64,
    )
    seat = Seat(
        node="node-0",
        incarnation="0" * 16,
        index=0,
        rank_offset=0,
        workers=workers,
        address="127.0.0.1",
        probe_port=5,
    )
    report = GroupState(1, generation, seat, **ends).report(kept=None, ready=0, has_state=False)
    assert report is not None
    return report
