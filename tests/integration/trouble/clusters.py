"""An etcd of three members, and etcd's own command-line tool, for what an operator does by hand."""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.servers import EtcdServer, free_port, wait_until, wheel_binary


def etcdctl(server: EtcdServer, *arguments: str) -> str:
    """Run the real etcdctl against one server; what it printed."""
    command = [str(wheel_binary().with_name("etcdctl")), "--endpoints", str(server.address), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


class ClusterMember(EtcdServer):
    """One member of a cluster; the flags that make it one come last, and the last flag counts."""

    def join(self, name: str, token: str, peer_port: int, initial: str, *, state: str = "new") -> None:
        """Say which cluster it belongs to, before its first start. `state`: "existing" for one that is running."""
        self.name, self.token = name, token
        peer = f"http://127.0.0.1:{peer_port}"
        self.options = (
            *self.options,
            *("--name", name, "--initial-cluster", initial, "--initial-cluster-state", state),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            # Elections by the tests' usual 100 ms would also be caused by a busy machine.
            *("--heartbeat-interval", "50", "--election-timeout", "500"),
        )

    def launch(self) -> None:
        """Start it without waiting: one member alone answers nothing."""
        self._launch()

    def wait(self) -> None:
        """Until it answers a linearizable read."""
        assert self._ready(), self._log().read_text(errors="replace")[-2000:]

    @property
    def leads(self) -> bool:
        """Whether it is the cluster's leader, by its own metrics."""
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=5) as answer:
            return b"\netcd_server_is_leader 1" in answer.read()


@contextmanager
def members_of_three(directory: Path) -> Iterator[list[ClusterMember]]:
    """Three members of one cluster, to be launched; they end together."""
    with ExitStack() as stack:
        members = [ClusterMember(wheel_binary(), directory / f"etcd-{k}") for k in range(3)]
        ports = [free_port() for _ in members]
        initial = ",".join(f"m{k}=http://127.0.0.1:{port}" for k, port in enumerate(ports))
        for k, member in enumerate(members):
            member.join(f"m{k}", members[0].token, ports[k], initial)
            stack.push(member)  # Only its ending: it is started together with the others.
        yield members


@contextmanager
def cluster_of_three(directory: Path) -> Iterator[list[ClusterMember]]:
    """Three running members that have elected a leader; the leader comes first."""
    with members_of_three(directory) as members:
        for member in members:
            member.launch()
        for member in members:
            member.wait()
        yield sorted(members, key=lambda member: not member.leads)


def _removed(member: ClusterMember, which: str) -> bool:
    """Whether etcd has taken that member out: it refuses while members have known each other for less than 5 s."""
    try:
        etcdctl(member, "member", "remove", which)
    except AssertionError as error:
        if "unhealthy cluster" not in str(error):
            raise
        return False
    return True


@contextmanager
def replace(members: list[ClusterMember], victim: ClusterMember, directory: Path) -> Iterator[ClusterMember]:
    """Take one member out of a running cluster for good, and another one, at other ports, in its place."""
    other = next(member for member in members if member is not victim)
    ids = dict(reversed(line.split(", ")[:3:2]) for line in etcdctl(other, "member", "list").splitlines())
    wait_until(lambda: _removed(other, ids[victim.name]), "etcd lets a member go")
    victim.kill()
    other.wait()  # It may have been the leader.
    peer_port = free_port()
    added = etcdctl(other, "member", "add", "m-new", f"--peer-urls=http://127.0.0.1:{peer_port}")
    initial = next(line.partition("=")[2].strip('"') for line in added.splitlines() if "ETCD_INITIAL_CLUSTER=" in line)
    newcomer = ClusterMember(wheel_binary(), directory)
    newcomer.join("m-new", other.token, peer_port, initial, state="existing")
    with ExitStack() as stack:
        stack.push(newcomer)
        newcomer.launch()
        newcomer.wait()
        yield newcomer
