"""Processes and sessions as Linux shows them: who belongs to a worker, and how to make sure that none is left.

Every worker leads its own session, so that everything it started and did not detach on purpose is found by its session
id; what did detach (a double fork) ends up as a child of the worker parent, which is a subreaper. Standard library
only: this also runs where there is no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection

from elasticrt.ipc.leash import LIBC
from elasticrt.ipc.proc import all_pids, in_sessions, stat

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the one that orphaned descendants are handed to. OSError when the kernel refuses."""
    if LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def members(session_ids: Collection[int]) -> list[int]:
    """The processes in these sessions. Dead ones that wait to be reaped by a stranger do not count."""
    return [pid for pid in in_sessions(session_ids) if not _is_foreign_zombie(pid)]


def children() -> list[int]:
    """The processes whose parent is this one, dead ones included until they are reaped."""
    me = os.getpid()
    return [pid for pid in all_pids() if (found := stat(pid)) is not None and found.parent == me]


def is_zombie(pid: int) -> bool:
    """Whether the process has ended (it may wait to be reaped)."""
    found = stat(pid)
    return found is None or found.ended


def kill(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended already, or that has become someone else's (set-uid)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_sessions(session_ids: Collection[int], number: int) -> None:
    """Send a signal to all processes of these sessions: their leaders' process groups first, at once, then the rest."""
    for session_id in session_ids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(session_id, number)
    for pid in members(session_ids):
        # A second SIGKILL does no harm; any other signal must arrive once only, and the groups have it already.
        if number == signal.SIGKILL or not _in_leading_group(pid, session_ids):
            kill(pid, number)


def _in_leading_group(pid: int, session_ids: Collection[int]) -> bool:
    try:
        return os.getpgid(pid) in session_ids
    except ProcessLookupError:
        return True


def _is_foreign_zombie(pid: int) -> bool:
    found = stat(pid)
    return found is None or (found.ended and found.parent != os.getpid())
