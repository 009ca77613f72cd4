"""The protocol: from what a member knows to what it does next, and why. Pure.

The loop calls `decide(me, view, now)` after every change of the view, and at the time that a `Wait` names. The function
is a column of guards, and the first guard that applies gives the decision. It keeps no state between calls: everything
is in `me` (this member's own state) and `view` (the store's state). So the order of events does not matter, and a
repeated call is safe.

The life of a generation g:

    members register ─► the leader waits for quiet ─► publishes g (compare-and-swap) ─► every seat starts its workers
        ▲                                                                                    │
        │                 a node fails, leaves or joins                                      ▼
        └──────────────── the leader publishes g + 1 (the stop signal for g) ◄──────── workers run, or end: result

* The leader is the live member with the oldest key. It probes and fences other members, plans changes of membership,
  publishes generations, and writes the result. If two members believe that they lead, the compare-and-swap lets one
  through.
* A member whose workers failed files a report. The leader then probes every other seat, fences the members that are
  certainly dead, and publishes the next generation from the rest. Only a silent machine makes the leader wait for a
  lease to end.
* A missing member key is not proof of death, because etcd can lose every lease at once. The leader probes the key's
  owner first.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from elasticrt.errors import EXIT_DUPLICATE, EXIT_STORE, EXIT_WORKERS
from elasticrt.ipc.env import Commit
from elasticrt.ipc.failure import Failure
from elasticrt.ipc.wording import ANEW, counted
from elasticrt.rendezvous.decision import (
    AdoptSpec,
    Announce,
    Decision,
    Drain,
    End,
    Fence,
    Finish,
    Halt,
    Leave,
    Me,
    Probe,
    Publish,
    Register,
    Rejoin,
    Run,
    Wait,
    WriteReport,
)
from elasticrt.rendezvous.leader_context import (
    LEAVE_S_MAX,
    LeaderContext,
    any_has_state,
    candidates,
    decide_if_too_few,
    describe_loss,
    failure_text,
    failure_to_blame,
    has_registered_since,
    list_names,
    publish,
    re_form,
    restarts_after,
    settled_at,
    startable_members,
    unreachable_members,
    wait_for_save,
)
from elasticrt.rendezvous.reconfiguration import (
    HANDOVER_PROBE_S,
    lead_planned_change,
    probe_times,
    take_part_in_handover,
)
from elasticrt.rendezvous.records import Generation, Member, Report, Restarts, Seat, SpecRecord
from elasticrt.rendezvous.seats import seats_for
from elasticrt.rendezvous.view import Stored, View
from elasticrt.spec import difference, resized

COLLATERAL_GRACE_S = 0.25
"""How long to wait for the cause, in seconds, when only collateral failures are reported. A killed worker is reported
within milliseconds and the failing collectives of its peers after that, so the wait is rarely used up. The leader waits
equally long for the copies of survivors that cannot go on in place."""

RANK_0_GRACE_S = 5.0
"""How long to wait for the report of rank 0, in seconds, when another rank ends together with rank 0. The run ends in
any case, and rank 0 has the words for people."""

RETURN_S = 2.5
"""How long to wait for the cause after an outage of etcd, in seconds: the nodes that report come back one by one, as a
client may wait for two seconds before it connects again."""

STACKS_GRACE_S = 6.0
"""How long to wait for the stacks of all nodes after one node has reported a hang, in seconds: each node detects the
hang by its own clock."""

SIMULTANEOUS_S = 1.0
"""Two probes sent within this time, in seconds, count as simultaneous. A silence that a witness confirms is established
within it. A silence that takes longer to establish may have been this node's own, and over by the time that another
node answered."""

SILENCE_TERMS = 2
"""A silence explains a missing key if it began at most this many lease terms before the key went: the node then lost
its lease or was fenced. A node that kept its key for longer has reached etcd meanwhile, so it is probed again."""


def decide(me: Me, view: View, now: float) -> Decision:  # noqa: PLR0912  It is one column of guards.
    """Decide what this member does next.

    Args:
        me: this member's own state.
        view: what this member knows of the run.
        now: this member's monotonic clock, in seconds.
    """
    # Does this member take part at all?
    if view.result is not None:
        return End(f"the run has ended: {view.result.reason}", view.result)
    if me.leave_reason:
        return Leave(me.leave_reason, others_go_on=_enough_others_stay(me, view))
    if me.record.draining and _can_leave(me, view):
        return _leave_drained(me, view)
    if view.generation_number < me.highest_generation:
        known, before = view.generation_number, me.highest_generation
        return Halt(f"etcd has generation {known}, and had generation {before}: data lost", EXIT_STORE)
    if view.data_loss:
        return _end_after_data_loss(view, f"{view.data_loss}: data lost")
    if view.spec is None:
        return Halt("etcd no longer has the options of this run: data lost", EXIT_STORE)
    if view.spec.record.attempt != me.attempt:
        return Halt(f"attempt {view.spec.record.attempt} of this run has begun without this node", EXIT_DUPLICATE)
    if view.spec.record.spec != me.spec:
        if resized(me.spec, view.spec.record.spec) == view.spec.record.spec:
            return AdoptSpec(
                f"the run was resized: {difference(me.spec, view.spec.record.spec)}", view.spec.record.spec
            )
        return Halt(f"the run has other options now: {difference(me.spec, view.spec.record.spec)}", EXIT_DUPLICATE)

    # What do its workers do? This comes before anything is written. A newer generation is the stop signal for the
    # workers of an older one, and it holds whether or not etcd answers at the moment.
    if not view.roster_known:
        return _wait_for_etcd(me, f"reading the roster of generation {view.generation_number}")
    own_key = view.members.get(me.record.node)
    registered = own_key is not None and own_key.record.incarnation == me.record.incarnation
    seat_change = _take_seat(me, view, registered=registered)
    if seat_change is not None:
        return seat_change
    if me.lease == "suspended":
        return _wait_for_etcd(me, "etcd does not answer: workers run on, nothing is committed")

    # What should the other members know of this one? To tell them needs etcd, so this comes after the check of the
    # lease.
    if me.lease == "lost" or own_key is None or not registered:
        return Register("this node has no member key in etcd")
    if (own_key.record.draining or _was_told_to_leave(me, view.spec.record)) and not me.record.draining:
        return Drain("asked to drain")
    # The report comes before the key: `as_reported` takes a report that is newer than the key at its word. A report
    # about an older generation is not stored, because its transaction compares the current one.
    if me.report is not None and me.report != me.stored_report and me.report.generation == view.generation_number:
        return WriteReport(f"workers of generation {me.report.generation}: {me.report.status}", me.report)
    if own_key.record != me.record:
        return Announce("this member's state has changed")

    # What does this member do for the whole run?
    handover_part = take_part_in_handover(me, view)
    if handover_part is not None:
        return handover_part
    return _lead(me, view, now) if view.is_leader else _follow(me, view, now)


def _take_seat(me: Me, view: View, *, registered: bool) -> Run | Rejoin | None:
    """What a newer generation means for this life: `Run` with its seat, `Rejoin` without one, None if nothing changes.

    A life that had a seat and has none in a newer generation was left out, perhaps because it was fenced. The exception
    is a generation that goes on in place while this node has no workers left. Its next workers set up beside the
    training, and as long as this life is `registered` it waits in the same life to be let in.
    """
    if view.generation is None:
        return None
    generation, seat = view.generation.record, view.seat_of(me.record)
    if seat is not None:
        run = Run(f"generation {generation.number}: {generation.cause}", generation, seat)
        return run if me.started_generation < generation.number else None
    waits = generation.in_place and registered and not me.running_generation
    if 0 < max(me.running_generation, me.seated_generation) < generation.number and not waits:
        return Rejoin(f"generation {generation.number} goes on without this node")
    return None


def _was_told_to_leave(me: Me, spec: SpecRecord) -> bool:
    """Whether the run, or this agent, was told to leave, perhaps while it had no key."""
    return spec.stopped or me.record.agent in spec.leaving


def _wait_for_etcd(me: Me, waiting: str) -> Decision:
    """Wait for etcd. End this node's workers if another agent says that it is in a newer generation."""
    if me.lease == "suspended" and 0 < me.running_generation < me.heard_generation:
        return Rejoin(f"etcd does not answer, but another node is in generation {me.heard_generation} already")
    return Wait(waiting)


