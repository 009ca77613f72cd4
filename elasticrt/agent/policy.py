"""What the ends of a node's workers mean, and what a recovery has cost. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from elasticrt.agent.report import Failure, describe, render
from elasticrt.rendezvous.records import FailureRecord, Report

SUMMARY_MAX = 400
TEXT_MAX = 5500


@dataclass(frozen=True)
class Ends:
    """How the workers of one generation on one node have ended so far: well, or with failures, in order of time."""

    generation: int
    workers: int
    well: int = 0
    failures: tuple[Failure, ...] = ()

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
                failure=failure_record(self.failures),
            )
        if not self.well:
            return None
        return Report(
            generation=self.generation,
            node=node,
            incarnation=incarnation,
            status="ok" if self.well == self.workers else "finishing",
        )


def failure_record(failures: Sequence[Failure]) -> FailureRecord:
    """The first cause of a node's failures as it travels through etcd."""
    cause = next((failure for failure in failures if not failure.collateral), failures[0])
    summary = f"rank {cause.rank} on {cause.node}: {describe(cause)}".replace("\n", " ")
    final_code: Literal[0, 5, 6] = 5 if cause.final_code == 5 else 6 if cause.final_code == 6 else 0
    return FailureRecord(
        rank=cause.rank,
        code=cause.code,
        collateral=cause.collateral,
        final_code=final_code,
        summary=summary[:SUMMARY_MAX],
        text=render(failures)[:TEXT_MAX],
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
