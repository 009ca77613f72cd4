"""The protocol: from what a member knows to what it does next, and why. Pure.

`decide(me, view, now)` is called after every change of the view and at the time that a `Wait` named. It is a column of
guards; the first that applies gives the decision. Nothing is remembered between calls: all is in `me` (this member's
own state) and `view` (the store's state), so the order of events does not matter and repeating a call is safe.

The life of a generation g:

    members register ─► the leader waits for quiet ─► publishes g (compare-and-swap) ─► every seat starts its workers
        ▲                                                                                    │
        │                 somebody fails, goes or comes                                      ▼
        └──────────────── the leader publishes g + 1 (the stop signal for g) ◄──────── workers run, or end: result

* The leader is the live member with the oldest key. It publishes generations and nothing more; should two believe they
  lead, the compare-and-swap lets one through.
* A member whose workers failed says so in a report. The leader then asks every other seat whether it still lives,
  fences those that are certainly gone, and publishes the next generation from whoever is left. Nobody waits for a
  lease to end unless a machine is silent.
* A member key that has gone is not proof of death (etcd can lose every lease at once): its owner is asked first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from elasticrt.errors import EXIT_DUPLICATE, EXIT_RENDEZVOUS, EXIT_STORE, EXIT_WORKERS
from elasticrt.rendezvous.decision import (
    Announce,
    Decision,
    End,
    Fence,
    File,
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
)
from elasticrt.rendezvous.records import FailureRecord, Generation, Member, Report, Seat
from elasticrt.rendezvous.seats import Draft, seat_order, seats_for
from elasticrt.rendezvous.view import Entry, View
from elasticrt.spec import RunSpec, difference

COLLATERAL_GRACE_S = 0.25
"""How long to wait for the cause when only collateral failures are reported: a killed worker is reported within
milliseconds, its peers' failing collectives later, so this is rarely used up."""

JOIN_COST_FACTOR = 20
"""A planned re-form is allowed when this many times the last one's cost has passed: at most 5 % of the time."""


def decide(me: Me, view: View, now: float) -> Decision:
    """What this member does next. `now` is its monotonic clock, in seconds."""
    name, life = me.record.node, me.record.incarnation
    if view.result is not None:
        return End(view.result, f"the run has ended: {view.result.reason}")
    if me.leaving:
        return Leave(me.leaving)
    if view.number < me.known:
        return Halt(EXIT_STORE, f"the store knows generation {view.number} but had generation {me.known}: data lost")
    if view.spec is not None and view.spec.record.attempt != me.attempt:
        return Halt(EXIT_DUPLICATE, f"attempt {view.spec.record.attempt} of this run has begun without this node")
    if view.spec is not None and view.spec.record.spec != me.spec:
        return Halt(EXIT_DUPLICATE, f"the run has other options now: {difference(me.spec, view.spec.record.spec)}")

    seat = view.seat_of(name, life)
    generation = view.generation.record if view.generation else None
    if me.running and generation is not None and generation.number > me.running and seat is None:
        return Rejoin(f"generation {generation.number} goes on without this node")
    if seat is not None and generation is not None and me.started < generation.number:
        return Run(generation, seat, f"generation {generation.number}: {generation.cause}")

    if me.lease == "suspended":
        return Wait("etcd does not answer: workers run on, nothing is committed")
    mine = view.members.get(name)
    if me.lease == "lost" or mine is None or mine.record.incarnation != life:
        return Register("no member key of this life in the store")
    if me.report is not None and me.report != me.filed and me.report.generation == view.number:
        return File(me.report, f"workers of generation {me.report.generation}: {me.report.status}")
    if mine.record != me.record:
        return Announce("this member's state has changed")
    return _lead(me, view, now) if view.leads else _follow(me, view)


def _follow(me: Me, view: View) -> Decision:
    """A member that does not lead waits for the leader, and after a failure makes sure that there still is one."""
    leader = view.members.get(view.oldest or "")
    if leader is None:
        return Wait("looking for the leader")
    if me.failed_at is None or me.started != view.number:
        return Wait(f"{leader.record.node} leads")
    verdict = view.verdicts.get(leader.record.incarnation)
    if verdict is not None and verdict.kind == "dead":
        return Fence(leader, f"the leader {leader.record.node} does not exist any more")
    if verdict is None or verdict.asked_at < me.failed_at:
        return Probe((_seat_to_ask(leader.record),), f"workers failed: does the leader {leader.record.node} live?")
    return Wait(f"workers failed; {leader.record.node} leads")


