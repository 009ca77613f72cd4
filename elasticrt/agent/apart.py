"""Do workers take part in their generation, or does each train by itself? Looked at once, a minute after their start.

A script that makes a process group of its own (`mp.spawn` with a port of its own, a MASTER_ADDR that it sets, a world
size that it was given as an argument) runs well on every node of a larger run, and learns from none of the others.
Nobody is stopped for that: there are good reasons to be late. But it is said, once.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from elasticrt.agent.events import EventLog
from elasticrt.rendezvous.records import Generation, Seat

PATIENCE_S = 60.0
_ESTABLISHED = "01"


class Apart:
    """One agent's look. Used by the agent's thread."""

    def __init__(self, events: EventLog, say: Callable[[str], None]) -> None:
        self._events = events
        self._say = say
        self._said = False
        self._started: tuple[Generation, Seat] | None = None
        self.at: float | None = None
        """When to look; None when there is nothing to look at."""

    def began(self, generation: Generation, seat: Seat) -> None:
        """Workers are being started."""
        alone = self._said or generation.world_size == 1
        self._started = None if alone else (generation, seat)
        self.at = None if alone else time.monotonic() + PATIENCE_S

    def look(self, now: float, pids: Callable[[int], Mapping[int, int]]) -> None:
        """Look, if it is time. `pids`: a generation's workers that run and have not called `init`, by local rank."""
        if self.at is None or now < self.at or self._started is None:
            return
        (generation, seat), self._started, self.at = self._started, None, None
        found = unconnected(pids(generation.number), generation.master_port)
        if not found:
            return
        self._said = True
        ranks = [seat.rank_offset + local_rank for local_rank in found]
        self._events.write("apart", generation=generation.number, ranks=ranks)
        some = ", ".join(map(str, ranks))
        self._say(
            f"rank {some} of {generation.world_size} on this node: not connected to the generation's store "
            f"{PATIENCE_S:.0f} s after the start. If the script has made a process group of its own, they train apart: "
            "it should use the RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT that are set"
        )


def unconnected(pids: Mapping[int, int], port: int) -> list[int]:
    """The keys of those workers none of whose session's processes is connected with the TCP port."""
    return sorted(key for key, pid in pids.items() if not _sockets(pid) & connected(_tables(pid), port))


def connected(lines: Iterable[str], port: int) -> set[str]:
    """The inodes of the connections from or to a port, of a table as in /proc/net/tcp."""
    found = set()
    for line in lines:
        fields = line.split()
        if len(fields) > 9 and fields[3] == _ESTABLISHED:
            ports = {int(address.rpartition(":")[2], 16) for address in fields[1:3]}
            if port in ports:
                found.add(fields[9])
    return found


def _tables(pid: int) -> list[str]:
    lines: list[str] = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # The worker has ended, or there is no IPv6.
            lines += Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    return lines


def _sockets(session: int) -> set[str]:
    """The inodes of all sockets of a session's processes. One that ends meanwhile has none."""
    found = set()
    for name in os.listdir("/proc"):  # noqa: PTH208  Names are all we need.
        with contextlib.suppress(OSError):
            if name.isdigit() and os.getsid(int(name)) == session:
                for fd in os.listdir(f"/proc/{name}/fd"):  # noqa: PTH208  As above.
                    found.add(os.readlink(f"/proc/{name}/fd/{fd}"))  # noqa: PTH115  As above.
    return {link[8:-1] for link in found if link.startswith("socket:[")}
