"""The world that a Loop's process is in, and its way from one generation into the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elasticrt.checkpoint import stateful
from elasticrt.checkpoint.state_transfer import Standing
from elasticrt.distributed import collectives, handover, regroup
from elasticrt.train.in_place import InPlace
from elasticrt.train.reporting import Reporter
from elasticrt.train.saving import Saving
from elasticrt.train.training_state import TrainingState
from elasticrt.train.undo import Undo

GRADIENTS = "gradients"
"""Beside the state that one rank gives another: what has been added up since the optimizer stepped."""


@dataclass(frozen=True)
class Change:
    """The world has changed, and this process lives on; or it has just begun.

    Attributes:
        generation: the new one, 0 without an agent.
        world_size: processes in it.
        world_size_before: the same of the world that this process was in, 0 for none.
        cause: why, in words such as `node-2 lost`; "" without an agent.
        pause_s: seconds since this process's last step; None where it has made none.
        steps_lost: steps that this process had finished, and that are done again.
    """

    generation: int
    world_size: int
    world_size_before: int
    cause: str = ""
    pause_s: float | None = None
    steps_lost: int = 0


class World:
    """One Loop's.

    Args:
        objects: as given to the Loop, by name.
        state: what ranks of a new generation agree on.
        saving: moves with this process.
        undo: the present step.
        reporter: told whether steps are to be expected.

    Attributes:
        in_place: how this process leaves a group and meets in the next.
        size: processes in all.
        resumed_size: the size of the world that began what is left of the epoch.
        moves: how often this process has got another place.
        on_change: called with each Change.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        state: TrainingState,
        saving: Saving,
        undo: Undo,
        reporter: Reporter,
    ) -> None:
        self._state = state
        self._saving = saving
        self._undo = undo
        self._reporter = reporter
        self._told = 0  # The world size of the Change before.
        self.in_place = InPlace(objects.values(), self._give_up, lambda: undo.in_step and not undo.touched)
        self.size = self.resumed_size = 1
        self.moves = 0
        self.on_change: list[Callable[[Change], None]] = []

    def enter(self, *, fresh: bool) -> None:
        """The Loop begins: with all ranks, or beside the training of others, until they let this process in.

        Args:
            fresh: start over, whatever there is.
        """
        if self.in_place.beside:
            self._state.whole = False
            self.in_place.rehearse(self._state.objects)
            self.in_place.announce_ready()
            self.go_on()
            return
        self._state.numbers.compare()
        found = self._saving.checkpointer.begin(fresh=fresh)
        _, self.size = collectives.rank_and_world()
        self.resumed_size = self.size
        if found is not None:
            self._state.restore(found.data)
            self.resumed_size = found.world_size
        self._has_state(self._saving.checkpointer.start)
        self._tell_change()

    def go_on(self) -> None:
        """Take the seat in the next generation, and be as far as all the others there."""
        self._reporter.expect_steps(expected=False)
        stepped_at, steps = self.in_place.stepped_at(), self._state.position.steps
        arrived = False
        while not arrived:
            if not self.in_place.wait_for_seat():
                raise handover.departure(self._state.position.steps)
            if not self.in_place.meet(self._state.position.steps):
                continue
            try:
                self._arrive(stepped_at, steps)
                arrived = True
            except regroup.Overtaken:
                continue
            except RuntimeError as error:
                if not self.in_place.lost(error, self._state.position.steps):
                    raise

    def undo_step(self) -> None:
        """Go back to where the open step began, as far as that is known."""
        if not self._undo.put_back():
            self._overwritten()

    def _arrive(self, stepped_at: float | None, steps: int) -> None:
        """All of a new generation are here: agree on the state, and let the script know.

        `stepped_at`: when this process made its last step, number `steps`, if it has made any.
        """
        state, worker = self._state, self.in_place.worker
        assert worker is not None, "seats come from an agent"
        rank, self.size = collectives.rank_and_world()
        state.numbers.moved(rank)
        standing = Standing(state.position.steps if state.whole else -1, state.whole)
        taken = self.in_place.share(standing, self._to_others, self._overwritten)
        history = state.ledger.history(state.position.steps)
        state.ledger.close()
        if taken is None:
            state.ledger.restored(history)
        else:
            self._undo.set_gradients(taken.pop(GRADIENTS))
            state.take_over(taken)
            self._saving.run.total = taken[stateful.OURS]["total"]
        state.whole = True
        self._undo.touched = self._undo.stepped = False
        self.moves += 1
        self.resumed_size = self.size
        self._saving.move(worker)
        self._has_state(worker.nonce)
        state.ledger.renew()
        if stepped_at is None:
            self._tell_change()
        else:
            pause_s = time.monotonic() - stepped_at
            self._tell_change(pause_s=pause_s, steps_lost=max(0, steps - state.position.steps))

    def _has_state(self, start: str) -> None:
        """The state is that of the generation that begins. `start`: the name of this start in the ledger."""
        self._state.numbers.begin_step(self._state.position)
        self._state.ledger.open(start, self._state.position)
        self._saving.has_state()
        self._reporter.begin(self._saving.run.total)

    def _to_others(self) -> dict[str, Any]:
        """The state as other ranks take it over."""
        state = self._state.collect(alike=self._state.numbers.alike, total=self._saving.run.total)
        return {**state, GRADIENTS: self._undo.gradients()}

    def _overwritten(self) -> None:
        """The state is that of no step: only another rank's can help, and the agent must not count on this one."""
        self._state.whole = False
        self._reporter.lost_state()

    def _give_up(self) -> None:
        """This process can't go on: leave its newest finished step to the agent. The main thread hangs meanwhile."""
        if self._undo.in_step:
            self.undo_step()
        if self._state.whole:
            self._saving.hand_over()

    def leave_state(self, error: Exception) -> None:
        """`error` ends this process outside of a step: where it says that a peer is gone, the agent gets the state."""
        if self._state.whole and not self._undo.in_step and self.in_place.is_of_peer(error):
            self._saving.hand_over()

    def _tell_change(self, **cost: Any) -> None:
        worker = self.in_place.worker
        generation, cause = (0, "") if worker is None else (worker.generation, worker.cause)
        change = Change(generation, self.size, self._told, cause, **cost)
        for call in self.on_change:
            call(change)
        self._told = self.size