def _end_after_data_loss(view: View, reason: str) -> Decision:
    """End the run for all members: the others cannot see what this member sees, and must not build on what is left."""
    # Only the leader may write the result. Any other member that finds the loss halts alone.
    if view.is_leader and view.generation is not None:
        text = f"{reason}. The checkpoints are intact: check etcd, then submit the run again with the same --run-id"
        return Finish(reason, "failed", EXIT_STORE, text)
    return Halt(reason, EXIT_STORE)


def _can_leave(me: Me, view: View) -> bool:
    """Whether a draining member has nothing left to do: it has no seat, or its workers have saved and left for good."""
    if view.seat_of(me.record) is None:
        return not me.running_generation or view.generation_number > me.running_generation
    saved = view.handover is not None and view.handover.record.save
    saved = saved or (view.generation is not None and view.generation.record.waits)
    # Only a report about this generation counts. An older "held" says nothing of the state that this generation saves.
    held = me.report is not None and (me.report.generation, me.report.status) == (view.generation_number, "held")
    return saved and held and me.report == me.stored_report


def _enough_others_stay(me: Me, view: View) -> bool:
    """Whether enough other members stay when this member leaves.

    Only the leader sees all members. Another member may see just its own key and the leader's, and then answers False
    too often.
    """
    stay = [each for node, each in view.members.items() if node != me.record.node and not each.record.draining]
    return len(stay) >= me.spec.min_nodes


