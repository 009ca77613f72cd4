"""Carries out what a member asks of the world around it: `rendezvous.requests`, on a store."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from elasticrt.clock import Clock
from elasticrt.errors import StoreError
from elasticrt.rendezvous.requests import (
    AskOwner,
    Conversation,
    Follow,
    Grant,
    Notice,
    Pause,
    Read,
    Request,
    Transact,
    Unfollow,
)
from elasticrt.store.protocol import Changes, Lease, Resync, Store, Watch

log = logging.getLogger(__name__)

T = TypeVar("T")


def unknown(address: str, port: int, incarnation: str) -> str:
    """What asking an agent finds where nobody can be asked."""
    del address, port, incarnation
    return "silent"


def no_lease() -> Lease:
    """What asking for a lease finds where nobody becomes a member."""
    raise AssertionError("this driver has no lease session")


class StoreDriver:
    """One member's. Used by one thread; only `emit` is called from others.

    Args:
        store: where reads, transactions and watches go.
        emit: gets what the watches deliver.
        clock: of this machine.
        grant: gets a lease, in place of the last one if there was any.
        probe: asks the agent at an address and port whether it is this incarnation.
        told_to_leave: whether waiting has become pointless.
    """

    def __init__(
        self,
        store: Store,
        emit: Callable[[Notice], None],
        clock: Clock,
        *,
        grant: Callable[[], Lease] = no_lease,
        probe: Callable[[str, int, str], str] = unknown,
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
        """Carry out a conversation to its end. Raises what it does not bear: StoreUnavailable, StoreError."""
        try:
            request = next(conversation)
            while True:
                try:
                    answer = self._carry_out(request)
                except StoreError as error:
                    request = conversation.throw(error)
                else:
                    request = conversation.send((answer, self._clock.monotonic()))
        except StopIteration as end:
            result: T = end.value
            return result

    def close(self) -> None:
        """End all watches."""
        for number in list(self._watches):
            self._watches.pop(number).cancel()

    def _carry_out(self, request: Request) -> Any:
        match request:
            case Read(range_, limit, by_create):
                return self.store.read(range_, limit=limit, by_create=by_create)
            case Transact(txn):
                log.debug("transaction: %s", txn.why)
                return self.store.commit(txn)
            case Follow(number, range_, from_revision):
                sink = functools.partial(self._delivered, number, range_)
                self._watches[number] = self.store.watch(range_, sink, from_revision=from_revision)
            case Unfollow(number):
                self._watches.pop(number).cancel()
            case Grant():
                return self._grant()
            case AskOwner(member):
                return self._probe(member.address, member.probe_port, member.incarnation)
            case Pause(seconds):
                self._pause(seconds)
        return None

    def _delivered(self, number: int, range_: str, item: Changes | Resync) -> None:
        self._emit(Notice(number, range_, item))

    def _pause(self, seconds: float) -> None:
        if seconds:
            if self._told_to_leave():
                raise StoreError("told to leave before the run was joined (signal). Nothing has been started")
            self._clock.sleep(seconds)
