"""What the leader's decisions share: its view taken apart, candidates, deadlines, the next generation. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from elasticrt.errors import EXIT_RENDEZVOUS
from elasticrt.ipc.env import Copy
from elasticrt.ipc.failure import TEXT_MAX_BYTES, Failure, first_cause
from elasticrt.ipc.wording import counted, listed
from elasticrt.rendezvous.decision import Decision, Finish, Me, Publish, Wait
from elasticrt.rendezvous.records import (
    Draft,
    Generation,
    Member,
    Report,
    Restarts,
    Seat,
)
from elasticrt.rendezvous.seats import seat_order, seats_for
from elasticrt.rendezvous.view import Stored, Verdict, View
from elasticrt.spec import RunSpec
from elasticrt.text import cut

LEAVE_S_MAX = 60.0
"""Seconds from the request of a handover to the last "held": a step, and the copy or a checkpoint. If the step takes
longer, the generation is replaced without it."""

STANDSTILL_S_MAX = 2.0
"""The same limit from the time at which the leader's steps began to stand still for longer than usual. Only the open
step is then given up."""

DRAIN_SHARE = 0.4
"""The same limit where the other nodes train on or the leader sees no standstill, as a share of `drain_s`, the time
after which a node leaves without a handover. The worker that all wait for may only be busy, so it gets this share. The
rest of the time is for ending workers that do not come out of the step, and for saving."""

SAVING_SHARE = 0.9
"""The same limit while the leader's workers are in a save, which another generation would end. To begin it once more
would take no less time."""


@dataclass(frozen=True)
class LeaderContext:
    """What the leader's decisions are made from: the view, taken apart once.

    Attributes:
        me: the leader's own state.
        view: what the leader knows; its spec, members, generation and roster are there.
        now: the leader's monotonic clock, in seconds.
    """

    me: Me
    view: View
    now: float

    @property
    def spec(self) -> RunSpec:
        """The run's options."""
        assert self.view.spec is not None
        return self.view.spec.record.spec

    @property
    def generation(self) -> Generation:
        """The current generation."""
        assert self.view.generation is not None
        return self.view.generation.record

    @property
    def generation_seen_at(self) -> float:
        """When this node first saw the current generation, in seconds of its monotonic clock."""
        assert self.view.generation is not None
        return self.view.generation.since

    @cached_property
    def seats(self) -> list[Seat]:
        """The generation's seats in rank order."""
        return self.view.seats_in_rank_order()

    @cached_property
    def failed_since(self) -> float | None:
        """When this node first saw a report of a failure, or None. Cached, because every seat is judged by it."""
        reports = self.view.reports.values()
        return min((entry.since for entry in reports if entry.record.status == "failed"), default=None)

    @cached_property
    def final_failure(self) -> Failure | None:
        """The failure that ends the run, because no restart can cure it; None if none is reported."""
        reports = sorted(self.view.reports.values(), key=lambda entry: entry.mod_revision)
        failures = [entry.record.failure for entry in reports]
        return first_cause([each for each in failures if each is not None and each.final_code], ())

    @cached_property
    def standing_since(self) -> float | None:
        """Since when this node's steps in this generation have been standing still unusually long, or None."""
        return self.me.standing_since if self.me.running_generation == self.generation.number else None

    @cached_property
    def progress(self) -> Restarts:
        """How far the run has come, as the generation and the reported failures tell."""
        known = [entry.record.failure for entry in self.view.reports.values() if entry.record.status == "failed"]
        failures = [failure for failure in known if failure is not None]
        return Restarts(
            step=self.view.head.record.reached if self.view.head else 0,
            # A newcomer that fails before its first step has counted no steps. The step that the last handover agreed
            # on stands in.
            beats=max([self.generation.reached, *(failure.beats for failure in failures)]),
            loaded=max((failure.loaded for failure in failures), default=0),
        )

    @cached_property
    def has_progressed(self) -> bool:
        """Whether the run has made progress since the failure before; `restarts_after` says what counts as progress."""
        before, progress = self.generation.restarts, self.progress
        further = progress.step > before.step or progress.beats > before.beats or progress.loaded > before.loaded
        return further or (progress.beats > 0 and self.now - self.generation_seen_at >= LONG_GENERATION_S)

    def has_reported(self, seat: Seat, status: str) -> bool:
        """Whether this seat's node has reported `status`, in the life that has the seat."""
        entry = self.view.reports.get(seat.node)
        return entry is not None and entry.record.incarnation == seat.incarnation and entry.record.status == status

    @cached_property
    def _member_keys(self) -> dict[str, Stored[Member]]:
        """The member keys of the seats' lives, by incarnation. Cached, because every duty asks for every seat."""
        found = ((seat, self.view.members.get(seat.node)) for seat in self.seats)
        return {seat.incarnation: key for seat, key in found if key and key.record.incarnation == seat.incarnation}

    @cached_property
    def _left_incarnations(self) -> frozenset[str]:
        """The incarnations that have said goodbye, or whose node lives another life already."""
        others = (
            seat for seat in self.seats if seat.incarnation not in self._member_keys and seat.node in self.view.members
        )
        goodbyes = (entry.record for entry in self.view.reports.values() if entry.record.status == "left")
        return frozenset([*(seat.incarnation for seat in others), *(record.incarnation for record in goodbyes)])

    @cached_property
    def draining_seats(self) -> list[Seat]:
        """The seats whose nodes drain."""
        keys = ((seat, self.key_of(seat)) for seat in self.seats)
        return [seat for seat, key in keys if key is not None and key.record.draining]

    @cached_property
    def awaited_seats(self) -> frozenset[Seat]:
        """The seats whose nodes still owe the handover an answer: that they hold, or left after the agreed step."""
        handover, reports = self.view.handover, self.view.reports
        if handover is None or handover.record.step:
            return frozenset(seat for seat in self.seats if not self.has_reported(seat, "held"))
        holding = {
            seat: reports[seat.node].record.handover for seat in self.seats if self.has_reported(seat, "holding")
        }
        return frozenset(seat for seat in self.seats if holding.get(seat) != handover.create_revision)

    @cached_property
    def drain_patience_s(self) -> float:
        """How long nodes that drain wait for a late worker before the leader gives its step up, in seconds."""
        share = SAVING_SHARE if self.me.saves else DRAIN_SHARE
        return share * min(self.view.members[seat.node].record.drain_s for seat in self.draining_seats)

    @cached_property
    def others_go_on(self) -> bool:
        """Whether the nodes that do not drain are enough, and have the state if any node has it."""
        stay = startable_members(self.view)
        return len(stay) >= self.spec.min_nodes and (not self.in_place or any_has_state(self.view, stay))

    @cached_property
    def sole_holder(self) -> Stored[Member] | None:
        """The draining node with the newest copy of the state, if no worker and no node that stays has the state."""
        if self.in_place:
            return None
        leaving = [self.view.members[seat.node] for seat in self.draining_seats]
        _, holder = _newest_copy(self, [*startable_members(self.view), *leaving])
        return holder if holder is not None and holder.record.draining else None

    @cached_property
    def silent_count(self) -> int:
        """The number of seats whose nodes are silent, with or without a key, in whichever life each node is now."""
        newest = map(self.view.newest_verdict, self.seats)
        return sum(verdict is not None and verdict.kind == "silent" for verdict in newest)

    @cached_property
    def answered_probe_at(self) -> float:
        """When the newest probe was sent that another node has answered; minus infinity if none has."""
        answered = (verdict.asked_at for verdict in self.view.verdicts.values() if verdict.kind == "alive")
        return max(answered, default=-math.inf)

    @property
    def isolated(self) -> bool:
        """Whether at least half of the seats' nodes are silent. Then the leader must suspect its own network."""
        return 2 * self.silent_count >= len(self.seats)

    @property
    def half_is_silent(self) -> bool:
        """Whether exactly half of the seats' nodes are silent, as one of two. Then the leader's half stays."""
        return 2 * self.silent_count == len(self.seats)

    def is_back_unheard(self, seat: Seat) -> bool:
        """Whether a silent node was fenced and has registered again meanwhile: it reaches etcd, but not this leader.

        For an isolated leader this says nothing. Of two halves, it does once the silence has lasted for a lease term.
        """
        verdict, key = self.view.verdicts.get(seat.incarnation), self.key_of(seat)
        if key is None or verdict is None or verdict.kind != "silent" or not has_registered_since(key, verdict):
            return False
        after_term = self.half_is_silent and key.since >= verdict.since + self.spec.lease_ttl_s
        return self.is_in_trouble and (after_term or not self.isolated)

    @property
    def is_in_trouble(self) -> bool:
        """Whether a failure is reported, or this member's steps stand still. Otherwise silence proves nothing."""
        return self.failed_since is not None or self.standing_since is not None

    @property
    def is_training(self) -> bool:
        """Whether this member's own workers make steps with all others."""
        is_running = self.me.running_generation == self.generation.number and not self.me.starting
        return is_running and self.failed_since is None and self.standing_since is None

    @cached_property
    def in_place(self) -> bool:
        """Whether workers of this generation can go on in the next."""
        return bool(survivors(self.view))

    def key_of(self, seat: Seat) -> Stored[Member] | None:
        """The member key of this seat's life, if it is there."""
        return self._member_keys.get(seat.incarnation)

    def is_running(self, seat: Seat) -> bool:
        """Whether the node's key says that its workers are in this generation."""
        key = self.key_of(seat)
        return key is not None and key.record.generation == self.generation.number

    def has_left(self, seat: Seat) -> bool:
        """Whether the node has said goodbye, or has begun another life."""
        return seat.incarnation in self._left_incarnations

    def vanished_at(self, seat: Seat) -> float:
        """Since when the seat's key has been missing. A key that was never seen counts from the generation on."""
        gone = self.view.vanished.get(seat.node)
        return self.generation_seen_at if gone is None else gone.at


