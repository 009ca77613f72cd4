"""etcd's messages, generated once from `ert_etcd.proto` and committed, and the calls that we make with them.

The `etcd3` client's own generated modules do not load with protobuf 4 or newer, and this project pins no protobuf: the
user's tensorboard or wandb decides. `generate.sh` regenerates the messages (`sh elasticrt/store/proto/generate.sh`).
The package has the shape of `etcd3.etcdrpc`, in whose place `elasticrt.store.etcd` puts it.
"""

from __future__ import annotations

from typing import Any

from elasticrt.store.proto import ert_etcd_pb2 as messages
from elasticrt.store.proto.ert_etcd_pb2 import *  # noqa: F403  The shape of `etcd3.etcdrpc`: all messages, all stubs.


def _stub(service: str, *calls: str, kind: str = "unary_unary") -> type:
    """A class of stubs: made from a gRPC channel, it has a method for each of the `calls` of one of etcd's services.

    `kind`: whether a call takes one request and one response, or streams of them.
    """

    def __init__(self: Any, channel: Any) -> None:  # noqa: N807  It becomes a method.
        for name in calls:
            call = getattr(channel, kind)(
                f"/etcdserverpb.{service}/{name}",
                request_serializer=getattr(messages, f"{name}Request").SerializeToString,
                response_deserializer=getattr(messages, f"{name}Response").FromString,
            )
            setattr(self, name, call)

    return type(f"{service}Stub", (), {"__init__": __init__})


KVStub = _stub("KV", "Range", "Txn")
# etcd has a stream for LeaseKeepAlive; to a server a call with one request and one answer is a short stream.
LeaseStub = _stub("Lease", "LeaseGrant", "LeaseRevoke", "LeaseKeepAlive")
WatchStub = _stub("Watch", "Watch", kind="stream_stream")
AuthStub = _stub("Auth", "Authenticate")
MaintenanceStub = _stub("Maintenance", "Status")
ClusterStub = _stub("Cluster")
"""An etcd3 client makes one as well; nothing of it is called."""
