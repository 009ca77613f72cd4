"""Runs the loop of a member: decide, carry out the decision, wait for events, handle them.

One thread owns all state. Watches, workers, probes and signal handlers only put events into its queue.
`rendezvous.member` decides. A `WorkerSide` does what concerns the workers: an `Agent`, which starts workers itself, or
torchrun's plug-in (`Participant`), whose workers torchrun starts.
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
from elasticrt.rendezvous.member import Member, ProbeResult
from elasticrt.rendezvous.outage import GenerationAnswer
from elasticrt.rendezvous.records import Generation, Seat
from elasticrt.rendezvous.requests import Notice
from elasticrt.rendezvous.view import Verdict, View
from elasticrt.store.lease_session import LeaseSession, SessionState
from elasticrt.store.protocol import LeaseLost, StoreBlocked, StoreUnavailable

log = logging.getLogger(__name__)

PROBE_S = 2.0
"""How long the loop waits for the answers of a probe before it decides again. A silent agent takes 1.5 s."""

OWN_THREADS = "elasticrt-"
"""The prefix of the names of elasticrt's threads. Errors in threads of other libraries do not concern the member."""


@dataclass(frozen=True)
class ThreadDied:
    """A thread of this member has ended with an unexpected `error`. What waits for it would wait for ever."""

    name: str
    error: BaseException


class WorkerSide:
    """The workers' side of a member's loop: what the loop calls about the workers. Methods with a body are optional."""

    def describe(self, me: Me, now: float) -> Me:
        """Return `me` with the workers' state at `now`, for the member's key and its report. Change nothing."""
        raise NotImplementedError

    def run_generation(self, generation: Generation, seat: Seat) -> None:
        """Start the workers of `generation` in this node's `seat`, once those of the generation before have ended."""
        raise NotImplementedError

    def end_before_rejoin(self, reason: str) -> bool:
        """End the workers, because a generation goes on without this incarnation for this `reason`.

        Returns whether the workers have ended yet. The member comes back only after that.
        """
        raise NotImplementedError

    def hand_over(self, decision: Hold | Go | ReleaseHold) -> None:
        """Do this node's part of a handover: hold the workers, tell them the last step, or let them go on."""
        raise NotImplementedError

    def drain(self, reason: str) -> None:
        """Begin to hand the training over and leave the run, for this `reason`."""
        raise NotImplementedError

    def handle(self, event: Any) -> None:
        """Take note of an `event` of a kind that the loop does not know."""
        raise NotImplementedError

    def do_what_is_due(self, now: float) -> None:
        """Do what is due at `now` (seconds of the monotonic clock)."""

    def alarms(self, now: float) -> Iterable[float | None]:
        """The times after `now` at which to decide again even if no event has come, or None.

        They are seconds of the monotonic clock.
        """
        del now
        return ()

    def decided(self, decision: Decision) -> None:
        """Take note of a `decision`, before it is carried out."""

    def published(self, decision: Publish, before: View) -> None:
        """Take note that this member has published a generation. `before`: the view on which it decided."""

    def revive_store(self) -> None:
        """Replace the embedded store of this machine if it has died. Raises StoreUnavailable.

        An embedded store also ends with the run. Then the side notes the run's result instead.
        """


