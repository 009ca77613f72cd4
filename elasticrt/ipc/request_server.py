"""A server for short requests: one request and one answer for each connection.

A slow client delays no other one. Each has a deadline, and if there are too many clients, the oldest is closed.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from elasticrt.ipc.selector_thread import READ, SelectorThread


@dataclass(eq=False)
class Client:
    """One connection.

    `text` was received so far; with `is_complete` it is a whole request.
    """

    connection: socket.socket
    text: bytes = b""
    is_complete: bool = False


class RequestServer:
    """Answers requests from `start` until `close`.

    Args:
        thread: where the server works.
        listener: the listening socket. The server closes it.
        on_request: called on the thread with each client and its request. `answer` or `hang_up` must follow, at once or
            later.
        ends: the bytes that end a request.
        bytes_max: a longer request gets no answer.
        request_s: seconds from the connection to the end of the answer.
        clients_max: the most connections that are open at a time.
    """

    def __init__(
        self,
        thread: SelectorThread,
        listener: socket.socket,
        on_request: Callable[[Client, bytes], None],
        *,
        ends: bytes,
        bytes_max: int,
        request_s: float,
        clients_max: int,
    ) -> None:
        self._thread = thread
        self._listener = listener
        self._on_request = on_request
        self._ends = ends
        self._bytes_max = bytes_max
        self._request_s = request_s
        self._clients_max = clients_max
        self._clients: dict[Client, None] = {}  # The oldest first.
        listener.setblocking(False)

    def start(self) -> None:
        """Begin to answer. Earlier connections have waited in the socket's backlog."""
        self._thread.call(self._listen)

    def close(self) -> None:
        """Close all connections and the port. When this returns they are closed."""
        self._thread.wait_for(self._stop)

    def answer(self, client: Client, data: bytes) -> None:
        """Send `data` to a client, if it is still there, and hang up. About 200 KB fit; the rest is not waited for."""
        if client in self._clients:
            # The client may be gone.
            with contextlib.suppress(OSError):
                # The kernel keeps the data until the client reads them. Without this option it has room for some 16 KB.
                client.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(data))
                client.connection.send(data)
            self.hang_up(client)

    def hang_up(self, client: Client) -> None:
        """Close the connection of a client, if it is open."""
        if client in self._clients:
            del self._clients[client]
            self._thread.forget(client.connection)
            client.connection.close()

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._thread.watch(self._listener, READ, self._accept)

    def _stop(self) -> None:
        self._thread.forget(self._listener)
        self._listener.close()
        for client in list(self._clients):
            self.hang_up(client)

    def _accept(self) -> None:
        # The oldest client goes, not the newcomer: clients that say nothing must not keep out one that asks.
        if len(self._clients) >= self._clients_max:
            self.hang_up(next(iter(self._clients)))
        connection = self._thread.accept(self._listener)
        if connection is None:
            return
        connection.setblocking(False)
        client = Client(connection)
        self._clients[client] = None
        self._thread.watch(connection, READ, partial(self._read, client))
        # Timers are not cancelled. For a client that has been answered this one does nothing.
        self._thread.after(self._request_s, partial(self.hang_up, client))

    def _read(self, client: Client) -> None:
        try:
            piece = client.connection.recv(self._bytes_max)
        except OSError:
            piece = b""
        client.text += piece
        request, end, _ = client.text.partition(self._ends)
        # The client is gone, or sends more than its request.
        if not piece or client.is_complete:
            self.hang_up(client)
        elif end:
            client.is_complete = True
            self._on_request(client, request)
        elif len(client.text) >= self._bytes_max:
            self.hang_up(client)
