"""The state of one node's workers in one generation, as an immutable value, and how events change it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elasticrt.ipc.env import Copy
from elasticrt.ipc.failure import Failure
from elasticrt.rendezvous.records import Generation, Report, Seat
from elasticrt.workers.failures import failure_of_node


@dataclass(frozen=True)
class GroupState:
    """The workers of one generation on one node.

    Attributes:
        number: the generation's number; 0 before the first.
        generation: the generation that the workers run; None before the first, and after the workers were killed.
        seat: this node's seat there; None likewise.
        running: whether some processes of the workers have not ended.
        seated: the local ranks whose processes run.
        ranks: the global ranks by local rank.
        pids: the process ids by global rank, of workers that have started.
        seated_ns: when workers that went on in place got their seats (CLOCK_MONOTONIC); 0 for new workers.
        ended_well: the global ranks that have ended with code 0.
        failures: the failures of the other workers, in the order of time.
        failed_at: when the first worker failed, in seconds of the monotonic clock; None while none has, and once the
            generation has been replaced.
        holding: the create revision of the handover for which the workers hold; 0 for none.
        entered: the furthest step that a worker had entered when the workers were told to hold.
        going: the step after which the workers leave; 0 while it is not agreed.
        handed_over: the local ranks that have left after that step.
    """

    number: int = 0
    generation: Generation | None = None
    seat: Seat | None = None
    running: bool = False
    seated: frozenset[int] = frozenset()
    ranks: Mapping[int, int] = field(default_factory=dict)
    pids: Mapping[int, int] = field(default_factory=dict)
    seated_ns: int = 0
    ended_well: tuple[int, ...] = ()
    failures: tuple[Failure, ...] = ()
    failed_at: float | None = None
    holding: int = 0
    entered: int = 0
    going: int = 0
    handed_over: frozenset[int] = frozenset()

    @property
    def is_first(self) -> bool:
        """Whether rank 0 is on this node."""
        return self.seat is not None and self.seat.index == 0

    def started(self, generation: Generation, seat: Seat) -> GroupState:
        """Return the state after new workers of `generation` were started for all places of a `seat`."""
        ranks = {rank: seat.rank_offset + rank for rank in range(seat.workers)}
        seated = frozenset(ranks)
        return GroupState(generation.number, generation, seat, True, seated, ranks)

    def went_on(
        self, generation: Generation, seat: Seat, ranks: Mapping[int, int], pids: Mapping[int, int], now_ns: int
    ) -> GroupState:
        """Return the state after living workers got seats in `generation` at `now_ns`.

        `ranks` and `pids` are as the attributes of the same names. Fewer workers than the seat has may have gone on.
        """
        seated = frozenset(ranks)
        return GroupState(generation.number, generation, seat, bool(ranks), seated, ranks, pids, now_ns)

    def failed(self, failure: Failure, now: float | None) -> GroupState:
        """Return the state after one more failure, at `now`; None: the generation has been replaced already."""
        at = now if self.failed_at is None else self.failed_at
        return replace(self, failures=(*self.failures, failure), failed_at=at)

    def lost(self, local_ranks: frozenset[int]) -> GroupState:
        """Return the state without the workers of `local_ranks`, whose processes count as ended."""
        seated = self.seated - local_ranks
        return replace(self, seated=seated, running=self.running and bool(seated))

    def replaced(self) -> GroupState:
        """Return the state after another generation was published: no handover, and no failure that matters."""
        return replace(self, failed_at=None, holding=0, entered=0, going=0)

    @property
    def hung(self) -> bool:
        """Whether these workers are known to hang. Such workers get no seat in another generation."""
        return any(failure.stalled for failure in self.failures)

    def report(self, *, kept: Copy | None, **living: Any) -> Report | None:
        """The node's report about this generation; None as long as no worker has ended or holds.

        Args:
            kept: the newest copy of the state in this node's memory.
            living: the report's fields about workers that can go on in the next generation: `ready`, `new`,
                `has_state`.
        """
        if self.generation is None or self.seat is None:
            return None
        seat = self.seat
        where: dict[str, Any] = {"generation": self.number, "node": seat.node, "incarnation": seat.incarnation}
        # A failure comes before all other findings: the node's other workers are killed, so their exit codes say
        # nothing.
        if self.failures:
            ended = [f"rank {rank} on {seat.node}" for rank in self.ended_well]
            failure = failure_of_node(self.failures, ended)
            return Report(**where, status="failed", failure=failure, memory=kept, **living)
        if len(self.handed_over) == seat.workers:
            return Report(**where, status="held", handover=self.holding, memory=kept)
        if self.ended_well:
            if len(self.ended_well) < seat.workers:
                return Report(**where, status="finishing", well=self.ended_well[0])
            return Report(**where, status="ok", memory=kept, well=self.ended_well[0])
        if self.holding:
            return Report(**where, status="holding", handover=self.holding, entered=self.entered)
        return None
