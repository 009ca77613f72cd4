"""What an error of etcd or gRPC means for the operation that met it. Pure: a table, and the words etcd uses.

For a transaction one question matters: may it have happened? Only errors that are raised before a request leaves this
process, or before etcd proposes it, are `NOT_SENT`. An error that is not known to be harmless is `UNKNOWN`, and the
caller reads before it tries again.
"""

from __future__ import annotations

from enum import Enum


class ErrorMeaning(Enum):
    """What to do about an error."""

    UNKNOWN = "no answer: the effect is unknown; reads may be repeated, on the next endpoint"
    NOT_SENT = "it certainly had no effect and may be repeated, on the next endpoint"
    UNTRUSTED = "this endpoint is not (our) etcd, or TLS failed; nothing was sent"
    LOGIN = "not carried out: the login is missing or has expired"
    LEASE_LOST = "the lease does not exist"
    COMPACTED = "the revision is no longer in the history"
    NO_AUTH = "a login was tried, but this server has authentication switched off"
    REFUSED = "etcd understood and said no"


_UNTRUSTED = (
    "certificate_verify_failed",
    "hostname verification check failed",
    "peer name",
    "wrong_version_number",
    "tlsv1_alert",
    "tlsv13_alert",
    "sslv3_alert",
    "http1.x server",
    "expected settings frame",
)
"""Pieces of gRPC's text, in lower case, for a peer that speaks another protocol, or where one side does not trust the
other."""

_NOT_CONNECTED = (
    "failed to connect to all addresses",
    "errors resolving",
    "dns resolution failed",
    "empty address list",
)
"""Pieces of gRPC's text when it had no connection to send on. A request under way fails with other words (`Socket
closed`, ...)."""

_BY_TEXT = (
    ("requested lease not found", ErrorMeaning.LEASE_LOST),
    ("required revision has been compacted", ErrorMeaning.COMPACTED),
    ("invalid auth token", ErrorMeaning.LOGIN),
    ("user name is empty", ErrorMeaning.LOGIN),
    ("revision of auth store is old", ErrorMeaning.LOGIN),
    ("authentication is not enabled", ErrorMeaning.NO_AUTH),
    ("too many requests", ErrorMeaning.NOT_SENT),
    ("not leader", ErrorMeaning.UNKNOWN),
)
"""etcd's own words, which say more than the code that comes with them."""

_REFUSED_CODES = frozenset(
    (
        *("INVALID_ARGUMENT", "PERMISSION_DENIED", "NOT_FOUND", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED"),
        *("FAILED_PRECONDITION", "OUT_OF_RANGE", "UNIMPLEMENTED", "DATA_LOSS", "UNAUTHENTICATED"),
    )
)
"""Codes with which a server answers on purpose. The others (UNAVAILABLE, DEADLINE_EXCEEDED, CANCELLED, UNKNOWN,
INTERNAL, ABORTED) come from connections that end and elections under way, and say nothing about the effect."""


def judge_error(code: str, details: str) -> ErrorMeaning:
    """The meaning of a gRPC status. Total: never raises.

    Args:
        code: the name of the status code, as `UNAVAILABLE`.
        details: the status text.
    """
    text = details.lower()
    for words, verdict in _BY_TEXT:
        if words in text:
            return verdict
    # UNAVAILABLE is all that gRPC has for a peer that cannot be reached, one that is no etcd, and a connection that
    # breaks. Only its text tells them apart.
    if code == "UNAVAILABLE":
        if any(piece in text for piece in _UNTRUSTED):
            return ErrorMeaning.UNTRUSTED
        if any(piece in text for piece in _NOT_CONNECTED):
            return ErrorMeaning.NOT_SENT
    if code in _REFUSED_CODES and "received http2 header with status" in text:
        # A web server or a proxy answered: etcd always answers with a gRPC status.
        return ErrorMeaning.UNTRUSTED
    return ErrorMeaning.REFUSED if code in _REFUSED_CODES else ErrorMeaning.UNKNOWN
