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
from elasticrt.rendezvous.decision import Decision, Go, Hold, Me, ReleaseHold, Wait, WithdrawHandover, WriteHandover
from elasticrt.rendezvous.leader_context import (
    LeaderContext,
    any_has_state,
    candidates,
    decide_if_too_few,
    leave_deadline,
    list_names,
    publish,
    re_form,
    startable_members,
)
from elasticrt.rendezvous.records import HandoverRecord, Member
from elasticrt.rendezvous.view import Stored, View

JOIN_COST_FACTOR = 20
"""The next planned re-form may come when this many times the cost of the last one has passed. So planned re-forms take
at most 5 % of the time."""

HOLD_S_MAX = 2.0
"""Seconds that the leader waits for the answers to "hold". Agents answer at once, whatever their workers do."""

HANDOVER_PROBE_S = 0.25
"""Seconds without an answer in a handover after which the agent that owes it is probed. Workers that hold wait for no
other worker, so a dead node makes none of them fail. A handover usually takes some 10 ms."""


@dataclass(frozen=True)
class PlannedChange:
    """A planned change that may happen now.

    Attributes:
        kind: what changes.
        cause: why, in words for people.
        save: whether the state goes to disk, because too few nodes remain.
    """

    kind: Literal["join", "drain", "resize"]
    cause: str
    save: bool = False


def probe_times(handover: Stored[HandoverRecord], now: float) -> tuple[list[float], float]:
    """When to probe the agents that a handover waits for: the last such time (a list, maybe empty) and the next.

    Each time is twice as late after the request as the one before, because a long step may be what all wait for.

    Args:
        handover: the handover.
        now: the member's monotonic clock, in seconds.
    """
    # The largest HANDOVER_PROBE_S * 2**k that has passed. Before the first probe is due, k is -1.
    passed_s = max(now - handover.since, HANDOVER_PROBE_S / 2)
    late_s = HANDOVER_PROBE_S * 2 ** math.floor(math.log2(passed_s / HANDOVER_PROBE_S))
    return [handover.since + late_s] if late_s >= HANDOVER_PROBE_S else [], handover.since + 2 * late_s


def take_part_in_handover(me: Me, view: View) -> Decision | None:
    """A member's part of a handover: make its workers hold, leave or go on, as the record says. None: nothing to do."""
    handover = view.handover
    if me.running_generation != view.generation_number:
        return None
    if handover is None:
        return ReleaseHold("the handover was given up") if me.hold_revision else None
    # A handover that is given up and asked for again has another create revision, so its workers have to hold again.
    if me.hold_revision != handover.create_revision:
        return Hold(f"asked to hold: {handover.record.cause}", handover.create_revision)
    if handover.record.step and me.leave_after_step != handover.record.step:
        return Go(f"all workers stop after step {handover.record.step}", handover.record.step, handover.record.save)
    return None


def lead_planned_change(context: LeaderContext) -> Decision:
    """The leader's part: what to change, and how far the handover for it is."""
    if context.generation.waits:
        return _after_waiting(context)
    change = _wanted_change(context)
    handover = context.view.handover
    if isinstance(change, Wait):
        if handover is not None and not handover.record.step:
            return WithdrawHandover(f"given up: {change.reason}")
        if handover is None:
            return change
        # It is too late to give the handover up: some workers may have left already.
        still = context.draining_seats or any(
            _has_workers_to_let_in(context, entry) for entry in candidates(context.view)
        )
        cause = handover.record.cause if still else f"a change taken back too late: {handover.record.cause}"
        change = PlannedChange("drain", cause, handover.record.save)
    if handover is None:
        return WriteHandover(
            f"{change.cause}: hold", HandoverRecord(generation=context.generation.number, cause=change.cause)
        )
    if not handover.record.step:
        return _after_hold(context, change, handover)
    missing, until = context.awaited_seats, leave_deadline(context)
    if missing and context.now < until:
        to_come = list_names(seat.node for seat in missing)
        until = min(until, probe_times(handover, context.now)[1])
        return Wait(f"all workers stop after step {handover.record.step}; waiting for {to_come}", until)
    if missing:
        return _replace_without_step(context, change)
    if change.save and not handover.record.save:
        return _save_together(context, change)
    return re_form(context, change.kind, change.cause)


