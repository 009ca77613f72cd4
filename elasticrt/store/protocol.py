"""What the rendezvous asks of a store: etcd's own model, reduced to what this project uses. Pure.

Two stores implement it: `store.etcd` (the real one) and `tests.memory_store` (the model, also used by the simulator).
One contract suite, `tests/contract`, runs against both.

Keys are read, watched and deleted by ranges: a range that ends with a slash is a prefix, any other is one key.

Three things matter more than the rest:

* Every key carries revisions. A transaction that compares them is the only way this project changes shared state.
* A call ends in success, `StoreUnavailable` (nothing is known about the effect of a write), or another `StoreError`.
* A watch never skips silently: it delivers every revision from `from_revision` on, or a `Resync`. A watch that loses
  its server goes on by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from elasticrt.errors import StoreError

ETCD_WAIT_S = 60.0
"""Default of the seconds that a joining node waits for an answer from etcd. Members ride out longer outages."""


# The names of these exceptions state a condition, as "connected" and "suspended" do, so they do not end in Error.
class StoreUnavailable(StoreError):  # noqa: N818
    """No answer within the deadline. A write may or may not have happened: read before trying again."""


class StoreRefused(StoreError):  # noqa: N818
    """etcd answered and said no: no login, no permission, no space, or a request that is too large."""


class StoreBlocked(StoreRefused):
    """etcd says no until an operator has changed something in it: the login has no permission, or there is no space.

    Without space, reads and leases work.
    """


class LeaseLost(StoreError):  # noqa: N818
    """The lease does not exist, or not any more."""


def covers(range_: str, key: str) -> bool:
    """Whether the range `range_` contains `key`."""
    return key.startswith(range_) if range_.endswith("/") else key == range_


@dataclass(frozen=True)
class KeyValue:
    """One key as stored.

    Attributes:
        key: its name.
        value: its value.
        create_revision: the store's revision at which the key was created, counted from 1.
        mod_revision: the store's revision of the key's last change.
        lease: the lease that the key is bound to, 0 for none.
    """

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


@dataclass(frozen=True)
class Compare:
    """One guard of a transaction: a property of a key equals an expected value.

    Attributes:
        key: the key.
        target: the property: its create or mod revision, its lease, or its value.
        expected: the value. For an absent key the numbers are 0, as in etcd, and no value is equal to its value.
    """

    key: str
    target: Literal["create", "mod", "lease", "value"]
    expected: int | bytes


@dataclass(frozen=True)
class Put:
    """Write `value` under `key`, bound to the lease `lease` (0: to none)."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True)
class Delete:
    """Delete a key, or all keys of a range. Deleting nothing is not an error."""

    key: str


@dataclass(frozen=True)
class Txn:
    """If all compares hold, all operations happen, at one revision. Otherwise nothing does.

    Attributes:
        compares: the guards.
        operations: the writes, at most 128 (etcd's limit).
        why: one sentence for logs and for the reader of a trace.
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
    """One change. For a deletion `value` is None, and `mod_revision` is the revision of the deletion."""

    key: str
    value: KeyValue | None
    mod_revision: int


@dataclass(frozen=True)
class Changes:
    """Events of one or more revisions, in order. `revision` is the newest of these revisions."""

    events: tuple[Event, ...]
    revision: int


@dataclass(frozen=True)
class Resync:
    """The watch cannot go on from where it was. Read again, then watch from the read's revision + 1.

    `reason` is "compacted", "replaced" (another store answers: its id differs or its revision went back) or "cancelled:
    ...".
    """

    reason: str


WatchSink = Callable[[Changes | Resync], None]
"""Called on the store's own thread. It must only hand the notice over (put it into a queue) and return."""


@dataclass(frozen=True)
class Lease:
    """A granted lease. `ttl_s` is what the server granted, in seconds, which can be more than was asked for."""

    lease_id: int
    ttl_s: float


@dataclass(frozen=True)
class ServerStatus:
    """What an etcd says of itself.

    Attributes:
        version: its version.
        used_bytes: the size of its data.
        quota_bytes: the limit of that size, 0 if the server does not say.
        troubles: its alarms.
    """

    version: str
    used_bytes: int
    quota_bytes: int
    troubles: tuple[str, ...]


class Watch(Protocol):
    """A running watch."""

    def cancel(self) -> None:
        """Stop the watch. The sink is not called after this returns, except for a call already under way."""


class Store(Protocol):
    """A linearizable key-value store with leases, transactions and watches. Safe to call from several threads."""

    def read(self, range_: str, *, limit: int = 0, by_create: bool = False) -> RangeRead:
        """All keys of a range, linearizable.

        `by_create` sorts by create revision, oldest first (otherwise by key). `limit` 0 means all keys. Raises
        StoreUnavailable, StoreRefused.
        """

    def commit(self, txn: Txn) -> TxnResult:
        """Run a transaction once. Raises StoreUnavailable (its effect is unknown), LeaseLost, StoreRefused."""

    def grant(self, ttl_s: float) -> Lease:
        """Get a new lease of `ttl_s` seconds. Raises StoreUnavailable, StoreRefused."""

    def keep_alive(self, lease_id: int) -> float:
        """Renew a lease. Returns the remaining TTL in seconds. Raises LeaseLost when it has ended, StoreUnavailable."""

    def revoke(self, lease_id: int) -> None:
        """End a lease and delete its keys at once. A lease that has ended already is not an error."""

    def watch(self, range_: str, sink: WatchSink, *, from_revision: int) -> Watch:
        """Deliver every change of a range from `from_revision` on, until the watch is cancelled."""

    def close(self) -> None:
        """Cancel all watches, close the connections. Leases live on until they are revoked or expire."""


def bracketed(host: str) -> str:
    """`host` in the form in which it stands before a port: an IPv6 address gets brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


@dataclass(frozen=True)
class Address:
    """An etcd endpoint as parsed from an option: `http://host:port`, `https://host:port`, or `unix:/path` of a socket.

    For a socket `host` is its path, and `port` is 0.
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
    """How to authenticate to etcd: paths of files and a user name, no secrets. None means: not used."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    user: str | None = None
    password_file: str | None = None