def publish(
    context: LeaderContext,
    kind: Literal["start", "failure", "lost", "join", "drain", "resize"],
    cause: str,
    *,
    restarts: Restarts,
    members: list[Stored[Member]] | None = None,
    waits: bool = False,
    last: Failure | None = None,
) -> Publish:
    """The decision to publish the next generation: in place if enough workers can go on, else with new workers.

    Args:
        context: what the leader's decisions are made from.
        kind: why the generation is necessary, for logs and for the count of restarts.
        cause: the same in words, for people.
        restarts: the failures so far, this one included.
        members: the members to choose from; None: all that can start workers.
        waits: whether these are too few for a step, so that those with the state save it and wait.
        last: the failure with which the run ends as soon as the state is saved.
    """
    view = context.view
    assert view.spec is not None
    able = startable_members(view) if members is None else [as_reported(view, entry) for entry in members]
    least = max(1, 0 if waits else context.spec.min_nodes)
    ready = [entry for entry in able if entry.record.ready] if any_has_state(view, able) else []
    having = {entry.record.incarnation for entry in survivors(view)}
    stay = [_with_fields(entry, {"ready": entry.record.ready - entry.record.new}) for entry in ready]
    stay = [entry for entry in stay if entry.record.ready]
    if kind in ("failure", "lost") and len(stay) >= least:
        # Newcomers enter the script at the next step, and come in by a handover. After a failure a survivor may be in
        # an evaluation before that step. The evaluation is made again, which would not work with a newcomer in the
        # group.
        ready = stay
    in_place = len(ready) >= least
    # In place only seats of workers with the state count as seniority. These workers come first, so that one of them
    # gets in.
    before = [seat for seat in view.seats_in_rank_order() if not in_place or seat.incarnation in having]
    chosen = seat_order(ready if in_place else able, before, context.spec.max_nodes)
    memory, holder = (None, None) if in_place else _newest_copy(context, chosen)
    if holder is not None:
        # Rank 0 sends the state to the others, so it must be where the copy is.
        chosen = [holder, *(entry for entry in chosen if entry is not holder)]
    seats = seats_for(chosen, in_place=in_place)
    # A member that comes from a lost store may have seen a higher number than this store has. No number is used twice.
    draft = Draft(
        number=max([view.generation_number, *(entry.record.seen for entry in view.members.values())]) + 1,
        attempt=view.spec.record.attempt,
        nodes=len(seats),
        world_size=sum(seat.workers for seat in seats),
        kind=kind,
        cause=cause,
        master_address=chosen[0].record.address,
        master_port=chosen[0].record.port,
        restarts=restarts,
        reached=view.handover.record.step if view.handover and kind in ("join", "drain", "resize") and not waits else 0,
        resume=view.head.record if view.head else None,
        memory=memory,
        in_place=in_place,
        waits=waits,
        last=last,
    )
    return Publish(f"generation {draft.number} with {counted(len(seats), 'node')}: {cause}", draft, seats)