@dataclass(frozen=True)
class _Led:
    """What the leader's duties look at: the view, taken apart once."""

    me: Me
    view: View
    spec: RunSpec
    generation: Generation
    since: float
    seats: list[Seat]
    reports: dict[str, Entry[Report]]
    now: float

    def said(self, seat: Seat, status: str) -> bool:
        """Whether this seat's node, in this life, has reported `status`."""
        entry = self.reports.get(seat.node)
        return entry is not None and entry.record.incarnation == seat.incarnation and entry.record.status == status

    def key_of(self, seat: Seat) -> Entry[Member] | None:
        """The member key of this seat's life, if it is there."""
        entry = self.view.members.get(seat.node)
        return entry if entry is not None and entry.record.incarnation == seat.incarnation else None

    def has_left(self, seat: Seat) -> bool:
        """Whether the node said goodbye, or has begun another life."""
        return self.said(seat, "left") or (self.key_of(seat) is None and seat.node in self.view.members)

    def vanished_at(self, seat: Seat) -> float:
        """Since when the seat's key has been away; a seat whose key was never seen counts from the generation on."""
        return self.view.vanished.get(seat.node, self.since)


def _lead(me: Me, view: View, now: float) -> Decision:
    """The leader's duties, most urgent first."""
    if view.spec is None or not view.complete:
        return Wait("reading all members")
    spec, attempt = view.spec.record.spec, view.spec.record.attempt
    if view.generation is None or view.generation.record.attempt != attempt:
        return _start(view, spec, "start", now)
    if not view.roster_complete:
        return Wait("reading the roster")

    led = _Led(me, view, spec, view.generation.record, view.generation.since, view.order(), view.reports, now)
    if led.seats and all(led.said(seat, "ok") for seat in led.seats):
        return Finish("succeeded", 0, f"all {led.generation.world_size} workers ended with exit code 0")
    for entry in led.reports.values():
        if entry.record.failure is not None and entry.record.failure.final_code:
            failure = entry.record.failure
            return Finish("failed", failure.final_code, failure.summary, failure.text)

    doubted = tuple(seat for seat in led.seats if seat.node != me.record.node and _doubted(led, seat))
    if doubted:
        return Probe(doubted, f"{len(doubted)} of {_count(len(led.seats), 'node')} may be gone")
    unsure = _fence_or_wait(led)
    if unsure is not None:
        return unsure

    gone = [seat for seat in led.seats if _gone(led, seat)]
    failed = [entry for entry in led.reports.values() if entry.record.status == "failed"]
    if gone:
        return _after_loss(led, gone)
    if failed:
        return _after_failure(led, failed)
    return _join(led)


def _start(view: View, spec: RunSpec, kind: Literal["start", "lost"], now: float) -> Decision:
    """Nobody of the generation before is left (or there was none): wait for quiet, then begin."""
    short = _short(view, spec, now)
    if short is not None:
        return short
    settled = _settled_at(view, spec)
    if now < settled:
        return Wait(f"{_count(len(_ready(view)), 'node')} ready; waiting for quiet", settled)
    cause = "start" if view.number == 0 else "start again with new nodes"
    return _publish(view, spec, kind, cause, restarts=(0, 0, view.head.record.step if view.head else 0))


def _after_loss(led: _Led, gone: list[Seat]) -> Decision:
    """A node is gone: the others re-form. It costs no restart."""
    if len(gone) == len(led.seats):
        return _start(led.view, led.spec, "lost", led.now)
    short = _short(led.view, led.spec, led.now)
    if short is not None:
        return short
    left = all(led.said(seat, "left") for seat in gone)
    cause = f"{_names(seat.node for seat in gone)} {'left' if left else 'lost'}"
    return _publish(led.view, led.spec, "lost", cause, restarts=_kept(led.generation))


