"""What every member does, over and over: decide, carry out, wait for events, fold them.

One thread owns all state; everything else (watches, workers, probes, signals) only puts events into its queue. What to
do is decided by `rendezvous.decide`. Whose workers they are differs: an `Agent` has its own, a `Participant` lends its
place to another launcher; both say so in the hooks at the end.
"""

from __future__ import annotations

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from elasticrt.agent.edges import Edges
from elasticrt.agent.outage import Heard, Outage
from elasticrt.errors import EXIT_STORE
from elasticrt.ipc.time_bounds import LOOK_AGAIN_S
from elasticrt.liveness.prober import nobody
from elasticrt.rendezvous.decide import decide
from elasticrt.rendezvous.decision import (
    Adopt,
    Announce,
    Ask,
    Decision,
    Drain,
    End,
    Fence,
    File,
    Finish,
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
    Withdraw,
)
from elasticrt.rendezvous.member_client import MemberClient, Notice
from elasticrt.rendezvous.records import Generation, Seat
from elasticrt.rendezvous.view import Verdict, with_verdict
from elasticrt.store.lease_session import LeaseSession, SessionState
from elasticrt.store.protocol import Lease, LeaseLost, StoreFull, StoreUnavailable

log = logging.getLogger(__name__)

PROBE_S = 2.0

OWN_THREADS = "elasticrt-"
"""All threads of ours are named so. What other libraries' threads die of is theirs."""


@dataclass(frozen=True)
class ThreadDied:
    """A thread of this member has ended with an error that nothing was prepared for: who waits for it waits long."""

    name: str
    error: BaseException


