"""Changes that are planned: nodes join or drain, a run is resized, and the handover makes it lossless. Pure.

A planned change stops all workers together at an agreed step, in two rounds through the store:

    leader: handover {step 0}      "hold": every agent makes its workers hold at the end of their present step,
    agents: report "holding"       and says how far one of them has been let in (`entered`);
    leader: handover {step T}      "go": T is the furthest of these. None is past it, and one that is behind runs on,
    agents: report "held"          because others' collectives need it. After T the state is copied to memory;
    leader: generation g + 1       with `memory` = a copy of step T: nothing is lost, nothing done twice.

A failure, or silence for too long, voids it: the generation is then replaced as after a failure, and resumes from a
copy of this very generation if a seated member states one, else from the head. A join is given up instead. Scripts
without a Loop have no `entered`; they are re-formed at once, as torchrun would.
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
"""A planned re-form is allowed when this many times the last one's cost has passed: at most 5 % of the time."""

HOLD_S_MAX = 2.0
"""Agents answer a "hold" at once, whatever their workers do."""

HOLDING_S = 0.25
"""Whoever waits for an answer in a handover asks after this time whether the other lives: workers that hold wait for
nobody, so that none fails of its end. A handover usually takes some 10 ms."""


@dataclass(frozen=True)
class Reconfiguration:
    """A planned change that may happen now. `save`: too few nodes remain, so the state goes to disk."""

    kind: Literal["join", "drain", "resize"]
    cause: str
    save: bool = False


def ask_times(asked: Stored[HandoverRecord], now: float) -> tuple[list[float], float]:
    """In a handover: the last time to ask whether those live that are waited for, if there was one, and the next.

    Each comes twice as late as the one before, as a long step may be what all wait for.
    """
    late_s = HOLDING_S * 2 ** math.floor(math.log2(max(now - asked.since, HOLDING_S / 2) / HOLDING_S))
    return [asked.since + late_s] if late_s >= HOLDING_S else [], asked.since + 2 * late_s


def handing_over(me: Me, view: View) -> Decision | None:
    """A member's part: make its workers hold, go or go on, as the record says. None when there is nothing to do."""
    asked = view.handover
    if me.running != view.number:
        return None
    if asked is None:
        return ReleaseHold("the handover was given up") if me.holding else None
    if me.holding != asked.create_revision:
        return Hold(f"asked to hold: {asked.record.cause}", asked.create_revision)
    if asked.record.step and me.going != asked.record.step:
        return Go(f"all leave after step {asked.record.step}", asked.record.step, asked.record.save)
    return None


def planned(led: LeaderContext) -> Decision:
    """The leader's part: what to change, and how far its handover is."""
    if led.generation.waits:
        return _after_waiting(led)
    wish = _wish(led)
    asked = led.view.handover
    if isinstance(wish, Wait):
        if asked is not None and not asked.record.step:
            return Withdraw(f"given up: {wish.reason}")
        if asked is None:
            return wish
        # Too late to give it up: some may have left.
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
    """The agreed step does not end. Where a node leaves that has the state, it leaves only when that is saved: whoever
    keeps the others waiting may be ended, and may be all that is left.
    """
    members = startable(led.view, draining=True)
    if led.leaving and go_on(led.view, members):
        same = led.generation.restarts
        return publish(led, wish.kind, wish.cause, restarts=same, members=members, waits=True)
    return re_form(led, wish.kind, wish.cause)


def _after_waiting(led: LeaderContext) -> Decision:
    """The generation waits for nodes: as soon as there are enough, and who leaves has saved, the next one follows."""
    missing, until = [seat for seat in led.seats if led.key_of(seat) and not led.said(seat, "held")], left_until(led)
    if led.leaving and missing and led.now < until:
        return Wait(f"the state is saved; {list_names(seat.node for seat in missing)} to come", until)
    short = too_few(led)
    if short is not None:
        return short
    if led.leaving:
        return re_form(led, "drain", f"{list_names(seat.node for seat in led.leaving)} drained")
    # Where they wait no more for newcomers to set up, all that can start do so.
    ready = candidates(led.view)
    ready = ready if len(ready) >= led.spec.min_nodes else startable(led.view)
    new = [entry.record.node for entry in ready if _has_more(led, entry)]
    if new:
        return re_form(led, "join", _arrival(led, new))
    return re_form(led, "resize", f"resized to at least {counted(led.spec.min_nodes, 'node')}")


