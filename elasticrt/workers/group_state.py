"""What a node's workers are in, and how they have ended so far: a value, and how events change it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elasticrt.ipc.env import Copy
from elasticrt.ipc.failure import Failure
from elasticrt.rendezvous.records import Generation, Report, Seat
from elasticrt.workers.failures import of_node


@dataclass(frozen=True)
class GroupState:
    """The workers of one generation on one node.

    Attributes:
        number: the generation's; 0 before the first.
        generation: what they run, in `seat`; None before the first, and after they were killed for good.
        running: some of their processes have not ended.
        seated: local ranks whose processes live.
        ranks: global ranks by local rank; `pids`: process ids by global rank, of those that have started.
        seated_ns: when they were given their seats, if they went on in place (CLOCK_MONOTONIC).
        well: global ranks that ended with code 0; `failures`: the others', as they came.
        failed_at: when the first failed (seconds of the monotonic clock); None while none has, and for a generation
            that has been replaced already.
        unmet: in so many generations in a row, up to this one, workers here could not reach the others.
        holding: they hold for the handover with this create revision, 0 for none; `entered`: then one of them had been
            let into that step at most.
        going: the step after which they were told to leave, 0 for none; `handed`: local ranks that have.
    """

    number: int = 0
    generation: Generation | None = None
    seat: Seat | None = None
    running: bool = False
    seated: frozenset[int] = frozenset()
    ranks: Mapping[int, int] = field(default_factory=dict)
    pids: Mapping[int, int] = field(default_factory=dict)
    seated_ns: int = 0
    well: tuple[int, ...] = ()
    failures: tuple[Failure, ...] = ()
    failed_at: float | None = None
    unmet: int = 0
    holding: int = 0
    entered: int = 0
    going: int = 0
    handed: frozenset[int] = frozenset()

    def started(self, generation: Generation, seat: Seat) -> GroupState:
        """New workers of `generation` are started for all of a `seat`."""
        ranks = {rank: seat.rank_offset + rank for rank in range(seat.workers)}
        seated = frozenset(ranks)
        return GroupState(generation.number, generation, seat, True, seated, ranks, unmet=self.unmet)

    def went_on(
        self, generation: Generation, seat: Seat, ranks: Mapping[int, int], pids: Mapping[int, int], now_ns: int
    ) -> GroupState:
        """Living workers got new seats in place at `now_ns`; `ranks` and `pids` (see the attributes) are theirs."""
        seated = frozenset(ranks)
        return GroupState(generation.number, generation, seat, bool(ranks), seated, ranks, pids, now_ns)

    def failed(self, failure: Failure, now: float | None) -> GroupState:
        """One more failure. `now`: None where the generation has been replaced already."""
        at = now if self.failed_at is None else self.failed_at
        return replace(self, failures=(*self.failures, failure), failed_at=at)

    def lost(self, local_ranks: frozenset[int]) -> GroupState:
        """The processes of `local_ranks` are of this generation no more."""
        seated = self.seated - local_ranks
        return replace(self, seated=seated, running=self.running and bool(seated))

    def replaced(self) -> GroupState:
        """Another generation has come: what was asked of this one is over."""
        return replace(self, failed_at=None, holding=0, entered=0, going=0)

    @property
    def hung(self) -> bool:
        """Whether these workers are known to do nothing: they take no other seat, and are not asked to."""
        return any(failure.stalled for failure in self.failures)

    def is_of(self, incarnation: str) -> bool:
        """Whether this is the group of the node's life `incarnation`."""
        return self.seat is not None and self.seat.incarnation == incarnation

    def report(self, *, kept: Copy | None, ready: int, has_state: bool) -> Report | None:
        """What the other nodes should be told; None as long as nothing has ended.

        A failure is final for the node's whole group: the rest is killed, so what they end with says nothing new.

        Args:
            kept: the newest copy of the state in this node's memory.
            ready: how many workers can go on in the next generation; `has_state`: whether one of them has the state.
        """
        if self.generation is None or self.seat is None:
            return None
        said = Report(generation=self.number, node=self.seat.node, incarnation=self.seat.incarnation, status="failed")
        if self.failures:
            ended = [f"rank {rank} on {self.seat.node}" for rank in self.well]
            failure, memory = of_node(self.failures, ended, unmet=self.unmet), kept
            return said.model_copy(
                update={"failure": failure, "memory": memory, "ready": ready, "has_state": has_state}
            )
        if len(self.handed) == self.seat.workers:
            held = {"status": "held", "handover": self.holding, "memory": kept}
            return said.model_copy(update=held)
        if self.well:
            whole = len(self.well) == self.seat.workers
            return said.model_copy(update={"status": "ok" if whole else "finishing"})
        if self.holding:
            holds = {"status": "holding", "handover": self.holding, "entered": self.entered}
            return said.model_copy(update=holds)
        return None
