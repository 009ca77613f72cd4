"""Network namespaces as nodes: each with an address of its own on one bridge, and links that can be cut in every way.

    with Network() as network:
        a, b = network.add("a"), network.add("b")
        a.popen([...])                     # runs on that node
        network.cut([a], [b])              # silently, both ways; `one_way=True`: only what a sends to b is dropped
        network.heal()

The host is reachable at `network.host`: an etcd that listens there serves all nodes. Names are unique, so that several
networks live side by side, and everything is removed at the end. Needs root, `ip` and `nft`: see `missing`.

For trying things by hand it is a tool: `python3 dev.py cluster`, or `python -m tests.netns`.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
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
        dropped: what each node drops, as rules.
    """

    def __init__(self, token: str = "") -> None:
        self.nodes: dict[str, NetworkNode] = {}
        self._token = token or secrets.token_hex(3)
        self._bridge = f"ert{self._token}"  # Interface names end at 15 bytes.
        self._subnet = ""
        self.dropped: dict[str, set[str]] = {}

    @property
    def host(self) -> str:
        """See the class."""
        return f"{self._subnet}.1"

    def noted(self) -> dict[str, Any]:
        """Everything that `recalled` needs, as JSON values."""
        nodes = {node.name: node.exists for node in self.nodes.values()}
        dropped = {name: sorted(rules) for name, rules in self.dropped.items()}
        return {"token": self._token, "subnet": self._subnet, "nodes": nodes, "dropped": dropped}

    @classmethod
    def recalled(cls, noted: Mapping[str, Any]) -> Network:
        """The network that another process has made."""
        network = cls(noted["token"])
        network._subnet = noted["subnet"]
        for name, exists in noted["nodes"].items():
            network.nodes[name] = network._node(name)
            network.nodes[name].exists = exists
        network.dropped = {name: set(rules) for name, rules in noted["dropped"].items()}
        return network

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
        node = self._node(name)
        namespace, link = node.namespace, node.link
        _run("ip", "netns", "add", namespace)
        node.exists = True
        self.nodes[name] = node
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _run("ip", "link", "set", link, "master", self._bridge, "up")
        _run("ip", "-n", namespace, "address", "add", f"{node.address}/24", "dev", "eth0")
        _run("ip", "-n", namespace, "link", "set", "lo", "up")
        _run("ip", "-n", namespace, "link", "set", "eth0", "up")
        return node

    def _node(self, name: str) -> NetworkNode:
        number = list(self.nodes).index(name) if name in self.nodes else len(self.nodes)
        namespace, link = f"ert{self._token}n{number}", f"ert{self._token}v{number}"
        return NetworkNode(name, namespace, link, f"{self._subnet}.{10 + number}")

    def cut(self, some: Sequence[NetworkNode], others: Sequence[NetworkNode | str], *, one_way: bool = False) -> None:
        """Drop in silence what `some` send to `others` (nodes, or an address such as the host's), and the way back.

        Cuts add up until `heal`. The rules are on the nodes of `some`.
        """
        for node in some:
            rules = self.dropped.setdefault(node.name, set())
            for other in others:
                address = other if isinstance(other, str) else other.address
                rules.add(f"out {address}")
                if not one_way:
                    rules.add(f"in {address}")
            node.rules(sorted(rules))

    def heal(self) -> None:
        """Everything gets through again."""
        for name in self.dropped:
            if self.nodes[name].exists:
                self.nodes[name].rules([])
        self.dropped.clear()


# As a tool: `up` returns, and each later call finds the network again by what it has noted.


