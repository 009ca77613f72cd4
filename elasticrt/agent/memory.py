"""The memory that this node keeps for training states: what its workers copy now and then, and when they hand over.

The two newest copies of the running workers (a leader may have chosen the last but one when the last arrives); and one
of the step that the running generation resumed from: should it fail before it has any newer, the next one can resume
from there again. When it resumes from a checkpoint, one older
copy is spared until there is a new one, in case the checkpoint is on the disk of a node that is gone. A memory file has
no name: when its last descriptor is closed, as at the latest with the agent, the kernel frees it.
"""

from __future__ import annotations

import os

from elasticrt.contract.env import Commit, Copy

COPIES_MAX = 2


class Memory:
    """Used by the agent's thread.

    Attributes:
        kept: the copy that the running generation resumed from, or one of the same step.
        spare: one that is older than the checkpoint that it resumed from, and of the same generation as that.
    """

    def __init__(self) -> None:
        self.kept: Copy | None = None
        self._kept_fd = -1
        self.spare: Copy | None = None
        self._spare_fd = -1
        self._generation = 0  # Whose copies these are; the spare one is that generation's whose checkpoint it is for.
        self._spare_of = 0
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
        self._close(self._spare_fd)
        self.spare, self._spare_fd = None, -1
        while len(self._copies) > COPIES_MAX:
            self._close(self._copies.pop(0)[1])

    def renew(self, resumed: Copy | None, generation: int, head: Commit | None) -> None:
        """Begin `generation`, which resumes from the copy `resumed`, or from the checkpoint `head`, or from nothing."""
        spare = (None, -1) if resumed or head is None else self._best_spare(head)
        held = [*self._copies, (self.kept, self._kept_fd), (self.spare, self._spare_fd)]
        # Another node's copy of the same step is as good: it is only asked for when that node is gone.
        same = [(copy, fd) for copy, fd in held if copy and resumed and copy.step == resumed.step]
        exact = [(copy, fd) for copy, fd in same if copy == resumed]
        chosen = next(iter(exact or same), (None, -1))
        for _, fd in held:
            if fd not in (chosen[1], spare[1]):
                self._close(fd)
        self.kept, self._kept_fd = chosen
        (self.spare, self._spare_fd), self._spare_of = spare, head.generation if head else 0
        self._generation = generation
        self._copies = []

    def _best_spare(self, head: Commit) -> tuple[Copy | None, int]:
        """The newest copy that the checkpoint descends from: of the generation that saved it, and of no later step.

        Where the run has gone back to that copy since, it is what the last generation has resumed from.
        """
        if self._generation != head.generation:
            if self._spare_of != head.generation:
                return None, -1
            gone_back = self.kept is not None and self.kept.step <= head.reached
            return (self.kept, self._kept_fd) if gone_back else (self.spare, self._spare_fd)
        older = [(copy, fd) for copy, fd in reversed(self._copies) if copy.step <= head.reached]
        return older[0] if older else (self.kept, self._kept_fd)

    def forget(self) -> None:
        """The copy that the running generation is to resume from is damaged: it is offered to nobody again."""
        self._close(self._kept_fd)
        self.kept, self._kept_fd = None, -1

    def descriptors(self, resumed: Copy | None) -> dict[str, int]:
        """What to pass to local rank 0: "state" if it is to resume from this node's."""
        return {"state": self._kept_fd} if resumed is not None and self.kept == resumed else {}

    def close(self) -> None:
        """Give everything back."""
        for fd in (self._kept_fd, self._spare_fd, *(fd for _, fd in self._copies)):
            self._close(fd)
        self._kept_fd = self._spare_fd = -1
        self.kept = self.spare = None
        self._copies = []

    @staticmethod
    def _close(fd: int) -> None:
        if fd >= 0:
            os.close(fd)
