"""Virtual workers: they prepare, meet, step together, commit, fail and end, as the training library makes real ones.

A step is one batch of one endless epoch, and a state is the tuple of batches that it was trained on: whoever reads the
head's history can see whether a batch is missing or was counted twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from elasticrt.agent.group import GroupEnded, WorkerEnded, WorkerSaid, WorkerStarted
from elasticrt.agent.report import failure_of
from elasticrt.contract.env import Commit, WorkerEnv
from elasticrt.contract.messages import Claim, Published, Reply, Save, Step

if TYPE_CHECKING:
    from tests.virtual.process import Process
    from tests.virtual.simulator import Simulator

POLL_S = 0.25
KILL_S = 0.03
BUILD_S = 1.0


class Group:
    """One node's workers in one generation."""

    def __init__(self, owner: VirtualGroup, envs: Sequence[WorkerEnv]) -> None:
        self.owner = owner
        self.process = owner.process
        self.envs = tuple(envs)
        self.generation = envs[0].generation
        self.nonce = envs[0].nonce
        self.alive = True
        self.stopping = False
        self.ended_well = 0
        self.resume = envs[0].resume
        self.head = self.resume.nonce if self.resume else ""
        self.parent = self.head
        self.saving: Commit | None = None
        self.requests = 0

    @property
    def sim(self) -> Simulator:
        """Where it runs."""
        return self.process.sim

    def emit(self, event: Any) -> None:
        """Tell the agent, if it is still there."""
        if not self.process.gone:
            self.owner.put(event)

    def ask(self, message: Callable[[int], Any]) -> None:
        """Local rank 0 asks the agent for something."""
        self.requests += 1
        env = self.envs[0]
        self.emit(WorkerSaid(self.generation, env.rank, 0, message(self.requests)))

    def fail(self, summary: str, *, collateral: bool, local_rank: int = 0) -> None:
        """One worker ends badly; its agent kills the rest."""
        if not self.alive or self.stopping:
            return
        if self.process.paused and self.process.whole_node:
            self.sim.engine.after(POLL_S, lambda: self.fail(summary, collateral=collateral))
            return
        env = self.envs[local_rank % len(self.envs)]
        failure = failure_of(
            rank=env.rank, local_rank=env.local_rank, node=env.node, generation=self.generation, code=1,
            last_lines=("Connection closed by peer",) if collateral else ("ValueError: " + summary,),
        )  # fmt: skip
        if failure.collateral != collateral:
            from dataclasses import replace

            failure = replace(failure, collateral=collateral)
        self.sim.say(self.process, f"  worker {env.rank} fails{' (collateral)' if collateral else ''}")
        self.emit(WorkerEnded(self.generation, env.rank, env.local_rank, 1, 1, 0, failure))
        self.sim.training(self).broken(self)

    def end(self, why: str) -> None:
        """No process of it is left."""
        if self.alive:
            self.alive = False
            self.emit(GroupEnded(self.generation, 0))
            self.sim.training(self).broken(self)

    def exit_well(self) -> None:
        """All its workers reach the end of the script."""
        if not self.alive or self.stopping:
            return
        for env in self.envs:
            self.ended_well += 1
            self.emit(WorkerEnded(self.generation, env.rank, env.local_rank, 1, 0, 0, None))
        self.sim.invariants.exited(self)
        self.alive = False
        self.emit(GroupEnded(self.generation, 0))

    # Preparing data, then meeting the others.

    def prepare(self) -> None:
        """Ask for the data until somebody has built them."""
        if self.alive and not self.stopping:
            self.ask(lambda number: Claim(number, "data", "1"))

    def answered(self, reply: Reply) -> None:
        """What the agent says."""
        if not self.alive:
            return
        if self.saving is not None:
            commit, self.saving = self.saving, None
            if reply.ok:
                self.head = self.parent = commit.nonce
            return
        training = self.sim.training(self)
        if self in training.ready:
            return
        if reply.ok and reply.request in self.building:
            self.sim.engine.after(0.0, training.arrive, self)  # Published.
        elif reply.ok:
            self.sim.engine.after(BUILD_S * self.sim.net.uniform(0.2, 2.0), self._publish)
        elif reply.reason == "done":
            self.sim.engine.after(0.0, training.arrive, self)
        else:
            self.sim.engine.after(0.3, self.prepare)

    building: tuple[int, ...] = ()

    def _publish(self) -> None:
        if self.alive and not self.stopping:
            if self.process.paused and self.process.whole_node:
                self.sim.engine.after(POLL_S, self._publish)
                return
            self.building = (*self.building, self.requests + 1)
            self.ask(lambda number: Published(number, "data", "1", "d" * 64))

    def save(self, step: int, trained: tuple[int, ...]) -> None:
        """Rank 0 asks for a commit, one at a time."""
        if self.saving is not None:
            return
        nonce = hashlib.sha256(f"{self.nonce}/{step}/{self.process.life}".encode()).hexdigest()[:16]
        self.saving = Commit(
            step=step, epoch=0, generation=self.generation, nonce=nonce, parent=self.parent, directory="/ckpt",
            file=f"step-{step}", digest="d" * 64, size=1,
        )  # fmt: skip
        self.sim.disk[nonce] = trained
        commit, replaces = self.saving, self.head
        self.ask(lambda number: Save(number, asdict(commit), replaces))


