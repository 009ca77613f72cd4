"""The status page: one memory page that a worker writes and its agent reads, without a system call per step.

A memfd of 4096 bytes, created by the agent, inherited by the worker, gone with the last of the two. Each field is one
aligned 64-bit word, so that a reader sees an old or a new value, never a torn one (x86-64 and arm64).
"""

from __future__ import annotations

import mmap
import os

PAGE_BYTES = 4096


class Page:
    """The page as properties.

    Attributes:
        entered: the step that the worker has entered (it writes s + 1 at the end of step s, before it reads `stop`).
        stop: written by the agent: not 0: hold at the end of the present step.
        save: written by the agent before `go`: rank 0 commits a checkpoint before it leaves (1), or not (0).
        go: written by the agent while workers hold: the step after which all hand over; 0 while it is not known.
        step: the last finished global step.
        step_at_ns: CLOCK_MONOTONIC when it finished.
        epoch: the epoch of that step.
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self._words = memoryview(self._map).cast("Q")

    @staticmethod
    def create() -> int:
        """A new, zeroed page as a memfd (close-on-exec); the caller owns the descriptor. OSError when out of memory."""
        fd = os.memfd_create("elasticrt-page", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE_BYTES)
        return fd

    def close(self) -> None:
        """Unmap."""
        self._words.release()
        self._map.close()

    @property
    def entered(self) -> int:
        """See the class."""
        return self._words[0]

    @entered.setter
    def entered(self, value: int) -> None:
        self._words[0] = value

    @property
    def stop(self) -> int:
        """See the class."""
        return self._words[1]

    @stop.setter
    def stop(self, value: int) -> None:
        self._words[1] = value

    @property
    def save(self) -> int:
        """See the class."""
        return self._words[6]

    @save.setter
    def save(self, value: int) -> None:
        self._words[6] = value

    @property
    def go(self) -> int:
        """See the class."""
        return self._words[5]

    @go.setter
    def go(self, value: int) -> None:
        self._words[5] = value

    @property
    def step(self) -> int:
        """See the class."""
        return self._words[2]

    @property
    def step_at_ns(self) -> int:
        """See the class."""
        return self._words[3]

    @property
    def epoch(self) -> int:
        """See the class."""
        return self._words[4]

    def finished(self, step: int, epoch: int, at_ns: int) -> None:
        """The worker has finished global step `step`. The step itself is written last: it announces the rest."""
        self._words[3] = at_ns
        self._words[4] = epoch
        self._words[2] = step
