"""A server for short requests: each connection says one, gets one answer, and is hung up on.

What one of them sends, or does not send, delays no other: each has a deadline, and of too many the oldest goes.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from elasticrt.ipc.selector_thread import READ, SelectorThread

log = logging.getLogger(__name__)

SHORT_S = 0.05
"""The pause of a process that has no descriptor left for another connection."""

CLOSE_S = 2.0


@dataclass(eq=False)
class Client:
    """One connection, and what it has said so far; `asked`: that was a whole request."""

    connection: socket.socket
    text: bytes = b""
    asked: bool = False


class RequestServer:
    """Answers on a listening socket, which is its own, from `start` until `close`.

    Args:
        thread: where it works.
        listener: where connections come.
        asked: called on the thread with each client and its request; `answer` follows, at once or later, or `hang_up`.
        ends: what a request ends with.
        bytes_max: who says so much without an end gets no answer.
        request_s: the seconds from the connection to the end of the answer.
        clients_max: open at a time.
    """

    def __init__(
        self,
        thread: SelectorThread,
        listener: socket.socket,
        asked: Callable[[Client, bytes], None],
        *,
        ends: bytes,
        bytes_max: int,
        request_s: float,
        clients_max: int,
    ) -> None:
        self._thread = thread
        self._listener = listener
        self._asked = asked
        self._ends = ends
        self._bytes_max = bytes_max
        self._request_s = request_s
        self._clients_max = clients_max
        self._clients: dict[Client, None] = {}  # The oldest first.
        self._short = False
        listener.setblocking(False)

    def start(self) -> None:
        """Answer from now on; what has come before was waiting."""
        self._thread.call(self._listen)

    def close(self) -> None:
        """Hang up on all, and let the port refuse: both is so when this returns."""
        self._thread.wait_for(self._stop, CLOSE_S)

    def answer(self, client: Client, data: bytes) -> None:
        """Answer a client, if it is still there, and hang up. `data` has to be short: a fresh connection has room."""
        if client in self._clients:
            with contextlib.suppress(OSError):  # It has broken off.
                client.connection.send(data)
            self.hang_up(client)

    def hang_up(self, client: Client) -> None:
        """Hang up on a client, if that has not been done."""
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
        if len(self._clients) >= self._clients_max:
            self.hang_up(next(iter(self._clients)))
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # It has hung up again.
        except OSError as error:
            self._run_short(error)
            return
        self._short = False
        connection.setblocking(False)
        client = Client(connection)
        self._clients[client] = None
        self._thread.watch(connection, READ, partial(self._hear, client))
        self._thread.after(self._request_s, partial(self.hang_up, client))

    def _run_short(self, error: OSError) -> None:
        """No descriptor is left for another connection: the oldest one's is taken, or a pause."""
        if self._clients:
            self.hang_up(next(iter(self._clients)))
            return
        if not self._short:
            port = self._listener.getsockname()[1]
            log.warning("no connection can be accepted at port %d: %s; trying again", port, error)
        self._short = True
        self._thread.forget(self._listener)
        self._thread.after(SHORT_S, self._listen)

    def _hear(self, client: Client) -> None:
        try:
            piece = client.connection.recv(self._bytes_max)
        except OSError:
            piece = b""
        client.text += piece
        request, end, _ = client.text.partition(self._ends)
        if not piece or client.asked:  # It has broken off, or asks, and does not wait for its answer.
            self.hang_up(client)
        elif end:
            client.asked = True
            self._asked(client, request)
        elif len(client.text) >= self._bytes_max:
            self.hang_up(client)
