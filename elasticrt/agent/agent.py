"""One node's agent, from its options to its exit code.

The loop is on one screen: decide, do, wait for the next events, fold them. One thread owns all state; everything else
(watches, the worker parent, workers, probes, signals) only puts events into its queue. What to do is decided by
`rendezvous.decide`; how the workers are started and stopped is in `agent.node`, how the store is reached in
`agent.membership`.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import signal
import time
from dataclasses import replace
from typing import Any

from elasticrt.agent.commit import Errand
from elasticrt.agent.group import GroupEnded, WorkerEnded, WorkerSaid, WorkerStarted
from elasticrt.agent.meeting import own_address
from elasticrt.agent.membership import LOOK_AGAIN_S, Membership
from elasticrt.agent.node import Node
from elasticrt.agent.outage import Heard, Outage
from elasticrt.agent.policy import halted
from elasticrt.agent.probe import Prober, ProbeServer
from elasticrt.agent.settings import Settings
from elasticrt.agent.voice import Voice
from elasticrt.agent.warm import ParentLost
from elasticrt.contract.messages import BuildFailed, Claim, Published, Save, Warm
from elasticrt.errors import EXIT_BUG, EXIT_OK, EXIT_STORE, EXIT_TERMINATED, ElasticError, StoreError
from elasticrt.rendezvous.decide import decide
from elasticrt.rendezvous.decision import (
    Announce,
    Ask,
    Decision,
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
    Release,
    Run,
    Wait,
    Withdraw,
)
from elasticrt.rendezvous.handler import Notice, Rendezvous
from elasticrt.rendezvous.records import HeadRecord, Member, Report, Result, Seat
from elasticrt.rendezvous.view import Verdict, with_verdict
from elasticrt.spec import RunSpec
from elasticrt.store.protocol import LeaseLost, StoreFull, StoreUnavailable
from elasticrt.store.session import SessionState

log = logging.getLogger(__name__)

KILLED_S = 5.0
"""SIGKILL takes milliseconds; a process that is stuck in the kernel is not waited for longer than this."""

PROBE_S = 2.0
END_GRACE_S = 5.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Agent:
    """An agent. `run` is its life."""

    def __init__(self, settings: Settings, spec: RunSpec) -> None:
        self.settings = settings
        self.queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.voice = Voice(settings)
        self.node = Node(settings, self.queue.put, self.voice.events, self.voice.say)
        self.prober = Prober(lambda seat, answer, at: self.queue.put((seat, Verdict(answer, at))))
        self.membership: Membership
        self.probes: ProbeServer | None = None
        self.spec = spec
        self.me: Me
        self.outage = Outage(settings.ride_through_s, self.voice.say)
        self.drain_until: float | None = None
        self.hurry = False
        self.reason = ""

    def run(self) -> int:
        """Take part in the run until it ends, or until this agent is told to leave; the exit code."""
        for number in SIGNALS:
            signal.signal(number, lambda number, _frame: self.queue.put(signal.Signals(number)))
        code = EXIT_BUG
        try:
            self.node.open()  # First of all, because importing torch takes longest.
            code = self._take_part()
        except ElasticError as error:
            code = error.exit_code
            raise
        finally:
            self.node.close()
            self.voice.events.write("agent_stopped", code=code)
            self.voice.events.close()
        return code

    def _take_part(self) -> int:
        self.membership = Membership(self.settings, self.queue)
        try:
            return self._loop() if self._join() else EXIT_OK
        finally:
            self.prober.close()
            if self.probes is not None:
                self.probes.close()
            self.membership.close()

    def _loop(self) -> int:
        while True:
            decision = self._decide()
            if isinstance(decision, End | Leave | Halt):
                return self._end(decision)
            until = self._do(decision)
            self._absorb(until)

    def _decide(self) -> Decision:
        now = time.monotonic()
        if self.outage.since is not None and now >= self.outage.retry_at:
            self._read_again(now)
        self.me = self.node.describe(self.me)
        if self.drain_until is not None and now >= self.drain_until:
            self.drain_until = None
            self.me = replace(self.me, leaving=f"not handed over within {self.settings.drain_timeout_s:g} s")
        if self.outage.since is not None and self.me.running:
            others = [seat for seat in self.rendezvous.view.order() if seat.node != self.me.record.node]
            self.outage.listen(self.prober, others, self.settings.run_id, self.queue.put)
        if self.outage.since is None:
            decision = decide(self.me, self.rendezvous.view, now)
        elif self.outage.too_long(now):
            decision = Halt(EXIT_STORE, f"etcd has not answered for {self.settings.ride_through_s:g} s")
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
            self.outage.begin(error)
            return self.outage.retry_at
        except LeaseLost as error:
            log.warning("etcd has given this node's lease up: %s", error)
            self.me = replace(self.me, lease="lost")
            return 0.0
        except StoreFull as error:
            return self.outage.full(error)
        self.outage.not_full()
        return until

    def _carry_out(self, decision: Decision) -> float | None:  # noqa: PLR0912  One case per kind of decision.
        match decision:
            case Wait(until=until):
                return self.outage.retry_at if self.outage.since is not None else until
            case Run(generation, seat, _):
                self.me = replace(self.me, known=generation.number)
                self.node.run(generation, seat, tuple(seat.node for seat in self.rendezvous.view.order()))
            case Rejoin():
                self._new_life(decision.reason)
            case Register():
                lease_id = self.membership.lease_id(self.me)
                self.me = replace(self.me, lease="connected")
                if not self.rendezvous.register_again(self.me.record, lease_id):
                    return time.monotonic() + LOOK_AGAIN_S
            case Announce():
                self.rendezvous.announce(decision, self.me, self.membership.lease_id(self.me))
            case File():
                if self.rendezvous.file(decision):
                    self.me = replace(self.me, filed=decision.report)
            case Probe():
                self.prober.ask(decision.seats)
                return time.monotonic() + PROBE_S
            case Fence():
                self.rendezvous.evict(decision)
            case Publish():
                self._publish(decision)
            case Ask():
                self.rendezvous.ask(decision)
            case Withdraw():
                self.rendezvous.withdraw()
            case Hold(handover, _):
                self.node.hold(handover)
            case Go(step, save, _):
                self.node.go(step, save=save)
            case Release():
                self.node.release()
            case Finish():
                head = self.rendezvous.view.head
                self.rendezvous.finish(decision, head.record.step if head else 0)
        return 0.0

    def _absorb(self, until: float | None) -> None:
        """Wait for an event (or until a time), fold all that have come, and complete the view."""
        own = [at for at in (self.node.kill_late(time.monotonic()), self.drain_until, until) if at is not None]
        until = min(own, default=None)
        timeout = None if until is None else max(0.0, until - time.monotonic())
        try:
            event = self.queue.get(timeout=timeout) if until != 0.0 else self.queue.get_nowait()
            # After a pause of this process nothing may be decided before its lease has been judged anew.
            self.membership.session.look()
            while True:
                self._fold(event)
                event = self.queue.get_nowait()
        except queue.Empty:
            pass
        if self.outage.since is None:
            try:
                self.rendezvous.complete()
            except StoreUnavailable as error:
                self.outage.begin(error)

    def _fold(self, event: Any) -> None:
        match event:
            case Notice():
                self.rendezvous.absorb(event)
            case SessionState():
                self._session_changed(event)
            case (Seat() as seat, Verdict() as verdict):
                self.rendezvous.view = with_verdict(self.rendezvous.view, seat.incarnation, verdict)
            case Heard(generation=generation):
                self.me = replace(self.me, heard=max(self.me.heard, generation))
            case signal.Signals():
                self._signalled(event)
            case WorkerSaid(message=Save() | Claim() | Published() | BuildFailed()):
                self._send_errand(event)
            case HeadRecord():
                self.voice.events.write("committed", step=event.step, generation=event.generation)
            case Warm() | ParentLost() | WorkerStarted() | WorkerSaid() | WorkerEnded() | GroupEnded():
                self.node.fold(event)

    @property
    def rendezvous(self) -> Rendezvous:
        """The member's side of the store."""
        return self.membership.rendezvous

    # Coming.

    def _join(self) -> bool:
        """Become a member and say how others can. False when the run has succeeded already."""
        settings, endpoints = self.settings, self.membership.meeting.endpoints
        address = own_address(settings, endpoints)
        self.probes = ProbeServer(address, settings.run_id, lambda: (self.me.record.incarnation, self.me.started))
        self.node.ports.bind(address)
        member = Member(
            node=settings.node,
            incarnation=secrets.token_hex(8),
            address=address,
            pid=os.getpid(),
            workers=settings.workers,
            probe_port=self.probes.port,
            port=self.node.ports.port,
        )
        self.me = Me(record=member, spec=self.spec)
        joined = self.membership.open(self.me)
        if isinstance(joined, Result):
            self.voice.nothing_to_do(joined)
            return False
        self.me = joined
        self.voice.joined(joined, self.membership.meeting)
        return True

    def _new_life(self, reason: str) -> None:
        """Left out or fenced: the workers go first, then whatever this node was, it is a newcomer."""
        self._kill_workers()
        self.voice.say(f"this node comes back as a new member: {reason}")
        record = self.me.record.model_copy(update={"incarnation": secrets.token_hex(8), "generation": 0})
        self.me = replace(self.me, record=record, report=None, filed=None, failed_at=None)
        self.rendezvous.leave(None)

    def _kill_workers(self) -> None:
        """End the workers and see them gone: nothing of theirs may come after what this agent writes next."""
        self.node.kill()
        deadline = time.monotonic() + KILLED_S
        while self.node.describe(self.me).running and (left := deadline - time.monotonic()) > 0:
            try:
                self._fold(self.queue.get(timeout=left))
            except queue.Empty:
                log.warning("workers that were killed are still there after %g s", KILLED_S)

    # Trouble with etcd.

    def _read_again(self, now: float) -> None:
        try:
            if self.membership.embedded_died():
                self._start_over()
            self.rendezvous.refresh()
        except StoreUnavailable as error:
            self.outage.begin(error)
            return
        self.outage.end(now)

    def _start_over(self) -> None:
        """This machine's own etcd has died. It is not durable: a fresh one, and the newest checkpoint on disk."""
        self.voice.say(
            "this machine's etcd has died; starting a fresh one, workers start again from the newest checkpoint"
        )
        self.node.kill()
        joined = self.membership.open_fresh(self.me)
        if isinstance(joined, Me):
            self.me = joined

    def _session_changed(self, state: SessionState) -> None:
        if state.lease_id and state.lease_id != self.membership.lease.lease_id:
            return  # About a lease that has been replaced meanwhile.
        self.me = replace(self.me, lease=state.word)
        if state.word != "connected":
            log.warning("lease %s: %s", state.word, state.reason)
            self.outage.doubt()

    # Leading and serving.

    def _publish(self, decision: Publish) -> None:
        before = {seat.node: seat.incarnation for seat in self.rendezvous.view.order()}
        if self.rendezvous.publish(decision):
            self.voice.published(decision, before)

    def _send_errand(self, said: WorkerSaid) -> None:
        view, request = self.rendezvous.view, said.message
        assert isinstance(request, Save | Claim | Published | BuildFailed)
        # The revision is that of the worker's own generation. If another is current, no transaction can pass.
        current = view.generation is not None and view.number == said.generation
        self.membership.courier.send(
            Errand(
                request=request,
                generation=said.generation,
                generation_mod=view.generation.mod_revision if view.generation and current else -1,
                attempt=self.me.attempt,
                node=self.me.record.node,
                incarnation=self.me.record.incarnation,
                lease=self.membership.lease.lease_id,
                answer=lambda reply: self.node.reply(said, reply),
            )
        )

    # Going.

    def _end(self, decision: End | Leave | Halt) -> int:
        match decision:
            case End(result=result):
                self.node.finish(END_GRACE_S)
                self.voice.ended(result, leads=self.rendezvous.view.leads)
                self.membership.leave()
                return result.code
            case Leave():
                self.voice.say(f"leaving: {decision.reason}")
                try:
                    self.rendezvous.leave(self._farewell())
                except StoreError as error:
                    log.warning("etcd could not be told: %s; the lease will tell the others", error)
                self.node.stop(self.settings.stop_timeout_s, self._impatient)
                return EXIT_TERMINATED
            case Halt():
                self.node.kill()
                self.membership.leave()
                raise halted(decision, self.settings.run_id)

    def _signalled(self, number: signal.Signals) -> None:
        """Told to leave: hand over first if the workers can, but not for ever; a second signal ends the patience."""
        reason = f"{number.name} received"
        draining = self.me.record.draining
        self.hurry = self.hurry or draining or bool(self.me.leaving)
        if draining or self.me.leaving or self.outage.since is not None or not self.node.can_hand_over():
            self.me = replace(self.me, leaving=self.me.leaving or reason)
            return
        self.voice.say(f"{reason}: handing over")
        self.drain_until = time.monotonic() + self.settings.drain_timeout_s
        self.me = replace(self.me, record=self.me.record.model_copy(update={"draining": True}))

    def _farewell(self) -> Report | None:
        view, record = self.rendezvous.view, self.me.record
        if view.seat_of(record.node, record.incarnation) is None:
            return None
        return Report(generation=view.number, node=record.node, incarnation=record.incarnation, status="left")

    def _impatient(self) -> bool:
        """Fold the ends of workers; whether a second signal has come."""
        while not self.queue.empty():
            event = self.queue.get_nowait()
            self.hurry = self.hurry or isinstance(event, signal.Signals)
            if isinstance(event, WorkerEnded | GroupEnded):
                self.node.fold(event)
        return self.hurry