def re_form(
    context: LeaderContext,
    kind: Literal["failure", "lost", "join", "drain", "resize"],
    cause: str,
    restarts: Restarts | None = None,
) -> Decision:
    """The next generation of a run that goes on, if there are enough nodes for it; otherwise what to do meanwhile.

    If too few nodes have workers, those with the state save it at once and wait with it, for other nodes or for new
    workers that set up. Then no step is lost, whatever becomes of them. Survivors that drain take part, and leave when
    the state is saved. The same happens if only draining nodes have the state. A draining node that holds the newest
    copy after a failure takes part as well: its new workers start from the copy.

    Args:
        context: what the leader's decisions are made from.
        kind: as in `publish`.
        cause: as in `publish`, in words for people.
        restarts: the failures so far; None: no worker has failed, so the generation costs no restart.
    """
    too_few, restarts = decide_if_too_few(context), restarts or context.generation.restarts
    handover, here = context.view.handover, [seat for seat in context.seats if context.key_of(seat) is not None]
    saved = context.generation.waits or (handover is not None and handover.record.save)
    saved = saved and all(context.has_reported(seat, "held") for seat in here)
    left = startable_members(context.view, draining=not saved)
    waits = isinstance(too_few, Wait) or (too_few is None and not context.others_go_on)
    if waits and any_has_state(context.view, left):
        return publish(context, kind, cause, restarts=restarts, members=left, waits=True)
    if kind in ("failure", "lost") and context.sole_holder is not None:
        members = [*startable_members(context.view), context.sole_holder]
        if len(members) >= context.spec.min_nodes:
            return publish(context, kind, cause, restarts=restarts, members=members)
    return too_few or publish(context, kind, cause, restarts=restarts)