def _leave_drained(me: Me, view: View) -> Leave:
    """The decision of a draining member to leave, with the step to save first if the others do not go on from memory.

    The leader knows which nodes stay, and its handover record says `save` if they are too few. This member may learn of
    the other members' keys late, so a record that says `save` overrides its own view.
    """
    others_go_on = _enough_others_stay(me, view) and not (view.handover is not None and view.handover.record.save)
    if view.seat_of(me.record) is None:
        if view.generation is None:
            return Leave("drained: no generation has begun yet")
        waits = view.generation.record.waits
        all_leave = waits and all(entry.record.draining for entry in view.members.values())
        others = "save, and leave as well" if all_leave else "wait for more nodes" if waits else "go on"
        return Leave(f"drained: the others {others}", others_go_on=True)
    step = me.leave_after_step
    if others_go_on:
        return Leave(f"drained: the others go on after step {step:,}", save_step=step, others_go_on=True)
    return Leave(f"drained: too few nodes are left to go on after step {step:,}", save_step=step)


def _follow(me: Me, view: View, now: float) -> Decision:
    """Decide for a member that does not lead: wait for the leader, and after a failure make sure that there is one.

    The same applies while the leader has asked all workers to hold. Workers that hold are in no collective, so none of
    them fails when the leader dies.

    Only probes sent after this member's last registration count. Before that it may have led and been cut off, and then
    the silence of the others was its own.
    """
    leader = view.members.get(view.leader_node or "")
    if leader is None:
        return Wait("looking for the leader")
    # Workers that are being replaced do not count: a generation that ends makes no steps.
    standing_since = me.standing_since if me.running_generation == view.generation_number else None
    trouble = [at for at in (me.failed_at, standing_since) if at is not None]
    what = "steps stand still" if me.failed_at is None else "workers failed"
    probe_at = None
    if not trouble and view.handover is not None:
        what, (trouble, probe_at) = view.handover.record.cause, probe_times(view.handover, now)
    if not trouble or me.started_generation != view.generation_number:
        return Wait(f"{leader.record.node} leads", probe_at)
    # A verdict older than the trouble, or than this member's own key, proves nothing about now.
    since = max(*trouble, view.members[me.record.node].since)
    verdict = view.verdicts.get(leader.record.incarnation)
    if verdict is not None and verdict.kind == "dead":
        return Fence(f"the leader {leader.record.node} does not exist any more", leader)
    if (
        verdict is None
        or verdict.asked_at < since
        or (verdict.kind == "silent" and has_registered_since(leader, verdict))
    ):
        return Probe(f"{what}: does the leader {leader.record.node} live?", seats_for([leader]))
    if verdict.kind == "silent":
        return _judge_silent_leader(view, me, leader, since)
    return Wait(f"{what}; {leader.record.node} leads", probe_at)


