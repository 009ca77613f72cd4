"""The training states that a node keeps in memory: what its workers copy now and then, and when they hand over.

It keeps the two newest copies of the running workers, because a leader may have chosen the last but one when the last
arrives; and one copy of the step that the running generation resumed from, so that the next one can resume from there
if this one fails before it has a newer copy. A memory file has no name: the kernel frees it when its last descriptor is
closed, at the latest with the agent.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from elasticrt.ipc.env import Copy

COPIES_MAX = 2


class SnapshotCache:
    """Used by the agent's thread. `kept` is the copy that the running generation resumed from, or one of that step."""

    def __init__(self, close: Callable[[int], None] = os.close) -> None:
        self._close_file = close
        self.kept: Copy | None = None
        self._kept_fd = -1
        self._copies: list[tuple[Copy, int]] = []

    @property
    def newest(self) -> Copy | None:
        """The newest copy that the next generation could resume from if the running one failed now."""
        return self._copies[-1][0] if self._copies else self.kept

    def put(self, copy: Copy, fd: int) -> None:
        """Keep a copy that the running workers have taken, in the memory file `fd`, which is owned from now on."""
        # The copy of a handover may arrive before an older one that was still being written.
        self._copies = sorted([*self._copies, (copy, fd)], key=lambda each: each[0].step)
        while len(self._copies) > COPIES_MAX:
            self._close(self._copies.pop(0)[1])

    def renew(self, resumed: Copy | None) -> None:
        """Begin a generation that resumes from the copy `resumed`; None: from disk, or from nothing."""
        held = [*self._copies, (self.kept, self._kept_fd)]
        # Another node's copy of the same step is as good: it is only needed when that node has left.
        same = [(copy, fd) for copy, fd in held if copy and resumed and copy.step == resumed.step]
        exact = [(copy, fd) for copy, fd in same if copy == resumed]
        chosen = next(iter(exact or same), (None, -1))
        for _, fd in held:
            if fd != chosen[1]:
                self._close(fd)
        self.kept, self._kept_fd = chosen
        self._copies = []

    def forget(self) -> None:
        """Drop the copy that the running generation is to resume from, because it is damaged."""
        self._close(self._kept_fd)
        self.kept, self._kept_fd = None, -1

    def descriptor(self, resumed: Copy | None) -> int:
        """The memory file of the copy `resumed`, which stays owned here; -1 when this node does not have it."""
        return self._kept_fd if resumed is not None and self.kept == resumed else -1

    def close(self) -> None:
        """Drop all copies."""
        self.renew(None)

    def _close(self, fd: int) -> None:
        if fd >= 0:
            self._close_file(fd)
