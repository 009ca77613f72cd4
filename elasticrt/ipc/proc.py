"""Processes, sessions, signals, sockets and devices, as Linux shows them in /proc and /dev.

Every worker leads a session of its own, so that the processes it has started are found by their session id. A process
that detaches itself from the session (a double fork) becomes a child of the worker parent, which is a subreaper. This
file uses the standard library only, because it also runs without torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from elasticrt.ipc.leash import LIBC

PF_EXITING = 0x4
"""The kernel's flag of a process that is exiting. Its files are closed one by one, and its memory is given back."""

_PR_SET_CHILD_SUBREAPER = 36
_SYS_TGKILL = {"x86_64": 234, "aarch64": 131}
"""The number of the system call `tgkill`, by machine. glibc has a function for it only since 2.30."""

HELPERS = re.compile(
    # multiprocessing's: removes named semaphores and shared memory as soon as no process holds its pipe.
    r".*\0-c\0from multiprocessing\.resource_tracker import main"
    # Torch's, for the sharing strategy "file_system": waits 2 s for another process before it removes files.
    r"|torch_shm_manager\0",
    re.DOTALL,
)
"""How the command lines begin of helpers that remove what killed processes leave in /dev/shm. Nobody else knows which
files those are, so helpers are not killed with the processes that they serve. They end by themselves."""

HELPER_MAX_S = 4.0
"""A helper that has not ended after so long is killed: something keeps its pipe open. Torch's needs 2 s."""

# Expected: the process has ended, or it belongs to another user (set-uid).
_GONE = (errno.ESRCH, errno.EPERM)


@dataclass(frozen=True)
class Stat:
    """One process, from /proc/PID/stat.

    Attributes:
        state: the kernel's letter: R, S, D, T, Z and so on.
        parent: the parent's pid.
        ticks: processor time in units of SC_CLK_TCK, with the time of reaped children.
        start: when the process started, in ticks since boot. A pair of pid and start never occurs again.
        exiting: whether it has begun to exit, or has ended. It may still hold memory and files.
        leaving: for a process that is exiting, its status as `os.waitpid` will return it. 0 while it lives, after a
            success, and where the kernel does not show it.
    """

    state: str
    parent: int
    ticks: int
    start: int
    exiting: bool
    leaving: int

    @property
    def ended(self) -> bool:
        """Whether it has ended (and, for "Z", waits to be reaped)."""
        return self.state in ("Z", "X")


def machine() -> str:
    """The name of this machine or container, until it reboots; a random one if /proc does not tell.

    Two processes share the name if they see each other in /proc and have the same monotonic clock.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Time namespaces, which can shift the monotonic clock, exist since Linux 5.6.
        times = Path("/proc/self/ns/time")
        spaces = [Path("/proc/self/ns/pid").readlink(), *([times.readlink()] if times.is_symlink() else [])]
        return " ".join([boot, *map(str, spaces)])
    except OSError:
        return secrets.token_hex(8)


def text_of(path: Path, most: int = -1) -> str:
    """The content of a file, or its first `most` characters; "" if it cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(most)
    except OSError:
        return ""


def stat(pid: int | str) -> Stat | None:
    """What the kernel says of process `pid`; None if there is none."""
    try:
        data = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command name in parentheses may contain spaces and parentheses. The other fields start after the last one.
    fields = data[data.rindex(b")") + 2 :].split()
    # `fields` begins with field 3 of proc(5): these are 9 (flags) and 52 (exit_code).
    exiting = bool(int(fields[6]) & PF_EXITING)
    leaving = int(fields[49]) if exiting else 0
    return Stat(fields[0].decode(), int(fields[1]), sum(map(int, fields[11:15])), int(fields[19]), exiting, leaving)


