"""One run of the whole protocol in virtual time: drawn from a seed, hurt by faults, watched by invariants.

First the safety phase: faults happen, and nothing wrong may. Then the liveness phase: faults stop, some nodes stay dead
for good, enough are left; work must go on (L1), come to an end everywhere (L2), and not spin (L8).
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from elasticrt.errors import EXIT_CHECKPOINT, EXIT_DUPLICATE, EXIT_STORE, EXIT_TERMINATED
from elasticrt.ipc.env import Commit, WorkerEnv
from elasticrt.rendezvous.records import Keys, SpecRecord
from elasticrt.spec import RunSpec, resized
from elasticrt.store.protocol import Changes, Resync, Txn, TxnResult
from tests.memory_store import MemoryServer
from tests.virtual.conduct import Intent
from tests.virtual.copies import State, Trained
from tests.virtual.engine import STORY_TAIL, Engine, Violation, require
from tests.virtual.faults import Faults
from tests.virtual.invariants import Invariants
from tests.virtual.living import Worker
from tests.virtual.plan import Plan, Snag
from tests.virtual.process import Process
from tests.virtual.process_group import ProcessGroup
from tests.virtual.training import Training
from tests.virtual.workers import Group, VirtualGroup

RECOVER_S = 60.0
FINISH_S = 60.0
ADMIT_S = 40.0
"""L4: so long after the faults has everybody a seat."""

SET_UP_AGAIN_S = 60.0
"""L4: ... and where set-up fails, so much longer: who has failed often waits for up to a minute."""

DRAIN_S = 15.0
GENERATIONS_MAX = 12
"""L8: more generations than this while nothing goes wrong any more are a livelock."""


class Failed(AssertionError):  # noqa: N818  The word for a run.
    """A run in which an invariant did not hold, told in full."""

    def __init__(self, violation: Violation, plan: Plan, story: list[str]) -> None:
        tail = "\n".join(story[-STORY_TAIL:])
        super().__init__(f"{violation}\n\n{plan}\n\nThe last of the story:\n{tail}")
        self.name = violation.name
        self.summary = str(violation)


@dataclass(frozen=True)
class Outcome:
    """What one run was like."""

    plan: Plan
    story: tuple[str, ...]
    events: int
    fired: Counter[str]
    generations: int
    steps: int
    status: str

    @property
    def log(self) -> str:
        """The whole of it, as text."""
        return f"{self.plan}\n" + "\n".join(self.story) + "\n"


class Simulator:
    """The virtual world."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.engine = Engine()
        self.net = random.Random(f"net {plan.seed}")
        self.copying = random.Random(f"copies {plan.seed}")
        self.living = random.Random(f"living {plan.seed}")
        self.fired: Counter[str] = Counter()
        self.torn = ""  # The node of which a worker dies when another has just finished a step, and it has not.
        self.ahead = ""  # The node whose workers finish their steps long before all others do.
        self.calm = False
        self.spec = plan.spec
        self.again = False
        self.drain_s = DRAIN_S if plan.loops else 0.0
        self.last_step: int | None = plan.ends_after or None
        self.slack = plan.rates.late_s * (plan.rates.late > 0) * 3 + 4 * plan.timeout_s + 40 * plan.latency_s
        self.began = self.engine.now
        self.frozen_s = 0.0
        self.frozen_since: float | None = None
        self.server = MemoryServer(self.server_clock)
        self.invariants = Invariants(self)
        self.processes: dict[str, Process] = {}
        self.committed: set[str] = set()  # By their nonces, whether or not etcd has lost its data since.
        self.lives: Counter[str] = Counter()
        self.disk: dict[str, Trained] = {}
        self.written: dict[str, Commit] = {}
        self.copies: dict[str, State] = {}
        self.spoilt: set[str] = set()
        self.trainings: dict[str, Training] = {}
        self.process_groups: dict[str, ProcessGroup] = {}
        self.down_until = self.down_since = 0.0
        self.trouble_at = 0.0
        self.cut_etcd: dict[str, float] = {}
        self.cut_peers: dict[str, float] = {}
        self.cut_pairs: dict[frozenset[str], float] = {}
        self.wiped_at: float | None = None
        self.wiped_spec: SpecRecord | None = None  # What was in the store then: who is cut off knows only that.
        self._snagged: Counter[Snag] = Counter()
        self._first: Violation | None = None
        self.faults = Faults(self)
        self._ports = 10_000
        self.server.watch("/elasticrt/run/", self.recorded, from_revision=1)
        self.engine.check = self.invariants.after_event

    # What others ask of it.

    def say(self, process: Process, text: str) -> None:
        """A line of the story about a process."""
        self.engine.say(f"{process.name}.{process.life}", text)

    def port(self) -> int:
        """A number that nobody has had."""
        self._ports += 1
        return self._ports

    def chance(self, kind: str, share: float) -> bool:
        """Whether a fault of that share happens now; counted."""
        if self.calm or not share or self.net.random() >= share:
            return False
        self.fired[kind] += 1
        return True

    def server_clock(self) -> float:
        """etcd's clock; while it restarts, it stands still (its leases are extended by that much)."""
        now = self.frozen_since if self.frozen_since is not None else self.engine.now
        return now - self.frozen_s

    def unreachable(self, process: Process) -> bool:
        """Whether a process cannot talk to etcd."""
        now = self.engine.now
        return self.down_until > now or self.cut_etcd.get(process.name, 0.0) > now

    def linked(self, one: Process, other: Process, for_s: float = 0.0) -> bool:
        """Whether two machines can talk to each other, and could `for_s` ago."""
        now = self.engine.now - for_s
        if one is other:
            return True
        if self.cut_pairs and self.cut_pairs.get(frozenset((one.name, other.name)), 0.0) > now:
            return False
        return self.cut_peers.get(one.name, 0.0) <= now and self.cut_peers.get(other.name, 0.0) <= now

    def snag(self, process: Process, txn: Txn) -> Snag | None:
        """What the plan has in store for this transaction."""
        due = None
        for snag in self.plan.snags:
            if snag.who in ("", process.name) and snag.what in txn.why and self.faults.has_said(snag.on):
                self._snagged[snag] += 1
                due = snag if self._snagged[snag] == snag.nth else due
        return due

    def commit(self, process: Process, txn: Txn, intent: Intent) -> TxnResult:
        """A transaction arrives at etcd."""
        conduct = self.invariants.conduct
        self.server.expire()  # What leases do now is not this writer's doing.
        conduct.writer = (process, txn, intent)
        try:
            done = self.server.commit(txn)
        finally:
            conduct.writer = None
        return done

    def wipe(self) -> None:
        """Another, empty etcd answers. Whoever knew the old one's generations must not go on."""
        self.lost_data()
        self.server.replace("memory-2")
        self.server.watch("/elasticrt/run/", self.recorded, from_revision=1)

    def lost_data(self) -> None:
        """What was true of the store is so no more; agents that knew it have to find out."""
        self.wiped_at = self.trouble_at = self.engine.now
        self.invariants.running = False
        self.wiped_spec = self.invariants.spec
        self.invariants = Invariants(self)
        self.engine.check = self.invariants.after_event
        for process in self.processes.values():
            process.knew = max(process.knew, getattr(process.me, "known", 0))

    def spec_of(self, name: str) -> RunSpec:
        """The options that a node is started with."""
        others = self.plan.others
        return others.get(f"{name}.{self.lives[name]}") or others.get(name, self.spec)

    def training(self, group: Group) -> Training:
        """The process group of a generation."""
        if group.nonce not in self.trainings:
            self.trainings[group.nonce] = Training(self, group)
        return self.trainings[group.nonce]

    def worker(self, owner: VirtualGroup, env: WorkerEnv) -> Worker:
        """A new process that can go on in place."""
        return Worker(owner, env)

    def process_group(self, worker: Worker) -> ProcessGroup:
        """The process group of a worker's generation."""
        if worker.own.nonce not in self.process_groups:
            self.process_groups[worker.own.nonce] = ProcessGroup(self, worker)
        return self.process_groups[worker.own.nonce]

    def probe(self, asker: Process, address: str, port: int, incarnation: str) -> str:
        """What asking an agent finds; takes time."""
        name = f"n{int(address.rpartition('.')[2]) - 1}"
        for _ in range(3):
            self.engine.sleep(self.plan.latency_s)
            target = self.processes[name]
            if self.linked(asker, target) and not (target.gone and target.silent_death):
                if target.gone or target.probe_port != port:
                    return "dead"
                if not target.paused:
                    me = target.me
                    return "alive" if me is not None and me.record.incarnation == incarnation else "dead"
            self.engine.sleep(0.5)
        return "silent"

    def newest(self, asker: Process, address: str, port: int) -> int:
        """Which generation an agent says it has had workers in; 0 when it says nothing."""
        self.engine.sleep(self.plan.latency_s)
        target = self.processes[f"n{int(address.rpartition('.')[2]) - 1}"]
        heard = self.linked(asker, target) and not target.gone and not target.paused and target.probe_port == port
        me = target.me
        return me.started_generation if heard and me is not None else 0

    def leader(self) -> str | None:
        """Who holds the oldest member key."""
        found = self.server.read(Keys("run").members, limit=1, by_create=True).keys
        return found[0].key.rpartition("/")[2] if found else None

    # Lives.

    def spawn(self, name: str) -> None:
        """Start an agent, unless there is one or the run has ended."""
        old = self.processes.get(name)
        if (old is not None and not old.gone) or self.invariants.result_at is not None:
            return
        self.lives[name] += 1
        if self.lives[name] > 1:
            self.fired["restart"] += 1
        self.engine.say(f"{name}.{self.lives[name]}", "! agent starts")
        Process(self, name, self.lives[name])

    def kill(self, process: Process, how: str) -> None:
        """SIGKILL, or worse."""
        if process.gone:
            return
        self.say(process, f"! {how}")
        self.engine.end(process)
        delay = 0.0 if process.silent_death else self.net.uniform(0.0, 1.0)
        self.engine.after(delay, process.group.vanish, how)
        process.wire.close()

    def bury(self, process: Process, how: str) -> None:
        """An agent has ended by itself."""
        if process.gone:
            return
        self.say(process, f"{how} with code {process.code}")
        codes = {result.code for result in self.invariants.results.values()}
        allowed = process.code == EXIT_TERMINATED or process.code in codes
        if not process.attempt:
            # It could not get in (etcd is away, or its own former life seems to live): somebody starts it again.
            allowed = allowed or process.code in (EXIT_STORE, EXIT_DUPLICATE)
        stored = [self.invariants.spec]
        if self.wiped_at is not None and process.began_at <= self.wiped_at:
            allowed = allowed or process.code == EXIT_STORE
            stored.append(self.wiped_spec)
        others = any(each is not None and resized(process.spec, each.spec) != each.spec for each in stored)
        if others or process.attempt != self.invariants.attempt():
            allowed = allowed or process.code == EXIT_DUPLICATE
        if process.code == EXIT_CHECKPOINT:  # It left without a handover, and has made steps that nobody has saved.
            saved = max((self.written[nonce].reached for nonce in self.committed), default=0)
            # One that was alone in its generation when it lost etcd does not know who has gone on without it.
            known = process.agent.member.view.generation
            alone = known is not None and known.record.nodes == 1 and self.unreachable(process)
            # Then what counts is what it has committed, and heard the answer to.
            if self.wiped_at is not None or alone:
                saved = process.agent.last_commit.reached if process.agent.last_commit is not None else 0
            allowed = allowed or process.group.furthest() > saved
        require(allowed, "S12", f"{process.name} ends with code {process.code}, results {sorted(codes)}")
        if process.code in (EXIT_STORE, EXIT_DUPLICATE) or (self.calm and process.name not in self.plan.doomed):
            self.engine.after(2.0, self.spawn, process.name)
        self.engine.end(process)
        process.group.vanish(how)
        process.wire.close()

    def pause(self, process: Process, for_s: float, *, whole: bool = True) -> None:
        """SIGSTOP for a while; `whole`: the workers as well."""
        if process.gone or process.paused:
            return
        process.paused, process.whole_node = True, whole
        process.frozen_until = process.trouble_at = self.engine.now + for_s
        self.engine.after(for_s, self.unpause, process)

    def unpause(self, process: Process) -> None:
        """SIGCONT: whatever was waiting goes on, in any order."""
        if process.gone or not process.paused:
            return
        process.paused = False
        process.awake_at = self.engine.now
        deferred, process.deferred = process.deferred, []
        self.net.shuffle(deferred)
        for task, token in deferred:
            self.engine.after(0.0, task.resume, token)
        self.say(process, "! goes on after a pause")

    def recorded(self, item: Changes | Resync) -> None:
        """All that changes in the store."""
        if isinstance(item, Changes) and self.invariants.running:  # Otherwise the store has been wiped.
            try:
                self.invariants.follow(item)
            except Violation as violation:
                self._first = self._first or violation  # Its writer's code ends in its own time, and others go on.
                raise

    # The run.

    def run(self) -> Outcome:
        """Both phases. Raises Failed, or whatever exception a bug raises."""
        with _quiet():
            try:
                for index in range(self.plan.nodes):
                    self.engine.after(self.plan.arrivals[index], self.spawn, f"n{index}")
                self.faults.schedule()
                self.engine.run(self.began + self.plan.safety_s)
                self._live()
                if self.plan.again is not None:
                    self._again(self.plan.again)
                failed = [result for result in self.invariants.results.values() if result.status != "succeeded"]
                require(not (failed and self.plan.succeeds), "L1", f"the run has failed: {failed}")
            except Violation as violation:
                raise Failed(self._first or violation, self.plan, self.engine.story) from violation
            finally:
                self.invariants.running = False
                self._close()
        results = self.invariants.results.values()
        return Outcome(
            self.plan,
            tuple(self.engine.story),
            self.engine.events,
            self.fired,
            len(self.invariants.generations),
            self.invariants.heads[-1].step if self.invariants.heads else 0,
            next((result.status for result in results), "none"),
        )

    def _live(self) -> None:
        self.faults.stop()
        began, before = self.engine.now, len(self.invariants.generations)
        self._until(began + RECOVER_S, lambda: self.invariants.head_at > began + 0.5, "L1", "no commit")
        published = len(self.invariants.generations) - before
        require(published <= GENERATIONS_MAX, "L8", f"{published} generations while nothing went wrong")
        if self.spec.join == "now":
            until = self.engine.now + ADMIT_S + (SET_UP_AGAIN_S if self.plan.setup_fails else 0.0)
            self._until(until, self._all_are_in, "L4", "not everybody has a seat")
        self._finish()

    def _all_are_in(self) -> bool:
        """Whether all agents have seats, or there are no more. A resized run may have others."""
        seats, living = self.invariants.roster(), [one for one in self.processes.values() if not one.gone]
        most = self.invariants.spec.spec.max_nodes if self.invariants.spec is not None else self.spec.max_nodes
        in_all = len(seats) == most or (len(seats) < most and all(one.paused or one.name in seats for one in living))
        full = all(seat.workers == self.processes[seat.node].workers for seat in seats.values())
        return in_all and full

    def _finish(self) -> None:
        """Let the script end soon, and see every agent end after it."""
        every = (*self.trainings.values(), *self.process_groups.values())
        furthest = max((each.step for each in every), default=0)
        if self.last_step is None or furthest < self.last_step:  # Else some have ended.
            self.last_step = furthest + 3
        self._until(self.engine.now + FINISH_S, lambda: False, "L1", "no result")
        ended_at = self.engine.now
        while any(not process.gone and not process.paused for process in self.processes.values()):
            self.engine.run(self.engine.now + 0.5)
            self._dismiss()
            late = [process.name for process in self.processes.values() if not process.gone and not process.paused]
            require(self.engine.now < ended_at + 30.0, "L2", f"{late} have not ended 30 s after the result")
        self.engine.run(self.engine.now + 1.5)
        for process in self.processes.values():
            if process.gone:  # Who was paused until just now may still be ending.
                require(not process.group.living, "L2", f"workers of {process.name} live on after its agent")

    def _again(self, spec: RunSpec) -> None:
        """The run is submitted once more under the same run id; then the sleeper wakes."""
        self.fired["second_attempt"] += 1
        self.engine.say("-----", "submitted again")
        self.again, self.spec = True, spec
        self.last_step, self.invariants.result_at = None, None
        attempt = max(self.invariants.results) + 1  # Who was sent home may have begun it.
        for index in range(self.plan.nodes):
            if f"n{index}" not in self.plan.doomed:
                self.engine.after(self.net.uniform(0.0, 2.0), self.spawn, f"n{index}")
        for process in list(self.processes.values()):
            self.engine.after(self.net.uniform(0.0, 3.0), self.unpause, process)
        began = self.engine.now
        started = lambda: self.invariants.attempt() == attempt and self.invariants.head_at > began  # noqa: E731
        self._until(began + RECOVER_S, started, "L1", "no commit of the second attempt")
        self._finish()

    def _dismiss(self) -> None:
        """Agents that had not got in before the result are sent home: they would begin another attempt."""
        for process in list(self.processes.values()):
            if process.gone:
                continue
            me = process.me
            outside = me is None or (me.highest_generation == 0 and not process.agent.member.view.members)
            if outside or me.attempt > max(self.invariants.results, default=0):
                self.kill(process, "is sent home")

    def _until(self, deadline: float, done: Callable[[], bool], name: str, text: str) -> None:
        began = self.engine.now
        while not self._ended() and not done():
            require(self.engine.now < deadline, name, f"{text} in {self.engine.now - began:.0f} s without faults")
            self.engine.run(self.engine.now + 0.5)

    def _ended(self) -> bool:
        return self.invariants.result_at is not None

    def _close(self) -> None:
        for task in list(self.engine.tasks):
            task.place.gone = True
        for task in list(self.engine.tasks):
            task.end()


@contextmanager
def _quiet() -> Iterator[None]:
    """The story says it all: nothing is logged besides."""
    logger = logging.getLogger("elasticrt")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def simulate(plan: Plan) -> Outcome:
    """Run a plan. Raises Failed when an invariant does not hold."""
    return Simulator(plan).run()
