"""All workers of one generation: they meet, step together, hand over together, and fail together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticrt.ipc.messages import Step
from elasticrt.workers.worker_io import WorkerMessage
from tests.virtual import disks
from tests.virtual.copies import Trained
from tests.virtual.engine import nanoseconds
from tests.virtual.workers import POLL_S, Group

if TYPE_CHECKING:
    from tests.virtual.simulator import Simulator


class Training:
    """All workers of one generation (by its nonce): they step together or not at all."""

    def __init__(self, sim: Simulator, first: Group) -> None:
        self.sim = sim
        self.generation, self.nonce = first.generation, first.nonce
        self.world_size = first.envs[0].world_size
        self.ready: list[Group] = []
        self.formed = self.over = self.finishing = False
        resume, copy = first.resume, first.copy
        self.step = first.start
        self.trained: Trained = sim.disk[resume.nonce] if resume else ()
        if copy is not None:
            self.trained = sim.copies[copy.digest].trained
        self.first = True
        self.saved_for = -1

    def arrive(self, group: Group) -> None:
        """A node's workers call init."""
        if self.over:
            group.fail("peers are gone", collateral=True)
            return
        if group.alive and group not in self.ready:
            self.ready.append(group)
            if sum(len(one.envs) for one in self.ready) == self.world_size:
                self.sim.engine.after(0.05, self._form)

    def broken(self, group: Group) -> None:
        """Some of its workers are gone: the others fail in their collective, or hang when there was no goodbye."""
        hung = group.process.silent_death or (not self.formed and group.envs[0].rank != 0)
        if self.over or hung or group not in self.ready:
            return
        self.over = True
        for other in self.ready:
            if other is not group and self.sim.net.random() >= self.sim.plan.hangs:
                delay = self.sim.net.uniform(0.0, 0.3) if self.sim.linked(group.process, other.process) else 5.0
                self.sim.engine.after(delay, lambda other=other: other.fail("peer", collateral=True))

    def _can_step(self) -> bool:
        if any(not group.alive or group.stopping for group in self.ready):
            return False
        if any(group.process.paused and group.process.whole_node for group in self.ready):
            return False
        first = self.ready[0].process
        return all(self.sim.linked(first, group.process) for group in self.ready)

    def _form(self) -> None:
        if self.over or all(not group.alive for group in self.ready):
            return
        if not self._can_step():
            self.sim.engine.after(POLL_S, self._form)
            return
        self.formed = True
        self.sim.invariants.work.formed(self)
        root = next(group for group in self.ready if group.envs[0].rank == 0)
        if root.resume is None or root.copy is not None:
            self._begin()
            return
        found = disks.found(self.sim, root.resume, {group.process.name for group in self.ready})
        if found is None:
            for group in self.ready:
                delay = self.sim.net.uniform(0.0, 0.3)
                self.sim.engine.after(delay, lambda group=group: group.fail(disks.NOBODY_HAS_IT, **disks.LOST))
        elif found == root.resume:
            self._begin()
        else:
            self.step, self.trained = found.step, self.sim.disk[found.nonce]
            root.go_back(found)
            self._goes_back(root)

    def _goes_back(self, root: Group) -> None:
        """Wait until the ancestor is the head, which must be so before anybody trains."""
        if self.over or not root.alive:
            return
        if root.saving is not None:
            self.sim.engine.after(POLL_S, self._goes_back, root)
        elif self.sim.disk[root.head] == self.trained:
            self._begin()
        else:
            root.fail("going back could not be recorded", collateral=False)

    def _begin(self) -> None:
        for group in self.ready:
            group.copier.begin()
        self._tick()

    def _tick(self) -> None:
        if self.over or all(not group.alive for group in self.ready):
            return
        if any(group.left for group in self.ready):
            self._leave_late()
            return
        if not self._can_step():
            self.sim.engine.after(POLL_S, self._tick)
            return
        root = next(group for group in self.ready if group.envs[0].rank == 0)
        if self.sim.plan.loops and not self.finishing and not self._may_go_on():
            self.sim.engine.after(0.05, self._tick)
            return
        if self.finishing:
            if root.saving is None:
                self.over = True
                for group in self.ready:
                    self.sim.engine.after(self.sim.net.uniform(0.0, 0.4), group.exit_well)
                return
            self.sim.engine.after(POLL_S, self._tick)
            return
        self.step += 1
        self.trained = (*self.trained, (self.step, self.nonce))
        self.sim.invariants.work.stepped(self)
        if self.sim.plan.loops:
            self._mark_steps()
        if self.sim.last_step is not None and self.step >= self.sim.last_step:
            self.finishing = True
        due = self.step % self.sim.plan.commit_every == 0 or disks.lacks(self.sim, root.process.name, root.head)
        if self.finishing or due:
            root.save(self.step, self.trained)
        for group in self.ready:
            group.copier.look(self.step, self.trained)
        self.sim.engine.after(self.sim.plan.step_s, self._tick)

    def _mark_steps(self) -> None:
        """What a Loop writes and says after each step."""
        for group in self.ready:
            at_ns = nanoseconds(group.process.clock())
            for page in group.pages:
                page.finished(self.step, at_ns)
            if self.first:
                said = Step(self.step, 0, at_ns, self.step - 1, True)
                group.emit(WorkerMessage(self.generation, group.envs[0].rank, 0, said, group.answer))
        self.first = False

    def _may_go_on(self) -> bool:
        """The end of a step, in a Loop: who was told to leave leaves, and nobody goes on alone."""
        for group in self.ready:
            group.let_in(self.step + 1)
            if not group.left and self._is_to_leave(group):
                group.hand_over(self.step, self.trained)
        self.over = all(group.left for group in self.ready)
        together = not any(group.left for group in self.ready)
        return together and all(page.entered > self.step for group in self.ready for page in group.pages)

    def _leave_late(self) -> None:
        """Some have left: who is told later, or has to save first, leaves by itself."""
        for group in self.ready:
            asleep = group.process.paused and group.process.whole_node
            if group.alive and not group.stopping and not group.left and not asleep and self._is_to_leave(group):
                group.hand_over(self.step, self.trained)
        self.over = all(group.left or not group.alive for group in self.ready)
        self.sim.engine.after(0.05, self._tick)

    def _is_to_leave(self, group: Group) -> bool:
        """Whether a node's workers were told to leave by now, and rank 0 among them has saved what it was told to."""
        saves = group.envs[0].rank == 0 and group.pages[0].save
        return group.has_to_leave(self.step) and (not saves or self._saved(group))

    def _saved(self, root: Group) -> bool:
        """Whether rank 0 has committed the step that all leave after, or has been told that it cannot."""
        if self.saved_for != self.step and root.saving is None:
            self.saved_for = self.step
            root.save(self.step, self.trained)
        return self.saved_for == self.step and root.saving is None
