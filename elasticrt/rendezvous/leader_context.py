"""What the leader's duties look at, and what they share: candidates, deadlines, the next generation. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from elasticrt.errors import EXIT_RENDEZVOUS
from elasticrt.ipc.env import Copy
from elasticrt.ipc.failure import TEXT_MAX_BYTES, Failure, first_cause
from elasticrt.ipc.time_bounds import SEATED_S_MAX
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
"""From "go" to the last "held": a step, the copy, or a checkpoint. A step that takes longer ends in a re-form."""

STANDS_S_MAX = 2.0
"""The same, from when the steps have stood still for longer than usual: then only the open step is given up."""

DRAIN_SHARE = 0.4
"""The same where others train on or the leader sees no standstill, as a share of the time after which a node leaves
without a handover: whoever keeps them waiting may only be busy. The rest is for those that do not come out of the step,
which are ended, and for saving."""


@dataclass(frozen=True)
class LeaderContext:
    """What the leader's duties look at: the view, taken apart once.

    Attributes:
        me: the leader's own state.
        view: what it knows; its spec, members, generation and roster are there.
        now: its monotonic clock, in seconds.
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
    def since(self) -> float:
        """Since when this node has known the current generation."""
        assert self.view.generation is not None
        return self.view.generation.since

    @cached_property
    def seats(self) -> list[Seat]:
        """The generation's seats in rank order."""
        return self.view.order()

    @cached_property
    def failed_since(self) -> float | None:
        """Since when a failure has been reported. Looked for once: every seat is judged by it."""
        reports = self.view.reports.values()
        return min((entry.since for entry in reports if entry.record.status == "failed"), default=None)

    @cached_property
    def standing_since(self) -> float | None:
        """Since when this node's steps in this generation have been standing still for longer than usual."""
        return self.me.standing_since if self.me.running == self.generation.number else None

    @cached_property
    def reached(self) -> Restarts:
        """How far the run has come, as the generation and the reported failures tell."""
        known = [entry.record.failure for entry in self.view.reports.values() if entry.record.status == "failed"]
        failures = [failure for failure in known if failure is not None]
        return Restarts(
            step=self.view.head.record.reached if self.view.head else 0,
            # A newcomer that fails before its first step does not know how far the run is, but for the handover before.
            beats=max([self.generation.reached, *(failure.beats for failure in failures)]),
            loaded=max((failure.loaded for failure in failures), default=0),
        )

    @cached_property
    def gets_further(self) -> bool:
        """Whether there has been progress since the failure before; `counting` says what counts."""
        before, reached = self.generation.restarts, self.reached
        further = reached.step > before.step or reached.beats > before.beats or reached.loaded > before.loaded
        return further or (reached.beats > 0 and self.now - self.since >= LONG_S)

    def said(self, seat: Seat, status: str) -> bool:
        """Whether this seat's node, in this life, has reported `status`."""
        entry = self.view.reports.get(seat.node)
        return entry is not None and entry.record.incarnation == seat.incarnation and entry.record.status == status

    @cached_property
    def _keys(self) -> dict[str, Stored[Member]]:
        """The member keys of the seats' lives, by incarnation. Looked up once: every duty asks for every seat."""
        found = ((seat, self.view.members.get(seat.node)) for seat in self.seats)
        return {seat.incarnation: key for seat, key in found if key and key.record.incarnation == seat.incarnation}

    @cached_property
    def _left(self) -> frozenset[str]:
        """The lives that have said goodbye, or been followed by another one."""
        others = (seat for seat in self.seats if seat.incarnation not in self._keys and seat.node in self.view.members)
        goodbyes = (entry.record for entry in self.view.reports.values() if entry.record.status == "left")
        return frozenset([*(seat.incarnation for seat in others), *(record.incarnation for record in goodbyes)])

    @cached_property
    def leaving(self) -> list[Seat]:
        """The seats whose nodes drain."""
        keys = ((seat, self.key_of(seat)) for seat in self.seats)
        return [seat for seat, key in keys if key is not None and key.record.draining]

    @cached_property
    def to_answer(self) -> frozenset[Seat]:
        """The seats whose nodes have still to say that they hold, or that they have left after the agreed step."""
        asked, reports = self.view.handover, self.view.reports
        if asked is None or asked.record.step:
            return frozenset(seat for seat in self.seats if not self.said(seat, "held"))
        holding = {seat: reports[seat.node].record.handover for seat in self.seats if self.said(seat, "holding")}
        return frozenset(seat for seat in self.seats if holding.get(seat) != asked.create_revision)

    @cached_property
    def patience_s(self) -> float:
        """For how long nodes that leave wait for others before they give up what they wait for."""
        return DRAIN_SHARE * min(self.view.members[seat.node].record.drain_s for seat in self.leaving)

    @cached_property
    def others_go_on(self) -> bool:
        """Whether those that do not drain are enough, and have the state if anybody has."""
        stay = startable(self.view)
        return len(stay) >= self.spec.min_nodes and (not self.in_place or go_on(self.view, stay))

    @cached_property
    def sole_holder(self) -> Stored[Member] | None:
        """A node that drains and holds the newest copy of the state, if no worker and no other node has it."""
        if self.in_place or not self.leaving:
            return None
        leaving = [self.view.members[seat.node] for seat in self.leaving]
        _, holder = _newest_copy(self, [*startable(self.view), *leaving])
        return holder if holder is not None and holder.record.draining else None

    @cached_property
    def unheard(self) -> int:
        """How many of the seats' nodes are silent, with or without a key, in whichever life they are now."""
        newest = map(self.view.newest_verdict, self.seats)
        return sum(verdict is not None and verdict.kind == "silent" for verdict in newest)

    @cached_property
    def heard_at(self) -> float:
        """When the newest question was put that another node has answered; before all time if none has."""
        answered = (verdict.asked_at for verdict in self.view.verdicts.values() if verdict.kind == "alive")
        return max(answered, default=-math.inf)

    @property
    def isolated(self) -> bool:
        """Whether the leader hears nothing from half of the seats' nodes: then it must suspect itself."""
        return 2 * self.unheard >= len(self.seats)

    @cached_property
    def in_place(self) -> bool:
        """Whether workers of this generation can go on in the next."""
        return bool(survivors(self.view))

    def key_of(self, seat: Seat) -> Stored[Member] | None:
        """The member key of this seat's life, if it is there."""
        return self._keys.get(seat.incarnation)

    def runs(self, seat: Seat) -> bool:
        """Whether the node's key says that its workers are in this generation."""
        key = self.key_of(seat)
        return key is not None and key.record.generation == self.generation.number

    def has_left(self, seat: Seat) -> bool:
        """Whether the node said goodbye, or has begun another life."""
        return seat.incarnation in self._left

    def vanished_at(self, seat: Seat) -> float:
        """Since when the seat's key has been away; a seat whose key was never seen counts from the generation on."""
        gone = self.view.vanished.get(seat.node)
        return self.since if gone is None else gone.at


