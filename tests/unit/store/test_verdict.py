"""What each error of etcd and gRPC means (E12)."""

from __future__ import annotations

import pytest

from elasticrt.store.connection import cause
from elasticrt.store.quiet import grpc
from elasticrt.store.verdict import Verdict, judge_error

CONNECT = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: "
TLS = "Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:10000412:SSL routines:OPENSSL_internal:"


@pytest.mark.parametrize(
    ("code", "details", "expected"),
    [
        ("UNAVAILABLE", CONNECT + "Failed to connect to remote host: Connection refused", Verdict.NOT_SENT),
        ("UNAVAILABLE", CONNECT + "connection attempt timed out before receiving SETTINGS frame", Verdict.NOT_SENT),
        ("UNAVAILABLE", "errors resolving a:1: [field:hostname lookup error:Domain name not found]", Verdict.NOT_SENT),
        ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", Verdict.NOT_SENT),
        # On its way when the connection ended, or in etcd's hands: nobody knows.
        ("UNAVAILABLE", "Socket closed", Verdict.UNKNOWN),
        ("UNAVAILABLE", "Stream removed (ping timeout)", Verdict.UNKNOWN),
        ("UNAVAILABLE", "recvmsg:Connection reset by peer", Verdict.UNKNOWN),
        ("UNAVAILABLE", "etcdserver: no leader", Verdict.UNKNOWN),
        ("UNAVAILABLE", "etcdserver: leader changed", Verdict.UNKNOWN),
        ("UNAVAILABLE", "etcdserver: server stopped", Verdict.UNKNOWN),
        ("UNAVAILABLE", "etcdserver: request timed out", Verdict.UNKNOWN),
        ("UNAVAILABLE", "etcdserver: request timed out, possibly due to previous leader failure", Verdict.UNKNOWN),
        ("UNAVAILABLE", "Received http2 header with status: 503", Verdict.UNKNOWN),
        ("FAILED_PRECONDITION", "etcdserver: not leader", Verdict.UNKNOWN),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", Verdict.UNKNOWN),
        ("CANCELLED", "Locally cancelled by application!", Verdict.UNKNOWN),
        ("INTERNAL", "Received RST_STREAM with error code 2", Verdict.UNKNOWN),
        ("UNKNOWN", "Stream removed", Verdict.UNKNOWN),
        ("ABORTED", "", Verdict.UNKNOWN),
        ("UNAVAILABLE", CONNECT + TLS + "CERTIFICATE_VERIFY_FAILED: self signed certificate: OK", Verdict.UNTRUSTED),
        ("UNAVAILABLE", CONNECT + TLS + "SSLV3_ALERT_BAD_CERTIFICATE: OK", Verdict.UNTRUSTED),
        ("UNAVAILABLE", CONNECT + TLS + "WRONG_VERSION_NUMBER: OK", Verdict.UNTRUSTED),
        (
            "UNAVAILABLE",
            CONNECT + "Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame, got frame type 79)",
            Verdict.UNTRUSTED,
        ),
        ("UNIMPLEMENTED", "Received http2 header with status: 404", Verdict.UNTRUSTED),
        ("UNAUTHENTICATED", "Received http2 header with status: 401", Verdict.UNTRUSTED),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", Verdict.LOGIN),
        ("INVALID_ARGUMENT", "etcdserver: user name is empty", Verdict.LOGIN),
        ("INVALID_ARGUMENT", "etcdserver: revision of auth store is old", Verdict.LOGIN),
        ("FAILED_PRECONDITION", "etcdserver: authentication is not enabled", Verdict.NO_AUTH),
        ("NOT_FOUND", "etcdserver: requested lease not found", Verdict.LEASE_LOST),
        ("FAILED_PRECONDITION", "etcdserver: lease already exists", Verdict.LEASE_EXISTS),
        ("OUT_OF_RANGE", "etcdserver: mvcc: required revision has been compacted", Verdict.COMPACTED),
        ("INVALID_ARGUMENT", "etcdserver: authentication failed, invalid user ID or password", Verdict.REFUSED),
        ("PERMISSION_DENIED", "etcdserver: permission denied", Verdict.REFUSED),
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", Verdict.REFUSED),
        ("INVALID_ARGUMENT", "etcdserver: request is too large", Verdict.REFUSED),
        ("INVALID_ARGUMENT", "etcdserver: duplicate key given in txn request", Verdict.REFUSED),
        ("OUT_OF_RANGE", "etcdserver: mvcc: required revision is a future revision", Verdict.REFUSED),
        ("UNIMPLEMENTED", "unknown service etcdserverpb.KV", Verdict.REFUSED),
        ("DATA_LOSS", "etcdserver: corrupt cluster", Verdict.REFUSED),
    ],
)
def test_verdict(code: str, details: str, expected: Verdict) -> None:
    """Only what certainly had no effect may be sent again; etcd's own words go before the code they come with."""
    assert judge_error(code, details) is expected


@pytest.mark.parametrize("code", [code.name for code in grpc.StatusCode])
def test_every_code_has_a_verdict(code: str) -> None:
    """An error without any text is never taken for harmless."""
    assert judge_error(code, "") in (Verdict.UNKNOWN, Verdict.REFUSED)


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        (CONNECT + "Failed to connect to remote host: Connection refused", "Connection refused"),
        (CONNECT + TLS + "SSLV3_ALERT_BAD_CERTIFICATE: OK", "SSLV3_ALERT_BAD_CERTIFICATE"),
        (
            "errors resolving no:1: [field:error:address lookup failed for no:1: Domain name not found]",
            "address lookup failed for no:1: Domain name not found",
        ),
        ("etcdserver: permission denied", "etcdserver: permission denied"),
        ("", ""),
    ],
)
def test_cause(details: str, expected: str) -> None:
    """The cause is told without gRPC's layers around it."""
    assert cause(details) == expected