def _replace_without_step(context: LeaderContext, change: PlannedChange) -> Decision:
    """The agreed step does not end, so the next generation comes without it.

    If a node with the state leaves, it first waits until the state is saved. The node that keeps the others waiting may
    be the only one that stays, and its worker may be ended.
    """
    members = startable_members(context.view, draining=True)
    if context.draining_seats and any_has_state(context.view, members):
        same = context.generation.restarts
        return publish(context, change.kind, change.cause, restarts=same, members=members, waits=True)
    return re_form(context, change.kind, change.cause)


def _after_waiting(context: LeaderContext) -> Decision:
    """The generation waits for nodes. The next follows when there are enough, and the survivors have saved.

    A survivor that ends an evaluation first, which no newcomer can take part in, saves after it. Evaluations may take
    long, so there is a deadline only for nodes that are to leave.
    """
    missing = [seat for seat in context.seats if context.key_of(seat) and not context.has_reported(seat, "held")]
    until = leave_deadline(context) if context.draining_seats else None
    if missing and (until is None or context.now < until):
        return Wait(f"waiting for {list_names(seat.node for seat in missing)} to save the state", until)
    too_few = decide_if_too_few(context)
    if too_few is not None:
        return too_few
    if context.draining_seats:
        return re_form(context, "drain", f"{list_names(seat.node for seat in context.draining_seats)} drained")
    # When the time for newcomers to set up beside the others is over, all members that can start workers take part.
    ready = candidates(context.view)
    ready = ready if len(ready) >= context.spec.min_nodes else startable_members(context.view)
    new = [entry.record.node for entry in ready if _has_workers_to_let_in(context, entry)]
    if new:
        return re_form(context, "join", _join_cause(context, new))
    return re_form(context, "resize", f"resized to at least {counted(context.spec.min_nodes, 'node')}")


def _after_hold(context: LeaderContext, change: PlannedChange, handover: Stored[HandoverRecord]) -> Decision:
    """All workers have been asked to hold: when every agent has answered, agree on the furthest step."""
    missing = context.awaited_seats
    entered = [context.view.reports[seat.node].record.entered for seat in context.seats if seat not in missing]
    # A worker without a Loop has no step to agree on.
    if 0 in entered:
        return re_form(context, change.kind, change.cause)
    until = handover.since + HOLD_S_MAX
    if missing and context.now < until:
        until = min(until, probe_times(handover, context.now)[1])
        return Wait(f"workers hold; waiting for {list_names(seat.node for seat in missing)} to answer", until)
    # If every late node runs the generation, its workers may just have ended, and the join is given up. A node whose
    # workers have not begun the generation, for example because a data preparation is still building there, has no
    # step. Then the generation is replaced without an agreed one.
    if missing and change.kind == "join" and all(context.is_running(seat) for seat in missing):
        return WithdrawHandover(f"given up: {list_names(seat.node for seat in missing)} did not answer")
    if missing:
        return re_form(context, change.kind, change.cause)
    record = HandoverRecord(
        generation=context.generation.number, cause=change.cause, step=max(entered), save=change.save
    )
    return WriteHandover(f"{change.cause}: all workers stop after step {record.step}", record)


def _save_together(context: LeaderContext, change: PlannedChange) -> Decision:
    """More nodes drain since the step was agreed, and too few remain: the copies of that step would leave with them.

    So all of these nodes go on until they have saved together. A whole job whose nodes get their signals one after the
    other ends this way. If more nodes are lost meanwhile, those that are left are too few for a step, and save at once.
    """
    leaving = [context.view.members[seat.node] for seat in context.draining_seats]
    members = [*candidates(context.view), *leaving]
    if len(members) < context.spec.min_nodes:
        return re_form(context, change.kind, change.cause)
    cause = f"{change.cause}, after they have saved"
    return publish(context, change.kind, cause, restarts=context.generation.restarts, members=members)


