"""Every question to etcd carries the operation's deadline: a server that stands still holds nobody for ever."""

from __future__ import annotations

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

    def service(self, details: Any) -> Any:
        """Any method, as raw bytes."""
        name = details.method.rpartition("/")[2]

        def answer(request: Any, context: grpc.ServicerContext) -> bytes:
            self.asked[name] = context.time_remaining()
            if name == "Authenticate":
                return proto.AuthenticateResponse(token="t").SerializeToString()
            if name == "LeaseGrant":
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, "etcdserver: lease already exists")
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied")
            raise AssertionError("abort raises")

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
        (lambda store: store.grant(5), {"LeaseGrant", "LeaseTimeToLive"}),
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
