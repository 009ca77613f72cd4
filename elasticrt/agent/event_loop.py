"""The loop of every member: decide, carry out, wait for events, handle them.

One thread owns all state; watches, workers, probes and signals only put events into its queue. `rendezvous.member`
decides. What belongs to the workers is done by a `Side`: an `Agent`, which starts them, or torchrun's plug-in
(`Participant`), whose workers another launcher starts.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from elasticrt.agent.edges import Edges
from elasticrt.agent.store_driver import StoreDriver
from elasticrt.ipc.time_bounds import LOOK_AGAIN_S
from elasticrt.liveness.prober import no_witnesses
from elasticrt.rendezvous.decision import (
    Decision,
    Drain,
    End,
    Go,
    Halt,
    Hold,
    Leave,
    Me,
    Probe,
    Publish,
    Register,
    Rejoin,
    ReleaseHold,
    Run,
    Wait,
)
from elasticrt.rendezvous.member import Member, Probed
from elasticrt.rendezvous.outage import Heard
from elasticrt.rendezvous.records import Generation, Seat
from elasticrt.rendezvous.requests import Conversation, Notice
from elasticrt.rendezvous.view import Verdict, View
from elasticrt.store.lease_session import LeaseSession, SessionState
from elasticrt.store.protocol import LeaseLost, StoreBlocked, StoreForbidden, StoreUnavailable

log = logging.getLogger(__name__)

PROBE_S = 2.0

OWN_THREADS = "elasticrt-"
"""Prefix of the names of our threads. Errors in other libraries' threads do not concern the member."""


@dataclass(frozen=True)
class ThreadDied:
    """A thread of this member has ended with an unexpected error. What waits for it would wait for ever."""

    name: str
    error: BaseException


class Side:
    """The workers' side of a member's loop. Methods that do nothing here are optional."""

    def describe(self, me: Me, now: float) -> Me:
        """The member's own state at `now`: what its key and its report should say. Changes nothing."""
        raise NotImplementedError

    def run_generation(self, generation: Generation, seat: Seat) -> None:
        """Start the workers of `generation` in this node's `seat`, as soon as those of the one before have ended."""
        raise NotImplementedError

    def left_out(self, reason: str) -> bool:
        """End the workers: a generation goes on without this life, for this `reason`. Whether they have ended yet."""
        raise NotImplementedError

    def hand_over(self, decision: Hold | Go | ReleaseHold) -> None:
        """Do this node's part of a handover, as `decision` says."""
        raise NotImplementedError

    def drain(self, reason: str) -> None:
        """Begin to hand over and leave, for this `reason`."""
        raise NotImplementedError

    def handle(self, event: Any) -> None:
        """Take note of an event that the loop does not know."""
        raise NotImplementedError

    def do_what_is_due(self, now: float) -> None:
        """Do what is due at `now` (seconds of the monotonic clock)."""

    def alarms(self, now: float) -> Iterable[float]:
        """When, from `now` on, to decide again even if no event has come."""
        del now
        return ()

    def decided(self, decision: Decision) -> None:
        """Take note of a `decision`, before it is carried out."""

    def published(self, decision: Publish, before: View) -> None:
        """Take note that this member has published a generation. `before`: the view before that."""

    def revive_store(self) -> None:
        """If an embedded store of this machine has died, start another one, or note the result of the run with which it
        has ended. Raises StoreUnavailable."""


