"""Planned changes: nodes join or drain, a run is resized. The handover makes them lossless. Pure.

A planned change stops all workers together at an agreed step, in two rounds through the store:

    leader: handover {step 0}      "hold": every agent makes its workers hold at the end of their present step,
    agents: report "holding"       and reports the furthest step that one of them has been let into (`entered`);
    leader: handover {step T}      "go": T is the furthest of these. No worker is past it. A worker that is behind
    agents: report "held"          runs on to T, because the others' collectives need it. Then the state is copied;
    leader: generation g + 1       with `memory` = a copy of step T: nothing is lost, nothing is done twice.

A failure, or silence for too long, voids the handover. The generation is then replaced as after a failure. It resumes
from a copy of this very generation if a seated member states one, else from the head. A late join is given up instead.
Scripts without a Loop have no `entered`; they are re-formed at once, as torchrun would do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from elasticrt.ipc.time_bounds import LOOK_AGAIN_S
from elasticrt.ipc.wording import counted
from elasticrt.rendezvous.decision import Ask, Decision, Go, Hold, Me, ReleaseHold, Wait, Withdraw
from elasticrt.rendezvous.leader_context import (
    LeaderContext,
    candidates,
    go_on,
    left_until,
    list_names,
    publish,
    re_form,
    startable,
    too_few,
)
from elasticrt.rendezvous.records import HandoverRecord, Member
from elasticrt.rendezvous.view import Stored, View

JOIN_COST_FACTOR = 20
"""The next planned re-form may come when this many times the cost of the last one has passed. So planned re-forms take
at most 5 % of the time."""

HOLD_S_MAX = 2.0
"""Seconds that the leader waits for the answers to "hold". Agents answer at once, whatever their workers do."""

HOLDING_S = 0.25
"""Seconds without an answer in a handover after which the agent that owes it is probed. Workers that hold wait for no
other worker, so a dead node makes none of them fail. A handover usually takes some 10 ms."""


@dataclass(frozen=True)
class Reconfiguration:
    """A planned change that may happen now.

    Attributes:
        kind: what changes.
        cause: why, in words for people.
        save: whether the state goes to disk, because too few nodes remain.
    """

    kind: Literal["join", "drain", "resize"]
    cause: str
    save: bool = False


def ask_times(asked: Stored[HandoverRecord], now: float) -> tuple[list[float], float]:
    """When to probe the agents that a handover waits for: the last such time (a list, maybe empty) and the next.

    Each time is twice as late after the request as the one before, because a long step may be what all wait for.

    Args:
        asked: the handover.
        now: the member's monotonic clock, in seconds.
    """
    # The largest HOLDING_S * 2**k that has passed. Before the first probe is due, k is -1.
    late_s = HOLDING_S * 2 ** math.floor(math.log2(max(now - asked.since, HOLDING_S / 2) / HOLDING_S))
    return [asked.since + late_s] if late_s >= HOLDING_S else [], asked.since + 2 * late_s


def handing_over(me: Me, view: View) -> Decision | None:
    """A member's part of a handover: make its workers hold, leave or go on, as the record says. None: nothing to do."""
    asked = view.handover
    if me.running != view.number:
        return None
    if asked is None:
        return ReleaseHold("the handover was given up") if me.holding else None
    # A handover that is given up and asked for again has another create revision, so its workers have to hold again.
    if me.holding != asked.create_revision:
        return Hold(f"asked to hold: {asked.record.cause}", asked.create_revision)
    if asked.record.step and me.going != asked.record.step:
        return Go(f"all leave after step {asked.record.step}", asked.record.step, asked.record.save)
    return None


def planned(led: LeaderContext) -> Decision:
    """The leader's part: what to change, and how far the handover for it is."""
    if led.generation.waits:
        return _after_waiting(led)
    wish = _wish(led)
    asked = led.view.handover
    if isinstance(wish, Wait):
        if asked is not None and not asked.record.step:
            return Withdraw(f"given up: {wish.reason}")
        if asked is None:
            return wish
        # It is too late to give the handover up: some workers may have left already.
        still = led.leaving or any(_has_more(led, entry) for entry in candidates(led.view))
        cause = asked.record.cause if still else f"given up too late: {asked.record.cause}"
        wish = Reconfiguration("drain", cause, asked.record.save)
    if asked is None:
        return Ask(f"{wish.cause}: hold", HandoverRecord(generation=led.generation.number, cause=wish.cause))
    if not asked.record.step:
        return _after_hold(led, wish, asked)
    missing, until = led.to_answer, left_until(led)
    if missing and led.now < until:
        to_come = list_names(seat.node for seat in missing)
        until = min(until, ask_times(asked, led.now)[1])
        return Wait(f"all leave after step {asked.record.step}; {to_come} to come", until)
    if missing:
        return _given_up(led, wish)
    if wish.save and not asked.record.save:
        return _once_more(led, wish)
    return re_form(led, wish.kind, wish.cause)


