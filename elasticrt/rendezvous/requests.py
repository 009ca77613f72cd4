"""What a member asks of the world around it, as values: the effects of its conversations. Pure.

A conversation is a generator. It yields a request and is sent the answer, with the time at which it came. The error of
a request that fails is raised at the same place. `agent.store_driver` carries requests out, and so do tests.
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
    """Read a range. The answer is a RangeRead."""

    range: str
    limit: int = 0
    by_create: bool = False


@dataclass(frozen=True)
class Transact:
    """Carry out a transaction. The answer is a TxnResult."""

    txn: Txn


@dataclass(frozen=True)
class Follow:
    """Watch a range from a revision on. What it delivers comes as `Notice`s with this number."""

    number: int
    range: str
    from_revision: int


@dataclass(frozen=True)
class Unfollow:
    """End a watch."""

    number: int


@dataclass(frozen=True)
class Grant:
    """Get a lease, in place of the last one if there was any. The answer is a Lease."""


@dataclass(frozen=True)
class AskOwner:
    """Ask the agent of a member key whether it lives. The answer is "alive", "dead" or "silent"."""

    member: Member


@dataclass(frozen=True)
class Pause:
    """Wait; it fails when this member is asked to leave. For 0 seconds: only look at the clock."""

    seconds: float


Request = Read | Transact | Follow | Unfollow | Grant | AskOwner | Pause
Conversation = Generator[Request, tuple[Any, float], T]


@dataclass(frozen=True)
class Notice:
    """A delivery of one watch."""

    watch: int
    range: str
    item: Changes | Resync
