"""etcd's messages, generated once from `ert_etcd.proto` and committed, and the calls that we make with them.

The `etcd3` client's own generated modules do not load with protobuf 4 or newer, and this project pins no protobuf: the
user's tensorboard or wandb decides. `generate.sh` regenerates the messages (`sh elasticrt/store/proto/generate.sh`).
The package has the shape of `etcd3.etcdrpc`, in whose place `elasticrt.store.etcd` puts it.
"""

from __future__ import annotations

from typing import Any

from elasticrt.store.proto import ert_etcd_pb2 as messages
from elasticrt.store.proto.ert_etcd_pb2 import *  # noqa: F403  The shape of `etcd3.etcdrpc`: all messages, all stubs.

_UNARY, _STREAM = "unary_unary", "stream_stream"


def _stub(service: str, **calls: tuple[str, str, str]) -> type:
    """A class of stubs: made from a gRPC channel, it has a method for each call of one of etcd's services.

    `calls` gives the names of a call's request and response, and whether it takes one of each or streams of them.
    """

    def __init__(self: Any, channel: Any) -> None:  # noqa: N807  It becomes a method.
        for name, (request, response, kind) in calls.items():
            call = getattr(channel, kind)(
                f"/etcdserverpb.{service}/{name}",
                request_serializer=getattr(messages, request).SerializeToString,
                response_deserializer=getattr(messages, response).FromString,
            )
            setattr(self, name, call)

    return type(f"{service}Stub", (), {"__init__": __init__})


KVStub = _stub(
    "KV",
    Range=("RangeRequest", "RangeResponse", _UNARY),
    Txn=("TxnRequest", "TxnResponse", _UNARY),
    Compact=("CompactionRequest", "CompactionResponse", _UNARY),
)
LeaseStub = _stub(
    "Lease",
    LeaseGrant=("LeaseGrantRequest", "LeaseGrantResponse", _UNARY),
    LeaseRevoke=("LeaseRevokeRequest", "LeaseRevokeResponse", _UNARY),
    # etcd has a stream for it; to a server a call with one request and one answer is a short stream.
    LeaseKeepAlive=("LeaseKeepAliveRequest", "LeaseKeepAliveResponse", _UNARY),
)
WatchStub = _stub("Watch", Watch=("WatchRequest", "WatchResponse", _STREAM))
AuthStub = _stub("Auth", Authenticate=("AuthenticateRequest", "AuthenticateResponse", _UNARY))
MaintenanceStub = _stub("Maintenance", Status=("StatusRequest", "StatusResponse", _UNARY))
ClusterStub = _stub("Cluster")
"""An etcd3 client makes one as well; nothing of it is called."""
