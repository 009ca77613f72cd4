"""A member whose workers somebody else starts: what a plug-in for another agent needs of a rendezvous.

A thread of its own decides and does what `Agent` decides and does, with the same decisions, session and probes. What an
agent of ours does with its workers is turned into words here: a seat in a new generation is a `Turn`, which the other
side takes when its workers are gone; coming back for the next turn without being told to means that they failed.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import socket
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

from elasticrt.agent.outage import Heard, Outage
from elasticrt.agent.probe import Prober, ProbeServer
from elasticrt.errors import ElasticError, RendezvousTimeoutError, StoreError
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
from elasticrt.rendezvous.handler import Entered, Notice, Rendezvous
from elasticrt.rendezvous.records import FailureRecord, Generation, Keys, Member, Report, Seat
from elasticrt.rendezvous.view import Verdict, with_verdict
from elasticrt.spec import RunSpec
from elasticrt.store.protocol import LeaseLost, Store, StoreFull, StoreUnavailable
from elasticrt.store.session import Session, SessionState

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.1
PROBE_S = 2.0
CLOSE_S = 3.0
RIDE_THROUGH_S = 900.0


@dataclass(frozen=True)
class Turn:
    """A seat in a generation. `listen`: of the seat with index 0, the listening socket behind the master port."""

    generation: Generation
    seat: Seat
    listen: socket.socket | None


@dataclass(frozen=True)
class _Back:
    """The other side has no workers of this generation any more, and waits for the next."""

    generation: int


@dataclass(frozen=True)
class _Taken:
    """The other side is starting workers of this generation."""

    generation: int


@dataclass(frozen=True)
class _Going:
    """The other side leaves; with `close` the run is over for everybody."""

    close: bool


class Participant:
    """Takes part in a run, from `open` to `close`. All methods are for one thread, the other side's."""

    def __init__(self, store: Store, run_id: str, spec: RunSpec, *, node: str, address: str) -> None:
        self._store = store
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._prober = Prober(lambda seat, answer, at: self._queue.put((seat, Verdict(answer, at))))
        self._probes = ProbeServer(address, run_id, lambda: (self._me.record.incarnation, self._me.started))
        self._sockets: dict[int, socket.socket] = {}
        self._address = address
        self._run_id = run_id
        record = Member(
            node=node,
            incarnation=secrets.token_hex(8),
            address=address,
            pid=os.getpid(),
            workers=1,  # How many the other side starts is not known here; it counts ranks by itself.
            probe_port=self._probes.port,
            port=self._bind(),
            warm=True,
        )
        self._me = Me(record=record, spec=spec)
        self._session = Session(store, spec.lease_ttl_s, self._queue.put)
        self._rendezvous = Rendezvous(store, Keys(run_id), node, self._queue.put)
        self._outage = Outage(RIDE_THROUGH_S, lambda text: log.warning("%s", text))
        self._thread: threading.Thread | None = None
        self._reason = ""
        self._left_out = False
        # What the other side sees; guarded by `_changed`.
        self._changed = threading.Condition()
        self._turn: Turn | None = None
        self._ended = ""
        self._problem: ElasticError | None = None

    # For the other side.

    def open(self, timeout_s: float) -> None:
        """Register, and begin to take part. Raises RendezvousTimeoutError, DuplicateError, StoreError."""
        self._lease = self._session.open()
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                answer = self._rendezvous.enter(self._me.spec, self._me.record, self._lease.lease_id, again=True)
            except StoreUnavailable as error:
                log.warning("etcd does not answer: %s", error)
                answer = None
            if isinstance(answer, Entered):
                break
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(f"run {self._run_id} could not be joined within {timeout_s:g} s")
            time.sleep(LOOK_AGAIN_S)
        self._rendezvous.refresh()
        number = self._rendezvous.view.number
        record = self._me.record.model_copy(update={"seen": number})
        self._me = replace(self._me, attempt=answer.attempt, known=number, record=record)
        self._thread = threading.Thread(target=self._work, name="elasticrt-participant", daemon=True)
        self._thread.start()

    def take(self, *, after: int) -> Turn | None:
        """Wait for a seat in a later generation than `after`, whose workers are gone. None: the run is over.

        Waits as long as the run does: its leader ends it after the join timeout, a lost etcd ends the waiting after a
        quarter of an hour. Raises what has made taking part impossible.
        """
        self._queue.put(_Back(after))
        with self._changed:
            self._changed.wait_for(lambda: self._problem or self._ended or self._has(after))
            if self._problem is not None:
                raise self._problem
            if self._turn is None or not self._has(after):
                return None
            self._queue.put(_Taken(self._turn.generation.number))
            return self._turn

    def has(self, *, after: int) -> bool:
        """Whether the workers of generation `after` must go, because there is a later one, with or without a seat."""
        with self._changed:
            return self._left_out or self._has(after)

    @property
    def ended(self) -> str:
        """Why the run is over, or ""."""
        with self._changed:
            return self._ended

    def close(self, *, run_too: bool) -> None:
        """Leave, telling the others; with `run_too` end the run for everybody."""
        if self._thread is not None:
            self._queue.put(_Going(run_too))
            self._thread.join(CLOSE_S)
        self._prober.close()
        self._probes.close()
        self._rendezvous.close()
        self._session.close(revoke=True, timeout_s=CLOSE_S)
        for bound in self._sockets.values():
            bound.close()
        self._store.close()

    def _has(self, after: int) -> bool:
        return self._turn is not None and self._turn.generation.number > after

    # The thread. It is `Agent._loop`, without workers.

    def _work(self) -> None:
        try:
            while True:
                decision = self._decide()
                if isinstance(decision, End | Leave | Halt):
                    self._end(decision)
                    return
                self._absorb(self._do(decision))
        except ElasticError as error:
            log.warning("this node cannot take part any more: %s", error)
            self._fail(error)
        except BaseException:
            self._fail(StoreError("the thread that takes part in the run has failed; its traceback says why"))
            raise

    def _fail(self, problem: ElasticError) -> None:
        with self._changed:
            self._problem = problem
            self._changed.notify_all()

    def _decide(self) -> Decision:
        now = time.monotonic()
        if self._outage.since is not None and now >= self._outage.retry_at:
            try:
                self._rendezvous.refresh()
                self._outage.end(now)
            except StoreUnavailable as error:
                self._outage.begin(error)
        me = self._me
        if self._outage.since is not None:
            if self._outage.too_long(now):
                raise StoreError(f"etcd has not answered for {RIDE_THROUGH_S:g} s ({', '.join(self._store.endpoints)})")
            others = [seat for seat in self._rendezvous.view.order() if seat.node != me.record.node]
            self._outage.listen(self._prober, others, self._run_id, self._queue.put)
            me = replace(me, lease="suspended")
        decision = decide(me, self._rendezvous.view, now)
        if decision.reason != self._reason:
            log.info("%s: %s", type(decision).__name__, decision.reason)
            self._reason = decision.reason
        return decision

    def _do(self, decision: Decision) -> float | None:
        """Carry out a decision. Returns until when to wait for events: None for ever, 0 not at all."""
        try:
            until = self._carry_out(decision)
        except StoreUnavailable as error:
            self._outage.begin(error)
            return self._outage.retry_at
        except LeaseLost:
            self._me = replace(self._me, lease="lost")
            return 0.0
        except StoreFull as error:
            return self._outage.full(error)
        self._outage.not_full()
        return until

    def _carry_out(self, decision: Decision) -> float | None:  # noqa: PLR0912  One line for each kind of decision.
        rendezvous, me = self._rendezvous, self._me
        match decision:
            case Wait(until=until):
                return self._outage.retry_at if self._outage.since is not None else until
            case Run(generation, seat, _):
                self._offer(generation, seat)
            case Rejoin():
                with self._changed:
                    self._left_out = True
                    self._changed.notify_all()
                return None  # `_Back` comes when the workers are gone.
            case Register():
                if me.lease == "lost":
                    self._lease = self._session.reopen()
                self._me = replace(me, lease="connected")
                if not rendezvous.register_again(me.record, self._lease.lease_id):
                    return time.monotonic() + LOOK_AGAIN_S
            case Announce():
                rendezvous.announce(decision, me, self._lease.lease_id)
            case File(report=report):
                if rendezvous.file(decision):
                    self._me = replace(me, filed=report)
            case Probe(seats=seats):
                self._prober.ask(seats)
                return time.monotonic() + PROBE_S
            case Fence():
                rendezvous.evict(decision)
            case Publish():
                if rendezvous.publish(decision):
                    log.info("%s", decision.reason)
            case Finish():
                rendezvous.finish(decision, 0)
            case Ask():
                rendezvous.ask(decision)
            case Withdraw():
                rendezvous.withdraw()
            case Hold(handover=handover):
                # Workers that we know nothing of cannot hold: "let in up to step 0" says so.
                self._me = replace(me, holding=handover, report=self._report("holding", handover=handover))
            case Go(step=step):
                self._me = replace(me, going=step)
            case Release():
                self._me = replace(me, holding=0, going=0, report=None)
        return 0.0

    def _absorb(self, until: float | None) -> None:
        timeout = None if until is None else max(0.0, until - time.monotonic())
        try:
            event = self._queue.get(timeout=timeout) if until != 0.0 else self._queue.get_nowait()
            self._session.look()
            while True:
                self._fold(event)
                event = self._queue.get_nowait()
        except queue.Empty:
            pass
        if self._outage.since is None:
            try:
                self._rendezvous.complete()
            except StoreUnavailable as error:
                self._outage.begin(error)

    def _fold(self, event: Any) -> None:
        me = self._me
        match event:
            case Notice():
                self._rendezvous.absorb(event)
            case SessionState():
                if not event.lease_id or event.lease_id == self._lease.lease_id:
                    self._me = replace(me, lease=event.word)
                    if event.word != "connected":
                        self._outage.doubt()
            case (Seat() as seat, Verdict() as verdict):
                self._rendezvous.view = with_verdict(self._rendezvous.view, seat.incarnation, verdict)
            case Heard(generation=generation):
                self._me = replace(me, heard=max(me.heard, generation))
            case _Taken(generation=generation):
                self._me = replace(me, running=generation, record=_running(me.record, generation))
            case _Back(generation=generation):
                self._back(generation)
            case _Going(close=close):
                if close:
                    self._finish_run()
                self._me = replace(self._me, leaving="told to leave")

    def _offer(self, generation: Generation, seat: Seat) -> None:
        number, held = generation.number, self._sockets.get(generation.master_port)
        listen = held.dup() if seat.index == 0 and held is not None else None
        record = self._me.record.model_copy(update={"seen": max(self._me.record.seen, number)})
        if listen is not None:
            record = record.model_copy(update={"port": self._bind()})
        self._me = replace(
            self._me, record=record, known=number, started=number, report=None, failed_at=None, holding=0, going=0
        )
        with self._changed:
            self._turn, self._left_out = Turn(generation, seat, listen), False
            self._changed.notify_all()

    def _back(self, generation: int) -> None:
        """The workers of a generation have ended. If it still is the current one, they failed."""
        self._me = replace(self._me, running=0, record=_running(self._me.record, 0))
        if self._left_out:
            # Whatever this node was, it comes back as a newcomer.
            record = self._me.record.model_copy(update={"incarnation": secrets.token_hex(8)})
            self._me = replace(self._me, record=record, report=None, filed=None, failed_at=None)
        if self._left_out or generation == 0 or generation != self._me.started:
            return
        summary = f"workers on {self._me.record.node} ended or could not start"
        failure = FailureRecord(rank=0, code=1, collateral=False, summary=summary)
        self._me = replace(self._me, report=self._report("failed", failure=failure), failed_at=time.monotonic())

    def _report(self, status: Any, **more: Any) -> Report:
        record = self._me.record
        where: dict[str, Any] = {"node": record.node, "incarnation": record.incarnation}
        return Report(generation=self._me.started, status=status, **where, **more)

    def _finish_run(self) -> None:
        view = self._rendezvous.view
        if view.spec is None or view.result is not None:
            return
        try:
            self._rendezvous.finish(Finish("succeeded", 0, f"closed by {self._me.record.node}"), 0)
        except StoreError as error:
            log.warning("the run could not be closed: %s", error)

    def _end(self, decision: End | Leave | Halt) -> None:
        view, record = self._rendezvous.view, self._me.record
        seated = isinstance(decision, Leave) and view.seat_of(record.node, record.incarnation) is not None
        try:
            self._rendezvous.leave(self._report("left") if seated and self._me.started == view.number else None)
        except StoreError as error:
            log.warning("etcd could not be told: %s; the lease will tell the others", error)
        with self._changed:
            self._ended = decision.reason
            if isinstance(decision, Halt):
                self._problem = StoreError(decision.reason)
            self._changed.notify_all()

    def _bind(self) -> int:
        """Hold one more port, for the next generation's store; keep the last one, which a leader may still read."""
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        bound = socket.create_server((self._address, 0), family=family, backlog=1024)
        for port in list(self._sockets)[:-1]:
            self._sockets.pop(port).close()
        port = int(bound.getsockname()[1])
        self._sockets[port] = bound
        return port


def _running(record: Member, generation: int) -> Member:
    return record.model_copy(update={"generation": generation})