def publish(
    led: LeaderContext,
    kind: Literal["start", "failure", "lost", "join", "drain", "resize"],
    cause: str,
    *,
    restarts: Restarts,
    members: list[Stored[Member]] | None = None,
    waits: bool = False,
    last: Failure | None = None,
) -> Publish:
    """The next generation: of workers that go on in place where enough of them can, else of workers started anew.

    Args:
        led: what the leader's work stands on.
        kind: what makes it necessary, for logs and for the count of restarts.
        cause: the same in words, for people.
        restarts: the failures so far, this one included.
        members: whom to choose from; None: all that can start workers.
        waits: whether they are too few for a step, so that those who have the state save it and wait.
        last: the failure with which the run ends when they have saved it.
    """
    view = led.view
    assert view.spec is not None
    able = startable(view) if members is None else [as_reported(view, entry) for entry in members]
    least = max(1, 0 if waits else led.spec.min_nodes)
    ready = [entry for entry in able if entry.record.ready] if go_on(view, able) else []
    having = {entry.record.incarnation for entry in survivors(view)}
    stay = [_with(entry, {"ready": entry.record.ready - entry.record.new}) for entry in ready]
    stay = [entry for entry in stay if entry.record.ready]
    if kind in ("failure", "lost") and not waits and len(stay) >= least:
        # Newcomers enter the script at the next step, and come in by a handover. Here somebody may be in an evaluation
        # before that step, which could not be made again with them.
        ready = stay
    in_place = len(ready) >= least
    # In place those that have the state come first, so that one of them gets in.
    before = [seat for seat in view.order() if not in_place or seat.incarnation in having]
    chosen = seat_order(ready if in_place else able, before, led.spec.max_nodes)
    memory, holder = (None, None) if in_place else _newest_copy(led, chosen)
    if holder is not None:
        chosen = [holder, *(entry for entry in chosen if entry is not holder)]  # Rank 0 is where the state is.
    seats = seats_for(chosen, in_place=in_place)
    draft = Draft(
        number=max([view.number, *(entry.record.seen for entry in view.members.values())]) + 1,
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
    led: LeaderContext,
    kind: Literal["failure", "lost", "join", "drain", "resize"],
    cause: str,
    restarts: Restarts | None = None,
) -> Decision:
    """The next generation of a run that goes on, if there are enough for it; else what to do meanwhile.

    Where too few are left, those that have the state save it at once, and wait with it: whatever becomes of them then,
    no step is lost. Survivors that drain take part, and leave when it is saved. So they do where nobody else has it,
    and so does a node that drains and holds the newest copy after a failure: its workers start anew from it.

    Args:
        led: what the leader's work stands on.
        kind: as `publish` has it; so has it `cause`.
        cause: in words, for people.
        restarts: the failures so far; None: no worker has failed, so it costs no restart.
    """
    short, restarts = too_few(led), restarts or led.generation.restarts
    asked, here = led.view.handover, [seat for seat in led.seats if led.key_of(seat) is not None]
    saved = led.generation.waits or (asked is not None and asked.record.save)
    saved = saved and all(led.said(seat, "held") for seat in here)
    left = startable(led.view, draining=not saved)
    if not (led.others_go_on or isinstance(short, Finish)) and go_on(led.view, left):
        return publish(led, kind, cause, restarts=restarts, members=left, waits=True)
    if kind in ("failure", "lost") and led.sole_holder is not None:
        members = [*startable(led.view), led.sole_holder]
        if len(members) >= led.spec.min_nodes:
            return publish(led, kind, cause, restarts=restarts, members=members)
    return short or publish(led, kind, cause, restarts=restarts)


