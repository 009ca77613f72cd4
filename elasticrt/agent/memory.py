"""The memory that this node keeps for training states: what its workers leave behind when they hand over.

Two memory files at most: an empty one for the running workers to leave their state in, and the one left at the last
handover, for as long as the running generation resumed from that step: should it fail before it has committed
anything, the next one can resume from there again. A memory file has no name: when its last descriptor is closed, as at
the latest with the agent, the kernel frees it.
"""

from __future__ import annotations

import logging
import os

from elasticrt.contract.env import Copy

log = logging.getLogger(__name__)


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

    def renew(self, resumed: Copy | None) -> None:
        """Begin a generation that resumes from the copy `resumed`, or from none."""
        if self.left is not None and resumed is not None and self.left.step == resumed.step:
            self._close(self._kept_fd)
            self._kept_fd, self.kept = self.fd, self.left
        else:
            self._close(self.fd)
            if self.kept is not None and (resumed is None or self.kept.step != resumed.step):
                self._close(self._kept_fd)
                self._kept_fd, self.kept = -1, None
        self.left = None
        try:
            self.fd = os.memfd_create("elasticrt-state", os.MFD_CLOEXEC)
        except OSError as error:
            log.warning("no memory for handing states over: %s", error.strerror)
            self.fd = -1

    def descriptors(self, resumed: Copy | None) -> dict[str, int]:
        """What to pass to local rank 0: "copy" to leave its state in, "state" if it is to resume from this node's."""
        fds = {"copy": self.fd} if self.fd >= 0 else {}
        if resumed is not None and self.kept == resumed:
            fds["state"] = self._kept_fd
        return fds

    def close(self) -> None:
        """Give everything back."""
        self._close(self.fd)
        self._close(self._kept_fd)
        self.fd = self._kept_fd = -1
        self.left = self.kept = None

    @staticmethod
    def _close(fd: int) -> None:
        if fd >= 0:
            os.close(fd)
