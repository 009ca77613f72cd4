"""What of a copy is made while training goes on: an optimizer's tensors, which nobody writes to before its next step.

They are most of a state (two thirds of it with Adam), and the training thread need not wait for them. A writer thread
copies them during the next forward and backward pass; before an optimizer steps, the training thread copies what is
left. Should somebody have written to one meanwhile, its version counter tells: then the copy is not used at all.

What is noted once and only has to be put into another form, such as the random numbers, waits as well.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

PIECE_BYTES = 4 << 20
"""The training thread waits for the piece that is being copied, half a millisecond, and for no more."""

SETTLE_S = 1.0
"""How long to wait for the next step before the tensors are looked at without it. An evaluation may come first, and its
checkpoint should not wait for it; that one operation on a tensor takes so long while it is being copied can't be."""


class Steady:
    """Marks a part of a state whose tensors may be copied later."""

    def __init__(self, value: object) -> None:
        self.value = value


class Later:
    """Marks a part of a state that may be made later: `make` gives the same whenever it is called."""

    def __init__(self, make: Callable[[], object]) -> None:
        self.make = make


class Deferred:
    """What of one copy is still to be made. Used by the training thread and one writer.

    Attributes:
        intact: False as soon as somebody is known to have written to a tensor too early, or a part could not be made:
            the copy is of no use.
        spent_s: how long it has taken both of them.
    """

    def __init__(self) -> None:
        self.intact = True
        self.spent_s = 0.0
        self._tasks: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._watched: list[tuple[torch.Tensor, int]] = []
        self._watching = threading.Lock()  # Held while a tensor is watched. To make an Event takes ten times as long.

    def watch(self, source: torch.Tensor) -> bool:
        """From now on, nobody should write to `source`. False if that could not be seen: it has no version."""
        try:
            seen = source._version
        except RuntimeError:  # Made in inference mode.
            return False
        if not self._watched:
            self._watching.acquire()
        self._watched.append((source, seen))
        return True

    def add(self, task: Callable[[], object]) -> None:
        """Do this later: on either thread, and before an optimizer steps if any tensor is watched."""
        self._tasks.append(task)

    def add_copy(self, source: torch.Tensor, buffer: torch.Tensor) -> None:
        """Copy `source` into `buffer` later: both contiguous in the host's memory, and of one size."""
        for first in range(0, source.nbytes, PIECE_BYTES):
            self.add(partial(_copy_piece, source, buffer, first, min(PIECE_BYTES, source.nbytes - first)))

    def finish(self) -> None:
        """On the training thread, before an optimizer steps: do what is left, and see that nothing was changed."""
        if not self._watched:  # As before most steps: they should not wait for a lock.
            return
        while self._do_one():
            pass
        self._judge()

    def complete(self) -> bool:
        """On the writer thread: do everything, and wait until the training thread is there; `intact`."""
        while self._do_one():
            pass
        if self._watching.acquire(timeout=SETTLE_S):
            self._watching.release()
        else:
            self._judge()
        return self.intact

    def _do_one(self) -> bool:
        """Who finds nothing left knows that all is done: each task is done under the lock, a copy without the GIL."""
        with self._lock:
            if not self._tasks:
                return False
            began = time.perf_counter()
            try:
                self._tasks.popleft()()
            except BaseException:
                self.intact = False
                raise
            self.spent_s += time.perf_counter() - began
            return True

    def _judge(self) -> None:
        with self._lock:
            if self._watched:
                self.intact = self.intact and all(source._version == seen for source, seen in self._watched)
                self._watched = []
                self._watching.release()


def _copy_piece(source: torch.Tensor, buffer: torch.Tensor, first: int, size: int) -> None:
    ctypes.memmove(buffer.data_ptr() + first, source.data_ptr() + first, size)