def _judge_silent_leader(view: View, me: Me, leader: Stored[Member], since: float) -> Decision:
    """The leader is silent: fence it, but only if this member reaches most of the nodes that it knows of.

    Otherwise this member must suspect its own network, and leaves the decision to the leases. Earlier leaders count
    among the known nodes, even if their seats are in other roster chunks: this member may have fenced one of them.
    """
    name = leader.record.node
    others = [seat for seat in view.seats_in_rank_order() if seat.node not in (name, me.record.node)]
    newest = {seat.node: view.newest_verdict(seat) for seat in others}
    unasked = tuple(seat for seat in others if (each := newest[seat.node]) is None or each.asked_at < since)
    if unasked:
        return Probe(f"the leader {name} is silent: can the others be reached?", unasked)
    verdict = view.verdicts[leader.record.incarnation]
    # The silence of the leader and the answers of the others must be of the same moment. If the others answered later,
    # this node may have been cut off when it probed the leader.
    answered_at = max((each.asked_at for each in newest.values() if each and each.kind != "silent"), default=-math.inf)
    if answered_at > verdict.asked_at + SIMULTANEOUS_S:
        return Probe(f"the leader {name} was silent: is it still, as the others can be reached?", seats_for([leader]))
    lives = {seat.incarnation for seat in others}
    leader_verdicts = [each for life, each in view.verdicts.items() if life not in lives and each.asked_at >= since]
    known = [*filter(None, newest.values()), *leader_verdicts]
    # The silent nodes, the leader among them, must be fewer than half of all known nodes. The 1 is this member itself.
    silent = sum(each.kind == "silent" for each in known)
    if 2 * silent < 1 + len(known):
        return Fence(f"the leader {name} is silent, the others are not", leader)
    return Wait(f"the leader {name} is silent, as {silent - 1} of the others: the leases in etcd decide")


