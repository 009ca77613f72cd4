"""Whether an agent is live and its node ready, from what the agent notes about itself. Pure.

*Live*: the agent's loop goes round. A scheduler replaces an agent whose loop does not.

*Ready*: the node is of use to the run, because it trains or could train at once. A node whose etcd is away trains on,
so it stays ready; so does one that starts its workers anew. One that hears neither etcd nor another node of its
generation is not ready.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from elasticrt.rendezvous.decision import Me
from elasticrt.rendezvous.outage import Outage
from elasticrt.rendezvous.records import Seat
from elasticrt.rendezvous.view import View
from elasticrt.story import sentences
from elasticrt.story.fold import Story

CUT_OFF_S = 10.0
"""Other nodes are asked once a second, and their agents answer in milliseconds, whatever their workers do."""

LIVE_S = 60.0
"""An agent's turn takes milliseconds; one that asks an etcd that does not answer takes a few timeouts of seconds."""


@dataclass(frozen=True)
class Finding:
    """The answer to one question, with its reason."""

    ok: bool
    reason: str


@dataclass(frozen=True)
class HealthState:
    """What an agent notes about itself each time its loop goes round. Times are on its monotonic clock, in seconds.

    Attributes:
        run_id, node: the run, and this node's name.
        phase: "joining" before it is a member, then "member", then "ending".
        turned_at: when its loop last went round, or when the phase began.
        limit_s: how long its loop may rightly not go round in this phase.
        readiness: of a member: whether its node is ready.
        lease: "connected", "suspended" or "lost"; "" before there is one.
        etcd_answer_s: how long etcd's newest answer took; None before there was one.
        etcd_away_s: how long etcd has not answered; None while it does.
        generation, nodes, world_size: of the run; 0 before the first generation.
        ranks: first and last rank of this node in the run's generation; None without a seat in it.
        step: the last step that all its workers have finished; None while that is unknown.
        standing_s: for how long no step has been made, once it is known why; else 0.
        slow: the node that is slow, and how many times as long as the others' its own work takes; None: none is known.
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
    """What a member notes about itself at `now`, in seconds of the monotonic clock.

    `me`, `view` and `outage` are the member's; `story` is what its own events tell, and `told_at` is `now` there. For
    `step` and `answer_s` see `HealthState`.
    """
    seat = view.seat_of(me.record) if view.roster_known else None
    generation = view.generation.record if view.generation else None
    away_s = round(now - outage.since, 1) if outage.since is not None else None
    alone_s = now - outage.alone_since if outage.alone_since is not None else 0.0
    trouble, slow, doing = sentences.trouble(story, told_at), story.slow, sentences.doing(story)
    if me.report is not None and me.report.failure is not None and me.report.generation == view.number:
        # Of another node's failure the events of this one do not tell, and no generation does while etcd is away.
        trouble, doing = trouble or f"no step since: {me.report.failure.summary}", "stands still"
    # The leader knows all members. Where none of the newest generation is left, they wait for nodes.
    runs = generation is not None and not (view.leads and view.roster_known and view.deserted)
    number = view.number if runs else 0
    found = readiness(me, seat, number, away_s=away_s, alone_s=alone_s, doing=doing)
    short_s = now - view.short_since if view.short_since is not None else 0.0
    return HealthState(
        run_id=story.run_id,
        node=me.record.node,
        phase="member",
        turned_at=now,
        limit_s=LIVE_S,
        readiness=Finding(found.ok, f"{found.reason}; {trouble}") if trouble and found.ok else found,
        lease=me.lease,
        etcd_answer_s=answer_s,
        etcd_away_s=away_s,
        generation=view.number,
        nodes=generation.nodes if generation and runs else 0,
        world_size=generation.world_size if generation and runs else 0,
        ranks=(seat.rank_offset, seat.rank_offset + seat.workers - 1) if seat else None,
        step=step,
        standing_s=round(max(story.standing_s(told_at), short_s), 1),
        slow=(slow.slow, round(slow.own_s / slow.others_s, 2)) if slow is not None and slow.others_s else None,
    )


def readiness(
    me: Me, seat: Seat | None, generation: int, *, away_s: float | None, alone_s: float, doing: str = "trains"
) -> Finding:
    """Whether a member trains, or stands by and could train.

    Args:
        me: its own state.
        seat: its seat in the run's generation.
        generation: that generation's number, 0 before the first and where no node of it is left.
        away_s: how long etcd has not answered; None while it does.
        alone_s: how long no other node of its generation has answered either.
        doing: what the nodes of that generation do.
    """
    if me.leaving or me.record.draining:
        return Finding(False, f"on its way out: {me.leaving or 'draining'}")
    if me.lease == "lost":
        return Finding(False, "not a member of the run: etcd has given its lease up")
    away = f"; etcd has not answered for {away_s:.0f} s" if away_s is not None else ""
    if seat is not None and me.running == generation:
        if alone_s > CUT_OFF_S:
            silence = f"neither etcd nor another node has answered for {alone_s:.0f} s"
            return Finding(False, f"cut off in generation {generation}: {silence}")
        return Finding(True, f"{doing} in generation {generation}{away}")
    if not me.record.warm:
        return Finding(False, f"stands by, but is still importing what its workers need{away}")
    if seat is not None and away:
        return Finding(False, f"its workers of generation {generation} have ended{away}")
    if seat is not None:
        return Finding(True, f"starts its workers of generation {generation}")
    if away:
        return Finding(False, f"stands by, but cannot be called{away}")
    what = f"generation {generation} runs without it" if generation else "waits for nodes"
    return Finding(True, f"stands by: {what}")


def live(noted: HealthState, now: float) -> Finding:
    """Whether the agent's loop goes round, by what it has `noted`, at `now`."""
    still_s = now - noted.turned_at
    if still_s > noted.limit_s:
        return Finding(False, f"the agent has been {noted.phase} without a turn for {still_s:.0f} s")
    return Finding(True, f"the agent's last turn was {still_s:.1f} s ago")


def ready(noted: HealthState, now: float) -> Finding:
    """Whether the node is ready, by what its agent has `noted`, at `now`.

    It stays ready while steps stand still, and says for whom the others wait: its replacement may be no remedy.
    """
    alive = live(noted, now)
    if not alive.ok:
        return alive
    if noted.phase != "member" or noted.readiness is None:
        return Finding(False, f"{noted.phase}: not a member of the run")
    return noted.readiness


def body(noted: HealthState, finding: Finding) -> dict[str, Any]:
    """The `finding`, and what was `noted`, as JSON values."""
    facts = asdict(noted)
    del facts["turned_at"], facts["limit_s"], facts["readiness"]
    return {"ok": finding.ok, "reason": finding.reason, **facts}