def leave_deadline(context: LeaderContext) -> float:
    """Until when to wait for workers that leave after an agreed step, or that save in a generation that waits."""
    handover = context.view.handover
    if handover is None:
        return context.generation_seen_at + LEAVE_S_MAX if context.generation.waits else -math.inf
    if context.in_place and not (context.draining_seats or handover.record.save):
        # The worker that all wait for is busy, or it hangs and its agent ends it. No node leaves, so there is no hurry.
        return math.inf
    deadline = handover.since + LEAVE_S_MAX
    standing_since = context.standing_since
    if not (context.draining_seats and context.in_place and context.generation.world_size > 1) or (
        context.others_go_on and standing_since is None
    ):
        return deadline
    if context.me.saves:
        return min(deadline, handover.since + context.drain_patience_s)
    # If the open step does not end, those that come out of it save the newest one that has.
    # A leader whose own worker is in a `loop.pause` sees no standstill.
    if context.others_go_on or standing_since is None:
        return min(deadline, max(handover.since, standing_since or handover.since) + context.drain_patience_s)
    return min(deadline, standing_since + STANDSTILL_S_MAX)


def wait_for_save(context: LeaderContext, lost: Collection[Seat]) -> Wait | None:
    """Wait while rank 0 saves after others have left in order: another generation would end the save. Otherwise None.

    Args:
        context: what the leader's decisions are made from.
        lost: the seats whose nodes are gone. Nodes that left in order need not wait for the save.
    """
    handover, first, until = context.view.handover, context.seats[:1], leave_deadline(context)
    saves = context.generation.waits or (handover is not None and handover.record.save)
    left = context.failed_since is None and all(context.has_reported(seat, "left") for seat in lost)
    done = any(seat in lost or context.has_reported(seat, "held") for seat in first)
    # If the nodes left before all workers had met, the save cannot begin, and this waits in vain.
    if not (saves and left) or done or context.now >= until:
        return None
    return Wait(f"{list_names(seat.node for seat in first)} saves the agreed step", until)