def _lead(me: Me, view: View, now: float) -> Decision:
    """The leader's duties, most urgent first."""
    assert view.spec is not None
    assert view.members_complete, "a leader has read all members before it decides"
    context = LeaderContext(me, view, now)
    if view.generation is None or view.generation.record.attempt != view.spec.record.attempt:
        return _start_anew(context)

    # `all` of no seats is true: without the first test a roster that was deleted in etcd would end the run with
    # success.
    if context.seats and all(context.has_reported(seat, "ok") for seat in context.seats):
        world_size = context.generation.world_size
        workers = "the only worker" if world_size == 1 else f"all {world_size:,} workers"
        return Finish(f"{workers} ended with exit code 0", "succeeded", 0)
    final = context.final_failure
    if final is not None:
        until = (context.failed_since or 0.0) + RANK_0_GRACE_S
        if final.collateral and context.now < until:
            return Wait("a worker ended together with rank 0; waiting for the report of rank 0's node", until)
        return Finish(final.summary, "failed", final.final_code, final.text)

    last = context.generation.last
    if last is not None and _has_saved(context):
        return _finish_failed(context, last)

    # Every node under suspicion is probed before a failure is acted upon. Otherwise the next generation could include a
    # dead node, and fail in turn.
    suspected = tuple(seat for seat in context.seats if seat.node != me.record.node and _is_suspected(context, seat))
    if suspected:
        return Probe(f"{len(suspected)} of {counted(len(context.seats), 'node')} may be gone", suspected)
    unprobed = _unprobed_newcomers(context)
    if unprobed:
        return Probe(f"can {list_names(seat.node for seat in unprobed)} be reached?", unprobed)
    unsure = _fence_or_wait(context)
    if unsure is not None:
        return unsure

    lost = [seat for seat in context.seats if _is_lost(context, seat)]
    failed = [entry for entry in context.view.reports.values() if entry.record.status == "failed"]
    # A roster that was deleted in etcd has no seats.
    if lost or not context.seats:
        return _probe_unreachable_again(context, _after_loss(context, lost))
    if failed:
        return _probe_unreachable_again(context, _after_failure(context, failed))
    return _probe_unreachable_again(context, lead_planned_change(context))


def _probe_unreachable_again(context: LeaderContext, decision: Decision) -> Decision:
    """The same decision, or a probe of the members that were out of reach, before the leader waits or publishes.

    They are probed once in a lease term, and at once when another node has answered since they were silent: perhaps the
    leader was the one out of reach.
    """
    unreachable = unreachable_members(context.view)
    asked_at = min(
        (context.view.verdicts[entry.record.incarnation].asked_at for entry in unreachable), default=math.inf
    )
    probe_at = asked_at + context.spec.lease_ttl_s if asked_at >= context.answered_probe_at else context.now
    if context.now >= probe_at and isinstance(decision, Wait | Publish):
        return Probe("can they be reached by now?", seats_for(unreachable))
    if unreachable and isinstance(decision, Wait):
        return replace(decision, until=probe_at if decision.until is None else min(probe_at, decision.until))
    return decision


def _unprobed_newcomers(context: LeaderContext) -> tuple[Seat, ...]:
    """Newcomers that have not been probed yet: a node that reaches etcd need not reach the other nodes.

    A new life of a node that has a seat is probed even before it is warm, because it counts among the silent nodes.
    """
    view, ready = context.view, {entry.record.incarnation for entry in candidates(context.view)}
    others = [entry for node, entry in view.members.items() if node != context.me.record.node]
    new = [entry for entry in others if view.seat_of(entry.record) is None]
    new = [entry for entry in new if entry.record.incarnation in ready or entry.record.node in view.seats]
    return seats_for(entry for entry in new if entry.record.incarnation not in view.verdicts)


def _start_anew(context: LeaderContext, kind: Literal["start", "lost"] = "start", cause: str = "") -> Decision:
    """Begin with a generation of new workers: wait until the members are quiet, then publish.

    There is no generation of this attempt yet, or no member of the last one is left. In the second case `kind` is
    "lost", and `cause` says how they went.
    """
    too_few = decide_if_too_few(context)
    if too_few is not None:
        return too_few
    settled = settled_at(context)
    if context.now < settled:
        return Wait(f"{counted(len(candidates(context.view)), 'node')} ready; waiting briefly for more", settled)
    cause = cause or ("start" if context.view.generation_number == 0 else ANEW)
    head = context.view.head
    # If the roster was deleted in etcd, the leader has no seat any more but may still hold a copy. A copy counts as the
    # state of a generation only if its holder has a seat there.
    context = replace(context, me=replace(context.me, copy=None))
    return publish(context, kind, cause, restarts=Restarts(step=head.record.reached if head else 0))


