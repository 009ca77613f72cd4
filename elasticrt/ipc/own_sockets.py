"""The sockets of a process, this one if no other is named, with those that a library has opened."""

from __future__ import annotations

import contextlib
import os
import socket


def own(pid: int | str = "self") -> dict[int, str]:
    """The name of each socket of process `pid`, by descriptor. Raises OSError when that has ended.

    The name has the inode, because descriptors are used again.
    """
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208  Names are all we need.
        with contextlib.suppress(OSError):  # It is closed by now, as the listing's own is.
            target = os.readlink(f"/proc/{pid}/fd/{name}")  # noqa: PTH115  As above.
            if target.startswith("socket:"):
                found[int(name)] = target
    return found


def is_open(fd: int, name: str) -> bool:
    """Whether `fd` still is the socket that `own` has called `name`."""
    try:
        return f"socket:[{os.fstat(fd).st_ino}]" == name
    except OSError:
        return False


def is_connection(each: socket.socket) -> bool:
    """Whether `each` is a TCP socket that does not listen."""
    return _is_tcp(each) and not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def listens(each: socket.socket) -> bool:
    """Whether `each` is a TCP socket that others can connect to."""
    return _is_tcp(each) and bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _is_tcp(each: socket.socket) -> bool:
    return each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM
