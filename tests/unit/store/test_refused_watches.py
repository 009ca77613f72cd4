"""A watch that etcd refuses is begun again with a new login, or told."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from elasticrt.store import proto
from elasticrt.store.etcd import EtcdStore
from elasticrt.store.protocol import Address, Changes, Credentials, Event, Resync

NO_WATCH = -1
"""What etcd 3.5.9 and later names a watch that it refuses."""


class Refusing(grpc.GenericRpcHandler):
    """An etcd 3.5.9 whose first login has expired already, and whose user may watch keys below /mine/ only."""

    def __init__(self) -> None:
        self.logins = 0

    def service(self, details: Any) -> Any:
        """Its logins and its watches, as raw bytes."""
        if details.method.endswith("Watch"):
            return grpc.stream_stream_rpc_method_handler(self._watch)
        return grpc.unary_unary_rpc_method_handler(self._log_in)

    def _log_in(self, _: bytes, context: grpc.ServicerContext) -> bytes:
        self.logins += 1
        return proto.AuthenticateResponse(token=str(self.logins)).SerializeToString()

    def _watch(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        expired = dict(context.invocation_metadata())["token"] == "1"
        for request in map(proto.WatchRequest.FromString, requests):
            # To the end of a watch that it has refused, etcd says nothing.
            if not request.HasField("create_request"):
                continue
            create = request.create_request
            header = proto.ResponseHeader(cluster_id=1, revision=10)
            answer = {"header": header, "watch_id": create.watch_id, "created": True}
            if expired or not create.key.startswith(b"/mine/"):
                reason = f"etcdserver: {'invalid auth token' if expired else 'permission denied'}"
                answer |= {"watch_id": NO_WATCH, "canceled": True, "cancel_reason": reason}
            yield proto.WatchResponse(**answer).SerializeToString()
            if not answer.get("canceled"):
                change = proto.Event(type="DELETE", kv=proto.KeyValue(key=b"/mine/key", mod_revision=10))
                yield proto.WatchResponse(header=header, watch_id=create.watch_id, events=[change]).SerializeToString()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EtcdStore]:
    """A store at that server, with a login."""
    server = grpc.server(ThreadPoolExecutor(4), handlers=(Refusing(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    (tmp_path / "password").write_text("secret")
    credentials = Credentials(user="u", password_file=str(tmp_path / "password"))
    store = EtcdStore((Address("http", "127.0.0.1", port),), credentials)
    yield store
    store.close()
    server.stop(None)


def test_a_refused_watch_without_a_name(store: EtcdStore) -> None:
    """E09: a refusal that names no watch is that of the oldest one without an answer: it logs in again, and is told
    when that does not help; other watches go on."""
    told: queue.Queue[tuple[str, Changes | Resync]] = queue.Queue()
    for key in ("/mine/", "/other/"):
        store.watch(key, lambda notice, key=key: told.put((key, notice)), from_revision=10)
    notices = dict(told.get(timeout=20) for _ in range(2))
    assert notices["/mine/"] == Changes((Event("/mine/key", None, 10),), 10)
    refused = notices["/other/"]
    assert isinstance(refused, Resync)
    assert refused.reason.startswith("cancelled: etcdserver: permission denied (etcd at")
