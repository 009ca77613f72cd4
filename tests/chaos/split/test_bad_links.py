"""Links that lose packets, come and go, or fail one after the other: the run converges, and never storms."""

from __future__ import annotations

import itertools
import random
import socket
from pathlib import Path

import pytest

from tests.chaos.split.test_networks import TTL_S, Site, site

pytestmark = [pytest.mark.root, pytest.mark.slow]

NODES = ("a", "b", "c")


def _cut_links(run: Site, links: set[tuple[str, str]]) -> None:
    """Exactly these links are cut, both ways. "etcd" stands for the host, where etcd is."""
    address = {"etcd": run.host, **{name: run.network.nodes[name].address for name in NODES}}
    for name in NODES:
        others = [other for link in links if name in link for other in link if other != name]
        run.network.nodes[name].rules([f"{way} {address[other]}" for other in others for way in ("in", "out")])


@pytest.mark.parametrize("seed", [1, 2])
def test_links_clog_one_by_one_and_come_back_in_another_order(tmp_path: Path, seed: int) -> None:
    """N06, S1, S2, L1: all six links fail in turn, 0.7 s apart, and are mended in turn: all are together again."""
    draw = random.Random(seed)
    links = [*itertools.combinations(NODES, 2), *((name, "etcd") for name in NODES)]
    cut: set[tuple[str, str]] = set()
    with site(tmp_path, "1:3", NODES) as run:
        for link in draw.sample(links, len(links)):
            cut.add(link)
            _cut_links(run, cut)
            run.wait_for_silence(0.7)
        run.wait_for_silence(TTL_S)
        for link in draw.sample(links, len(links)):
            cut.remove(link)
            _cut_links(run, cut)
            run.wait_for_silence(0.7)
        run.together(*NODES)
        run.ends_well()


def test_a_link_that_comes_and_goes(tmp_path: Path) -> None:
    """N07, L6, L7: one node is cut off for a second in every two, fifteen times: TCP hides it, and no storm comes."""
    with site(tmp_path, "1:3", NODES) as run:
        number = run.number()
        others = [f"{way} {address}" for way in ("in", "out") for address in _all_but(run, "c")]
        for _ in range(15):
            run.network.nodes["c"].rules(others)
            run.wait_for_silence(1.0)
            run.network.nodes["c"].rules([])
            run.wait_for_silence(1.0)
        # A failed collective and a join for each time that a second was too long for something.
        assert run.number() - number <= 6, run.story()
        run.together(*NODES)
        run.ends_well()


def test_packets_to_etcd_are_lost(tmp_path: Path) -> None:
    """N08, L7: 30 % of what one node sends to etcd is lost: TCP hides it, or it is left out for a moment, for free."""
    with site(tmp_path, "1:3", NODES, ttl_s=5.0) as run:
        number = run.number()
        run.network.nodes["b"].rules([f"out {run.host} 30"])
        run.wait_for_silence(20.0)
        run.network.nodes["b"].rules([])
        run.together(*NODES)
        history = run.ends_well()
        assert max(history.numbers()) - number <= 4, "left out and back again, twice at most"
        assert history.generations[-1][1].restarts.total == 0


class Misnamed(Site):
    """Nodes that take their own host name for a loopback address, as Debian's installer sets them up."""

    def wrap(self, name: str, command: list[str]) -> list[str]:
        """See `Site`."""
        hosts = self.directory / "hosts"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
        mount = 'mount --bind "$0" /etc/hosts && exec "$@"'
        inside = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", mount, str(hosts), *command]
        return super().wrap(name, inside)


def test_a_host_name_that_means_loopback(tmp_path: Path) -> None:
    """N13: where a node's own name is 127.0.1.1 to itself, it tells the others the address that leads to etcd."""
    with site(tmp_path, "2", ("a", "b"), kind=Misnamed) as run:
        history = run.ends_well()
        told = {name: member.address for _, name, member in history.members if member is not None}
        assert told == {name: node.address for name, node in run.network.nodes.items()}


def _all_but(run: Site, name: str) -> list[str]:
    return [run.host, *(node.address for node in run.network.nodes.values() if node.name != name)]