def _after_loss(context: LeaderContext, lost: list[Seat]) -> Decision:
    """Nodes are lost: the others re-form, which costs no restart."""
    if context.generation.last is not None:
        return _save_then_end(context, context.generation.last)
    gone = {seat.node: describe_loss(context.view, seat) for seat in lost}
    # Nodes that went in the same way share one phrase of the cause.
    same = {how: [node for node, each in gone.items() if each == how] for how in sorted(gone.values())}
    cause = ", ".join(f"{list_names(nodes)} {how}" for how, nodes in same.items())
    if len(lost) == len(context.seats):
        # Nodes that had left before this one came had stopped.
        seen = any(each.incarnation for each in context.view.vanished.values())
        stopped = set(same) == {"left"} and not seen
        return _start_anew(context) if stopped else _start_anew(context, "lost", cause)
    if (wait := wait_for_save(context, lost)) is not None:
        return wait
    return re_form(context, "lost", cause)


def _after_failure(context: LeaderContext, failed: list[Stored[Report]]) -> Decision:
    """Workers failed and all nodes live: restart the workers as long as the budget lasts.

    A node whose script is not the run's (`misfit`) leaves by itself, so its failure costs no restart.
    """
    assert context.failed_since is not None, "a failure is reported"
    failure, last = failure_to_blame(context.view.reports.values()), context.generation.last
    if failure.collateral:
        until = max(context.failed_since + COLLATERAL_GRACE_S, context.me.etcd_back_at + RETURN_S)
        if context.now < until:
            return Wait("only collateral failures are reported; waiting for the cause", until)
    if last is not None:
        retry = _save_then_end(context, last)
        fewer = isinstance(retry, Publish) and retry.draft.world_size < context.generation.world_size
        # A retry helps only with fewer workers, or if the cause is known. The same workers, none of which is to blame,
        # would not meet the next time either.
        return retry if fewer or not failure.collateral else _finish_failed(context, last)
    # The hang may have its cause on any node, and each node reports its own stacks.
    if failure.stalled and len(failed) < len(context.seats):
        until = context.failed_since + STACKS_GRACE_S
        if context.now < until:
            return Wait("no progress; waiting for the stacks of the other nodes' workers", until)
    spec = context.spec
    # The same error at the same place, twice before the first step, will come a third time.
    if failure.early and failure.early == context.generation.restarts.early and not context.has_progressed:
        reason = f"{failure.summary} (the same as the last time, before the first step)"
        return _give_up(context, reason, failure_text(failure, failed))
    restarts = context.generation.restarts if failure.misfit else restarts_after(context, failure)
    if (restarts.spent if spec.restarts_reset else restarts.total) > spec.max_restarts:
        what = "without a new step " if spec.restarts_reset else ""
        cause = _describe_failure(failure, context.generation)
        reason = f"{cause} ({counted(spec.max_restarts, 'restart')} {what}used up)"
        return _give_up(context, reason, failure_text(failure, failed))
    pending_seats = _seats_yet_to_report(context, failed)
    until = context.failed_since + COLLATERAL_GRACE_S
    if pending_seats and context.now < until:
        return Wait(f"all restart; {list_names(seat.node for seat in pending_seats)} may have a newer copy", until)
    return re_form(context, "failure", _describe_failure(failure, context.generation), restarts)


def _give_up(context: LeaderContext, reason: str, text: str) -> Decision:
    """End the run, for this `reason`; `text` is the failure in full."""
    return _save_then_end(context, Failure(rank=0, code=EXIT_WORKERS, collateral=False, summary=reason, text=text))


def _save_then_end(context: LeaderContext, last: Failure) -> Decision:
    """End the run with the failure `last`, but save the newest step first if workers live that have the state.

    These workers agree on the step in a generation that waits. If one of them is lost meanwhile, the others do so
    again. No worker sets up beside them, so their number bounds the repetitions.
    """
    members, restarts = startable_members(context.view, draining=True), context.generation.restarts
    if not any_has_state(context.view, members):
        return _finish_failed(context, last)
    return publish(context, "failure", last.summary, restarts=restarts, members=members, waits=True, last=last)


