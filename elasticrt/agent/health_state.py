"""Whether an agent is well, from what it last noted about itself. Pure.

*Live* means that its loop goes round: an agent that does not is replaced by the scheduler. *Ready* means that the
node is of use to the run: it trains, or it stands by and could train at once. A node whose etcd is away trains on, so
it stays ready: taking it out would only make things worse. So does one that starts its workers anew, because the run
goes on with it. One that hears neither etcd nor any other node of its generation is of no use to anybody.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from elasticrt.rendezvous.decision import Me
from elasticrt.rendezvous.view import View

CUT_OFF_S = 10.0
"""Other nodes are asked once a second, and their agents answer in milliseconds, whatever their workers do."""

LIVE_S = 60.0
"""An agent's turn takes milliseconds; one that asks an etcd that does not answer takes a few timeouts of seconds."""


@dataclass(frozen=True)
class HealthState:
    """What an agent notes about itself each time its loop goes round. Times are on its monotonic clock, in seconds.

    Attributes:
        phase: "joining" before it is a member, then "member", then "ending".
        turned_at: when its loop last went round (or when the phase began).
        limit_s: how long its loop may rightly not go round in this phase.
        lease: "connected", "suspended" or "lost"; "" before there is one.
        etcd_answer_s: how long etcd's newest answer took; None before there was one.
        etcd_away_s: since how long etcd has not answered; None while it does.
        peers_away_s: since how long no other node of its generation has answered either; None while one does, while
            etcd does, and where there is none.
        generation, nodes, world_size: of the run; 0 before the first generation.
        running: the generation whose workers live on this node, 0 for none.
        ranks: first and last rank of this node in the run's generation; None without a seat in it.
        step: the last step that all its workers have finished; None when that is not known (yet).
        warm: it could start workers at once.
        leaving: why it is on its way out, "" when it is not.
    """

    run_id: str
    node: str
    phase: str
    turned_at: float
    limit_s: float
    incarnation: str = ""
    lease: str = ""
    etcd_answer_s: float | None = None
    etcd_away_s: float | None = None
    peers_away_s: float | None = None
    generation: int = 0
    nodes: int = 0
    world_size: int = 0
    running: int = 0
    ranks: tuple[int, int] | None = None
    step: int | None = None
    warm: bool = False
    leaving: str = ""


@dataclass(frozen=True)
class Finding:
    """The answer to one question, with its reason."""

    ok: bool
    reason: str


def member(
    run_id: str,
    me: Me,
    view: View,
    now: float,
    *,
    away_since: float | None,
    alone_since: float | None,
    step: int | None,
    answer_s: float | None = None,
) -> HealthState:
    """What a member notes about itself as its loop goes round.

    Args:
        run_id: the run.
        me: its own state.
        view: what it knows of the others.
        now: the time; this and the others in seconds of the monotonic clock.
        away_since: since when etcd does not answer; None while it does.
        alone_since: since when no other node does either.
        step: the last step that all its workers have finished.
        answer_s: how long etcd's newest answer took.
    """
    record = me.record
    seat = view.seat_of(record.node, record.incarnation) if view.roster_known else None
    generation = view.generation.record if view.generation else None
    return HealthState(
        run_id=run_id,
        node=record.node,
        phase="member",
        turned_at=now,
        limit_s=LIVE_S,
        incarnation=record.incarnation,
        lease=me.lease,
        etcd_answer_s=answer_s,
        etcd_away_s=_age_s(away_since, now),
        peers_away_s=_age_s(alone_since, now),
        generation=generation.number if generation else 0,
        nodes=generation.nodes if generation else 0,
        world_size=generation.world_size if generation else 0,
        running=me.running,
        ranks=(seat.rank_offset, seat.rank_offset + seat.workers - 1) if seat else None,
        step=step,
        warm=record.warm,
        leaving=me.leaving or ("draining" if record.draining else ""),
    )


def _age_s(since: float | None, now: float) -> float | None:
    return round(now - since, 1) if since is not None else None


def live(vitals: HealthState, now: float) -> Finding:
    """Whether the agent's loop goes round, by its `vitals`, at `now`."""
    still_s = now - vitals.turned_at
    if still_s > vitals.limit_s:
        return Finding(False, f"the agent has been {vitals.phase} without a turn for {still_s:.0f} s")
    return Finding(True, f"the agent's last turn was {still_s:.1f} s ago")


def ready(vitals: HealthState, now: float) -> Finding:
    """Whether the node trains, or stands by and could, by its `vitals`, at `now`."""
    alive = live(vitals, now)
    if not alive.ok:
        return alive
    if vitals.phase != "member":
        return Finding(False, f"{vitals.phase}: not a member of the run")
    if vitals.leaving:
        return Finding(False, f"on its way out: {vitals.leaving}")
    if vitals.lease == "lost":
        return Finding(False, "not a member of the run: etcd has given its lease up")
    away = f"; etcd has not answered for {vitals.etcd_away_s:.0f} s" if vitals.etcd_away_s is not None else ""
    if vitals.ranks is not None and vitals.running == vitals.generation:
        return _training(vitals, away)
    if not vitals.warm:
        return Finding(False, f"stands by, but is still importing what its workers need{away}")
    if vitals.ranks is not None:
        what = "its workers of generation {0} have ended" if away else "starts its workers of generation {0}"
        return Finding(not away, what.format(vitals.generation) + away)
    if away:
        return Finding(False, f"stands by, but cannot be called{away}")
    what = f"generation {vitals.generation} runs without it" if vitals.generation else "waits for the first generation"
    return Finding(True, f"stands by: {what}")


def _training(vitals: HealthState, away: str) -> Finding:
    if vitals.peers_away_s is not None and vitals.peers_away_s > CUT_OFF_S:
        silence = f"neither etcd nor another node has answered for {vitals.peers_away_s:.0f} s"
        return Finding(False, f"cut off in generation {vitals.generation}: {silence}")
    return Finding(True, f"trains in generation {vitals.generation}{away}")


def body(vitals: HealthState, finding: Finding) -> dict[str, Any]:
    """What is answered: the `finding` and the `vitals`, as JSON values."""
    noted = asdict(vitals)
    del noted["turned_at"], noted["limit_s"]
    return {"ok": finding.ok, "reason": finding.reason, **noted}
