"""This agent's membership: its connection to the store, its lease, its key, and how it gets them.

Opened once, and a second time only when this machine's own etcd has died and a fresh one takes its place.
"""

from __future__ import annotations

import functools
import logging
import queue
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from elasticrt.agent.edges import Edges
from elasticrt.agent.store_discovery import Meeting, ride_out
from elasticrt.agent.store_proxy import StoreProxy
from elasticrt.errors import DuplicateError, StoreError, explain
from elasticrt.event_log import success
from elasticrt.ipc.time_bounds import LOOK_AGAIN_S
from elasticrt.rendezvous.decision import Me
from elasticrt.rendezvous.member_client import Entered, MemberClient
from elasticrt.rendezvous.records import Keys, Member, Result, decode
from elasticrt.settings import Settings
from elasticrt.store.lease_session import LeaseSession
from elasticrt.store.protocol import KeyValue, Lease, LeaseLost
from elasticrt.workers.logs import newest_generation

log = logging.getLogger(__name__)

CLOSE_S = 2.0

R = TypeVar("R")


class Membership:
    """Store, lease and rendezvous of one agent. Used by the agent's thread only."""

    def __init__(self, settings: Settings, events: queue.SimpleQueue[Any], edges: Edges) -> None:
        self._edges = edges
        self._clock = edges.clock
        self._settings = settings
        self._queue = events
        self._keys = Keys(settings.run_id)
        self.meeting: Meeting = self._edges.meet(settings, self._told_to_leave)
        self.session: LeaseSession
        self.lease: Lease
        self.rendezvous: MemberClient
        self.courier: StoreProxy

    def open(self, me: Me) -> Me | Result:
        """Get a lease and a key, and read a first view. A Result when the run has succeeded before.

        The member's name can be another one afterwards. Raises DuplicateError, StoreError.
        """
        self.session = self._edges.lease_session(self.meeting.store, me.spec.lease_ttl_s, self._queue.put)
        self.lease = self.ride_out(self.session.open)
        self.rendezvous = self._client(me.record.node)
        self.courier = self._edges.store_proxy(self.meeting.store, self._keys, self._queue.put)
        me, answer = self._enter(me)
        if isinstance(answer, Result):
            return answer
        self.ride_out(self.rendezvous.refresh)
        number = self.rendezvous.view.number
        ended = self._has_succeeded() if not (me.started or number) else ""
        if ended:
            self.leave()
            return Result(attempt=answer.attempt, status="succeeded", code=0, reason=ended, generation=0)
        seen = max(me.record.seen, number, newest_generation(self._settings.run_dir))
        record = me.record.model_copy(update={"seen": seen})
        return replace(me, attempt=answer.attempt, spec=answer.spec, known=number, record=record)

    def _has_succeeded(self) -> str:
        """How the run ended, if it is told to nobody but by its logs: this machine's etcd has ended with it."""
        alone = len(self.rendezvous.view.members) == 1
        asked = alone and self.meeting.served is not None and not self._settings.options.again
        return success(self._settings.run_dir) if asked else ""

    def ride_out(self, ask: Callable[[], R]) -> R:
        """See `meeting.ride_out`: for all that is asked before this agent is a member."""
        return ride_out(ask, self._settings.etcd_wait_s, self._clock, told_to_leave=self._told_to_leave)

    def _client(self, node: str) -> MemberClient:
        edges = self._edges
        how = (edges.clock.monotonic, edges.token, edges.seats_per_chunk)
        return MemberClient(self.meeting.store, self._keys, node, self._queue.put, *how)

    def renew(self) -> None:
        """Get a new lease in place of a lost one. Raises StoreUnavailable."""
        self.lease = self.session.reopen()

    def embedded_died(self) -> bool:
        """Whether this machine's own etcd was used and its keeper is gone."""
        served = self.meeting.served
        return served is not None and not served.lives()

    def open_fresh(self, me: Me) -> Me | Result:
        """Begin again with a fresh embedded etcd, in a new life. Raises as `open` does."""
        self.close()
        self.meeting = self._edges.meet(self._settings, self._told_to_leave)
        update = {"incarnation": self._edges.token(), "generation": 0, "seen": max(me.record.seen, me.known)}
        record = me.record.model_copy(update=update)
        return self.open(Me(record=record, spec=me.spec, started=me.started, running=me.running, pause_s=me.pause_s))

    def leave(self) -> None:
        """Take the key out, whatever state it is in; if etcd does not answer, its lease does that."""
        try:
            self.rendezvous.leave(None)
        except StoreError as error:
            log.info("the member key stays until its lease ends: %s", error)

    def close(self) -> None:
        """Stop following, end the lease, close the connections."""
        if hasattr(self, "courier"):
            self.courier.close(CLOSE_S)
            self.rendezvous.close()
        if hasattr(self, "session"):
            self.session.close(revoke=True, timeout_s=CLOSE_S)
        self.meeting.store.close()

    def _enter(self, me: Me) -> tuple[Me, Entered | Result]:
        """Register, whatever it takes: other newcomers, an old life's key, another agent of the same name."""
        deadline = self._clock.monotonic() + me.spec.join_timeout_s
        name, tries = me.record.node, 1
        while self._clock.monotonic() < deadline:
            answer = self.ride_out(functools.partial(self._enter_once, me))
            if isinstance(answer, Entered | Result):
                return me, answer
            if isinstance(answer, KeyValue):
                other = decode(Member, answer.key, answer.value)
                if self._edges.probe(other.address, other.probe_port, other.incarnation) == "dead":
                    self.ride_out(functools.partial(self.rendezvous.evict_stale, answer))
                elif self._settings.node_given:
                    raise DuplicateError(_same_name(other))
                else:
                    tries += 1
                    me = self._rename(me, f"{name}-{tries}")
            elif self._told_to_leave():
                raise StoreError("told to leave before the run was joined (signal). Nothing has been started")
            else:
                self._clock.sleep(LOOK_AGAIN_S)
        raise StoreError(
            explain(
                "the run could not be joined",
                f"run {self._settings.run_id}",
                expected=f"to register within {me.spec.join_timeout_s:g} s",
                remedy="Its last attempt may still be ending; see the logs of its other nodes",
            )
        )

    def _enter_once(self, me: Me) -> Entered | Result | KeyValue | None:
        try:
            return self.rendezvous.enter(me.spec, me.record, self.lease.lease_id, again=self._settings.options.again)
        except LeaseLost as error:  # A machine that stands still for so long before it is a member may yet be one.
            log.warning("%s; registering with another one", error)
            self.renew()
            return None

    def _rename(self, me: Me, name: str) -> Me:
        self.rendezvous.close()
        self.rendezvous = self._client(name)
        return replace(me, record=me.record.model_copy(update={"node": name}))

    def _told_to_leave(self) -> bool:
        """Whether a signal is among the events so far; all of them are put back."""
        seen = []
        while not self._queue.empty():
            seen.append(self._queue.get_nowait())
        for event in seen:
            self._queue.put(event)
        return any(isinstance(event, signal.Signals) for event in seen)


def _same_name(other: Member) -> str:
    return explain(
        "a live agent has this node's name",
        f"node {other.node}",
        got=f"pid {other.pid} at {other.address}",
        expected="one agent per node name",
        remedy="Give this one another --node, or leave --node out",
    )