def describe_loss(view: View, seat: Seat) -> str:
    """How the node of a lost `seat` went, in words that follow its name: "left", or "lost" with the evidence."""
    report, verdict, key = view.reports.get(seat.node), view.verdicts.get(seat.incarnation), view.members.get(seat.node)
    if report is not None and report.record.incarnation == seat.incarnation and report.record.status == "left":
        failure = report.record.failure
        return "left: its script is not the run's" if failure is not None and failure.misfit else "left"
    kind = verdict.kind if verdict is not None else ""
    if kind != "silent" and key is not None and key.record.incarnation != seat.incarnation:
        return "lost (registered again)"
    return "lost" + {"dead": " (agent ended)", "silent": " (no answer; power or network)"}.get(kind, "")


def survivors(view: View) -> list[Stored[Member]]:
    """Members whose workers have this generation's state and can go on in place; none once a worker has ended well."""
    if view.generation is None or view.ended_nodes:
        return []
    seated = [(view.members.get(seat.node), seat.incarnation) for seat in view.seats.values()]
    here = [as_reported(view, entry) for entry, life in seated if entry and entry.record.incarnation == life]
    record = view.generation.record
    # In a generation that began in place, a key from before it may still be true: its workers have only got new seats.
    # In any other generation all workers are new, so an older key tells of workers that have ended.
    having = [entry for entry in here if entry.record.ready and entry.record.has_state]
    return [entry for entry in having if record.in_place or entry.record.generation == view.generation_number]


def as_reported(view: View, entry: Stored[Member]) -> Stored[Member]:
    """The member with the workers that its report of a failure counts, if the report is newer than its key.

    An agent writes a report before its key. But a member that was cut off registers first, and only then reports what
    has happened since its last report. A key that does not yet name the present in-place generation is
    older than the member's seat, so the seat's workers count. Without a seat none counts: the agent has still to tell
    what became of its workers.
    """
    report = view.reports.get(entry.record.node)
    if report is not None and (report.record.status, report.record.incarnation) == ("failed", entry.record.incarnation):
        newer = report.record.model_dump(include={"ready", "new", "has_state"})
        # Revisions order the two: they are counted by the store, not by a clock.
        return entry if report.mod_revision < entry.mod_revision else _with_fields(entry, newer)
    seat = view.seat_of(entry.record)
    if not _is_key_older(view, entry):
        return entry
    if seat is None:
        return _with_fields(entry, {"ready": 0, "new": 0}) if entry.record.generation else entry
    ready = max(entry.record.ready, seat.workers)
    return _with_fields(entry, {"ready": ready, "new": ready - seat.workers})


def _with_fields(entry: Stored[Member], newer: Mapping[str, object]) -> Stored[Member]:
    return replace(entry, record=entry.record.model_copy(update=newer))


def _is_key_older(view: View, entry: Stored[Member]) -> bool:
    """Whether a member's key does not name the present generation yet, which is one in place."""
    return (
        view.generation is not None
        and view.generation.record.in_place
        and entry.record.generation < view.generation_number
    )


