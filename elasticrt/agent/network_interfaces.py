"""Lists this machine's network interfaces and their addresses. Gloo and NCCL take names of interfaces, not addresses.

Python's standard library has no function for that, so this file asks the kernel.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from elasticrt.errors import ConfigError
from elasticrt.ipc.proc import text_of

LOOPBACK = "lo"

_SIOCGIFCONF = 0x8912
"""The request for all IPv4 addresses. The answer fills an array of `struct ifreq`."""

_IFREQ = struct.Struct("16s4x4s16x")
"""The name of the interface and the address in a `struct ifreq`."""


def interface_of(address: str) -> str:
    """The name of the interface that has this IP address; "" if none has it."""
    wanted = ipaddress.ip_address(address)
    # All of 127.0.0.0/8 is loopback, but the kernel lists only one address of it.
    if wanted.is_loopback:
        return LOOPBACK
    # The zone of an IPv6 link-local address is the name of its interface: fe80::1%eth0.
    zone = getattr(wanted, "scope_id", None)
    if zone is not None:
        return str(zone)
    return next((name for name, found in _addresses() if found == wanted), "")


def interfaces() -> dict[str, set[str]]:
    """The addresses of each interface that has one, by the interface's name."""
    found: dict[str, set[str]] = {}
    for name, address in _addresses():
        found.setdefault(name, set()).add(str(address))
    return found


def why_no_loopback() -> str:
    """Why loopback does not work, as in a new network namespace where `lo` is down; "" if it works."""
    try:
        with socket.socket(type=socket.SOCK_DGRAM) as probe:
            # `connect` of a datagram socket sends nothing: it only asks the kernel for the route.
            probe.connect(("127.0.0.1", 9))
    except OSError as error:
        return str(error.strerror or error)
    return ""


def check_loopback() -> None:
    """Raise ConfigError if loopback does not work: workers of this machine would wait for each other for ever."""
    error = why_no_loopback()
    if error:
        raise ConfigError(
            "this machine's loopback does not work",
            LOOPBACK,
            got=f"127.0.0.1: {error}",
            expected="an address at which processes of one node reach each other",
            remedy="Bring it up: ip link set lo up; without an address: ip addr add 127.0.0.1/8 dev lo",
        )


def _addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Each IPv4 and IPv6 address of this machine, with the name of its interface."""
    room = array.array("B", bytes(1024 * _IFREQ.size))
    with socket.socket(type=socket.SOCK_DGRAM) as any_socket:
        # A `struct ifconf`: the size of the array, and its address. The kernel replaces the size.
        asked = struct.pack("iP", len(room), room.buffer_info()[0])
        size, _ = struct.unpack("iP", fcntl.ioctl(any_socket, _SIOCGIFCONF, asked))
    for name, packed in _IFREQ.iter_unpack(room[:size]):
        yield os.fsdecode(name.rstrip(b"\0")), ipaddress.ip_address(packed)
    for line in text_of(Path("/proc/net/if_inet6")).splitlines():
        digits, *_, device = line.split()
        yield device, ipaddress.ip_address(bytes.fromhex(digits))
