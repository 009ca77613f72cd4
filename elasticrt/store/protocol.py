"""What the rendezvous asks of a store: etcd's own model, reduced to what we use. Pure values and one Protocol.

Two stores implement it: `store.etcd` (the real one) and `tests.memory_store` (the model, also used by the simulator).
One contract suite, `tests/contract`, runs against both.

Keys are read, watched and deleted by ranges: a range that ends with a slash is a prefix, any other is one key.

Three things matter more than the rest:

* Every key carries revisions. A transaction that compares them is the only way this project changes shared state.
* A call ends in success, `StoreUnavailable` (nothing is known about the effect of a write), or another `StoreError`.
* A watch never skips silently: it delivers every revision from `from_revision` on, or a `Resync`. One that loses its
  server goes on by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from elasticrt.errors import StoreError

ETCD_WAIT_S = 60.0
"""Seconds that a joining node waits for an answer of etcd, by default. Members ride longer outages out."""


class StoreUnavailable(StoreError):  # noqa: N818  States, like the words CONNECTED and SUSPENDED, not exceptions to fix.
    """No answer within the deadline. A write may or may not have happened: read before trying again."""


class StoreRefused(StoreError):  # noqa: N818
    """etcd answered and said no: authentication, permission, no space, too large."""


class StoreBlocked(StoreRefused):
    """etcd says no until an operator has changed something in it."""


class StoreForbidden(StoreBlocked):
    """The login may not do that."""


class StoreFull(StoreBlocked):
    """etcd has no space for another write. Reads and leases work; it ends when the operator makes space."""


class LeaseLost(StoreError):  # noqa: N818
    """The lease does not exist (any more)."""


def covers(range_: str, key: str) -> bool:
    """Whether a range holds a key."""
    return key.startswith(range_) if range_.endswith("/") else key == range_


@dataclass(frozen=True)
class KeyValue:
    """One key as stored. Revisions are the store's, counted from 1. `lease` is 0 when the key is bound to none."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


@dataclass(frozen=True)
class Compare:
    """One guard of a transaction: a key has this create or mod revision, this lease, or this value.

    The numbers of an absent key are 0, as in etcd; its value equals none.
    """

    key: str
    target: Literal["create", "mod", "lease", "value"]
    expected: int | bytes


@dataclass(frozen=True)
class Put:
    """Write `value` under `key`, bound to lease number `lease` (0: none)."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True)
class Delete:
    """Delete a key, or all keys of a range. Deleting nothing is not an error."""

    key: str


@dataclass(frozen=True)
class Txn:
    """If all compares hold, all operations happen, at one revision; otherwise nothing does.

    `why` is one sentence for logs and for the reader of a trace. At most 128 operations (etcd's limit).
    """

    compares: tuple[Compare, ...]
    operations: tuple[Put | Delete, ...]
    why: str = ""


@dataclass(frozen=True)
class TxnResult:
    """Whether the compares held, and the store's revision after the transaction."""

    succeeded: bool
    revision: int


@dataclass(frozen=True)
class RangeRead:
    """A linearizable read: keys as they were at `revision` in the store with identity `store_id`."""

    keys: tuple[KeyValue, ...]
    revision: int
    store_id: str

    def get(self, key: str) -> KeyValue | None:
        """The entry for exactly `key`, or None."""
        return next((kv for kv in self.keys if kv.key == key), None)


@dataclass(frozen=True)
class Event:
    """One change. For a deletion `value` is None and `mod_revision` is the revision of the deletion."""

    key: str
    value: KeyValue | None
    mod_revision: int


@dataclass(frozen=True)
class Changes:
    """Events of one or more revisions, in order; `revision` is the newest of them (or of a progress notice)."""

    events: tuple[Event, ...]
    revision: int


@dataclass(frozen=True)
class Resync:
    """The watch can't go on from where it was: read again, then watch from the read's revision + 1.

    `reason` is "compacted", "replaced" (another store answers: store_id or revision went back) or "cancelled: ...".
    """

    reason: str


WatchSink = Callable[[Changes | Resync], None]
"""Called from the store's own thread: it must only hand over (put into a queue) and return."""


@dataclass(frozen=True)
class Lease:
    """A granted lease. `ttl_s` is what the server granted, which can be more than was asked."""

    lease_id: int
    ttl_s: float


@dataclass(frozen=True)
class ServerStatus:
    """What an etcd says of itself: its version, the size of its data and the limit of it (0: not said), its alarms."""

    version: str
    used_bytes: int
    quota_bytes: int
    troubles: tuple[str, ...]


class Watch(Protocol):
    """A running watch."""

    def cancel(self) -> None:
        """Stop; the sink is not called after this returns, except for a call already under way."""


class Store(Protocol):
    """A linearizable key-value store with leases, transactions and watches. Safe to call from several threads."""

    def read(self, range_: str, *, limit: int = 0, by_create: bool = False) -> RangeRead:
        """All keys of a range, linearizable.

        `by_create` sorts by create revision, oldest first (otherwise by key); `limit` 0 means all.
        Raises StoreUnavailable, StoreRefused.
        """

    def commit(self, txn: Txn) -> TxnResult:
        """Run a transaction once. Raises StoreUnavailable (effect unknown), LeaseLost, StoreRefused."""

    def grant(self, ttl_s: float) -> Lease:
        """A new lease of `ttl_s` seconds. Raises StoreUnavailable, StoreRefused."""

    def keep_alive(self, lease_id: int) -> float:
        """Renew; the remaining TTL in seconds. Raises LeaseLost when it has ended, StoreUnavailable."""

    def revoke(self, lease_id: int) -> None:
        """End the lease and delete its keys at once. A lease that has ended already is not an error."""

    def watch(self, range_: str, sink: WatchSink, *, from_revision: int) -> Watch:
        """Deliver every change of a range from `from_revision` on, until cancelled."""

    def close(self) -> None:
        """Cancel all watches, close the connections. Leases live on until revoked or expired."""


def bracketed(host: str) -> str:
    """`host` as it is written before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


@dataclass(frozen=True)
class Address:
    """An etcd endpoint as parsed from an option: `http://host:port`, `https://host:port`, or `unix:/path` of a socket.

    A socket has its path as `host`, and 0 as `port`.
    """

    scheme: Literal["http", "https", "unix"]
    host: str
    port: int

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix:{self.host}"
        return f"{self.scheme}://{bracketed(self.host)}:{self.port}"


@dataclass(frozen=True)
class Credentials:
    """How to authenticate to etcd: files only, never values on a command line. None means: not used."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    user: str | None = None
    password_file: str | None = None