def _newest_copy(context: LeaderContext, chosen: list[Stored[Member]]) -> tuple[Copy | None, Stored[Member] | None]:
    """The newest copy of the state that one of the members `chosen` holds, and its holder; (None, None) without one.

    Only a copy of the generation that is being replaced counts. Its workers took or left it, as reports tell (the
    leader need not report to itself), or the generation itself resumed from it. The copy must descend from the head and
    be newer. It does if the head was committed in that generation, or is what that generation resumed from.
    """
    view, me = context.view, context.me
    if view.generation is None:
        return None, None
    before, head = view.generation.record, view.head.record if view.head else None
    known = (before.resume.nonce if before.resume else "", "")
    if head is not None and head.generation != before.number and head.nonce not in known:
        return None, None
    first = context.seats[0].incarnation if context.seats else ""
    best: tuple[Copy | None, Stored[Member] | None] = (None, None)
    reports, step = view.reports, head.reached if head is not None else -1
    for entry in chosen:
        report, life = reports.get(entry.record.node), entry.record.incarnation
        if (
            report is not None
            and report.record.incarnation == life
            and report.record.status in ("failed", "held", "ok")
        ):
            copy = report.record.memory
        elif me.record.incarnation == life and me.seated_generation == before.number:
            copy = me.copy
        elif life == first:
            # The node of rank 0 keeps the copy that the generation resumed from until the next generation, whatever its
            # workers do.
            copy = before.memory
        else:
            continue
        if copy is not None and copy.step > step:
            best, step = (copy, entry), copy.step
    return best


def decide_if_too_few(context: LeaderContext) -> Decision | None:
    """What to do with fewer than min-nodes: wait, and at the deadline end the run for all alike. None: enough."""
    view, spec, now = context.view, context.spec, context.now
    ready = len(candidates(view))
    if ready >= spec.min_nodes:
        return None
    can = startable_members(view)
    if len(can) >= spec.min_nodes and view.generation is not None:
        # Enough nodes live, but some have no worker ready. The workers with the state wait for those that set up beside
        # them, though not for ever.
        troubles = [entry.since for entry in view.reports.values() if entry.record.status == "failed"]
        enough_since = sorted(entry.ready_since or 0.0 for entry in can)[spec.min_nodes - 1]
        until = min(troubles, default=max(view.generation.since, enough_since)) + spec.join_timeout_s
        return Wait(f"{ready} of {spec.min_nodes} nodes ready; others are setting up", until) if now < until else None
    if view.too_few_since is None:
        return Wait(f"{ready} of {counted(len(view.members), 'node')} ready; {spec.min_nodes} needed")
    deadline = view.too_few_since + spec.join_timeout_s
    if now >= deadline:
        reason = (
            f"{len(view.members)} of at least {counted(spec.min_nodes, 'node')} came within {spec.join_timeout_s:g} s"
        )
        return Finish(reason, "failed", EXIT_RENDEZVOUS)
    return Wait(f"{counted(len(view.members), 'node')}; {spec.min_nodes} needed", deadline)


def settled_at(context: LeaderContext) -> float:
    """When the first generation may begin: at once with max-nodes, else after a quiet time, but not later than a limit.

    Quiet means that all members are ready and the last one registered `settle_quiet_s` ago. The limit counts from when
    min-nodes were ready. At least min-nodes members must be ready.
    """
    view, spec = context.view, context.spec
    ready = sorted(entry.ready_since for entry in candidates(view) if entry.ready_since is not None)
    if len(ready) >= spec.max_nodes:
        return ready[spec.max_nodes - 1]
    limit = ready[spec.min_nodes - 1] + spec.settle_max_s
    if len(ready) < len(view.members):
        return limit
    return min(limit, max(ready[-1], max(entry.since for entry in view.members.values()) + spec.settle_quiet_s))


def candidates(view: View) -> list[Stored[Member]]:
    """The members that can get a seat now. In place these are only members with workers that are ready to go on."""
    can = startable_members(view)
    return [entry for entry in can if entry.record.ready] if any_has_state(view, can) else can


def any_has_state(view: View, members: list[Stored[Member]]) -> bool:
    """Whether one of these `members` has the state, so that no worker has to start anew."""
    alive = {entry.record.incarnation for entry in survivors(view)}
    return any(entry.record.incarnation in alive for entry in members)


