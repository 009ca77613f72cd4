"""The stores under contract: the model, and real etcd servers of two versions. One server serves all tests."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest

from elasticrt.store.protocol import Address, Changes, Event, KeyValue, Put, Resync, Store, Txn
from tests.memory_store import MemoryServer, MemoryStore
from tests.servers import debian_binary, etcd_server, wait_until, wheel_binary

KINDS = ("memory", "wheel", "debian")


@dataclass
class World:
    """A store to test, a prefix of its own in it, and what an operator or the time can do to it."""

    prefix: str
    connect: Callable[[], Store]
    compact: Callable[[int], None]
    elapse: Callable[[float], None]
    stores: list[Store] = field(default_factory=list)

    def store(self) -> Store:
        """A new client."""
        self.stores.append(self.connect())
        return self.stores[-1]

    def put(self, store: Store, key: str, value: bytes = b"", lease: int = 0) -> int:
        """Write one key below the prefix; the new revision."""
        return store.commit(Txn((), (Put(self.prefix + key, value, lease),), "test")).revision


class Inbox:
    """A watch sink that keeps what it got."""

    def __init__(self) -> None:
        self.notices: list[Changes | Resync] = []

    def __call__(self, notice: Changes | Resync) -> None:
        """Be the sink."""
        self.notices.append(notice)

    @property
    def events(self) -> list[Event]:
        """All changes so far."""
        return [event for notice in self.notices if isinstance(notice, Changes) for event in notice.events]

    @property
    def resyncs(self) -> list[str]:
        """Why the watch ended, if it did."""
        return [notice.reason for notice in self.notices if isinstance(notice, Resync)]

    def wait(self, count: int) -> list[Event]:
        """The events, as soon as there are `count`."""
        wait_until(lambda: len(self.events) >= count, f"{count} events came, got {self.notices}")
        return self.events


def compact_etcd(address: Address, revision: int) -> None:
    """Compact a real server."""
    from elasticrt.store import proto
    from elasticrt.store.connection import grpc

    with grpc.insecure_channel(f"{address.host}:{address.port}") as channel:
        serialize, parse = proto.CompactionRequest.SerializeToString, proto.CompactionResponse.FromString
        channel.unary_unary("/etcdserverpb.KV/Compact", serialize, parse)(
            proto.CompactionRequest(revision=revision), timeout=10
        )


Backend = tuple[Callable[[], Store], Callable[[int], None], Callable[[float], None]]


def memory_backend() -> Backend:
    """The model, with a clock that only `elapse` moves."""
    clock = [0.0]
    server = MemoryServer(lambda: clock[0])

    def elapse(seconds: float) -> None:
        clock[0] += seconds
        server.expire()

    return lambda: MemoryStore(server), server.compact, elapse


def etcd_backend(address: Address) -> Backend:
    """A real server; time elapses by itself."""

    def connect() -> Store:
        from elasticrt.store.etcd import EtcdStore

        return EtcdStore((address,), timeout_s=10.0)

    return connect, lambda revision: compact_etcd(address, revision), lambda _: None


@pytest.fixture(scope="session", params=KINDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """One per kind of store, for all tests; Debian's server is skipped loudly where it can't be had."""
    if request.param == "memory":
        yield memory_backend()
    elif request.param == "wheel":
        with etcd_server(wheel_binary()) as server:
            yield etcd_backend(server.address)
    else:
        with tempfile.TemporaryDirectory(prefix="ert-debian-") as directory:
            binary, origin = debian_binary(Path(directory))
            if binary is None:
                pytest.skip(f"Debian's etcd can't be had: {origin}")
            with etcd_server(binary) as server:
                yield etcd_backend(server.address)


@pytest.fixture
def world(backend: Backend) -> Iterator[World]:
    """A prefix of its own for each test."""
    world = World(f"/contract/{uuid4().hex}/", *backend)
    yield world
    for store in world.stores:
        store.close()


def values(keys: tuple[KeyValue, ...]) -> dict[str, bytes]:
    """Keys and values, for short comparisons."""
    return {kv.key: kv.value for kv in keys}
