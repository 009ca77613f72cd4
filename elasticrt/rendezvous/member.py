"""One member of a run, without I/O: what it knows, what it does next, and what it asks of the store. Pure.

A `Member` reads no clock, opens no connection and starts no thread. Its driver goes round:

    it hands over what has happened     member.handle(event, now)
    it asks what to do                  member.decide(now): a Decision with its reason
    it does that                        run(member.carry_out(decision)), or with the workers of its node
    it says what has failed             member.failed(error, now)

`run` carries out the requests of a conversation (see `requests`). An agent, torchrun's plug-in and the tests are such
drivers. They differ in whose workers there are.
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
    Adopt,
    Announce,
    Ask,
    Decision,
    Fence,
    File,
    Finish,
    Halt,
    Me,
    Publish,
    Register,
    Rejoin,
    Withdraw,
)
from elasticrt.rendezvous.outage import RIDE_THROUGH_S, Heard, Outage, ride_out
from elasticrt.rendezvous.records import SEATS_PER_CHUNK, Generation, Keys, Report, Result, Seat, decode, roster_chunks
from elasticrt.rendezvous.records import Member as MemberRecord
from elasticrt.rendezvous.registration import Entered, Kept
from elasticrt.rendezvous.replica import Replica
from elasticrt.rendezvous.requests import AskOwner, Conversation, Grant, Notice, Pause, Transact
from elasticrt.rendezvous.view import Stored, Verdict, View, with_verdict
from elasticrt.store.lease_session import SessionState
from elasticrt.store.protocol import LeaseLost, StoreBlocked, StoreUnavailable, Txn


@dataclass(frozen=True)
class Probed:
    """What asking one life of a node has found."""

    incarnation: str
    verdict: Verdict


@dataclass(frozen=True)
class Joining:
    """How a member comes into its run.

    Attributes:
        timeout_s: the longest time in seconds to find a place.
        etcd_wait_s: the longest time in seconds for which etcd may not answer.
        again: whether a run that has succeeded is to be run once more.
        named: whether people have chosen the node's name; else another one is taken when a live agent has it.
        too_late: what is raised after `timeout_s`.
    """

    timeout_s: float
    etcd_wait_s: float
    again: bool
    named: bool
    too_late: ElasticError


class Member:
    """The member's state, and all that changes it.

    Args:
        me: its own state at first.
        run_id: the run's.
        token: draws 64 random bits, as 16 hex digits.
        say: tells people.
        note: takes what an operator may want to know.
        seats_per_chunk: of the rosters that it writes.

    Attributes:
        me: its own state.
        replica: its copy of the run's keys.
        lease_id: what its key is bound to.
        outage: the state of the way to etcd.
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
        # The key of this node's newest report, and its mod revision; None while it is not known what became of a try.
        self._filed: dict[str, int | None] = {}

    @property
    def view(self) -> View:
        """What it knows of its run."""
        return self.replica.view

    def _change(self, **fields: object) -> None:
        """Change what the member's key should say."""
        self.me = replace(self.me, record=self.me.record.model_copy(update=fields))

    # What has happened.

    def handle(self, event: Notice | SessionState | Probed | Heard, now: float) -> None:
        """Take note of an event."""
        match event:
            case Notice():
                self.replica.absorb(event, now)
            case SessionState():
                self._lease_changed(event, now)
            case Probed(incarnation, verdict):
                self.replica.view = with_verdict(self.view, incarnation, verdict)
            case Heard(generation=generation):
                self.outage.heard(event)
                self.me = replace(self.me, heard=max(self.me.heard, generation))

    def _lease_changed(self, state: SessionState, now: float) -> None:
        if state.lease_id and state.lease_id != self.lease_id:
            return  # About a lease that has been replaced meanwhile.
        if self.me.lease != "lost":  # One that has ended, or was given up, is followed by another one alone.
            self.me = replace(self.me, lease=state.word)
        if state.word != "connected":
            self._note(f"lease {state.word}: {state.reason}")
            self.outage.suspect(now)
        elif self.outage.since is None:
            self.outage.alone_since = None

    def failed(self, error: StoreError, now: float) -> float:
        """A request has failed that was to be carried out. Returns when to decide again, 0 for at once.

        Raises what cannot be ridden out.
        """
        match error:
            case StoreUnavailable():
                self.outage.begin(error, now)
                return self.outage.retry_at
            case LeaseLost():
                self._note(f"etcd has given this node's lease up: {error}")
                self.me = replace(self.me, lease="lost")
                return 0.0
            case StoreBlocked():
                return self.outage.refused(error, now)
        raise error

    # What to do.

    def catch_up(self) -> Me:
        """Its own state, which is to be described and given back before `decide`."""
        # Also a generation that this member has no part in: another store must not publish it a second time.
        if self.view.number > self.me.known:
            self.me = replace(self.me, known=self.view.number)
        return self.me

    def decide(self, now: float) -> Decision:
        """What to do next, and why. What is decided on an old view may only concern this node."""
        if self.outage.since is None:
            return decide(self.me, self.view, now)
        if now - self.outage.since > RIDE_THROUGH_S:
            return Halt(f"etcd has not answered for {RIDE_THROUGH_S:g} s", EXIT_STORE)
        return decide(replace(self.me, lease="suspended"), self.view, now)

    def listens_to(self, now: float) -> Sequence[Seat]:
        """Whom to ask which generation they are in, while etcd does not answer, or the lease is overdue."""
        if not self.me.running or (self.outage.since is None and self.me.lease != "suspended"):
            return ()
        return self.outage.listens_to([seat for seat in self.view.order() if seat.node != self.me.record.node], now)

    def carry_out(self, decision: Decision) -> Conversation[bool]:
        """Do what a decision asks of the store; the driver does the rest.

        Returns whether it took effect. If not, everything has been read again.
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
            case Adopt(spec=spec):
                self.me = replace(self.me, spec=spec)
            case File(report=report):
                return (yield from self._file(report))
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
                return transactions.evict(keys, view.fence, member.record.node, member.mod_revision)
            case Ask(handover=handover):
                return transactions.ask(keys, view, handover)
            case Withdraw():
                return transactions.withdraw(keys, view)
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
            generation=self.view.number,
            step=self.view.head.record.reached if self.view.head else 0,
            text=decision.text,
        )

    def _file(self, report: Report) -> Conversation[bool]:
        """Store a report."""
        keys, view = self.replica.keys, self.view  # A look at another store would empty the view.
        key = keys.report(report.generation, report.node)
        before = self._filed.get(key, 0)
        if before is None:  # The try before may have arrived, though its answer did not.
            found = yield from self.replica.look_up(key)
            before = found.mod_revision if found is not None else 0
        self._filed = {key: None}
        revision = yield from self.replica.write(transactions.file(keys, view, report, before))
        if not revision:
            return False
        self._filed = {key: revision}
        self.me = replace(self.me, filed=report)
        return True

    def _publish(self, decision: Publish) -> Conversation[bool]:
        """Write the roster, then swap the generation; take the roster back if another leader was faster."""
        keys, before = self.replica.keys, self.view.generation
        chunks = roster_chunks(decision.seats, self._seats_per_chunk)
        seats = () if chunks else decision.seats
        generation = Generation(**dict(decision.draft), nonce=self._token(), chunks=len(chunks), seats=seats)
        for txn in transactions.roster(keys, generation.nonce, chunks):
            yield Transact(txn)
        absent = sorted(self.view.seats.keys() - self.view.members.keys())
        # A key that somebody has overwritten is no member's, and there it stays.
        absent = [node for node in absent if keys.member(node) not in self.view.unreadable]
        txn = transactions.publish(keys, self.view, generation, before.record if before else None, absent)
        discard = transactions.discard_roster(keys, generation.nonce) if chunks else None
        if not (yield from self.replica.write(txn, otherwise=discard)):
            return False
        if chunks:
            yield from self.replica.fold_range(keys.roster(generation.nonce))
        return True

    def begin_life(self) -> None:
        """Become a newcomer, whatever this node was."""
        self._change(incarnation=self._token(), generation=0)
        # The claim of a preparation that this life was building ends with its lease.
        self.me = replace(self.me, report=None, filed=None, failed_at=None, lease="lost")

    def drain(self) -> None:
        """Tell the leader that this node is to hand over and leave."""
        self._change(draining=True)

    def has_ended(self, result: Result) -> None:
        """Take note of the run's `result`, which the store is not there any more to tell."""
        self.replica.view = replace(self.view, latest=Stored(result, 0, 0, 0.0))

    def begin_anew(self) -> None:
        """Begin another life in another store, which takes the place of one that was lost."""
        me = self.me
        self._change(incarnation=self._token(), generation=0, seen=max(me.record.seen, me.known))
        self.me = Me(self.me.record, me.spec, started=me.started, running=me.running, pause_s=me.pause_s)
        self._forget()

    def _forget(self) -> None:
        self.replica, self._filed = Replica(self.me.record.node, self.replica.keys, self._note), {}

    # Questions that go past the view.

    def newest_head(self) -> Conversation[Commit | None]:
        """The newest committed checkpoint, which only the leader follows."""
        found = yield from self.replica.record(Commit, self.replica.keys.checkpoint)
        return None if found is None else found[0]

    # Coming and going.

    def join(self, how: Joining) -> Conversation[Result | None]:
        """Get a lease and a key, and read a first view. A Result when the run has succeeded before.

        The member's name can be another one afterwards. Raises DuplicateError, StoreError, `how.too_late`.
        """
        yield from ride_out(self.renew, how.etcd_wait_s, self._note)
        entered = yield from self._enter(how)
        if isinstance(entered, Result):
            return entered
        yield from ride_out(self.replica.refresh, how.etcd_wait_s, self._note)
        number = self.view.number
        self._change(seen=max(self.me.record.seen, number))
        self.me = replace(self.me, attempt=entered.attempt, spec=entered.spec, known=number)
        return None

    def renew(self) -> Conversation[None]:
        """Get a lease in place of the last one."""
        lease, _ = yield Grant()
        self.lease_id = lease.lease_id

    def _enter(self, how: Joining) -> Conversation[Entered | Result]:
        """Register, whatever it takes: other newcomers, an old life's key, another agent of the same name."""
        _, now = yield Pause(0.0)
        deadline = now + how.timeout_s
        name, tries, gone_at = self.me.record.node, 1, math.inf
        while now < deadline:
            answer = yield from ride_out(lambda: self._enter_once(again=how.again), how.etcd_wait_s, self._note)
            if isinstance(answer, Entered | Result):
                return answer
            if answer is None:
                _, now = yield Pause(LOOK_AGAIN_S)
                continue
            other = decode(MemberRecord, answer.key.key, answer.key.value)
            said, now = yield AskOwner(other)
            if said == "dead" and not answer.unlike:
                evict = functools.partial(registration.evict, self.replica, answer.key, other)
                yield from ride_out(evict, how.etcd_wait_s, self._note)
            elif (how.named or answer.unlike) and (said == "alive" or now > gone_at):
                run_id = self.replica.keys.run_id
                raise DuplicateError(_other_options(run_id, answer.unlike) if answer.unlike else _same_name(other))
            elif how.named or answer.unlike:
                # Nobody answers, as after a power loss. Only a live agent keeps its key for longer than its lease.
                if gone_at == math.inf:
                    gone_at = now + 2 * answer.lease_ttl_s
                    self._say(_waits_for(other, answer))
                yield Pause(LOOK_AGAIN_S)
            else:
                tries += 1
                self._change(node=f"{name}-{tries}")
                self._forget()
        raise how.too_late

    def _enter_once(self, *, again: bool) -> Conversation[Entered | Result | Kept | None]:
        try:
            me = self.me
            return (yield from registration.enter(self.replica, me.spec, me.record, self.lease_id, again=again))
        except LeaseLost as error:  # A machine that stands still for so long before it is a member may yet be one.
            self._note(f"{error}; registering with another one")
            yield from self.renew()
            return None

    def leave(self, *, seat_too: bool) -> Conversation[None]:
        """Take the own key out at once; with `seat_too` give up the seat, so that the others need not ask for it."""
        record, last = self.me.record, self.me.report

        def left(view: View) -> Report | None:
            if not seat_too or view.seat_of(record) is None:
                return None
            # It replaces the last report in the store: a failure that no restart can cure must not be lost.
            failure = last.failure if last is not None and last.generation == view.number else None
            life = record.incarnation
            return Report(generation=view.number, node=record.node, incarnation=life, status="left", failure=failure)

        return registration.leave(self.replica, record, left)


def _waits_for(other: MemberRecord, kept: Kept) -> str:
    """What a newcomer waits for whom such a key keeps out."""
    gone = f"the agent of node {other.node} does not answer at {other.address}"
    begun = f"the run had other options ({kept.unlike})" if kept.unlike else "it has this node's name"
    return f"{gone}, and {begun}: waiting until its lease ends, {2 * kept.lease_ttl_s:g} s at most"


def _same_name(other: MemberRecord) -> str:
    return explain(
        "a live agent has this node's name",
        f"node {other.node}",
        got=f"pid {other.pid} at {other.address}",
        expected="one agent per node name",
        remedy="Give this one another --node, or leave --node out",
    )


def _other_options(run_id: str, unlike: str) -> str:
    return explain(
        "this run is alive with other options",
        f"run {run_id}",
        got=unlike,
        expected="the same options on every node",
        remedy="Start this node with the run's options, or choose another --run-id",
    )
