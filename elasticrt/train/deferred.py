"""Tensors that are copied while training goes on: an optimizer's, which nobody writes to before its next step.

They are most of a state (two thirds of it with Adam), and the training thread need not wait for them. A writer thread
copies them during the next forward and backward pass; before an optimizer steps, the training thread copies what is
left. Should somebody have written to one meanwhile, its version counter tells: then the copy is not used at all.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque

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


class Deferred:
    """What of one copy is still to be copied. Used by the training thread and one writer.

    Attributes:
        intact: False as soon as somebody is known to have written to a tensor too early: the copy is of no use.
        spent_s: how long the copying has taken both of them.
    """

    def __init__(self) -> None:
        self.intact = True
        self.spent_s = 0.0
        self._pieces: deque[tuple[int, int, int]] = deque()
        self._held: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        self._lock = threading.Lock()
        self._judged = threading.Event()
        self._judged.set()  # Of nothing there is nothing to wait for.

    def add(self, source: torch.Tensor, buffer: torch.Tensor) -> None:
        """Copy `source` into `buffer` later: both contiguous in the host's memory, of one size, with versions."""
        self._judged.clear()
        self._held.append((source, source._version, buffer))
        size = source.numel() * source.element_size()
        for first in range(0, size, PIECE_BYTES):
            piece = min(PIECE_BYTES, size - first)
            self._pieces.append((buffer.data_ptr() + first, source.data_ptr() + first, piece))

    def finish(self) -> None:
        """On the training thread, before an optimizer steps: copy what is left, and see that nothing was changed."""
        if self._judged.is_set():  # As before most steps: they should not wait for a lock.
            return
        while self._copy_one():
            pass
        self._judge()

    def complete(self) -> bool:
        """On the writer thread: copy, and wait until the training thread is there; `intact`."""
        while self._copy_one():
            pass
        if not self._judged.wait(SETTLE_S):
            self._judge()
        return self.intact

    def _copy_one(self) -> bool:
        """Who finds nothing left knows that all is copied: a piece is copied under the lock, without the GIL."""
        with self._lock:
            if not self._pieces:
                return False
            began = time.perf_counter()
            ctypes.memmove(*self._pieces.popleft())
            self.spent_s += time.perf_counter() - began
            return True

    def _judge(self) -> None:
        with self._lock:
            self.intact = self.intact and all(source._version == seen for source, seen, _ in self._held)
            self._held = []
            self._judged.set()