def left_until(led: LeaderContext) -> float:
    """How long to wait for those that leave after an agreed step, or hold the state in a generation that waits."""
    asked = led.view.handover
    if asked is None:
        return led.since + LEAVE_S_MAX if led.generation.waits else -math.inf
    if led.in_place and not (led.leaving or asked.record.save):
        return math.inf  # Whoever is waited for is busy, or it hangs, which its agent ends.
    told_at = asked.since + LEAVE_S_MAX
    stands = led.standing_since
    if not (led.leaving and led.in_place and led.generation.world_size > 1) or (led.others_go_on and stands is None):
        return told_at
    # If the open step does not end, those that come out of it save the newest one that has.
    if led.others_go_on or stands is None:  # A leader whose worker is in a pause sees no standstill.
        return min(told_at, max(asked.since, stands or asked.since) + led.patience_s)
    return min(told_at, stands + STANDS_S_MAX)


def saving(led: LeaderContext, lost: Collection[Seat]) -> Wait | None:
    """Rank 0 still saves what the `lost`, who have left in order, need not wait for: another generation would end that.

    None: it does not.
    """
    asked, first, until = led.view.handover, led.seats[:1], left_until(led)
    saves = led.generation.waits or (asked is not None and asked.record.save)
    left = led.failed_since is None and all(led.said(seat, "left") for seat in lost)
    done = any(seat in lost or led.said(seat, "held") for seat in first)
    unmet = led.generation.waits and led.standing_since is not None  # They have left before all had met.
    if not (saves and left) or done or unmet or led.now >= until:
        return None
    return Wait(f"{list_names(seat.node for seat in first)} saves the agreed step", until)


def how_gone(view: View, seat: Seat) -> str:
    """How the node of a lost seat has gone, in words that follow its name: "left", or "lost" with the evidence."""
    report, verdict, key = view.reports.get(seat.node), view.verdicts.get(seat.incarnation), view.members.get(seat.node)
    if report is not None and report.record.incarnation == seat.incarnation and report.record.status == "left":
        failure = report.record.failure
        return "left: its script is not the run's" if failure is not None and failure.misfit else "left"
    kind = verdict.kind if verdict is not None else ""
    if kind != "silent" and key is not None and key.record.incarnation != seat.incarnation:
        return "lost (it has registered anew)"
    return "lost" + {"dead": " (its agent has ended)", "silent": " (no answer; power or network)"}.get(kind, "")


def survivors(view: View) -> list[Stored[Member]]:
    """Members whose workers have this generation's state and can go on in place; none once a worker has ended well."""
    if view.generation is None or view.ended:
        return []
    seated = [(view.members.get(seat.node), seat.incarnation) for seat in view.seats.values()]
    here = [as_reported(view, entry) for entry, life in seated if entry and entry.record.incarnation == life]
    record = view.generation.record
    # Of a generation that began in place a key may still say what it said before; in any other that is old.
    having = [entry for entry in here if entry.record.ready and entry.record.has_state]
    return [entry for entry in having if record.in_place or entry.record.generation == view.number]


