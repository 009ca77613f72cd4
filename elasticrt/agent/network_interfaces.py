"""This machine's network interfaces and their addresses. Gloo and NCCL take names of interfaces, not addresses."""

from __future__ import annotations

import ctypes
import ipaddress
import socket
from collections.abc import Iterator

from elasticrt.errors import ConfigError

LOOPBACK = "lo"

_ADDRESS_AT: dict[int, tuple[int, int]] = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}
"""Offset and length of the address in a `struct sockaddr` of that family."""


class _Entry(ctypes.Structure):
    """The beginning of a `struct ifaddrs`."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def interface_of(address: str) -> str:
    """The name of the interface that has this IP address; "" if none has it."""
    wanted = ipaddress.ip_address(address)
    if wanted.is_loopback:  # All of 127.0.0.0/8 is loopback, but only one address of it is listed.
        return LOOPBACK
    zone = getattr(wanted, "scope_id", None)
    if zone is not None:
        return str(zone)
    return next((name for name, found in _addresses() if found == wanted), "")


def interfaces() -> dict[str, set[str]]:
    """All interfaces that are up, with their addresses."""
    found: dict[str, set[str]] = {}
    for name, address in _addresses():
        found.setdefault(name, set()).add(str(address))
    return found


def why_no_loopback() -> str:
    """Why loopback does not work, as in a new network namespace where `lo` is down; "" if it works."""
    try:
        with socket.socket(type=socket.SOCK_DGRAM) as probe:
            probe.connect(("127.0.0.1", 9))  # Sends nothing: it only asks the kernel for the route.
    except OSError as error:
        return str(error.strerror or error)
    return ""


def check_loopback() -> None:
    """Raises ConfigError if loopback does not work: workers of this machine would wait for each other for ever."""
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
