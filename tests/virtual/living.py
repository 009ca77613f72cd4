"""Workers that can go on in place: each is a process of its own, seated in one generation after another.

As in `elasticrt.train.in_place`: whoever loses its group says so, or hangs until a new seat cuts it off; it then meets
the others of the seat's generation, is brought as far as the furthest of them, and does its step again. A worker that
is to replace another, or joins, sets up beside the training and waits to be let in.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from elasticrt.checkpoint import newest_offer
from elasticrt.ipc.env import Commit, WorkerEnv
from elasticrt.ipc.messages import (
    HANDED_OVER_CODE,
    BuildDone,
    ClaimBuild,
    LeftGeneration,
    Message,
    Reply,
    Save,
    Step,
)
from elasticrt.ipc.status_page import IN_PLACE, READY, StatusPage
from elasticrt.workers.failures import Remains, failure_of
from elasticrt.workers.worker_io import GroupEnded, WorkerEnded, WorkerMessage, WorkerStarted
from tests.virtual import disks
from tests.virtual.copies import Copier, Trained
from tests.virtual.engine import nanoseconds, require
from tests.virtual.workers import ASK_AGAIN_S, POLL_S

if TYPE_CHECKING:
    from tests.virtual.process_group import ProcessGroup
    from tests.virtual.simulator import Simulator
    from tests.virtual.workers import VirtualGroup

MEET_S_MAX = 60.0


class Worker:
    """One process.

    Attributes:
        env: who it is, as its agent sees it; `seat`: the seat that has come and is not taken yet.
        own: who it is, as it knows itself: the last seat that it has taken; `seats`: how many have come in place.
        came_beside: it was started beside the training.
        told: its end has been told to the agent, so that nothing can be said to it any more.
        trained: its state, of as many finished steps; `whole`: it is the state of just these.
        group: the process group that it is in, or comes to.
        waiting: it has no group and waits for a seat.
        stuck_until: its main thread does nothing until then, whatever is cut; `stopped`: by a signal; `busy`: it works.
        at_home_at: since when it can go on in place.
    """

    def __init__(self, owner: VirtualGroup, env: WorkerEnv) -> None:
        self.owner = owner
        self.process = owner.process
        self.env = self.own = env
        self.page = StatusPage(-1)
        self.incarnation = owner.process.agent.member.me.record.incarnation
        self.attempt = env.attempt
        self.alive, self.stopping, self.told, self.left = True, False, False, False
        self.seated, self.seats, self.came_beside = False, 0, env.beside
        self.trained: Trained = () if env.beside else self._beginning()
        self.whole = not env.beside
        self.seat: WorkerEnv | None = None
        self.group: ProcessGroup | None = None
        self.waiting = False
        self.stuck_until, self.stopped, self.busy = 0.0, False, False
        self.at_home_at = math.inf
        self.died_at = math.inf
        self.first = True
        self.head = self.parent = env.resume.nonce if env.resume else ""
        self.saving: tuple[int, Commit] | None = None
        self.saved_for = -1
        self.requests = 0
        self.building: tuple[int, ...] = ()
        self.copier = Copier(self)
        self._heard_at = 0.0

    def _beginning(self) -> Trained:
        if self.env.copy is not None:
            return self.sim.copies[self.env.copy.digest].trained
        return self.sim.disk[self.env.resume.nonce] if self.env.resume else ()

    @property
    def sim(self) -> Simulator:
        """Where it runs."""
        return self.process.sim

    @property
    def generation(self) -> int:
        """The generation that it is seated in, 0 while it sets up beside."""
        return self.env.generation

    @property
    def nonce(self) -> str:
        """That generation's."""
        return self.env.nonce

    @property
    def envs(self) -> tuple[WorkerEnv, ...]:
        """As `Group` has it."""
        return (self.env,)

    @property
    def copy(self) -> Any:
        """The copy in memory that it was started from."""
        return self.env.copy

    @property
    def step(self) -> int:
        """How many steps it has finished."""
        return len(self.trained)

    @property
    def asleep(self) -> bool:
        """Whether nothing of it runs."""
        return self.process.paused and self.process.whole_node

    @property
    def healthy(self) -> bool:
        """Whether it runs, and could go on in place."""
        awake = self.alive and not self.stopping and not self.asleep and self.stuck_until <= self.sim.engine.now
        return awake and self.page.in_place != 0

    # Time, and what its agent hears.

    def later(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        """Its main thread does something after a while, if it is there and awake by then."""
        self.sim.engine.after(delay, self._act, action, args)

    def _act(self, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        if self.asleep or self.stuck_until > self.sim.engine.now:
            if self.stuck_until != math.inf:
                self.sim.engine.after(POLL_S, self._act, action, args)
            return
        action(*args)

    def say(self, message: Message) -> None:
        """Tell the agent; it hears of it a little later, under the name that the worker has by then."""
        self._after_all_that_was_said(self._heard, message)

    def _heard(self, message: Any) -> None:
        self.emit(WorkerMessage(self.generation, self.env.rank, self.env.local_rank, message, self.answer))

    def emit(self, event: Any) -> None:
        """Tell the agent at once, if it is still there."""
        if not self.process.gone:
            self.owner.put(event)

    def _after_all_that_was_said(self, action: Callable[..., None], *args: Any) -> None:
        engine = self.sim.engine
        self._heard_at = max(self._heard_at, engine.now + self.sim.living.uniform(0.0, 0.02))
        engine.at(self._heard_at, action, *args)

    def ask(self, message: Callable[[int], Any]) -> None:
        """Ask the agent for something."""
        self.requests += 1
        self.say(message(self.requests))

    # Ends.

    def die(self, code: int, failure: Any = None) -> None:
        """The process is gone; its agent hears of it soon."""
        if not self.alive:
            return
        self.alive, self.died_at = False, self.sim.engine.now
        if self.group is not None and code:
            self.group.lost(self)
        self._after_all_that_was_said(self._tell_end, code, failure)

    def _tell_end(self, code: int, failure: Any) -> None:
        env, self.told = self.env, True
        if failure is None and code not in (0,) and not self.stopping:
            failure = failure_of(env, Remains(code, stepped=self.page.step > 0))
        self.emit(WorkerEnded(env.generation, env.rank, env.local_rank, 1, code, failure))
        if all(each.told or each.generation != env.generation for each in self.owner.workers):
            if self.sim.plan.reap_s:
                self.sim.engine.after(self.sim.plan.reap_s, self.emit, GroupEnded(env.generation))
            else:
                self.emit(GroupEnded(env.generation))

    def fail(
        self,
        summary: str,
        *,
        collateral: bool,
        local_rank: int = 0,
        final_code: int = 0,
        early: str = "",
    ) -> None:
        """It raises. An error that only says that a peer is gone is none where it can go on in place."""
        if not self.alive or self.stopping or self.left:
            return
        if collateral and self.page.in_place == IN_PLACE and self.group is not None:
            self.lose(self.group)
            return
        env = self.env
        said = "Connection closed by peer" if collateral else "ValueError: " + summary
        failure = failure_of(env, Remains(1, last_lines=(said,)))
        failure = replace(failure, collateral=collateral, final_code=final_code, early=early)
        self.sim.say(self.process, f"  worker {env.rank} fails{' (collateral)' if collateral else ''}")
        self.die(1, failure)

    def end(self, why: str) -> None:
        """The agent has died, and so do its workers; nobody is told."""
        if self.alive:
            self.alive, self.told = False, True
            if self.group is not None:
                self.group.lost(self)

    def dismissed(self) -> None:
        """There is no seat for it: it leaves its loop."""
        if self.waiting and self.seat is None:
            self.left = True
            self.die(HANDED_OVER_CODE)

    # Setting up.

    def begin(self) -> None:
        """Start anew, with all others of its generation."""
        if not self.env.beside:
            self.later(0.01, self._started)
        delay = self.sim.living.uniform(0.05, 0.4)
        if self.env.beside:
            delay = self.sim.living.uniform(0.2, self.sim.plan.setup_s)
            if self.sim.chance("setup_failed", self.sim.plan.setup_fails):
                self.later(delay, lambda: self.fail("its set-up", collateral=False))
                return
        self.later(delay, self.prepare if self.sim.plan.prepares else self._has_set_up)

    def _started(self) -> None:
        self.emit(WorkerStarted(self.generation, self.env.rank, self.env.local_rank, 1, 0))

    def _has_set_up(self) -> None:
        if not self.env.beside:
            self.page.init_at_ns = nanoseconds(self.process.clock())
            self.meet()
            return
        self.page.in_place, self.at_home_at = READY, self.sim.engine.now
        self.waiting = True
        self.sim.say(self.process, f"  a worker ({self.env.local_rank}) has set up beside the training")
        self.say(LeftGeneration(0))

    def _data(self) -> str:
        return f"data of {self.process.name}" if self.sim.plan.own_disks else "data"

    def prepare(self) -> None:
        """Ask for the data until somebody has built them."""
        if self.env.local_rank:
            self._has_set_up()
            return
        self.ask(lambda number: ClaimBuild(number, self._data(), "1"))

    def answer(self, reply: Reply) -> None:
        """Tell it something."""
        if not self.told:
            self.later(0.0, self.answered, reply)

    def answered(self, reply: Reply) -> None:
        """What the agent says."""
        if self.saving is not None and reply.request == self.saving[0]:
            (_, commit), self.saving = self.saving, None
            if reply.refusal == "unsure":
                self.saving = (0, commit)  # Not answered yet.
                self.later(ASK_AGAIN_S, self._commit_again, commit)
            elif reply.ok and commit.generation == self.own.generation:
                self.head = self.parent = commit.nonce
            return
        if self.group is not None or self.waiting or reply.request != self.requests:
            return
        if reply.ok and reply.request in self.building:
            self._has_set_up()
        elif reply.ok:
            self.later(self.sim.plan.build_s * self.sim.living.uniform(0.1, 1.0), self._publish)
        elif reply.refusal == "done":
            self._has_set_up()
        else:
            self.later(0.3, self.prepare)

    def _publish(self) -> None:
        self.building = (*self.building, self.requests + 1)
        self.ask(lambda number: BuildDone(number, self._data(), "1"))

    # Seats.

    def seat_comes(self, env: WorkerEnv) -> None:
        """The thread that listens to the agent hears of a seat, and cuts the old group's sockets."""
        if not self.alive:
            return
        if self.asleep:
            self.sim.engine.after(POLL_S, self.seat_comes, env)
            return
        if env.generation < (self.seat or self.own).generation:
            return  # What an agent says comes in order.
        self.seat, self.seats = env, self.seats + 1
        if self.group is not None:
            self.group.cut(self)
        elif self.waiting:
            self.later(0.0, self.take)

    def take(self) -> None:
        """Take the newest seat, and come to meet the others."""
        if self.seat is None:
            return
        if self.group is not None:
            self.group.lost(self)
        env, self.own, self.seat = self.seat, self.seat, None
        self.waiting, self.group, self.seated, self.first = False, None, True, True
        self.head = self.parent = env.resume.nonce if env.resume else ""
        self.saved_for = -1
        self.page.init_at_ns = nanoseconds(self.process.clock())
        self.page.step_at_ns = self.page.stepping = 0
        self.later(self.sim.living.uniform(0.005, 0.05), self.meet)

    def meet(self) -> None:
        """Come to the process group of its generation."""
        if self.seat is not None:
            self.take()
            return
        group = self.group = self.sim.process_group(self)
        self.later(MEET_S_MAX, lambda: None if group.formed else self.lose(group))
        group.arrive(self)

    def lose(self, group: ProcessGroup) -> None:
        """A collective has failed: who can go on in place waits for a seat, and says so if none has come."""
        if self.group is not group or not self.alive or self.left:
            return
        if not self.page.in_place:
            self.fail("peer", collateral=True)
            return
        self.group, self.waiting = None, True
        self.page.stepping = 0
        group.lost(self)
        if self.seat is not None:
            self.take()
            return
        self.sim.say(self.process, f"  worker {self.own.rank} is down after step {self.step}")
        self.say(LeftGeneration(group.generation, self.step, "Connection closed by peer"))

    # Steps.

    def at_home(self) -> None:
        """Its group is there, and it has the state of it."""
        self.page.in_place = IN_PLACE
        self.at_home_at = min(self.at_home_at, self.sim.engine.now)
        self.page.restored_at_ns = nanoseconds(self.process.clock())
        self.page.entered = self.step + 1
        if self.env.local_rank == 0 and self.copier.idle:
            self.copier.begin()
        self._between(self.group)

    def finish(self, group: ProcessGroup) -> None:
        """Its part of a step is done."""
        if self.group is not group:
            return
        self.trained = (*self.trained, (self.step + 1, group.nonce))
        self.whole = True
        self.page.finished(self.step, nanoseconds(self.process.clock()))
        self.page.entered = self.step + 1
        self.sim.invariants.work.finished(self, group)
        if self.first and self.env.local_rank == 0:
            self.say(Step(self.step, 0, self.page.step_at_ns, self.step - 1, True))
        self.first = False
        ends = self.sim.last_step is not None and self.step >= self.sim.last_step
        due = self.step % self.sim.plan.commit_every == 0 or disks.lacks(self.sim, self.process.name, self.head)
        if self.own.rank == 0 and (ends or due):
            self.save(self.step, self.trained)
        if self.env.local_rank == 0:
            self.copier.look(self.step, self.trained)
        self._between(group)

    def _between(self, group: ProcessGroup | None) -> None:
        """Between two steps in a group: end, leave, take a seat, hold, or go on."""
        if group is None or self.group is not group:
            return
        if self.own.waits:
            self.group, self.waiting = None, True
            self._wait_for_nodes(self.own)
        elif self.sim.last_step is not None and self.step >= self.sim.last_step:
            self._reach_the_end(group)
        elif self.seat is not None:
            self.take()
        elif not self.page.stop or (self.page.go and self.step < self.page.go):
            self.page.stepping = 1
            group.enter(self)
        elif not self.page.go or (self.page.save and self.own.rank == 0 and not self._saved()):
            self.later(0.05, self._between, group)
        else:
            self._stay()

    def _wait_for_nodes(self, own: WorkerEnv) -> None:
        """Rank 0 saves what adds to the head. Then they say that they hold the state; a seat may come before."""
        if self.own is not own:
            return
        lacks = disks.lacks(self.sim, self.process.name, self.head)
        add = newest_offer.adds(self.step, self.sim.written.get(self.head), lacks_head=lacks)
        if own.rank == 0 and add and not self._saved():
            self.later(0.05, self._wait_for_nodes, own)
            return
        self.sim.say(self.process, f"  worker {own.rank} waits for nodes, with the state after step {self.step}")
        self.say(LeftGeneration(own.generation, self.step))

    def _stay(self) -> None:
        text = f"worker {self.own.rank} of {self.process.name} stops after step {self.step}, not {self.page.go}"
        require(self.step == self.page.go, "S5", text)
        self.group, self.waiting = None, True
        self.page.stepping = 0
        self.sim.say(self.process, f"  worker {self.own.rank} stops after step {self.step}")
        self.say(LeftGeneration(self.own.generation, self.step))

    def _saved(self) -> bool:
        if self.saved_for != self.step and self.saving is None:
            self.saved_for = self.step
            self.save(self.step, self.trained)
        return self.saved_for == self.step and self.saving is None

    def save(self, step: int, trained: Trained) -> None:
        """Ask for a commit, one at a time. One of a generation that is over is refused."""
        if self.saving is not None and self.saving[1].generation == self.own.generation:
            return
        nonce = hashlib.sha256(f"{self.own.nonce}/{step}/{self.process.life}".encode()).hexdigest()[:16]
        commit = Commit(
            step=step, epoch=0, generation=self.own.generation, nonce=nonce, parent=self.parent, directory="/ckpt",
            file=f"step-{step}", digest="d" * 64, size=1, node=self.process.name,
        )  # fmt: skip
        self.sim.disk[nonce], self.sim.written[nonce] = trained, commit
        self._commit(commit)

    def go_back(self, to: Commit) -> None:
        """Rank 0 asks that an ancestor of the head be the head."""
        self._commit(replace(to, generation=self.own.generation))

    def _commit_again(self, commit: Commit) -> None:
        if self.saving == (0, commit):  # Otherwise it saves for another generation by now.
            self._commit(commit)

    def _commit(self, commit: Commit) -> None:
        self.saving = (self.requests + 1, commit)
        replaces = self.head
        self.ask(lambda number: Save(number, asdict(commit), replaces))

    def _reach_the_end(self, group: ProcessGroup) -> None:
        if self.group is not group:
            return  # It has lost its group while it saved: it goes on in the next.
        self.page.stepping = 0
        if self.own.rank == 0 and self.saving is not None and self.saving[1].generation == self.own.generation:
            self.later(POLL_S, self._reach_the_end, group)
            return
        self.page.in_place = 0
        self.left = True
        self.later(self.sim.living.uniform(0.0, 0.4), self._exit_well)

    def _exit_well(self) -> None:
        self.sim.invariants.work.exited(self)
        self.die(0)
