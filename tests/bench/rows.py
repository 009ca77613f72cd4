"""The rows of the recovery table: what is done to a job, and in which order one job is disturbed again and again. Pure.

Nodes are agents with one worker each, all on this machine. `room` is how many more nodes the job has than are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace


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
        state_mb: the state that the script is to have, 0 for a small one.
        of: the event, where this is a row of one under other conditions.
        ours_alone: measured with Loop only.
    """

    name: str
    title: str
    what: str
    change: int = 0
    counts_pause: bool = False
    room: int = 0
    network: bool = False
    setup_s: float = 0.0
    state_mb: float = 0.0
    of: str = ""
    ours_alone: bool = False

    @property
    def event(self) -> str:
        """What is done, under whatever conditions."""
        return self.of or self.name

    @property
    def label(self) -> str:
        """The title, with the conditions."""
        conditions = [f"{self.setup_s:g} s of set-up"] * (self.setup_s > 0) + [f"{self.state_mb:g} MB"] * (
            self.state_mb > 0
        )
        return ", ".join([self.title, *conditions])

    @property
    def job(self) -> Kind:
        """What a job must be like for this row: rows that agree in it can share one."""
        return self.room, self.network, self.setup_s, self.state_mb


Kind = tuple[int, bool, float, float]
EVENTS = ("worker", "node", "rank0", "power", "join", "leave")
LARGE = ("worker", "node", "join", "leave")
SETUP_S = 5.0
STATE_MB = 400.0

_ROWS = {
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
        Row("setup", "worker SIGKILL", "as worker, of a script with 5 s of set-up", of="worker", setup_s=SETUP_S),
    )
}


def _also(event: str, name: str, words: str, **differs: float) -> Row:
    """The row of an event under other conditions."""
    row = _ROWS[event]
    return replace(row, name=name, of=event, what=f"as {event}, {words}", ours_alone=True, **differs)


_SET_UP = [_also(each, f"{each}-setup", "with 5 s of set-up", setup_s=SETUP_S) for each in EVENTS if each != "worker"]
_LARGE = [_also(each, f"{each}-large", "with 400 MB of state", state_mb=STATE_MB) for each in LARGE]
ROWS = {**_ROWS, **{row.name: row for row in (*_SET_UP, *_LARGE)}}
USUAL = ("start", "worker", "node", "rank0", "power", "join", "leave", "setup")
ALL = tuple(name for name in ROWS if name != "store")


def tours(rows: Iterable[str], reps: int) -> list[list[tuple[str, bool]]]:
    """What to do to one job after the other, so that every row is measured `reps` times; False: not for the table.

    Rows that need the same kind of job share one. A node that has gone is followed by one that joins: that is a
    repetition of `join`, as long as those are wanted.
    """
    kinds: dict[Kind, list[Row]] = {}
    for row in map(ROWS.__getitem__, rows):
        kinds.setdefault(row.job, []).append(row)
    return [list(_tour(kind, reps)) for kind in kinds.values()]


def _tour(rows: list[Row], reps: int) -> Iterator[tuple[str, bool]]:
    join = next((row.name for row in rows if row.event == "join"), "join")
    joins = reps if any(row.event == "join" for row in rows) else 0
    others = [row for row in rows if row.event != "join"]
    for _ in range(reps):
        for row in others:
            yield row.name, True
            if row.change < 0:
                yield join, joins > 0
                joins -= 1
    for _ in range(joins):
        yield "leave", False
        yield join, True
