"""A member of a run whose workers another program starts: torchrun's agent.

It runs the event loop of `elasticrt run` on a thread of its own. Where elasticrt's agent would start workers, the
member offers a `Turn`: a seat in a generation. torchrun's agent takes the turn when its old workers have ended. If it
asks for the next turn while the generation still is current, its workers failed.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from elasticrt.agent.edges import Edges
from elasticrt.agent.event_loop import EventLoop, WorkerSide
from elasticrt.agent.store_driver import StoreDriver
from elasticrt.errors import ElasticError, RendezvousTimeoutError, StoreError
from elasticrt.ipc.failure import Failure
from elasticrt.rendezvous.decision import End, Finish, Go, Halt, Hold, Leave, Me, ReleaseHold
from elasticrt.rendezvous.member import JoinOptions, Member
from elasticrt.rendezvous.records import Generation, Report, Seat
from elasticrt.rendezvous.records import Member as MemberRecord
from elasticrt.spec import RunSpec
from elasticrt.store.protocol import ETCD_WAIT_S, Store

log = logging.getLogger(__name__)

CLOSE_S = 3.0
"""Seconds that closing waits for the thread, and for the end of the lease."""


@dataclass(frozen=True)
class Turn:
    """A seat in a generation.

    Attributes:
        generation: the generation.
        seat: this member's seat there.
        listen: the listening socket behind the master port, for the seat with index 0; else None.
    """

    generation: Generation
    seat: Seat
    listen: socket.socket | None


class Participant(WorkerSide):
    """Takes part in a run, from `open` to `close`. It is the `WorkerSide` of its own event loop.

    One thread may call the public methods: that of torchrun's agent.

    Args:
        store: the store in which the members agree. `close` closes it.
        run_id: the run.
        spec: the options that all members must agree on.
        node: this member's name.
        address: the IP address at which the other nodes reach this machine.
        edges: everything else that the member touches; None: this machine's.

    Raises ConfigError if the address is not this machine's.
    """

    def __init__(
        self, store: Store, run_id: str, spec: RunSpec, *, node: str, address: str, edges: Edges | None = None
    ) -> None:
        edges = edges or Edges()
        self.member: Member
        self._run_id = run_id
        self._store = store
        self._clock = edges.clock
        self._ports = edges.store_ports()
        self._ports.bind(address)
        self.loop = EventLoop(run_id, self, edges)
        self._probes = edges.probe_server(
            self.loop.prober, address, run_id, lambda: (self._record.incarnation, self.member.me.started_generation)
        )
        record = MemberRecord(
            node=node,
            incarnation=edges.token(),
            address=address,
            pid=os.getpid(),
            # torchrun does not say how many workers it starts, and counts ranks by itself.
            workers=1,
            probe_port=self._probes.port,
            port=self._ports.port,
            warm=True,
        )
        self.member = Member(
            Me(record=record, spec=spec),
            run_id,
            token=edges.token,
            say=log.warning,
            note=log.warning,
        )
        self._session = edges.lease_session(store, spec.lease_ttl_s, self.loop.queue.put)
        driver = StoreDriver(store, self.loop.queue.put, edges.clock, grant=self._session.grant, probe=edges.probe)
        self.loop.begin(self.member, driver, self._session)
        self.loop.watch_threads()
        self._probes.start()
        self._thread: threading.Thread | None = None
        self._is_left_out = False
        # The attributes that torchrun's agent sees, guarded by `_changed`.
        self._changed = threading.Condition()
        self._turn: Turn | None = None
        self._end_reason = ""
        self._problem: ElasticError | None = None

    # Called by torchrun's agent.

    def open(self, timeout_s: float) -> None:
        """Register, within `timeout_s` seconds, and begin to take part.

        Raises RendezvousTimeoutError, DuplicateError, StoreError.
        """
        too_late = RendezvousTimeoutError(f"run {self._run_id} could not be joined within {timeout_s:g} s")
        how = JoinOptions(timeout_s, min(timeout_s, ETCD_WAIT_S), again=True, named=True, too_late=too_late)
        self.loop.driver.run(self.member.join(how))
        self._thread = threading.Thread(target=self._work, name="elasticrt-participant", daemon=True)
        self._thread.start()

    def take_turn(self, *, after: int) -> Turn | None:
        """Wait for a seat in a later generation than `after`, whose workers have ended. None: the run is over.

        The leader ends a run that waits longer than the join timeout, and a lost etcd ends the wait after a quarter of
        an hour. Raises the error that has made taking part impossible.
        """
        # The loop's thread owns the member's state, so this thread only puts calls into its queue.
        self.loop.queue.put(partial(self._note_workers_ended, after))
        with self._changed:
            self._changed.wait_for(lambda: self._problem or self._end_reason or self._has_turn_after(after))
            if self._problem is not None:
                raise self._problem
            if self._turn is None or not self._has_turn_after(after):
                return None
            self.loop.queue.put(partial(self._set_running_generation, self._turn.generation.number))
            return self._turn

    def must_stop(self, *, after: int) -> bool:
        """Whether the workers of generation `after` must stop. `take_turn` says why.

        They must if a later generation exists, with or without a seat for this member, or if this member cannot take
        part any more.
        """
        with self._changed:
            return self._is_left_out or self._problem is not None or self._has_turn_after(after)

    @property
    def end_reason(self) -> str:
        """Why the run is over, "" while it is not."""
        with self._changed:
            return self._end_reason

    def close(self, *, run_too: bool) -> None:
        """Leave the run, and say so to the other members. With `run_too`, end the run for all nodes."""
        if self._thread is not None:
            self.loop.queue.put(partial(self._leave_run, run_too))
            self._thread.join(CLOSE_S)
        self._probes.close()
        self.loop.prober.close()
        self.loop.driver.close()
        self._session.close(timeout_s=CLOSE_S)
        self._ports.close()
        self._store.close()
        self.loop.unwatch_threads()

    def _has_turn_after(self, after: int) -> bool:
        return self._turn is not None and self._turn.generation.number > after

    @property
    def _record(self) -> MemberRecord:
        return self.member.me.record

    def _update(self, **fields: Any) -> None:
        self.member.me = replace(self.member.me, **fields)

    # The thread of the event loop.

    def _work(self) -> None:
        try:
            self._end(self.loop.take_part())
        except ElasticError as error:
            self._fail(error)
        except Exception as error:
            log.debug("the thread that takes part has ended", exc_info=True)
            self._fail(StoreError(f"this node cannot take part any more: {error!r}"))

    def _fail(self, problem: ElasticError) -> None:
        """End all waits for this thread: those of torchrun's agent and those of the other nodes."""
        log.warning("this node leaves the run: %s", problem)
        with self._changed:
            self._problem = problem
            self._changed.notify_all()
        self._say_goodbye(left=True)
        self._session.close(timeout_s=CLOSE_S)

    # The methods of `WorkerSide`, called by the event loop.

    def describe(self, me: Me, now: float) -> Me:
        """See `WorkerSide`."""
        del now
        if me.record.port == self._ports.port:
            return me
        return replace(me, record=me.record.model_copy(update={"port": self._ports.port}))

    def run_generation(self, generation: Generation, seat: Seat) -> None:
        """See `WorkerSide`."""
        number = generation.number
        listen = self._ports.take(generation.master_port, shared=True) if seat.index == 0 else None
        # torchrun's store keeps the socket, so the next generation needs another one.
        if listen is not None:
            self._ports.bind(self._ports.address)
        record = self._record.model_copy(update={"seen": max(self._record.seen, number)})
        self._update(record=record, started_generation=number, report=None, failed_at=None, hold_revision=0)
        with self._changed:
            self._turn, self._is_left_out = Turn(generation, seat, listen), False
            self._changed.notify_all()

    def end_before_rejoin(self, reason: str) -> bool:
        """See `WorkerSide`. False: torchrun's agent still has workers.

        `_note_workers_ended` is called when they have ended.
        """
        log.info("this node comes back as a new member: %s", reason)
        with self._changed:
            self._is_left_out = True
            self._changed.notify_all()
        return False

    def hand_over(self, decision: Hold | Go | ReleaseHold) -> None:
        """See `WorkerSide`. The report claims step 0, because the steps of torchrun's workers are not known here.

        The leader then replaces the generation at once, without `Go`.
        """
        match decision:
            case Hold(handover=handover):
                self._update(hold_revision=handover, report=self._report("holding", handover=handover))
            case ReleaseHold():
                self._update(hold_revision=0, report=None)

    def drain(self, reason: str) -> None:
        """See `WorkerSide`."""
        del reason
        self.member.drain()

    def handle(self, event: Any) -> None:
        """See `WorkerSide`. Events here are calls, put by the thread of its agent.

        They call `_set_running_generation`, `_note_workers_ended` or `_leave_run`.
        """
        event()

    def _note_workers_ended(self, generation: int) -> None:
        """torchrun's agent has no workers of `generation` any more, and waits for the next turn.

        If `generation` still is the current one, its workers failed.
        """
        self._set_running_generation(0)
        if self._is_left_out:
            self.member.begin_life()
        if self._is_left_out or generation == 0 or generation != self.member.me.started_generation:
            return
        summary = f"workers on {self._record.node} ended or could not start"
        failure = Failure(rank=0, code=1, collateral=False, summary=summary)
        self._update(report=self._report("failed", failure=failure), failed_at=self._clock.monotonic())

    def _leave_run(self, close: bool) -> None:
        """This member leaves. With `close` it ends the run for all nodes."""
        view = self.member.view
        if close and view.spec is not None and view.result is None:
            try:
                finish = Finish(f"closed by {self._record.node}", "succeeded", 0)
                self.loop.driver.run(self.member.carry_out(finish))
            except StoreError as error:
                log.warning("the run could not be closed: %s", error)
        self._update(leave_reason="told to leave")

    def _set_running_generation(self, generation: int) -> None:
        """Note the generation whose workers run here, 0 for none."""
        self._update(running_generation=generation, record=self._record.model_copy(update={"generation": generation}))

    def _report(self, status: Any, **more: Any) -> Report:
        where: dict[str, Any] = {"node": self._record.node, "incarnation": self._record.incarnation}
        return Report(generation=self.member.me.started_generation, status=status, **where, **more)

    def _end(self, decision: End | Leave | Halt) -> None:
        self._say_goodbye(left=isinstance(decision, Leave))
        with self._changed:
            self._end_reason = decision.reason
            if isinstance(decision, Halt):
                self._problem = StoreError(decision.reason)
            self._changed.notify_all()

    def _say_goodbye(self, *, left: bool) -> None:
        """Delete the member key. With `left` a present seat is given up, so that the other nodes need not probe it."""
        try:
            self.loop.driver.run(self.member.leave(seat_too=left))
        except StoreError as error:
            log.warning("etcd could not be told that this node leaves: %s. Others see it when the lease ends", error)