def _given_up(led: LeaderContext, wish: Reconfiguration) -> Decision:
    """The agreed step does not end, so the next generation comes without it.

    If a node with the state leaves, it first waits until the state is saved. The node that keeps the others waiting may
    be the only one that stays, and its worker may be ended.
    """
    members = startable(led.view, draining=True)
    if led.leaving and go_on(led.view, members):
        same = led.generation.restarts
        return publish(led, wish.kind, wish.cause, restarts=same, members=members, waits=True)
    return re_form(led, wish.kind, wish.cause)


def _after_waiting(led: LeaderContext) -> Decision:
    """The generation waits for nodes. The next follows when there are enough and the leaving nodes have saved."""
    missing, until = [seat for seat in led.seats if led.key_of(seat) and not led.said(seat, "held")], left_until(led)
    if led.leaving and missing and led.now < until:
        return Wait(f"the state is saved; {list_names(seat.node for seat in missing)} to come", until)
    short = too_few(led)
    if short is not None:
        return short
    if led.leaving:
        return re_form(led, "drain", f"{list_names(seat.node for seat in led.leaving)} drained")
    # When the time for newcomers to set up beside the others is over, all members that can start workers take part.
    ready = candidates(led.view)
    ready = ready if len(ready) >= led.spec.min_nodes else startable(led.view)
    new = [entry.record.node for entry in ready if _has_more(led, entry)]
    if new:
        return re_form(led, "join", _arrival(led, new))
    return re_form(led, "resize", f"resized to at least {counted(led.spec.min_nodes, 'node')}")


def _after_hold(led: LeaderContext, wish: Reconfiguration, asked: Stored[HandoverRecord]) -> Decision:
    """All workers have been asked to hold: when every agent has answered, agree on the furthest step."""
    missing = led.to_answer
    entered = [led.view.reports[seat.node].record.entered for seat in led.seats if seat not in missing]
    # A worker without a Loop has no step to agree on.
    if 0 in entered:
        return re_form(led, wish.kind, wish.cause)
    until = asked.since + HOLD_S_MAX
    if missing and led.now < until:
        until = min(until, ask_times(asked, led.now)[1])
        return Wait(f"hold; {list_names(seat.node for seat in missing)} to answer", until)
    # If every late node runs the generation, its workers may just have ended, and the join is given up. A node whose
    # workers have not begun the generation, for example because a data preparation is still building there, has no
    # step. Then the generation is replaced without an agreed one.
    if missing and wish.kind == "join" and all(led.runs(seat) for seat in missing):
        return Withdraw(f"given up: {list_names(seat.node for seat in missing)} did not answer")
    if missing:
        return re_form(led, wish.kind, wish.cause)
    record = HandoverRecord(generation=led.generation.number, cause=wish.cause, step=max(entered), save=wish.save)
    return Ask(f"{wish.cause}: all leave after step {record.step}", record)


def _once_more(led: LeaderContext, wish: Reconfiguration) -> Decision:
    """More nodes drain since the step was agreed, and too few remain: the copies of that step would leave with them.

    So all of these nodes go on until they have saved together. A whole job whose nodes get their signals one after the
    other ends this way. If more nodes are lost meanwhile, those that are left are too few for a step, and save at once.
    """
    leaving = [led.view.members[seat.node] for seat in led.leaving]
    members = [*candidates(led.view), *leaving]
    if len(members) < led.spec.min_nodes:
        return re_form(led, wish.kind, wish.cause)
    cause = f"{wish.cause}, after they have saved"
    return publish(led, wish.kind, cause, restarts=led.generation.restarts, members=members)


