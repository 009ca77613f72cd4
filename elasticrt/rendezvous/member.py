"""One member of a run, without I/O: what it knows, what it does next, and what it asks of the store. Pure.

A `Member` reads no clock, opens no connection and starts no thread. Its driver repeats these steps:

    it hands over events                member.handle(event, now)
    it asks what to do                  member.decide(now): a Decision with its reason
    it carries that out                 run(member.carry_out(decision)), or with the workers of its node
    it reports a failed request         member.failed(error, now)

`run` carries out the requests of a conversation (see `requests`). The drivers are the agent, torchrun's plug-in and the
tests. They differ in who starts the workers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from elasticrt.errors import EXIT_STORE, DuplicateError, ElasticError, StoreError, explain
from elasticrt.ipc.env import Commit
from elasticrt.ipc.time_bounds import LOOK_AGAIN_S
from elasticrt.rendezvous import registration, transactions
from elasticrt.rendezvous.decide import decide
from elasticrt.rendezvous.decision import (
    AdoptSpec,
    Announce,
    Decision,
    Fence,
    Finish,
    Halt,
    Me,
    Publish,
    Register,
    Rejoin,
    WithdrawHandover,
    WriteHandover,
    WriteReport,
)
from elasticrt.rendezvous.outage import RIDE_THROUGH_S, GenerationAnswer, Outage, ride_out
from elasticrt.rendezvous.records import SEATS_PER_CHUNK, Generation, Keys, Report, Result, Seat, decode, roster_chunks
from elasticrt.rendezvous.records import Member as MemberRecord
from elasticrt.rendezvous.registration import Blocked, Registered
from elasticrt.rendezvous.replica import Replica
from elasticrt.rendezvous.requests import Conversation, Grant, Notice, Pause, ProbeOwner, Transact
from elasticrt.rendezvous.view import Stored, Verdict, View, apply_verdict
from elasticrt.store.lease_session import SessionState
from elasticrt.store.protocol import LeaseLost, StoreBlocked, StoreUnavailable, Txn


@dataclass(frozen=True)
class ProbeResult:
    """The `verdict` of a probe on one life of a node, `incarnation`."""

    incarnation: str
    verdict: Verdict


@dataclass(frozen=True)
class JoinOptions:
    """How a member comes into its run.

    Attributes:
        timeout_s: the longest time in seconds to find a place.
        etcd_wait_s: the longest time in seconds for which etcd may not answer.
        again: whether to run a run once more that has succeeded.
        named: whether a person has chosen the node's name. A name that nobody has chosen is changed if a live agent has
            it.
        too_late: the error to raise after `timeout_s`.
    """

    timeout_s: float
    etcd_wait_s: float
    again: bool
    named: bool
    too_late: ElasticError


class Member:
    """The member's state, and all that changes it.

    Args:
        me: the member's own state at first.
        run_id: the run.
        token: draws 64 random bits, as 16 hex digits.
        say: takes messages for people.
        note: takes messages that an operator may want to see.
        seats_per_chunk: seats in a chunk of the rosters that this member writes, on average.

    Attributes:
        me: the member's own state.
        replica: the member's copy of the run's keys.
        lease_id: the lease that the member's key is bound to.
        outage: whether and since when etcd has not answered.
    """

    def __init__(
        self,
        me: Me,
        run_id: str,
        *,
        token: Callable[[], str],
        say: Callable[[str], None],
        note: Callable[[str], None],
        seats_per_chunk: int = SEATS_PER_CHUNK,
    ) -> None:
        self.me = me
        self.lease_id = 0
        self.outage = Outage(say)
        self.replica = Replica(me.record.node, Keys(run_id), note)
        self._token = token
        self._say = say
        self._note = note
        self._seats_per_chunk = seats_per_chunk
        # The key of this node's newest report, and its mod revision; None while the outcome of a write is unknown.
        self._report_revisions: dict[str, int | None] = {}

    @property
    def view(self) -> View:
        """What the member knows of its run."""
        return self.replica.view

    def _change_record(self, **fields: object) -> None:
        """Change what the member's key should say."""
        self.me = replace(self.me, record=self.me.record.model_copy(update=fields))

    # Events.

    def handle(self, event: Notice | SessionState | ProbeResult | GenerationAnswer, now: float) -> None:
        """Take note of an event. It changes the state; `decide` draws the conclusions."""
        match event:
            case Notice():
                self.replica.fold_notice(event, now)
            case SessionState():
                self._lease_changed(event, now)
            case ProbeResult(incarnation, verdict):
                self.replica.view = apply_verdict(self.view, incarnation, verdict)
            case GenerationAnswer(generation=generation):
                self.outage.note_answer(event)
                self.me = replace(self.me, heard_generation=max(self.me.heard_generation, generation))

    def _lease_changed(self, state: SessionState, now: float) -> None:
        if state.lease_id and state.lease_id != self.lease_id:
            # The event is about a lease that has been replaced meanwhile.
            return
        # A lease that has ended, or was given up, never recovers. Only `Register` gets a new one.
        if self.me.lease != "lost":
            self.me = replace(self.me, lease=state.status)
        if state.status != "connected":
            self._note(f"lease {state.status}: {state.reason}")
            self.outage.suspect(now)
        elif self.outage.since is None:
            self.outage.alone_since = None

    def note_failure(self, error: StoreError, now: float) -> float:
        """Take note of a request that failed. Returns when to decide again on the member's clock, 0 for at once.

        Raises an `error` that cannot be ridden out.
        """
        match error:
            case StoreUnavailable():
                self.outage.begin(error, now)
                return self.outage.retry_at
            case LeaseLost():
                self._note(f"this node's lease in etcd is gone: {error}")
                self.me = replace(self.me, lease="lost")
                return 0.0
            case StoreBlocked():
                return self.outage.note_refusal(error, now)
        raise error

    def note_read(self, now: float) -> None:
        """Take note that everything has been read again, so that the view is up to date."""
        if self.outage.problem:
            self.me = replace(self.me, etcd_back_at=now)
        self.outage.end(now)

    # Decisions.

    def catch_up(self) -> Me:
        """The member's own state, which the driver brings up to date and stores in `me` before it calls `decide`."""
        # A generation without a seat for this member counts as well: another store must not publish its number a second
        # time.
        if self.view.generation_number > self.me.highest_generation:
            self.me = replace(self.me, highest_generation=self.view.generation_number)
        return self.me

    def decide(self, now: float) -> Decision:
        """What to do next, and why. While the view may be old, only decisions about this node are made."""
        if self.outage.since is None:
            return decide(self.me, self.view, now)
        if now - self.outage.since > RIDE_THROUGH_S:
            return Halt(f"etcd has not answered for {RIDE_THROUGH_S:g} s", EXIT_STORE)
        # With a suspended lease `decide` writes nothing, but still ends workers whose generation is over.
        return decide(replace(self.me, lease="suspended"), self.view, now)

    def seats_to_ask(self, now: float) -> Sequence[Seat]:
        """The seats to ask for their generation now.

        There are none unless workers run here and etcd does not answer or the lease is overdue.
        """
        if not self.me.running_generation or (self.outage.since is None and self.me.lease != "suspended"):
            return ()
        others = [seat for seat in self.view.seats_in_rank_order() if seat.node != self.me.record.node]
        return self.outage.seats_to_ask(others, now)

    def carry_out(self, decision: Decision) -> Conversation[bool]:
        """Carry out the part of a decision that needs the store. The driver does the rest.

        Returns whether the decision took effect. If not, everything has been read again.
        """
        match decision:
            case Rejoin():
                self.begin_life()
                yield from registration.leave(self.replica, self.me.record)
            case Register():
                if self.me.lease == "lost":
                    yield from self.renew()
                self.me = replace(self.me, lease="connected")
                return (yield from registration.register_again(self.replica, self.me.record, self.lease_id))
            case AdoptSpec(spec=spec):
                self.me = replace(self.me, spec=spec)
            case WriteReport(report=report):
                return (yield from self._write_report(report))
            case Publish():
                return (yield from self._publish(decision))
            case _:
                return bool((yield from self.replica.write(self._transaction(decision))))
        return True

    def _transaction(self, decision: Decision) -> Txn:
        """The one transaction that carries a decision out."""
        keys, view = self.replica.keys, self.view
        match decision:
            case Announce():
                return transactions.announce(keys, view, self.me.record, self.lease_id)
            case Fence(member=member):
                return transactions.fence(keys, view.generation_value, member.record.node, member.mod_revision)
            case WriteHandover(handover=handover):
                return transactions.write_handover(keys, view, handover)
            case WithdrawHandover():
                return transactions.withdraw_handover(keys, view)
            case Finish():
                return transactions.finish(keys, view, self._result(decision))
        raise AssertionError(f"{decision} asks nothing of the store")

    def _result(self, decision: Finish) -> Result:
        assert self.view.spec is not None, "a run that ends has begun"
        return Result(
            attempt=self.view.spec.record.attempt,
            status=decision.status,
            code=decision.code,
            reason=decision.reason,
            generation=self.view.generation_number,
            step=self.view.head.record.reached if self.view.head else 0,
            text=decision.text,
        )

    def _write_report(self, report: Report) -> Conversation[bool]:
        """Store a report. Returns whether it took effect."""
        # The view is taken first: if another store answers the read below, the replica empties its view.
        keys, view = self.replica.keys, self.view
        key = keys.report(report.generation, report.node)
        before = self._report_revisions.get(key, 0)
        # The last write may have arrived although its answer did not.
        if before is None:
            found = yield from self.replica.read_key(key)
            before = found.mod_revision if found is not None else 0
        # While the write is under way its outcome is unknown, also if the conversation is cut off here.
        self._report_revisions = {key: None}
        revision = yield from self.replica.write(transactions.write_report(keys, view, report, before))
        if not revision:
            return False
        self._report_revisions = {key: revision}
        self.me = replace(self.me, stored_report=report)
        return True

    def _publish(self, decision: Publish) -> Conversation[bool]:
        """Write the roster, then swap the generation. The roster is taken back if another leader was faster."""
        keys, before = self.replica.keys, self.view.generation
        chunks = roster_chunks(decision.seats, self._seats_per_chunk)
        seats = () if chunks else decision.seats
        generation = Generation(**dict(decision.draft), nonce=self._token(), chunks=len(chunks), seats=seats)
        # A member reads its seat as soon as it sees the generation, so the roster has to be there before.
        for txn in transactions.write_roster(keys, generation.nonce, chunks):
            yield Transact(txn)
        absent = sorted(self.view.seats.keys() - self.view.members.keys())
        # A member key that holds something foreign exists, so comparing its absence would fail every time.
        absent = [node for node in absent if keys.member(node) not in self.view.unreadable]
        txn = transactions.publish(keys, self.view, generation, before.record if before else None, absent)
        discard = transactions.discard_roster(keys, generation.nonce) if chunks else None
        if not (yield from self.replica.write(txn, otherwise=discard)):
            return False
        if chunks:
            yield from self.replica.fold_range(keys.roster(generation.nonce))
        return True

    def begin_life(self) -> None:
        """Become a newcomer: a new incarnation, without a lease, a generation or a report."""
        self._change_record(incarnation=self._token(), generation=0)
        # The lease is given up on purpose. A data preparation that the old life was building is claimed by that lease,
        # and ends with it.
        self.me = replace(self.me, report=None, stored_report=None, failed_at=None, lease="lost")

    def drain(self) -> None:
        """Say in the member key that this node is to hand over and leave."""
        self._change_record(draining=True)

    def note_result(self, result: Result) -> None:
        """Take note of the run's `result`, if the store has ended and cannot tell it any more."""
        self.replica.view = replace(self.view, newest_result=Stored(result, 0, 0, 0.0))

    def begin_life_in_new_store(self) -> None:
        """Begin another life in another store, which replaces a store that was lost."""
        # `seen` keeps the highest number of the lost store, so that the next leader publishes a higher one.
        me = self.me
        self._change_record(incarnation=self._token(), generation=0, seen=max(me.record.seen, me.highest_generation))
        self.me = Me(
            self.me.record,
            me.spec,
            started_generation=me.started_generation,
            running_generation=me.running_generation,
            pause_s=me.pause_s,
        )
        self._reset_replica()

    def _reset_replica(self) -> None:
        self.replica, self._report_revisions = Replica(self.me.record.node, self.replica.keys, self._note), {}

    # Questions that go past the view.

    def newest_head(self) -> Conversation[Commit | None]:
        """Read the newest committed checkpoint. Only the leader's view has it."""
        found = yield from self.replica.read_record(Commit, self.replica.keys.checkpoint)
        return None if found is None else found[0]

    # Joining and leaving.

    def join(self, how: JoinOptions) -> Conversation[Result | None]:
        """Get a lease and a key, and read a first view. Returns the result if the run has succeeded before, else None.

        The member may have another name afterwards. Raises DuplicateError, StoreError, and `how.too_late`.
        """
        yield from ride_out(self.renew, how.etcd_wait_s, self._note)
        registered = yield from self._register(how)
        if isinstance(registered, Result):
            return registered
        yield from ride_out(self.replica.refresh, how.etcd_wait_s, self._note)
        number = self.view.generation_number
        self._change_record(seen=max(self.me.record.seen, number))
        self.me = replace(self.me, attempt=registered.attempt, spec=registered.spec, highest_generation=number)
        return None

    def renew(self) -> Conversation[None]:
        """Get a lease in place of the last one."""
        lease, _ = yield Grant()
        self.lease_id = lease.lease_id

    def _register(self, how: JoinOptions) -> Conversation[Registered | Result]:
        """Register, in spite of other newcomers, a key of an old life, or another agent with the same name."""
        # A pause of 0 s only asks the driver for the time.
        _, now = yield Pause(0.0)
        deadline = now + how.timeout_s
        name, tries, gone_at = self.me.record.node, 1, math.inf
        while now < deadline:
            answer = yield from ride_out(lambda: self._try_register(again=how.again), how.etcd_wait_s, self._note)
            if isinstance(answer, Registered | Result):
                return answer
            if answer is None:
                _, now = yield Pause(LOOK_AGAIN_S)
                continue
            other = decode(MemberRecord, answer.key.key, answer.key.value)
            kind, now = yield ProbeOwner(other)
            if kind == "dead" and not answer.difference:
                fence = functools.partial(registration.fence, self.replica, answer.key, other)
                yield from ride_out(fence, how.etcd_wait_s, self._note)
            elif (how.named or answer.difference) and (kind == "alive" or now > gone_at):
                if answer.difference:
                    raise DuplicateError(_other_options_message(self.replica.keys.run_id, answer.difference))
                raise DuplicateError(_same_name_message(other))
            elif how.named or answer.difference:
                # The owner does not answer, as after a power loss. Only a live agent keeps its key for longer than its
                # lease, so a key that outlives two lease terms has a live owner.
                if gone_at == math.inf:
                    gone_at = now + 2 * answer.lease_ttl_s
                    self._say(_waiting_message(other, answer))
                yield Pause(LOOK_AGAIN_S)
            else:
                # No person has chosen this name, so another one is as good.
                tries += 1
                self._change_record(node=f"{name}-{tries}")
                self._reset_replica()
        raise how.too_late

    def _try_register(self, *, again: bool) -> Conversation[Registered | Result | Blocked | None]:
        try:
            me = self.me
            return (yield from registration.try_register(self.replica, me.spec, me.record, self.lease_id, again=again))
        # A machine may stand still for longer than a lease before its agent is a member. It can still become one.
        except LeaseLost as error:
            self._note(f"{error}; registering with another one")
            yield from self.renew()
            return None

    def leave(self, *, seat_too: bool) -> Conversation[None]:
        """Delete the member's own key at once.

        With `seat_too` the member's seat is given up as well, so that the other nodes need not probe it.
        """
        record, last = self.me.record, self.me.report

        def last_report(view: View) -> Report | None:
            if not seat_too or view.seat_of(record) is None:
                return None
            # This report replaces the last one in the store. A failure that no restart can cure must not be lost with
            # it.
            failure = last.failure if last is not None and last.generation == view.generation_number else None
            life = record.incarnation
            return Report(
                generation=view.generation_number, node=record.node, incarnation=life, status="left", failure=failure
            )

        return registration.leave(self.replica, record, last_report)


def _waiting_message(other: MemberRecord, blocked: Blocked) -> str:
    """What a newcomer waits for while such a key keeps it out, in words for people."""
    gone = f"the agent of node {other.node} does not answer at {other.address}"
    begun = f"the run had other options ({blocked.difference})" if blocked.difference else "it has this node's name"
    return f"{gone}, and {begun}: waiting until its lease ends, {2 * blocked.lease_ttl_s:g} s at most"


def _same_name_message(other: MemberRecord) -> str:
    return explain(
        "a live agent has this node's name",
        f"node {other.node}",
        got=f"pid {other.pid} at {other.address}",
        expected="one agent per node name",
        remedy="Give this one another --node, or leave --node out",
    )


def _other_options_message(run_id: str, difference: str) -> str:
    return explain(
        "this run is alive with other options",
        f"run {run_id}",
        got=difference,
        expected="the same options on every node",
        remedy="Start this node with the run's options, or choose another --run-id",
    )