def _after_failure(led: _Led, failed: list[Entry[Report]]) -> Decision:
    """Workers failed and all nodes live: restart them, as long as the budget lasts."""
    first, only_collateral = _first_cause(failed)
    if only_collateral:
        until = min(entry.since for entry in failed) + COLLATERAL_GRACE_S
        if led.now < until:
            return Wait("only collateral failures are reported; waiting for the cause", until)
    before, spec = led.generation, led.spec
    step = led.view.head.record.step if led.view.head else 0
    progress = spec.restarts_reset and step > before.restart_step
    restarts, total = (1 if progress else before.restarts + 1), before.restarts_total + 1
    if (restarts if spec.restarts_reset else total) > spec.max_restarts:
        what = "without new committed steps " if spec.restarts_reset else ""
        reason = f"{first.summary} ({_count(spec.max_restarts, 'restart')} {what}spent)"
        return Finish("failed", EXIT_WORKERS, reason, first.text)
    short = _short(led.view, spec, led.now)
    if short is not None:
        return short
    return _publish(led.view, spec, "failure", first.summary, restarts=(restarts, total, step))


def _join(led: _Led) -> Decision:
    """All is well: let newcomers in, unless the run is closing, full, or has just re-formed."""
    spec = led.spec
    since = {
        entry.record.node: entry.ready_since
        for entry in _ready(led.view)
        if entry.ready_since is not None and led.view.seat_of(entry.record.node, entry.record.incarnation) is None
    }
    room = spec.max_nodes - len(led.seats)
    if not since:
        return Wait("training")
    if room <= 0:
        return Wait(f"training; {_count(len(since), 'standby node')}")
    if any(entry.record.status in ("finishing", "ok") for entry in led.reports.values()):
        return Wait("closing: a worker has ended, nobody joins any more")
    if spec.join == "failure":
        return Wait("newcomers are let in together with a failure (--join failure)")
    ready = sorted(since.values())
    quiet = ready[-1] if len(since) >= room else min(ready[-1] + spec.settle_quiet_s, ready[0] + spec.settle_max_s)
    paid = led.since + (JOIN_COST_FACTOR * led.me.pause_s if spec.join == "budget" else 0.0)
    if led.now < max(quiet, paid):
        return Wait(f"{_names(since)} will join", max(quiet, paid))
    return _publish(led.view, spec, "join", f"{_names(since)} joined", restarts=_kept(led.generation))


def _publish(
    view: View,
    spec: RunSpec,
    kind: Literal["start", "failure", "lost", "join"],
    cause: str,
    *,
    restarts: tuple[int, int, int],
) -> Publish:
    """The next generation from all ready members. `restarts`: since progress, in all, head step when counted."""
    assert view.spec is not None
    chosen = seat_order(_ready(view), view.order(), spec.max_nodes)
    seats = seats_for(chosen)
    draft = Draft(
        number=max([view.number, *(entry.record.seen for entry in chosen)]) + 1,
        attempt=view.spec.record.attempt,
        kind=kind,
        cause=cause,
        seats=seats,
        master_address=chosen[0].record.address,
        master_port=chosen[0].record.port,
        restarts=restarts[0],
        restarts_total=restarts[1],
        restart_step=restarts[2],
        resume=view.head.record if view.head else None,
    )
    return Publish(draft, f"generation {draft.number} with {_count(len(seats), 'node')}: {cause}")


def _doubted(led: _Led, seat: Seat) -> bool:
    """Whether there is evidence against this seat's node that no probe has answered since.

    Evidence against all: a failure report. Evidence against one: its member key has gone.
    """
    if led.has_left(seat):
        return False
    evidence = [entry.since for entry in led.reports.values() if entry.record.status == "failed"]
    if led.key_of(seat) is None:
        evidence.append(led.vanished_at(seat))
    if not evidence:
        return False
    verdict = led.view.verdicts.get(seat.incarnation)
    return verdict is None or (verdict.kind != "dead" and verdict.asked_at < min(evidence))


