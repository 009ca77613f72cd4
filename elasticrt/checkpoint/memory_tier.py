"""The memory tier: copies of the training state in the memory of each node's agent, taken while training goes on.

Between two steps local rank 0 takes a snapshot of its state and hands it to the agent as a memory file, which outlives
this process. Copies take a fixed share of the training time, measured by the cost of the last one; a process that hands
over takes one more. A generation whose workers all end resumes from the newest surviving copy, if that is newer than
the newest checkpoint.

All nodes copy after the same steps, those that a round number divides, without agreeing on them. All ranks wait for a
rank that copies: if each node chose its own steps, the training would stop once for every node.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from elasticrt.checkpoint.snapshot import Snapshot, Use
from elasticrt.checkpoint.state_copy import MOMENTS, Buffers, tensors_of
from elasticrt.distributed import agent_client
from elasticrt.distributed.shared_payload import Payload
from elasticrt.ipc.cgroups import available_bytes
from elasticrt.ipc.env import WorkerEnv
from elasticrt.ipc.messages import Copied, Damaged

_log = logging.getLogger(__name__)

# The share of the training time that copies may take, by default.
BUDGET = 0.002
# Seconds from a generation's first step to its first copy. Until then what it resumed from is still there.
FIRST_S = 1.0
# After that, the first copy is taken within twice this time: what it costs is not known yet.
FIRST_WITHIN_S = 0.25
# A step is taken to last at least this long: a clock may show no difference between two.
STEP_S_MIN = 1e-6
# How long a process that ends waits until its agent has its state. That takes milliseconds: the agent keeps a
# descriptor.
TAKEN_S_MAX = 10.0
# The copy on the host, its memory file, and the two that the agent keeps.
HELD_AT_ONCE = 4


def stride(interval_s: float, step_s: float) -> int:
    """After every how many steps of `step_s` seconds to copy, so that at least `interval_s` lie between. Pure.

    A power of two, or three times one: nodes whose costs differ a little choose the same number, and where they do not,
    most steps of the one are among those of the other.
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


class MemoryTier:
    """The copies of one process. Only local rank 0 of a node under an agent takes any.

    They may take the share `budget` of the time; 0: there are none. `place` tells the Loop's checkpoint directory from
    others of the run.
    """

    def __init__(self, worker: WorkerEnv, budget: float, place: str) -> None:
        self._place = place
        takes = worker.local_rank == 0 and budget > 0 and agent_client.agent_link().linked
        self._budget = budget if takes else 0.0
        self._not_before = math.inf
        self._stride = 0  # Steps; 0: not known yet.
        self._taken = 0
        self._step = 0
        self._at = 0.0
        self._step_s = 0.0

    def touch(self, state: Mapping[str, Any], buffers: Buffers) -> None:
        """Have `buffers` for the first copy, of a state like this one with what an optimizer adds to it."""
        likes = [each for each in tensors_of(state) if each.is_cpu] * (1 + MOMENTS)
        if self._budget and not lacks_room(sum(each.nbytes for each in likes), available_bytes()):
            buffers.touch(likes)

    def begin(self, now: float, step: int) -> None:
        """The loop is entered after `step`."""
        if self._budget:
            self._not_before = now + FIRST_S
            self._step, self._at = step, now

    def left_alone(self) -> None:
        """No other process has the state any more: the next copy is due at once, and the interval begins with it."""
        self._stride = min(self._stride, 1)  # 0 stays: the first copy is soon to come.

    def due(self, now: float, step: int) -> bool:
        """Whether to take one now, after `step`."""
        if now < self._not_before or step == self._step:
            return False
        if not self._stride:
            self._stride = stride(FIRST_WITHIN_S, (now - self._at) / (step - self._step))
        return step % self._stride == 0

    def to_agent(self, state: Mapping[str, Any], step: int, epoch: int) -> list[Use]:
        """The use that keeps the snapshot of `state` as of `step`, which is taken next; none where room is lacking."""
        self._not_before = math.inf  # Until this one is done; where room is lacking, no other is taken.
        problem = lacks_room(sum(each.nbytes for each in tensors_of(state)), available_bytes(), self._taken)
        if problem:
            _log.warning("no copies are kept in memory: %s. After a failure training resumes from disk", problem)
            return []
        now = time.monotonic()
        self._taken += 1
        self._step_s = (now - self._at) / max(1, step - self._step)
        self._step, self._at = step, now
        return [partial(self._keep, step, epoch)]

    def hand_over(self, state: Mapping[str, Any], step: int, epoch: int) -> None:
        """Give the agent the state as of `step` at once, as this process ends. Does not wait for a save in flight.

        The agent has it afterwards: as long as it does not, this process counts as one that can go on in place.
        """
        self._say(step, epoch, Snapshot(state), ends=True)

    def _keep(self, step: int, epoch: int, snapshot: Snapshot) -> None:
        began = time.monotonic()
        size = self._say(step, epoch, snapshot)
        if not size:
            return
        cost_s = snapshot.stall_s + time.monotonic() - began
        chosen = stride(cost_s / self._budget, self._step_s)
        if chosen != self._stride:
            _log.info(
                "a copy of the state (%.1f MiB) every %d steps, %.2f s", size / 2**20, chosen, chosen * self._step_s
            )
        self._stride = chosen
        self._not_before = -math.inf

    def _say(self, step: int, epoch: int, snapshot: Snapshot, *, ends: bool = False) -> int:
        """Hand the agent a snapshot; its size in bytes, 0 where there is no memory for it."""
        agent = agent_client.agent_link()
        try:
            file = Payload(os.memfd_create("elasticrt-copy", os.MFD_CLOEXEC))
            size, digest = snapshot.write_to(file.file)
        except OSError as error:  # The next generation then resumes from an older state: that costs steps, not safety.
            _log.warning("no copies are kept in memory any more: %s", error)
            return 0
        copied = Copied(step, epoch, size, digest, self._place)
        if not ends:
            agent.say(copied, [file.file])
        elif agent.request(lambda number: replace(copied, request=number), TAKEN_S_MAX, [file.file]) is None:
            _log.warning("the agent has not taken the state of step %d within %g s", step, TAKEN_S_MAX)
        return size


def read(worker: WorkerEnv) -> Payload:
    """The copy that this generation resumes from, verified. RuntimeError when it is not what was promised.

    Not a CheckpointError, which is final: the next generation can resume from another node's copy or from the head. A
    message makes the agent forget this copy.
    """
    copy = worker.copy
    assert copy is not None, "asked for only when there is one"
    if worker.state_fd < 0:
        raise RuntimeError(f"the copy of step {copy.step} is not in this node's memory")
    payload = Payload(os.dup(worker.state_fd))
    problem = payload.flaw(copy.size, copy.digest)
    if problem:
        agent_client.agent_link().say(Damaged())
        raise RuntimeError(f"the copy of step {copy.step} in this node's memory is damaged: {problem}")
    return payload
