"""etcd's messages and services as Python modules, generated once from `ert_etcd.proto` and committed.

The `etcd3` client's own generated modules do not load with protobuf 4 or newer, and this project pins no protobuf: the
user's tensorboard or wandb decides. `generate.sh` regenerates these (`sh elasticrt/store/proto/generate.sh`). The
package has the shape of `etcd3.etcdrpc`, in whose place `elasticrt.store.etcd` puts it.
"""

from elasticrt.store.proto.ert_etcd_pb2 import *  # noqa: F403  The shape of `etcd3.etcdrpc`: all messages, all stubs.
from elasticrt.store.proto.ert_etcd_pb2_grpc import *  # noqa: F403
