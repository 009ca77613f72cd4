"""Decides when a Loop saves, and saves: to the checkpoint directory, to the memory of this node's agent, or to both.

Saves that are due at the same boundary share one copy of the state.
"""

from __future__ import annotations

import os
import threading
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

WAITING_SAVE_S_MAX = 60.0
"""How long a run that waits for nodes goes on waiting for a save, in seconds, when the nodes are there."""


class Saving:
    """The saves of one Loop.

    Args:
        state: the state of the Loop.
        directory: the checkpoint directory.
        every: how often to save, as `SaveInterval.parse` reads it.
        keep: how many checkpoints to keep.
        memory: the share of the time that copies in memory may take; 0 for no copies.

    Attributes:
        checkpointer: saves to the directory.
        memory_tier: keeps copies of the state in the memory of this node's agent.
        run: the number of steps and checkpoints of the run over all of its directories, as far as known here.
        is_first: whether this process is rank 0, which saves.

    Raises TypeError, ValueError and ConfigError for arguments that are not allowed.
    """

    def __init__(
        self, state: TrainingState, directory: str | os.PathLike[str], *, every: str, keep: int, memory: float
    ) -> None:
        if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not 0 <= memory < 1:
            raise ConfigError("not a share of the time", "Loop(memory=)", got=memory, expected="0 <= memory < 1")
        worker = agent_client.worker_env()
        self.checkpointer = Checkpointer(directory, keep=keep)
        self.memory_tier = MemoryTier(worker, memory, self.checkpointer.place)
        self.run = run_of(worker)
        # A Loop counts the run's steps. What a Checkpointer has restored before is only a label.
        if not self.run.has_loop:
            self.run.has_loop, self.run.total = True, 0
        self._every = SaveInterval.parse(every)
        self._state = state
        self._page = agent_client.status_page()
        # Position and time of the newest save; before the first save, those at which the loop began.
        self._saved = Position()
        self._saved_at = 0.0
        self.is_first = False
        # Whether a save is due at once, whatever the interval says.
        self._is_due_now = False

    def set_up_beside(self) -> None:
        """Touch the memory for the first copy of the state, while no rank waits.

        That copy is taken soon after the others have let this process in, and then all ranks wait for it.
        """
        self.memory_tier.touch(self._state.collect(), self.checkpointer.snapshots.buffers)

    def begin(self) -> None:
        """Begin to count the interval, because the loop begins at the position of the state."""
        now = time.monotonic()
        self._saved, self._saved_at = self._state.position, now
        # A state that was restored from a copy in memory is on no disk, so it is saved at once. The interval begins
        # anew at each restart, so a run that fails more often than that would never save.
        self._is_due_now = self._is_due_now or (self.is_first and self.checkpointer.adds(self._state.position.steps))
        self.memory_tier.begin(now, self.run.total)

    def begin_generation(self) -> None:
        """Note that the state is the one with which the generation begins."""
        self.is_first = collectives.rank_and_world()[0] == 0
        self._is_due_now = self.is_first and (self._is_due_now or self.checkpointer.lacks_head)

    def move(self, worker: WorkerEnv) -> None:
        """Go on as `worker`, the seat of this process in another generation."""
        # A new rank 0 saves at once, because it does not know when the last rank 0 has saved: each interval is to have
        # a checkpoint, however often rank 0 changes. The commit of a save in flight is refused, because its generation
        # is over. So that save is due again.
        refused = self.checkpointer.snapshots.busy or self.checkpointer.missed
        self._is_due_now = worker.rank == 0 and (self._is_due_now or not self.is_first or refused)
        self.checkpointer.move(worker)
        if worker.world_size == 1:
            self.memory_tier.left_alone()

    def save_due(self) -> None:
        """Save to disk what is due, and copy to memory what is due. Called between two steps."""
        now, position = time.monotonic(), self._state.position
        copy = self.memory_tier.is_due(now, self.run.total)
        save = self.is_first and (self._is_due_now or self._every.is_due(position, self._saved, now - self._saved_at))
        if save or copy:
            snapshots = self.checkpointer.snapshots
            # One save at a time: its commit becomes the head that the next one descends from. A save that is due while
            # another one is in flight stays due.
            save = save and not snapshots.busy
            if (save or copy) and snapshots.have_room:
                self.take(save=save, copy=copy)

    def save_while_waiting(self, then: Callable[[], object], state: Mapping[str, Any] | None = None) -> None:
        """Save the state while the run waits for nodes, if this is rank 0 and no checkpoint here holds the state.

        The save is written by another thread, because the next seat may come at any time.

        Args:
            then: called when that is done, perhaps by another thread; at once if there is nothing to save. A save may
                hang with its disk, so after WAITING_SAVE_S_MAX seconds `then` is called all the same, and once more if
                the save ends.
            state: the state to save; None: the present one.
        """
        if self.is_first and self.checkpointer.adds(self._state.position.steps):
            late = threading.Timer(WAITING_SAVE_S_MAX, then)
            late.daemon = True
            late.start()

            def saved() -> None:
                late.cancel()
                then()

            self.take(save=True, copy=False, then=saved, state=state)
        else:
            then()

    def take(
        self,
        *,
        save: bool,
        copy: bool,
        patient: bool = False,
        then: Callable[[], object] = bool,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Copy the state as it is now. Another thread writes the copy.

        Args:
            save: whether to save to disk. Only on rank 0.
            copy: whether to give the copy to the agent, to be kept in memory.
            patient: whether to wait while etcd does not answer, see `Checkpointer.to_disk`.
            then: called when all is done, perhaps by another thread.
            state: another state of the present position than the present one.
        """
        with self._page.halted():
            position, state, uses = self._state.position, state or self._state.collect(), []
            if copy:
                uses += self.memory_tier.to_agent(state, self.run.total, position.epoch)
            if save:
                self._page.stepping = 0
                self._page.saving_ns = self._page.halted_ns
                uses += self.checkpointer.to_disk(step=position.steps, epoch=position.epoch, patient=patient)
                self._saved, self._saved_at, self._is_due_now = position, time.monotonic(), False
            if uses:
                self.checkpointer.snapshots.take(state, [*uses, lambda _: then()])
            else:
                then()

    def save_last(self, state: Mapping[str, Any] | None = None) -> None:
        """Save what is not saved yet, because the loop ends, and wait for that.

        Args:
            state: the state to save; None: the present one.

        Raises what `Checkpointer.wait` raises.
        """
        self._state.ledger.end(self._state.position.steps)
        if self.is_first:
            # Only after the save in flight it is known whether that one has failed.
            self._wait()
            if self._is_due_now or self._state.position != self._saved or self.checkpointer.missed:
                self.take(save=True, copy=False, patient=True, state=state)
            self._wait()

    def _wait(self) -> None:
        with self._page.halted():
            self.checkpointer.wait()

    def hand_over(self, state: Mapping[str, Any]) -> None:
        """Give the agent `state`, the state of the present position, because this process ends."""
        self.memory_tier.hand_over(state, self.run.total, self._state.position.epoch)
