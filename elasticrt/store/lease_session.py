"""The lease of one agent: kept alive on a thread of its own, and judged by this machine's clock.

The thread talks to etcd, and may hang in a call for as long as the store's timeout. Meanwhile the agent's loop watches
the clock: it calls `check_clock` each time it goes round, and no later than `next_check_at`.

Whether the agent may act on its view depends on when etcd last answered. `judge` gives one of three statuses:

* *connected*;
* *suspended*: the last answer is older than two thirds of the TTL, or this process was stopped meanwhile. etcd may have
  ended the lease already.
* *lost*: etcd said that the lease has ended.

An answer counts from the time at which its question was sent. etcd restarted the TTL at that moment or later, so our
count never ends later than etcd's.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from elasticrt.errors import ElasticError, StoreError
from elasticrt.store.protocol import Lease, LeaseLost, Store

_logger = logging.getLogger(__name__)

LeaseStatus = Literal["connected", "suspended", "lost"]

KEEP_ALIVE_SHARE = 1 / 3
"""The time between two keep-alives, as a share of the TTL; etcd's own client uses the same."""

SUSPENDED_SHARE = 2 / 3
"""The age of the last answer, as a share of the TTL, from which the lease is suspended. A third of the TTL is left to
act."""

RETRY_S_MAX = 0.25
"""The longest pause after a failed keep-alive, in seconds."""


@dataclass(frozen=True)
class SessionState:
    """What is known about a lease.

    Attributes:
        status: connected, suspended or lost.
        lease_id: the lease.
        reason: why, in words for people.
    """

    status: LeaseStatus
    lease_id: int
    reason: str


def judge(*, ttl_s: float, acked_at: float, looked_at: float, now: float, lost: bool) -> tuple[LeaseStatus, str]:
    """The state of a lease, and why. Pure.

    Args:
        ttl_s: the TTL that etcd granted, in seconds.
        acked_at: when the last answered keep-alive (or the grant) was sent.
        looked_at: when this process last looked at its clock.
        now: the time, on the same clock.
        lost: whether etcd has said that the lease has ended.
    """
    if lost:
        return "lost", "etcd says that the lease is gone"
    # This comes before the age of the last answer: a process that was stopped for a whole TTL says so, whatever else is
    # late.
    if now - looked_at > ttl_s:
        return "suspended", f"paused for {now - looked_at:.1f} s"
    if now - acked_at >= SUSPENDED_SHARE * ttl_s:
        return "suspended", f"no answer from etcd for {now - acked_at:.1f} s"
    return "connected", "etcd answers"


class LeaseSession:
    """Gets a lease and keeps it alive.

    Args:
        store: grants the lease.
        ttl_s: the TTL to ask for, in seconds.
        sink: called with the new state when the status changes, the first `connected` included, in order. It is called
            on whichever thread noticed the change. It must hand the state over (put it into a queue) and return, and
            must not call the session.
        now: the clock, in seconds.

    Attributes:
        answer_s: how long etcd's newest answer to a keep-alive took, in seconds; None before the first answer.
    """

    answer_s: float | None = None

    def __init__(
        self,
        store: Store,
        ttl_s: float,
        sink: Callable[[SessionState], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._asked_ttl_s = ttl_s
        self._sink = sink
        self._now = now
        # Guards everything below. The sink is called with the lock held, so that states arrive in order.
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._lease: Lease | None = None
        self._status: LeaseStatus | None = None
        self._acked_at = self._looked_at = 0.0
        self._lost = self._closed = False
        self._thread: threading.Thread | None = None

    def grant(self) -> Lease:
        """Get a lease: the first, which is kept alive from now on, or a new one in place of the last.

        Raises StoreUnavailable, StoreRefused; the last lease then stays.
        """
        is_first, sent_at = self._lease is None, self._now()
        lease = self._store.grant(self._asked_ttl_s)
        if lease.ttl_s > math.ceil(self._asked_ttl_s):
            _logger.warning("etcd grants leases of %g s; asked for %g s", lease.ttl_s, self._asked_ttl_s)
        with self._lock:
            self._lease = lease
            self._acked_at = self._looked_at = sent_at
            self._lost = False
            self._judge()
            self._wake.notify_all()
        if is_first:
            self._start()
        return lease

    def _start(self) -> None:
        """Begin to keep the lease alive. The simulator overrides this, and keeps it alive without a thread."""
        self._thread = threading.Thread(target=self._keep_alive, name="elasticrt-lease", daemon=True)
        self._thread.start()

    def check_clock(self) -> None:
        """Look at the clock now. The status may change without an answer, or this process may have been stopped."""
        with self._lock:
            if self._lease is not None and not self._closed:
                self._judge()

    def next_check_at(self) -> float | None:
        """When to look again if no answer comes, on the session's clock. None if only an answer can change it."""
        with self._lock:
            if self._lease is None or self._status != "connected":
                return None
            return self._acked_at + SUSPENDED_SHARE * self._lease.ttl_s

    def close(self, timeout_s: float) -> None:
        """Stop keeping the lease alive, and revoke it, so that its keys vanish now instead of after the TTL.

        Waits at most `timeout_s` for the thread, and the store's own timeout for the revocation. A failed revocation is
        not an error: the lease then ends by itself.
        """
        with self._lock:
            self._closed = True
            lease = self._lease
            self._wake.notify_all()
        deadline = time.monotonic() + timeout_s
        if lease is not None:
            try:
                self._store.revoke(lease.lease_id)
            except StoreError as error:
                _logger.debug("the lease was not revoked and ends by itself: %s", error)
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _keep_alive(self) -> None:
        """The thread's loop."""
        pause_s = 0.0
        while True:
            with self._lock:
                assert self._lease is not None, "started after the grant"
                pause_s = pause_s or self._lease.ttl_s * KEEP_ALIVE_SHARE
                self._wake.wait_for(lambda: self._closed, pause_s)
                # A lost lease needs no keep-alive. `grant` gets a new one and wakes the thread.
                self._wake.wait_for(lambda: self._closed or not self._lost)
                if self._closed:
                    return
                lease, sent_at = self._lease, self._now()
            pause_s = self._ask(lease, sent_at)

    def _ask(self, lease: Lease, sent_at: float) -> float:
        """Keep the lease alive once. Returns the pause before the next time, 0 for the usual one."""
        lost, reason = False, ""
        try:
            self._store.keep_alive(lease.lease_id)
        except LeaseLost:
            lost = True
        except ElasticError as error:
            reason = str(error)
        with self._lock:
            # The answer may be about a lease that `grant` has replaced meanwhile.
            if self._closed or self._lease != lease:
                return 0.0
            if lost:
                self._lost = True
            elif not reason:
                self._acked_at = max(self._acked_at, sent_at)
                self.answer_s = self._now() - sent_at
            self._judge(reason)
        return min(RETRY_S_MAX, lease.ttl_s * KEEP_ALIVE_SHARE) if reason else 0.0

    def _judge(self, failure: str = "") -> None:
        """Judge the lease, and tell the sink if the status has changed. The lock must be held."""
        assert self._lease is not None, "there is a lease to judge"
        now = self._now()
        status, reason = judge(
            ttl_s=self._lease.ttl_s, acked_at=self._acked_at, looked_at=self._looked_at, now=now, lost=self._lost
        )
        self._looked_at = now
        if status != self._status:
            self._status = status
            if status == "suspended" and failure:
                reason = f"{reason}: {failure}"
            self._sink(SessionState(status, self._lease.lease_id, reason))
