"""The connection to an etcd of one or more endpoints: it chooses the endpoint, logs in, and repeats failed requests.

Every RPC of `EtcdStore` goes through `Connections.ask`, which owns the deadline of an operation. It moves to the next
endpoint when one fails, and turns every gRPC error into one of `protocol`'s. The watch stream uses the current endpoint
directly.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tenacity  # Repeats what may be repeated until the time is over, with pauses that grow.

from elasticrt.errors import ConfigError
from elasticrt.store import proto
from elasticrt.store.grpc_errors import ErrorMeaning, judge_error
from elasticrt.store.protocol import (
    Address,
    Credentials,
    LeaseLost,
    StoreBlocked,
    StoreRefused,
    StoreUnavailable,
)

# gRPC's C core writes every failed handshake to stderr by default. Each failure reaches us as an error with the same
# text anyway, so the log is switched off. The C core reads the variable once, while it is imported. The variable is
# deleted again, so that workers do not inherit it. A user's own setting stays.
if "GRPC_VERBOSITY" in os.environ or "grpc" in sys.modules:
    import grpc as grpc  # noqa: PLC0414  Others import it from here.
else:
    os.environ["GRPC_VERBOSITY"] = "NONE"
    import grpc as grpc  # noqa: PLC0414  The same.

    del os.environ["GRPC_VERBOSITY"]

_logger = logging.getLogger(__name__)

TRY_S_MIN = 0.25
"""With several endpoints a silent one may use up only its share of the deadline, but not less than this, in seconds."""

PAUSE_S_MIN = 0.02
"""Pauses between two tries, in seconds, are drawn from 0 to a limit that grows from the first value to the second."""
PAUSE_S_MAX = 0.5
"""Pauses between two tries are drawn from 0 to a limit that grows from the one to the other."""

Dial = Callable[[Address, Credentials], Any]
"""Makes an etcd3 client for one address. (Defined in `etcd.py`, the only importer of etcd3.)"""


class _AgainError(Exception):
    """This try had no effect, or may be repeated. The text becomes the operation's error when the time is over."""


