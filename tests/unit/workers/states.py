"""Workers, and what a node reports whose workers have ended somehow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elasticrt.ipc.env import WorkerEnv
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


def worker(node: str, rank: int, generation: int, directory: Path | None = None, **more: Any) -> WorkerEnv:
    """One worker of a run in that directory."""
    fields = {
        "local_rank": rank,
        "world_size": 8,
        "local_world_size": 8,
        "group_rank": 0,
        "group_world_size": 1,
        "master_addr": "127.0.0.1",
        "master_port": 1,
        "restart_count": 0,
        "max_restarts": 3,
        "run_id": "run",
        "attempt": 1,
        "nonce": "0" * 16,
        "run_dir": str(directory or ""),
    }
    return WorkerEnv(node=node, rank=rank, generation=generation, **{**fields, **more})
