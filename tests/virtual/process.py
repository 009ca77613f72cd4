"""A virtual node's agent: the production agent, its edges replaced (clock, queue, processes, network) and nothing else.

What is production code here: the agent's loop, the node's state machine, the membership, the lease's judgement, the
rendezvous with its view, decisions and transactions, and the errands. What is virtual: time, threads, etcd's client,
probes, the worker parent and the workers.
"""

from __future__ import annotations

import functools
import queue
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticrt.agent.agent import Agent
from elasticrt.agent.supervisor import Supervisor
from elasticrt.errors import ElasticError
from elasticrt.ipc.messages import Warm
from elasticrt.rendezvous.decision import Decision, Me
from elasticrt.rendezvous.member import Member
from elasticrt.rendezvous.records import Generation, Seat
from elasticrt.run_options import RunOptions
from elasticrt.settings import Command, Settings
from elasticrt.store.protocol import Address, Credentials
from elasticrt.workers.worker_io import WorkerEnded
from tests.virtual.conduct import Intent
from tests.virtual.edges import edges
from tests.virtual.engine import Task, VirtualQueue, require
from tests.virtual.wire import Wire
from tests.virtual.workers import VirtualGroup

if TYPE_CHECKING:
    from tests.virtual.simulator import Simulator

VirtualQueue.Empty = queue.Empty


class Process:
    """One agent process: from its start to its end or death."""

    def __init__(self, sim: Simulator, name: str, life: int) -> None:
        self.sim, self.name, self.life = sim, name, life
        index = int(name[1:])
        self.offset, self.rate = sim.plan.offsets[index], sim.plan.clock_rates[index]
        self.workers = sim.plan.workers[index]
        self.address = f"10.0.0.{index + 1}"
        self.gone = self.paused = False
        self.loses = False  # While its agent hears that a worker has ended.
        self.going_on: Generation | None = None  # While its agent seats its workers.
        self.deferred: list[tuple[Task, int]] = []
        self.code: int | None = None
        self.ended_at: float | None = None
        self.frozen_until = 0.0
        self.whole_node = False
        self.silent_death = False
        self.reached_at = self.awake_at = sim.engine.now
        self.trouble_at = sim.engine.now
        self.told_at: float | None = None
        self.leaves_at: float | None = None  # When its agent decided to leave.
        self.began_at = sim.engine.now
        self.spec = sim.spec_of(name)
        self.attempt = 0
        self.knew = 0  # The generation that it knew when the store lost its data.
        self.incarnations: set[str] = set()
        self.fencing = ("", 0)
        self.wire = Wire(sim, self)
        self.tasks: list[Task] = []
        self.probe_port = sim.port()
        sim.processes[name] = self
        self.agent = VirtualAgent(self)
        self.tasks.append(sim.engine.start(self, self._main, f"{name}.{life}"))

    def clock(self) -> float:
        """This machine's monotonic clock."""
        return self.offset + self.rate * self.sim.engine.now

    def sleep(self, seconds: float) -> None:
        """`time.sleep` on this machine."""
        self.sim.engine.sleep(seconds / self.rate)

    def state_of(self, pid: int) -> str:
        """The kernel's letter for what one of its workers is doing."""
        return self.group.state_of(pid)

    def cpu_s(self, pids: Iterable[int]) -> float:
        """The processor time of some of its workers, in seconds."""
        return self.group.cpu_s(pids)

    @property
    def group(self) -> VirtualGroup:
        """Its workers."""
        return self.agent.supervisor.group

    def _main(self) -> None:
        agent = self.agent
        try:
            agent.supervisor.open()
            self.code = agent.join_and_run()
            agent.supervisor.close()
        except ElasticError as error:
            self.code = error.exit_code
            self.sim.say(self, f"ends with code {error.exit_code}: {str(error).splitlines()[0]}: {error}"[:300])
            agent.supervisor.close()
        self.ended_at = self.sim.engine.now
        self.sim.engine.after(0.0, self.sim.bury, self, "exits")

    def intent(self) -> Intent:
        """What it knows now."""
        member = self.member
        if member is None:
            return Intent()
        incarnation = member.me.record.incarnation
        self.incarnations.add(incarnation)
        return Intent(incarnation, self.fencing, member.view)

    @property
    def member(self) -> Member | None:
        """What its agent is in the run; None before it begins to join."""
        return getattr(self.agent.loop, "member", None)

    @property
    def me(self) -> Me | None:
        """Its member's own state."""
        return self.member.me if self.member is not None else None

    def signal(self) -> None:
        """SIGTERM."""
        self.told_at = self.sim.engine.now
        self.agent.tell_to_leave(signal.SIGTERM)


class VirtualAgent(Agent):
    """The production agent; it only tells its decisions to the story."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.reason = ""
        supervisor = functools.partial(VirtualSupervisor, process)
        super().__init__(_settings(process), process.spec, edges(process, supervisor))

    def decided(self, decision: Decision) -> None:
        """Tell it to the story."""
        if decision.reason != self.reason:
            self.process.sim.say(self.process, f"{type(decision).__name__}: {decision.reason}")
            self.reason = decision.reason
        self.process.sim.invariants.conduct.decided(self.process, decision)
        super().decided(decision)

    def _join(self) -> bool:
        joined = super()._join()
        if joined:
            self.process.attempt = self.member.me.attempt
        return joined

    def run_generation(self, generation: Generation, seat: Seat) -> None:
        """See `WorkerSide`."""
        self.process.going_on = generation
        try:
            super().run_generation(generation, seat)
        finally:
            self.process.going_on = None

    def say(self, text: str) -> None:
        """The story has it already."""


class VirtualSupervisor(Supervisor):
    """The production node over virtual workers."""

    def __init__(self, process: Process, settings: Settings, put: Callable[[Any], None], *more: Any) -> None:
        super().__init__(settings, put, *more)
        self._process, self._put = process, put

    def open(self) -> None:
        """Start the worker parent: it is warm after a while."""
        sim = self._process.sim
        sim.engine.after(sim.plan.warm_s, self._put, Warm("fork", "", sim.plan.warm_s))

    def _look_for_laggards(self, now: float, elsewhere: Sequence[str]) -> None:
        """Not here: there is no process whose time and stacks could be looked at."""

    def _start_missing(self, now: float) -> None:
        before = len(self._joining.ranks)
        super()._start_missing(now)
        beside = self._joining.beside
        ends = beside is not None and beside[0].last is not None and len(self._joining.ranks) > before
        require(not ends, "S13", f"a worker sets up on {self._process.name} beside a run that ends")

    def _worker_ended(self, event: WorkerEnded) -> None:
        self._process.loses = True
        try:
            super()._worker_ended(event)
        finally:
            self._process.loses = False

    def close(self) -> None:
        """End everything that this node has started."""
        self.group.vanish("the agent ends")


def _settings(process: Process) -> Settings:
    return Settings(
        options=RunOptions(
            node=process.name,
            again=process.sim.again,
            max_restarts=process.spec.max_restarts,
            drain_timeout_s=process.sim.drain_s,
            events_fd=0,  # Nothing is narrated.
        ),
        run_id="run",
        node=process.name,
        address=process.address,
        workers=process.workers,
        command=Command(("train.py",)),
        etcd=(Address("http", "virtual", 2379),),
        credentials=Credentials(),
        serve=None,
        run_dir=Path("/virtual"),
    )
