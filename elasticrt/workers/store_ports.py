"""The sockets that a node holds for the stores of future generations, in case it gets rank 0 in one of them."""

from __future__ import annotations

import socket

from elasticrt.errors import ConfigError
from elasticrt.ipc.proc import listening


def listen(address: str, backlog: int) -> socket.socket:
    """A socket that listens at a free port of `address`, an IP address of this machine. Raises ConfigError."""
    try:
        return listening(address, backlog=backlog)
    except OSError as error:
        got = f"{address}: {error.strerror}"
        expected = "a free port at an address of this machine"
        remedy = "Give this machine's own address, as the other nodes reach it"
        what = "this node can't listen at its address"
        raise ConfigError(what, "--local-addr", got=got, expected=expected, remedy=remedy) from error


class StorePorts:
    """Bound, listening sockets on one address; `port` is that of the newest, which the member key announces."""

    def __init__(self) -> None:
        self.port = 0
        self.address = ""
        self._held: dict[int, socket.socket] = {}

    def bind(self, address: str) -> None:
        """Hold a new socket at `address`, an IP address of this machine. Raises ConfigError.

        The one before is kept as well, because a leader may still choose its port before it reads the new one. Keys in
        a store have the generation's nonce in their name.
        """
        self.address = address
        bound = listen(address, 1024)
        for port in list(self._held)[:-1]:
            self._held.pop(port).close()
        self.port = bound.getsockname()[1]
        self._held[self.port] = bound

    def take(self, port: int, *, shared: bool) -> socket.socket | None:
        """The socket of `port`, for the caller. `shared`: workers inherit it; otherwise they bind the port anew."""
        if port not in self._held:
            return None
        return self._held[port].dup() if shared else self._held.pop(port)

    def close(self) -> None:
        """Close all sockets."""
        for held in self._held.values():
            held.close()
        self._held.clear()
