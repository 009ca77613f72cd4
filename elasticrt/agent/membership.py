"""An agent's access to the store: the connection, the lease, the requests of its member and those of its workers.

An agent opens it once. It opens it again only when an embedded etcd has died and a fresh one takes its place.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elasticrt.agent.edges import Edges
from elasticrt.agent.store_discovery import OpenStore
from elasticrt.agent.store_driver import StoreDriver
from elasticrt.agent.store_proxy import StoreProxy
from elasticrt.errors import DuplicateError, StoreError, explain
from elasticrt.event_log import newest_result, store_of, writers
from elasticrt.ipc.time_bounds import LOOK_AGAIN_S
from elasticrt.ipc.wording import listed
from elasticrt.rendezvous.member import JoinOptions, Member
from elasticrt.rendezvous.records import Keys, Result
from elasticrt.settings import Settings
from elasticrt.store import embedded
from elasticrt.store.lease_session import LeaseSession
from elasticrt.workers.logs import newest_generation

log = logging.getLogger(__name__)

# How long `close` waits for the thread of the store proxy, and for that of the lease.
CLOSE_S = 2.0
# How long an agent waits for agents of an earlier start of the run to end.
ENDING_S = 10.0


class Membership:
    """The membership of one agent. Only the agent's main thread uses it.

    Args:
        settings: the agent's settings.
        events: the queue of the agent's loop.
        edges: how etcd is found and reached.
        told_to_leave: returns whether a signal waits in the queue. Waiting for etcd is then pointless.

    Attributes:
        open_store: the open store, and how it is reached.
        session: keeps the lease alive. Set by `open`, as the next two are.
        driver: carries out the member's requests to the store.
        proxy: carries out the workers' requests to the store.

    Raises StoreError and ConfigError if etcd cannot be found or reached.
    """

    session: LeaseSession
    driver: StoreDriver
    proxy: StoreProxy

    def __init__(
        self,
        settings: Settings,
        events: queue.SimpleQueue[Any],
        edges: Edges,
        *,
        told_to_leave: Callable[[], bool],
    ) -> None:
        self._edges = edges
        self._settings = settings
        self._queue = events
        self._told_to_leave = told_to_leave
        self.open_store: OpenStore = edges.open_store(settings, told_to_leave)

    def open(self, member: Member, *, again: bool = False) -> Result | None:
        """Let the `member` join the run. Returns the run's result if it has succeeded before, else None.

        `again`: whether the member was in the run before, in a store that was lost. Raises DuplicateError, StoreError.
        """
        living = set() if again else writers(self._settings.run_dir)
        settings, edges, store, put = self._settings, self._edges, self.open_store.store, self._queue.put
        self.session = edges.lease_session(store, member.me.spec.lease_ttl_s, put)
        self.driver = StoreDriver(
            store, put, edges.clock, grant=self.session.grant, probe=edges.probe, told_to_leave=self._told_to_leave
        )
        self.proxy = edges.store_proxy(store, Keys(settings.run_id), put, self.open_store.place)
        timeout_s, options = member.me.spec.join_timeout_s, settings.options
        expected = f"to register within {timeout_s:g} s"
        remedy = "Its last attempt may still be ending; see the logs of its other nodes"
        late = StoreError("the run could not be joined", f"run {settings.run_id}", expected=expected, remedy=remedy)
        how = JoinOptions(timeout_s, settings.etcd_wait_s, options.again, options.node is not None, late)
        result = self.driver.run(member.join(how))
        if result is not None:
            return result
        # The store is new to this run. An embedded etcd ends with its run, so its logs may tell a result that the fresh
        # etcd does not know.
        known = member.me.started_generation or member.view.generation_number or options.again
        new = not known and len(member.view.members) == 1
        if new:
            self._check_elsewhere(member, living)
        ended = self.how_it_ended(member) if new else None
        if ended is not None and ended.status == "succeeded":
            self.leave(member)
            return ended
        # A fresh embedded etcd must not number generations below those that have logs here.
        record = member.me.record
        seen = max(record.seen, newest_generation(settings.run_dir))
        member.me = replace(member.me, record=record.model_copy(update={"seen": seen}))
        return None

    def _check_elsewhere(self, member: Member, living: set[str]) -> None:
        """Refuse a run that is new to this store, and whose agents, those `living`, are in another one.

        An agent in this store counts as in the run, although its lease may have ended in an outage. Agents of a store
        that was here before may still be ending, so they get some time. Raises DuplicateError.
        """
        clock, directory = self._edges.clock, self._settings.run_dir
        until = clock.monotonic() + ENDING_S
        living = {name for name in living if store_of(directory / name) != member.replica.store_id}
        while living and clock.monotonic() < until and not self._told_to_leave():
            clock.sleep(LOOK_AGAIN_S)
            living = living & writers(directory)
        if living and not self._told_to_leave():
            self.leave(member)
            got = f"living agents write {listed(sorted(living))}"
            remedy = "Give this agent the same --etcd as the others, or another --run-id"
            raise DuplicateError(explain("the run is alive in another etcd", str(directory), got=got, remedy=remedy))

    def how_it_ended(self, member: Member) -> Result | None:
        """The run's result as its event logs tell it; None without one, and with an external etcd.

        An embedded etcd ends with the run, and the result in the store with it.
        """
        found = newest_result(self._settings.run_dir) if self.open_store.served is not None else None
        return Result(attempt=member.me.attempt, generation=0, **vars(found)) if found is not None else None

    def embedded_died(self) -> tuple[bool, str]:
        """Whether this agent uses an embedded etcd that has ended, and why; "" if that is not known."""
        served = self.open_store.served
        return (False, "") if served is None else embedded.has_ended(self._settings.run_id, served)

    def open_fresh(self, member: Member) -> None:
        """Join again at a fresh embedded etcd, as a new incarnation. Raises as `open` does."""
        self.close()
        self.open_store = self._edges.open_store(self._settings, self._told_to_leave)
        member.begin_life_in_new_store()
        self.open(member, again=True)

    def leave(self, member: Member, *, seat_too: bool = False) -> None:
        """Delete the key of `member`. With `seat_too` also give its seat up, so that others need not probe for it.

        If etcd does not answer, the key vanishes when the lease ends.
        """
        # The key has ended with its embedded etcd.
        if self.embedded_died()[0]:
            return
        try:
            self.driver.run(member.leave(seat_too=seat_too))
        except StoreError as error:
            log.warning("etcd could not be told that this node leaves: %s. Others see it when the lease ends", error)

    def close(self) -> None:
        """Stop the watches, revoke the lease, close the connections. `open` may have failed, or never been called."""
        if hasattr(self, "proxy"):
            self.proxy.close(CLOSE_S)
            self.driver.close()
        if hasattr(self, "session"):
            self.session.close(timeout_s=CLOSE_S)
        self.open_store.store.close()
