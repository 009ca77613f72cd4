"""Decides whether an agent is live and its node ready, from what the agent notes about itself. Pure.

*Live*: the agent's loop goes round. A scheduler should replace an agent whose loop is stuck.

*Ready*: the node is of use to the run, because it trains or could train at once. A node trains on while its etcd is
away, so it stays ready. A node that restarts its workers stays ready too. A node that hears neither etcd nor another
node of its generation is not ready.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from elasticrt.ipc.time_bounds import CLOSER_S
from elasticrt.rendezvous.decision import Me
from elasticrt.rendezvous.outage import Outage
from elasticrt.rendezvous.records import Seat
from elasticrt.rendezvous.view import View
from elasticrt.story import sentences
from elasticrt.story.fold import Story

CUT_OFF_S = 10.0
"""A node that has heard neither etcd nor another node for this time is cut off. It asks the others once a second, and
their agents answer in milliseconds, whatever their workers do."""

LIVE_S = 60.0
"""A loop that has not gone round for this time is stuck. A turn takes milliseconds; if etcd does not answer, it takes a
few timeouts of some seconds."""


@dataclass(frozen=True)
class Finding:
    """The answer to "live?" or "ready?", with its reason in words."""

    ok: bool
    reason: str


@dataclass(frozen=True)
class HealthState:
    """What an agent notes about itself each time its loop goes round. Times are seconds of its monotonic clock.

    Attributes:
        run_id: the run's name.
        node: this node's name.
        phase: "joining" before it is a member, then "member", then "ending".
        turned_at: when its loop last went round, or when the phase began.
        limit_s: how long the loop may take for a turn in this phase.
        readiness: whether the node of a member is ready; None before it is a member.
        lease: "connected", "suspended" or "lost"; "" before there is a lease.
        etcd_answer_s: how long etcd's newest answer took; None before the first answer.
        etcd_away_s: for how long etcd has not answered; None while it answers.
        generation: the number of the run's generation; 0 before the first.
        nodes, world_size: the numbers of nodes and of workers of that generation; 0 if none of its nodes is left.
        ranks: the first and the last rank of this node in that generation; None without a seat there.
        step: the last step that all workers of this node have finished; None while that is unknown.
        standing_s: for how long no step has been made, once the reason is known or that is rather long; else 0.
        slow: the node that is slow, and how many times as long as the others' its own work takes; None without one.
    """

    run_id: str
    node: str
    phase: str
    turned_at: float
    limit_s: float
    readiness: Finding | None = None
    lease: str = ""
    etcd_answer_s: float | None = None
    etcd_away_s: float | None = None
    generation: int = 0
    nodes: int = 0
    world_size: int = 0
    ranks: tuple[int, int] | None = None
    step: int | None = None
    standing_s: float = 0.0
    slow: tuple[str, float] | None = None


def member(
    me: Me,
    view: View,
    outage: Outage,
    now: float,
    *,
    story: Story,
    told_at: float,
    step: int | None,
    answer_s: float | None = None,
) -> HealthState:
    """What a member notes about itself.

    Args:
        me: the member's own state.
        view: what the member knows of the run.
        outage: the state of its way to etcd.
        now: seconds of the monotonic clock.
        story: the run as the member's own events tell it.
        told_at: `now` in the story's time.
        step: as in `HealthState`.
        answer_s: as `HealthState.etcd_answer_s`.
    """
    seat = view.seat_of(me.record) if view.roster_known else None
    generation = view.generation.record if view.generation else None
    away_s = round(now - outage.since, 1) if outage.since is not None else None
    alone_s = now - outage.alone_since if outage.alone_since is not None else 0.0
    trouble, slow, doing = sentences.trouble(story, told_at), story.straggler, sentences.doing(story)
    if me.report is not None and me.report.failure is not None and me.report.generation == view.generation_number:
        # The story tells of a failure as soon as a generation names it as its cause. While etcd is away there is none,
        # so the node's own report tells of it.
        trouble, doing = trouble or f"no step since this failure: {me.report.failure.summary}", "stands still"
    # Only the leader knows all members. If none of them has a seat in the newest generation, no node runs it any more.
    runs = generation is not None and not (view.is_leader and view.roster_known and view.has_no_seated_member)
    number = view.generation_number if runs else 0
    found = readiness(me, seat, number, away_s=away_s, alone_s=alone_s, doing=doing)
    # A member that led before knows no longer how many members there are.
    short_s = now - view.too_few_since if view.too_few_since is not None and view.members_complete else 0.0
    # The story tells of a stand once it is known whom the others wait for. A node that is cut off never hears that.
    stands_s = now - me.standing_since if me.standing_since is not None else 0.0
    stands_s = stands_s if stands_s >= CLOSER_S else 0.0
    return HealthState(
        run_id=story.run.run_id,
        node=me.record.node,
        phase="member",
        turned_at=now,
        limit_s=LIVE_S,
        readiness=Finding(found.ok, f"{found.reason}; {trouble}") if trouble and found.ok else found,
        lease=me.lease,
        etcd_answer_s=answer_s,
        etcd_away_s=away_s,
        generation=view.generation_number,
        nodes=generation.nodes if generation and runs else 0,
        world_size=generation.world_size if generation and runs else 0,
        ranks=(seat.rank_offset, seat.rank_offset + seat.workers - 1) if seat else None,
        step=step,
        standing_s=round(max(story.standstill_s(told_at), stands_s, short_s), 1),
        slow=(slow.slow, round(slow.own_s / slow.others_s, 2)) if slow is not None and slow.others_s else None,
    )


def readiness(
    me: Me, seat: Seat | None, generation: int, *, away_s: float | None, alone_s: float, doing: str = "trains"
) -> Finding:
    """Whether a member's node is ready: it trains, or stands by and could train at once.

    Args:
        me: the member's own state.
        seat: its seat in the run's generation; None without one.
        generation: that generation's number; 0 before the first, and if none of its nodes is left.
        away_s: for how many seconds etcd has not answered; None while it answers.
        alone_s: for how many seconds no other node of the generation has answered either.
        doing: what the nodes of the generation do, in words.
    """
    if me.leave_reason or me.record.draining:
        return Finding(False, f"leaving: {me.leave_reason or 'draining'}")
    if me.lease == "lost":
        return Finding(False, "not a member of the run: its lease in etcd is gone")
    away = f"; etcd has not answered for {away_s:.0f} s" if away_s is not None else ""
    if seat is not None and me.running_generation == generation:
        # The others may have gone on in a newer generation without this node, which cannot hear of it.
        if alone_s > CUT_OFF_S:
            silence = f"neither etcd nor another node has answered for {alone_s:.0f} s"
            return Finding(False, f"cut off in generation {generation}: {silence}")
        return Finding(True, f"{doing} in generation {generation}{away}")
    if not me.record.warm:
        return Finding(False, f"stands by, but is still importing what its workers need{away}")
    # Its workers have ended, and without etcd no generation can be agreed in which they would start again.
    if seat is not None and away:
        return Finding(False, f"its workers of generation {generation} have ended{away}")
    if seat is not None and me.report is not None and (me.report.generation, me.report.status) == (generation, "ok"):
        return Finding(True, f"its workers of generation {generation} have ended well, and wait for the others")
    if seat is not None:
        return Finding(True, f"starts its workers of generation {generation}")
    if away:
        return Finding(False, f"stands by, but cannot join{away}")
    what = f"generation {generation} runs without it" if generation else "waits for nodes"
    return Finding(True, f"stands by: {what}")


def live(state: HealthState, now: float) -> Finding:
    """Whether the agent's loop goes round at `now`, by the agent's `state`."""
    still_s = now - state.turned_at
    if still_s > state.limit_s:
        return Finding(False, f"the agent's main loop has not run for {still_s:.0f} s (phase: {state.phase})")
    return Finding(True, f"the agent's main loop ran {still_s:.1f} s ago")


def ready(state: HealthState, now: float) -> Finding:
    """Whether the node is ready at `now`, by its agent's `state`.

    The node stays ready while steps stand still, and the reason says for which rank the others wait: to replace this
    node may be no remedy.
    """
    alive = live(state, now)
    if not alive.ok:
        return alive
    if state.phase != "member" or state.readiness is None:
        return Finding(False, f"{state.phase}: not a member of the run")
    return state.readiness


def body(state: HealthState, finding: Finding) -> dict[str, Any]:
    """The `finding`, and the `state`, as JSON values."""
    facts = asdict(state)
    del facts["turned_at"], facts["limit_s"], facts["readiness"]
    return {"ok": finding.ok, "reason": finding.reason, **facts}
