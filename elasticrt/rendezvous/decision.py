"""What a member can decide: its own state, and one value per kind of decision. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elasticrt.ipc.env import Copy
from elasticrt.rendezvous.records import Draft, Generation, HandoverRecord, Member, Report, Result, Seat
from elasticrt.rendezvous.view import Stored
from elasticrt.spec import RunSpec


@dataclass(frozen=True)
class Me:
    """This member's own state.

    Attributes:
        record: what its member key should say.
        spec: what it takes the run to be; `attempt`: which attempt at the run it belongs to.
        known: the highest generation it has seen in this store (`record.seen`: in any store).
        lease: whether its lease is known to live ("connected"), overdue ("suspended"), or has ended ("lost").
        started: the newest generation whose workers it has started, 0 for none.
        running: the generation whose workers still live, 0 for none.
        seated: the generation that this life has started workers in, 0 for none.
        report: what its report for generation `started` should say, if anything.
        filed: the report it last stored.
        copy: the newest copy of the state of generation `seated` in this node's memory.
        heard: the newest generation that another node has named while etcd did not answer here.
        failed_at: when its workers failed in generation `started`.
        standing_since: since when the steps of its workers have been standing still for longer than usual, if they are.
        starting: its workers have not come to their first step yet, and probably will.
        holding: the create revision of the handover for which its workers hold, 0 for none.
        going: the step after which they leave, 0 for none.
        leaving: why it leaves ("" if it does not).
        pause_s: how long the last re-form took, as measured here (`Progress.pause_s`).
    """

    record: Member
    spec: RunSpec
    attempt: int = 1
    known: int = 0
    lease: Literal["connected", "suspended", "lost"] = "connected"
    started: int = 0
    running: int = 0
    seated: int = 0
    report: Report | None = None
    filed: Report | None = None
    copy: Copy | None = None
    heard: int = 0
    failed_at: float | None = None
    standing_since: float | None = None
    starting: bool = False
    holding: int = 0
    going: int = 0
    leaving: str = ""
    pause_s: float = 1.0


@dataclass(frozen=True)
class Decision:
    """What to do next. Every decision says why, in words for people."""

    reason: str


@dataclass(frozen=True)
class Wait(Decision):
    """Do nothing until something changes, or until `until` on this member's clock."""

    until: float | None = None


# About this member.


class Register(Decision):
    """Write this member's key, with a new lease if the old one is lost."""


class Announce(Decision):
    """Bring this member's key up to date."""


@dataclass(frozen=True)
class File(Decision):
    """Store this member's report."""

    report: Report


@dataclass(frozen=True)
class Adopt(Decision):
    """Take over the run's options: it was resized."""

    spec: RunSpec


@dataclass(frozen=True)
class Run(Decision):
    """Start the workers of `generation` in `seat` (killing those of an older one first)."""

    generation: Generation
    seat: Seat


class Rejoin(Decision):
    """Kill the workers, throw away what they hold in memory, and come back as a new member."""


class Drain(Decision):
    """Hand over and leave: an operator has asked for it."""


@dataclass(frozen=True)
class Leave(Decision):
    """Take this member out of the run, stop its workers, exit.

    Attributes:
        saving: the step that rank 0 saves before that, 0 for none. Rank 0's node leaves when that is done; the others
            need not wait for it.
        others_go_on: enough others are left for the run to go on, or to wait for more.
    """

    saving: int = 0
    others_go_on: bool = False


@dataclass(frozen=True)
class End(Decision):
    """Stop and exit with the code of the run's result."""

    result: Result


@dataclass(frozen=True)
class Halt(Decision):
    """Stop at once with `code`: going on would not be safe."""

    code: int


# About a handover.


@dataclass(frozen=True)
class Hold(Decision):
    """Make this node's workers hold for the handover with this create revision, and see how far they have got."""

    handover: int


@dataclass(frozen=True)
class Go(Decision):
    """Tell this node's workers the step after which they leave, and whether rank 0 commits before."""

    step: int
    save: bool


class ReleaseHold(Decision):
    """Let this node's workers go on: the handover was given up."""


# About other members and the whole run.


@dataclass(frozen=True)
class Probe(Decision):
    """Ask the agents of these seats whether they live, unless they are being asked already."""

    seats: tuple[Seat, ...]


@dataclass(frozen=True)
class Fence(Decision):
    """Delete the key of a member that is lost, if neither it nor the generation has changed."""

    member: Stored[Member]


@dataclass(frozen=True)
class Publish(Decision):
    """Publish the next generation by compare-and-swap."""

    draft: Draft
    seats: tuple[Seat, ...]


@dataclass(frozen=True)
class Ask(Decision):
    """Ask all workers of the generation to hold, or tell them the step after which they leave."""

    handover: HandoverRecord


class Withdraw(Decision):
    """Give a handover up before any worker has left."""


@dataclass(frozen=True)
class Finish(Decision):
    """Write the run's one result."""

    status: Literal["succeeded", "failed"]
    code: int
    text: str = ""
