"""The memory that this node keeps for training states: what its workers copy now and then, and when they hand over.

The two newest copies of the running workers (a leader may have chosen the last but one when the last arrives); and one
of the step that the running generation resumed from: should it fail before it has any newer, the next one can resume
from there again. A memory file has no name: when its last descriptor is closed, as at the latest with the agent, the
kernel frees it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from elasticrt.ipc.env import Copy

COPIES_MAX = 2


class SnapshotCache:
    """Used by the agent's thread. `close` closes a file descriptor.

    Attributes:
        kept: the copy that the running generation resumed from, or one of the same step.
    """

    def __init__(self, close: Callable[[int], None] = os.close) -> None:
        self._close_file = close
        self.kept: Copy | None = None
        self._kept_fd = -1
        self._copies: list[tuple[Copy, int]] = []

    @property
    def newest(self) -> Copy | None:
        """The newest copy of the running generation's state that could be resumed from, were it to fail now."""
        return self._copies[-1][0] if self._copies else self.kept

    def put(self, copy: Copy, fd: int) -> None:
        """Keep a copy that the running workers have taken, in the memory file `fd`, which is ours from now on.

        That of a handover may arrive before an older one that was being written.
        """
        self._copies = sorted([*self._copies, (copy, fd)], key=lambda each: each[0].step)
        while len(self._copies) > COPIES_MAX:
            self._close(self._copies.pop(0)[1])

    def renew(self, resumed: Copy | None) -> None:
        """Begin a generation, which resumes from the copy `resumed`, or from what is on disk, or from nothing."""
        held = [*self._copies, (self.kept, self._kept_fd)]
        # Another node's copy of the same step is as good: it is only asked for when that node is gone.
        same = [(copy, fd) for copy, fd in held if copy and resumed and copy.step == resumed.step]
        exact = [(copy, fd) for copy, fd in same if copy == resumed]
        chosen = next(iter(exact or same), (None, -1))
        for _, fd in held:
            if fd != chosen[1]:
                self._close(fd)
        self.kept, self._kept_fd = chosen
        self._copies = []

    def forget(self) -> None:
        """The copy that the running generation is to resume from is damaged: it is offered to nobody again."""
        self._close(self._kept_fd)
        self.kept, self._kept_fd = None, -1

    def descriptors(self, resumed: Copy | None) -> dict[str, int]:
        """What to pass to local rank 0: "state" if the copy `resumed` is this node's."""
        return {"state": self._kept_fd} if resumed is not None and self.kept == resumed else {}

    def close(self) -> None:
        """Give everything back."""
        for fd in (self._kept_fd, *(fd for _, fd in self._copies)):
            self._close(fd)
        self._kept_fd = -1
        self.kept = None
        self._copies = []

    def _close(self, fd: int) -> None:
        if fd >= 0:
            self._close_file(fd)
