"""The state of a node's workers in one generation, as a value, and how events change it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elasticrt.ipc.env import Copy
from elasticrt.ipc.failure import Failure
from elasticrt.rendezvous.records import Generation, Report, Seat
from elasticrt.workers.failures import of_node


@dataclass(frozen=True)
class GroupState:
    """The workers of one generation on one node."""

    number: int = 0  # The generation's; 0 before the first.
    # What the workers run, in `seat`; None before the first, and after they were killed.
    generation: Generation | None = None
    seat: Seat | None = None
    running: bool = False  # Whether some processes have not ended.
    seated: frozenset[int] = frozenset()  # Local ranks whose processes run.
    # `ranks`: global ranks by local rank; `pids`: process ids by global rank, of workers that have started.
    ranks: Mapping[int, int] = field(default_factory=dict)
    pids: Mapping[int, int] = field(default_factory=dict)
    seated_ns: int = 0  # When workers that went on in place got their seats (CLOCK_MONOTONIC, ns).
    # `well`: global ranks that ended with code 0; `failures`: those of the others, in the order of time.
    well: tuple[int, ...] = ()
    failures: tuple[Failure, ...] = ()
    # When the first one failed (seconds of the monotonic clock); None while none has, and for a generation that has
    # been replaced.
    failed_at: float | None = None
    unmet: int = 0  # In how many generations in a row, up to this one, workers here could not reach the others.
    # `holding`: the create revision of the handover that they hold for, 0 for none; `entered`: the furthest step that
    # one of them had begun then.
    holding: int = 0
    entered: int = 0
    # `going`: the step after which they leave, 0 for none; `handed`: local ranks that have left.
    going: int = 0
    handed: frozenset[int] = frozenset()

    def started(self, generation: Generation, seat: Seat) -> GroupState:
        """The state after new workers of `generation` were started for all of a `seat`."""
        ranks = {rank: seat.rank_offset + rank for rank in range(seat.workers)}
        seated = frozenset(ranks)
        return GroupState(generation.number, generation, seat, True, seated, ranks, unmet=self.unmet)

    def went_on(
        self, generation: Generation, seat: Seat, ranks: Mapping[int, int], pids: Mapping[int, int], now_ns: int
    ) -> GroupState:
        """The state after living workers got new seats at `now_ns`; for `ranks` and `pids` see the attributes."""
        seated = frozenset(ranks)
        return GroupState(generation.number, generation, seat, bool(ranks), seated, ranks, pids, now_ns)

    def failed(self, failure: Failure, now: float | None) -> GroupState:
        """The state after one more failure. `now`: None if the generation has been replaced already."""
        at = now if self.failed_at is None else self.failed_at
        return replace(self, failures=(*self.failures, failure), failed_at=at)

    def lost(self, local_ranks: frozenset[int]) -> GroupState:
        """The state without the processes of `local_ranks`."""
        seated = self.seated - local_ranks
        return replace(self, seated=seated, running=self.running and bool(seated))

    def replaced(self) -> GroupState:
        """The state after another generation was published: no handover, and no failure that matters."""
        return replace(self, failed_at=None, holding=0, entered=0, going=0)

    @property
    def hung(self) -> bool:
        """Whether these workers are known to hang, so that they get no other seat."""
        return any(failure.stalled for failure in self.failures)

    def report(self, *, kept: Copy | None, **living: Any) -> Report | None:
        """The report to the other nodes; None as long as no worker has ended or holds.

        Args:
            kept: the newest copy of the state in this node's memory.
            living: the fields of a report about workers that can go on in the next generation.
        """
        if self.generation is None or self.seat is None:
            return None
        seat = self.seat
        where: dict[str, Any] = {"generation": self.number, "node": seat.node, "incarnation": seat.incarnation}
        # A failure stays: the node's other workers are killed, so their exit codes say nothing.
        if self.failures:
            ended = [f"rank {rank} on {seat.node}" for rank in self.well]
            failure = of_node(self.failures, ended, unmet=self.unmet)
            return Report(**where, status="failed", failure=failure, memory=kept, **living)
        if len(self.handed) == seat.workers:
            return Report(**where, status="held", handover=self.holding, memory=kept)
        if self.well:
            if len(self.well) < seat.workers:
                return Report(**where, status="finishing", well=self.well[0])
            return Report(**where, status="ok", memory=kept, well=self.well[0])
        if self.holding:
            return Report(**where, status="holding", handover=self.holding, entered=self.entered)
        return None
