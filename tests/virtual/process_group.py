"""The process group of one generation of workers that can go on in place: they meet, share the state, and step.

All of a step is one collective: it ends when every rank has come to it, and each rank finishes the step a moment later.
A rank that dies in that moment leaves others that are ahead of the rest by this step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticrt.checkpoint.state_transfer import chain
from tests.virtual import disks
from tests.virtual.copies import Trained
from tests.virtual.engine import nanoseconds, require
from tests.virtual.living import Worker
from tests.virtual.workers import POLL_S

if TYPE_CHECKING:
    from tests.virtual.simulator import Simulator


class ProcessGroup:
    """All ranks of one generation (by its nonce)."""

    def __init__(self, sim: Simulator, first: Worker) -> None:
        self.sim = sim
        self.generation, self.nonce = first.own.generation, first.own.nonce
        self.world_size = first.own.world_size
        self.in_place = first.seated
        self.members: dict[int, Worker] = {}
        self.formed = self.over = False
        self.state: Trained | None = None
        self._silent = False
        self._meeting: set[int] = set()  # Ranks that have come, and are not brought up to the others' state yet.
        self._in_collective: set[int] = set()  # Ranks that wait for the others in a step.
        self._finishing: dict[int, Worker] = {}

    @property
    def step(self) -> int:
        """How far its furthest rank is."""
        return max((worker.step for worker in self.members.values()), default=0)

    # Meeting.

    def arrive(self, worker: Worker) -> None:
        """A worker comes."""
        rank = worker.own.rank
        text = f"rank {rank} of {worker.process.name} comes to generation {self.generation}"
        require(
            worker.own.nonce == self.nonce and worker.seated == self.in_place, "S20", f"{text}, which is not its own"
        )
        require(self.members.get(rank, worker) is worker, "S20", f"{text}, where another process is")
        self.sim.invariants.work.arrived(worker)
        self.members[rank] = worker
        self._meeting.add(rank)
        if self.over:
            self._notice(worker)
        elif len(self.members) == self.world_size:
            self.sim.engine.after(0.01, self._form)

    def _can_talk(self) -> bool:
        workers = list(self.members.values())
        if any(not worker.alive or worker.stopping or worker.asleep for worker in workers):
            return False
        return all(self.sim.linked(workers[0].process, worker.process) for worker in workers)

    def _form(self) -> None:
        if self.over:
            return
        if not self._can_talk():
            self.sim.engine.after(POLL_S, self._form)
            return
        self.formed = True
        workers = [self.members[rank] for rank in sorted(self.members)]
        for worker in workers:
            worker.page.joined_at_ns = nanoseconds(worker.process.clock())
        if self.in_place:
            for worker in workers:
                worker.page.in_place = 1
            self._share(workers)
        else:
            self.sim.invariants.work.formed_anew(self)
            self._restore(workers)

    def _restore(self, workers: list[Worker]) -> None:
        """All start anew, from what one of them has on its disk, or rank 0 in memory."""
        root = workers[0]
        if root.env.resume is None or root.env.copy is not None:
            self._begin(workers)
            return
        found = disks.found(self.sim, root.env.resume, {worker.process.name for worker in workers})
        if found is None:
            for worker in workers:
                delay = self.sim.living.uniform(0.0, 0.3)
                worker.later(delay, lambda one=worker: one.fail(disks.NOBODY_HAS_IT, **disks.LOST))
        elif found == root.env.resume:
            self._begin(workers)
        else:
            for worker in workers:
                worker.trained = self.sim.disk[found.nonce]
            root.go_back(found)
            self._goes_back(workers)

    def _goes_back(self, workers: list[Worker]) -> None:
        """Wait until the ancestor is the head, which must be so before anybody trains."""
        root = workers[0]
        if self.over or not root.alive:
            return
        if root.saving is not None:
            self.sim.engine.after(POLL_S, self._goes_back, workers)
        elif self.sim.disk[root.head] == root.trained:
            self._begin(workers)
        else:
            root.fail("going back could not be recorded", collateral=False)

    def _begin(self, workers: list[Worker]) -> None:
        for worker in workers:
            worker.later(0.0, self._settled, worker)

    # The state.

    def _share(self, workers: list[Worker]) -> None:
        steps = [worker.step if worker.whole else -1 for worker in workers]
        order = chain(steps, [""] * len(workers))
        if not order:
            for worker in workers:
                worker.later(0.01, lambda one=worker: one.fail("no rank has a state", collateral=False))
            return
        first, *behind = order
        self.sim.invariants.work.shares(self, workers, first)
        self.state = workers[first].trained
        self.sim.say(workers[0].process, f"  generation {self.generation} goes on after step {len(self.state)}")
        last_s = 0.0
        for rank in behind:
            workers[rank].whole, workers[rank].page.restored_at_ns = False, 0
            took_s = self.sim.living.uniform(0.01, self.sim.plan.share_s)
            last_s = max(last_s, took_s)
            self.sim.engine.after(took_s, self._received, workers[rank], first)
        for rank, worker in enumerate(workers):
            if rank not in behind:
                worker.later(last_s if rank == first else 0.0, self._settled, worker)

    def _received(self, worker: Worker, first: int) -> None:
        source = self.members[first]
        if self.over or not worker.alive or not source.alive:
            return
        if worker.asleep or source.asleep or not self.sim.linked(worker.process, source.process):
            self.sim.engine.after(POLL_S, self._received, worker, first)
            return
        worker.trained, worker.whole = source.trained, True
        self._settled(worker)

    def _settled(self, worker: Worker) -> None:
        if worker.group is not self or self.over:
            return
        self._meeting.discard(worker.own.rank)
        self.state = worker.trained if self.state is None else self.state
        text = f"rank {worker.own.rank} of generation {self.generation} begins after step {worker.step}"
        require(worker.whole and worker.trained == self.state, "S19", f"{text}, another after {len(self.state)}")
        worker.at_home()

    # Steps.

    def enter(self, worker: Worker) -> None:
        """A worker comes to the collective of its next step."""
        self._in_collective.add(worker.own.rank)
        if self.over:
            self._notice(worker)
            return
        others = {self.members[rank].step for rank in self._in_collective}
        require(
            others == {worker.step}, "S19", f"ranks of generation {self.generation} do steps after {others} at once"
        )
        if len(self._in_collective) == self.world_size:
            self.sim.engine.after(self.sim.plan.step_s, self._reduce)

    def _reduce(self) -> None:
        if self.over:
            return
        if not self._can_talk():
            self.sim.engine.after(POLL_S, self._reduce)
            return
        self._in_collective.clear()
        for rank, worker in self.members.items():
            self._finishing[rank] = worker
            behind = self.sim.ahead not in ("", worker.process.name)
            worker.later(0.25 if behind else self.sim.living.uniform(0.0, 0.03), self._finish, worker)

    def _finish(self, worker: Worker) -> None:
        if self._finishing.pop(worker.own.rank if worker.group is self else -1, None) is not None:
            worker.finish(self)
            self._tear()

    def _tear(self) -> None:
        torn = [worker for worker in self._finishing.values() if worker.process.name == self.sim.torn]
        if torn:
            self.sim.torn = ""
            self._in_collective |= self._finishing.keys()
            self._finishing.clear()
            torn[0].die(-9)

    # Losses.

    def lost(self, worker: Worker) -> None:
        """A rank is gone, or has shut its connections: nothing in this group will succeed any more."""
        rank = next((rank for rank, one in self.members.items() if one is worker), -1)
        self._finishing.pop(rank, None)
        if self.over:
            return
        self.over = True
        self._silent = worker.process.silent_death
        for other_rank in list(self._finishing):
            if self.sim.living.random() < 0.5 or self.sim.ahead == worker.process.name:
                # Its part of the collective was not done yet.
                del self._finishing[other_rank]
                self._in_collective.add(other_rank)
        for other_rank in sorted((self._meeting | self._in_collective) - {rank}):
            self._notice(self.members[other_rank])

    def cut(self, worker: Worker) -> None:
        """A rank has its next seat, and shuts its connections: it comes out of whatever it waits for here."""
        rank = next((rank for rank, one in self.members.items() if one is worker), -1)
        waits = rank in self._meeting | self._in_collective
        self.lost(worker) if rank not in self._finishing else None
        if waits:
            worker.later(self.sim.living.uniform(0.001, 0.01), worker.lose, self)

    def _notice(self, worker: Worker) -> None:
        """A rank fails in its collective, or hangs when there was no goodbye."""
        if self._silent or self.sim.living.random() < self.sim.plan.hangs:
            return
        worker.later(self.sim.living.uniform(0.0, 0.3), worker.lose, self)
