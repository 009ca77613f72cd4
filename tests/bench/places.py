"""Where a job's nodes are: all on loopback, or each in a network namespace of its own, whose power can be cut."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Protocol

from tests.netns import Network, NetworkNode


class Place(Protocol):
    """A context manager; `open` is called before the first node."""

    interface: str

    @property
    def host(self) -> str:
        """The address of what all nodes need and is on none of them."""

    def open(self, stack: ExitStack) -> None:
        """Make it; `stack` takes it down again."""

    def address(self, index: int) -> str:
        """Of node number `index`, counted from 0."""

    def command(self, index: int, command: list[str]) -> list[str]:
        """The command that runs `command` on that node, as the same process."""

    def power_off(self, index: int) -> float:
        """Cut a node's power; when that began (CLOCK_MONOTONIC, s)."""


class Loopback:
    """Nodes are nothing but processes."""

    interface = "lo"
    host = "127.0.0.1"

    def open(self, stack: ExitStack) -> None:
        """See `Place`."""

    def address(self, index: int) -> str:
        """See `Place`. The first node's sorts last, because torchrun's rank 0 is where the least address is."""
        return "127.0.0.2" if index == 0 else "127.0.0.1"

    def command(self, index: int, command: list[str]) -> list[str]:
        """See `Place`."""
        return command

    def power_off(self, index: int) -> float:
        """See `Place`."""
        raise AssertionError(f"node {index} has no power supply of its own on loopback")


class Namespaces:
    """A network namespace for every node; needs root: see `tests.netns.missing`."""

    interface = "eth0"

    def __init__(self) -> None:
        self._network = Network()
        self._nodes: dict[int, NetworkNode] = {}

    @property
    def host(self) -> str:
        """See `Place`."""
        return self._network.host

    def open(self, stack: ExitStack) -> None:
        """See `Place`."""
        stack.enter_context(self._network)

    def address(self, index: int) -> str:
        """See `Place`."""
        return self._node(index).address

    def command(self, index: int, command: list[str]) -> list[str]:
        """See `Place`. A node's host name is its address: some runtimes tell others the name."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.address(index), *command]
        return self._node(index).command(named)

    def power_off(self, index: int) -> float:
        """See `Place`."""
        at = time.monotonic()
        self._node(index).power_off()
        return at

    def _node(self, index: int) -> NetworkNode:
        if index not in self._nodes:
            self._nodes[index] = self._network.add(f"node-{index}")
        return self._nodes[index]