def startable_members(view: View, *, draining: bool = False) -> list[Stored[Member]]:
    """The members that can start workers: warm, not draining, in reach, and not leaving.

    A node that leaves reports so before its key goes, or with it. With `draining`, members that drain also count if
    they have workers that can go on in place.
    """
    left = {entry.record.incarnation for entry in view.reports.values() if entry.record.status == "left"}
    members = [as_reported(view, entry) for entry in view.members.values() if entry.ready_since is not None or draining]
    ready = [each for each in members if each.ready_since is not None or (each.record.draining and each.record.ready)]
    absent = {entry.record.incarnation for entry in unreachable_members(view)}
    barred = left | absent
    return [entry for entry in ready if entry.record.incarnation not in barred] if barred else ready


def unreachable_members(view: View) -> list[Stored[Member]]:
    """Newcomers and returned members that did not answer the leader's probe: a generation with them could only fail."""
    asked = [(entry, view.verdicts.get(entry.record.incarnation)) for entry in view.members.values()]
    silent = [(entry, verdict) for entry, verdict in asked if verdict is not None and verdict.kind != "alive"]
    return [
        entry for entry, verdict in silent if view.seat_of(entry.record) is None or has_registered_since(entry, verdict)
    ]


def has_registered_since(entry: Stored[Member], verdict: Verdict) -> bool:
    """Whether a member has registered since it was probed. A fenced member may not know why, and comes back."""
    return entry.since > verdict.asked_at


LONG_GENERATION_S = 3600.0
"""A generation that has made steps for this many seconds counts as progress, even if no newer snapshot was seen: not
every script reads its snapshots with `torch.load`. A failure that comes at once does not last this long."""


def restarts_after(context: LeaderContext, failure: Failure) -> Restarts:
    """The restarts once `failure` is counted. After progress the count begins at one again.

    Progress is a new committed step, or a step further than at any failure before: survivors keep that step unsaved. A
    script without a Loop commits none. There a generation makes progress if it makes more optimizer steps than any
    before, makes some from a newer snapshot, or lasts for LONG_GENERATION_S. So no run restarts for ever without
    writing a snapshot and stepping from it. The time of the newest snapshot only grows, and a snapshot that one worker
    both writes and reads does not count.

    A worker that was killed after a step of its own is like a lost node: the others go on if they have the state, and
    no restart is spent. A worker that ends before its first step spends one, so this does not go on for ever either.
    Survivors of the run's first step may find that none of them can undo it. That is no failure of its own.
    """
    before, reached = context.generation.restarts, context.progress
    progress = context.spec.restarts_reset and context.has_progressed
    has_state = any_has_state(context.view, startable_members(context.view))
    in_first_step = context.generation.in_place and not (reached.step or reached.beats or before.beats)
    free = failure.killed if has_state else failure.collateral and in_first_step
    return Restarts(
        spent=(0 if progress else before.spent) + (not free),
        total=before.total + 1,
        step=reached.step,
        beats=max(reached.beats, before.beats),
        loaded=max(reached.loaded, before.loaded),
        early=failure.early,
    )


def failure_to_blame(reports: Iterable[Stored[Report]]) -> Failure:
    """The failure to blame among the `reports` of all nodes, in the store's order (see `first_cause`)."""
    ordered = [entry.record for entry in sorted(reports, key=lambda entry: entry.mod_revision)]
    failures = [record.failure for record in ordered if record.failure is not None]
    well = [(record.well, record.node) for record in ordered if record.status in ("finishing", "ok")]
    ended = [f"{'a worker' if rank is None else f'rank {rank}'} on {node}" for rank, node in well]
    unknown = Failure(rank=0, code=1, collateral=False, summary="workers failed without a report")
    return first_cause(failures, ended) or unknown


def failure_text(failure: Failure, failed: list[Stored[Report]]) -> str:
    """The text of the first cause. For a hang it has a part from each node's report: the cause may be on any node."""
    if not failure.stalled:
        return failure.text
    ordered = sorted(failed, key=lambda entry: entry.mod_revision)
    texts = [entry.record.failure.text for entry in ordered if entry.record.failure and entry.record.failure.stalled]
    share = TEXT_MAX_BYTES // len(texts)
    return "\n".join(cut(text, share - 2) for text in texts)  # In JSON the newline takes two bytes.


def list_names(nodes: Iterable[str]) -> str:
    """Up to five names, and how many more there are."""
    return listed(sorted(nodes))
