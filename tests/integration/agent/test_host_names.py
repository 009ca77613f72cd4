"""Nodes whose own names are 127.0.1.1 to themselves, as installers write it to /etc/hosts (N13)."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.netns import Network, missing
from tests.servers import EtcdServer, wheel_binary

pytestmark = [pytest.mark.root, pytest.mark.slow]

MEETS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("total", int(total), "by", os.environ["GLOO_SOCKET_IFNAME"], flush=True)
dist.destroy_process_group()
"""


class Hosts(Cluster):
    """Agents on machines of a network, each with a host name and an /etc/hosts of its own."""

    network: Network

    def wrap(self, name: str, command: list[str]) -> list[str]:
        """See `Cluster`."""
        hosts = self.directory / f"hosts-{name}"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        node = self.network.nodes.get(name) or self.network.add(name)
        inside = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        return node.command(["unshare", "--uts", "--mount", "sh", "-c", inside, name, str(hosts), *command])


@pytest.mark.parametrize(("told", "code"), [("", 0), ("lo", 1)])
def test_host_names_that_mean_loopback(tmp_path: Path, told: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """N13: workers meet at their nodes' addresses; where the user says otherwise the run ends and says why."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if told:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", told)
    (tmp_path / "meets.py").write_text(MEETS)
    with Network() as network:
        server = EtcdServer(wheel_binary(), tmp_path / "etcd")
        server.address = type(server.address)("http", network.host, server.port)
        options = ["--nnodes", "2", "--insecure-etcd", "--max-restarts", "1"]
        with server as etcd:
            options += ["--etcd", str(etcd.address)]
            with Hosts(tmp_path, f"hosts-{secrets.token_hex(4)}", options, [str(tmp_path / "meets.py")]) as run:
                run.network = network
                network.add("a")
                agents = [run.start("a", "--local-addr", network.nodes["a"].address), run.start("b")]
                assert run.ended() == {"a": code, "b": code}
                results = [event["reason"] for event in run.events("result")]
    if code == 0:
        assert all("total 2 by eth0" in agent.text() for agent in agents)
        return
    assert all("another worker is out of reach at the address that it announced" in reason for reason in results)
