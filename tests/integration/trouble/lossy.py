"""A way to etcd that loses single messages: the answer to one transaction, the request, or the lease that it names.

`Lossy` is a gRPC proxy, not one of bytes: it can tell a publication from a commit, and lose exactly one of them while
leases, reads and watches go on. The client sees what it would see of a network: nothing, until its own deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Literal

from elasticrt.rendezvous.records import Keys
from elasticrt.store import proto
from elasticrt.store.connection import grpc
from elasticrt.store.protocol import Address

Loss = Literal["answer", "request", "late", "lease"]
"""What is lost. "late": the request arrives after its sender has given up, and nobody expects it any more.
"lease": the lease that it names is revoked just before it arrives."""

TXN = "/etcdserverpb.KV/Txn"
STREAMS = ("/etcdserverpb.Watch/Watch", "/etcdserverpb.Lease/LeaseKeepAlive")
PASSED_ON = ("token", "hasleader")
LATE_S = 1.0
HELD_S_MAX = 30.0
"""Nobody's deadline is longer; a call is held until its sender has given it up."""

KINDS = (
    *("join", "register", "announce", "roster", "publish", "report", "handover", "evict", "leave"),
    *("commit", "claim", "settle", "finish"),
)
"""What `kind_of` says of the transactions of `rendezvous.transactions`."""


def kind_of(keys: Keys, txn: Any) -> str:
    """Which of `fence`'s transactions this is, by what it writes; "" for the ones that only clear up."""
    writes = {op.request_put.key.decode(): op.request_put for op in txn.success if op.HasField("request_put")}
    deletes = [op.request_delete_range.key.decode() for op in txn.success if op.HasField("request_delete_range")]
    created = {c.key.decode(): c.create_revision for c in txn.compare if c.target == proto.Compare.CREATE}
    prefixes = {
        keys.rosters: "roster",
        keys.generation: "publish",
        keys.handover: "handover",
        keys.checkpoint: "commit",
        keys.results: "finish",
        keys.spec: "join",
    }
    for prefix, kind in prefixes.items():
        if any(key.startswith(prefix) for key in writes):
            return kind
    if any(key.startswith(keys.members) for key in deletes):
        return "leave" if any(key in created for key in deletes) else "evict"
    for key, put in writes.items():
        if key.startswith(keys.members):
            return "announce" if created[key] else "register"
        if key.startswith(keys.all_reports):
            return "report"
        if key.startswith(keys.preparations):
            return "claim" if put.lease else "settle"
    return ""


class Lossy:
    """The proxy. Use it as a context manager.

    Attributes:
        address: where clients connect.
        lost: the kinds that have been lost so far, in order.
    """

    def __init__(self, target: Address, run_id: str) -> None:
        self._keys = Keys(run_id)
        self._channel = grpc.insecure_channel(f"{target.host}:{target.port}")
        # Each watch or keep-alive under way takes one thread for as long as it lasts.
        self._server = grpc.server(ThreadPoolExecutor(64, "lossy"), handlers=[_Handler(self)])
        self.address = Address("http", "127.0.0.1", self._server.add_insecure_port("127.0.0.1:0"))
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._to_lose: dict[str, Loss] = {}
        self.lost: list[str] = []

    def lose(self, kind: str, loss: Loss) -> None:
        """Lose the next transaction of this kind, whoever sends it."""
        assert kind in KINDS, kind
        with self._lock:
            self._to_lose[kind] = loss

    def __enter__(self) -> Lossy:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._server.stop(0).wait(10)
        self._channel.close()

    def unary(self, method: str, request: bytes, context: Any) -> bytes:
        """Pass one call on, or lose it."""
        loss = self._loss(proto.TxnRequest.FromString(request)) if method == TXN else None
        timeout_s = _timeout_s(context)
        if loss in ("request", "late"):
            self._hold(context)
        if loss == "request":
            return b""
        if loss == "lease":
            self._revoke(proto.TxnRequest.FromString(request))
        if loss == "late":
            self._closing.wait(LATE_S)
            timeout_s = None
        try:
            answer: bytes = self._channel.unary_unary(method)(request, timeout=timeout_s, metadata=_metadata(context))
        except grpc.RpcError as error:
            context.abort(error.code(), error.details())
        if loss == "answer":
            self._hold(context)
        return answer

    def stream(self, method: str, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Pass a watch or keep-alive on in both directions."""
        call = self._channel.stream_stream(method)(requests, timeout=_timeout_s(context), metadata=_metadata(context))
        context.add_callback(call.cancel)
        try:
            yield from call
        except grpc.RpcError as error:
            context.abort(error.code(), error.details())

    def _loss(self, txn: Any) -> Loss | None:
        kind = kind_of(self._keys, txn)
        with self._lock:
            loss = self._to_lose.pop(kind, None)
            if loss is not None:
                self.lost.append(kind)
        return loss

    def _revoke(self, txn: Any) -> None:
        (lease,) = {op.request_put.lease for op in txn.success} - {0}
        proto.LeaseStub(self._channel).LeaseRevoke(proto.LeaseRevokeRequest(ID=lease), timeout=10)

    def _hold(self, context: Any) -> None:
        """Say nothing until the caller has given up."""
        given_up = threading.Event()
        if not context.add_callback(given_up.set):
            return
        deadline = time.monotonic() + HELD_S_MAX
        while not given_up.wait(0.05) and not self._closing.is_set() and time.monotonic() < deadline:
            continue


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc's stubs leave this class untyped.
    """Every method of every service, as bytes."""

    def __init__(self, proxy: Lossy) -> None:
        self._proxy = proxy

    def service(self, handler_call_details: Any) -> Any:
        """See grpc."""
        method = handler_call_details.method
        if method in STREAMS:
            return grpc.stream_stream_rpc_method_handler(partial(self._proxy.stream, method))
        return grpc.unary_unary_rpc_method_handler(partial(self._proxy.unary, method))


def _metadata(context: Any) -> tuple[tuple[str, str], ...]:
    return tuple((entry.key, entry.value) for entry in context.invocation_metadata() if entry.key in PASSED_ON)


def _timeout_s(context: Any) -> float | None:
    """How long the caller will wait. gRPC gives a number of years for "for ever", and does not take it back."""
    remaining_s: float = context.time_remaining()
    return remaining_s if remaining_s < 1e6 else None
