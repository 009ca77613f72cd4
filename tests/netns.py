"""Network namespaces as nodes: each with an address of its own on one bridge, and links that can be cut in every way.

    with Network() as network:
        a, b = network.add("a"), network.add("b")
        a.popen([...])                     # runs on that node
        network.cut([a], [b])              # silently, both ways; `one_way=True`: only what a sends to b is dropped
        network.heal()

The host is reachable at `network.host`: an etcd that listens there serves all nodes. Names are unique, so that several
networks live side by side, and everything is removed at the end. Needs root, `ip` and `nft`: see `missing`.

`python tests/netns.py 3` makes three nodes and waits for Enter, for trying things by hand.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

TABLE = "ertcut"


def missing() -> str:
    """Why there can be no network namespaces here; "" when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "nft", "nsenter") if shutil.which(tool) is None]
    if absent:
        return f"network namespaces need {', '.join(absent)} (packages iproute2, nftables, util-linux)"
    name = f"ert{secrets.token_hex(3)}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"this system allows no network namespaces: {tried.stderr.strip()}"
    _run("ip", "netns", "del", name)
    return ""


def _run(*command: str, text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout


class NetworkNode:
    """One node: a network namespace with one interface, `eth0`, and loopback."""

    def __init__(self, name: str, namespace: str, link: str, address: str) -> None:
        self.name = name
        self.namespace = namespace
        self.link = link
        self.address = address
        self.exists = False

    def command(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` here. It is replaced by it: the pid stays the same."""
        return ["nsenter", f"--net=/run/netns/{self.namespace}", "--", *command]

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process on this node."""
        return subprocess.Popen(self.command(command), **options)

    def pids(self) -> list[int]:
        """All processes on this node."""
        return [int(word) for word in _run("ip", "netns", "pids", self.namespace).split()]

    def rules(self, rules: Sequence[str]) -> None:
        """Replace what this node drops: none lets everything through.

        Rules are `in 10.0.0.2`, `out 10.0.0.2`, or with a share of the packets, `out 10.0.0.2 30` for 30 %.
        """
        chains = {"in": "type filter hook input priority 0;", "out": "type filter hook output priority 0;"}
        script = f"table inet {TABLE}\ndelete table inet {TABLE}\ntable inet {TABLE} {{\n"
        for chain, head in chains.items():
            field = "saddr" if chain == "in" else "daddr"
            drops = ""
            for direction, address, *share in map(str.split, rules):
                if direction == chain:
                    drops += f"ip {field} {address} {f'numgen random mod 100 < {share[0]} ' if share else ''}drop; "
            script += f"chain {chain} {{ {head} {drops}}}\n"
        script += "}\n"
        _run("ip", "netns", "exec", self.namespace, "nft", "-f", "-", text=script)

    def power_off(self) -> None:
        """The cable and the machine are gone in one instant: nobody ever hears of it, not even by a reset.

        The link goes first, and for good: a kernel that lives on would go on saying goodbye for its dead processes.
        """
        _run("ip", "link", "set", self.link, "down")
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        self.remove()

    def remove(self) -> None:
        """Delete link and namespace. Its processes should have ended; whatever is left is killed."""
        if not self.exists:
            return
        self.exists = False
        deadline = time.monotonic() + 10
        while (left := self.pids()) and time.monotonic() < deadline:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.01)
        _run("ip", "link", "del", self.link)
        _run("ip", "netns", "del", self.namespace)


class Network:
    """A bridge with the host and any number of nodes on it. Use it as a context manager.

    Attributes:
        host: the host's address on the bridge.
        nodes: by name.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, NetworkNode] = {}
        self._token = secrets.token_hex(3)
        self._bridge = f"ert{self._token}"  # Interface names end at 15 bytes.
        self._subnet = ""
        self._dropped: dict[str, set[str]] = {}

    @property
    def host(self) -> str:
        """See the class."""
        return f"{self._subnet}.1"

    def __enter__(self) -> Network:
        # An address of its own: otherwise it has one of its ports', and when that node goes nobody finds the host.
        address = "02:" + ":".join(f"{byte:02x}" for byte in secrets.token_bytes(5))
        _run("ip", "link", "add", self._bridge, "address", address, "type", "bridge")
        used = _run("ip", "-o", "-4", "address")
        while not self._subnet or f" {self._subnet}." in used:
            self._subnet = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(255)}"
        _run("ip", "address", "add", f"{self.host}/24", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes.values():
            node.remove()
        _run("ip", "link", "del", self._bridge)

    def add(self, name: str) -> NetworkNode:
        """Another node; after `power_off` the same name again is the same machine, with the same address."""
        number = list(self.nodes).index(name) if name in self.nodes else len(self.nodes)
        namespace, link = f"ert{self._token}n{number}", f"ert{self._token}v{number}"
        node = NetworkNode(name, namespace, link, f"{self._subnet}.{10 + number}")
        _run("ip", "netns", "add", namespace)
        node.exists = True
        self.nodes[name] = node
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _run("ip", "link", "set", link, "master", self._bridge, "up")
        _run("ip", "-n", namespace, "address", "add", f"{node.address}/24", "dev", "eth0")
        _run("ip", "-n", namespace, "link", "set", "lo", "up")
        _run("ip", "-n", namespace, "link", "set", "eth0", "up")
        return node

    def cut(self, some: Sequence[NetworkNode], others: Sequence[NetworkNode | str], *, one_way: bool = False) -> None:
        """Drop in silence what `some` send to `others` (nodes, or an address such as the host's), and the way back.

        Cuts add up until `heal`. The rules are on the nodes of `some`.
        """
        for node in some:
            rules = self._dropped.setdefault(node.name, set())
            for other in others:
                address = other if isinstance(other, str) else other.address
                rules.add(f"out {address}")
                if not one_way:
                    rules.add(f"in {address}")
            node.rules(sorted(rules))

    def heal(self) -> None:
        """Everything gets through again."""
        for name in self._dropped:
            if self.nodes[name].exists:
                self.nodes[name].rules([])
        self._dropped.clear()


def main() -> None:
    """Some nodes for trying things by hand."""
    reason = missing()
    if reason:
        sys.exit(reason)
    with Network() as network:
        print(f"the host is {network.host}")
        for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else 2):
            node = network.add(f"node-{number}")
            print(f"{node.name} is {node.address}: {' '.join(node.command(['bash']))}")
        print("Enter removes them")
        sys.stdin.readline()


if __name__ == "__main__":
    main()
