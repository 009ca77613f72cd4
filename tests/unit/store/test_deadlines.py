"""Every question to etcd says how long it waits for its answer: a server that stands still holds nobody for ever."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from elasticrt.store import proto
from elasticrt.store.etcd import EtcdStore
from elasticrt.store.protocol import Address, Credentials, Put, StoreRefused, Txn

TIMEOUT_S = 7.0


class Listening(grpc.GenericRpcHandler):
    """A server that notes how long each caller is willing to wait, and refuses all but the login."""

    def __init__(self) -> None:
        self.asked: dict[str, float] = {}
        self.watched: queue.Queue[dict[str, str]] = queue.Queue()

    def service(self, details: Any) -> Any:
        """Any method, as raw bytes."""
        name = details.method.rpartition("/")[2]

        def answer(request: Any, context: grpc.ServicerContext) -> bytes:
            self.asked[name] = context.time_remaining()
            if name == "Authenticate":
                return proto.AuthenticateResponse(token="t").SerializeToString()
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied")
            raise AssertionError("abort raises")

        def watch(_: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
            self.watched.put(dict(context.invocation_metadata()))
            return iter(())

        if name == "Watch":
            return grpc.stream_stream_rpc_method_handler(watch)
        if name == "LeaseKeepAlive":
            return grpc.stream_stream_rpc_method_handler(lambda request, context: iter([answer(request, context)]))
        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def server() -> Iterator[tuple[Listening, Address]]:
    """One in this process."""
    listening = Listening()
    served = grpc.server(ThreadPoolExecutor(2), handlers=(listening,))
    port = served.add_insecure_port("127.0.0.1:0")
    served.start()
    yield listening, Address("http", "127.0.0.1", port)
    served.stop(None)


@pytest.mark.parametrize(
    ("operation", "methods"),
    [
        (lambda store: store.read("/"), {"Range"}),
        (lambda store: store.commit(Txn((), (Put("/a", b""),), "")), {"Txn"}),
        (lambda store: store.grant(5), {"LeaseGrant"}),
        (lambda store: store.keep_alive(1), {"LeaseKeepAlive"}),
        (lambda store: store.revoke(1), {"LeaseRevoke"}),
    ],
    ids=["read", "commit", "grant", "keep-alive", "revoke"],
)
def test_every_question_has_its_deadline(
    server: tuple[Listening, Address],
    tmp_path: Path,
    operation: Callable[[EtcdStore], object],
    methods: set[str],
) -> None:
    """E13: the login and each part of each operation says how long it waits, and that is the store's timeout."""
    listening, address = server
    (tmp_path / "password").write_text("secret")
    credentials = Credentials(user="u", password_file=str(tmp_path / "password"))
    store = EtcdStore((address,), credentials, timeout_s=TIMEOUT_S)
    try:
        with pytest.raises(StoreRefused, match="permission denied"):
            operation(store)
    finally:
        store.close()
    assert set(listening.asked) == {"Authenticate", *methods}
    for method, seconds in listening.asked.items():
        assert 0 < seconds < TIMEOUT_S + 1, method  # On the wire it is rounded up.


@pytest.mark.parametrize(
    ("operation", "method", "at_least_s", "at_most_s"),
    [
        (lambda store: store.read("/"), "Range", 0.0, TIMEOUT_S / 2),
        # Its effect would be unknown: it is not asked of another server, so it may take the whole time.
        (lambda store: store.commit(Txn((), (Put("/a", b""),), "")), "Txn", TIMEOUT_S / 2 + 1, TIMEOUT_S),
    ],
    ids=["read", "commit"],
)
def test_a_silent_server_has_its_share_of_the_time(
    server: tuple[Listening, Address],
    operation: Callable[[EtcdStore], object],
    method: str,
    at_least_s: float,
    at_most_s: float,
) -> None:
    """N14: of two endpoints each gets half of the time for a question that may be repeated, the second one too."""
    listening, address = server
    store = EtcdStore((address, address), timeout_s=TIMEOUT_S)
    try:
        with pytest.raises(StoreRefused, match="permission denied"):
            operation(store)
    finally:
        store.close()
    assert at_least_s < listening.asked[method] < at_most_s + 1


def test_a_watch_wants_a_server_with_a_leader(server: tuple[Listening, Address]) -> None:
    """E02: a member that has lost the others ends its watches, instead of keeping them and hearing nothing."""
    listening, address = server
    store = EtcdStore((address,), timeout_s=TIMEOUT_S)
    try:
        store.watch("/", lambda _: None, from_revision=1)
        assert listening.watched.get(timeout=20)["hasleader"] == "true"
    finally:
        store.close()