class Endpoint:
    """One endpoint: its channel, stubs and login. The first RPC connects.

    Args:
        address: where the endpoint is.
        credentials: the user to log in as, if any.
        client: the etcd3 client of this address.
    """

    def __init__(self, address: Address, credentials: Credentials, client: Any) -> None:
        self.address = address
        self.kv = proto.KVStub(client.channel)
        self.lease = proto.LeaseStub(client.channel)
        self.watch = proto.WatchStub(client.channel)
        self.maintenance = proto.MaintenanceStub(client.channel)
        self._auth = proto.AuthStub(client.channel)
        self._client = client
        self._credentials = credentials
        self._lock = threading.Lock()
        self._token: str | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of every RPC: the token of the login, if there is one."""
        return (("token", self._token),) if self._token else ()

    def log_in(self, timeout_s: float) -> None:
        """Fetch a token if a user is configured and there is no token yet. Raises grpc.RpcError, ConfigError."""
        # Threads whose token has expired come here together. The first one's login serves all of them.
        with self._lock:
            if self._credentials.user is None or self._token is not None:
                return
            assert self._credentials.password_file is not None, "a login has both"
            password = read_file(self._credentials.password_file).rstrip("\r\n")
            request = proto.AuthenticateRequest(name=self._credentials.user, password=password)
            try:
                self._token = self._auth.Authenticate(request, timeout=timeout_s).token
            except grpc.RpcError as error:
                # etcd's own client does the same: a server with authentication switched off needs no login.
                if judge_error(*code_and_details(error)) is not ErrorMeaning.NO_AUTH:
                    raise
                self._token = ""

    def log_out(self, metadata: tuple[tuple[str, str], ...]) -> bool:
        """Forget the token that was used in `metadata`, if it still is the current one. False if there is no user."""
        with self._lock:
            # Another thread may have logged in again meanwhile. Its new token is good.
            if metadata == self.metadata:
                self._token = None
        return self._credentials.user is not None

    def close(self) -> None:
        """Close the channel. RPCs under way end with CANCELLED."""
        self._client.close()


class Connections:
    """All endpoints of one store. Safe to use from several threads.

    Args:
        addresses: the endpoints, tried in this order.
        credentials: how to authenticate at each of them.
        dial: makes the client of one endpoint.
        timeout_s: bounds every operation, its repetitions included, in seconds.

    Attributes:
        names: the addresses, for messages.
        timeout_s: as given.
        has_answered: whether any operation has been answered.
        store_id: the id of the store that was read last. The watcher compares it with the store that answers a watch.
    """

    def __init__(self, addresses: tuple[Address, ...], credentials: Credentials, dial: Dial, timeout_s: float) -> None:
        self.names = tuple(str(address) for address in addresses)
        self.timeout_s = timeout_s
        self._addresses = addresses
        self._credentials = credentials
        self._dial = dial
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._endpoints: list[Endpoint | None] = [None] * len(addresses)
        self._current = 0
        self.has_answered = False
        self.store_id = ""

    def current(self) -> Endpoint:
        """The endpoint in use. Raises StoreUnavailable after `close`, ConfigError if a credentials file is bad."""
        with self._lock:
            if self._closed.is_set():
                raise StoreUnavailable(f"this client of etcd is closed ({', '.join(self.names)})")
            endpoint = self._endpoints[self._current]
            if endpoint is None:
                address = self._addresses[self._current]
                endpoint = Endpoint(address, self._credentials, self._dial(address, self._credentials))
                self._endpoints[self._current] = endpoint
            return endpoint

    def move_on_from(self, endpoint: Endpoint, *, redial: bool = False) -> None:
        """Use the next endpoint, unless another thread does already. With `redial`, read its TLS files again."""
        with self._lock:
            if redial and endpoint in self._endpoints:
                self._endpoints[self._endpoints.index(endpoint)] = None
                endpoint.close()
            # Several operations may fail at one endpoint. Only the first one moves on, because the next endpoint has
            # not failed.
            if endpoint.address == self._addresses[self._current]:
                self._current = (self._current + 1) % len(self._addresses)

    def ask(self, what: str, method: Callable[[Endpoint], Any], request: Any, *, repeatable: bool = True) -> Any:
        """Run one operation within the deadline, and return its answer.

        Args:
            what: the operation, for messages.
            method: gives the stub of an endpoint.
            request: the message to send.
            repeatable: if false, the request is repeated only after errors which prove that it had no effect.

        Raises StoreUnavailable, StoreRefused, LeaseLost, ConfigError.
        """
        operation = _Operation(self, what, repeatable)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_AgainError),
            stop=tenacity.stop_after_delay(self.timeout_s) | tenacity.stop_when_event_set(self._closed),
            wait=tenacity.wait_random_exponential(multiplier=PAUSE_S_MIN, max=PAUSE_S_MAX),
            sleep=tenacity.sleep_using_event(self._closed),
            reraise=True,
        )
        try:
            return retrying(operation.attempt, method, request)
        except _AgainError as error:
            message = f"no answer from etcd to {what} within {self.timeout_s:g} s"
            # A server with TLS hangs up on a client without TLS, and the reverse. gRPC's text is the only sign of it.
            remedy = "An etcd with TLS needs https://" if "Socket closed at http:" in str(error) else ""
            remedy = "An etcd without TLS needs http://" if "Handshake read failed" in str(error) else remedy
            remedy = _CHECK_LOGIN if "invalid user ID or password" in str(error) else remedy
            where = ", ".join(self.names)
            raise StoreUnavailable(message, where, got=error, remedy=remedy) from error.__cause__

    def close(self) -> None:
        """Close all channels. Operations under way end with StoreUnavailable."""
        with self._lock:
            self._closed.set()
            endpoints, self._endpoints = self._endpoints, [None] * len(self._addresses)
        for endpoint in endpoints:
            if endpoint is not None:
                endpoint.close()


class _Operation:
    """The tries of one operation."""

    def __init__(self, connections: Connections, what: str, repeatable: bool) -> None:
        self._connections = connections
        self._what = what
        self._repeatable = repeatable
        self._deadline = time.monotonic() + connections.timeout_s
        # One new login is enough: a fresh token that is refused as well has not expired.
        self._logins_left = 1
        self._untrusted: set[str] = set()
        self._last_failure = "no time for a try"
        # The text of a refused login: it says more than the errors that follow.
        self._refusal = ""

    def attempt(self, method: Callable[[Endpoint], Any], request: Any) -> Any:
        """Try once, at the endpoint in use."""
        timeout_s = self._deadline - time.monotonic()
        if timeout_s <= 0:
            raise _AgainError(self._last_failure)
        # A transaction gets all the time there is, because a try that is cut off leaves its effect unknown.
        if self._repeatable and len(self._connections.names) > 1:
            timeout_s = min(timeout_s, max(TRY_S_MIN, self._connections.timeout_s / len(self._connections.names)))
        # This bounds the login and the request together.
        until = time.monotonic() + timeout_s
        try:
            endpoint = self._connections.current()
        except ConfigError as error:
            if not self._connections.has_answered:
                raise
            # The operation before could read these files, so they are just being replaced.
            self._last_failure = str(error)
            raise _AgainError(self._last_failure) from error
        metadata, sent = endpoint.metadata, False
        try:
            endpoint.log_in(timeout_s)
            metadata, sent = endpoint.metadata, True
            timeout_s = max(0.0, until - time.monotonic())
            answer = method(endpoint)(request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise self._exception_for(endpoint, metadata, error, sent=sent) from error
        self._connections.has_answered = True
        return answer

    def _exception_for(
        self, endpoint: Endpoint, metadata: tuple[tuple[str, str], ...], error: grpc.RpcError, *, sent: bool
    ) -> Exception:
        """The exception to raise for an error of this operation. `sent` is false if the login before it failed."""
        code, details = code_and_details(error)
        meaning, where = judge_error(code, details), str(endpoint.address)
        if meaning is ErrorMeaning.UNKNOWN and (self._repeatable or not sent):
            meaning = ErrorMeaning.NOT_SENT
        if meaning is ErrorMeaning.REFUSED and not sent and self._connections.has_answered:
            # The login was good before: the user or its password is being replaced.
            meaning = ErrorMeaning.NOT_SENT
            self._refusal = f"{details} at {where}"
        match meaning:
            case ErrorMeaning.NOT_SENT:
                _logger.debug("etcd at %s: %s: %s", where, code, details)
                self._connections.move_on_from(endpoint)
                self._last_failure = self._refusal or f"{cause(details) or code} at {where}"
                return _AgainError(self._last_failure)
            case ErrorMeaning.UNKNOWN:
                self._connections.move_on_from(endpoint)
                message = f"no answer from etcd to {self._what}: its effect is unknown"
                return StoreUnavailable(message, where, got=cause(details) or code)
            case ErrorMeaning.UNTRUSTED:
                self._untrusted.add(where)
                self._connections.move_on_from(endpoint, redial=True)
                self._last_failure = f"{cause(details)} at {where}"
                # A certificate that has expired, ours or the server's, is renewed while the training goes on.
                if self._connections.has_answered or len(self._untrusted) < len(self._connections.names):
                    return _AgainError(self._last_failure)
                what, expected = "this endpoint is not etcd, or TLS failed", "etcd's gRPC port"
                remedy = "Check host and port; an etcd with TLS needs https://"
                if endpoint.address.scheme == "https":
                    files = "--etcd-ca-file, --etcd-cert-file and --etcd-key-file"
                    remedy = f"Check that it is etcd with TLS, and {files}"
                return StoreRefused(what, where, got=cause(details), expected=expected, remedy=remedy)
            case ErrorMeaning.LOGIN if sent and self._logins_left and endpoint.log_out(metadata):
                self._logins_left -= 1
                return _AgainError(f"{details} at {where}")
            case ErrorMeaning.LEASE_LOST:
                return LeaseLost(f"the lease is gone, so etcd did not {self._what}", where, got=details)
        return refusal(self._what, where, code, details)


def code_and_details(error: grpc.RpcError) -> tuple[str, str]:
    """The name of a gRPC error's code, and its text."""
    # Every error that an RPC raises is also a grpc.Call, but its type does not say so.
    call: Any = error
    return call.code().name, call.details() or ""


