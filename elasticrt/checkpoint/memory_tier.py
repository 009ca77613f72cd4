"""The memory tier: takes copies of the training state into the memory of each node's agent, while training goes on.

Between two steps local rank 0 takes a snapshot of its state, and hands it to the agent as a memory file, which outlives
this process. Copies take a fixed share of the training time; the cost of the last copy decides when the next one is
due. A process that hands over takes one more. When all workers of a generation end, the next one resumes from the
newest surviving copy, if that is newer than the newest checkpoint.

All nodes copy after the same steps, without agreeing on them: the steps that a round number (`stride`) divides. When
one rank copies, all ranks wait for it. If each node chose its own steps, the training would stop once for every node.
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
from elasticrt.ipc.messages import Copied, CopyDamaged

_log = logging.getLogger(__name__)

# The share of the training time that copies may take, by default.
BUDGET = 0.002
# Seconds from a generation's first step to its first copy. Until then, the state that it resumed from is still there.
FIRST_S = 1.0
# After that, the first copy is taken within twice this time, in seconds. The cost of a copy is not known yet.
FIRST_WITHIN_S = 0.25
# The shortest step, in seconds, that is reckoned with: two readings of a clock may be equal.
STEP_S_MIN = 1e-6
# How long, in seconds, a process that ends waits until its agent has its state. Usually that takes milliseconds,
# because the agent only keeps a descriptor.
TAKEN_S_MAX = 10.0
# How many copies of the state exist at the same time: the snapshot on the host, its memory file, and the two memory
# files that the agent keeps.
HELD_AT_ONCE = 4


def stride(interval_s: float, step_s: float) -> int:
    """The number of steps, of `step_s` seconds each, from one copy to the next: at least `interval_s` seconds. Pure.

    The result is a power of two, or three times a power of two. Nodes whose costs differ a little choose the same
    number. If they choose different numbers, most steps after which one node copies are such steps of the other as
    well.
    """
    steps = max(1, math.ceil(interval_s / max(step_s, STEP_S_MIN)))
    power: int = 1 << (steps - 1).bit_length()
    return power * 3 // 4 if power >= 4 and steps <= power * 3 // 4 else power


def lacks_room(size: int, available: int, taken: int = 0) -> str:
    """Why no copy of `size` bytes is taken; "" if one is. Pure.

    Args:
        size: bytes of the state.
        available: bytes of free memory.
        taken: how many copies were taken before.
    """
    # Earlier copies that still exist are not in the free memory, and need no room any more.
    held = min(taken + 1, HELD_AT_ONCE - 1) if taken else 0
    more = HELD_AT_ONCE - held
    if more * size < available:
        return ""
    return f"no room for {more} of {size / 2**20:,.0f} MiB each, {available / 2**20:,.0f} MiB are free"


class MemoryTier:
    """The copies of one process. Only local rank 0 of each node takes copies, and only under an agent.

    Args:
        worker: this process's seat.
        budget: the share of the training time that copies may take; 0: no copies are taken.
        place: identifies the Loop's checkpoint directory within the run.
    """

    def __init__(self, worker: WorkerEnv, budget: float, place: str) -> None:
        self._place = place
        takes = worker.local_rank == 0 and budget > 0 and agent_client.agent_link().has_agent
        self._budget = budget if takes else 0.0
        self._not_before = math.inf  # The next copy is not due before this time.
        self._stride = 0  # Steps from one copy to the next; 0: not known yet.
        self._taken = 0
        # The step of the newest copy, or the one after which the loop was entered, and its time.
        self._step = 0
        self._at = 0.0
        self._step_s = 0.0  # Seconds per step between the last two copies.

    def touch(self, state: Mapping[str, Any], buffers: Buffers) -> None:
        """Touch memory in `buffers` for the first copy, while no rank waits.

        It has room for a state like `state`, and for what an optimizer will add to that.
        """
        likes = [each for each in tensors_of(state) if each.is_cpu] * (1 + MOMENTS)
        if self._budget and not lacks_room(sum(each.nbytes for each in likes), available_bytes()):
            buffers.touch(likes)

    def begin(self, now: float, step: int) -> None:
        """The loop is entered after `step`, at the time `now`. No copy is due before FIRST_S have passed."""
        if self._budget:
            self._not_before = now + FIRST_S
            self._step, self._at = step, now

    def left_alone(self) -> None:
        """No other process has the state any more: the next copy is due at once, and the interval begins with it."""
        # A stride of 0 stays, because the first copy is due soon anyway.
        self._stride = min(self._stride, 1)

    def is_due(self, now: float, step: int) -> bool:
        """Whether to take a copy at the time `now`, after `step`."""
        if now < self._not_before or step == self._step:
            return False
        if not self._stride:
            self._stride = stride(FIRST_WITHIN_S, (now - self._at) / (step - self._step))
        return step % self._stride == 0

    def to_agent(self, state: Mapping[str, Any], step: int, epoch: int) -> list[Use]:
        """The use, for `Snapshots.take`, that hands the next snapshot to the agent. None where there is no room.

        Args:
            state: the state that the snapshot will copy.
            step: the run's steps in this state.
            epoch: the epoch that the next step belongs to.
        """
        # No other copy is due until this one is done. Without room, no other is taken at all.
        self._not_before = math.inf
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
        """Give the agent the state as of `step` at once, because this process ends.

        Does not wait for a save in flight. The agent has the state when this returns: until it has, the agent counts
        this process as one that can go on in place.
        """
        self._send_copy(step, epoch, Snapshot(state), ends=True)

    def _keep(self, step: int, epoch: int, snapshot: Snapshot) -> None:
        """Hand a snapshot to the agent, on the snapshot's thread. Its cost decides the stride from now on."""
        began = time.monotonic()
        size = self._send_copy(step, epoch, snapshot)
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

    def _send_copy(self, step: int, epoch: int, snapshot: Snapshot, *, ends: bool = False) -> int:
        """Hand the agent a snapshot as a memory file. Returns its size in bytes; 0 where there is no memory for it.

        With `ends`, waits until the agent has the file.
        """
        agent = agent_client.agent_link()
        try:
            file = Payload(os.memfd_create("elasticrt-copy", os.MFD_CLOEXEC))
            size, digest = snapshot.write_to(file.file)
        except OSError as error:
            # After a failure the next generation resumes from an older state. That costs steps, but is safe.
            _log.warning("no copies are kept in memory any more: %s", error)
            return 0
        copied = Copied(step, epoch, size, digest, self._place)
        if not ends:
            agent.send(copied, [file.file])
        elif agent.request(lambda number: replace(copied, request=number), TAKEN_S_MAX, [file.file]) is None:
            _log.warning("the agent has not taken the state of step %d within %g s", step, TAKEN_S_MAX)
        return size


def read(worker: WorkerEnv) -> Payload:
    """The memory copy that this generation resumes from, verified.

    Raises RuntimeError when the copy is missing or damaged. A CheckpointError would end the run, while the next
    generation can resume from another node's copy, or from the head. The agent gets a message to forget a damaged copy.
    """
    copy = worker.copy
    assert copy is not None, "asked for only when there is one"
    if worker.state_fd < 0:
        raise RuntimeError(f"the copy of step {copy.step} is not in this node's memory")
    payload = Payload(os.dup(worker.state_fd))
    problem = payload.flaw(copy.size, copy.digest)
    if problem:
        agent_client.agent_link().send(CopyDamaged())
        raise RuntimeError(f"the copy of step {copy.step} in this node's memory is damaged: {problem}")
    return payload
