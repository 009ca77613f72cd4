"""The requests of a member to the world around it, as values: the effects of its conversations. Pure.

A conversation is a generator. It yields a request, and is sent the answer together with the time at which the answer
came. If a request fails, its error is raised at the `yield`. `agent.store_driver` carries requests out, and so do
tests.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from elasticrt.rendezvous.records import Member
from elasticrt.store.protocol import Changes, Resync, Txn

T = TypeVar("T")


@dataclass(frozen=True)
class Read:
    """Read a range. The answer is a RangeRead.

    `limit` 0 means all keys. `by_create` sorts by create revision, oldest first.
    """

    range: str
    limit: int = 0
    by_create: bool = False


@dataclass(frozen=True)
class Transact:
    """Carry out a transaction. The answer is a TxnResult."""

    txn: Txn


@dataclass(frozen=True)
class StartWatch:
    """Watch a range from a revision on. Its deliveries come as `Notice`s with this `number`."""

    number: int
    range: str
    from_revision: int


@dataclass(frozen=True)
class CancelWatch:
    """End a watch."""

    number: int


@dataclass(frozen=True)
class Grant:
    """Get a lease, in place of the last one if there is one. The answer is a Lease."""


@dataclass(frozen=True)
class ProbeOwner:
    """Ask the agent of a member key whether it lives. The answer is "alive", "dead" or "silent"."""

    member: Member


@dataclass(frozen=True)
class Pause:
    """Wait. Fails if this member is asked to leave. A pause of 0 seconds only asks for the time."""

    seconds: float


Request = Read | Transact | StartWatch | CancelWatch | Grant | ProbeOwner | Pause
Conversation = Generator[Request, tuple[Any, float], T]


@dataclass(frozen=True)
class Notice:
    """One delivery of a watch: `watch` is the number in its `StartWatch`."""

    watch: int
    range: str
    item: Changes | Resync
