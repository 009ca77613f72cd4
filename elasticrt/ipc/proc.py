"""What Linux shows of processes in /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Stat:
    """One process.

    Attributes:
        state: the kernel's letter: R, S, D, T, Z and so on.
        parent: its parent's pid.
        ticks: processor time, with that of its children that were reaped, in units of SC_CLK_TCK.
        start: when it started, in ticks since boot: with the pid that names a process for ever.
    """

    state: str
    parent: int
    ticks: int
    start: int

    @property
    def ended(self) -> bool:
        """Whether it has ended, and waits to be reaped."""
        return self.state in ("Z", "X")


def stat(pid: int | str) -> Stat | None:
    """What the kernel says of process `pid`; None when there is none."""
    try:
        data = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name in parentheses may hold spaces and parentheses itself: the fields start after the last one.
    fields = data[data.rindex(b")") + 2 :].split()
    return Stat(fields[0].decode(), int(fields[1]), sum(map(int, fields[11:15])), int(fields[19]))


def state_of(pid: int) -> str:
    """The kernel's letter for what process `pid` is doing, as in `Stat`; "" when there is none."""
    found = stat(pid)
    return "" if found is None else found.state


def start_of(pid: int) -> int:
    """When the process `pid` that runs started, as in `Stat`; 0 when it has ended."""
    found = stat(pid)
    return 0 if found is None or found.ended else found.start


def all_pids() -> list[int]:
    """All processes of this machine, or container."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208  Path objects are 10x slower.


def in_sessions(session_ids: Collection[int]) -> list[int]:
    """The processes in sessions `session_ids`, also those that have ended and wait to be reaped."""
    found = []
    for pid in all_pids() if session_ids else ():
        with contextlib.suppress(OSError):  # It ended while we looked.
            if os.getsid(pid) in session_ids:
                found.append(pid)
    return found