def _wanted_change(context: LeaderContext) -> PlannedChange | Wait:
    """The planned change that should happen now, or a `Wait` with the reason why none should.

    Draining members go first, and newcomers come in with them. After a resize there may be seats beyond max-nodes, or
    fewer than min-nodes. Workers that can only be ended, because they cannot go on in place, train on with too few
    nodes: the new minimum then counts from the next change on.
    """
    if context.view.ended_nodes:
        return Wait("the run is ending: a worker has finished, no node joins any more")
    if context.draining_seats:
        all_leave = len(context.draining_seats) == len(context.seats)
        save = len(candidates(context.view)) < context.spec.min_nodes or all_leave
        # The node that holds the copy from which the other nodes resume leaves only when they have resumed.
        stays = save or (context.generation.memory is not None and context.seats[0] in context.draining_seats)
        if stays and _is_starting(context):
            return Wait("the generation is starting; then it saves", context.now + LOOK_AGAIN_S)
        return PlannedChange("drain", f"{list_names(seat.node for seat in context.draining_seats)} drained", save=save)
    if len(context.seats) < context.spec.min_nodes and context.in_place and not context.me.starting:
        cause = f"resized to at least {counted(context.spec.min_nodes, 'node')}"
        return PlannedChange("resize", cause, save=len(candidates(context.view)) < context.spec.min_nodes)
    if len(context.seats) > context.spec.max_nodes:
        return PlannedChange("resize", f"resized to at most {counted(context.spec.max_nodes, 'node')}")
    return _wanted_join(context)


def _is_starting(context: LeaderContext) -> bool:
    """Whether the workers have still to come to their first step, as far as the leader knows.

    About workers that can go on in place, a leader without a seat knows that they have the state. About other workers
    it only knows how long they have been starting.
    """
    if context.me.running_generation == context.generation.number:
        return context.me.starting and context.standing_since is None
    return not context.in_place and context.now < context.generation_seen_at + context.drain_patience_s


def _wanted_join(context: LeaderContext) -> PlannedChange | Wait:
    """The join of newcomers, or a `Wait` if the run is full, still starting, or has just re-formed."""
    spec, after_loss = context.spec, _is_after_loss(context)
    since = {
        entry.record.node: entry.ready_since
        for entry in candidates(context.view)
        if entry.ready_since is not None
        and (spec.join != "failure" or after_loss)
        and _has_workers_to_let_in(context, entry)
    }
    # A node with a seat that has more workers ready brings no new node, so it needs no room.
    room = spec.max_nodes - len(context.seats) + sum(node in context.view.seats for node in since)
    if not since:
        return Wait("training")
    if room <= 0:
        return Wait(f"training; {counted(len(since), 'standby node')}")
    if context.me.starting:
        return Wait("the generation is starting", context.now + LOOK_AGAIN_S)
    ready = sorted(since.values())
    # Newcomers that arrive close together share one re-form. If they fill the run, there is nothing more to wait for.
    quiet = ready[-1] if len(since) >= room else min(ready[-1] + spec.settle_quiet_s, ready[0] + spec.settle_max_s)
    cost_s = JOIN_COST_FACTOR * context.me.pause_s if spec.join == "budget" and not after_loss else 0.0
    paid = context.generation_seen_at + cost_s
    if context.now < max(quiet, paid):
        return Wait(f"{list_names(since)} will join", max(quiet, paid))
    return PlannedChange("join", _join_cause(context, since))


def _is_after_loss(context: LeaderContext) -> bool:
    """Whether the last change was a loss that workers have lived through.

    Newcomers then come in by a handover after it, and not in the same generation.
    """
    return context.generation.in_place and context.generation.kind in ("failure", "lost")


def _join_cause(context: LeaderContext, nodes: Iterable[str]) -> str:
    """The cause of a join, in words: new nodes, and new workers of nodes that take part already."""
    members = context.view.members.values()
    seated = {entry.record.node for entry in members if context.view.seat_of(entry.record) is not None}
    new, again = set(nodes) - seated, seated.intersection(nodes)
    parts = [f"{list_names(new)} joined"] if new else []
    parts += [f"a new worker of {list_names(again)} joined"] if again else []
    return ", ".join(parts)


def _has_workers_to_let_in(context: LeaderContext, entry: Stored[Member]) -> bool:
    """Whether a member has workers that could be let in: it has no seat, or more workers ready than its seat has."""
    seat = context.view.seat_of(entry.record)
    return seat is None or (context.in_place and entry.record.ready > seat.workers)