def _after_hold(led: LeaderContext, wish: Reconfiguration, asked: Stored[HandoverRecord]) -> Decision:
    """All have been asked to hold: when all have said how far they are, agree on the furthest."""
    missing = led.to_answer
    entered = [led.view.reports[seat.node].record.entered for seat in led.seats if seat not in missing]
    if 0 in entered:
        return re_form(led, wish.kind, wish.cause)
    until = asked.since + HOLD_S_MAX
    if missing and led.now < until:
        until = min(until, ask_times(asked, led.now)[1])
        return Wait(f"hold; {list_names(seat.node for seat in missing)} to answer", until)
    # Who runs it and does not answer may just have ended. Who has not begun it, as a build goes on there, has no step.
    if missing and wish.kind == "join" and all(led.runs(seat) for seat in missing):
        return Withdraw(f"given up: {list_names(seat.node for seat in missing)} did not answer")
    if missing:
        return re_form(led, wish.kind, wish.cause)
    record = HandoverRecord(generation=led.generation.number, cause=wish.cause, step=max(entered), save=wish.save)
    return Ask(f"{wish.cause}: all leave after step {record.step}", record)


def _once_more(led: LeaderContext, wish: Reconfiguration) -> Decision:
    """More nodes drain since the step was agreed, and too few remain: the copies of that step would leave with them.

    So all of them go on until they have saved together. This is how a whole job ends whose nodes get their signals one
    after the other. Where others are lost meanwhile, those that are left are too few for a step, and save at once.
    """
    leaving = [led.view.members[seat.node] for seat in led.leaving]
    members = [*candidates(led.view), *leaving]
    if len(members) < led.spec.min_nodes:
        return re_form(led, wish.kind, wish.cause)
    cause = f"{wish.cause}, after they have saved"
    return publish(led, wish.kind, cause, restarts=led.generation.restarts, members=members)


def _wish(led: LeaderContext) -> Reconfiguration | Wait:
    """What should change now, else why not.

    Members that drain go first, newcomers come in with them. After a resize there are seats beyond max-nodes, or fewer
    than min-nodes. Workers that can only be ended train on with these: the minimum then counts from the next change on.
    """
    if led.view.ended:
        return Wait("closing: a worker has ended, nobody joins any more")
    if led.leaving:
        save = len(candidates(led.view)) < led.spec.min_nodes or len(led.leaving) == len(led.seats)
        # Who holds the copy that the others resume from leaves when they have done so.
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

    One without a seat knows of workers that can go on in place whether they have the state. Of others it only knows how
    long they have been starting.
    """
    if led.me.running == led.generation.number:
        return led.me.starting and led.standing_since is None
    return not led.in_place and led.now < led.since + led.patience_s


def _newcomers(led: LeaderContext) -> Reconfiguration | Wait:
    """Let newcomers in, unless the run is full, or has just re-formed."""
    spec, after_loss = led.spec, _is_after_loss(led)
    since = {
        entry.record.node: entry.ready_since
        for entry in candidates(led.view)
        if entry.ready_since is not None and (spec.join != "failure" or after_loss) and _has_more(led, entry)
    }
    room = spec.max_nodes - len(led.seats) + sum(node in led.view.seats for node in since)
    if not since:
        return Wait("training")
    if room <= 0:
        return Wait(f"training; {counted(len(since), 'standby node')}")
    if led.me.starting:
        return Wait("the generation is starting", led.now + LOOK_AGAIN_S)
    ready = sorted(since.values())
    quiet = ready[-1] if len(since) >= room else min(ready[-1] + spec.settle_quiet_s, ready[0] + spec.settle_max_s)
    paid = led.since + (JOIN_COST_FACTOR * led.me.pause_s if spec.join == "budget" and not after_loss else 0.0)
    if led.now < max(quiet, paid):
        return Wait(f"{list_names(since)} will join", max(quiet, paid))
    return Reconfiguration("join", _arrival(led, since))


def _is_after_loss(led: LeaderContext) -> bool:
    """Whether the last change was a loss that workers have lived through: newcomers come in after that, not with it."""
    return led.generation.in_place and led.generation.kind in ("failure", "lost")


def _arrival(led: LeaderContext, nodes: Iterable[str]) -> str:
    """Who is let in: nodes, and workers of nodes that take part already."""
    members = led.view.members.values()
    seated = {entry.record.node for entry in members if led.view.seat_of(entry.record) is not None}
    new, again = set(nodes) - seated, seated.intersection(nodes)
    parts = [f"{list_names(new)} joined"] if new else []
    parts += [f"a new worker of {list_names(again)} joined"] if again else []
    return ", ".join(parts)


def _has_more(led: LeaderContext, entry: Stored[Member]) -> bool:
    """Whether a member has workers that could be let in: it has no seat, or has more ready than its seat has.

    A key that tells of workers in an earlier generation has still to tell what has become of them.
    """
    if 0 < entry.record.generation < led.view.number:
        return False
    seat = led.view.seat_of(entry.record)
    return seat is None or (led.in_place and entry.record.ready > seat.workers)
