"""A member whose workers somebody else starts: what a plug-in for another agent needs of a rendezvous.

A thread of its own goes round the same `Cycle` as an agent's. What an agent of ours does with its workers is turned
into words here: a seat in a new generation is a `Turn`, which the other side takes when its workers are gone; coming
back for the next turn without being told to means that they failed.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from dataclasses import dataclass, replace
from typing import Any

from elasticrt.agent.edges import Edges
from elasticrt.agent.event_loop import Cycle
from elasticrt.agent.store_discovery import ride_out
from elasticrt.errors import ElasticError, RendezvousTimeoutError, StoreError
from elasticrt.ipc.failure import Failure
from elasticrt.ipc.time_bounds import LOOK_AGAIN_S
from elasticrt.rendezvous.decision import End, Finish, Go, Halt, Hold, Leave, Me, ReleaseHold
from elasticrt.rendezvous.member_client import Entered, MemberClient
from elasticrt.rendezvous.records import Generation, Keys, Member, Report, Result, Seat
from elasticrt.spec import RunSpec
from elasticrt.store.lease_session import LeaseSession
from elasticrt.store.protocol import ETCD_WAIT_S, KeyValue, Lease, LeaseLost, Store

log = logging.getLogger(__name__)

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


class Participant(Cycle):
    """Takes part in a run, from `open` to `close`; these are for one thread, the other side's."""

    def __init__(
        self, store: Store, run_id: str, spec: RunSpec, *, node: str, address: str, edges: Edges | None = None
    ) -> None:
        edges = edges or Edges()
        super().__init__(run_id, RIDE_THROUGH_S, lambda text: log.warning("%s", text), edges)
        self._store = store
        self._probes = edges.probe_server(address, run_id, lambda: (self.me.record.incarnation, self.me.started))
        self._ports = edges.store_ports()
        self._ports.bind(address)
        record = Member(
            node=node,
            incarnation=self.edges.token(),
            address=address,
            pid=os.getpid(),
            workers=1,  # How many the other side starts is not known here; it counts ranks by itself.
            probe_port=self._probes.port,
            port=self._ports.port,
            warm=True,
        )
        self.me = Me(record=record, spec=spec)
        self._watch_threads()
        self._probes.start()
        self._session = edges.lease_session(store, spec.lease_ttl_s, self.queue.put)
        self._rendezvous = MemberClient(store, Keys(run_id), node, self.queue.put, edges.clock.monotonic, edges.token)
        self._thread: threading.Thread | None = None
        self._left = False
        # What the other side sees; guarded by `_changed`.
        self._changed = threading.Condition()
        self._turn: Turn | None = None
        self._ended = ""
        self._problem: ElasticError | None = None

    # For the other side.

    def open(self, timeout_s: float) -> None:
        """Register, and begin to take part. Raises RendezvousTimeoutError, DuplicateError, StoreError."""
        deadline, wait_s = self.clock.monotonic() + timeout_s, min(timeout_s, ETCD_WAIT_S)
        self._lease = ride_out(self._session.open, wait_s, self.clock)
        while True:
            answer = ride_out(self._enter_once, wait_s, self.clock)
            if isinstance(answer, Entered):
                break
            if self.clock.monotonic() > deadline:
                raise RendezvousTimeoutError(f"run {self._run_id} could not be joined within {timeout_s:g} s")
            self.clock.sleep(LOOK_AGAIN_S)
        ride_out(self.rendezvous.refresh, wait_s, self.clock)
        number = self.rendezvous.view.number
        record = self.me.record.model_copy(update={"seen": number})
        self.me = replace(self.me, attempt=answer.attempt, spec=answer.spec, known=number, record=record)
        self._thread = threading.Thread(target=self._work, name="elasticrt-participant", daemon=True)
        self._thread.start()

    def take(self, *, after: int) -> Turn | None:
        """Wait for a seat in a later generation than `after`, whose workers are gone. None: the run is over.

        Waits as long as the run does: its leader ends it after the join timeout, a lost etcd ends the waiting after a
        quarter of an hour. Raises what has made taking part impossible.
        """
        self.queue.put(_Back(after))
        with self._changed:
            self._changed.wait_for(lambda: self._problem or self._ended or self._has(after))
            if self._problem is not None:
                raise self._problem
            if self._turn is None or not self._has(after):
                return None
            self.queue.put(_Taken(self._turn.generation.number))
            return self._turn

    def has(self, *, after: int) -> bool:
        """Whether the workers of generation `after` must go: there is a later one, with or without a seat, or this
        member cannot take part any more, as `take` then says."""
        with self._changed:
            return self._left or self._problem is not None or self._has(after)

    @property
    def ended(self) -> str:
        """Why the run is over, or ""."""
        with self._changed:
            return self._ended

    def close(self, *, run_too: bool) -> None:
        """Leave, telling the others; with `run_too` end the run for everybody."""
        if self._thread is not None:
            self.queue.put(_Going(run_too))
            self._thread.join(CLOSE_S)
        self.prober.close()
        self._probes.close()
        self.rendezvous.close()
        self._session.close(revoke=True, timeout_s=CLOSE_S)
        self._ports.close()
        self._store.close()
        self._unwatch_threads()

    def _has(self, after: int) -> bool:
        return self._turn is not None and self._turn.generation.number > after

    def _enter_once(self) -> Entered | Result | KeyValue | None:
        try:
            return self.rendezvous.enter(self.me.spec, self.me.record, self._lease.lease_id, again=True)
        except LeaseLost as error:
            log.warning("%s; registering with another one", error)
            self._new_lease()
            return None

    # The thread.

    def _work(self) -> None:
        try:
            self._end(self.take_part())
        except ElasticError as error:
            self._fail(error)
        except Exception as error:
            log.debug("the thread that takes part has ended", exc_info=True)
            self._fail(StoreError(f"this node cannot take part any more: {error!r}"))

    def _fail(self, problem: ElasticError) -> None:
        """Whoever waits for this thread must not wait any longer: neither the other side nor the other nodes."""
        log.warning("this node leaves the run: %s", problem)
        with self._changed:
            self._problem = problem
            self._changed.notify_all()
        self._say_goodbye(left=True)
        self._session.close(revoke=True, timeout_s=CLOSE_S)

    @property
    def rendezvous(self) -> MemberClient:
        """The member's side of the store."""
        return self._rendezvous

    @property
    def session(self) -> LeaseSession:
        """What keeps and judges the lease."""
        return self._session

    @property
    def lease(self) -> Lease:
        """What the member key is bound to."""
        return self._lease

    def _new_lease(self) -> None:
        self._lease = self._session.reopen()

    def _describe(self, me: Me, now: float) -> Me:
        del now  # Nothing here is a matter of time: events say all that is known of the other side.
        if me.record.port == self._ports.port:
            return me
        return replace(me, record=me.record.model_copy(update={"port": self._ports.port}))

    def _left_out(self, reason: str) -> None:
        log.info("this node comes back as a new member: %s", reason)
        with self._changed:
            self._left = True
            self._changed.notify_all()
        # `_Back` comes when the workers are gone.

    def _hand_over(self, decision: Hold | Go | ReleaseHold) -> None:
        match decision:
            case Hold(handover=handover):
                # Workers that we know nothing of cannot hold: "let in up to step 0" says so.
                self.me = replace(self.me, holding=handover, report=self._report("holding", handover=handover))
            case Go(step=step):
                self.me = replace(self.me, going=step)
            case ReleaseHold():
                self.me = replace(self.me, holding=0, going=0, report=None)

    def _fold_own(self, event: Any) -> None:
        match event:
            case _Taken(generation=generation):
                self.me = replace(self.me, running=generation, record=_running(self.me.record, generation))
            case _Back(generation=generation):
                self._back(generation)
            case _Going(close=close):
                if close:
                    self._finish_run()
                self.me = replace(self.me, leaving="told to leave")

    def _run(self, generation: Generation, seat: Seat) -> None:
        number = generation.number
        listen = self._ports.take(generation.master_port, shared=True) if seat.index == 0 else None
        if listen is not None:
            self._ports.bind(self._ports.address)
        record = self.me.record.model_copy(update={"seen": max(self.me.record.seen, number)})
        self.me = replace(self.me, record=record, started=number, report=None, failed_at=None, holding=0, going=0)
        with self._changed:
            self._turn, self._left = Turn(generation, seat, listen), False
            self._changed.notify_all()

    def _back(self, generation: int) -> None:
        """The workers of a generation have ended. If it still is the current one, they failed."""
        self.me = replace(self.me, running=0, record=_running(self.me.record, 0))
        if self._left:
            # Whatever this node was, it comes back as a newcomer.
            record = self.me.record.model_copy(update={"incarnation": self.edges.token()})
            self.me = replace(self.me, record=record, report=None, filed=None, failed_at=None)
        if self._left or generation == 0 or generation != self.me.started:
            return
        summary = f"workers on {self.me.record.node} ended or could not start"
        failure = Failure(rank=0, code=1, collateral=False, summary=summary)
        self.me = replace(self.me, report=self._report("failed", failure=failure), failed_at=self.clock.monotonic())

    def _report(self, status: Any, **more: Any) -> Report:
        record = self.me.record
        where: dict[str, Any] = {"node": record.node, "incarnation": record.incarnation}
        return Report(generation=self.me.started, status=status, **where, **more)

    def _finish_run(self) -> None:
        view = self.rendezvous.view
        if view.spec is None or view.result is not None:
            return
        try:
            self.rendezvous.finish(Finish("succeeded", 0, f"closed by {self.me.record.node}"), 0)
        except StoreError as error:
            log.warning("the run could not be closed: %s", error)

    def _end(self, decision: End | Leave | Halt) -> None:
        self._say_goodbye(left=isinstance(decision, Leave))
        with self._changed:
            self._ended = decision.reason
            if isinstance(decision, Halt):
                self._problem = StoreError(decision.reason)
            self._changed.notify_all()

    def _say_goodbye(self, *, left: bool) -> None:
        """Take the member key out; with `left` a present seat is given up, so that the others need not ask for it."""
        view, record = self.rendezvous.view, self.me.record
        seated = view.seat_of(record.node, record.incarnation) is not None and self.me.started == view.number
        try:
            self.rendezvous.leave(self._report("left") if left and seated else None)
        except StoreError as error:
            log.warning("etcd could not be told: %s; the lease will tell the others", error)


def _running(record: Member, generation: int) -> Member:
    return record.model_copy(update={"generation": generation})