def _fence_or_wait(led: _Led) -> Decision | None:
    """Take out the dead at once, and the silent only while they are fewer than half of the generation.

    A leader that hears nothing from half of the others must suspect itself. Of two nodes, one is silent and neither can
    tell whose fault it is: then a whole lease term in which etcd has kept both decides. A node that answers, but whose
    key is away, gets a lease term to register again: etcd can lose every lease at once.
    """
    verdicts = led.view.verdicts
    here = [(seat, led.key_of(seat), verdicts.get(seat.incarnation)) for seat in led.seats if not led.has_left(seat)]
    for seat, key, verdict in here:
        if key is not None and verdict is not None and verdict.kind == "dead":
            return Fence(key, f"{seat.node} does not exist any more")
    silent = [
        (seat, key, verdict.asked_at) for seat, key, verdict in here if key and verdict and verdict.kind == "silent"
    ]
    if silent:
        seat, key, asked_at = silent[0]
        term_over = asked_at + led.spec.lease_ttl_s
        if 2 * len(silent) < len(led.seats):
            return Fence(key, f"{seat.node} is silent")
        if led.now < term_over:
            return Wait(f"{len(silent)} of {_count(len(led.seats), 'node')} silent: the leases will tell", term_over)
        if len(led.seats) == 2:
            return Fence(key, f"{seat.node} has been silent for a whole lease term")
        return Probe(tuple(seat for seat, _, _ in silent), "still silent, still holding leases")
    away = [seat for seat, key, _ in here if key is None and not _gone(led, seat)]
    if away:
        until = min(led.vanished_at(seat) for seat in away) + led.spec.lease_ttl_s
        return Wait(f"{_names(seat.node for seat in away)} answers but has no key; it may register again", until)
    return None


def _gone(led: _Led, seat: Seat) -> bool:
    """Whether a seat's node is out: it said so, lives another life, is dead, or stayed away for a lease term."""
    if led.has_left(seat):
        return True
    if led.key_of(seat) is not None:
        return False
    verdict = led.view.verdicts.get(seat.incarnation)
    if verdict is not None and verdict.kind != "alive":
        return True
    return led.now >= led.vanished_at(seat) + led.spec.lease_ttl_s


def _first_cause(failed: list[Entry[Report]]) -> tuple[FailureRecord, bool]:
    """The failure that came first in the store's order among those that are not collateral; whether there was none."""
    ordered = sorted(failed, key=lambda entry: entry.mod_revision)
    failures = [entry.record.failure for entry in ordered if entry.record.failure is not None]
    causes = [failure for failure in failures if not failure.collateral]
    unknown = FailureRecord(rank=0, code=1, collateral=False, summary="workers failed without a report")
    return (causes or failures or [unknown])[0], not causes and bool(failures)


def _short(view: View, spec: RunSpec, now: float) -> Decision | None:
    """What to do while there are fewer than min-nodes: wait, and at the deadline end the run for everybody alike."""
    ready = len(_ready(view))
    if ready >= spec.min_nodes:
        return None
    if view.short_since is None:
        return Wait(f"{ready} of {_count(len(view.members), 'node')} ready; {spec.min_nodes} needed")
    deadline = view.short_since + spec.join_timeout_s
    if now >= deadline:
        reason = f"{len(view.members)} of at least {spec.min_nodes} nodes came within {spec.join_timeout_s:g} s"
        return Finish("failed", EXIT_RENDEZVOUS, reason)
    return Wait(f"{_count(len(view.members), 'node')}; {spec.min_nodes} needed", deadline)


def _settled_at(view: View, spec: RunSpec) -> float:
    """When the first generation may begin: at max-nodes now, else after a quiet time, but not later than a limit.

    Quiet means that all who registered are ready and the last one came some time ago; the limit counts from when
    min-nodes were ready.
    """
    ready = sorted(entry.ready_since for entry in _ready(view) if entry.ready_since is not None)
    if len(ready) >= spec.max_nodes:
        return ready[spec.max_nodes - 1]
    limit = ready[spec.min_nodes - 1] + spec.settle_max_s
    if len(ready) < len(view.members):
        return limit
    return min(limit, max(ready[-1], max(entry.since for entry in view.members.values()) + spec.settle_quiet_s))


def _ready(view: View) -> list[Entry[Member]]:
    """Members that can be seated: warm, not draining, not leaving (that report can be seen before the key goes)."""
    left = {entry.record.incarnation for entry in view.reports.values() if entry.record.status == "left"}
    ready = [entry for entry in view.members.values() if entry.ready_since is not None]
    return [entry for entry in ready if entry.record.incarnation not in left]


def _kept(generation: Generation) -> tuple[int, int, int]:
    return generation.restarts, generation.restarts_total, generation.restart_step


def _seat_to_ask(member: Member) -> Seat:
    return Seat(
        node=member.node,
        incarnation=member.incarnation,
        index=0,
        rank_offset=0,
        workers=member.workers,
        address=member.address,
        probe_port=member.probe_port,
    )


def _names(nodes: Iterable[str]) -> str:
    names = sorted(nodes)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