def as_reported(view: View, entry: Stored[Member]) -> Stored[Member]:
    """A member with as many workers ready as its report of a failure says, if that is newer than its key.

    A report is written before the key. But a member that was cut off registers first, and only then says what has
    happened since its last report. The key of a member that has not told yet that it has taken its seat is older than
    what the seat was made of.
    """
    report = view.reports.get(entry.record.node)
    if report is not None and (report.record.status, report.record.incarnation) == ("failed", entry.record.incarnation):
        newer = report.record.model_dump(include={"ready", "new", "has_state"})
        return entry if report.mod_revision < entry.mod_revision else _with(entry, newer)
    seat = view.seat_of(entry.record)
    if seat is not None and _goes_on_unheard(view, entry):
        ready = max(entry.record.ready, seat.workers)
        return _with(entry, {"ready": ready, "new": ready - seat.workers})
    return entry


def _with(entry: Stored[Member], newer: Mapping[str, object]) -> Stored[Member]:
    return replace(entry, record=entry.record.model_copy(update=newer))


def _goes_on_unheard(view: View, entry: Stored[Member]) -> bool:
    """Whether a member has a seat in place of which its key does not tell yet."""
    return view.generation is not None and view.generation.record.in_place and entry.record.generation < view.number


def _newest_copy(led: LeaderContext, chosen: list[Stored[Member]]) -> tuple[Copy | None, Stored[Member] | None]:
    """The newest copy that one of these members holds, and its holder.

    Only what is of the generation that is being replaced counts: a copy that its workers took or left, as reports tell
    (the leader need not report to itself), or the one that it resumed from. It must descend from the head, which was
    committed in that generation or is what it resumed from, and be newer.
    """
    view, me = led.view, led.me
    if view.generation is None:
        return None, None
    before, head = view.generation.record, view.head.record if view.head else None
    known = (before.resume.nonce if before.resume else "", "")
    if head is not None and head.generation != before.number and head.nonce not in known:
        return None, None
    first = led.seats[0].incarnation if led.seats else ""
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
        elif me.record.incarnation == life and me.seated == before.number:
            copy = me.copy
        elif life == first:
            copy = before.memory  # Its node keeps that until the next generation, whatever its workers do meanwhile.
        else:
            continue
        if copy is not None and copy.step > step:
            best, step = (copy, entry), copy.step
    return best


def too_few(led: LeaderContext) -> Decision | None:
    """What to do while there are fewer than min-nodes: wait, and at the deadline end the run for all members alike.

    None when there are enough.
    """
    view, spec, now = led.view, led.spec, led.now
    ready = len(candidates(view))
    if ready >= spec.min_nodes:
        return None
    can = startable(view)
    if len(can) >= spec.min_nodes and view.generation is not None:
        # Their workers wait with the state that they have, for those that set up beside them; but not for ever. Who is
        # in this generation and has none yet is not waited for: without their group its workers end, or hang.
        troubles = [entry.since for entry in view.reports.values() if entry.record.status == "failed"]
        enough_since = sorted(entry.ready_since or 0.0 for entry in can)[spec.min_nodes - 1]
        until = min(troubles, default=max(view.generation.since, enough_since)) + spec.join_timeout_s
        if sum(bool(each.record.ready) or each.record.generation != view.number for each in can) < spec.min_nodes:
            until = max(troubles, default=view.generation.since) + SEATED_S_MAX
        return Wait(f"{ready} of {spec.min_nodes} nodes ready; others are setting up", until) if now < until else None
    if view.short_since is None:
        return Wait(f"{ready} of {counted(len(view.members), 'node')} ready; {spec.min_nodes} needed")
    deadline = view.short_since + spec.join_timeout_s
    if now >= deadline:
        reason = (
            f"{len(view.members)} of at least {counted(spec.min_nodes, 'node')} came within {spec.join_timeout_s:g} s"
        )
        return Finish(reason, "failed", EXIT_RENDEZVOUS)
    return Wait(f"{counted(len(view.members), 'node')}; {spec.min_nodes} needed", deadline)


def settled_at(led: LeaderContext) -> float:
    """When the first generation may begin: at max-nodes now, else after a quiet time, but not later than a limit.

    Quiet means that all members are ready and the last one came some time ago. The limit counts from when
    min-nodes were ready.
    """
    view, spec = led.view, led.spec
    ready = sorted(entry.ready_since for entry in candidates(view) if entry.ready_since is not None)
    if len(ready) >= spec.max_nodes:
        return ready[spec.max_nodes - 1]
    limit = ready[spec.min_nodes - 1] + spec.settle_max_s
    if len(ready) < len(view.members):
        return limit
    return min(limit, max(ready[-1], max(entry.since for entry in view.members.values()) + spec.settle_quiet_s))


