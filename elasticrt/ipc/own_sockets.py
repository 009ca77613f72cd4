"""The sockets that this process holds, also those that a library has opened and does not show."""

from __future__ import annotations

import contextlib
import os
import socket


def own() -> dict[int, str]:
    """Descriptor and name of each. The name has the inode in it, as numbers of descriptors are used again."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  Names are all we need.
        with contextlib.suppress(OSError):  # It was closed meanwhile, as the listing's own is by now.
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115  As above.
            if target.startswith("socket:"):
                found[int(name)] = target
    return found


def is_connection(each: socket.socket) -> bool:
    """Whether `each` is a TCP socket that does not listen."""
    return _is_tcp(each) and not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def listens(each: socket.socket) -> bool:
    """Whether `each` is a TCP socket that others can connect to."""
    return _is_tcp(each) and bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _is_tcp(each: socket.socket) -> bool:
    return each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM
