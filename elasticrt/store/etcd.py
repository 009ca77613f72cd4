"""The real store: `protocol.Store` on etcd. The only file that imports the `etcd3` client.

etcd3 makes the connection (channel, TLS). Its generated messages do not load beside a current protobuf, so ours take
their place before it is imported. Its watcher, locks and lease helpers are not used, because they lose events, spin or
hang when a server goes away. This package adds one deadline per operation, endpoints in rotation, and transactions that
are sent once.

Import this module late: it takes about 0.1 s and loads grpc.
"""

from __future__ import annotations

import math
import ssl
import sys
from contextlib import suppress
from typing import Any

from elasticrt.errors import ConfigError
from elasticrt.store import etcd_messages, proto
from elasticrt.store.connection import Connections, read_file
from elasticrt.store.etcd_server import check_pem_files
from elasticrt.store.protocol import (
    Address,
    Credentials,
    Lease,
    LeaseLost,
    RangeRead,
    ServerStatus,
    Txn,
    TxnResult,
    WatchSink,
    bracketed,
)
from elasticrt.store.watcher import EtcdWatch, Watcher

if "etcd3" not in sys.modules:
    sys.modules["etcd3.etcdrpc"] = proto

# etcd3 makes the channel of each endpoint from target, TLS files and options. It is imported only now, when its
# messages have been replaced.
import etcd3

CHANNEL_OPTIONS = (
    # A server that vanished without a word is noticed after 6 + 2 s. etcd closes connections that ping more often than
    # every 5 s.
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    # After an outage gRPC by default waits up to two minutes before it tries again.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A pod that comes back has another address. By default gRPC looks up its name at most every 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # etcd's own limits apply, not gRPC's default of 4 MiB.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Connections are not shared with other stores of this process: a failure of one of those would delay this store.
    ("grpc.use_local_subchannel_pool", 1),
    # etcd is inside the cluster, so a web proxy from the environment is never on the way to it.
    ("grpc.enable_http_proxy", 0),
)


class EtcdStore:
    """`protocol.Store` on one etcd (a server, or a cluster reached by several endpoints).

    The constructor connects to nothing: the first operation does. Raises ConfigError for unusable credentials.

    Args:
        addresses: the endpoints.
        credentials: how to authenticate; None: not at all.
        timeout_s: bounds every operation, in seconds.
    """

    def __init__(
        self, addresses: tuple[Address, ...], credentials: Credentials | None = None, *, timeout_s: float = 2.0
    ) -> None:
        credentials = credentials or Credentials()
        _check(addresses, credentials)
        self._connections = Connections(addresses, credentials, _dial, timeout_s)
        self._watcher = Watcher(self._connections)

    def read(self, range_: str, *, limit: int = 0, by_create: bool = False) -> RangeRead:
        """See `protocol.Store`."""
        request = etcd_messages.range_request(range_, limit=limit, by_create=by_create)
        found = self._connections.ask(f"read {range_}", lambda endpoint: endpoint.kv.Range, request)
        snapshot = etcd_messages.snapshot(found)
        self._connections.store_id = snapshot.store_id
        return snapshot

    def commit(self, txn: Txn) -> TxnResult:
        """See `protocol.Store`. Sent once, and again only after an error which proves that etcd never had it."""
        request = etcd_messages.txn_request(txn)
        what = f"carry out a transaction ({txn.why})"
        response = self._connections.ask(what, lambda endpoint: endpoint.kv.Txn, request, repeatable=False)
        return TxnResult(response.succeeded, response.header.revision)

    def grant(self, ttl_s: float) -> Lease:
        """See `protocol.Store`. A grant whose answer was lost is repeated.

        The lost lease has no keys and ends by itself.
        """
        request = proto.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        granted = self._connections.ask("grant a lease", lambda endpoint: endpoint.lease.LeaseGrant, request)
        return Lease(granted.ID, float(granted.TTL))

    def keep_alive(self, lease_id: int) -> float:
        """See `protocol.Store`."""
        request = proto.LeaseKeepAliveRequest(ID=lease_id)
        answer = self._connections.ask("keep a lease alive", lambda endpoint: endpoint.lease.LeaseKeepAlive, request)
        if answer.TTL <= 0:
            raise LeaseLost(f"lease {lease_id:x} does not exist any more ({', '.join(self._connections.names)})")
        return float(answer.TTL)

    def revoke(self, lease_id: int) -> None:
        """See `protocol.Store`."""
        request = proto.LeaseRevokeRequest(ID=lease_id)
        with suppress(LeaseLost):
            self._connections.ask("revoke a lease", lambda endpoint: endpoint.lease.LeaseRevoke, request)

    def watch(self, range_: str, sink: WatchSink, *, from_revision: int) -> EtcdWatch:
        """See `protocol.Store`. After a `Resync` the watch is over. A new watch goes on from a new read."""
        return self._watcher.add(range_, sink, from_revision=from_revision)

    def status(self) -> ServerStatus:
        """The server's status. Raises StoreUnavailable, StoreRefused."""
        request = proto.StatusRequest()
        found = self._connections.ask("ask for its status", lambda endpoint: endpoint.maintenance.Status, request)
        return ServerStatus(found.version, found.dbSize, found.dbSizeQuota, tuple(found.errors))

    def close(self) -> None:
        """See `protocol.Store`. Operations under way in other threads end with StoreUnavailable."""
        self._watcher.close()
        self._connections.close()


def _dial(address: Address, credentials: Credentials) -> Any:
    """An etcd3 client for one address. Its first RPC connects."""
    # etcd3 joins host and port to gRPC's target "host:port". The target of a socket is "unix:/path", so the two parts
    # are "unix" and the path.
    unix = address.scheme == "unix"
    host, port = ("unix", address.host) if unix else (bracketed(address.host), address.port)
    tls: dict[str, str | None] = {}
    if address.scheme == "https":
        trusted = _check_files(credentials)
        tls = {"ca_cert": trusted, "cert_cert": credentials.cert_file, "cert_key": credentials.key_file}
    return etcd3.client(host=host, port=port, grpc_options=CHANNEL_OPTIONS, **tls)


def _check(addresses: tuple[Address, ...], credentials: Credentials) -> None:
    # The PyPI package etcd3-py installs a module of the same name.
    """Raises ConfigError for credentials that cannot be used with these addresses."""
    if not hasattr(etcd3, "Etcd3Client"):
        raise ConfigError(
            "another package took the name of the etcd client",
            str(getattr(etcd3, "__file__", "etcd3")),
            expected="the module of the PyPI package etcd3",
            remedy="pip uninstall etcd3-py; pip install --force-reinstall etcd3",
        )
    tls_files = (credentials.ca_file, credentials.cert_file, credentials.key_file)
    if any(tls_files) and not all(address.scheme == "https" for address in addresses):
        got = ", ".join(str(address) for address in addresses)
        what, remedy = "TLS files for an endpoint without TLS", "Write https://, or leave the files out"
        raise ConfigError(what, "--etcd", got=got, expected="https://", remedy=remedy)
    expected, remedy = "both or neither", "Give the other one as well"
    if (credentials.cert_file is None) != (credentials.key_file is None):
        what, where = "a client certificate without its key, or the reverse", "--etcd-cert-file, --etcd-key-file"
        raise ConfigError(what, where, expected=expected, remedy=remedy)
    if (credentials.user is None) != (credentials.password_file is None):
        what, where = "a user without a password file, or the reverse", "--etcd-user, --etcd-password-file"
        raise ConfigError(what, where, expected=expected, remedy=remedy)
    if any(address.scheme == "https" for address in addresses):
        # The pair is checked only here, and not with each connection: while the files are being renewed the key may
        # belong to another certificate for a moment.
        trusted, where = _check_files(credentials), "--etcd-ca-file, --etcd-cert-file, --etcd-key-file"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        check_pem_files(context, where, trusted, credentials.cert_file, credentials.key_file)
    if credentials.password_file is not None:
        read_file(credentials.password_file)


def _check_files(credentials: Credentials) -> str:
    """The file of the authorities to trust. Raises ConfigError if a TLS file cannot be read."""
    trusted = credentials.ca_file or ssl.get_default_verify_paths().cafile
    if trusted is None:
        raise ConfigError("no certificate authority to trust", "--etcd", expected="--etcd-ca-file")
    for path in (trusted, credentials.cert_file, credentials.key_file):
        if path is not None:
            # Certificates may have comments in any encoding.
            read_file(path, errors="replace")
    return trusted
