"""Which interface workers are told to use, and what is said when they cannot reach each other."""

from __future__ import annotations

import socket

import psutil
import pytest

from elasticrt.agent.network_interfaces import interface_of
from elasticrt.workers.environment import network
from elasticrt.workers.failures import HOW_TO_MEET, Remains, failure_of
from tests.unit.workers.states import worker

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
REFUSED = "RuntimeError: Gloo connectFullMesh failed with timed out connecting: SO_ERROR: Connection refused"


@pytest.mark.parametrize(
    ("interface", "told", "env", "expected"),
    [
        ("eth0", False, {}, {GLOO: "eth0"}),
        ("eth0", True, {}, {GLOO: "eth0", NCCL: "=eth0"}),
        ("lo", False, {}, {GLOO: "lo"}),
        ("eth0", True, {GLOO: "ib0"}, {NCCL: "=eth0"}),
        ("eth0", True, {GLOO: "ib0", NCCL: "ib"}, {}),
        ("", True, {}, {}),
    ],
)
def test_network(interface: str, told: bool, env: dict[str, str], expected: dict[str, str]) -> None:
    """N13: workers use the interface with the node's address; what the user has set stays."""
    assert network(interface, env, told=told) == expected


def test_interfaces_of_this_machine() -> None:
    """Each address of this machine is found at its interface; all of 127.0.0.0/8 is loopback's; others are nobody's."""
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                assert interface_of(each.address) == name
    assert [interface_of(address) for address in ("127.0.1.1", "::1", "203.0.113.9")] == ["lo", "lo", ""]


def test_workers_out_of_reach_of_each_other() -> None:
    """N13: what to check is named first."""
    said = f'{{"message": "{REFUSED}, remote=[127.0.1.1]:12167$1"}}'
    failure = failure_of(worker("b", 1, 2), Remains(1, error_file=said))
    assert failure.summary.startswith(f"rank 1 on b: {HOW_TO_MEET}")
    assert failure.text.startswith(HOW_TO_MEET)
