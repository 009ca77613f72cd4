"""The store in which the ranks of a generation in place meet: keys and values, held by rank 0's process.

Torch's TCPStore would do, but for one moment: when rank 0 is lost while the others connect, its client tries again for
up to a minute, in C++, where nothing can stop it. Here every wait is in a socket that `regroup.GroupSockets` can shut
down.

One frame for a question and one for its answer: four bytes of length, then JSON, bytes as Latin-1 text. The first
question names the generation's nonce; a process of another generation is not answered.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

_LENGTH = struct.Struct("!I")
_FRAME_BYTES_MAX = 16 * 1024 * 1024


class GroupStoreServer:
    """Holds the keys of one generation, in a thread of its own, until it is closed or its process ends."""

    def __init__(self, listening: socket.socket, nonce: str) -> None:
        self._nonce = nonce
        self._values: dict[str, str] = {}
        self._waiting: list[tuple[socket.socket, list[str]]] = []
        self._buffers: dict[socket.socket, bytearray] = {}
        self._admitted: set[socket.socket] = set()
        self._listening = listening
        self._selector = selectors.DefaultSelector()
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)
        self._wake, self._bell = socket.socketpair()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="elasticrt-meeting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let go of everybody. Those that wait find the connection closed."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def _work(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                if key.fileobj is self._listening:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj is not self._bell:
                    self._read(key.fileobj)
        for each in [self._listening, self._wake, self._bell, *self._buffers]:
            each.close()
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # It has gone again.
            connection, _ = self._listening.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(1.0)  # For answers: nobody asks without reading them.
            self._buffers[connection] = bytearray()
            self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        buffer = self._buffers[connection]
        try:
            data = connection.recv(1 << 16)
            buffer += data
            while data and (question := _taken(buffer)) is not None:
                self._answer(connection, question)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            data = b""  # It is gone, or it is none of ours.
        if not data:
            self._selector.unregister(connection)
            del self._buffers[connection]
            self._admitted.discard(connection)
            self._waiting = [each for each in self._waiting if each[0] is not connection]
            connection.close()

    def _answer(self, connection: socket.socket, question: dict[str, Any]) -> None:
        op = question["op"]
        if connection not in self._admitted:
            if op != "hello" or question["nonce"] != self._nonce:
                raise ValueError("another generation")
            self._admitted.add(connection)
            connection.sendall(_frame(None))
        elif op == "wait":
            self._waiting.append((connection, list(question["keys"])))
            self._tell()
        else:
            connection.sendall(_frame(self._done(op, question)))

    def _done(self, op: str, question: dict[str, Any]) -> Any:
        values, key = self._values, question.get("key", "")
        before = values.get(key)
        if op == "get":
            return before
        if op == "check":
            return all(each in values for each in question["keys"])
        if op == "count":
            return len(values)
        if op == "delete":
            return values.pop(key, None) is not None
        if op == "set":
            values[key] = question["value"]
        elif op == "add":
            values[key] = str(int(before or 0) + question["amount"])
        elif op == "append":
            values[key] = (before or "") + question["value"]
        elif op == "swap":
            if before == question["expected"] or (before is None and question["expected"] == ""):
                values[key] = question["value"]
            elif before is None:
                return question["expected"]
        else:
            raise ValueError(f"no such question: {op}")
        self._tell()
        return values[key]

    def _tell(self) -> None:
        """Answer those who wait for keys that are all there."""
        there = [each for each in self._waiting if all(key in self._values for key in each[1])]
        for each in there:
            self._waiting.remove(each)
            with contextlib.suppress(OSError):  # It is gone, as reading from it will show.
                each[0].sendall(_frame(None))


class GroupStore(dist.Store):  # type: ignore[name-defined,misc]  # Torch offers it without declaring it.
    """The client. Each thread has a connection of its own, so that a long wait of one delays no other.

    Raises DistNetworkError when the server is gone or was cut off, DistStoreError when a wait takes too long.
    """

    def __init__(self, address: str, port: int, nonce: str, timeout_s: float) -> None:
        super().__init__()
        self._to = (address, port)
        self._nonce = nonce
        self._own = threading.local()
        self.set_timeout(datetime.timedelta(seconds=timeout_s))
        self._connection(time.monotonic() + timeout_s)

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._ask(op="set", key=key, value=_text(value))

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there."""
        self.wait([key])
        value = self._ask(op="get", key=key)
        return b"" if value is None else str(value).encode("latin-1")

    def add(self, key: str, amount: int) -> int:
        """Add to a number; the sum."""
        return int(self._ask(op="add", key=key, amount=amount))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value."""
        self._ask(op="append", key=key, value=_text(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Replace a value if it is as expected; what it is then."""
        value = self._ask(op="swap", key=key, expected=_text(expected), value=_text(desired))
        return str(value).encode("latin-1")

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._ask(op="check", keys=list(keys)))

    def delete_key(self, key: str) -> bool:
        """Delete a key; whether it was there."""
        return bool(self._ask(op="delete", key=key))

    def num_keys(self) -> int:
        """How many keys there are."""
        return int(self._ask(op="count"))

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._ask(timeout_s=(timeout or self.timeout).total_seconds(), op="wait", keys=list(keys))

    def has_extended_api(self) -> bool:
        """Whether torch may ask for several things at once."""
        return False

    def clone(self) -> GroupStore:
        """Itself: each thread has its own connection anyway."""
        return self

    def _ask(self, *, timeout_s: float | None = None, **question: Any) -> Any:
        limit_s = self.timeout.total_seconds() if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        connection = self._connection(deadline)
        try:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            connection.sendall(_frame(question))
            return _answered(connection, deadline)
        except TimeoutError:
            self._hang_up()
            what = f"wait timeout after {limit_s * 1000:.0f}ms, keys: {question.get('keys', question.get('key', ''))}"
            raise dist.DistStoreError(what) from None
        except OSError as error:
            self._hang_up()
            raise self._gone(error) from error

    def _connection(self, deadline: float) -> socket.socket:
        connection: socket.socket | None = getattr(self._own, "connection", None)
        if connection is None:
            connection = self._own.connection = self._connected(deadline)
        return connection

    def _connected(self, deadline: float) -> socket.socket:
        with contextlib.ExitStack() as undo:
            try:
                connection = socket.create_connection(self._to, timeout=max(0.001, deadline - time.monotonic()))
                undo.enter_context(connection)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(_frame({"op": "hello", "nonce": self._nonce}))
                _answered(connection, deadline)
            except OSError as error:
                raise self._gone(error) from error
            undo.pop_all()
        return connection

    def _hang_up(self) -> None:
        connection, self._own.connection = getattr(self._own, "connection", None), None
        if connection is not None:
            connection.close()

    def _gone(self, error: OSError) -> Exception:
        what = (
            f"the store of generation {self._nonce} at {self._to[0]}:{self._to[1]}: connection closed by peer ({error})"
        )
        gone: Exception = dist.DistNetworkError(what)
        return gone


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else bytes(value).decode("latin-1")


def _frame(value: Any) -> bytes:
    body = json.dumps(value).encode()
    return _LENGTH.pack(len(body)) + body


def _taken(buffer: bytearray) -> dict[str, Any] | None:
    """The next whole frame, taken out of the buffer. ValueError for one that is too long or none."""
    if len(buffer) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(buffer)
    if length > _FRAME_BYTES_MAX:
        raise ValueError("a frame larger than any question")
    if len(buffer) < _LENGTH.size + length:
        return None
    body = bytes(buffer[_LENGTH.size : _LENGTH.size + length])
    del buffer[: _LENGTH.size + length]
    question: dict[str, Any] = json.loads(body)
    return question


def _answered(connection: socket.socket, deadline: float) -> Any:
    data = bytearray()
    wanted = _LENGTH.size
    while len(data) < wanted:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(wanted - len(data))
        if not piece:
            raise ConnectionResetError("end of stream")
        data += piece
        if len(data) == _LENGTH.size:
            wanted += int(_LENGTH.unpack_from(data)[0])
    return json.loads(data[_LENGTH.size :])