def _has_saved(context: LeaderContext) -> bool:
    """Whether a run that ends need not wait any more: its state is saved, or saving takes longer than a handover."""
    if context.now >= context.generation_seen_at + LEAVE_S_MAX or all(
        context.has_reported(seat, "held") for seat in context.seats
    ):
        return True
    # After a loss some nodes never say "held". The commit of this generation then is proof enough.
    lost = context.failed_since is not None or any(context.key_of(seat) is None for seat in context.seats)
    return lost and _saved_checkpoint(context) is not None


def _saved_checkpoint(context: LeaderContext) -> Commit | None:
    """The checkpoint that was committed in this generation, if any."""
    head = context.view.head.record if context.view.head else None
    return head if head is not None and head.generation == context.generation.number else None


def _finish_failed(context: LeaderContext, last: Failure) -> Finish:
    """The result of a run that ends with the failure `last`."""
    head = _saved_checkpoint(context) if context.generation.last is not None else None
    reason = f"{last.summary}; step {head.reached:,} was saved" if head is not None else last.summary
    return Finish(reason, "failed", EXIT_WORKERS, last.text)


def _seats_yet_to_report(context: LeaderContext, failed: list[Stored[Report]]) -> list[Seat]:
    """The seats whose nodes may still report a newer copy; none if workers go on in place or no copies are kept.

    Workers that lose a peer in `loop.pause` leave their newest step behind and end. Their nodes' keys say that these
    workers cannot go on in place before the reports say that they ended.
    """
    if context.in_place or not any((context.me.copy, *(entry.record.memory for entry in failed))):
        return []
    reported = [node for node, entry in context.view.reports.items() if entry.record.status != "holding"]
    return [seat for seat in context.seats if seat.node not in reported and context.key_of(seat) is not None]


_THEN = "; then "


def _describe_failure(failure: Failure, before: Generation) -> str:
    """The cause of the next generation, or of the run's end, in words.

    If the first failure is collateral, the cause of the generation before is kept: the failure follows from it.
    """
    if failure.collateral and before.in_place and before.kind in ("failure", "lost"):
        return before.cause.partition(_THEN)[0] + _THEN + failure.summary
    return failure.summary


def _is_suspected(context: LeaderContext, seat: Seat) -> bool:
    """Whether there is evidence against this seat's node that is newer than every probe of the node.

    A failure report, or steps that stand still, are evidence against all nodes. A missing member key is evidence
    against its own node, and so is a late answer in a handover.

    A silence does not answer the evidence of a missing key if it dates from the generation before, or from long before
    the key went, or if this member's workers have made steps with the node since. An isolated leader also probes a node
    that has registered again since its silence: the isolation may be over. And a node that was silent before another
    node answered is probed again, because silence and answers are compared with each other.
    """
    if context.has_left(seat):
        return False
    verdict, key = context.view.verdicts.get(seat.incarnation), context.key_of(seat)
    evidence = [at for at in (context.failed_since, context.standing_since) if at is not None]
    if context.view.handover is not None and seat in context.awaited_seats:
        # In the first round, "hold", a late node is probed once: the leader does not wait for it much longer than that.
        probe_until = math.inf if context.view.handover.record.step else context.view.handover.since + HANDOVER_PROBE_S
        evidence += probe_times(context.view.handover, min(context.now, probe_until))[0]
    if key is None:
        # A silence shortly before the key went is about the same event as the missing key (see SILENCE_TERMS), so it is
        # not evidence to be probed again.
        vanished, has_answered = context.vanished_at(seat), verdict is None or verdict.kind == "alive"
        term_s = context.spec.lease_ttl_s
        since = max(context.generation_seen_at, vanished - SILENCE_TERMS * term_s)
        evidence.append(vanished if has_answered or context.is_training else since)
    if key is not None and context.isolated and not context.is_back_unheard(seat):
        evidence.append(key.since)
    if evidence and verdict is not None and verdict.kind == "silent":
        evidence.append(context.answered_probe_at)
    if not evidence:
        return False
    return verdict is None or (verdict.kind != "dead" and verdict.asked_at < max(evidence))