class VirtualGroup:
    """What the agent's node thinks of as its `WorkerGroup`."""

    def __init__(self, process: Process, put: Callable[[Any], None]) -> None:
        self.process = process
        self.put = put
        self.groups: dict[int, Group] = {}

    def start(  # noqa: PLR0917  As `WorkerGroup` has them.
        self, generation: int, envs: Sequence[WorkerEnv], command: object, listen: object, base: Mapping[str, str],
        directory: object, *_: object,
    ) -> None:  # fmt: skip
        """See `WorkerGroup`."""
        group = self.groups[generation] = Group(self, envs)
        sim = self.process.sim
        sim.invariants.started(group)
        for env in envs:
            sim.engine.after(0.01, group.emit, WorkerStarted(generation, env.rank, env.local_rank, 1, 0))
        start_s = sim.net.uniform(0.05, 0.4)
        if sim.plan.prepares:
            sim.engine.after(start_s, group.prepare)
        else:
            sim.engine.after(start_s, sim.training(group).arrive, group)

    def kill(self, generation: int | None = None) -> None:
        """See `WorkerGroup`."""
        self._stop(generation, KILL_S)

    def terminate(self, grace_s: float, generation: int | None = None) -> float:
        """See `WorkerGroup`."""
        self._stop(generation, self.process.sim.net.uniform(0.05, grace_s))
        return self.process.clock() + grace_s

    def _stop(self, generation: int | None, after_s: float) -> None:
        group = self.groups.get(generation or max(self.groups, default=0))
        if group is not None and group.alive:
            group.stopping = True
            self.process.sim.engine.after(after_s, group.end, "killed")

    def release(self, generation: int | None = None) -> None:
        """See `WorkerGroup`: nobody lingers here."""

    def reply(self, local_rank: int, message: Reply, generation: int | None = None) -> None:
        """See `WorkerGroup`."""
        group = self.groups.get(generation or 0)
        if group is not None:
            self.process.sim.engine.after(0.0, group.answered, message)

    def page(self, local_rank: int, generation: int | None = None) -> Any:
        """See `WorkerGroup`."""
        raise KeyError("virtual workers have no page")

    def pids(self, generation: int | None = None) -> dict[int, int]:
        """See `WorkerGroup`."""
        group = self.groups.get(generation or 0)
        return {0: 1} if group is not None and group.alive else {}

    def vanish(self, why: str) -> None:
        """The agent has died: so do its workers."""
        for group in self.groups.values():
            group.end(why)

    @property
    def living(self) -> list[Group]:
        """Groups that have processes."""
        return [group for group in self.groups.values() if group.alive]


class Training:
    """All workers of one generation (by its nonce): they step together or not at all."""

    def __init__(self, sim: Simulator, first: Group) -> None:
        self.sim = sim
        self.generation, self.nonce = first.generation, first.nonce
        self.world_size = first.envs[0].world_size
        self.ready: list[Group] = []
        self.formed = self.over = self.finishing = False
        resume = first.resume
        self.step = resume.step if resume else 0
        self.trained: tuple[int, ...] = sim.disk[resume.nonce] if resume else ()
        self.first = True

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
            if other is not group:
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
        self.sim.invariants.formed(self)
        self._tick()

    def _tick(self) -> None:
        if self.over or all(not group.alive for group in self.ready):
            return
        if not self._can_step():
            self.sim.engine.after(POLL_S, self._tick)
            return
        root = next(group for group in self.ready if group.envs[0].rank == 0)
        if self.finishing:
            if root.saving is None:
                self.over = True
                for group in self.ready:
                    self.sim.engine.after(self.sim.net.uniform(0.0, 0.4), group.exit_well)
                return
            self.sim.engine.after(POLL_S, self._tick)
            return
        self.step += 1
        self.trained = (*self.trained, self.step)
        self.sim.invariants.stepped(self)
        if self.first:
            for group in self.ready:
                env = group.envs[0]
                at_ns = int(group.process.clock() * 1e9)
                said = Step(self.step, 0, at_ns, self.step - 1, True)
                group.emit(WorkerSaid(self.generation, env.rank, 0, said))
            self.first = False
        if self.sim.last_step is not None and self.step >= self.sim.last_step:
            self.finishing = True
        if self.finishing or self.step % self.sim.plan.commit_every == 0:
            root.save(self.step, self.trained)
        self.sim.engine.after(self.sim.plan.step_s, self._tick)
