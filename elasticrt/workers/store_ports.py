"""Holds listening sockets for the stores of future generations, in case this node gets rank 0 in one of them.

A port that is bound before ranks are agreed on cannot be taken by another process in between.
"""

from __future__ import annotations

import socket

from elasticrt.errors import ConfigError
from elasticrt.ipc.proc import listening


def listen(address: str, backlog: int) -> socket.socket:
    """Return a socket that listens at a free port of `address`, an IP address of this machine.

    `backlog`: the maximum of connections that wait to be accepted. Raises ConfigError.
    """
    try:
        return listening(address, backlog=backlog)
    except OSError as error:
        got = f"{address}: {error.strerror}"
        expected = "a free port at an address of this machine"
        remedy = "Give this machine's own address, as the other nodes reach it"
        what = "this node can't listen at its address"
        raise ConfigError(what, "--local-addr", got=got, expected=expected, remedy=remedy) from error


class StorePorts:
    """The listening sockets that one node holds.

    Attributes:
        port: the port of the newest socket, which the member key announces.
        address: the address of the newest socket.
    """

    def __init__(self) -> None:
        self.port = 0
        self.address = ""
        self._held: dict[int, socket.socket] = {}

    def bind(self, address: str) -> None:
        """Hold a new socket at `address`, an IP address of this machine. Raises ConfigError.

        The socket before is kept as well: a leader that has not read the new port yet may still choose the old one.
        Even if two generations come to one port, their keys do not meet: they have the generation's nonce in their
        names.
        """
        self.address = address
        bound = listen(address, 1024)
        for port in list(self._held)[:-1]:
            self._held.pop(port).close()
        self.port = bound.getsockname()[1]
        self._held[self.port] = bound

    def take(self, port: int, *, shared: bool) -> socket.socket | None:
        """Return the socket of `port` to the caller; None if this node does not hold it.

        `shared`: the worker inherits the socket, so this is a duplicate, and the port stays bound here. Otherwise the
        worker binds the port anew, so the socket is given away.
        """
        if port not in self._held:
            return None
        return self._held[port].dup() if shared else self._held.pop(port)

    def close(self) -> None:
        """Close all sockets."""
        for held in self._held.values():
            held.close()
        self._held.clear()
