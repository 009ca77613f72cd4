"""Virtual workers: a node's group in one generation, and what its agent's node sees of it.

A step is one batch of one endless epoch, and a state is the tuple of batches that it was trained on: whoever reads the
head's history can see whether a batch is missing or was counted twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from elasticrt.ipc.env import Commit, WorkerEnv
from elasticrt.ipc.messages import BuildDone, ClaimBuild, Copied, CopyDamaged, LeftGeneration, Reply, Save
from elasticrt.ipc.status_page import StatusPage
from elasticrt.workers.failures import Remains, failure_of
from elasticrt.workers.worker_io import GroupEnded, WorkerEnded, WorkerMessage, WorkerStarted
from tests.virtual.copies import Copier, Trained
from tests.virtual.engine import require

if TYPE_CHECKING:
    from tests.virtual.living import Worker
    from tests.virtual.process import Process
    from tests.virtual.simulator import Simulator

POLL_S = 0.25

ASK_AGAIN_S = 1.0
"""As a worker asks its agent again about a commit, see `elasticrt.checkpoint.commits`."""


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
        self.attempt = envs[0].attempt
        self.incarnation = owner.process.agent.member.me.record.incarnation
        self.resume = envs[0].resume
        self.copy = envs[0].copy
        self.start = self.copy.step if self.copy else self.resume.step if self.resume else 0
        self.pages = [StatusPage(-1) for _ in envs]
        self.ahead = owner.process.sim.net.choice((0, 0, 0, 1, 2))  # How many steps its host runs ahead of its device.
        self.left = False
        self.head = self.resume.nonce if self.resume else ""
        self.parent = self.head
        self.saving: Commit | None = None
        self.requests = 0
        self.copier = Copier(self)

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
        self.emit(WorkerMessage(self.generation, env.rank, 0, message(self.requests), self.answer))

    def fail(
        self,
        summary: str,
        *,
        collateral: bool,
        local_rank: int = 0,
        final_code: int = 0,
        early: str = "",
    ) -> None:
        """One worker ends badly; its agent kills the rest."""
        if not self.alive or self.stopping or self.left:
            return
        if self.process.paused and self.process.whole_node:
            again = partial(self.fail, summary, collateral=collateral, final_code=final_code, early=early)
            self.sim.engine.after(POLL_S, again)
            return
        env = self.envs[local_rank % len(self.envs)]
        said = "Connection closed by peer" if collateral else "ValueError: " + summary
        failure = failure_of(replace(env, generation=self.generation), Remains(1, last_lines=(said,)))
        failure = replace(failure, collateral=collateral, final_code=final_code, early=early)
        self.sim.say(self.process, f"  worker {env.rank} fails{' (collateral)' if collateral else ''}")
        self.emit(WorkerEnded(self.generation, env.rank, env.local_rank, 1, 1, failure))
        self.sim.training(self).broken(self)

    def end(self, why: str) -> None:
        """No process of it is left."""
        if self.alive:
            self.alive = False
            self.emit(GroupEnded(self.generation))
            if not self.left:
                self.sim.training(self).broken(self)

    def exit_well(self) -> None:
        """All its workers reach the end of the script."""
        if not self.alive or self.stopping:
            return
        for env in self.envs:
            self.ended_well += 1
            self.emit(WorkerEnded(self.generation, env.rank, env.local_rank, 1, 0, None))
        self.sim.invariants.work.exited(self)
        self.alive = False
        self.emit(GroupEnded(self.generation))

    # Handing over.

    def let_in(self, step: int) -> None:
        """Where its hosts are when `step` is to be done: those that hold stay, those that were told go on."""
        for page in self.pages:
            if not page.stop:
                page.entered = step + self.ahead
            elif page.go:
                page.entered = max(page.entered, page.go)

    def has_to_leave(self, step: int) -> bool:
        """Whether all its workers were told to leave after `step`, or one before."""
        return all(page.stop and page.go and step >= page.go for page in self.pages)

    def hand_over(self, step: int, trained: Trained) -> None:
        """Leave the loop: local rank 0 gives its agent a copy of its state, and the processes end soon."""
        ahead = max(page.entered for page in self.pages)
        text = f"workers of {self.process.name} have been let into step {ahead}, and all leave after step {step}"
        require(ahead <= step, "S5", text)
        self.left = True
        self.copier.finish()
        copied = Copied(step, 0, 1, self.copier.keep(step, trained))
        self.sim.say(self.process, f"  workers hand over after step {step}")
        self.emit(WorkerMessage(self.generation, self.envs[0].rank, 0, copied, self.answer, self.sim.port()))
        for env in self.envs:
            left = LeftGeneration(self.generation, step)
            self.emit(WorkerMessage(self.generation, env.rank, env.local_rank, left, self.answer))
        self.sim.engine.after(self.sim.net.uniform(0.01, 0.5), self.end, "handed over")

    # Preparing data, then meeting the others.

    def prepare(self) -> None:
        """Ask for the data until somebody has built them."""
        if self.alive and not self.stopping:
            self.ask(lambda number: ClaimBuild(number, "data", "1"))

    def answer(self, reply: Reply) -> None:
        """Tell local rank 0 something."""
        self.sim.engine.after(0.0, self.answered, reply)

    def answered(self, reply: Reply) -> None:
        """What the agent says."""
        if not self.alive:
            return
        if self.saving is not None and reply.refusal == "unsure":
            self.sim.engine.after(ASK_AGAIN_S, self._commit_again, self.saving)
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
            self.sim.engine.after(0.0, training.arrive, self)  # Built.
        elif reply.ok:
            self.sim.engine.after(self.sim.plan.build_s * self.sim.net.uniform(0.1, 1.0), self._publish)
        elif reply.refusal == "done":
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
            self.ask(lambda number: BuildDone(number, "data", "1"))

    def save(self, step: int, trained: Trained) -> None:
        """Rank 0 asks for a commit, one at a time."""
        if self.saving is not None:
            return
        nonce = hashlib.sha256(f"{self.nonce}/{step}/{self.process.life}".encode()).hexdigest()[:16]
        self.saving = Commit(
            step=step, epoch=0, generation=self.generation, nonce=nonce, parent=self.parent, directory="/ckpt",
            file=f"step-{step}", digest="d" * 64, size=1, node=self.process.name,
        )  # fmt: skip
        self.sim.disk[nonce], self.sim.written[nonce] = trained, self.saving
        self._commit(self.saving)

    def go_back(self, to: Commit) -> None:
        """Rank 0 asks that an ancestor of the head be the head."""
        self.saving = replace(to, generation=self.generation)
        self._commit(self.saving)

    def _commit_again(self, commit: Commit) -> None:
        if self.alive:
            self._commit(commit)

    def _commit(self, commit: Commit) -> None:
        replaces = self.head
        self.ask(lambda number: Save(number, asdict(commit), replaces))


class VirtualGroup:
    """What the agent's node thinks of as its `WorkerGroup`."""

    def __init__(self, process: Process, put: Callable[[Any], None]) -> None:
        self.process = process
        self.put = put
        self.groups: dict[int, Group] = {}
        self.workers: list[Worker] = []  # Those that can go on in place.
        self.dead: list[Worker] = []
        self._newest = 0

    def start(  # noqa: PLR0917  As `WorkerGroup` has them.
        self, generation: int, envs: Sequence[WorkerEnv], command: object, listen: object, base: Mapping[str, str],
        directory: object, state_fd: int,
    ) -> None:  # fmt: skip
        """See `WorkerGroup`."""
        if self.process.sim.plan.in_place:
            self._start(generation, envs, state_fd)
            return
        group = self.groups[generation] = Group(self, envs)
        sim = self.process.sim
        sim.invariants.work.started(group)
        problem = self._lacks_copy(group, state_fd)
        if problem:
            sim.engine.after(0.1, lambda: group.fail(problem, collateral=False))
            return
        for env in envs:
            sim.engine.after(0.01, group.emit, WorkerStarted(generation, env.rank, env.local_rank, 1, 0))
        start_s = sim.net.uniform(0.05, 0.4)
        if sim.plan.prepares:
            sim.engine.after(start_s, group.prepare)
        else:
            sim.engine.after(start_s, sim.training(group).arrive, group)

    def _start(self, generation: int, envs: Sequence[WorkerEnv], state_fd: int) -> None:
        sim = self.process.sim
        started = [sim.worker(self, env) for env in envs]
        self.dead += [each for each in self.workers if each.told]
        self.workers = [each for each in self.workers if not each.told] + started
        self._newest = generation or self._newest
        if generation:
            sim.invariants.work.started(started[0])
            sim.invariants.work.has_ranks(started)
        problem = self._lacks_copy(started[0], state_fd)
        if problem:
            sim.engine.after(0.1, lambda: started[0].fail(problem, collateral=False))
            started = started[1:]
        for worker in started:
            worker.begin()

    seating = contextlib.nullcontext()

    def reseat(self, local_rank: int, generation: int, env: WorkerEnv, listen: object) -> bool:
        """See `WorkerGroup`."""
        worker = self._worker(local_rank, generation)
        if worker is None or worker.told:
            return False
        worker.env = env
        worker.page.stop = worker.page.go = worker.page.save = 0
        self._newest = env.generation
        self.process.sim.invariants.work.has_ranks([worker])
        self.process.sim.engine.after(self.process.sim.living.uniform(0.0, 0.02), worker.seat_comes, env)
        return True

    def furthest(self) -> int:
        """The newest step that any of its workers has finished."""
        pages = [page for group in self.groups.values() for page in group.pages]
        return max((page.step for page in (*pages, *(each.page for each in self.workers + self.dead))), default=0)

    def _of(self, generation: int | None) -> list[Worker]:
        wanted = self._newest if generation is None else generation
        return [worker for worker in self.workers if worker.generation == wanted]

    def _worker(self, local_rank: int, generation: int | None) -> Worker | None:
        wanted, found = self._newest if generation is None else generation, None
        for worker in self.workers:
            env = worker.env
            if env.local_rank == local_rank and env.generation == wanted:
                if not worker.told:
                    return worker
                found = found or worker
        return found

    def _lacks_copy(self, group: Group | Worker, state_fd: int) -> str:
        """Why rank 0 cannot resume from the copy that it is to resume from, "" if it can; damage is told."""
        env = group.envs[0]
        if group.copy is None or env.rank != 0:
            return ""
        if state_fd < 0:
            return "the copy is not in this node's memory"
        if group.copy.digest not in self.process.sim.spoilt:
            return ""
        told = WorkerMessage(group.generation, env.rank, 0, CopyDamaged(), group.answer)
        self.process.sim.engine.after(0.1, group.emit, told)
        return "the copy is damaged"

    def kill(self, generation: int | None = None, local_ranks: Sequence[int] = ()) -> None:
        """See `WorkerGroup`."""
        doomed = [each for each in self._of(generation) if not local_ranks or each.env.local_rank in local_ranks]
        self.process.sim.invariants.work.killed(self.process, doomed)
        self._end(doomed, self.process.sim.plan.kill_s, signal.SIGKILL)
        self._stop(generation, self.process.sim.plan.kill_s)

    def terminate(self, generation: int | None = None, number: int = signal.SIGTERM) -> None:
        """See `WorkerGroup`."""
        after_s = self.process.sim.net.uniform(0.05, 2.0)
        self._end(self._of(generation), after_s, signal.SIGTERM)
        self._stop(generation, after_s)

    def _end(self, workers: Sequence[Worker], after_s: float, number: int) -> None:
        for worker in workers:
            worker.stopping = True
            # Any signal but SIGKILL is for the main thread, which may be stuck.
            later = self.process.sim.engine.after if number == signal.SIGKILL else worker.later
            later(after_s, worker.die, -number)

    def _stop(self, generation: int | None, after_s: float) -> None:
        group = self.groups.get(generation or max(self.groups, default=0))
        if group is not None and group.alive:
            group.stopping = True
            self.process.sim.engine.after(after_s, group.end, "killed")

    def ask_for_stacks(self, generation: int) -> None:
        """See `WorkerGroup`."""

    def release(self, generation: int | None = None) -> None:
        """See `WorkerGroup`. Nobody lingers here."""
        for worker in self._of(generation):
            worker.later(0.005, worker.dismissed)

    def page(self, local_rank: int, generation: int | None = None) -> Any:
        """See `WorkerGroup`."""
        worker = self._worker(local_rank, generation)
        if worker is not None:
            return worker.page
        group = self.groups.get(generation or 0)
        if group is None or not group.alive:
            raise KeyError("no such worker")
        return group.pages[local_rank]

    def pids(self, generation: int | None = None) -> dict[int, int]:
        """See `WorkerGroup`."""
        if self.process.sim.plan.in_place:
            seated = [worker.env.local_rank for worker in self._of(generation or 0) if not worker.told]
            return {local_rank: local_rank + 1 for local_rank in seated}
        group = self.groups.get(generation or 0)
        return {0: 1} if group is not None and group.alive else {}

    def state_of(self, pid: int) -> str:
        """The kernel's letter for the worker with this number."""
        worker = self._worker(pid - 1, None)
        return "T" if worker is not None and worker.stopped else "S"

    def cpu_s(self, pids: Iterable[int]) -> float:
        """Seconds of processor time of the workers with these numbers, of those that are busy."""
        now, found = self.process.sim.engine.now, (self._worker(pid - 1, None) for pid in pids)
        return sum(now for worker in found if worker is not None and worker.busy and worker.stuck_until > now)

    def vanish(self, why: str) -> None:
        """The agent has died: so do its workers."""
        for each in (*self.groups.values(), *self.workers):
            each.end(why)

    @property
    def living(self) -> list[Group | Worker]:
        """Groups that have processes, or the processes."""
        return [each for each in (*self.groups.values(), *self.workers) if each.alive]
