"""etcd's messages, generated once from `ert_etcd.proto` and committed, and the calls that we make with them.

The `etcd3` client's own generated modules do not load with protobuf 4 or newer, and this project pins no protobuf: the
user's tensorboard or wandb decides. `generate.sh` regenerates the messages (`sh elasticrt/store/proto/generate.sh`).
The package has the shape of `etcd3.etcdrpc`, in whose place `elasticrt.store.etcd` puts it.
"""

from __future__ import annotations

from typing import Any

from elasticrt.store.proto import ert_etcd_pb2 as messages
from elasticrt.store.proto.ert_etcd_pb2 import *  # noqa: F403  The shape of `etcd3.etcdrpc`: all messages, all stubs.


def _stub(service: str, kind: str = "unary_unary", **calls: tuple[str, str]) -> type:
    """A class of stubs: made from a gRPC channel, it has a method for each call of one of etcd's services.

    `calls` gives the names of a call's request and response, `kind` how many of these it takes.
    """

    def __init__(self: Any, channel: Any) -> None:  # noqa: N807  It becomes a method.
        for name, (request, response) in calls.items():
            call = getattr(channel, kind)(
                f"/etcdserverpb.{service}/{name}",
                request_serializer=getattr(messages, request).SerializeToString,
                response_deserializer=getattr(messages, response).FromString,
            )
            setattr(self, name, call)

    return type(f"{service}Stub", (), {"__init__": __init__})


KVStub = _stub(
    "KV",
    Range=("RangeRequest", "RangeResponse"),
    Txn=("TxnRequest", "TxnResponse"),
    Compact=("CompactionRequest", "CompactionResponse"),
)
LeaseStub = _stub(
    "Lease",
    LeaseGrant=("LeaseGrantRequest", "LeaseGrantResponse"),
    LeaseRevoke=("LeaseRevokeRequest", "LeaseRevokeResponse"),
    LeaseTimeToLive=("LeaseTimeToLiveRequest", "LeaseTimeToLiveResponse"),
)
KeepAliveStub = _stub("Lease", "stream_stream", LeaseKeepAlive=("LeaseKeepAliveRequest", "LeaseKeepAliveResponse"))
WatchStub = _stub("Watch", "stream_stream", Watch=("WatchRequest", "WatchResponse"))
AuthStub = _stub("Auth", Authenticate=("AuthenticateRequest", "AuthenticateResponse"))
ClusterStub, MaintenanceStub = _stub("Cluster"), _stub("Maintenance")
"""An etcd3 client makes them as well; nothing of theirs is called."""