def _fence_or_wait(context: LeaderContext) -> Decision | None:
    """Fence dead members at once, and silent ones only while the leader is not `isolated`. None: no member is in doubt.

    Of two halves, as of two nodes, neither can tell which one is cut off. So a whole lease term decides, in which etcd
    keeps the keys of both and the silent half is probed once more before the end. Then the half of the leader stays.
    Silence alone is not enough: steps that go on meanwhile show that all nodes are there. A node that answers but has
    no key gets a lease term to register again, because etcd can lose every lease at once.
    """
    verdicts = context.view.verdicts
    here = [
        (seat, context.key_of(seat), verdicts.get(seat.incarnation))
        for seat in context.seats
        if not context.has_left(seat)
    ]
    for seat, key, verdict in here:
        if key is not None and verdict is not None and verdict.kind == "dead":
            return Fence(f"{seat.node} does not exist any more", key)
    silent = [
        (seat, key, verdict)
        for seat, key, verdict in here
        # A node with a key younger than the silence was fenced, and has come back since: see `_lost_at`.
        if key and verdict and verdict.kind == "silent" and verdict.asked_at >= key.since
    ]
    if silent and context.is_in_trouble:
        seat, key, verdict = silent[0]
        if not context.isolated:
            return Fence(f"{seat.node} is silent", key)
        nodes = counted(len(context.seats), "node")
        term_over = max(verdict.since, key.since) + context.spec.lease_ttl_s
        ask_again = term_over - SIMULTANEOUS_S
        if context.now >= ask_again > verdict.asked_at:
            return Probe("is that still so?", tuple(each for each, _, _ in silent))
        if context.now < term_over:
            until = ask_again if context.now < ask_again else term_over
            return Wait(f"{context.silent_count} of {nodes} silent: the leases in etcd decide", until)
        if context.half_is_silent:
            return Fence(f"{seat.node} has been silent for a whole lease term", key)
        # The leases of the silent nodes live. That most of a run is cut off is unlikely, so this node is. It comes back
        # with the youngest key, and another member leads.
        return Rejoin(f"{context.silent_count} of {nodes} are silent, but some of their leases live")
    keyless = [seat for seat, key, _ in here if key is None and not _is_lost(context, seat)]
    if keyless:
        until = min(_lost_at(context, seat) for seat in keyless)
        names = list_names(seat.node for seat in keyless)
        return Wait(f"no member key of {names}: waiting for a new registration", until)
    return None


def _is_lost(context: LeaderContext, seat: Seat) -> bool:
    """Whether a seat's node is lost to this generation."""
    return context.now >= _lost_at(context, seat)


def _lost_at(context: LeaderContext, seat: Seat) -> float:
    """The time at which a seat's node is lost; minus infinity if it is already, infinity while its key is there.

    A node is lost at once if it has left, lives another life, or its key is missing and it is dead or silent. A silent
    node that was fenced is lost as well if it registers again before the next generation is published. Otherwise a node
    is lost when its key has been missing for a lease term. For an isolated leader silence does not count at once:
    etcd can lose every lease while a leader is cut off.
    """
    if context.has_left(seat) or context.is_back_unheard(seat):
        return -math.inf
    if context.key_of(seat) is not None:
        return math.inf
    verdict, away_since = context.view.verdicts.get(seat.incarnation), context.vanished_at(seat)
    if verdict is not None and verdict.kind != "alive":
        # Of two halves, as of two nodes, the missing key decides: etcd has ended the other's lease and kept this one's.
        if verdict.kind == "dead" or context.half_is_silent or not context.isolated:
            return -math.inf
        away_since = min(away_since, verdict.asked_at)
    return away_since + context.spec.lease_ttl_s
