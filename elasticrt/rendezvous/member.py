"""One member of a run, without I/O: what it knows, what it does next, and what it asks of the store. Pure.

A `Member` reads no clock, opens no connection and starts no thread. Its driver, over and over,

    hands it what has happened          member.handle(event, now)
    asks what is to be done             member.decide(now), a Decision with its reason
    does that                           run(member.carry_out(decision)), or with the workers of its node
    says what has failed                member.failed(error, now)

where `run` carries out the requests of a conversation (see `requests`). An agent, torchrun's plug-in and the tests are
such drivers; they differ in whose workers there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from elasticrt.errors import EXIT_STORE, DuplicateError, ElasticError, StoreError, explain
from elasticrt.ipc.env import Commit
from elasticrt.ipc.time_bounds import LOOK_AGAIN_S
from elasticrt.rendezvous.conversations import Conversations, Entered
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
from elasticrt.rendezvous.outage import Heard, Outage, ride_out
from elasticrt.rendezvous.records import SEATS_PER_CHUNK, Keys, Report, Result, Seat, decode
from elasticrt.rendezvous.records import Member as MemberRecord
from elasticrt.rendezvous.requests import AskOwner, Conversation, Grant, Notice, Pause
from elasticrt.rendezvous.view import Verdict, View, with_verdict
from elasticrt.store.lease_session import SessionState
from elasticrt.store.protocol import KeyValue, LeaseLost, StoreFull, StoreUnavailable

T = TypeVar("T")


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
        ride_through_s: for so long etcd may not answer.
        seats_per_chunk: of the rosters that it writes.

    Attributes:
        me: its own state.
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
        ride_through_s: float,
        seats_per_chunk: int = SEATS_PER_CHUNK,
    ) -> None:
        self.me = me
        self.lease_id = 0
        self.outage = Outage(ride_through_s, say)
        self._keys = Keys(run_id)
        self._token = token
        self._note = note
        self._seats_per_chunk = seats_per_chunk
        self._talks = self._conversations(me.record.node)

    @property
    def view(self) -> View:
        """What it knows of its run."""
        return self._talks.view

    def _conversations(self, node: str) -> Conversations:
        return Conversations(node, self._keys, self._token, self._note, self._seats_per_chunk)

    # What has happened.

    def handle(self, event: Notice | SessionState | Probed | Heard, now: float) -> None:
        """Take note of an event."""
        match event:
            case Notice():
                self._talks.absorb(event, now)
            case SessionState():
                self._lease_changed(event, now)
            case Probed(incarnation, verdict):
                self._talks.view = with_verdict(self.view, incarnation, verdict)
            case Heard(generation=generation):
                self.outage.heard(event)
                self.me = replace(self.me, heard=max(self.me.heard, generation))

    def _lease_changed(self, state: SessionState, now: float) -> None:
        if state.lease_id and state.lease_id != self.lease_id:
            return  # About a lease that has been replaced meanwhile.
        self.me = replace(self.me, lease=state.word)
        if state.word != "connected":
            self._note(f"lease {state.word}: {state.reason}")
            self.outage.suspect(now)

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
            case StoreFull():
                return self.outage.full(error, now)
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
        if self.outage.is_too_long(now):
            return Halt(EXIT_STORE, f"etcd has not answered for {self.outage.ride_through_s:g} s")
        return decide(replace(self.me, lease="suspended"), self.view, now)

    def listens_to(self, now: float) -> Sequence[Seat]:
        """Whom to ask which generation they are in, while etcd does not answer."""
        if self.outage.since is None or not self.me.running:
            return ()
        return self.outage.listens_to([seat for seat in self.view.order() if seat.node != self.me.record.node], now)

    def carry_out(self, decision: Decision) -> Conversation[bool]:
        """Do what a decision asks of the store; the driver does the rest. Whether it took effect."""
        talks, done = self._talks, True
        match decision:
            case Rejoin():
                self.begin_life()
                yield from talks.leave(None)
            case Register():
                if self.me.lease == "lost":
                    yield from self.renew()
                self.me = replace(self.me, lease="connected")
                done = yield from talks.register_again(self.me.record, self.lease_id)
            case Announce():
                done = yield from talks.announce(self.me.record, self.lease_id)
            case Adopt(spec=spec):
                self.me = replace(self.me, spec=spec)
            case File():
                done = yield from talks.file(decision)
                if done:
                    self.me = replace(self.me, filed=decision.report)
            case Fence():
                done = yield from talks.evict(decision)
            case Publish():
                done = yield from talks.publish(decision)
            case Ask():
                done = yield from talks.ask(decision)
            case Withdraw():
                done = yield from talks.withdraw()
            case Finish():
                head = self.view.head
                done = yield from talks.finish(decision, head.record.step if head else 0)
        return done

    def begin_life(self) -> None:
        """Whatever this node was, it is a newcomer from now on."""
        record = self.me.record.model_copy(update={"incarnation": self._token(), "generation": 0})
        # Another life has another lease: with the last one's goes its claim of a preparation that nobody builds now.
        self.me = replace(self.me, record=record, report=None, filed=None, failed_at=None, lease="lost")

    def drain(self) -> None:
        """Tell the leader that this node is to hand over and leave."""
        self.me = replace(self.me, record=self.me.record.model_copy(update={"draining": True}))

    def begin_anew(self) -> None:
        """The store is gone and another one takes its place: nothing is known of it, and this is another life."""
        me = self.me
        update = {"incarnation": self._token(), "generation": 0, "seen": max(me.record.seen, me.known)}
        record = me.record.model_copy(update=update)
        self.me = Me(record=record, spec=me.spec, started=me.started, running=me.running, pause_s=me.pause_s)
        self._talks = self._conversations(record.node)

    # Reading.

    def complete(self) -> Conversation[None]:
        """Read what the view lacks."""
        return self._talks.complete()

    def read_again(self) -> Conversation[None]:
        """Read everything: what happened to requests without an answer is in the store."""
        return self._talks.refresh()

    def newest_head(self) -> Conversation[Commit | None]:
        """The newest committed checkpoint, which only the leader follows."""
        return self._talks.newest()

    def give_up(self, node: str, choose: Callable[[Collection[MemberRecord]], str]) -> Conversation[str]:
        """See `Conversations.give_up`."""
        return self._talks.give_up(node, choose)

    # Coming and going.

    def join(self, how: Joining) -> Conversation[Result | None]:
        """Get a lease and a key, and read a first view. A Result when the run has succeeded before.

        The member's name can be another one afterwards. Raises DuplicateError, StoreError, `how.too_late`.
        """
        yield from ride_out(self.renew, how.etcd_wait_s, self._note)
        entered = yield from self._enter(how)
        if isinstance(entered, Result):
            return entered
        yield from ride_out(self._talks.refresh, how.etcd_wait_s, self._note)
        number = self.view.number
        record = self.me.record.model_copy(update={"seen": max(self.me.record.seen, number)})
        self.me = replace(self.me, attempt=entered.attempt, spec=entered.spec, known=number, record=record)
        return None

    def renew(self) -> Conversation[None]:
        """Get a lease in place of the last one."""
        lease, _ = yield Grant()
        self.lease_id = lease.lease_id

    def _enter(self, how: Joining) -> Conversation[Entered | Result]:
        """Register, whatever it takes: other newcomers, an old life's key, another agent of the same name."""
        _, now = yield Pause(0.0)
        deadline = now + how.timeout_s
        name, tries = self.me.record.node, 1
        while now < deadline:
            answer = yield from ride_out(lambda: self._enter_once(again=how.again), how.etcd_wait_s, self._note)
            if isinstance(answer, Entered | Result):
                return answer
            if answer is None:
                _, now = yield Pause(LOOK_AGAIN_S)
                continue
            other = decode(MemberRecord, answer.key, answer.value)
            said, now = yield AskOwner(other)
            if said == "dead":
                evict = lambda stale=answer: self._talks.evict_stale(stale)  # noqa: E731
                yield from ride_out(evict, how.etcd_wait_s, self._note)
            elif how.named:
                raise DuplicateError(_same_name(other))
            else:
                tries += 1
                self.me = replace(self.me, record=self.me.record.model_copy(update={"node": f"{name}-{tries}"}))
                self._talks = self._conversations(self.me.record.node)
        raise how.too_late

    def _enter_once(self, *, again: bool) -> Conversation[Entered | Result | KeyValue | None]:
        try:
            return (yield from self._talks.enter(self.me.spec, self.me.record, self.lease_id, again=again))
        except LeaseLost as error:  # A machine that stands still for so long before it is a member may yet be one.
            self._note(f"{error}; registering with another one")
            yield from self.renew()
            return None

    def leave(self, *, seat_too: bool) -> Conversation[None]:
        """Take the own key out at once; with `seat_too` give up the seat, so that the others need not ask for it."""
        view, record, told = self.view, self.me.record, self.me.report
        report = None
        if seat_too and view.seat_of(record.node, record.incarnation) is not None:
            report = Report(generation=view.number, node=record.node, incarnation=record.incarnation, status="left")
            if told is not None and told.generation == view.number:
                # It takes the place of the report in the store: a failure that no restart can cure must not go with it.
                report = report.model_copy(update={"failure": told.failure})
        return self._talks.leave(report)


def _same_name(other: MemberRecord) -> str:
    return explain(
        "a live agent has this node's name",
        f"node {other.node}",
        got=f"pid {other.pid} at {other.address}",
        expected="one agent per node name",
        remedy="Give this one another --node, or leave --node out",
    )