def cause(details: str) -> str:
    """The part of gRPC's text that says what happened. It stands at the end, behind names of layers and addresses."""
    text = details.rsplit("last error: ", 1)[-1]
    for noise in (
        r"^(\w+: )?(ipv[46]|unix):\S+: ",
        r"^Failed to connect to remote host: ",
        r"^.*OPENSSL_internal:",
        r": OK$",
    ):
        text = re.sub(noise, "", text)
    resolving = re.search(r"address lookup failed for .*?: [^\]]*", text)
    return resolving.group() if resolving else text


def refusal(what: str, where: str, code: str, details: str) -> StoreRefused:
    """The exception for an answer that says no, with the remedy for the usual reasons."""
    text = f"{code} {details}".lower()
    remedy = next((remedy for words, remedy in _REMEDIES.items() if words in text), "")
    kind = StoreBlocked if "space exceeded" in text or "permission denied" in text else StoreRefused
    return kind(f"etcd refused to {what}", where, got=details or code, remedy=remedy)


_CHECK_LOGIN = "Check --etcd-user and --etcd-password-file, or use a client certificate"
_REMEDIES = {
    "user name is empty": _CHECK_LOGIN,
    "invalid user id or password": _CHECK_LOGIN,
    "unauthenticated": _CHECK_LOGIN,
    "permission denied": "The etcd user needs readwrite permission on the prefix of the run",
    "space exceeded": "etcd is full: compact and defragment it or raise its quota, then `etcdctl alarm disarm`",
    "unimplemented": "Is this etcd 3.4 or newer?",
}
"""Remedies by a part of the code and text of a refusal."""


def read_file(path: str, errors: str = "strict") -> str:
    """The text of a file of credentials. Raises ConfigError.

    `errors` is the handling of bytes that are not UTF-8, as for `open`.
    """
    try:
        return Path(path).read_text(encoding="utf-8", errors=errors)
    except (OSError, UnicodeDecodeError) as error:
        remedy = "Check the path and its permissions"
        raise ConfigError("a credentials file is unreadable", path, got=error, remedy=remedy) from error
