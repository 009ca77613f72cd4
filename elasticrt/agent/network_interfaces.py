"""Lists this machine's network interfaces and their addresses. Gloo and NCCL take names of interfaces, not addresses.

Python's standard library has no function for that, so this file calls `getifaddrs` of the C library.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
from collections.abc import Iterator

from elasticrt.errors import ConfigError

LOOPBACK = "lo"

_ADDRESS_AT: dict[int, tuple[int, int]] = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}
"""The offset and the length of the address in a `struct sockaddr`, by address family."""


class _Entry(ctypes.Structure):
    """The beginning of a `struct ifaddrs`. Its fields follow below, because one of them points to the same type."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


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
            "this machine's loopback interface is down",
            LOOPBACK,
            got=f"127.0.0.1: {error}",
            expected="an address at which processes of one node reach each other",
            remedy="Bring it up: ip link set lo up",
        )


def _addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Each IPv4 and IPv6 address of this machine, with the name of its interface."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Entry)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    try:
        entry = first
        while entry:
            fields = entry.contents
            if fields.address:
                offset, length = _ADDRESS_AT.get(ctypes.c_ushort.from_address(fields.address).value, (0, 0))
                if length:
                    packed = ctypes.string_at(fields.address + offset, length)
                    yield fields.name.decode(errors="surrogateescape"), ipaddress.ip_address(packed)
            entry = fields.next
    finally:
        libc.freeifaddrs(first)
