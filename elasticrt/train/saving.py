"""When a Loop saves, and where: its checkpoint directory, the memory of this node's agent, or both from one copy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from elasticrt.checkpoint.checkpointer import Checkpointer
from elasticrt.checkpoint.commits import run_of
from elasticrt.checkpoint.memory_tier import MemoryTier
from elasticrt.data.position import Position, SaveInterval
from elasticrt.distributed import agent_client, collectives
from elasticrt.errors import ConfigError
from elasticrt.ipc.env import WorkerEnv
from elasticrt.train.training_state import TrainingState


class Saving:
    """The saves of one Loop. Raises TypeError, ValueError and ConfigError for arguments that can't be."""

    def __init__(
        self, state: TrainingState, directory: str | os.PathLike[str], *, every: str, keep: int, memory: float
    ) -> None:
        if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not 0 <= memory < 1:
            raise ConfigError("no such share", "Loop(memory=)", got=memory, expected="0 <= memory < 1")
        worker = agent_client.worker_env()
        self.checkpointer = Checkpointer(directory, keep=keep)
        self.memory_tier = MemoryTier(worker, memory, self.checkpointer.place)
        self.run = run_of(worker)  # Steps and checkpoints over all of its directories, as far as is known here.
        if not self.run.has_loop:  # What a Checkpointer has restored before counts no more.
            self.run.has_loop, self.run.total = True, 0
        self._every = SaveInterval.parse(every)
        self._state = state
        self._page = agent_client.status_page()
        self._saved = Position()
        self._saved_at = 0.0
        self.is_first = False
        self._owes = False  # Whether a save is due at once, whatever the interval says.

    def set_up_beside(self) -> None:
        """Touch the memory of the first copy, which is taken soon after this process is let in: all wait for it."""
        self.memory_tier.touch(self._state.collect(), self.checkpointer.snapshots.buffers)

    def begin(self) -> None:
        """The loop begins at the position of the state."""
        now = time.monotonic()
        self._saved, self._saved_at = self._state.position, now
        # A state from a copy in memory is on no disk. The interval begins anew at each restart, so a run that fails
        # more often than that would never save.
        self._owes = self._owes or (self.is_first and self.checkpointer.adds(self._state.position.steps))
        self.memory_tier.begin(now, self.run.total)

    def has_state(self) -> None:
        """The state is that of the generation that begins."""
        self.is_first = collectives.rank_and_world()[0] == 0
        self._owes = self.is_first and (self._owes or self.checkpointer.lacks_head)

    def move(self, worker: WorkerEnv) -> None:
        """This process goes on as `worker`, in another generation."""
        # A new rank 0 saves at once, because it does not know when the one before has saved: each interval is to have
        # a checkpoint, however often rank 0 changes. A save in flight will be refused, or was: its generation is over.
        refused = self.checkpointer.snapshots.busy or self.checkpointer.missed
        self._owes = worker.rank == 0 and (self._owes or not self.is_first or refused)
        self.checkpointer.move(worker)
        if worker.world_size == 1:
            self.memory_tier.left_alone()

    def between_steps(self) -> None:
        """Save and copy what is due."""
        now, position = time.monotonic(), self._state.position
        copy = self.memory_tier.due(now, self.run.total)
        save = self.is_first and (self._owes or self._every.is_due(position, self._saved, now - self._saved_at))
        if save or copy:
            snapshots = self.checkpointer.snapshots
            save = save and not snapshots.busy  # One at a time is saved, and kept as the next one's head.
            if (save or copy) and snapshots.have_room:
                self.take(save=save, copy=copy)

    def while_waiting(self, then: Callable[[], object]) -> None:
        """No step comes for long: save what no checkpoint here holds, if this is rank 0, and call `then` after that.

        That is done by another thread, as a seat may come before.
        """
        if self.is_first and self.checkpointer.adds(self._state.position.steps):
            self.take(save=True, copy=False, then=then)
        else:
            then()

    def take(self, *, save: bool, copy: bool, patient: bool = False, then: Callable[[], object] = bool) -> None:
        """Copy the state as it is now, for the disk with `save` (on rank 0), for the agent's memory with `copy`.

        `patient`: see `Checkpointer.to_disk`. `then` is called when all is done, perhaps by another thread.
        """
        since_ns = time.monotonic_ns()
        position, state, uses = self._state.position, self._state.collect(), []
        if copy:
            uses += self.memory_tier.to_agent(state, self.run.total, position.epoch)
        if save:
            self._page.stepping = 0
            self._page.saving_ns = since_ns
            uses += self.checkpointer.to_disk(step=position.steps, epoch=position.epoch, patient=patient)
            self._saved, self._saved_at, self._owes = position, time.monotonic(), False
        if uses:
            self.checkpointer.snapshots.take(state, [*uses, lambda _: then()])
        else:
            then()
        self._page.save_ns += time.monotonic_ns() - since_ns

    def last(self) -> None:
        """The loop ends: save what is not saved yet, and wait for that. Raises as `Checkpointer.wait`."""
        self._state.ledger.end(self._state.position.steps)
        if self.is_first:
            self._wait()
            if self._owes or self._state.position != self._saved or self.checkpointer.missed:
                self.take(save=True, copy=False, patient=True)
            self._wait()

    def _wait(self) -> None:
        since_ns = time.monotonic_ns()
        self.checkpointer.wait()
        self._page.save_ns += time.monotonic_ns() - since_ns

    def hand_over(self, state: Mapping[str, Any]) -> None:
        """Give the agent `state`, which is that of the position, because this process ends."""
        self.memory_tier.hand_over(state, self.run.total, self._state.position.epoch)