def _wish(led: LeaderContext) -> Reconfiguration | Wait:
    """The planned change that should happen now, or a `Wait` with the reason why none should.

    Draining members go first, and newcomers come in with them. After a resize there may be seats beyond max-nodes, or
    fewer than min-nodes. Workers that can only be ended, because they cannot go on in place, train on with too few
    nodes: the new minimum then counts from the next change on.
    """
    if led.view.ended:
        return Wait("closing: a worker has ended, nobody joins any more")
    if led.leaving:
        save = len(candidates(led.view)) < led.spec.min_nodes or len(led.leaving) == len(led.seats)
        # The node that holds the copy from which the other nodes resume leaves only when they have resumed.
        stays = save or (led.generation.memory is not None and led.seats[0] in led.leaving)
        if stays and _is_starting(led):
            return Wait("the generation is starting; then it saves", led.now + LOOK_AGAIN_S)
        return Reconfiguration("drain", f"{list_names(seat.node for seat in led.leaving)} drained", save=save)
    if len(led.seats) < led.spec.min_nodes and led.in_place and not led.me.starting:
        cause = f"resized to at least {counted(led.spec.min_nodes, 'node')}"
        return Reconfiguration("resize", cause, save=len(candidates(led.view)) < led.spec.min_nodes)
    if len(led.seats) > led.spec.max_nodes:
        return Reconfiguration("resize", f"resized to at most {counted(led.spec.max_nodes, 'node')}")
    return _newcomers(led)


def _is_starting(led: LeaderContext) -> bool:
    """Whether the workers have still to come to their first step, as far as the leader knows.

    About workers that can go on in place, a leader without a seat knows that they have the state. About other workers
    it only knows how long they have been starting.
    """
    if led.me.running == led.generation.number:
        return led.me.starting and led.standing_since is None
    return not led.in_place and led.now < led.since + led.patience_s


def _newcomers(led: LeaderContext) -> Reconfiguration | Wait:
    """The join of newcomers, or a `Wait` if the run is full, still starting, or has just re-formed."""
    spec, after_loss = led.spec, _is_after_loss(led)
    since = {
        entry.record.node: entry.ready_since
        for entry in candidates(led.view)
        if entry.ready_since is not None and (spec.join != "failure" or after_loss) and _has_more(led, entry)
    }
    # A node with a seat that has more workers ready brings no new node, so it needs no room.
    room = spec.max_nodes - len(led.seats) + sum(node in led.view.seats for node in since)
    if not since:
        return Wait("training")
    if room <= 0:
        return Wait(f"training; {counted(len(since), 'standby node')}")
    if led.me.starting:
        return Wait("the generation is starting", led.now + LOOK_AGAIN_S)
    ready = sorted(since.values())
    # Newcomers that arrive close together share one re-form. If they fill the run, there is nothing more to wait for.
    quiet = ready[-1] if len(since) >= room else min(ready[-1] + spec.settle_quiet_s, ready[0] + spec.settle_max_s)
    paid = led.since + (JOIN_COST_FACTOR * led.me.pause_s if spec.join == "budget" and not after_loss else 0.0)
    if led.now < max(quiet, paid):
        return Wait(f"{list_names(since)} will join", max(quiet, paid))
    return Reconfiguration("join", _arrival(led, since))


def _is_after_loss(led: LeaderContext) -> bool:
    """Whether the last change was a loss that workers have lived through.

    Newcomers then come in by a handover after it, and not in the same generation.
    """
    return led.generation.in_place and led.generation.kind in ("failure", "lost")


def _arrival(led: LeaderContext, nodes: Iterable[str]) -> str:
    """The cause of a join, in words: new nodes, and new workers of nodes that take part already."""
    members = led.view.members.values()
    seated = {entry.record.node for entry in members if led.view.seat_of(entry.record) is not None}
    new, again = set(nodes) - seated, seated.intersection(nodes)
    parts = [f"{list_names(new)} joined"] if new else []
    parts += [f"a new worker of {list_names(again)} joined"] if again else []
    return ", ".join(parts)


def _has_more(led: LeaderContext, entry: Stored[Member]) -> bool:
    """Whether a member has workers that could be let in: it has no seat, or more workers ready than its seat has.

    A key that names an earlier generation does not count. Its agent has still to tell what became of those workers.
    """
    if 0 < entry.record.generation < led.view.number:
        return False
    seat = led.view.seat_of(entry.record)
    return seat is None or (led.in_place and entry.record.ready > seat.workers)
