"""The memory tier: copies of the training state in the memory of each node's agent, taken while training goes on.

Between two steps local rank 0 copies its state to the host; a thread writes the copy to a memory file and hands that to
the agent, which keeps it when this process dies. Copies are taken as often as a share of the time allows, the cost of
the last one being the measure. A generation that ends without a handover resumes from the newest copy that a surviving
node holds, if it is newer than the newest checkpoint.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from elasticrt.contract.env import WorkerEnv
from elasticrt.contract.messages import Copied
from elasticrt.train import handover, link
from elasticrt.train.checkpoint import YIELD_S
from elasticrt.train.plain import Buffers, plain_copy
from elasticrt.train.room import available_bytes

_log = logging.getLogger(__name__)

BUDGET = 0.01
"""The share of the training time that copies may take, by default."""

FIRST_S = 1.0
"""A generation that has just begun has better things to do; and what it resumed from is still there."""

HELD_AT_ONCE = 4
"""The copy on the host, its memory file, and the two that the agent keeps."""


def next_at(now: float, cost_s: float, budget: float) -> float:
    """When to take the next copy after one that took `cost_s` seconds, so that they take the share `budget`. Pure."""
    return now + cost_s / budget


def lacks_room(size: int, available: int, taken: int = 0) -> str:
    """Why no copy of `size` bytes is taken after `taken` others, with `available` bytes free; "" if it is. Pure."""
    held = min(taken + 1, HELD_AT_ONCE - 1) if taken else 0  # These are in what is not free.
    more = HELD_AT_ONCE - held
    if more * size < available:
        return ""
    return f"no room for {more} of {size / 2**20:,.0f} MiB each, {available / 2**20:,.0f} MiB are free"


class Copies:
    """One process's. Only local rank 0 of a node under an agent takes any; elsewhere nothing happens.

    Args:
        worker: who this process is; None without an agent.
        budget: the share of the time, 0 for no copies.
    """

    def __init__(self, worker: WorkerEnv | None, budget: float) -> None:
        takes = worker is not None and worker.local_rank == 0 and budget > 0 and link.agent_link() is not None
        self._budget = budget if takes else 0.0
        self._next_at = math.inf
        self._taken = 0
        self._interval_s = 0.0
        self._buffers = Buffers()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """The loop is entered."""
        if self._budget:
            self._next_at = time.monotonic() + FIRST_S

    def due(self, now: float) -> bool:
        """Whether to take one now."""
        return now >= self._next_at

    def take(self, state: Mapping[str, Any], step: int, epoch: int) -> None:
        """Copy `state` as of `step` to the host now; the rest happens in the background."""
        began = time.monotonic()
        problem = lacks_room(_size(state), available_bytes(), self._taken)
        if problem:
            self._next_at = math.inf
            _log.warning("no copies are kept in memory: %s. After a failure training resumes from disk", problem)
            return
        self._next_at = math.inf  # Until this one is done.
        self._taken += 1
        copied = plain_copy(state, "state", self._buffers)
        stall_s = time.monotonic() - began
        arguments = (copied, step, epoch, stall_s)
        self._thread = threading.Thread(target=self._write, args=arguments, name="elasticrt-copy", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float = 60.0) -> None:
        """Wait for one that is being written, before this process leaves."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _write(self, copied: dict[str, Any], step: int, epoch: int, stall_s: float) -> None:
        time.sleep(YIELD_S)
        began = time.monotonic()
        agent = link.agent_link()
        assert agent is not None, "who takes copies has an agent"
        try:
            fd = os.memfd_create("elasticrt-copy", os.MFD_CLOEXEC)
        except OSError as error:
            _log.warning("no copies are kept in memory: %s", error)
            return
        try:
            size, digest = handover.write(fd, copied)
            agent.say(Copied(step, epoch, size, digest), [fd])
        except OSError as error:
            _log.warning("no copies are kept in memory any more: %s", error)
            return
        finally:
            os.close(fd)
        now = time.monotonic()
        self._next_at = next_at(now, stall_s + now - began, self._budget)
        interval_s = self._next_at - now
        if not self._interval_s / 2 <= interval_s <= self._interval_s * 2:
            self._interval_s = interval_s
            _log.info("a copy of the state (%.1f MiB) every %.2f s", size / 2**20, interval_s)


def _size(value: object) -> int:
    """Bytes of the tensors in a state."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(_size(each) for each in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_size(each) for each in value)
    return 0
