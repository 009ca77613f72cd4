"""Carries out the requests of a member (`rendezvous.requests`) on a store.

The member is a machine without I/O. Its methods are generators (conversations): each yields requests, and gets their
answers back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from elasticrt.clock import Clock
from elasticrt.errors import EXIT_TERMINATED, StoreError
from elasticrt.rendezvous.requests import (
    CancelWatch,
    Conversation,
    Grant,
    Notice,
    Pause,
    ProbeOwner,
    Read,
    Request,
    StartWatch,
    Transact,
)
from elasticrt.store.protocol import Changes, Lease, Resync, Store, Watch

log = logging.getLogger(__name__)

T = TypeVar("T")


class ToldToLeaveError(StoreError):
    """A signal has ended the wait for etcd. Nobody has to act."""

    exit_code = EXIT_TERMINATED


class StoreDriver:
    """Carries out the requests of one member. One thread uses it; only `emit` is called on other threads.

    Args:
        store: where reads, transactions and watches go.
        emit: takes what the watches deliver, on their thread.
        clock: this machine's clock.
        grant: gets a new lease in place of the last one; None: this driver only reads.
        probe: asks the agent at an address and port whether it is an incarnation, and waits for the answer.
        told_to_leave: returns whether a signal has made waiting pointless.
    """

    def __init__(
        self,
        store: Store,
        emit: Callable[[Notice], None],
        clock: Clock,
        *,
        grant: Callable[[], Lease] | None = None,
        probe: Callable[[str, int, str], str] = lambda *_: "silent",
        told_to_leave: Callable[[], bool] = lambda: False,
    ) -> None:
        self.store = store
        self._emit = emit
        self._clock = clock
        self._grant = grant
        self._probe = probe
        self._told_to_leave = told_to_leave
        self._watches: dict[int, Watch] = {}

    def run(self, conversation: Conversation[T]) -> T:
        """Carry out a conversation, and return its result.

        Errors of the store are thrown into the conversation. StoreError, with StoreUnavailable, is raised if the
        conversation does not handle it.
        """
        try:
            request = next(conversation)
            while True:
                try:
                    answer = self._carry_out(request)
                except StoreError as error:
                    request = conversation.throw(error)
                else:
                    # Each answer comes with the time: the member reads no clock itself.
                    request = conversation.send((answer, self._clock.monotonic()))
        except StopIteration as end:
            result: T = end.value
            return result

    def close(self) -> None:
        """End all watches."""
        for number in list(self._watches):
            self._watches.pop(number).cancel()

    def _carry_out(self, request: Request) -> Any:
        """Carry out one request, and return its answer."""
        match request:
            case Read(range_, limit, by_create):
                return self.store.read(range_, limit=limit, by_create=by_create)
            case Transact(txn):
                log.debug("transaction: %s", txn.why)
                return self.store.commit(txn)
            case StartWatch(number, range_, from_revision):

                def deliver(item: Changes | Resync) -> None:
                    self._emit(Notice(number, range_, item))

                self._watches[number] = self.store.watch(range_, deliver, from_revision=from_revision)
            case CancelWatch(number):
                self._watches.pop(number).cancel()
            case Grant():
                assert self._grant is not None
                return self._grant()
            case ProbeOwner(member):
                return self._probe(member.address, member.probe_port, member.incarnation)
            # Only newcomers pause. A pause of 0 s just asks for the time.
            case Pause(seconds) if seconds:
                if self._told_to_leave():
                    raise ToldToLeaveError("told to leave before the run was joined (signal). Nothing has been started")
                self._clock.sleep(seconds)
        return None
