"""The store in which ranks meet that go on in place in a new generation: keys and values in rank 0's process.

Torch's TCPStore will not do. When rank 0 is lost while other ranks connect, the TCPStore's client tries again for up to
a minute, in C++, where nothing can stop it. Here every wait is in a socket that `regroup.GroupSockets` can shut down.

A question is a line of JSON, and so is its answer. Bytes travel as Latin-1 text. Each question names the generation's
nonce: a process of another generation gets no answer.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist

from elasticrt.ipc.selector_thread import READ, SelectorThread

# The longest question of a client. A connection with a longer one is closed.
_LINE_BYTES_MAX = 16 * 1024 * 1024


@dataclass
class _Client:
    """One connection to the server.

    Attributes:
        read: the bytes that have arrived of its next question.
        waits_for: the keys whose values it waits for; None while it waits for none.
    """

    read: bytearray = field(default_factory=bytearray)
    waits_for: list[str] | None = None


class GroupStoreServer:
    """Holds the keys of one generation, in a thread of its own, until it is closed or its process ends.

    Args:
        listening: the socket that clients connect to. The server closes it at the end.
        nonce: the generation's nonce.
    """

    def __init__(self, listening: socket.socket, nonce: str) -> None:
        self._nonce = nonce
        self._values: dict[str, str] = {}
        self._clients: dict[socket.socket, _Client] = {}
        self._listening = listening
        listening.setblocking(False)
        self._thread = SelectorThread("elasticrt-meeting", self._end)
        self._thread.call(partial(self._thread.watch, listening, READ, self._accept))

    def close(self) -> None:
        """Close all connections. Clients that wait get an error."""
        self._thread.close(0.0)

    def _end(self) -> None:
        for each in [self._listening, *self._clients]:
            each.close()

    def _accept(self) -> None:
        connection = self._thread.accept(self._listening)
        if connection is None:
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The timeout of sending an answer. A client that has asked reads, so this is long enough.
        connection.settimeout(1.0)
        self._clients[connection] = _Client()
        self._thread.watch(connection, READ, partial(self._read, connection))

    def _read(self, connection: socket.socket) -> None:
        client = self._clients[connection]
        try:
            data = connection.recv(1 << 16)
            client.read += data
            while data and b"\n" in client.read:
                line, _, client.read = client.read.partition(b"\n")
                self._answer(connection, client, json.loads(line))
            if len(client.read) > _LINE_BYTES_MAX:
                data = b""
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            # The client is gone, or it is not a process of this generation.
            data = b""
        if not data:
            self._thread.forget(connection)
            del self._clients[connection]
            connection.close()

    def _answer(self, connection: socket.socket, client: _Client, question: dict[str, Any]) -> None:
        op, values = question["op"], self._values
        # `_read` closes the connection of a process that does not know the nonce.
        if question["nonce"] != self._nonce:
            raise ValueError("another generation")
        if op == "get":
            client.waits_for = list(question["keys"])
            self._tell(connection, client)
        elif op == "check":
            connection.sendall(_line(all(each in values for each in question["keys"])))
        elif op == "delete":
            connection.sendall(_line(values.pop(question["key"], None) is not None))
        elif op == "set":
            values[question["key"]] = question["value"]
            # `exchange` waits for keys in the same question; with no keys, `set` is answered at once.
            client.waits_for = question["keys"]
            self._tell_all()
        elif op == "add":
            values[question["key"]] = str(int(values.get(question["key"], 0)) + question["amount"])
            connection.sendall(_line(values[question["key"]]))
            self._tell_all()
        else:
            raise ValueError(f"no such question: {op}")

    def _tell_all(self) -> None:
        """A key has a new value: answer each client whose keys are all there now."""
        for connection, client in self._clients.items():
            self._tell(connection, client)

    def _tell(self, connection: socket.socket, client: _Client) -> None:
        """Answer a client that waits for keys, if they are all there."""
        keys = client.waits_for
        if keys is not None and all(key in self._values for key in keys):
            client.waits_for = None
            # If the client is gone, the next read from its connection shows that.
            with contextlib.suppress(OSError):
                connection.sendall(_line([self._values[key] for key in keys]))


class GroupStore(dist.Store):  # type: ignore[name-defined,misc]  # Torch offers it without declaring it.
    """The client of a GroupStoreServer, with the methods of torch's stores.

    Each thread has its own connection, so that a long wait of one thread delays no other.

    Args:
        address: the server's host name or address.
        port: the server's TCP port.
        nonce: the generation's nonce.
        timeout_s: how long a question may wait for its answer, in seconds.
        on_values: called with every value of bytes that this client sets or gets. A value to set is passed before the
            server has it, a value that was got before the caller has it.

    Attributes:
        address: the address of this machine towards the server.

    Raises DistNetworkError when the server is gone or was cut off, DistStoreError when a wait takes too long.
    """

    def __init__(
        self, address: str, port: int, nonce: str, timeout_s: float, on_values: Callable[[list[bytes]], object]
    ) -> None:
        super().__init__()
        self._on_values = on_values
        self._to = (address, port)
        self._nonce = nonce
        self._own = threading.local()
        self.set_timeout(datetime.timedelta(seconds=timeout_s))
        # Any question connects this thread, and fails if the server is not there.
        self.check([])
        self.address: str = self._own.connection.getsockname()[0]

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self.exchange(key, value, [])

    def exchange(self, key: str, value: str | bytes, keys: Sequence[str]) -> list[bytes]:
        """Store `value` under `key`, and return the values of `keys` once all of them are there. One question."""
        if not isinstance(value, str):
            self._on_values([bytes(value)])
        text = value if isinstance(value, str) else bytes(value).decode("latin-1")
        return self._got(self._ask(op="set", key=key, value=text, keys=list(keys)))

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there."""
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> list[bytes]:
        """The values of several keys, once all of them are there."""
        return self._got(self._ask(timeout=timeout, op="get", keys=list(keys)))

    multi_get = get_all  # Torch's name.

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self.get_all(keys, timeout)

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number under `key`, which begins at 0. Returns the sum."""
        return int(self._ask(op="add", key=key, amount=amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._ask(op="check", keys=list(keys)))

    def delete_key(self, key: str) -> bool:
        """Delete a key. Returns whether it was there."""
        return bool(self._ask(op="delete", key=key))

    deleteKey = delete_key  # noqa: N815  The name by which torch's PrefixStore calls it.

    def has_extended_api(self) -> bool:
        """Whether the store has the calls that torch calls extended, such as `multi_get`: it has."""
        return True

    def clone(self) -> GroupStore:
        """This store itself. Torch clones a store for a connection of its own; here each thread has one anyway."""
        return self

    def _got(self, values: Sequence[str]) -> list[bytes]:
        got = [str(each).encode("latin-1") for each in values]
        self._on_values(got)
        return got

    def _ask(self, *, timeout: datetime.timedelta | None = None, **question: Any) -> Any:
        # Both errors have torch's types and words, by which `ipc.failure.is_collateral` knows the loss of a peer.
        limit_s = (timeout or self.timeout).total_seconds()
        deadline = time.monotonic() + limit_s
        try:
            return _answered(self._connection(deadline), {**question, "nonce": self._nonce}, deadline)
        except TimeoutError:
            self._hang_up()
            what = f"wait timeout after {limit_s * 1000:.0f}ms, keys: {question.get('keys', question.get('key', ''))}"
            raise dist.DistStoreError(what) from None
        except OSError as error:
            self._hang_up()
            place = f"{self._to[0]}:{self._to[1]}"
            what = f"the store of generation {self._nonce} at {place}: connection closed by peer ({error})"
            raise dist.DistNetworkError(what) from error

    def _connection(self, deadline: float) -> socket.socket:
        connection: socket.socket | None = getattr(self._own, "connection", None)
        if connection is None:
            connection = socket.create_connection(self._to, timeout=_left_s(deadline))
            self._own.connection = connection
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _hang_up(self) -> None:
        # A late answer on this connection would be taken for that of the next question.
        connection, self._own.connection = getattr(self._own, "connection", None), None
        if connection is not None:
            connection.close()


def _left_s(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _answered(connection: socket.socket, question: dict[str, Any], deadline: float) -> Any:
    """Ask a question, and return the server's answer. Raises OSError; TimeoutError at `deadline`.

    A connection has one question at a time, so all that arrives is one line: the answer.
    """
    connection.settimeout(_left_s(deadline))
    connection.sendall(_line(question))
    data = bytearray()
    while not data.endswith(b"\n"):
        connection.settimeout(_left_s(deadline))
        piece = connection.recv(1 << 16)
        if not piece:
            raise ConnectionResetError("end of stream")
        data += piece
    return json.loads(data)
