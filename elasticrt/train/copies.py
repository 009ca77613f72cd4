"""The memory tier: copies of the training state in the memory of each node's agent, taken while training goes on.

Between two steps local rank 0 copies its state to the host; a thread writes the copy to a memory file and hands that to
the agent, which keeps it when this process dies. Copies are taken as often as a share of the time allows, the cost of
the last one being the measure. A generation that ends without a handover resumes from the newest copy that a surviving
node holds, if it is newer than the newest checkpoint.

Nodes copy after the same steps, without having to agree on them: after those that a round number divides, which each
chooses by itself. All ranks wait for the one that copies; if each node did so in its own time, training would stand
still once for every node, and of a hundred nodes each would take its share from all.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from elasticrt.contract.env import WorkerEnv
from elasticrt.contract.messages import Copied
from elasticrt.train import handover, link
from elasticrt.train.background import Background
from elasticrt.train.deferred import Deferred, Steady
from elasticrt.train.room import available_bytes
from elasticrt.train.snapshots import Snapshots

_log = logging.getLogger(__name__)

BUDGET = 0.01
"""The share of the training time that copies may take, by default."""

FIRST_S = 1.0
"""A generation that has just begun has better things to do; and what it resumed from is still there."""

FIRST_WITHIN_S = 0.25
"""After that, the first copy is taken within twice this time: nobody knows yet what it costs."""

STEP_S_MIN = 1e-6
"""No step is shorter. What divides by nothing is no number of steps."""

HELD_AT_ONCE = 4
"""The copy on the host, its memory file, and the two that the agent keeps."""


def stride(interval_s: float, step_s: float) -> int:
    """After every how many steps of `step_s` seconds to copy, so that at least `interval_s` lie between. Pure.

    A power of two, or three of them: nodes whose costs differ a little choose the same, and where they do not, most
    steps of the one are among those of the other.
    """
    steps = max(1, math.ceil(interval_s / max(step_s, STEP_S_MIN)))
    power: int = 1 << (steps - 1).bit_length()
    return power * 3 // 4 if power >= 4 and steps <= power * 3 // 4 else power


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

    def __init__(self, worker: WorkerEnv | None, budget: float, place: str = "") -> None:
        self._place = place
        takes = worker is not None and worker.local_rank == 0 and budget > 0 and link.agent_link() is not None
        self._budget = budget if takes else 0.0
        self._not_before = math.inf
        self._stride = 0  # Steps; 0: not known yet.
        self._taken = 0
        self._step = 0
        self._at = 0.0
        self._step_s = 0.0
        self._snapshots = Snapshots()
        self._writer = Background("elasticrt-copy")

    def begin(self, now: float, step: int) -> None:
        """The loop is entered after `step`."""
        if self._budget:
            self._not_before = now + FIRST_S
            self._step, self._at = step, now

    def due(self, now: float, step: int) -> bool:
        """Whether to take one now, after `step`."""
        if now < self._not_before or step == self._step:
            return False
        if not self._stride:
            self._stride = stride(FIRST_WITHIN_S, (now - self._at) / (step - self._step))
        return step % self._stride == 0

    def take(self, state: Mapping[str, Any], step: int, epoch: int) -> None:
        """Copy `state` as of `step` to the host now; the rest happens in the background."""
        began = time.monotonic()
        self._not_before = math.inf  # Until this one is done, or for ever.
        problem = lacks_room(_size(state), available_bytes(), self._taken)
        if problem:
            _log.warning("no copies are kept in memory: %s. After a failure training resumes from disk", problem)
            return
        self._taken += 1
        self._step_s = (began - self._at) / max(1, step - self._step)
        self._step, self._at = step, began
        copied, deferred = self._snapshots.take(state)
        stall_s = time.monotonic() - began
        self._writer.start(partial(self._write, copied, deferred, step, epoch, stall_s))

    def settle(self) -> None:
        """Before an optimizer steps: from here on, what was marked as `Steady` in the last copy may change."""
        self._snapshots.settle()

    def wait(self, timeout_s: float = 60.0) -> None:
        """Wait for one that is being written, before this process leaves."""
        self.settle()
        self._writer.wait(timeout_s)

    def _write(self, copied: dict[str, Any], deferred: Deferred, step: int, epoch: int, stall_s: float) -> None:
        if not deferred.complete():
            _log.warning("an optimizer's state was changed while it was copied: from now on it is copied all at once")
            self._not_before = -math.inf
            return
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
            agent.say(Copied(step, epoch, size, digest, self._place), [fd])
        except OSError as error:
            _log.warning("no copies are kept in memory any more: %s", error)
            return
        finally:
            os.close(fd)
        cost_s = stall_s + deferred.spent_s + time.monotonic() - began
        chosen = stride(cost_s / self._budget, self._step_s)
        if chosen != self._stride:
            _log.info(
                "a copy of the state (%.1f MiB) every %d steps, %.2f s", size / 2**20, chosen, chosen * self._step_s
            )
        self._stride = chosen
        self._not_before = -math.inf


def _size(value: object) -> int:
    """Bytes of the tensors in a state."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Steady):
        return _size(value.value)
    if isinstance(value, Mapping):
        return sum(_size(each) for each in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_size(each) for each in value)
    return 0