class EventLoop:
    """The loop of one member. One thread uses it; other threads only call `queue.put`.

    Args:
        run_id: the run's name.
        side: the workers' side.
        edges: clock, queue and prober.

    Attributes:
        queue: takes all events.
        prober: asks other agents whether they are alive.
        member: decides. Set by `begin`, as the next two are.
        driver: carries out the member's requests to the store.
        session: keeps the member's lease alive.
    """

    member: Member
    driver: StoreDriver
    session: LeaseSession

    def __init__(self, run_id: str, side: WorkerSide, edges: Edges) -> None:
        self.queue = edges.queue()
        self.prober = edges.prober(
            lambda seat, answer, at: self.queue.put(ProbeResult(seat.incarnation, Verdict(answer, at)))
        )
        self._run_id = run_id
        self._side = side
        self._clock = edges.clock
        # The reason of the last decision that was logged: a reason is logged when it changes.
        self._reason = ""
        self._hook = threading.excepthook

    def begin(self, member: Member, driver: StoreDriver, session: LeaseSession) -> None:
        """Use this `member` from now on, with the `driver` of its requests and the `session` of its lease."""
        self.member, self.driver, self.session = member, driver, session

    def watch_threads(self) -> None:
        """Make an unexpected error in a thread of elasticrt end the loop, from now on."""
        self._hook, threading.excepthook = threading.excepthook, self._thread_died

    def unwatch_threads(self) -> None:
        """Restore the hook for threads' errors that was there before `watch_threads`."""
        # Another hook may have been installed since, which calls this one. Then there is nothing to restore.
        if threading.excepthook == self._thread_died:
            threading.excepthook = self._hook

    def _thread_died(self, what: threading.ExceptHookArgs) -> None:
        """Queue the death of an own thread. Python calls this on each thread that ends with an error."""
        name = what.thread.name if what.thread is not None else ""
        if name.startswith(OWN_THREADS) and what.exc_value is not None:
            log.error("the thread %s has ended: %r", name, what.exc_value)
            self.queue.put(ThreadDied(name, what.exc_value))
        else:
            self._hook(what)

    def take_part(self) -> End | Leave | Halt:
        """Run the loop until the run has ended for this member. Returns the decision that says why."""
        while True:
            decision = self._decide()
            if isinstance(decision, End | Leave | Halt):
                return decision
            self._absorb(self._do(decision))

    def _decide(self) -> Decision:
        member, now = self.member, self._clock.monotonic()
        if member.outage.is_due(now):
            self._read_again(now)
        # In this order: `do_what_is_due` may end workers, and the member must decide on the state after that.
        self._side.do_what_is_due(now)
        member.me = self._side.describe(member.catch_up(), now)
        # While etcd does not answer, other agents may know of a newer generation than this member.
        asked = member.seats_to_ask(now)
        if asked:
            self.prober.ask_for_generation(asked, self._run_id, lambda number: self.queue.put(GenerationAnswer(number)))
        decision = member.decide(now)
        if decision.reason != self._reason:
            log.info("%s: %s", type(decision).__name__, decision.reason)
            self._reason = decision.reason
        self._side.decided(decision)
        return decision

    def _read_again(self, now: float) -> None:
        """Try to end an outage: read everything again, from a fresh store if the embedded one has died."""
        try:
            self._side.revive_store()
            if self.member.view.result is not None:
                return
            self.driver.run(self.member.replica.refresh())
        # A login that may no longer read: its permissions are probably being changed.
        except (StoreUnavailable, StoreBlocked) as error:
            self.member.outage.begin(error, self._clock.monotonic())
        else:
            self.member.note_read(now)

    def _do(self, decision: Decision) -> float | None:
        """Carry out a decision. Returns until when to wait for events: None for ever, 0.0 for not at all."""
        try:
            return self._carry_out(decision)
        except (StoreUnavailable, LeaseLost, StoreBlocked) as error:
            return self.member.note_failure(error, self._clock.monotonic())

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
                # Witnesses let the member decide sooner, at the risk of fencing a healthy node. Where workers go on in
                # place that costs little: a healthy node comes back in the time of a step. Elsewhere only this agent's
                # own probe counts.
                self.prober.ask(decision.seats, member.view.witnesses if member.me.record.has_state else no_witnesses)
                return self._clock.monotonic() + PROBE_S
            case Rejoin():
                # The event of the workers' end ends this wait.
                if not side.end_before_rejoin(decision.reason):
                    return None
                self.driver.run(member.carry_out(decision))
            case _:
                before = member.view
                done = self.driver.run(member.carry_out(decision))
                # Decisions of this branch write to the store, so the store takes writes again, if it has refused some.
                member.outage.note_write()
                if isinstance(decision, Publish) and done:
                    side.published(decision, before)
                # Another process may still hold this node's name, until its lease ends.
                if isinstance(decision, Register) and not done:
                    return self._clock.monotonic() + LOOK_AGAIN_S
        return 0.0

    def _absorb(self, until: float | None) -> None:
        """Wait for an event, or until a time. Then handle all events that have come, and complete the view.

        `until`: as `_do` returns it. Alarms of the side and of the lease may end the wait sooner.
        """
        now = self._clock.monotonic()
        alarms = [*self._side.alarms(now), until, self.session.next_check_at()]
        until = min((at for at in alarms if at is not None), default=None)
        # Even without a wait, the events that have come already are handled before the next decision.
        with contextlib.suppress(queue.Empty):
            timeout = None if until is None else max(0.0, until - now)
            self.handle(self.queue.get(timeout=timeout) if until != 0.0 else self.queue.get_nowait())
        # This process may have been paused during the wait (SIGSTOP, a suspended machine). The lease may have ended
        # meanwhile, so it is checked before the next decision.
        self.session.check_clock()
        with contextlib.suppress(queue.Empty):
            while True:
                self.handle(self.queue.get_nowait())
        if self.member.outage.since is None:
            try:
                self.driver.run(self.member.replica.complete())
            except (StoreUnavailable, StoreBlocked) as error:
                self.member.outage.begin(error, self._clock.monotonic())

    def handle(self, event: Any) -> None:
        """Take note of an `event`. Raises RuntimeError if an own thread has died."""
        match event:
            case Notice() | SessionState() | ProbeResult() | GenerationAnswer():
                self.member.handle(event, self._clock.monotonic())
            case ThreadDied(name=name, error=error):
                raise RuntimeError(f"the thread {name} of this agent has ended: {error!r}") from error
            case _:
                self._side.handle(event)
