"""The memory that this node keeps for training states: what its workers leave when they hand over, or copy meanwhile.

An empty memory file for the running workers to leave their state in; their two newest copies (a leader may have chosen
the last but one when the last arrives); and one copy of the step that the running generation resumed from: should it
fail before it has any newer, the next one can resume from there again. A memory file has no name: when its last
descriptor is closed, as at the latest with the agent, the kernel frees it.
"""

from __future__ import annotations

import logging
import os

from elasticrt.contract.env import Copy

log = logging.getLogger(__name__)


COPIES_MAX = 2


class Memory:
    """Used by the agent's thread.

    Attributes:
        fd: where the running generation's local rank 0 may leave its state, -1 for none.
        left: what has been left there.
        kept: the copy that the running generation resumed from, or one of the same step.
    """

    def __init__(self) -> None:
        self.fd = -1
        self.left: Copy | None = None
        self.kept: Copy | None = None
        self._kept_fd = -1
        self._copies: list[tuple[Copy, int]] = []

    @property
    def newest(self) -> Copy | None:
        """The newest copy of the running generation's state that could be resumed from, were it to fail now."""
        return self._copies[-1][0] if self._copies else self.kept

    def put(self, copy: Copy, fd: int) -> None:
        """Keep a copy that the running workers have taken, in the memory file `fd`, which is ours from now on."""
        self._copies.append((copy, fd))
        while len(self._copies) > COPIES_MAX:
            self._close(self._copies.pop(0)[1])

    def renew(self, resumed: Copy | None) -> None:
        """Begin a generation, which resumes from the copy `resumed`, or from what is on disk, or from nothing."""
        held = [*self._copies, (self.kept, self._kept_fd), (self.left, self.fd)]
        # Another node's copy of the same step is as good: it is only asked for when that node is gone.
        same = [(copy, fd) for copy, fd in held if copy and resumed and copy.step == resumed.step]
        exact = [(copy, fd) for copy, fd in same if copy == resumed]
        chosen = next(iter(exact or same), (None, -1))
        for _, fd in held:
            if fd != chosen[1]:
                self._close(fd)
        self.kept, self._kept_fd = chosen
        self.left, self._copies = None, []
        try:
            self.fd = os.memfd_create("elasticrt-state", os.MFD_CLOEXEC)
        except OSError as error:
            log.warning("no memory for handing states over: %s", error.strerror)
            self.fd = -1

    def forget(self) -> None:
        """The copy that the running generation is to resume from is damaged: it is offered to nobody again."""
        self._close(self._kept_fd)
        self.kept, self._kept_fd = None, -1

    def descriptors(self, resumed: Copy | None) -> dict[str, int]:
        """What to pass to local rank 0: "copy" to leave its state in, "state" if it is to resume from this node's."""
        fds = {"copy": self.fd} if self.fd >= 0 else {}
        if resumed is not None and self.kept == resumed:
            fds["state"] = self._kept_fd
        return fds

    def close(self) -> None:
        """Give everything back."""
        for fd in (self.fd, self._kept_fd, *(fd for _, fd in self._copies)):
            self._close(fd)
        self.fd = self._kept_fd = -1
        self.left = self.kept = None
        self._copies = []

    @staticmethod
    def _close(fd: int) -> None:
        if fd >= 0:
            os.close(fd)
