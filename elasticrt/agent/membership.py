"""This agent's way to the store: the connection, the lease, what its member asks of the store, and what workers do.

Opened once, and a second time only when this machine's own etcd has died and a fresh one takes its place.
"""

from __future__ import annotations

import logging
import queue
import signal
from dataclasses import replace
from typing import Any

from elasticrt.agent.edges import Edges
from elasticrt.agent.store_discovery import Meeting
from elasticrt.agent.store_driver import StoreDriver
from elasticrt.agent.store_proxy import StoreProxy
from elasticrt.errors import StoreError, explain
from elasticrt.event_log import success
from elasticrt.rendezvous.member import Joining, Member
from elasticrt.rendezvous.records import Keys, Result
from elasticrt.settings import Settings
from elasticrt.store.lease_session import LeaseSession
from elasticrt.workers.logs import newest_generation

log = logging.getLogger(__name__)

CLOSE_S = 2.0


class Membership:
    """One agent's. Used by the agent's thread only."""

    def __init__(self, settings: Settings, events: queue.SimpleQueue[Any], edges: Edges) -> None:
        self._edges = edges
        self._settings = settings
        self._queue = events
        self.meeting: Meeting = edges.meet(settings, self.told_to_leave)
        self.session: LeaseSession
        self.driver: StoreDriver
        self.proxy: StoreProxy

    def open(self, member: Member) -> Result | None:
        """Have the member join. A Result when the run has succeeded before. Raises DuplicateError, StoreError."""
        settings, edges, store, put = self._settings, self._edges, self.meeting.store, self._queue.put
        self.session = edges.lease_session(store, member.me.spec.lease_ttl_s, put)
        self.driver = StoreDriver(
            store, put, edges.clock, grant=self.session.grant, probe=edges.probe, told_to_leave=self.told_to_leave
        )
        self.proxy = edges.store_proxy(store, Keys(settings.run_id), put)
        timeout_s = member.me.spec.join_timeout_s
        late = _too_late(settings.run_id, timeout_s)
        how = Joining(timeout_s, settings.etcd_wait_s, settings.options.again, settings.node_given, late)
        result = self.driver.run(member.join(how))
        if result is not None:
            return result
        ended = self._has_succeeded(member) if not (member.me.started or member.view.number) else ""
        if ended:
            self.leave(member)
            return Result(attempt=member.me.attempt, status="succeeded", code=0, reason=ended, generation=0)
        record = member.me.record
        seen = max(record.seen, newest_generation(settings.run_dir))
        member.me = replace(member.me, record=record.model_copy(update={"seen": seen}))
        return None

    def _has_succeeded(self, member: Member) -> str:
        """How the run ended, if it is told to nobody but by its logs: this machine's etcd has ended with it."""
        alone = len(member.view.members) == 1
        asked = alone and self.meeting.served is not None and not self._settings.options.again
        return success(self._settings.run_dir) if asked else ""

    def embedded_died(self) -> bool:
        """Whether this machine's own etcd was used and its keeper is gone."""
        served = self.meeting.served
        return served is not None and not served.lives()

    def open_fresh(self, member: Member) -> None:
        """Begin again with a fresh embedded etcd, in a new life. Raises as `open` does."""
        self.close()
        self.meeting = self._edges.meet(self._settings, self.told_to_leave)
        member.begin_anew()
        self.open(member)

    def leave(self, member: Member) -> None:
        """Take the key out, whatever state it is in; if etcd does not answer, its lease does that."""
        try:
            self.driver.run(member.leave(seat_too=False))
        except StoreError as error:
            log.info("the member key stays until its lease ends: %s", error)

    def close(self) -> None:
        """Stop following, end the lease, close the connections."""
        if hasattr(self, "proxy"):
            self.proxy.close(CLOSE_S)
            self.driver.close()
        if hasattr(self, "session"):
            self.session.close(revoke=True, timeout_s=CLOSE_S)
        self.meeting.store.close()

    def told_to_leave(self) -> bool:
        """Whether a signal is among the events so far; all of them are put back."""
        seen = []
        while not self._queue.empty():
            seen.append(self._queue.get_nowait())
        for event in seen:
            self._queue.put(event)
        return any(isinstance(event, signal.Signals) for event in seen)


def _too_late(run_id: str, timeout_s: float) -> StoreError:
    return StoreError(
        explain(
            "the run could not be joined",
            f"run {run_id}",
            expected=f"to register within {timeout_s:g} s",
            remedy="Its last attempt may still be ending; see the logs of its other nodes",
        )
    )
