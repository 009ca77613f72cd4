"""Keeps copies of the training state in a node's memory: workers copy it now and then, and when they hand over.

The cache has the two newest copies of the running workers, because the leader may have chosen the older one when the
newer one arrives. It also has one copy of the step from which the running generation has resumed: if the generation
fails before it has a newer copy, the next one resumes from there. A memory file has no name: the kernel frees it when
its last descriptor is closed, at the latest with the agent.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from elasticrt.ipc.env import Copy

COPIES_MAX = 2


class SnapshotCache:
    """The copies that one node keeps. Only the agent's main thread uses it.

    Args:
        close: closes a memory file.

    Attributes:
        kept: the copy from which the running generation has resumed, or another copy of the same step; None without
            one.
    """

    def __init__(self, close: Callable[[int], None] = os.close) -> None:
        self._close_file = close
        self.kept: Copy | None = None
        self._kept_fd = -1
        self._copies: list[tuple[Copy, int]] = []

    @property
    def newest(self) -> Copy | None:
        """The newest copy from which the next generation could resume if the running one failed now."""
        return self._copies[-1][0] if self._copies else self.kept

    def put(self, copy: Copy, fd: int) -> None:
        """Keep a `copy` that the running workers have taken. The cache owns its memory file `fd` from now on."""
        # The copy of a handover may arrive before an older copy that was still being written, so they are sorted.
        self._copies = sorted([*self._copies, (copy, fd)], key=lambda each: each[0].step)
        while len(self._copies) > COPIES_MAX:
            self._close(self._copies.pop(0)[1])

    def renew(self, resumed: Copy | None) -> None:
        """Begin a generation that resumes from the copy `resumed`; None: from disk, or from nothing.

        Only a copy of the same step is kept.
        """
        held = [*self._copies, (self.kept, self._kept_fd)]
        # `resumed` may be another node's copy. A copy of this node of the same step then serves if that node is lost.
        same = [(copy, fd) for copy, fd in held if copy and resumed and copy.step == resumed.step]
        exact = [(copy, fd) for copy, fd in same if copy == resumed]
        chosen = next(iter(exact or same), (None, -1))
        for _, fd in held:
            if fd != chosen[1]:
                self._close(fd)
        self.kept, self._kept_fd = chosen
        self._copies = []

    def forget(self) -> None:
        """Drop the copy from which the running generation is to resume, because it is damaged."""
        self._close(self._kept_fd)
        self.kept, self._kept_fd = None, -1

    def descriptor(self, resumed: Copy | None) -> int:
        """The memory file of the copy `resumed`, which the cache still owns; -1 if this node does not have the copy."""
        return self._kept_fd if resumed is not None and self.kept == resumed else -1

    def close(self) -> None:
        """Drop all copies."""
        self.renew(None)

    def _close(self, fd: int) -> None:
        if fd >= 0:
            self._close_file(fd)