def notes() -> Path:
    """Where the tool's network is written down. One per machine (or per XDG_RUNTIME_DIR)."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or "/run") / "elasticrt-cluster.json"


def recall() -> Network:
    """The network that `up` has made. Exits when there is none."""
    try:
        return Network.recalled(json.loads(notes().read_text()))
    except FileNotFoundError:
        sys.exit("there is no cluster: `up` makes one")


def up(names: Sequence[str]) -> None:
    """Make hosts, and say what to do with them."""
    if notes().exists():
        sys.exit(f"there is a cluster already ({notes()}): `status` shows it, `down` removes it")
    network = Network().__enter__()
    try:
        for name in names:
            network.add(name)
        notes().write_text(json.dumps(network.noted()))
    except BaseException:
        network.__exit__(None, None, None)
        raise
    status(network)
    etcd, first = f"http://{network.host}:2379", names[0]
    print("try, each in a terminal of its own, with --etcd and the name of every host:")
    print(f"    .venv/bin/elasticrt etcd --insecure-etcd --listen {network.host}:2379")
    print(f"    python3 dev.py cluster exec {first} elasticrt run --etcd {etcd} --insecure-etcd --run-id try "
          f"--nnodes 1:{len(names)} examples/char_gpt.py")  # fmt: skip
    print(f"then: python3 dev.py cluster cut {first} | heal | off {first} | on {first} | down")


def status(network: Network) -> None:
    """Show the hosts."""
    print(f"this machine is {network.host}")
    for node in network.nodes.values():
        state = f"{len(node.pids())} processes" if node.exists else "off"
        dropped = f", drops: {'; '.join(sorted(network.dropped[node.name]))}" if network.dropped.get(node.name) else ""
        print(f"  {node.name} is {node.address}: {state}{dropped}")


def down(network: Network) -> None:
    """Remove everything, with whatever runs there."""
    network.__exit__(None, None, None)
    notes().unlink()


def enter(node: NetworkNode, command: Sequence[str]) -> None:
    """Become `command` on that host: with its name, its network and this project's programs."""
    if not node.exists:
        sys.exit(f"{node.name} is off")
    env = {**os.environ, "ELASTICRT_NODE": node.name}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', os.defpath)}"
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', node.name, *(command or ["sh"])]
    words = node.command(named)
    os.execvpe(words[0], words, env)


USAGE = """python3 dev.py cluster COMMAND: hosts of their own on this machine, for trying faults by hand (as root)

    up [NAME ...]              make hosts (default: a b c) on one network, reachable from here
    exec NAME COMMAND ...      run a command there
    cut NAME [OTHER ...]       drop in silence all that goes between NAME and the others (default: everybody)
    heal                       let everything through again
    off NAME, on NAME          cut the power: no goodbye reaches anybody; the same host again, empty
    status                     show what there is
    down                       remove everything, with whatever runs there"""


def main(words: Sequence[str]) -> None:
    """One command of the tool."""
    command, *rest = words or [""]
    takes = {"up": (0, 16), "exec": (1, 1000), "cut": (1, 16), "off": (1, 1), "on": (1, 1), "heal": (0, 0),
             "status": (0, 0), "down": (0, 0)}  # fmt: skip
    if command not in takes or not takes[command][0] <= len(rest) <= takes[command][1]:
        sys.exit(USAGE)
    if reason := missing():
        sys.exit(reason)
    if command == "up":
        return up(rest or ["a", "b", "c"])
    network = recall()
    concerned = rest[:1] if command == "exec" else rest
    if unknown := [name for name in concerned if name not in network.nodes]:
        sys.exit(f"no host is called {unknown[0]}; there are {', '.join(network.nodes)}")
    nodes = [network.nodes[name] for name in concerned]
    if command == "down":
        return down(network)
    if command == "exec":
        return enter(nodes[0], rest[1:])
    if command == "cut":
        others = nodes[1:] or [node for node in network.nodes.values() if node is not nodes[0]]
        network.cut(nodes[:1], [*others, *([] if nodes[1:] else [network.host])])
    elif command == "heal":
        network.heal()
    elif command == "off" and nodes[0].exists:
        nodes[0].power_off()
        network.dropped.pop(nodes[0].name, None)
    elif command == "on" and not nodes[0].exists:
        network.add(nodes[0].name)
    notes().write_text(json.dumps(network.noted()))
    return status(network)


if __name__ == "__main__":
    main(sys.argv[1:])
