"""Keeps copies of the training state in a node's memory: workers copy it now and then, and when they hand over.

The cache has the two newest copies, because the leader may have chosen the older one when the newer one arrives. The
first is that of the step from which the running generation has resumed: if the generation fails before it has a newer
copy, the next one resumes from there. A memory file has no name: the kernel frees it when its last descriptor is
closed, at the latest with the agent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from elasticrt.ipc.env import Copy

COPIES_MAX = 2


class SnapshotCache:
    """The copies that one node keeps. Only the agent's main thread uses it.

    Args:
        close: closes a memory file.
    """

    def __init__(self, close: Callable[[int], None] = os.close) -> None:
        self._close_file = close
        # With their memory files, the newest last.
        self._copies: list[tuple[Copy, int]] = []

    @property
    def newest(self) -> Copy | None:
        """The newest copy from which the next generation could resume if the running one failed now."""
        return self._copies[-1][0] if self._copies else None

    def put(self, copy: Copy, fd: int) -> None:
        """Keep a `copy` that the running workers have taken. The cache owns its memory file `fd` from now on."""
        # The copy of a handover may arrive before an older copy that was still being written, so they are sorted.
        self._copies = sorted([*self._copies, (copy, fd)], key=lambda each: each[0].step)
        self._drop(self._copies[:-COPIES_MAX])

    def renew(self, resumed: Copy | None) -> None:
        """Begin a generation that resumes from the copy `resumed`; None: from disk, or from nothing.

        Only a copy of the same step is kept.
        """
        # `resumed` may be another node's copy. A copy of this node of the same step then serves if that node is lost.
        same = [each for each in self._copies if resumed is not None and each[0].step == resumed.step]
        chosen = [each for each in same if each[0] == resumed] or same
        self._drop([each for each in self._copies if each not in chosen[:1]])

    def forget(self) -> None:
        """Drop the copy from which the running generation is to resume, because it is damaged.

        Its workers have taken no other copy before they have resumed.
        """
        self._drop(self._copies[:1])

    def descriptor(self, resumed: Copy | None) -> int:
        """The memory file of the copy `resumed`, which the cache still owns; -1 if this node does not have the copy."""
        return next((fd for copy, fd in self._copies if copy == resumed), -1)

    def close(self) -> None:
        """Drop all copies."""
        self.renew(None)

    def _drop(self, copies: Sequence[tuple[Copy, int]]) -> None:
        for each in copies:
            self._copies.remove(each)
            self._close_file(each[1])
