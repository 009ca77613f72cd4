"""What the ends of a node's workers mean, and what a recovery has cost. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticrt.errors import DuplicateError, ElasticError, StoreError, explain
from elasticrt.ipc.env import Copy, WorkerEnv
from elasticrt.rendezvous.decision import Halt
from elasticrt.rendezvous.records import ENDED_EARLY, FailureRecord, Generation, Report, Seat
from elasticrt.rendezvous.view import View
from elasticrt.settings import Settings
from elasticrt.workers.failures import HOW_TO_MEND, WorkerFailure, describe, first_cause, how_to_meet, never_met, render


@dataclass(frozen=True)
class WorkerOutcomes:
    """How the workers of one generation on one node have ended so far: ranks that did well, and failures, as they came.

    `handover`, `entered`: they were told to hold for that handover, when one of them had been let into that step at
    most. `handed`: local ranks that have left after the agreed step. `kept`: the newest copy that they have taken, at
    last where they left, or one of the step that the generation resumed from. `unmet`: in so many generations in a row,
    up to this one, workers here could not reach the others. `ready`: workers that can go on in the next generation;
    `has_state`: whether one of them has the state.
    """

    generation: int
    workers: int
    well: tuple[int, ...] = ()
    failures: tuple[WorkerFailure, ...] = ()
    handover: int = 0
    entered: int = 0
    handed: frozenset[int] = frozenset()
    kept: Copy | None = None
    unmet: int = 0
    ready: int = 0
    has_state: bool = False

    def report(self, node: str, incarnation: str) -> Report | None:
        """What the others should be told; None as long as nothing has ended.

        A failure is final for the node's whole group: the rest is killed, so what they end with says nothing new.
        """
        if self.failures:
            return Report(
                generation=self.generation,
                node=node,
                incarnation=incarnation,
                status="failed",
                failure=failure_record(self.failures, self.well, unmet=self.unmet),
                memory=self.kept,
                ready=self.ready,
                has_state=self.has_state,
            )
        if len(self.handed) == self.workers:
            return Report(
                generation=self.generation,
                node=node,
                incarnation=incarnation,
                status="held",
                handover=self.handover,
                memory=self.kept,
            )
        if self.handover and not self.well:
            return Report(
                generation=self.generation,
                node=node,
                incarnation=incarnation,
                status="holding",
                handover=self.handover,
                entered=self.entered,
            )
        if not self.well:
            return None
        return Report(
            generation=self.generation,
            node=node,
            incarnation=incarnation,
            status="ok" if len(self.well) == self.workers else "finishing",
        )


UNMET_MAX = 2
"""Agents that reach each other while their workers do not, so often in a row, will not see that end."""


def failure_record(failures: Sequence[WorkerFailure], well: Sequence[int] = (), *, unmet: int = 0) -> FailureRecord:
    """The first cause of a node's failures as it travels through etcd. `well`: ranks that had ended without one.

    Where failures only say that a peer is gone, it is the one that ended while they still needed it. Another node may
    know of a better cause. For `unmet` see `WorkerOutcomes`.
    """
    if well and all(failure.collateral for failure in failures):
        said = f"rank {well[0]} on {failures[0].node}: {ENDED_EARLY}"
        return FailureRecord(rank=well[0], code=0, collateral=True, summary=said, text=render(failures, said))
    cause = first_cause(failures)
    assert cause is not None, "there is a failure to report"
    where = f"on {cause.node}" if cause.kind == "stalled" else f"rank {cause.rank} on {cause.node}"
    advice = how_to_meet(cause) if never_met(cause) else ""
    remedy = HOW_TO_MEND if cause.final_code == 1 else ""
    summary = ": ".join(filter(None, (where, advice, describe(cause)))).replace("\n", " ")
    return FailureRecord(
        rank=cause.rank,
        code=cause.code,
        collateral=cause.collateral,
        final_code=cause.final_code,
        summary=summary,
        text="\n".join(filter(None, (advice, render(failures), remedy))),
        stalled=cause.kind == "stalled",
        unmet=unmet >= UNMET_MAX,
        early=cause.early,
        beats=max(failure.beats for failure in failures),
        loaded=max(failure.loaded for failure in failures),
    )


@dataclass(frozen=True)
class LastStep:
    """The last step that a node's workers have finished, on this machine's monotonic clock."""

    step: int = 0
    at_ns: int = 0


@dataclass(frozen=True)
class Cost:
    """What a change of generation has cost: seconds between two steps, and steps that are done a second time."""

    pause_s: float | None
    redone: int


def cost(last: LastStep, first_step: int, first_at_ns: int, resumed_from: int) -> Cost:
    """The cost as one node sees it: from its last step in an earlier generation to its first in this one.

    A node that has not stepped before has no pause. `first_step` is `resumed_from` + 1 in a healthy run.
    """
    if not last.at_ns or first_at_ns <= last.at_ns:
        return Cost(None, 0)
    return Cost((first_at_ns - last.at_ns) / 1e9, max(0, last.step - resumed_from))


PHASES = ("detect", "agree", "stop", "start", "script", "init", "restore", "first_step")
"""What ends each: something is known to have happened; another generation is agreed; the old workers are gone; the new
ones run; `elasticrt.init` is called; there is a process group; the state is back; a step is done."""


def phases(since_ns: int, marks: Mapping[str, int]) -> dict[str, float]:
    """How long each phase took, in ms, from the marks (ns) that were set when they ended; they add up.

    `since_ns` 0: count from the first mark. A phase without a mark is left out: its time is in the next one's. A mark
    that lies before an earlier one's (the last step may end after a handover was asked for) counts as set with it.
    """
    set_marks = [(name, marks[name]) for name in PHASES if marks.get(name)]
    at = since_ns or (set_marks[0][1] if set_marks else 0)
    parts = {}
    for name, mark in set_marks:
        parts[name] = max(0, mark - at) / 1e6
        at = max(at, mark)
    return parts


def halted(decision: Halt, run_id: str) -> ElasticError:
    """The error that an agent ends with when going on would not be safe."""
    if decision.code == DuplicateError.exit_code:
        kind: type[ElasticError] = DuplicateError
        remedy = "Start this node again with the run's options"
    else:
        kind = StoreError
        remedy = "The checkpoints are intact: check etcd, then submit the run again with the same --run-id"
    return kind(explain("this node cannot go on", f"run {run_id}", got=decision.reason, remedy=remedy))


def worker_env(
    settings: Settings, generation: Generation, seat: Seat, local_rank: int, place: int | None = None
) -> WorkerEnv:
    """What one worker of this seat is told. `place`: its number among the seat's workers, where some are missing."""
    return _env(
        settings,
        generation,
        local_rank=local_rank,
        node=seat.node,
        rank=seat.rank_offset + (local_rank if place is None else place),
        world_size=generation.world_size,
        local_world_size=settings.workers if generation.in_place else seat.workers,
        group_rank=seat.index,
        group_world_size=generation.nodes,
        generation=generation.number,
        resume=generation.resume,
        copy=generation.memory,
    )


