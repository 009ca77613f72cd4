"""Copies of the training state in the nodes' memory: as virtual workers take them, and whether one may be resumed from.

As in `elasticrt.checkpoint.memory_tier`: between two steps a node's local rank 0 copies its state, and hands it to its
agent a little later, or at once where it leaves. Each node does so at its own pace, and what is not handed over when
its workers die is lost.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticrt.ipc.messages import Copied
from elasticrt.rendezvous.records import Generation, Seat
from elasticrt.workers.worker_io import WorkerMessage
from tests.virtual.engine import require
from tests.virtual.work import step_of

if TYPE_CHECKING:
    from tests.virtual.invariants import Invariants
    from tests.virtual.living import Worker
    from tests.virtual.workers import Group

FIRST_S = 1.0
WRITTEN_S = (0.01, 0.3)

Trained = tuple[tuple[int, str], ...]
"""What a state was trained on: its batches, each with the generation (its nonce) that trained it."""


@dataclass(frozen=True)
class State:
    """A copy of a state, in which generation it was taken, and in which life of which node it is kept."""

    trained: Trained
    taken_in: str
    node: str
    incarnation: str


class Copier:
    """One node's local rank 0 in one generation."""

    def __init__(self, group: Group | Worker) -> None:
        self._group = group
        self._sim = group.sim
        self._due_at = math.inf
        self._written: tuple[int, Trained] | None = None

    @property
    def idle(self) -> bool:
        """Whether it has not begun."""
        return self._due_at == math.inf and self._written is None

    def begin(self) -> None:
        """The loop is entered."""
        if self._sim.plan.copy_every_s and self._sim.plan.loops:
            self._due_at = self._sim.engine.now + FIRST_S

    def look(self, step: int, trained: Trained) -> None:
        """The end of a step: take a copy if it is time for one."""
        if self._sim.engine.now >= self._due_at:
            self._due_at = math.inf  # Until this one is written.
            self._written = (step, trained)
            self._sim.engine.after(self._sim.copying.uniform(*WRITTEN_S), self.finish)

    def finish(self) -> None:
        """Hand over what has been taken, if anything has."""
        group = self._group
        if self._written is None or not group.alive:
            return
        if group.process.paused and group.process.whole_node:
            self._sim.engine.after(WRITTEN_S[1], self.finish)
            return
        (step, trained), self._written = self._written, None
        copied = Copied(step, 0, 1, self.keep(step, trained))
        group.emit(WorkerMessage(group.generation, group.envs[0].rank, 0, copied, group.answer, self._sim.port()))
        self._sim.fired["copy"] += 1
        self._due_at = self._sim.engine.now + self._sim.plan.copy_every_s * self._sim.copying.uniform(0.7, 1.3)

    def keep(self, step: int, trained: Trained) -> str:
        """Note what a copy consists of; its digest."""
        group = self._group
        text = f"{group.nonce}/{step}/{group.process.name}/{group.process.life}"
        digest = hashlib.sha256(text.encode()).hexdigest()
        self._sim.copies[digest] = State(trained, group.nonce, group.process.name, group.incarnation)
        return digest


def check(history: Invariants, new: Generation, first: Seat) -> None:
    """S5, S6: what a generation resumes from in memory.

    It is newer than the head and descends from it; the generation that is replaced, or one that it has gone on from in
    place, has taken it, or has resumed from the very same state; and it is kept by the node with rank 0, in the life
    that has taken it.
    """
    if new.memory is None:
        return
    text = f"generation {new.number} resumes from a copy of step {new.memory.step}"
    require(history.generations, "S6", f"{text}, and there was none before")
    before, head = history.generations[-1], history.heads[-1] if history.heads else None
    copies = history.sim.copies
    copy = copies[new.memory.digest]
    place = (first.node, first.incarnation)
    require(place == (copy.node, copy.incarnation), "S6", f"{text}, which another life than rank 0's has taken")
    steps = tuple(step for step, _ in copy.trained)
    require(steps == tuple(range(1, new.memory.step + 1)), "S5", f"{text}, which was trained on {steps}")
    generations = history.one_history()
    begun = generations[-1].memory
    resumed = begun is not None and copy.trained == copies[begun.digest].trained
    known = resumed or copy.taken_in in {generation.nonce for generation in generations}
    require(new.memory.step > step_of(head), "S6", f"{text}, and the head is of step {step_of(head)}")
    require(known, "S6", f"{text}, which generation {before.number} has neither taken nor resumed from")
    base = history.sim.disk[head.nonce] if head is not None else ()
    begins, last = copy.trained[: len(base)][:-1] == base[:-1], copy.trained[: len(base)][-1:]
    descends = begins and (last == base[-1:] or set(last) <= history.work.redone)
    require(descends, "S6", f"{text}, which does not descend from the head")
