"""The decisions of a member, one class for each kind, and `Me`, the member's own state behind them. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from elasticrt.ipc.env import Copy
from elasticrt.rendezvous.records import Draft, Generation, HandoverRecord, Member, Report, Result, Seat
from elasticrt.rendezvous.view import Stored
from elasticrt.spec import RunSpec


@dataclass(frozen=True)
class Me:
    """This member's own state. Times are seconds of the member's monotonic clock.

    Attributes:
        record: what the member key should say.
        spec: the options of the run, as this member has them.
        attempt: the attempt at the run that this member belongs to.
        highest_generation: the highest generation that this member has seen in this store (`record.seen`: in any
            store).
        lease: whether the lease is known to live ("connected"), overdue ("suspended"), or has ended ("lost").
        started_generation: the newest generation whose workers this agent has started, 0 for none.
        running_generation: the generation whose workers still live, 0 for none.
        seated_generation: the generation in which this life has started workers, 0 for none.
        report: the report about generation `started_generation` that the store should hold, if any.
        stored_report: the report that was last stored.
        copy: the newest copy of the state of generation `seated_generation` in this node's memory.
        heard_generation: the newest generation that another agent has named while etcd did not answer here.
        etcd_back_at: when etcd answered again after the last outage, minus infinity without one.
        failed_at: when workers of generation `started_generation` failed.
        standing_since: since when this node's steps have been standing still for longer than usual, or None.
        saves: whether workers stand still for a save.
        starting: the workers have not come to their first step yet, and probably will.
        hold_revision: the create revision of the handover for which the workers hold, 0 for none.
        leave_after_step: the step after which the workers leave, 0 for none.
        leave_reason: why this member leaves, "" if it does not.
        pause_s: the measured duration of the last re-form (`Progress.pause_s`).
    """

    record: Member
    spec: RunSpec
    attempt: int = 1
    highest_generation: int = 0
    lease: Literal["connected", "suspended", "lost"] = "connected"
    started_generation: int = 0
    running_generation: int = 0
    seated_generation: int = 0
    report: Report | None = None
    stored_report: Report | None = None
    copy: Copy | None = None
    heard_generation: int = 0
    etcd_back_at: float = -math.inf
    failed_at: float | None = None
    standing_since: float | None = None
    saves: bool = False
    starting: bool = False
    hold_revision: int = 0
    leave_after_step: int = 0
    leave_reason: str = ""
    pause_s: float = 1.0


@dataclass(frozen=True)
class Decision:
    """What to do next. Every decision carries its `reason` in words for people."""

    reason: str


@dataclass(frozen=True)
class Wait(Decision):
    """Do nothing until something changes, or until `until` on this member's monotonic clock."""

    until: float | None = None


# Decisions about this member.


class Register(Decision):
    """Write this member's key, with a new lease if the old one is lost."""


class Announce(Decision):
    """Bring this member's key up to date."""


@dataclass(frozen=True)
class WriteReport(Decision):
    """Store this member's `report`."""

    report: Report


@dataclass(frozen=True)
class AdoptSpec(Decision):
    """Take over `spec` as the run's options: an operator has resized the run."""

    spec: RunSpec


@dataclass(frozen=True)
class Run(Decision):
    """Start the workers of `generation` in `seat`, and end the workers of an older generation first."""

    generation: Generation
    seat: Seat


class Rejoin(Decision):
    """End the workers, throw away what they hold in memory, and come back as a new member."""


class Drain(Decision):
    """Hand over and leave: an operator has asked for it."""


@dataclass(frozen=True)
class Leave(Decision):
    """Take this member out of the run, stop its workers, exit.

    Attributes:
        save_step: the step that rank 0 saves first, 0 for none. The node of rank 0 leaves when the save is done. The
            other nodes need not wait for it.
        others_go_on: whether enough other nodes are left for the run to go on, or to wait for more.
    """

    save_step: int = 0
    others_go_on: bool = False


@dataclass(frozen=True)
class End(Decision):
    """Stop and exit with the code of the run's result."""

    result: Result


@dataclass(frozen=True)
class Halt(Decision):
    """Stop at once with `code`: going on would not be safe."""

    code: int


# Decisions about a handover.


@dataclass(frozen=True)
class Hold(Decision):
    """Make this node's workers hold, and see how far they have got.

    `handover` is the create revision of the handover's key. It tells one handover of a generation from the next.
    """

    handover: int


@dataclass(frozen=True)
class Go(Decision):
    """Tell this node's workers to leave after `step`. With `save`, rank 0 commits a checkpoint before it leaves."""

    step: int
    save: bool


class ReleaseHold(Decision):
    """Let this node's workers go on: the handover was given up."""


# Decisions about other members and the whole run.


@dataclass(frozen=True)
class Probe(Decision):
    """Ask the agents of these `seats` whether they live, unless they are being asked already."""

    seats: tuple[Seat, ...]


@dataclass(frozen=True)
class Fence(Decision):
    """Delete the key of `member`, which is lost, if neither the key nor the generation has changed."""

    member: Stored[Member]


@dataclass(frozen=True)
class Publish(Decision):
    """Publish `draft`, with these `seats`, as the next generation by compare-and-swap."""

    draft: Draft
    seats: tuple[Seat, ...]


@dataclass(frozen=True)
class WriteHandover(Decision):
    """Write the `handover` record: all workers of the generation hold, or leave after the step that it names."""

    handover: HandoverRecord


class WithdrawHandover(Decision):
    """Give a handover up before any worker has left."""


@dataclass(frozen=True)
class Finish(Decision):
    """Write the run's one result.

    Attributes:
        status: how the run ended.
        code: the exit code of every agent.
        text: the failure in full, "" without one.
    """

    status: Literal["succeeded", "failed"]
    code: int
    text: str = ""
