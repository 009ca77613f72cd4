"""What Linux shows of a process in /proc/PID/stat."""

from __future__ import annotations

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
    """What the kernel says of a process; None when it is gone."""
    try:
        data = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name in parentheses may hold spaces and parentheses itself: the fields start after the last one.
    fields = data[data.rindex(b")") + 2 :].split()
    return Stat(fields[0].decode(), int(fields[1]), sum(map(int, fields[11:15])), int(fields[19]))


def start_of(pid: int) -> int:
    """When a process that runs started, as in `Stat`; 0 when it has ended."""
    found = stat(pid)
    return 0 if found is None or found.ended else found.start