class EventLoop:
    """A member's loop. Used by one thread; only `queue.put` is called from others.

    Args:
        run_id: the run.
        side: the workers' side.
        edges: clock, queue and prober.

    Attributes:
        queue: takes all events.
        prober: asks other agents whether they are alive.
        member, driver, session: set by `begin`: the member, what carries out its requests, and what keeps its lease.
    """

    member: Member
    driver: StoreDriver
    session: LeaseSession

    def __init__(self, run_id: str, side: Side, edges: Edges) -> None:
        self.queue = edges.queue()
        self.prober = edges.prober(
            lambda seat, answer, at: self.queue.put(Probed(seat.incarnation, Verdict(answer, at)))
        )
        self._run_id = run_id
        self._side = side
        self._clock = edges.clock
        self._reason = ""
        self._hook = threading.excepthook

    def begin(self, member: Member, driver: StoreDriver, session: LeaseSession) -> None:
        """Use this `member` from now on, with what carries out its requests and what keeps its lease."""
        self.member, self.driver, self.session = member, driver, session

    def watch_threads(self) -> None:
        """From now on an error in one of our threads ends the member's loop."""
        self._hook, threading.excepthook = threading.excepthook, self._thread_died

    def unwatch_threads(self) -> None:
        """Restore the hook."""
        if threading.excepthook == self._thread_died:  # Otherwise another hook was installed after it, and calls it.
            threading.excepthook = self._hook

    def _thread_died(self, what: threading.ExceptHookArgs) -> None:
        """Called on any thread that ends with an error."""
        name = what.thread.name if what.thread is not None else ""
        if name.startswith(OWN_THREADS) and what.exc_value is not None:
            log.error("the thread %s has ended: %r", name, what.exc_value)
            self.queue.put(ThreadDied(name, what.exc_value))
        else:
            self._hook(what)

    def take_part(self) -> End | Leave | Halt:
        """Go round until the run has ended for this member. Returns the decision that says why."""
        while True:
            decision = self._decide()
            if isinstance(decision, End | Leave | Halt):
                return decision
            self._absorb(self._do(decision))

    def _decide(self) -> Decision:
        member, now = self.member, self._clock.monotonic()
        if member.outage.is_due(now):
            self._read_again(now)
        # In this order: what is due may end workers, and what this node says of itself must be true when it decides.
        self._side.do_what_is_due(now)
        member.me = self._side.describe(member.catch_up(), now)
        asked = member.listens_to(now)
        if asked:
            self.prober.listen(asked, self._run_id, lambda number: self.queue.put(Heard(number)))
        decision = member.decide(now)
        if decision.reason != self._reason:
            log.info("%s: %s", type(decision).__name__, decision.reason)
            self._reason = decision.reason
        self._side.decided(decision)
        return decision

    def _read(self, conversation: Conversation[None]) -> None:
        """Carry out what only reads. If that is forbidden now, the login's permissions are being changed."""
        try:
            self.driver.run(conversation)
        except StoreForbidden as error:
            raise StoreUnavailable(str(error)) from error

    def _read_again(self, now: float) -> None:
        try:
            self._side.revive_store()
            if self.member.view.result is not None:
                return
            self._read(self.member.replica.refresh())
        except StoreUnavailable as error:
            self.member.failed(error, self._clock.monotonic())
        else:
            self.member.outage.end(now)

    def _do(self, decision: Decision) -> float | None:
        """Carry out a decision. Returns until when to wait for events: None: for ever, 0: not at all."""
        try:
            return self._carry_out(decision)
        except (StoreUnavailable, LeaseLost, StoreBlocked) as error:
            return self.member.failed(error, self._clock.monotonic())

    def _carry_out(self, decision: Decision) -> float | None:
        member, side = self.member, self._side
        match decision:
            case Wait(until=until):
                return member.outage.retry_at if member.outage.since is not None else until
            case Run(_, generation, seat):
                side.run_generation(generation, seat)
            case Hold() | Go() | ReleaseHold():
                side.hand_over(decision)
            case Drain():
                side.drain(decision.reason)
            case Probe():
                # Evicting a healthy node is cheap where workers go on in place, so two witnesses are enough there.
                self.prober.ask(decision.seats, member.view.witnesses if member.me.record.has_state else no_witnesses)
                return self._clock.monotonic() + PROBE_S
            case Rejoin():
                if not side.left_out(decision.reason):
                    return None
                self.driver.run(member.carry_out(decision))
            case _:
                before = member.view
                done = self.driver.run(member.carry_out(decision))
                member.outage.not_refused()  # Something was written. Other decisions write nothing.
                if isinstance(decision, Publish) and done:
                    side.published(decision, before)
                if isinstance(decision, Register) and not done:
                    return self._clock.monotonic() + LOOK_AGAIN_S
        return 0.0

    def _absorb(self, until: float | None) -> None:
        """Wait for an event, or until a time; handle all events that have come, and complete the view."""
        now = self._clock.monotonic()
        alarms = [*self._side.alarms(now), until, self.session.look_at()]
        until = min((at for at in alarms if at is not None), default=None)
        # Even if nothing is to be waited for, what has come counts before the next decision.
        with contextlib.suppress(queue.Empty):
            timeout = None if until is None else max(0.0, until - now)
            self.handle(self.queue.get(timeout=timeout) if until != 0.0 else self.queue.get_nowait())
        # This process may have been paused: nothing may be decided before the lease is checked again.
        self.session.look()
        with contextlib.suppress(queue.Empty):
            while True:
                self.handle(self.queue.get_nowait())
        if self.member.outage.since is None:
            try:
                self._read(self.member.replica.complete())
            except StoreUnavailable as error:
                self.member.failed(error, self._clock.monotonic())

    def handle(self, event: Any) -> None:
        """Take note of an event."""
        match event:
            case Notice() | SessionState() | Probed() | Heard():
                self.member.handle(event, self._clock.monotonic())
            case ThreadDied(name=name, error=error):
                raise RuntimeError(f"the thread {name} of this agent has ended: {error!r}") from error
            case _:
                self._side.handle(event)