def _env(settings: Settings, of: Generation, *, local_rank: int, **place: Any) -> WorkerEnv:
    """What any worker is told of its run and node; `place`: who it is there."""
    return WorkerEnv(
        local_rank=local_rank,
        master_addr=of.master_address,
        master_port=of.master_port,
        restart_count=of.restarts_total,
        max_restarts=settings.max_restarts,
        run_id=settings.run_id,
        attempt=of.attempt,
        nonce=of.nonce,
        run_dir=str(settings.run_dir),
        role=settings.role,
        as_srun=settings.as_srun,
        gpu=settings.gpus[local_rank] if settings.gpus else "",
        signals=",".join(number.name for number in settings.signals),
        **place,
    )


def others_go_on(view: View, node: str) -> bool:
    """Whether workers of other nodes train on, so that what this node lacks is set up beside them."""
    if view.generation is None or any(each.record.status in ("finishing", "ok") for each in view.reports.values()):
        return False
    known = [entry.record for entry in view.members.values() if entry.record.node != node]
    told = any(view.number in (each.goes_on, each.generation if each.ready else 0) for each in known)
    return view.generation.record.in_place or told


def beside_env(settings: Settings, generation: Generation, index: int, local_rank: int) -> WorkerEnv:
    """What a worker is told that sets up beside `generation`: where it would be if it were let in now."""
    return _env(
        settings,
        generation,
        local_rank=local_rank,
        node=settings.node,
        rank=generation.world_size + local_rank,
        world_size=generation.world_size + local_rank + 1,
        local_world_size=settings.workers,
        group_rank=index,
        group_world_size=max(generation.nodes, index + 1),
        generation=0,
        beside=True,
    )


def network(interface: str, env: Mapping[str, str], *, told: bool) -> dict[str, str]:
    """Variables that make workers use the interface with this node's address, unless the user's say otherwise.

    Left alone, gloo announces whatever the host name resolves to on this machine: often 127.0.1.1, or nothing. NCCL
    chooses for itself among all interfaces, and may use several: it is only bound to one when the address was `told`.
    """
    found = {"GLOO_SOCKET_IFNAME": interface, **({"NCCL_SOCKET_IFNAME": f"={interface}"} if told else {})}
    return {name: value for name, value in found.items() if interface and name not in env}
