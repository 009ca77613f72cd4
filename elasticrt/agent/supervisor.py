"""The agent's side of this node's workers: the worker parent, the worker group, and their state.

It has no loop of its own. The agent passes events in (`fold`), carries decisions out through it (`run`, `hold`, ...),
lets it act on time (`do_what_is_due`), and asks for its state (`describe`). A generation's workers start when three
things have happened, in any order: the decision to run it, a warm parent, and the end of the generation before.

The division of labour: `workers.group_state` is the state as a value, `workers.group` starts and signals processes,
`workers.worker_io` reads them, `agent.worker_pages` reads their status pages, `agent.seating` gives them their seats,
`agent.joining` remembers who sets up beside the training, `liveness.hang_monitor` notices hangs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticrt import events
from elasticrt.agent.joining import JoiningWorkers
from elasticrt.agent.node_check import NodeCheck
from elasticrt.agent.seating import Seating
from elasticrt.agent.worker_pages import WorkerPages
from elasticrt.event_log import EventLog
from elasticrt.ipc.env import Copy
from elasticrt.ipc.failure import Failure
from elasticrt.ipc.messages import Copied, Damaged, Left, Reply, Step, Warm
from elasticrt.ipc.time_bounds import EXIT_HOOKS_S, HOLD_SEEN_S, LATE_S, PARENT_END_S, SEATED_S_MAX
from elasticrt.liveness.hang_monitor import HangMonitor
from elasticrt.liveness.progress import Progress
from elasticrt.liveness.stacks import Stacks
from elasticrt.rendezvous.decision import Me
from elasticrt.rendezvous.records import Generation, Seat
from elasticrt.settings import Settings
from elasticrt.workers.environment import beside_env
from elasticrt.workers.failures import lost_peer, stopped
from elasticrt.workers.fork_server import ParentLost, WorkerParent, keeps_dying, note
from elasticrt.workers.gpu_failures import suspects_gpu
from elasticrt.workers.group import WorkerGroup
from elasticrt.workers.group_state import GroupState
from elasticrt.workers.worker_io import GroupEnded, WorkerEnded, WorkerSaid, WorkerStarted

if TYPE_CHECKING:
    from elasticrt.agent.edges import Edges

log = logging.getLogger(__name__)

PARENT_TRIES = 3
"""A worker parent that dies so often before it is warm will not come: what it imports is broken."""


class Supervisor:
    """The workers' side of the agent. Used by the agent's thread only.

    Args:
        settings: the agent's.
        put: takes events that come back to `fold` and `stalled`, from any thread.
        event_log: the node's event log.
        say: tells people.
        edges: all that is not the agent's own state: clock, files, sockets.
    """

    def __init__(
        self,
        settings: Settings,
        put: Callable[[Any], None],
        event_log: EventLog,
        say: Callable[[str], None],
        edges: Edges,
    ) -> None:
        self._clock = edges.clock
        self._close_file = edges.close_file
        self._settings = settings
        self._put = put
        self._events = event_log
        self._say = say
        self._parent: WorkerParent | None = None
        self._parent_deaths = 0
        self._method = ""  # How the parent starts workers; "" until it can.
        self._group: WorkerGroup | None = None
        self._state = GroupState()
        self._newest = 0  # The newest generation that was decided to run,
        self._wanted: tuple[Generation, Seat] | None = None  # and it, if its workers are still to be started.
        self._names: tuple[str, ...] = ()
        self._leaves = False  # Whether this node's workers are ended because it leaves.
        self._kill_late: tuple[int, float] | None = None  # Which generation's workers are killed when.
        self._late_at: float | None = None  # When to look for those that have not taken their new seat.
        self._joining = JoiningWorkers()
        self._check = NodeCheck(settings.options.node_check, say, edges.clock)
        self.seating = Seating(settings, edges)
        self.pages = WorkerPages(lambda: self._workers)
        self.progress = Progress(lambda: self.pages.of(self._state), event_log, edges.clock)
        self.hangs = HangMonitor(settings, put, event_log, say, take=edges.take_stacks, state_of=edges.state_of)

    def open(self) -> None:
        """Start the worker parent: it imports what the workers need while the agents are still meeting."""
        command, settings = self._settings.command, self._settings
        self._parent = WorkerParent(
            method=settings.start_method,
            env=self.seating.env,
            directory=Path.cwd(),
            preload=settings.options.preload,
            kind=command.kind,
            target=command.argv[0],
        )
        if self._group is None:
            self._group = WorkerGroup(self._parent, self._put, logs=settings.logs)
        else:
            self._group.use(self._parent)

    # What is so.

    def describe(self, me: Me, now: float) -> Me:
        """The member's own state as of now: what its key and its report should say. Changes nothing."""
        state, able = self._state, self._able()
        ready = len(able) + len(self.pages.ready_beside(self._joining.ranks))
        has_state = self.pages.have_state(state, able)
        seated = state.is_of(me.record.incarnation)
        generation = state.number if state.generation is not None and state.running else 0
        wanted = {
            # Workers of its other GPUs that can go on in place do.
            "warm": bool(self._method) and (self._check.is_fit or bool(able)),
            "port": self.seating.ports.port,
            "generation": generation,
            "seen": max(me.record.seen, me.known),
            "ready": ready,
            "has_state": has_state,
        }
        changed = {name: value for name, value in wanted.items() if getattr(me.record, name) != value}
        kept = self.seating.memory.newest
        return replace(
            me,
            record=me.record.model_copy(update=changed) if changed else me.record,
            started=self._newest,
            running=state.number if state.running else 0,
            seated=state.number if seated else 0,
            report=state.report(kept=kept, ready=ready, has_state=has_state) if seated else None,
            failed_at=state.failed_at,
            copy=kept if generation else None,
            standing_since=self.hangs.standing_since(now) or self.pages.unmet_since(state, now),
            pause_s=self.progress.pause_s,
            starting=(self._wanted is not None and not self.pages.building(state)) or self.progress.starting(now),
            holding=state.holding,
            going=state.going,
        )

    def alarms(self) -> list[float]:
        """When something may be due again."""
        again_at = self._joining.at if self._can_start_beside() else None
        late = [at for at in (self._late_at, again_at, self._check.alarm()) if at is not None]
        return [*late, *([self._kill_late[1]] if self._kill_late else []), *self.hangs.wake_at()]

    def doing(self) -> str:
        """What its workers do before their first step, in words; "" when they train, or there are none."""
        if self._wanted is not None:
            return "ending the workers of before" if self._method else "importing torch"
        return self.pages.doing(self._state)

    def are_gone(self) -> bool:
        """Whether no worker is left, seated or setting up."""
        return not self._state.running and not self._joining.ending

    def _able(self) -> list[int]:
        """Local ranks that take part and can go on in another generation without ending."""
        return [] if self._wanted is not None else self.pages.able(self._state)

    def _can_start_beside(self) -> bool:
        return self._wanted is None and bool(self._method) and self._check.is_fit and not self._state.well

    @property
    def _workers(self) -> WorkerGroup:
        assert self._group is not None
        return self._group

    # What is due.

    def do_what_is_due(self, now: float, elsewhere: Sequence[str]) -> None:
        """End workers that are late at `now`, start those that are missing, look for hangs.

        `elsewhere`: nodes where some workers of the generation have ended.
        """
        self._check.look(now)
        self._kill_those_late_to_end(now)
        self.progress.look(self._state.number, now)
        self._end_those_late_to_come(now)
        self._start_missing(now)
        self.hangs.look(now, self.pages.of(self._state), held=bool(self._state.holding))
        self._end_stopped(now)
        if self._state.failed_at is None and self._state.running and not self._state.holding:
            self.hangs.look_closer(now, self.pages.of(self._state), self._workers, self._state.number)
        if self._state.failed_at is None and self._state.running:
            self.hangs.ask_if_stalled(now, self._workers, self._state.number)
        self.look_for_laggards(now, elsewhere)

    def _kill_those_late_to_end(self, now: float) -> None:
        """Kill workers that had a reason to live on a while and do not end."""
        if self._kill_late is None:
            return
        generation, at = self._kill_late
        if not self._state.running or generation != self._state.number:  # The next one's may have started meanwhile.
            self._kill_late = None
        elif self.pages.building(self._state):
            self._kill_late = (generation, max(at, now + EXIT_HOOKS_S))
        elif now >= at:
            self._kill_late = None
            self._workers.kill(generation)

    def _end_those_late_to_come(self, now: float) -> None:
        """End those that do not take the seats that they were given."""
        state = self._state
        if self._late_at is None or now < self._late_at:
            return
        age_s = now - state.seated_ns / 1e9
        self._late_at = None if age_s >= SEATED_S_MAX else now + SEATED_S_MAX - age_s
        late = [rank for rank in sorted(state.seated) if self.pages.is_late(state, rank)]
        if late and self._late_at is not None:
            self.hangs.ask(self._workers, Stacks("late", state.number, 0, age_s, False), late)
        elif late and state.seat is not None:
            text = f"{len(late)} of {len(state.seated)} workers did not take their new seats in {SEATED_S_MAX:g} s"
            self._say(f"{text}: they are ended")
            self._give_up(late)
            self._fail_in_place(state.seat, text)

    def _end_stopped(self, now: float) -> None:
        """End those that a signal has stopped while others wait for them."""
        state = self._state
        if not state.running or state.seat is None or state.hung:
            return
        pids = {rank: pid for rank, pid in self._workers.pids(state.number).items() if rank in state.seated}
        found = self.hangs.stopped(now, pids, lambda rank: self.pages.is_awaited(state, rank))
        if not found:
            return
        self.progress.remember()
        ranks = [state.ranks[rank] for rank in found]
        failure = stopped(ranks, node=state.seat.node, generation=state.number, step=self.progress.step())
        self._say(f"{failure.summary}: ended")
        self._give_up(found)
        self._failed(failure)

    def _give_up(self, local_ranks: Sequence[int]) -> None:
        """End workers that live and are of no use. What is being ended is of no generation any more."""
        self._workers.kill(self._state.number, local_ranks)
        self._joining.ending |= set(local_ranks)
        self._state = self._state.lost(frozenset(local_ranks))

    def _start_missing(self, now: float) -> None:
        """Start beside the training what this node has no worker for."""
        if not self._can_start_beside():
            return
        missing = self._joining.start(self._settings.workers, self._state.seated, now)
        if missing and self._joining.beside is not None:
            envs = [beside_env(self._settings, *self._joining.beside, rank) for rank in missing]
            self.seating.start_beside(self._workers, envs)

    def asks_for_positions(self, now: float) -> int:
        """The generation in which it is time `now` to ask the other nodes about their workers; 0: it is not.

        The node of rank 0 asks.
        """
        state = self._state
        due, first = self.hangs.is_to_ask(now), state.seat is not None and state.seat.index == 0
        self.hangs.look_at_waits(now, state.ranks, self.pages.of(state))
        return state.number if due and first and state.running else 0

    def blame(self, generation: int, nodes: Mapping[str, str], others: Mapping[str, object]) -> None:
        """The other nodes have said where their workers are in `generation`, and how long these wait for others.

        `nodes`: the addresses of all nodes.
        """
        if self._state.running and generation == self._state.number:
            said = {node: each for node, each in others.items() if isinstance(each, dict)}
            said = {node: each for node, each in said.items() if each.get("generation") == generation}
            self.hangs.blame(generation, nodes, said)
            self.hangs.compare(generation, said)

    def saving_s(self) -> float:
        """For how long, in seconds, the newest checkpoint of this node's workers has been under way; 0.0: not known."""
        begun_ns = max((page.saving_ns for page in self.pages.of(self._state)), default=0)
        return max(0, self._clock.monotonic_ns() - begun_ns) / 1e9 if begun_ns else 0.0

    def look_for_laggards(self, now: float, elsewhere: Sequence[str]) -> None:
        """Look at `now` for workers here that run on after others; `elsewhere`: nodes where some or all have ended."""
        state = self._state
        if self._group is None:
            return
        ended = [f"rank {rank}" for rank in state.well] + [f"those on {node}" for node in elsewhere]
        concerned = state.generation is not None and state.running and state.failed_at is None and bool(ended)
        pids = self._workers.pids(state.number) if concerned else {}
        left = [rank for rank in pids if state.ranks.get(rank) not in state.well]
        self.hangs.ask_if_waited_for(now, self._workers, state.number, ended, left)

    # What was decided.

    def attend(self, generation: Generation, index: int) -> None:
        """Workers go on in place in `generation`, where this node has `index`: what it lacks sets up beside them."""
        if self._state.hung and self._state.running and generation.number > self._state.number:
            self._end_workers()
        self._joining.attend(generation, index)

    def run(self, generation: Generation, seat: Seat, names: tuple[str, ...]) -> None:
        """Run `generation` in this node's `seat`, as soon as the one before is gone. `names`: its nodes, for events."""
        self._newest, self._names = generation.number, names
        self._state = self._state.replaced()
        self.progress.replaced(generation.number)
        if generation.in_place:
            self._wanted = None
            self.progress.remember()
            self._go_on(generation, seat)
            return
        self._wanted = (generation, seat)
        self._stop_joining()
        if self._state.running:
            self.progress.remember()
            if len(self._state.handed) == len(self._state.ranks) or self.pages.building(self._state):
                # Their exit hooks get a moment; and who builds what the next generation needs as well may finish that.
                self._kill_late = (self._state.number, self._clock.monotonic() + EXIT_HOOKS_S)
            else:
                self._end_workers()
        self._start_if_possible()

    def hold(self, handover: int) -> None:
        """Make all workers hold at the end of their step, for `handover`, and note how far they have been let in."""
        self.progress.disturbed()
        pages = self.pages.of(self._state)
        for page in pages:
            page.go = 0
            page.stop = 1
        self._clock.sleep(HOLD_SEEN_S)
        entered = [page.entered for page in pages]  # 0 where one is in no Loop: such a script cannot hold.
        furthest = max(entered) if entered and all(entered) else 0
        self._state = replace(self._state, holding=handover, entered=furthest, going=0)

    def go(self, step: int, *, save: bool) -> None:
        """Tell workers that hold the `step` after which they leave; with `save` rank 0 commits a checkpoint first."""
        self._state = replace(self._state, going=step)
        for page in self.pages.of(self._state):
            page.save = int(save)
            page.go = step

    def release(self) -> None:
        """The handover was given up: let the workers go on."""
        self.progress.undisturbed()
        self._state = replace(self._state, holding=0, entered=0, going=0)
        for page in self.pages.of(self._state):
            page.stop = page.go = 0

    def reply(self, said: WorkerSaid, reply: Reply) -> None:
        """Answer, with `reply`, the request that a worker has `said`. May be called from another thread."""
        self._workers.reply(said.local_rank, reply, said.generation)

    # Ends.

    def kill(self) -> None:
        """End the workers at once; nothing of theirs is reported, and what they left in memory is thrown away."""
        self.seating.memory.close()
        self._wanted = None
        self._stop_joining()
        if self._state.running:
            self.progress.remember()
            self._workers.kill(self._state.number)
        self._state = replace(self._state, generation=None, seat=None)

    def stop(self, grace_s: float, hurry: Callable[[], bool], number: int) -> None:
        """Signal `number`, then `grace_s` seconds (until `hurry`, which also folds ends of workers), then SIGKILL."""
        self._wanted, self._leaves = None, True
        self._stop_joining()
        generation = self._state.number
        if self._state.handed >= self._state.seated and self._able():  # They wait for a seat, and get none.
            self._workers.release(generation)
            self._wait_for_end(self._clock.monotonic() + grace_s, hurry)
        if self._state.running:
            self._announce_end()
            self._wait_for_end(self._workers.terminate(grace_s, generation, number), hurry)
        if self._state.running:
            self._workers.kill(generation)

    def _wait_for_end(self, deadline: float, hurry: Callable[[], bool]) -> None:
        while self._state.running and self._clock.monotonic() < deadline and not hurry():
            self._clock.sleep(0.005)

    def finish(self, grace_s: float, *, well: bool) -> None:
        """The run has ended, `well` or not: tell workers that still run, and wait for them for `grace_s` seconds."""
        self._wanted = None
        self._stop_joining()
        self.progress.tell()
        if not self._state.running:
            return
        generation = self._state.number
        if self._state.failed_at is not None or (not well and self._settings.restart_grace_s):
            self._end_workers()
        elif not well:  # They may be failing of the same cause, and be writing about it.
            self._kill_late = (generation, self._clock.monotonic() + EXIT_HOOKS_S)
        self._workers.release(generation)
        deadline = max(self._clock.monotonic() + grace_s, self._kill_late[1] if self._kill_late else 0.0)
        while self._workers.pids(generation) and (now := self._clock.monotonic()) < deadline:
            self._kill_those_late_to_end(now)
            self._clock.sleep(0.005)
        self.progress.tell()

    def close(self) -> None:
        """End everything that this node has started."""
        self.progress.tell()
        if self._parent is not None:
            # A parent that is still importing has no workers and reads no messages: it need not be waited for.
            self._parent.close(PARENT_END_S if self._method else 0.0)
        if self._group is not None:
            self._group.close()
        self.seating.close()
        self._check.close()

    def _end_workers(self) -> None:
        """End what runs of a generation that is over: at once, or with a grace time where one was asked for."""
        grace_s, generation = self._settings.restart_grace_s, self._state.number
        if not grace_s:
            self._workers.kill(generation)
        elif self._kill_late is None or self._kill_late[0] != generation:
            self._announce_end()
            self._kill_late = (generation, self._workers.terminate(grace_s, generation))

    def _announce_end(self) -> None:
        """Workers that leave a signal from elsewhere to their agent obey the next one."""
        for page in self.pages.of(self._state):
            page.ending = 1

    def _stop_joining(self) -> None:
        if self._joining.stop():
            self._workers.kill(0)

    # Seats.

    def _start_if_possible(self) -> None:
        if self._wanted is None or self._state.running or not self._method:
            return
        (generation, seat), self._wanted = self._wanted, None
        self._state, self._late_at = self._state.started(generation, seat), None
        self.progress.began()
        self.hangs.began()
        copy, resume = generation.memory, generation.resume
        self._tell_generation(generation, seat, copy.step if copy else resume.reached if resume else 0)
        self.seating.start(self._workers, generation, seat, shared=self._method == "fork")

    def _go_on(self, generation: Generation, seat: Seat) -> None:
        """Let workers that live go on in `generation`: those of the one before first, then those that have set up."""
        before, group = self._state, self._workers
        number = before.number if before.running else 0
        lives = [(rank, number) for rank in self.pages.able(before)]
        chosen = [*lives, *((rank, 0) for rank in self.pages.ready_beside(self._joining.ranks))][: seat.workers]
        pids = {**group.pids(0), **group.pids(number)}
        now_ns = self._clock.monotonic_ns()
        self._late_at = self._clock.monotonic() + LATE_S
        self.progress.began()
        self.hangs.began()
        self._tell_generation(generation, seat, generation.resume.step if generation.resume else 0)
        ranks = self.seating.reseat(group, generation, seat, chosen)
        for rank in ranks:
            self._joining.let_in(rank)
        by_rank = {global_rank: pids.get(rank, 0) for rank, global_rank in sorted(ranks.items())}
        self._state = before.went_on(generation, seat, ranks, by_rank, now_ns)
        others = [rank for rank in sorted(group.pids(number)) if rank not in ranks] if number else []
        if others:  # They could not come along.
            group.kill(number, others)
        self._tell_started()
        if len(ranks) < seat.workers:
            lost = seat.workers - len(ranks)
            self._fail_in_place(seat, f"{lost} of {seat.workers} workers had ended before they could go on")
        self.attend(generation, seat.index)

    def _fail_in_place(self, seat: Seat, message: str) -> None:
        failure = lost_peer(rank=seat.rank_offset, node=seat.node, message=message)
        self._state = self._state.failed(failure, self._clock.monotonic())

    def _tell_generation(self, generation: Generation, seat: Seat, resume_step: int) -> None:
        begun = events.Generation(
            number=generation.number,
            world_size=generation.world_size,
            cause=generation.cause,
            kind=generation.kind,
            restarts=generation.restarts.spent,
            nodes=self._names,
            resume_step=resume_step,
            index=seat.index,
            in_place=generation.in_place,
        )
        self._events.write(begun)

    def _tell_started(self) -> None:
        pids = self._state.pids
        ranks = tuple(sorted(pids))
        self._events.write(events.WorkersStarted(self._state.number, ranks, tuple(pids[rank] for rank in ranks)))

    # What happens.

    def fold(self, event: Warm | ParentLost | WorkerStarted | WorkerSaid | WorkerEnded | GroupEnded) -> None:
        """Take note of an event, and do what follows from it on this node alone."""
        match event:
            case Warm():
                self._parent_deaths, self._method = 0, event.method
                note(event, self._events)
                self._start_if_possible()
            case ParentLost():
                self._parent_lost(event)
            case WorkerStarted():
                self._worker_started(event)
            case WorkerSaid():
                self._worker_said(event)
            case WorkerEnded():
                self._worker_ended(event)
            case GroupEnded(generation=generation):
                if generation and generation == self._state.number and self._state.running:
                    self._state = replace(self._state, running=False, seated=frozenset())
                    self._start_if_possible()

    def _worker_said(self, event: WorkerSaid) -> None:
        match event.message:
            case Copied() as copied:
                self._copied(event, copied)
            case Left(generation=0):
                self._events.write(events.Ready(local_rank=event.local_rank))
            case Left() as left:
                self._left(left, event)
            case Step() as step if self._is_current(event):
                self._stepped(event, step)
            case Damaged() as found if self._is_current(event):
                # No node is to resume from this copy again; the next generation takes another one's, or the head.
                self.seating.memory.forget()
                self._events.write(events.CopyDamaged(event.generation, found.step, found.problem))

    def _is_current(self, event: WorkerSaid | WorkerEnded | WorkerStarted | Stacks) -> bool:
        return self._state.running and event.generation == self._state.number

    def stalled(self, event: Stacks) -> None:
        """The stacks of workers that make no step, or are late; when that has been so for too long, they have failed.

        The next generation ends them. Were it done here, other nodes' would fail of that before they have shown theirs.
        """
        state = self._state
        if event.why == "closer":
            if self._is_current(event):
                pages = dict(zip(sorted(state.seated), self.pages.of(state), strict=False))
                self.hangs.placed(event, state.ranks, pages, self._workers.pids(state.number))
            return
        if event.why != "late" and (not self._is_current(event) or state.seat is None or state.failed_at is not None):
            return
        failure = self.hangs.report(event, state.ranks)
        if failure is not None:
            self._state = replace(state, failures=(failure,), failed_at=self._clock.monotonic())
            self.progress.disturbed()

    def _parent_lost(self, event: ParentLost) -> None:
        self._method = ""
        self._parent_deaths += 1
        self._say(event.reason)
        if self._parent_deaths > PARENT_TRIES:
            raise keeps_dying(self._settings.node, event.reason)
        self.open()

    def _worker_started(self, event: WorkerStarted) -> None:
        if not self._is_current(event):
            return
        self._state = replace(self._state, pids={**self._state.pids, event.rank: event.pid})
        if len(self._state.pids) == len(self._state.ranks):
            self.progress.started(event.generation, event.at_ns)
            self._tell_started()

    def _stepped(self, event: WorkerSaid, step: Step) -> None:
        if step.first and event.local_rank == min(self._state.seated, default=0):
            self.progress.stepped(event.generation, step)
        if event.rank == 0:
            self._events.write(events.Step(event.generation, step.step, step.epoch, step.scalars))

    def _copied(self, event: WorkerSaid, copied: Copied) -> None:
        """Keep it. Not after a failure: what has been reported then is what the others count on.

        But where workers live on, no copy is counted on; and those whose collective in a pause has lost a peer leave
        their newest step behind after that one's end was told.
        """
        generation = self._state.generation
        if event.fd < 0:
            return
        counted_on = self._state.failed_at is not None and not self._able()
        if not self._is_current(event) or generation is None or counted_on:
            self._close_file(event.fd)
            return
        copy = Copy(copied.step, copied.epoch, copied.size, copied.digest, generation.world_size, copied.place)
        self.seating.memory.put(copy, event.fd)
        self._events.write(events.Copied(event.generation, copied.step, copied.size))

    def _left(self, left: Left, event: WorkerSaid) -> None:
        """A worker that lives has handed over, or lost its group: another one has ended, here or elsewhere."""
        state = self._state
        # It may have been seated in another generation while the news was under way.
        if not state.running or left.generation != state.number or state.seat is None:
            return
        if left.error and state.failed_at is None:
            failure = lost_peer(rank=event.rank, node=self._settings.node, message=f"lost its group: {left.error}")
            self._state = state.failed(failure, self._clock.monotonic())
            self.progress.disturbed()
            self.progress.remember()
        elif not left.error and 0 < state.going <= left.step:
            self.progress.remember()
            self._state = replace(state, handed=state.handed | {event.local_rank})

    def _failed_by_itself(self, event: WorkerEnded) -> bool:
        """Whether nothing else explains that it has ended: no handover, no end that this agent wanted."""
        if event.generation == 0:
            return event.local_rank in self._joining.ranks
        wanted = self._wanted is not None or self._leaves or event.local_rank in self._state.handed
        first = all(failure.collateral for failure in self._state.failures)  # Then the others of this node are ended.
        return self._is_current(event) and first and not wanted

    def _worker_ended(self, event: WorkerEnded) -> None:
        ended = events.WorkerEnded(event.generation, event.rank, event.pid, event.code)
        if event.failure is not None and self._failed_by_itself(event):
            ended = replace(ended, failure=event.failure.summary, collateral=event.failure.collateral)
        self._events.write(ended)
        if event.failure is not None and suspects_gpu(event.failure.summary):
            self._check.doubt(event.failure.summary)
        if event.generation == 0:
            wait_s = self._joining.ended(event.local_rank, self._clock.monotonic())
            if wait_s is not None:
                what = event.failure.summary if event.failure is not None else f"exit code {event.code}"
                again = f"another try in {wait_s:g} s"
                self._say(f"a worker that was to join failed while it set up: {what}; {again}")
            return
        self._joining.ending.discard(event.local_rank)
        if not self._is_current(event):
            return
        stepped = self.progress.step() is not None
        self.progress.remember()  # While its page is among those that are looked at.
        self._state = replace(self._state, seated=self._state.seated - {event.local_rank})
        if event.local_rank in self._state.handed:
            return
        if event.failure is None:
            if event.code == 0:
                self._state = replace(self._state, well=(*self._state.well, event.rank))
            return
        first, failure = self._state.failed_at is None, event.failure
        if first:
            self._state = replace(self._state, unmet=self._state.unmet + 1 if failure.unmet and not stepped else 0)
        self._failed(failure)

    def _failed(self, failure: Failure) -> None:
        """A worker of the present generation has failed; the first failure ends it."""
        first = self._state.failed_at is None
        # The end of a generation that has been replaced, and was let finish a build, is no news.
        self._state = self._state.failed(failure, self._clock.monotonic() if self._wanted is None else None)
        if not first:
            return
        self.progress.disturbed()
        self.progress.remember()
        if not self._able():
            self._end_workers()  # The others of this node can only fail as well, or hang.
        elif self._state.generation is not None and self._state.seat is not None:
            self.attend(self._state.generation, self._state.seat.index)
