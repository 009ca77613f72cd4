"""The processes that belong to a worker, as Linux shows them, and how to end all of them.

Every worker leads its own session, so that what it has started is found by its session id. A process that has detached
itself from the session (a double fork) becomes a child of the worker parent, which is a subreaper. Standard library
only, because this also runs without torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
from collections.abc import Collection

from elasticrt.ipc.leash import LIBC
from elasticrt.ipc.proc import Stat, all_pids, in_sessions, stat

_PR_SET_CHILD_SUBREAPER = 36
_SYS_TGKILL = {"x86_64": 234, "aarch64": 131}
"""By machine. The C library has a function for it only since glibc 2.30."""

_GONE = (errno.ESRCH, errno.EPERM)


def adopt_orphans() -> None:
    """Make this process the one that orphaned descendants are handed to. OSError when the kernel refuses."""
    if LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def members(session_ids: Collection[int]) -> list[int]:
    """The processes in these sessions, without ended ones that another process has to reap."""
    found, me = [(pid, stat(pid)) for pid in in_sessions(session_ids)], os.getpid()
    return [pid for pid, each in found if each is not None and (not each.ended or each.parent == me)]


def children() -> dict[int, Stat]:
    """The child processes of this one by process id, with ended ones that it has not reaped."""
    me = os.getpid()
    return {pid: found for pid in all_pids() if (found := stat(pid)) is not None and found.parent == me}


def kill(pid: int, number: int) -> None:
    """Send a signal to a process, unless it has ended or belongs to another user (set-uid)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread of a process, unless it has ended or belongs to another user.

    A signal to the process goes to any other thread while another signal is on its way to the main one.
    """
    machine = os.uname().machine
    if machine not in _SYS_TGKILL:
        kill(pid, number)
    elif LIBC.syscall(_SYS_TGKILL[machine], pid, pid, number) != 0 and ctypes.get_errno() not in _GONE:
        raise OSError(ctypes.get_errno(), "tgkill")


def kill_sessions(session_ids: Collection[int]) -> None:
    """Kill all processes of these sessions."""
    # The leaders' process groups first, each in one step: they cannot fork away from a list of their members.
    for session_id in session_ids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(session_id, signal.SIGKILL)
    for pid in members(session_ids):
        kill(pid, signal.SIGKILL)
