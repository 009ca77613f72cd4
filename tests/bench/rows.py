"""The rows of the recovery table: what is done to a job, and in which order one job is disturbed again and again. Pure.

Nodes are agents with one worker each, all on this machine. `room` is how many more nodes the job has than are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One kind of event.

    Attributes:
        name: as the command line has it.
        title: as the table has it.
        what: what is done, for the help text.
        change: how many nodes there are more afterwards.
        counts_pause: the others train on while the event is under way, so that the pause is what it costs.
        room: the job's maximum is above the nodes that are there by so many.
        network: every node needs a network namespace of its own.
        setup_s: seconds of set-up that the script has before its process group.
    """

    name: str
    title: str
    what: str
    change: int = 0
    counts_pause: bool = False
    room: int = 0
    network: bool = False
    setup_s: float = 0.0

    @property
    def job(self) -> tuple[int, bool, float]:
        """What a job must be like for this row: rows that agree in it can share one."""
        return self.room, self.network, self.setup_s


SETUP_S = 5.0

ROWS = {
    row.name: row
    for row in (
        Row("start", "start, below max", "all nodes are started at once, one fewer than the maximum", room=1),
        Row("worker", "worker SIGKILL", "a worker that is not rank 0 is killed; all nodes are there"),
        Row(
            "node",
            "node SIGKILL",
            "a node (agent and all below it) is killed: not rank 0's, not the store's",
            change=-1,
        ),
        Row("rank0", "rank-0 node SIGKILL", "the node with rank 0 is killed: never torchrun's store", change=-1),
        Row(
            "power",
            "power loss",
            "a node loses power: its network goes, then its processes, so that nobody is told; needs root",
            change=-1,
            network=True,
        ),
        Row("store", "store's node SIGKILL", "the node with the store is killed: our own etcd, too", change=-1),
        Row("join", "a node joins", "one more node is started beside the others", change=1, counts_pause=True),
        Row(
            "leave",
            "a node leaves (SIGTERM)",
            "a node is told to leave: SIGTERM to its agent",
            change=-1,
            counts_pause=True,
        ),
        Row("setup", "worker SIGKILL, 5 s of set-up", "as worker, of a script with 5 s of set-up", setup_s=SETUP_S),
    )
}
USUAL = ("start", "worker", "node", "rank0", "power", "join", "leave", "setup")


def tours(rows: Iterable[str], reps: int) -> list[list[tuple[str, bool]]]:
    """What to do to one job after the other, so that every row is measured `reps` times; False: not for the table.

    Rows that need the same kind of job share one. A node that has gone is followed by one that joins: that is a
    repetition of `join`, as long as those are wanted.
    """
    kinds: dict[tuple[int, bool, float], list[Row]] = {}
    for row in map(ROWS.__getitem__, rows):
        kinds.setdefault(row.job, []).append(row)
    return [list(_tour(kind, reps)) for kind in kinds.values()]


def _tour(rows: list[Row], reps: int) -> Iterator[tuple[str, bool]]:
    joins = reps if any(row.name == "join" for row in rows) else 0
    others = [row for row in rows if row.name != "join"]
    for _ in range(reps):
        for row in others:
            yield row.name, True
            if row.change < 0:
                yield "join", joins > 0
                joins -= 1
    for _ in range(joins):
        yield "leave", False
        yield "join", True