def candidates(view: View) -> list[Stored[Member]]:
    """Members that can be seated now: where workers go on in place, those that have workers ready for that."""
    can = startable(view)
    return [entry for entry in can if entry.record.ready] if go_on(view, can) else can


def go_on(view: View, members: list[Stored[Member]]) -> bool:
    """Whether one of these members has the state, so that no worker has to start anew."""
    alive = {entry.record.incarnation for entry in survivors(view)}
    return any(entry.record.incarnation in alive for entry in members)


def startable(view: View, *, draining: bool = False) -> list[Stored[Member]]:
    """Members that can start workers: warm, not draining, in reach, not leaving (reported before the key goes).

    With `draining` those as well that drain and have workers that can go on in place.
    """
    left = {entry.record.incarnation for entry in view.reports.values() if entry.record.status == "left"}
    members = [as_reported(view, entry) for entry in view.members.values() if entry.ready_since is not None or draining]
    ready = [each for each in members if each.ready_since is not None or (each.record.draining and each.record.ready)]
    absent = {entry.record.incarnation for entry in unavailable(view)}
    barred = left | absent
    return [entry for entry in ready if entry.record.incarnation not in barred] if barred else ready


def unavailable(view: View) -> list[Stored[Member]]:
    """Members that did not answer the leader, with whom the next generation could only fail: newcomers and returned."""
    unheard = {life: verdict for life, verdict in view.verdicts.items() if verdict.kind != "alive"}
    if not unheard:
        return []
    asked = [(entry, unheard.get(entry.record.incarnation)) for entry in view.members.values()]
    silent = [(entry, verdict) for entry, verdict in asked if verdict is not None]
    seated = {seat.incarnation for seat in view.seats.values()}
    return [entry for entry, said in silent if entry.record.incarnation not in seated or returned(entry, said)]


def returned(entry: Stored[Member], verdict: Verdict) -> bool:
    """Whether a member has registered (again) since it was asked: fenced, it may not know why, and comes back."""
    return entry.since > verdict.asked_at


LONG_S = 3600.0
"""A generation that has made steps for so long counts as progress, although no newer snapshot was seen: not every
script reads its snapshots with `torch.load`. A failure that comes at once does not last this long."""


def counting(led: LeaderContext, first: Failure) -> Restarts:
    """The restarts once this failure is counted. After progress the count begins at one again.

    Progress is a new committed step, or a step further than at any failure before: survivors keep it unsaved. A script
    without a Loop commits none: there a generation makes progress when it makes more optimizer steps than any before
    it, or some from a newer snapshot, or lasts for LONG_S. So no run restarts for ever without writing a snapshot and
    stepping from it: the time of the newest snapshot only grows, and one that a worker writes and reads itself does not
    count.

    A worker that was killed after a step of its own is as a lost node: others that have the state go on, and no restart
    is spent. One that ends before its first step spends one, so this does not go on for ever either.
    """
    before, reached = led.generation.restarts, led.reached
    progress = led.spec.restarts_reset and led.gets_further
    free = first.killed and go_on(led.view, startable(led.view))
    return Restarts(
        spent=(0 if progress else before.spent) + (not free),
        total=before.total + 1,
        step=reached.step,
        beats=max(reached.beats, before.beats),
        loaded=max(reached.loaded, before.loaded),
        early=first.early,
    )


def cause_of(reports: Iterable[Stored[Report]]) -> Failure:
    """The failure to blame, of all nodes': see `first_cause`. In the store's order."""
    ordered = [entry.record for entry in sorted(reports, key=lambda entry: entry.mod_revision)]
    failures = [record.failure for record in ordered if record.failure is not None]
    well = [(record.well, record.node) for record in ordered if record.status in ("finishing", "ok")]
    ended = [f"{'a worker' if rank is None else f'rank {rank}'} on {node}" for rank, node in well]
    unknown = Failure(rank=0, code=1, collateral=False, summary="workers failed without a report")
    return first_cause(failures, ended) or unknown


def text_of(first: Failure, failed: list[Stored[Report]]) -> str:
    """The text of the first cause. A hang may have its cause on any node: then it is a part of each node's text."""
    if not first.stalled:
        return first.text
    ordered = sorted(failed, key=lambda entry: entry.mod_revision)
    texts = [entry.record.failure.text for entry in ordered if entry.record.failure and entry.record.failure.stalled]
    share = TEXT_MAX_BYTES // len(texts)
    return "\n".join(cut(text, share - 2) for text in texts)  # A newline is two bytes.


def list_names(nodes: Iterable[str]) -> str:
    """Up to five names, and how many more."""
    return listed(sorted(nodes))
