"""The memory that this node keeps for training states: one memfd for the running workers, one that they left behind.

A memfd has no name: when its last descriptor is closed, as at the latest with the agent, the kernel frees it.
"""

from __future__ import annotations

import logging
import os

from elasticrt.contract.env import Copy

log = logging.getLogger(__name__)


class Memory:
    """Used by the agent's thread. `fd` is where the running generation's local rank 0 may leave its state, -1 for none.

    `copy` describes what has been left there.
    """

    def __init__(self) -> None:
        self.fd = -1
        self.copy: Copy | None = None

    def renew(self, wanted: Copy | None) -> int:
        """Begin a generation: a new, empty file. The old one's descriptor if it holds the `wanted` copy, else -1.

        The caller passes that descriptor on, then forgets it.
        """
        old, held = self.fd, self.copy
        try:
            self.fd = os.memfd_create("elasticrt-state", os.MFD_CLOEXEC)
        except OSError as error:
            log.warning("no memory for handing states over: %s", error.strerror)
            self.fd = -1
        self.copy = None
        if old >= 0 and wanted is not None and wanted == held:
            return old
        self.forget(old)
        return -1

    @staticmethod
    def forget(fd: int) -> None:
        """Close a descriptor, if it is one."""
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Give everything back."""
        self.forget(self.fd)
        self.fd, self.copy = -1, None