class Cycle(ABC):
    """A member's loop. Used by one thread; only `queue.put` is called from others."""

    me: Me

    def __init__(self, run_id: str, ride_through_s: float, say: Callable[[str], None], edges: Edges) -> None:
        self.edges = edges
        self.clock = edges.clock
        self.queue = edges.queue()
        self.prober = edges.prober(lambda seat, answer, at: self.queue.put((seat, Verdict(answer, at))))
        self.outage = Outage(ride_through_s, say)
        self._run_id = run_id
        self._ride_through_s = ride_through_s
        self.reason = ""
        self._hook = threading.excepthook

    def _watch_threads(self) -> None:
        """From now on a thread of ours that dies ends the member's loop, with its reason."""
        self._hook, threading.excepthook = threading.excepthook, self._thread_died

    def _unwatch_threads(self) -> None:
        if threading.excepthook == self._thread_died:  # Else somebody has put theirs before it, and calls it.
            threading.excepthook = self._hook

    def _thread_died(self, what: threading.ExceptHookArgs) -> None:
        """Called by a thread as the last that it does, whichever it is: none ends in silence."""
        name = what.thread.name if what.thread is not None else ""
        if name.startswith(OWN_THREADS) and what.exc_value is not None:
            log.error("the thread %s has ended: %r", name, what.exc_value)
            self.queue.put(ThreadDied(name, what.exc_value))
        else:
            self._hook(what)

    def take_part(self) -> End | Leave | Halt:
        """Go round until there is nothing more to take part in; why."""
        while True:
            decision = self._decide()
            if isinstance(decision, End | Leave | Halt):
                return decision
            self._absorb(self._do(decision))

    def _decide(self) -> Decision:
        now = self.clock.monotonic()
        if self.outage.since is not None and now >= self.outage.retry_at:
            self._read_again(now)
        # Also a generation that this member has no part in: another store must not publish it a second time.
        if self.rendezvous.view.number > self.me.known:
            self.me = replace(self.me, known=self.rendezvous.view.number)
        self.me = self._describe(self.me, now)
        if self.outage.since is not None and self.me.running:
            others = [seat for seat in self.rendezvous.view.order() if seat.node != self.me.record.node]
            self.outage.listen(self.prober, others, self._run_id, self.queue.put, now)
        if self.outage.since is None:
            decision = decide(self.me, self.rendezvous.view, now)
        elif self.outage.too_long(now):
            decision = Halt(EXIT_STORE, f"etcd has not answered for {self._ride_through_s:g} s")
        else:
            # What is decided on an old view may only concern this node: nothing can be written.
            decision = decide(replace(self.me, lease="suspended"), self.rendezvous.view, now)
        if decision.reason != self.reason:
            log.info("%s: %s", type(decision).__name__, decision.reason)
            self.reason = decision.reason
        return decision

    def _do(self, decision: Decision) -> float | None:
        """Carry out a decision. Returns until when to wait for events: None for ever, 0 not at all."""
        try:
            until = self._carry_out(decision)
        except StoreUnavailable as error:
            self.outage.begin(error, self.clock.monotonic())
            return self.outage.retry_at
        except LeaseLost as error:
            log.warning("etcd has given this node's lease up: %s", error)
            self.me = replace(self.me, lease="lost")
            return 0.0
        except StoreFull as error:
            return self.outage.full(error, self.clock.monotonic())
        self.outage.not_full()
        return until

    def _carry_out(self, decision: Decision) -> float | None:  # noqa: PLR0912  One case per kind of decision.
        match decision:
            case Wait(until=until):
                return self.outage.retry_at if self.outage.since is not None else until
            case Run(generation, seat, _):
                self._run(generation, seat)
            case Rejoin():
                return self._left_out(decision.reason)
            case Register():
                if self.me.lease == "lost":
                    self._new_lease()
                self.me = replace(self.me, lease="connected")
                if not self.rendezvous.register_again(self.me.record, self.lease.lease_id):
                    return self.clock.monotonic() + LOOK_AGAIN_S
            case Announce():
                self.rendezvous.announce(decision, self.me, self.lease.lease_id)
            case Adopt(spec=spec):
                self.me = replace(self.me, spec=spec)
            case Drain():
                self._drain(decision.reason)
            case File():
                if self.rendezvous.file(decision):
                    self.me = replace(self.me, filed=decision.report)
            case Probe():
                # A wrong word about a node costs little where workers go on in place: there, two agree sooner.
                witnesses = self.rendezvous.view.witnesses if self.me.record.has_state else nobody
                self.prober.ask(decision.seats, witnesses)
                return self.clock.monotonic() + PROBE_S
            case Fence():
                self.rendezvous.evict(decision)
            case Publish():
                self._publish(decision)
            case Ask():
                self.rendezvous.ask(decision)
            case Withdraw():
                self.rendezvous.withdraw()
            case Hold() | Go() | ReleaseHold():
                self._hand_over(decision)
            case Finish():
                head = self.rendezvous.view.head
                self.rendezvous.finish(decision, head.record.step if head else 0)
        return 0.0

    def _absorb(self, until: float | None) -> None:
        """Wait for an event (or until a time), fold all that have come, and complete the view."""
        until = min([*self._alarms(), *([until] if until is not None else [])], default=None)
        timeout = None if until is None else max(0.0, until - self.clock.monotonic())
        try:
            event = self.queue.get(timeout=timeout) if until != 0.0 else self.queue.get_nowait()
            # After a pause of this process nothing may be decided before its lease has been judged anew.
            self.session.look()
            while True:
                self._fold(event)
                event = self.queue.get_nowait()
        except queue.Empty:
            pass
        if self.outage.since is None:
            try:
                self.rendezvous.complete()
            except StoreUnavailable as error:
                self.outage.begin(error, self.clock.monotonic())

    def _fold(self, event: Any) -> None:
        match event:
            case Notice():
                self.rendezvous.absorb(event)
            case SessionState():
                self._session_changed(event)
            case (Seat() as seat, Verdict() as verdict):
                self.rendezvous.view = with_verdict(self.rendezvous.view, seat.incarnation, verdict)
            case Heard(generation=generation):
                self.outage.heard(event)
                self.me = replace(self.me, heard=max(self.me.heard, generation))
            case ThreadDied(name=name, error=error):
                raise RuntimeError(f"the thread {name} of this agent has ended: {error!r}") from error
            case _:
                self._fold_own(event)

    def _read_again(self, now: float) -> None:
        try:
            self.rendezvous.refresh()
        except StoreUnavailable as error:
            self.outage.begin(error, self.clock.monotonic())
            return
        self.outage.end(now)

    def _session_changed(self, state: SessionState) -> None:
        if state.lease_id and state.lease_id != self.lease.lease_id:
            return  # About a lease that has been replaced meanwhile.
        self.me = replace(self.me, lease=state.word)
        if state.word != "connected":
            log.warning("lease %s: %s", state.word, state.reason)
            self.outage.doubt(self.clock.monotonic())

    # How the store is reached.

    @property
    @abstractmethod
    def rendezvous(self) -> MemberClient:
        """The member's side of the store."""

    @property
    @abstractmethod
    def session(self) -> LeaseSession:
        """What keeps and judges the lease."""

    @property
    @abstractmethod
    def lease(self) -> Lease:
        """What the member key is bound to."""

    @abstractmethod
    def _new_lease(self) -> None:
        """Get a lease in place of a lost one. Raises StoreUnavailable."""

    # Whose workers they are.

    @abstractmethod
    def _describe(self, me: Me, now: float) -> Me:
        """The member's own state as of now: what its key and its report should say."""

    @abstractmethod
    def _run(self, generation: Generation, seat: Seat) -> None:
        """Start a generation's workers, as soon as those of the one before are gone."""

    @abstractmethod
    def _left_out(self, reason: str) -> float | None:
        """A generation goes on without this life: end its workers, begin another. Returns as `_do` does."""

    @abstractmethod
    def _hand_over(self, decision: Hold | Go | ReleaseHold) -> None:
        """Do this node's part of a handover."""

    @abstractmethod
    def _fold_own(self, event: Any) -> None:
        """Fold an event that no other kind of member has."""

    def _drain(self, reason: str) -> None:
        """Somebody wants this member to hand over and leave: say so to the leader."""
        del reason
        self.me = replace(self.me, record=self.me.record.model_copy(update={"draining": True}))

    def _publish(self, decision: Publish) -> None:
        self.rendezvous.publish(decision)

    def _alarms(self) -> Iterable[float]:
        """When to decide anew even if nothing has happened."""
        return ()
