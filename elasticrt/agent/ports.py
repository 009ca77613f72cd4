"""The sockets that a node holds for stores of generations to come, in case it gets rank 0 in one of them."""

from __future__ import annotations

import socket


class Ports:
    """Bound, listening sockets on one address; `port` is that of the newest, which the member key announces."""

    def __init__(self) -> None:
        self.port = 0
        self.address = ""
        self._held: dict[int, socket.socket] = {}

    def bind(self, address: str) -> None:
        """Hold a new socket. OSError when the address is not this machine's.

        The one before is kept as well: should a leader choose again before it has heard of the new one, the old port
        still works (what is stored there has the generation's nonce in its name).
        """
        self.address = address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        bound = socket.create_server((address, 0), family=family, backlog=1024)
        for port in list(self._held)[:-1]:
            self._held.pop(port).close()
        self.port = bound.getsockname()[1]
        self._held[self.port] = bound

    def take(self, port: int, *, shared: bool) -> socket.socket | None:
        """The socket of that port, to be given away. `shared`: workers inherit it; others bind it anew."""
        held = self._held.get(port)
        if held is None or shared:
            return held.dup() if held is not None else None
        return self._held.pop(port)

    def close(self) -> None:
        """Give all back."""
        for held in self._held.values():
            held.close()
        self._held.clear()
