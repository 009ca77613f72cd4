"""What each error of etcd and gRPC means (E12)."""

from __future__ import annotations

import pytest

from elasticrt.store.connection import cause, grpc
from elasticrt.store.grpc_errors import ErrorMeaning, judge_error

CONNECT = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: "
TLS = "Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:10000412:SSL routines:OPENSSL_internal:"


@pytest.mark.parametrize(
    ("code", "details", "expected"),
    [
        ("UNAVAILABLE", CONNECT + "Failed to connect to remote host: Connection refused", ErrorMeaning.NOT_SENT),
        (
            "UNAVAILABLE",
            CONNECT + "connection attempt timed out before receiving SETTINGS frame",
            ErrorMeaning.NOT_SENT,
        ),
        (
            "UNAVAILABLE",
            "errors resolving a:1: [field:hostname lookup error:Domain name not found]",
            ErrorMeaning.NOT_SENT,
        ),
        ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", ErrorMeaning.NOT_SENT),
        # On its way when the connection ended, or in etcd's hands: nobody knows.
        ("UNAVAILABLE", "Socket closed", ErrorMeaning.UNKNOWN),
        ("UNAVAILABLE", "Stream removed (ping timeout)", ErrorMeaning.UNKNOWN),
        ("UNAVAILABLE", "recvmsg:Connection reset by peer", ErrorMeaning.UNKNOWN),
        ("UNAVAILABLE", "etcdserver: no leader", ErrorMeaning.UNKNOWN),
        ("UNAVAILABLE", "etcdserver: leader changed", ErrorMeaning.UNKNOWN),
        ("UNAVAILABLE", "etcdserver: server stopped", ErrorMeaning.UNKNOWN),
        ("UNAVAILABLE", "etcdserver: request timed out", ErrorMeaning.UNKNOWN),
        ("UNAVAILABLE", "etcdserver: request timed out, possibly due to previous leader failure", ErrorMeaning.UNKNOWN),
        ("UNAVAILABLE", "Received http2 header with status: 503", ErrorMeaning.UNKNOWN),
        ("FAILED_PRECONDITION", "etcdserver: not leader", ErrorMeaning.UNKNOWN),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", ErrorMeaning.UNKNOWN),
        ("CANCELLED", "Locally cancelled by application!", ErrorMeaning.UNKNOWN),
        ("INTERNAL", "Received RST_STREAM with error code 2", ErrorMeaning.UNKNOWN),
        ("UNKNOWN", "Stream removed", ErrorMeaning.UNKNOWN),
        ("ABORTED", "", ErrorMeaning.UNKNOWN),
        (
            "UNAVAILABLE",
            CONNECT + TLS + "CERTIFICATE_VERIFY_FAILED: self signed certificate: OK",
            ErrorMeaning.UNTRUSTED,
        ),
        ("UNAVAILABLE", CONNECT + TLS + "SSLV3_ALERT_BAD_CERTIFICATE: OK", ErrorMeaning.UNTRUSTED),
        ("UNAVAILABLE", CONNECT + TLS + "WRONG_VERSION_NUMBER: OK", ErrorMeaning.UNTRUSTED),
        (
            "UNAVAILABLE",
            CONNECT + "Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame, got frame type 79)",
            ErrorMeaning.UNTRUSTED,
        ),
        ("UNIMPLEMENTED", "Received http2 header with status: 404", ErrorMeaning.UNTRUSTED),
        ("UNAUTHENTICATED", "Received http2 header with status: 401", ErrorMeaning.UNTRUSTED),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", ErrorMeaning.LOGIN),
        ("INVALID_ARGUMENT", "etcdserver: user name is empty", ErrorMeaning.LOGIN),
        ("INVALID_ARGUMENT", "etcdserver: revision of auth store is old", ErrorMeaning.LOGIN),
        ("FAILED_PRECONDITION", "etcdserver: authentication is not enabled", ErrorMeaning.NO_AUTH),
        ("NOT_FOUND", "etcdserver: requested lease not found", ErrorMeaning.LEASE_LOST),
        ("OUT_OF_RANGE", "etcdserver: mvcc: required revision has been compacted", ErrorMeaning.COMPACTED),
        ("INVALID_ARGUMENT", "etcdserver: authentication failed, invalid user ID or password", ErrorMeaning.REFUSED),
        ("PERMISSION_DENIED", "etcdserver: permission denied", ErrorMeaning.REFUSED),
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", ErrorMeaning.REFUSED),
        ("INVALID_ARGUMENT", "etcdserver: request is too large", ErrorMeaning.REFUSED),
        ("INVALID_ARGUMENT", "etcdserver: duplicate key given in txn request", ErrorMeaning.REFUSED),
        ("OUT_OF_RANGE", "etcdserver: mvcc: required revision is a future revision", ErrorMeaning.REFUSED),
        ("UNIMPLEMENTED", "unknown service etcdserverpb.KV", ErrorMeaning.REFUSED),
        ("DATA_LOSS", "etcdserver: corrupt cluster", ErrorMeaning.REFUSED),
    ],
)
def test_verdict(code: str, details: str, expected: ErrorMeaning) -> None:
    """Only what certainly had no effect may be sent again; etcd's own words go before the code they come with."""
    assert judge_error(code, details) is expected


@pytest.mark.parametrize("code", [code.name for code in grpc.StatusCode])
def test_every_code_has_a_verdict(code: str) -> None:
    """An error without any text is never taken for harmless."""
    assert judge_error(code, "") in (ErrorMeaning.UNKNOWN, ErrorMeaning.REFUSED)


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
