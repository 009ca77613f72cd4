"""This node's workers, as its agent's loop sees them: the worker parent, the group, and what has become of both.

Not a second loop: the agent hands over events, this object folds them, and `describe` says what they mean for the
member's own state. A generation's workers are started when three things have come together, in any order: the decision
to run it, a warm parent, and the end of the generation before.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticrt.agent.joining import JoiningWorkers
from elasticrt.agent.network_interfaces import interface_of
from elasticrt.event_log import EventLog
from elasticrt.ipc.env import Copy, WorkerEnv
from elasticrt.ipc.messages import Copied, Damaged, Down, HandedOver, Ready, Reply, Step, Warm
from elasticrt.ipc.status_page import StatusPage
from elasticrt.liveness.hang_monitor import HangMonitor
from elasticrt.liveness.laggards import AtEnd, Laggards
from elasticrt.liveness.progress import Progress
from elasticrt.liveness.stacks import Stacks, keep
from elasticrt.liveness.stall_detector import STANDING_IN_PLACE_S
from elasticrt.rendezvous.decision import Me
from elasticrt.rendezvous.records import Generation, Seat
from elasticrt.settings import Settings
from elasticrt.workers import status_pages
from elasticrt.workers.failures import lost_peer, never_met
from elasticrt.workers.fork_server import ParentLost, WorkerParent, keeps_dying, note
from elasticrt.workers.group import GroupEnded, WorkerEnded, WorkerGroup, WorkerSaid, WorkerStarted, worker_environment
from elasticrt.workers.outcomes import WorkerOutcomes, copy_record, network, worker_env
from elasticrt.workers.snapshot_cache import SnapshotCache

if TYPE_CHECKING:
    from elasticrt.agent.edges import Edges

log = logging.getLogger(__name__)

EXIT_HOOKS_S = 0.1
"""What workers get between handing over and SIGKILL, for `finally`, `with` and exit hooks."""

LATE_S = 2.0
"""Of a worker that has not come back from its old generation so long after it got its new seat, if steps are to be
expected of it or it was meeting others, the stacks are kept ..."""

SEATED_S_MAX = 10.0
"""... and so long after it, it is ended: nobody waits for one that does not report."""


class Late(Stacks):
    """Stacks of workers that have not taken their new seats, `age_s` after these were given."""


PARENT_END_S = 5.0
PARENT_TRIES = 3
"""A worker parent that dies so often before it is warm will not come: what it imports is broken."""


class Supervisor:
    """The node's side of the agent. Used by the agent's thread only."""

    def __init__(
        self,
        settings: Settings,
        put: Callable[[Any], None],
        events: EventLog,
        say: Callable[[str], None],
        edges: Edges,
    ) -> None:
        self._clock = edges.clock
        self._take_stacks = edges.take_stacks
        self._close_file = edges.close_file
        self._settings = settings
        self._put = put
        self._events = events
        self._say = say
        self._env = worker_environment(os.environ, settings.workers)
        self._parent: WorkerParent | None = None
        self._group: WorkerGroup | None = None
        self._parent_deaths = 0
        self.ports = edges.store_ports()
        self._warm = False
        self._method = ""
        self._wanted: tuple[Generation, Seat] | None = None  # To be started as soon as it can be.
        self._started: tuple[Generation, Seat] | None = None
        self._names: tuple[str, ...] = ()
        self._newest = 0
        self._running = 0
        self._ends = WorkerOutcomes(0, 0)
        self._failed_at: float | None = None
        self._pids: dict[int, int] = {}
        self._kill_late: tuple[int, float] | None = None
        self._ranks: dict[int, int] = {}  # Global ranks by local rank.
        self._seated: set[int] = set()  # Local ranks of the running generation whose processes live.
        self._beside = JoiningWorkers(
            settings,
            self._start_beside,
            lambda: self._workers.kill(0),
            lambda rank: self._page_of(rank, 0, "in_place"),
            say,
        )
        self._late_at: float | None = None  # When to look for those that have not taken their new seat.
        self._seated_ns = 0
        self._holding = self._going = 0
        self._memory = SnapshotCache(edges.close_file)
        self.progress = Progress(self._pages, events, say, self._clock)
        self.laggards = Laggards(settings.hang_timeout_s, put, say)
        self.watch = HangMonitor(self._pages, lambda: self._workers, settings, put, events, say, edges.take_stacks)

    def open(self) -> None:
        """Start the worker parent: it imports what the workers need while the agents are still meeting."""
        self._parent = WorkerParent(self._put)
        command, settings = self._settings.command, self._settings
        self._parent.start(
            method=settings.start_method,
            env=self._env,
            directory=Path.cwd(),
            preload=settings.preload,
            kind=command.kind,
            target=command.argv[0],
        )
        if self._group is None:
            self._group = WorkerGroup(self._parent, self._put, logs=settings.logs)
        else:
            self._group.use(self._parent)

    def describe(self, me: Me) -> Me:
        """The member's own state as of now: what its key and its report should say."""
        record = me.record
        generation = self._started[0].number if self._started and self._running else 0
        wanted = {
            "warm": self._warm,
            "port": self.ports.port,
            "generation": generation,
            "seen": max(record.seen, me.known),
        }
        if any(getattr(record, name) != value for name, value in wanted.items()):
            record = record.model_copy(update=wanted)
        now = self._clock.monotonic()
        self.progress.look(self._running)
        self._look_after_workers(now)
        ready, has_state = self._ready_seated() + len(self._beside.ready()), self._has_state()
        if (ready, has_state) != (record.ready, record.has_state):
            record = record.model_copy(update={"ready": ready, "has_state": has_state})
        self._ends = replace(self._ends, ready=ready, has_state=has_state)
        report = self._ends.report(record.node, record.incarnation) if self._seated_as(record.incarnation) else None
        self.watch.look(now, held=bool(self._holding))
        if self._failed_at is None:
            self.watch.ask_if_stalled(now, self._running)
        return replace(
            me,
            record=record,
            started=self._newest,
            running=self._running,
            seated=self._started[0].number if self._started and self._seated_as(record.incarnation) else 0,
            report=report,
            failed_at=self._failed_at,
            copy=copy_record(self._ends.kept) if generation else None,
            standing_since=self.watch.standing_since(now) or self._unmet_since(now),
            pause_s=self.progress.pause_s,
            starting=(self._wanted is not None and not status_pages.building(self._pages()))
            or self.progress.starting(now),
            holding=self._holding,
            going=self._going,
        )

    def run(self, generation: Generation, seat: Seat, names: tuple[str, ...]) -> None:
        """Run a generation's workers, as soon as those of the one before are gone. `names`: its nodes, for events."""
        self._newest = generation.number
        self._wanted = (generation, seat)
        self._names = names
        self._failed_at = None
        self._holding = self._going = 0  # Whatever the old generation was asked for is over.
        self.progress.replaced(generation.number)
        if generation.in_place:
            self._wanted = None
            self.progress.remember()
            self._go_on(generation, seat)
            return
        self._beside.stop()
        if self._running:
            self.progress.remember()
            if len(self._ends.handed) == self._ends.workers or status_pages.building(self._pages()):
                # Their exit hooks get a moment; and who builds what the next generation needs as well may finish that.
                self._kill_late = (self._running, self._clock.monotonic() + EXIT_HOOKS_S)
            else:
                self._end_workers()
        self._start_if_possible()

    def kill_late(self, now: float) -> float | None:
        """Kill workers that had a reason to live on and do not end; until when they have time, None if nobody has."""
        if self._kill_late is None:
            return None
        generation, at = self._kill_late
        if generation == self._running and status_pages.building(self._pages()):
            at = max(at, now + EXIT_HOOKS_S)
            self._kill_late = (generation, at)
        if generation == self._running and now < at:
            return at
        self._kill_late = None
        if generation == self._running:  # Not the next one's, which may have started meanwhile.
            self._workers.kill(generation)
        return None

    def hold(self, handover: int) -> None:
        """Make all workers hold at the end of their present step, and note how far one of them has been let in."""
        self.progress.disturbed()
        self._holding, self._going = handover, 0
        self._ends = replace(self._ends, handover=handover, entered=status_pages.hold(self._pages(), self._clock))

    def go(self, step: int, *, save: bool) -> None:
        """Tell the workers the step after which they leave."""
        self._going = step
        status_pages.go(self._pages(), step, save=save)

    def release(self) -> None:
        """The handover was given up: let the workers go on."""
        self._holding = self._going = 0
        self.progress.undisturbed()
        self._ends = replace(self._ends, handover=0, entered=0)
        status_pages.release(self._pages())

    def fold(self, event: Warm | ParentLost | WorkerStarted | WorkerSaid | WorkerEnded | GroupEnded) -> None:  # noqa: PLR0912  One case per event.
        """Take note of an event, and do what follows from it on this node alone."""
        match event:
            case Warm():
                self._warm, self._parent_deaths, self._method = True, 0, event.method
                note(event, self._events)
                self._start_if_possible()
            case ParentLost():
                self._parent_lost(event)
            case WorkerStarted():
                self._worker_started(event)
            case WorkerSaid(message=Step() as step):
                self._stepped(event, step)
            case WorkerSaid(message=Copied() as copied):
                self._copied(event, copied)
            case WorkerSaid(message=Damaged() as found):
                self._damaged(event, found)
            case WorkerSaid(message=HandedOver() as left):
                self._handed_over(event, left)
            case WorkerSaid(message=Down() as down):
                self._lost_peer(event, down)
            case WorkerSaid(message=Ready()):
                self._events.write("ready", local_rank=event.local_rank)
            case WorkerEnded():
                self._worker_ended(event)
            case GroupEnded(generation=generation):
                if generation and generation == self._running:
                    self._running = 0
                    self._seated = set()
                    self._start_if_possible()
            case WorkerSaid():
                log.debug("rank %d said %s", event.rank, event.message)

    def reply(self, said: WorkerSaid, reply: Reply) -> None:
        """Answer a worker's request. May be called from another thread."""
        self._workers.reply(said.local_rank, reply, said.generation)

    def kill(self) -> None:
        """End the workers at once; nothing of theirs is reported, and what they left in memory is thrown away."""
        self._memory.close()
        self._wanted, self._started = None, None
        self._beside.stop()
        if self._running:
            self.progress.remember()
            self._workers.kill(self._running)

    def stop(self, grace_s: float, hurry: Callable[[], bool], number: int) -> None:
        """A signal, a grace time (cut short when `hurry` says so), SIGKILL. `hurry` also folds ends of workers."""
        self._wanted = None
        self._beside.stop()
        if not self._running:
            return
        if self._ends.handed >= self._seated and self._ready_seated():  # They wait for a seat, and get none.
            self._workers.dismiss(self._running)
            deadline = self._clock.monotonic() + grace_s
            while self._running and self._clock.monotonic() < deadline and not hurry():
                self._clock.sleep(0.005)
            if not self._running:
                return
        status_pages.end(self._pages())
        deadline = self._workers.terminate(grace_s, self._running, number)
        while self._running and self._clock.monotonic() < deadline and not hurry():
            self._clock.sleep(0.01)
        if self._running:
            self._workers.kill(self._running)

    def finish(self, grace_s: float, *, well: bool) -> None:
        """The run has ended, `well` or not: tell workers that still run, and wait for them a little while."""
        self._wanted = None
        self._beside.stop()
        if self._running:
            if self._failed_at is not None or (not well and self._settings.restart_grace_s):
                self._end_workers()
            elif not well:  # They may be failing of the same cause, and be writing about it.
                self._kill_late = (self._running, self._clock.monotonic() + EXIT_HOOKS_S)
            self._workers.release(self._running)
            deadline = max(self._clock.monotonic() + grace_s, self._kill_late[1] if self._kill_late else 0.0)
            while self._workers.pids(self._running) and (now := self._clock.monotonic()) < deadline:
                self.kill_late(now)
                self._clock.sleep(0.005)

    def close(self) -> None:
        """End everything that this node has started."""
        if self._parent is not None:
            # A parent that is still importing has no workers and reads no messages: it need not be waited for.
            self._parent.close(PARENT_END_S if self._warm else 0.0)
        if self._group is not None:
            self._group.close()
        self.ports.close()
        self._memory.close()

    @property
    def _workers(self) -> WorkerGroup:
        assert self._group is not None
        return self._group

    def _seated_as(self, incarnation: str) -> bool:
        return self._started is not None and self._started[1].incarnation == incarnation

    def _start_if_possible(self) -> None:
        if self._wanted is None or self._running or not self._warm:
            return
        generation, seat = self._wanted
        self._wanted, self._started = None, (generation, seat)
        self._running = generation.number
        self._seated = set(range(seat.workers))
        self._ranks = {rank: seat.rank_offset + rank for rank in self._seated}
        self._late_at = None
        self._ends = WorkerOutcomes(generation.number, seat.workers, unmet=self._ends.unmet)
        self.progress.began()
        self.watch.began()
        self._pids = {}
        self._holding = self._going = 0
        memory = generation.memory.as_copy() if generation.memory else None
        self._memory.renew(memory)
        self._ends = replace(self._ends, kept=self._memory.newest)
        listen = self.ports.take(generation.master_port, shared=self._method == "fork") if seat.index == 0 else None
        envs = [worker_env(self._settings, generation, seat, local_rank) for local_rank in range(seat.workers)]
        told = generation.model_dump(include={"number", "world_size", "cause", "kind", "restarts"})
        self._events.write("generation", **told, nodes=self._names, resume_step=envs[0].resume_step, index=seat.index)
        self._workers.start(
            generation.number,
            envs,
            self._settings.command,
            listen,
            {**self._env, **self._network()},
            Path.cwd(),
            {0: self._memory.descriptors(memory if seat.index == 0 else None)},
        )
        if listen is not None:
            self.ports.bind(self.ports.address)

    def _network(self) -> dict[str, str]:
        return network(interface_of(self.ports.address), self._env, told=self._settings.address is not None)

    # Going on in place.

    def _go_on(self, generation: Generation, seat: Seat) -> None:
        """Let workers that live go on in `generation`: those of the one before first, then those that have set up."""
        before = self._running
        lives = [(rank, before) for rank in sorted(self._seated) if self._page_of(rank, before, "in_place")]
        chosen = [*lives, *((rank, 0) for rank in self._beside.ready())][: seat.workers]
        self._started, self._running = (generation, seat), generation.number
        self._seated = {rank for rank, _ in chosen}
        # What has been copied in the generation before is still of this history: its last step may be done again.
        self._ends = WorkerOutcomes(generation.number, seat.workers, kept=self._memory.newest)
        self._pids, self._ranks = {}, {}
        self._seated_ns = self._clock.monotonic_ns()
        self._late_at = self._clock.monotonic() + LATE_S
        self.progress.began()
        told = generation.model_dump(include={"number", "world_size", "cause", "kind", "restarts", "in_place"})
        step = generation.resume.step if generation.resume else 0
        self._events.write("generation", **told, nodes=self._names, resume_step=step, index=seat.index)
        gone = seat.workers - len(chosen)
        pids = {**self._workers.pids(0), **self._workers.pids(before)}
        for place, (rank, was) in enumerate(sorted(chosen)):
            env = worker_env(self._settings, generation, seat, rank, place)
            first = env.rank == 0
            self._ranks[rank] = env.rank
            listen = self.ports.take(generation.master_port, shared=True) if first else None
            if self._workers.reseat(rank, was, env, listen):
                self._beside.let_in(rank)
                self._pids[env.rank] = pids.get(rank, 0)
            else:
                self._seated.discard(rank)
                gone += 1
            if first:
                self.ports.bind(self.ports.address)
        others = [rank for rank in self._page_ranks(before) if rank not in self._seated] if before else []
        if others:  # They could not come along.
            self._workers.kill(before, others)
        self.watch.began()
        self._events.write(
            "workers_started",
            generation=generation.number,
            ranks=sorted(self._pids),
            pids=[self._pids[rank] for rank in sorted(self._pids)],
        )
        if not self._seated:
            self._running = 0  # No end of a group will be told.
        if gone:
            self._fail_in_place(seat, f"{gone} of {seat.workers} workers had ended before they could go on")
        self._beside.attend(generation, seat.index)

    def _fail_in_place(self, seat: Seat, message: str) -> None:
        number = self._started[0].number if self._started else 0
        failure = lost_peer(
            rank=seat.rank_offset, local_rank=0, node=seat.node, generation=number, step=0, message=message
        )
        self._ends = replace(self._ends, failures=(*self._ends.failures, failure))
        self._failed_at = self._failed_at or self._clock.monotonic()

    def _lost_peer(self, event: WorkerSaid, down: Down) -> None:
        """A worker that lives has lost its group: somebody is gone, here or elsewhere."""
        if down.generation != self._running or self._started is None or self._failed_at is not None:
            return
        failure = lost_peer(
            rank=event.rank,
            local_rank=event.local_rank,
            node=self._settings.node,
            generation=self._running,
            step=down.step,
            message=down.error,
        )
        self._ends = replace(self._ends, failures=(*self._ends.failures, failure))
        self._failed_at = self._clock.monotonic()
        self.progress.disturbed()
        self.progress.remember()

    def _look_after_workers(self, now: float) -> None:
        """End those that do not come back, and start what is missing beside the training."""
        if self._late_at is not None and now >= self._late_at:
            age_s = now - self._seated_ns / 1e9
            self._late_at = None if age_s >= SEATED_S_MAX else now + SEATED_S_MAX - age_s
            late = [rank for rank in sorted(self._seated) if self._is_late(rank)]
            if late and self._late_at is not None:
                self._show(late, age_s)
            elif late and self._started is not None:
                text = f"{len(late)} of {len(self._seated)} workers did not take their new seats in {SEATED_S_MAX:g} s"
                self._say(f"{text}: they are ended")
                self._workers.kill(self._running, late)
                self._beside.ending |= set(late)
                self._seated -= set(late)
                self._fail_in_place(self._started[1], text)
                if not self._seated:  # What is being ended is of no generation any more: this node has none, and waits.
                    self._running = 0
        if self._can_start_beside():
            self._beside.start(self._seated, now)

    def _is_late(self, rank: int) -> bool:
        """Whether a worker should have taken its seat by now: not one that does something else than training."""
        began, joined = (self._page_of(rank, self._running, word) for word in ("init_at_ns", "joined_at_ns"))
        return began < self._seated_ns and (joined < began or self._page_of(rank, self._running, "stepping") != 0)

    def _unmet_since(self, now: float) -> float | None:
        """From when on workers in new seats have been waiting too long for their first step there; None: they have not.

        A node that dies between its seat and the meeting breaks no connection: the others wait for it.
        """
        if self._started is None or not self._started[0].in_place:
            return None
        begun = [page.init_at_ns for page in self._pages() if not page.step_at_ns]
        at = min((at for at in begun if at >= self._seated_ns), default=math.inf) / 1e9 + STANDING_IN_PLACE_S
        return at if now >= at else None

    def _show(self, late: Sequence[int], age_s: float) -> None:
        group, generation = self._workers, self._running
        pids = group.pids(generation)
        workers = {rank: (pids[rank], group.page(rank, generation)) for rank in late if rank in pids}
        blank = Late(generation, 0, age_s, False, {})
        self._take_stacks(workers, lambda number: group.signal(number, generation, list(workers)), self._put, blank)

    def _can_start_beside(self) -> bool:
        return self._wanted is None and self._warm and not self._ends.well

    def are_gone(self) -> bool:
        """Whether no worker is left, seated or setting up."""
        return not self._running and not self._beside.ending

    def attend(self, generation: Generation, index: int) -> None:
        """Workers go on in place in `generation`: what this node has no worker for sets up beside it."""
        self._beside.attend(generation, index)

    def _start_beside(self, envs: Sequence[WorkerEnv]) -> None:
        self._workers.start(0, envs, self._settings.command, None, {**self._env, **self._network()}, Path.cwd(), {})

    def alarms(self) -> list[float]:
        """When to look after the workers again."""
        again_at = self._beside.at if self._can_start_beside() else None
        return [at for at in (self._late_at, again_at) if at is not None]

    def _page_ranks(self, generation: int) -> list[int]:
        return sorted(self._workers.pids(generation))

    def _page_of(self, local_rank: int, generation: int, word: str) -> int:
        try:
            value: int = getattr(self._workers.page(local_rank, generation), word)
        except (KeyError, ValueError):
            return 0
        return value

    def _ready_seated(self) -> int:
        if not self._running or self._wanted is not None:
            return 0
        return sum(self._page_of(rank, self._running, "in_place") != 0 for rank in self._seated)

    def _has_state(self) -> bool:
        """Whether a worker that can go on has the state of its generation, or of the one before."""
        if not self._ready_seated():
            return False
        able = [rank for rank in self._seated if self._page_of(rank, self._running, "in_place")]
        return any(self._page_of(rank, self._running, "restored_at_ns") for rank in able)

    def _end_workers(self) -> None:
        """End what runs of a generation that is over: at once, or with a grace time where one was asked for."""
        grace_s = self._settings.restart_grace_s
        if not grace_s:
            self._workers.kill(self._running)
        elif self._kill_late is None or self._kill_late[0] != self._running:
            status_pages.end(self._pages())
            self._kill_late = (self._running, self._workers.terminate(grace_s, self._running))

    def _worker_started(self, event: WorkerStarted) -> None:
        if event.generation == 0:
            return
        self._pids[event.rank] = event.pid
        if event.generation == self._running and len(self._pids) == self._ends.workers:
            self.progress.started(event.generation, event.at_ns)
            ranks = sorted(self._pids)
            self._events.write(
                "workers_started", generation=event.generation, ranks=ranks, pids=[self._pids[rank] for rank in ranks]
            )

    def _stepped(self, event: WorkerSaid, step: Step) -> None:
        if event.generation != self._running:
            return
        if step.first and event.local_rank == min(self._seated, default=0):
            self.progress.stepped(event.generation, step)
        if event.rank == 0:
            self._events.write(
                "step", generation=event.generation, step=step.step, epoch=step.epoch, scalars=step.scalars
            )

    def _worker_ended(self, event: WorkerEnded) -> None:
        self._events.write("worker_ended", generation=event.generation, rank=event.rank, pid=event.pid, code=event.code)
        if event.generation == 0:
            self._beside.ended(event, self._clock.monotonic())
            return
        self._beside.ending.discard(event.local_rank)
        if event.generation == self._running:
            stepped = self.progress.step()
            self.progress.remember()  # While its page is among those that are looked at.
            self._seated.discard(event.local_rank)
        if event.generation != self._running or event.local_rank in self._ends.handed:
            return
        if event.failure is not None:
            self._ends = replace(self._ends, failures=(*self._ends.failures, event.failure))
            if self._failed_at is None:
                met = not never_met(event.failure) or stepped
                self._ends = replace(self._ends, unmet=0 if met else self._ends.unmet + 1)
                # The end of a generation that has been replaced, and was let finish a build, is nobody's news.
                self._failed_at = self._clock.monotonic() if self._wanted is None else None
                self.progress.disturbed()
                self.progress.remember()
                if not self._ready_seated():
                    self._end_workers()  # The others of this node can only fail as well, or hang.
                elif self._wanted is None and self._started is not None:
                    self.attend(self._started[0], self._started[1].index)
        elif event.code == 0:
            self._ends = replace(self._ends, well=(*self._ends.well, event.rank))

    def look_for_laggards(self, now: float, elsewhere: Sequence[str]) -> None:
        """Look for workers here that run on after others have ended; `elsewhere`: nodes where some or all have."""
        if self._started is None or not self._running or self._failed_at is not None:
            self.laggards.at = None
            return
        ended = [f"rank {rank}" for rank in self._ends.well] + [f"those on {node}" for node in elsewhere]
        if not ended:
            self.laggards.at = None
            return
        group, generation, ranks = self._workers, self._running, self._ranks
        pids = group.pids(generation)
        left = {n: (pid, group.page(n, generation)) for n, pid in pids.items() if ranks.get(n) not in self._ends.well}
        signal = functools.partial(group.signal, generation=generation)
        self.laggards.look(now, generation, ended, left, signal)

    def stalled(self, event: Stacks) -> None:
        """The stacks of workers that make no step, or are late; when that has been so for too long, they have failed.

        The next generation ends them. Were it done here, other nodes' would fail of that before they have shown theirs.
        """
        if isinstance(event, Late):
            ranks = {rank: self._ranks.get(rank, rank) for rank in event.lines}
            keep(event, ranks, self._settings.node, self._settings.run_dir)
            lines = {ranks[rank]: each for rank, each in event.lines.items()}
            self._events.write("late", generation=event.generation, age_s=round(event.age_s, 3), stacks=lines)
        elif event.generation == self._running and self._started is not None and self._failed_at is None:
            told = self.laggards.told if isinstance(event, AtEnd) else self.watch.told
            found = told(event, self._settings.node, self._ranks)  # type: ignore[arg-type]  # Each gets its own.
            if found:
                self._ends = replace(self._ends, failures=found)
                self._failed_at = self._clock.monotonic()
                self.progress.disturbed()

    def _copied(self, event: WorkerSaid, copied: Copied) -> None:
        """Keep it. Not after a failure: what has been reported then is what the others count on."""
        if event.fd < 0:
            return
        if event.generation != self._running or self._started is None or self._failed_at is not None:
            self._close_file(event.fd)
            return
        world_size = self._started[0].world_size
        self._memory.put(
            Copy(copied.step, copied.epoch, copied.size, copied.digest, world_size, copied.place), event.fd
        )
        self._ends = replace(self._ends, kept=self._memory.newest)
        self._events.write("copied", generation=event.generation, step=copied.step, bytes=copied.size)

    def _damaged(self, event: WorkerSaid, found: Damaged) -> None:
        """Nobody is to resume from this copy again; the next generation takes another node's, or the head."""
        if event.generation == self._running:
            self._memory.forget()
            self._ends = replace(self._ends, kept=self._memory.newest)
            self._events.write("copy_damaged", generation=event.generation, step=found.step, problem=found.problem)

    def _handed_over(self, event: WorkerSaid, left: HandedOver) -> None:
        if event.generation != self._running or self._started is None or not 0 < self._going <= left.step:
            return  # Of the generation before: it was seated in this one while the news was under way.
        self.progress.remember()
        self._ends = replace(self._ends, handed=self._ends.handed | {event.local_rank})

    def _pages(self) -> list[StatusPage]:
        """The pages of all workers of the running generation; none when one has gone already."""
        try:
            return [self._workers.page(rank, self._running) for rank in sorted(self._seated)] if self._running else []
        except KeyError:
            return []

    def _parent_lost(self, event: ParentLost) -> None:
        self._warm = False
        self._parent_deaths += 1
        self._say(event.reason)
        if self._parent_deaths > PARENT_TRIES:
            raise keeps_dying(self._settings.node, event.reason)
        self.open()
