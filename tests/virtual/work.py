"""What workers do, and what they are told: checked against the history of the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticrt.agent.store_proxy import StoreRequest
from elasticrt.ipc.env import Commit
from elasticrt.ipc.messages import Reply, Save
from elasticrt.rendezvous.records import Generation
from tests.virtual.engine import require

if TYPE_CHECKING:
    from tests.virtual.invariants import Invariants
    from tests.virtual.living import Worker
    from tests.virtual.process import Process
    from tests.virtual.process_group import ProcessGroup
    from tests.virtual.simulator import Simulator
    from tests.virtual.training import Training
    from tests.virtual.workers import Group


class Work:
    """Which ranks were started where, how far they came, and how they ended."""

    def __init__(self, sim: Simulator, history: Invariants) -> None:
        self.sim = sim
        self.history = history
        self.started_ranks: dict[str, dict[int, str]] = {}
        self.worked: set[str] = set()
        self.well: dict[str, set[int]] = {}
        self.told_step: dict[str, int] = {}
        self.furthest = 0
        self.starts: dict[str, int] = {}  # Where generations began that went back behind their head.
        self.redone: set[tuple[int, str]] = set()  # Steps of a head that only the dead had finished, done in place.

    def gone_back(self, nonce: str, step: int) -> None:
        """The head is lost with its node, and a generation goes back to its parent, of `step`."""
        self.starts[nonce] = step
        self.told_step.clear()

    def _start(self, generation: Generation) -> int:
        memory = generation.memory
        return self.starts.get(generation.nonce, step_of(generation.resume) if memory is None else memory.step)

    def started(self, group: Group | Worker) -> None:
        """S3: ranks of a generation belong to one node each, and are those of its roster."""
        if group.nonce not in self.history.seats and self.sim.wiped_at is not None:
            return  # A generation of a store that is gone: its last news were under way.
        seats = self.history.seats.get(group.nonce, {})
        seat = seats.get(group.process.name)
        require(seat is not None, "S3", f"{group.process.name} has no seat in generation {group.generation}")
        assert seat is not None
        life = group.process.agent.member.me.record.incarnation
        require(seat.incarnation == life, "S3", f"{seat.node} took the seat of another life")
        self.worked.add(life)
        if self.sim.plan.in_place:
            return
        owners = self.started_ranks.setdefault(group.nonce, {})
        generation = next(one for one in self.history.generations if one.nonce == group.nonce)
        for env in group.envs:
            require(env.rank not in owners, "S3", f"rank {env.rank} of generation {group.generation} was started twice")
            owners[env.rank] = life
            same = (env.world_size, env.master_addr, env.master_port, env.generation, env.group_rank)
            record = generation
            expected = (record.world_size, record.master_address, record.master_port, record.number, seat.index)
            require(same == expected, "S3", f"rank {env.rank} was told {same}, not {expected}")
            require(env.rank == seat.rank_offset + env.local_rank, "S3", f"{seat.node} has rank {env.rank}")

    def formed(self, training: Training) -> None:
        """S4, S6: one process group holds one generation, and starts from one point."""
        for group in training.ready:
            require(group.nonce == training.nonce, "S4", "workers of two generations in one process group")
            step = group.start
            require(step == training.step, "S6", f"{group.process.name} starts from step {step}, not {training.step}")

    def stepped(self, training: Training) -> None:
        """S10: nobody trains below what was committed before the generation began."""
        generation = next((one for one in self.history.generations if one.nonce == training.nonce), None)
        if generation is None:
            return  # Of a store that has been wiped: its agents end it as soon as they know.
        require(training.step > self._start(generation), "S10", f"step {training.step} is done again")
        if self.sim.plan.lossless:
            require(training.step == self.furthest + 1, "S10", f"step {training.step} after {self.furthest}")
        self.furthest = max(self.furthest, training.step)

    def has_ranks(self, workers: list[Worker]) -> None:
        """S3: whoever gets ranks in a generation, started or seated in place, gets those of its node's seat there."""
        first = workers[0]
        if first.nonce not in self.history.seats and self.sim.wiped_at is not None:
            return
        seat = self.history.seats.get(first.nonce, {}).get(first.process.name)
        text = f"{first.process.name} in generation {first.generation}"
        require(seat is not None, "S3", f"{text} has no seat")
        assert seat is not None
        life = first.process.agent.member.me.record.incarnation
        require(seat.incarnation == life == first.incarnation, "S3", f"{text} took the seat of another life")
        owners = self.started_ranks.setdefault(first.nonce, {})
        record = next(one for one in self.history.generations if one.nonce == first.nonce)
        for worker in workers:
            env = worker.env
            require(env.rank not in owners, "S3", f"rank {env.rank} of generation {env.generation} is given twice")
            owners[env.rank] = life
            told = (env.world_size, env.master_addr, env.master_port, env.generation, env.group_rank)
            expected = (record.world_size, record.master_address, record.master_port, record.number, seat.index)
            require(told == expected, "S3", f"rank {env.rank} was told {told}, not {expected}")
            own = range(seat.rank_offset, seat.rank_offset + seat.workers)
            require(env.rank in own, "S3", f"{text} has rank {env.rank}, not one of {own}")

    def arrived(self, worker: Worker) -> None:
        """S20: who comes to a process group has a rank of it."""
        own = worker.own
        owner = self.started_ranks.get(own.nonce, {}).get(own.rank)
        known = own.nonce in self.history.seats
        text = f"{worker.process.name} comes as rank {own.rank} of generation {own.generation}"
        require(not known or owner == worker.incarnation, "S20", text)

    def formed_anew(self, group: ProcessGroup) -> None:
        """S6: all that are started anew start from one point."""
        states = {worker.trained for worker in group.members.values()}
        require(len(states) == 1, "S6", f"generation {group.generation} starts from {len(states)} states")

    def shares(self, group: ProcessGroup, workers: list[Worker], source: int) -> None:
        """S18: no finished step is lost while a rank that shares its state has it. L9: after a loss nobody comes in who
        could not make an evaluation again with the others, so that these would start anew."""
        whole = [worker.step for worker in workers if worker.whole]
        text = f"generation {group.generation} goes on after step {workers[source].step}, and rank had {max(whole)}"
        require(workers[source].whole and workers[source].step == max(whole), "S18", text)
        generation = next((one for one in self.history.generations if one.nonce == group.nonce), None)
        spec = self.history.spec.spec if self.history.spec is not None else None
        if not self.sim.plan.stays or generation is None or spec is None:
            return
        new = [worker for worker in workers if worker.came_beside and worker.seats == 1]
        others = {worker.process.name for worker in workers if worker not in new}
        came_in = generation.kind in ("failure", "lost") and new
        text = f"newcomers come to generation {group.generation} ({generation.kind}), where others may evaluate"
        require(not came_in or generation.waits or len(others) < spec.min_nodes, "L9", text)

    def finished(self, worker: Worker, group: ProcessGroup) -> None:
        """S5, S10: a rank has finished a step of its generation: the one after the last, in every rank's history.

        Nobody does again what a rank that lives had finished. Rank 0 may have finished a step, committed it, and died
        before any other had: those that live on do this one step again, from the state before it.
        """
        steps = tuple(step for step, _ in worker.trained)
        require(steps == tuple(range(1, worker.step + 1)), "S5", f"{worker.process.name} has trained {steps}")
        generation = next((one for one in self.history.generations if one.nonce == group.nonce), None)
        if generation is None:
            return
        least = self.history.spec.spec.min_nodes if self.history.spec is not None else 1
        # In a story nothing else keeps a resized run from standing still.
        trains_on = self.sim.plan.generations_max and self.sim.engine.now > self.history.spec_since + 5.0
        few = generation.waits or (generation.nodes < least and trains_on)
        require(not few, "S3", f"{worker.process.name} makes a step with too few nodes")
        start = self._start(generation)
        if generation.in_place and worker.step == start:
            self.redone.add((worker.step, group.nonce))
        require(worker.step > start - generation.in_place, "S10", f"step {worker.step} is done again")
        if self.sim.plan.lossless:
            require(worker.step >= self.furthest, "S10", f"step {worker.step} after {self.furthest}")
        self.furthest = max(self.furthest, worker.step)

    def killed(self, process: Process, workers: list[Worker]) -> None:
        """L9: a membership that goes on in place ends no worker that could have been known of when it was agreed."""
        going_on = process.going_on if process.going_on is not None and process.going_on.in_place else None
        if going_on is None and not process.loses:
            return
        now, slack = self.sim.engine.now, 1.0 + self.sim.slack
        known_at = self.history.published_at.get(going_on.number, now) if going_on is not None else now
        well = [worker.env.local_rank for worker in workers if worker.healthy and known_at > worker.at_home_at + slack]
        text = f"{process.name} ends its workers {well}, who could go on"
        require(not well, "L9", text)

    def exited(self, group: Group | Worker) -> None:
        """A node's workers have ended well."""
        self.well.setdefault(group.nonce, set()).update(env.rank for env in group.envs)

    def answered(self, process: Process, errand: StoreRequest, reply: Reply) -> None:
        """S8: what a worker is told about its commit is true, as soon as it is told."""
        if isinstance(errand.request, Save):
            nonce = errand.request.commit["nonce"]
            there = any(head.nonce == nonce for head in self.history.heads)
            if reply.ok:
                done = nonce in self.sim.committed
                require(done, "S8", f"{process.name} was told that a commit is done, and it is not")
            elif "unknown" not in reply.reason and "does not answer" not in reply.reason:
                # Once its generation is over nobody is left to be misled.
                over = errand.request.commit["generation"] < self.history.number()
                require(
                    not there or over,
                    "S8",
                    f"{process.name} was told '{reply.reason}' of a commit that is done",
                )

    def told(self, node: str, step: int) -> None:
        """S10: the steps that a node reports as committed only grow, in one store."""
        if all(head.step != step for head in self.history.heads):
            return
        require(
            step >= self.told_step.get(node, 0), "S10", f"{node} reports step {step} after {self.told_step.get(node)}"
        )
        self.told_step[node] = step


def step_of(head: Commit | None) -> int:
    """The step of a head, 0 before the first."""
    return head.step if head is not None else 0