def is_dying(pid: int) -> bool:
    """Whether process `pid` is exiting, has ended, or has a SIGKILL pending: no other signal matters."""
    found = stat(pid)
    if found is None or found.exiting:
        return True
    # Of the first thread, and of the process.
    pending = re.findall(r"^S(?:ig|hd)Pnd:\s*([0-9a-f]+)", text_of(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return not pending or any(int(each, 16) >> (signal.SIGKILL - 1) & 1 for each in pending)


def state_of(pid: int) -> str:
    """The kernel's letter for process `pid`, as in `Stat`; "" if there is none."""
    found = stat(pid)
    return "" if found is None else found.state


def start_of(pid: int) -> int:
    """When process `pid` started, as in `Stat`; 0 if it has ended."""
    found = stat(pid)
    return 0 if found is None or found.ended else found.start


def gpus() -> int:
    """The number of NVIDIA GPUs of this machine, counted by their device files, without torch or a driver's library."""
    return sum(each.name[6:].isdigit() for each in Path("/dev").glob("nvidia[0-9]*"))


def all_pids() -> list[int]:
    """All processes of this machine, or container."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208  Path objects are 10x slower.


def sockets_of(pid: int | str = "self") -> dict[int, str]:
    """The sockets of process `pid` (by default this one): names by descriptor, with those that a library has opened.

    The name contains the inode, because descriptors are used again. Raises OSError when the process has ended.
    """
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208  Names are all we need.
        # A descriptor may be closed by now, as the one of the listing itself is.
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")  # noqa: PTH115  As above.
            if target.startswith("socket:"):
                found[int(name)] = target
    return found


def is_open_socket(fd: int, name: str) -> bool:
    """Whether `fd` still is the socket that `sockets_of` named `name`."""
    try:
        return f"socket:[{os.fstat(fd).st_ino}]" == name
    except OSError:
        return False


def is_connection(each: socket.socket) -> bool:
    """Whether `each` is a TCP socket that does not listen."""
    return _is_tcp(each) and not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def ports_of(fd: int) -> tuple[int, ...]:
    """The local and the remote port of the TCP connection behind `fd`; empty for anything else, or if it is closed."""
    ends = tcp_addresses_of(fd)
    return tuple(int.from_bytes(each[2:4], "big") for each in ends) if len(ends) > 1 else ()


SO_PEERNAME = 28
"""A socket option of Linux. Unlike `getpeername` it also tells the peer of a connection that is still being made."""

# How many bytes of a `sockaddr` hold family, port and host; an IPv6 one has its flow information in between.
_ADDRESS_BYTES: dict[int, int] = {socket.AF_INET: 8, socket.AF_INET6: 24}


def tcp_addresses_of(fd: int) -> list[bytes]:
    """The local and the remote address of the TCP socket behind `fd`, as `tcp_address_in` returns addresses.

    Only the local one for a listening socket; none for anything else, and if it is closed by now.
    """
    ends = []
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as each:
        if _is_tcp(each):
            ends.append(_packed_address(each.family, *each.getsockname()[:2]))
            try:
                ends.append(_packed_address(each.family, *each.getpeername()[:2]))
            except OSError:
                ends.append(each.getsockopt(socket.SOL_SOCKET, SO_PEERNAME, _ADDRESS_BYTES[each.family]))
    return ends


def _packed_address(family: int, host: str, port: int) -> bytes:
    packed = socket.inet_pton(family, host.partition("%")[0]).rjust(_ADDRESS_BYTES[family] - 4, b"\0")
    return family.to_bytes(2, sys.byteorder) + port.to_bytes(2, "big") + packed


def tcp_address_in(address: bytes) -> bytes:
    """Family, port and host in C's `sockaddr`, as bytes that can be compared; b"" if it is not an address of TCP."""
    size = _ADDRESS_BYTES.get(int.from_bytes(address[:2], sys.byteorder), 0)
    return address[:size] if len(address) >= size else b""


def listens(each: socket.socket) -> bool:
    """Whether `each` is a TCP socket that listens."""
    return _is_tcp(each) and bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def listening(address: str, port: int = 0, backlog: int | None = None) -> socket.socket:
    """A socket that listens at `address` of this machine, at a free port if `port` is 0. Raises OSError.

    Connections of an earlier server that linger in TIME_WAIT do not matter: Python sets SO_REUSEADDR.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=backlog)
    except OSError as error:
        # Python adds "(while attempting to bind on address ...)" to the text, and our messages name the address
        # themselves.
        raise OSError(error.errno, str(error.strerror or error).partition(" (while ")[0]) from None


def _is_tcp(each: socket.socket) -> bool:
    return each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM


RETRANSMISSIONS_MIN = 3
"""A peer counts as unreachable after this many retransmissions. The kernel retransmits after 0.2 s, 0.4 s, 0.8 s and so
on, so three mean 1.4 s of silence."""


def unacknowledged(pid: int) -> list[str]:
    """The remote addresses that do not acknowledge TCP data of process `pid`; none if that is not known.

    A stopped or dead process on a live machine is not among them: its kernel acknowledges the data, or refuses the
    connection.
    """
    mine: set[str] = set()
    lines: list[list[str]] = []
    # The process may have ended, and there may be no IPv6.
    with contextlib.suppress(OSError):
        mine = set(sockets_of(pid).values())
        for name in ("tcp", "tcp6"):
            lines += [line.split() for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    # The columns: 2 the remote address; 5 the timer, of which 01 is the one that retransmits; 6 retransmissions so far;
    # 9 the socket's inode.
    found = {
        _address(line[2].partition(":")[0])
        for line in lines
        if f"socket:[{line[9]}]" in mine and line[5][:2] == "01" and int(line[6], 16) >= RETRANSMISSIONS_MIN
    }
    return sorted(found)


def _address(digits: str) -> str:
    """The IP address in the hexadecimal `digits` of /proc/net: words of four bytes in the machine's byte order."""
    raw = b"".join(int(digits[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(digits), 8))
    address = ipaddress.ip_address(raw)
    return str(getattr(address, "ipv4_mapped", None) or address)


def in_sessions(session_ids: Collection[int]) -> dict[int, Stat]:
    """The processes in the sessions `session_ids` by pid, including ended ones that were not reaped."""
    found = {}
    for pid in all_pids() if session_ids else ():
        # A process may end while we look.
        with contextlib.suppress(OSError):
            if os.getsid(pid) in session_ids and (shown := stat(pid)) is not None:
                found[pid] = shown
    return found


def cpu_s(sessions: Iterable[int]) -> float:
    """Processor time of all processes in these sessions and their reaped children, in seconds."""
    return sum(each.ticks for each in in_sessions(set(sessions)).values()) / os.sysconf("SC_CLK_TCK")


def members(session_ids: Collection[int]) -> list[int]:
    """The pids in these sessions, without ended processes that are another process's to reap."""
    me = os.getpid()
    return [pid for pid, each in in_sessions(session_ids).items() if not each.ended or each.parent == me]


def children() -> dict[int, Stat]:
    """The children of this process by pid, including ended ones that were not reaped."""
    me = os.getpid()
    return {pid: found for pid in all_pids() if (found := stat(pid)) is not None and found.parent == me}


def kill(pid: int, number: int) -> None:
    """Send a signal to a process, unless it has ended or belongs to another user (set-uid)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread of a process, unless it has ended or belongs to another user.

    A signal to the process may be taken by any other thread, while another signal is pending for the main thread.
    """
    machine = os.uname().machine
    if machine not in _SYS_TGKILL:
        kill(pid, number)
    elif LIBC.syscall(_SYS_TGKILL[machine], pid, pid, number) != 0 and ctypes.get_errno() not in _GONE:
        raise OSError(ctypes.get_errno(), "tgkill")


def is_helper(pid: int) -> bool:
    """Whether process `pid` is one of HELPERS. One in the session of this process counts as any other process."""
    try:
        # The helper of this process itself would not end, because this process holds its pipe.
        return os.getsid(pid) != os.getsid(0) and HELPERS.match(text_of(Path(f"/proc/{pid}/cmdline"))) is not None
    except OSError:
        return False


def kill_sessions(session_ids: Collection[int], *, with_helpers: bool = False) -> None:
    """Kill all processes of these sessions; the HELPERS among them only `with_helpers`."""
    spared = set() if with_helpers else {pid for pid in members(session_ids) if is_helper(pid)}
    # The process groups of the leaders come first. Each is killed in one step, so its members cannot fork away from a
    # list. A helper is in the same group: then the step only stops them all.
    for session_id in session_ids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(session_id, signal.SIGSTOP if spared else signal.SIGKILL)
    for pid in members(session_ids):
        kill(pid, signal.SIGCONT if pid in spared else signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the subreaper of its descendants: their orphans become its children. Raises OSError."""
    if LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
