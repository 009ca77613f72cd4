"""Supervises this node's workers: decides when to start, re-seat and end them, and describes their state to the agent.

The agent passes events to `fold`, carries out decisions by `run`, `hand_over` and so on, calls `do_what_is_due` in
each turn of its loop, and reads the state by `describe`. New workers of a generation start after three things have
happened, in any order: the agent has decided to run the generation, the worker parent is warm, and the workers of the
generation before have ended.

The supervisor delegates to these parts:

* `workers.group_state`: the state of the workers, as an immutable value.
* `workers.group`: starts processes and sends them signals.
* `workers.worker_io`: reads the workers' output and messages.
* `agent.worker_pages`: reads the workers' status pages.
* `agent.seating`: gives workers their seats.
* `agent.joining`: keeps account of the workers that set up beside the training.
* `liveness.hang_monitor`: notices hangs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
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
from elasticrt.ipc.failure import Failure, first_cause, in_words
from elasticrt.ipc.messages import Copied, CopyDamaged, LeftGeneration, Reply, Step, Unsaved, Warm
from elasticrt.ipc.time_bounds import (
    EXIT_HOOKS_S,
    HOLD_SEEN_S,
    LATE_S,
    PARENT_END_S,
    SEATED_S_MAX,
    SEATED_WAITING_S_MAX,
)
from elasticrt.liveness.culprit_search import question_times
from elasticrt.liveness.hang_monitor import HangMonitor
from elasticrt.liveness.progress import Progress
from elasticrt.liveness.stacks import Stacks
from elasticrt.liveness.watched_workers import WatchedWorkers
from elasticrt.rendezvous.decide import RANK_0_GRACE_S
from elasticrt.rendezvous.decision import Go, Hold, Me, ReleaseHold
from elasticrt.rendezvous.records import Generation, Seat
from elasticrt.settings import Settings
from elasticrt.story.sentences import unsaved
from elasticrt.workers.failures import lost_peer, stopped_failure
from elasticrt.workers.fork_server import ParentLost, WorkerParent, parents_keep_dying, write_parent_warm
from elasticrt.workers.gpu_failures import suspects_gpu
from elasticrt.workers.group_state import GroupState
from elasticrt.workers.worker_io import GroupEnded, GroupEvent, WorkerEnded, WorkerMessage, WorkerStarted

if TYPE_CHECKING:
    from elasticrt.agent.edges import Edges

log = logging.getLogger(__name__)

PARENT_TRIES = 3
"""The number of worker parents that may die one after the other before one is warm. A parent that dies more often never
becomes warm: torch or a preloaded module is broken."""


class Supervisor:
    """The supervisor of one node's workers. Only the agent's main thread uses it.

    Args:
        settings: the agent's settings.
        put: queues an event for the agent's loop, which passes it to `fold`. Any thread may call `put`.
        event_log: the node's event log.
        say: prints a line for people.
        edges: clock, processes, files and sockets.

    Attributes:
        group: the worker processes.
        seating: gives workers their seats, listening sockets and saved states.
        pages: reads the workers' status pages.
        progress: the workers' last steps, and the phases of a recovery.
        hangs: notices workers that make no progress.
        misfit: the failure of a worker whose script differs from the run's; None without one. After a misfit this node
            starts no more workers beside the training.
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
        self._events = event_log
        self._say = say
        self._parent: WorkerParent | None = None
        self._parent_deaths = 0
        # How the warm parent starts workers, "fork" or "exec"; "" while no parent is warm.
        self._method = ""
        self._state = GroupState()
        # The newest generation that the agent has decided to run, and its nodes as far as this node knows them.
        self._newest = 0
        self._names: tuple[str, ...] = ()
        # That generation and this node's seat, until its workers are started.
        self._pending: tuple[Generation, Seat] | None = None
        # Whether the workers are being ended because this node leaves the run.
        self._is_leaving = False
        # When to kill the workers, as their time to end by themselves is then over; None if they are not ending.
        self._kill_at: float | None = None
        # By process id: the failure to report for a worker that is killed because a signal had stopped it. Its own exit
        # code would only tell of this agent's SIGKILL.
        self._frozen: dict[int, Failure] = {}
        # When to look for workers that have not taken their new seats; None if there is nothing to look for.
        self._check_seats_at: float | None = None
        # Whether a worker that is late for its new seat is spared while it uses processor time, unless its node leaves.
        self._spares_busy = False
        self._joining = JoiningWorkers()
        self.misfit: Failure | None = None
        self._check = NodeCheck(settings.options.node_check, say, edges.clock)
        self.group = edges.worker_group(put, options=settings.options)
        self.seating = Seating(settings, self.group, edges)
        self.pages = WorkerPages(self.group)
        self.progress = Progress(lambda: self.pages.of_seated(self._state), event_log, edges.clock)
        watched = WatchedWorkers(
            settings, event_log, say, put,
            group=self.group, state=lambda: self._state, pages=lambda: self.pages.of_seated(self._state),
            take_stacks=edges.take_stacks, state_of=edges.state_of, cpu_s=edges.cpu_s,
        )  # fmt: skip
        self._watched, self.hangs = watched, HangMonitor(watched)

    def open(self) -> None:
        """Start the worker parent. It imports torch and the preloaded modules while the agents are still meeting."""
        command, settings = self._settings.command, self._settings
        self._parent = WorkerParent(
            method=settings.start_method,
            env=self.seating.env,
            directory=Path.cwd(),
            preload=settings.options.preload,
            kind=command.kind,
            target=command.argv[0],
        )
        self.group.set_parent(self._parent)

    # State.

    def describe(self, me: Me, now: float) -> Me:
        """Return `me` with the workers' state at `now`: what the member's key and its report should say.

        This method changes nothing and sends nothing.
        """
        state, able = self._state, self._able_in_place()
        beside = len(self.pages.ready_beside(self._joining.ranks))
        living = {
            "ready": len(able) + beside,
            "new": beside,
            "has_state": self.pages.have_state(state, able),
        }
        # A member that was left out comes back with a new incarnation. A seat of an earlier one no longer counts.
        seated = state.seat is not None and state.seat.incarnation == me.record.incarnation
        generation = state.number if state.generation is not None and state.running else 0
        says = {
            # A node with a failed GPU starts no worker, but its workers on the other GPUs may go on in place.
            "warm": bool(self._method) and (self._check.is_fit or bool(able)),
            "port": self.seating.ports.port,
            "generation": generation,
            "seen": max(me.record.seen, me.highest_generation),
            **living,
        }
        kept = self.seating.memory.newest
        return replace(
            me,
            record=me.record.model_copy(update=says),
            started_generation=self._newest,
            # Once all workers here have ended after a failure, they no longer count as running, also while the kernel
            # still takes their processes apart: the agreement on the next generation does not wait for that.
            running_generation=state.number if state.running and (state.seated or state.failed_at is None) else 0,
            seated_generation=state.number if seated else 0,
            report=state.report(kept=kept, **living) if seated else None,
            failed_at=state.failed_at,
            copy=kept if generation else None,
            saves=any(page.halted_ns for page in self.pages.of_seated(state)),
            standing_since=(
                self.hangs.steps.detector.standing_since(now)
                or self.pages.unmet_since(state, now)
                or self.hangs.search.unanswered_at
            ),
            pause_s=self.progress.pause_s,
            starting=(self._pending is not None and not self.pages.is_building(state)) or self.progress.starting(now),
            hold_revision=state.holding,
            leave_after_step=state.going,
        )

    def alarms(self) -> list[float | None]:
        """The times, in seconds of the monotonic clock, at which `do_what_is_due` may have something to do, or None."""
        again_at = self._joining.retry_at if self._can_start_beside() else None
        return [self._check_seats_at, again_at, self._kill_at, self._check.alarm(), *self.hangs.wake_at()]

    def doing(self) -> str:
        """What the workers do before their first step, in words; "" when they train, or when there are none."""
        if self._pending is not None:
            return "ending the workers of the previous generation" if self._method else "importing torch"
        return self.pages.doing(self._state)

    def are_gone(self) -> bool:
        """Whether no worker process is left, neither in a seat nor beside the training."""
        return not self._state.running and not self._joining.ending

    def _able_in_place(self) -> list[int]:
        """The local ranks of the workers that can go on in another generation in place, with their processes."""
        return [] if self._pending is not None else self.pages.able_in_place(self._state)

    def _can_start_beside(self) -> bool:
        able = self._pending is None and bool(self._method) and self._check.is_fit
        beside = self._joining.beside
        # A generation closes with the first worker that ends with code 0: the others end soon as well, so no worker
        # joins any more. Nobody joins a run's last generation (`Draft.last`) either.
        closes = bool(self._state.ended_well) and (beside is None or beside[0].number == self._state.number)
        closes = closes or (beside is not None and beside[0].last is not None)
        return able and not closes and self.misfit is None

    # Deadlines.

    def do_what_is_due(self, now: float, elsewhere: Sequence[str], *, leaves: bool, unagreed: str = "") -> None:
        """End workers that are late at `now`, start missing workers, and look for hangs.

        Args:
            now: seconds of the monotonic clock.
            elsewhere: other nodes on which some workers of the generation have ended with code 0.
            leaves: whether this node is draining.
            unagreed: why the nodes cannot agree on another generation now; "" if they can.
        """
        self._check.look(now)
        self._kill_overdue(now)
        self.progress.look(self._state.number, now)
        self._end_unseated(now, leaves=leaves)
        self._start_missing(now)
        pages, state = self.pages.of_seated(self._state), self._state
        # Workers that hold for a handover make no step, so none is expected. Once the last step is agreed (`going`),
        # the workers behind it still have to make it, and a hang may keep them from it: until then steps are expected.
        held = self._is_waiting or (bool(state.holding) and all(page.step >= state.going for page in pages))
        self.hangs.steps.look(now, held=held)
        self._end_stopped(now)
        if self._state.failed_at is None and self._state.running and not held:
            generation = self._state.generation
            asks_leader = generation is not None and len(self._names) < generation.nodes
            ask_s = question_times(first=self.is_first, asks_leader=asks_leader)
            if self.hangs.search.look_closer(now, ask_s=ask_s):
                # The steps go on after a stand. Readers of the event log take a run to stand still until the next
                # `progress` event, so the supervisor writes one now instead of at the next interval.
                self.progress.look_and_write()
            self.hangs.ask_if_stalled(now)
        cause, failed_at = first_cause(self._state.failures, ()), self._state.failed_at
        if unagreed and cause is not None and failed_at is not None and not self._state.hung:
            self.hangs.search.report_unagreed(now, failed_at, cause, self.progress.reached, unagreed)
        self._look_for_laggards(now, elsewhere)
        self.hangs.search.renew_answer(now, self.progress.own_s)

    def _kill_overdue(self, now: float) -> None:
        """Kill workers whose time to end by themselves is over."""
        # They may have ended in time.
        if self._kill_at is None or not self._state.running:
            self._kill_at = None
        # A build of shared data is not interrupted: the next generation needs the data too.
        elif self.pages.is_building(self._state):
            self._kill_at = max(self._kill_at, now + EXIT_HOOKS_S)
        elif now >= self._kill_at:
            self._kill_at = None
            self.group.kill(self._state.number)

    def _end_unseated(self, now: float, *, leaves: bool) -> None:
        """End workers that have not taken their new seats in time.

        The first look, LATE_S after the seats were sent, only takes the stacks of late workers. The second look, at the
        limit, ends them.
        """
        state = self._state
        if self._check_seats_at is None or now < self._check_seats_at:
            return
        age_s, limit_s = now - state.seated_ns / 1e9, SEATED_WAITING_S_MAX if self._is_waiting else SEATED_S_MAX
        self._check_seats_at = None if age_s >= limit_s else now + limit_s - age_s
        late = [rank for rank in sorted(state.seated) if self.pages.is_late(state, rank, leaves=leaves)]
        pids = self.group.pids(state.number)
        # Called at the first look as well: that call notes the processor time with which the next one compares.
        busy = self._spares_busy and self.hangs.are_busy(now, [pids[rank] for rank in late if rank in pids], age_s)
        # On a node that leaves, the time is short: --drain-timeout has no room for a second limit.
        works = busy and not leaves
        if late and self._check_seats_at is not None:
            self._watched.ask_for_stacks(Stacks("late", state.number, 0, age_s, False), late)
        elif works:
            self._check_seats_at = now + limit_s
        elif late and state.seat is not None:
            text = f"{len(late)} of {len(state.seated)} workers did not join the new process group in {limit_s:g} s"
            self._say(f"{text}: killed")
            self._give_up(state.number, late)
            self._fail_in_place(state.seat, text)

    def _end_stopped(self, now: float) -> None:
        """End workers that a signal (SIGSTOP) has stopped for too long, in their seats or beside the training.

        A worker parent that is stopped goes on. It serves this agent alone; without it workers neither start nor end.
        """
        state, group = self._state, self.group
        sits = state.seated if state.running and state.seat is not None and not state.hung else frozenset()
        pids = {rank: pid for rank, pid in group.pids(state.number).items() if rank in sits}
        beside = {rank: pid for rank, pid in group.pids(0).items() if rank in self._joining.ranks}
        parent = [self._parent.pid] if self._parent is not None else []
        over = self.hangs.stopped(now, [*pids.values(), *beside.values(), *parent])
        if self._parent is not None and self._parent.pid in over:
            self._parent.wake()
            self._say(f"the worker parent (pid {self._parent.pid}) was stopped by a signal (SIGSTOP), and goes on")
        if late := {rank: pid for rank, pid in beside.items() if pid in over}:
            self._end_frozen(0, late, stopped_failure([], node=self._settings.node, where="beside the training"))
        if late := {rank: pid for rank, pid in pids.items() if pid in over}:
            self.progress.note_last_step()
            step = self.progress.step()
            where = f"in generation {state.number}{f' after step {step}' if step is not None else ''}"
            failure = stopped_failure([state.ranks[rank] for rank in late], node=self._settings.node, where=where)
            self._events.write(self.hangs.stopped_event(now))
            self._end_frozen(state.number, late, failure)
            self._failed(failure)

    def _end_frozen(self, generation: int, pids: Mapping[int, int], failure: Failure) -> None:
        """Kill the stopped workers of `pids` (by local rank), and report `failure` as the cause of their end."""
        self._say(f"{failure.summary}: killed")
        self._frozen.update((pid, failure) for pid in pids.values())
        self._give_up(generation, pids)

    def _give_up(self, generation: int, local_ranks: Collection[int]) -> None:
        """Kill living workers of `generation` that are of no use. From now on they count as ended."""
        self.group.kill(generation, list(local_ranks))
        self._joining.give_up(local_ranks, self._clock.monotonic())
        self._state = self._state.lost(frozenset(local_ranks))

    def _start_missing(self, now: float) -> None:
        """Start workers beside the training for the local ranks that have none."""
        if not self._can_start_beside():
            return
        missing = self._joining.start(self._settings.workers, self._state.seated, now)
        if missing and self._joining.beside is not None:
            self.seating.start_beside(*self._joining.beside, missing)

    @property
    def is_first(self) -> bool:
        """Whether rank 0 is on this node."""
        return self._state.is_first

    def saving_s(self) -> float:
        """The seconds since this node's workers began their newest checkpoint; 0.0 if that is unknown."""
        begun_ns = max((page.saving_ns for page in self.pages.of_seated(self._state)), default=0)
        return max(0, self._clock.monotonic_ns() - begun_ns) / 1e9 if begun_ns else 0.0

    def _look_for_laggards(self, now: float, elsewhere: Sequence[str]) -> None:
        """Look at `now` for workers on this node that run on behind the training.

        Workers here or `elsewhere` have ended well, or all are behind their Loop.
        """
        state = self._state
        ended = [f"rank {rank}" for rank in state.ended_well] + [f"those on {node}" for node in elsewhere]
        concerned = state.generation is not None and state.running and state.failed_at is None
        pids = self.group.pids(state.number) if concerned and (ended or self.hangs.steps.is_over) else {}
        left = {rank: pid for rank, pid in pids.items() if state.ranks.get(rank) not in state.ended_well}
        self.hangs.ask_if_waited_for(now, ended, left)

    # Decisions.

    def set_up_beside(self, generation: Generation, index: int) -> None:
        """Let the workers that this node lacks set up beside `generation`, whose workers go on in place.

        `index`: the group rank of this node there. Workers known to hang in an older generation are ended first.
        """
        if self._state.hung and self._state.running and generation.number > self._state.number:
            self._end_workers()
        self._joining.beside = (generation, index)

    def run(self, generation: Generation, seat: Seat, names: tuple[str, ...]) -> None:
        """Run `generation` in this node's `seat`. `names`: the nodes that this node knows there, in rank order.

        In place, the living workers get their new seats at once. Otherwise the present workers are ended, and new ones
        start when no process of the present generation is left.
        """
        self._newest, self._names = generation.number, names
        self._state = self._state.replaced()
        self.progress.replaced(generation.number, waits=generation.waits)
        if generation.in_place:
            self._pending = None
            self.progress.note_last_step()
            self._go_on(generation, seat)
            return
        self._pending = (generation, seat)
        self._stop_joining()
        if self._state.running:
            self.progress.note_last_step()
            if len(self._state.handed_over) == len(self._state.ranks) or self.pages.is_building(self._state):
                # Workers that have handed over end by themselves, and get a moment for their exit hooks. A worker that
                # prepares shared data may finish the build: the next generation needs the data too.
                self._kill_at = self._clock.monotonic() + EXIT_HOOKS_S
            else:
                self._end_workers()
        self._start_if_possible()

    def hand_over(self, decision: Hold | Go | ReleaseHold) -> None:
        """Hold the workers, tell them the last step, or let them go on because the handover was given up."""
        match decision:
            case Hold(_, handover):
                self._hold(handover)
            case Go(_, step, save):
                self._state = replace(self._state, going=step)
                # `save` first: a worker that sees `go` reads `save` next.
                for page in self.pages.of_seated(self._state):
                    page.save = int(save)
                    page.go = step
            case ReleaseHold():
                self.progress.generation_kept()
                self._state = replace(self._state, holding=0, entered=0, going=0)
                for page in self.pages.of_seated(self._state):
                    page.stop = page.go = 0

    def _hold(self, handover: int) -> None:
        """Make all workers hold at the end of their present step, and note the furthest step that one has entered.

        `handover`: the create revision of the handover's record.
        """
        self.progress.generation_ending()
        pages = self.pages.of_seated(self._state)
        # `go` first: with `stop` set, a worker obeys `go`, which may still be that of an earlier handover.
        for page in pages:
            page.go = 0
            page.stop = 1
        # A worker writes `entered`, then reads `stop`; the agent writes `stop`, then reads `entered`. The pause lets
        # both writes leave the processors' store buffers. After it, each worker has either seen `stop`, or entered a
        # step that the agent sees here: no worker is past `furthest`.
        self._clock.sleep(HOLD_SEEN_S)
        # `entered` is 0 outside of a Loop. A script without a Loop cannot hold, so then `furthest` is 0.
        entered = [page.entered for page in pages]
        furthest = max(entered) if entered and all(entered) else 0
        self._state = replace(self._state, holding=handover, entered=furthest, going=0)

    # Ends.

    def kill(self) -> None:
        """Kill the workers, report nothing about them, and drop the copies of their state in this node's memory."""
        self.seating.memory.close()
        self._pending = None
        self._stop_joining()
        if self._state.running:
            self.progress.note_last_step()
            self.group.kill(self._state.number)
        self._state = replace(self._state, generation=None, seat=None)

    def stop(self, grace_s: float, hurry: Callable[[], bool], number: int) -> None:
        """End the workers because this node leaves, and wait for their end.

        Args:
            grace_s: the seconds that workers have to end by themselves. After that they get SIGKILL.
            hurry: whether to send SIGKILL now. It is called every 5 ms, and also folds the ends of workers.
            number: the signal to send. Workers that have handed over and wait for a seat are released instead.
        """
        self._pending, self._is_leaving = None, True
        self._stop_joining()
        generation = self._state.number
        deadline = self._clock.monotonic() + grace_s
        # These workers have left their step and wait for a new seat. They end when they are released from that wait.
        if self._state.handed_over >= self._state.seated and self._able_in_place():
            self.group.release(generation)
        elif self._state.running:
            self._announce_end()
            self.group.terminate(generation, number)
        # Polled, because the agent's loop no longer goes round. `hurry` empties the loop's queue in its place.
        while self._state.running and self._clock.monotonic() < deadline and not hurry():
            self._clock.sleep(0.005)
        if self._state.running:
            self.group.kill(generation)

    def finish(self, grace_s: float, *, well: bool) -> None:
        """Release the workers that still run, because the run has ended, and wait `grace_s` seconds for them.

        `well`: whether the run has succeeded.
        """
        self._pending = None
        self._stop_joining()
        self.progress.write()
        if not self._state.running:
            return
        generation = self._state.number
        if self._state.failed_at is not None or (not well and self._settings.restart_grace_s):
            self._end_workers()
        # After a failure elsewhere, workers here may be failing of the same cause, and be writing their traceback.
        elif not well:
            self._kill_at = self._clock.monotonic() + EXIT_HOOKS_S
        self.group.release(generation)
        deadline = max(self._clock.monotonic() + grace_s, self._kill_at or 0.0)
        while self.group.pids(generation) and (now := self._clock.monotonic()) < deadline:
            self._kill_overdue(now)
            self._clock.sleep(0.005)
        self.progress.write()

    def close(self) -> None:
        """End the worker parent, all workers and a running node check, and close sockets and memory files."""
        self.progress.write()
        if self._parent is not None:
            # A parent that still imports has no workers and does not read its channel: waiting for it is useless.
            self._parent.close(PARENT_END_S if self._method else 0.0)
        self.group.close()
        self.seating.close()
        self._check.close()

    def _end_workers(self) -> None:
        """End the workers of a generation that is over: with SIGKILL at once, or with SIGTERM and time to end.

        The time is `Settings.restart_grace_s`.
        """
        grace_s, generation = self._settings.restart_grace_s, self._state.number
        if not grace_s:
            self.group.kill(generation)
        elif self._kill_at is None:
            self._announce_end()
            self.group.terminate(generation)
            self._kill_at = self._clock.monotonic() + grace_s

    def told_to_leave(self) -> None:
        """Tell the workers that this node is about to leave, so that they leave a SIGTERM from elsewhere to the agent.

        The agent calls this in its signal handler: it only writes to shared memory.
        """
        for page in self.pages.of_seated(self._state):
            page.leaves = 1

    def _announce_end(self) -> None:
        """Let workers obey the next SIGTERM at once.

        While a Loop runs, a worker defers a SIGTERM that its agent has not announced: some schedulers (SLURM) signal
        every process of a job, and the agent may want a handover first.
        """
        for page in self.pages.of_seated(self._state):
            page.ending = 1

    def _stop_joining(self) -> None:
        if self._joining.stop():
            self.group.kill(0)

    # Seats.

    @property
    def _is_waiting(self) -> bool:
        """Whether the workers hold the state and make no step, because their generation has too few nodes."""
        return self._state.generation is not None and self._state.generation.waits

    def _start_if_possible(self) -> None:
        """Start the workers of the wanted generation, if the parent is warm and no worker of an older one runs."""
        if self._pending is None or self._state.running or not self._method:
            return
        (generation, seat), self._pending = self._pending, None
        self._state, self._check_seats_at = self._state.started(generation, seat), None
        self._begin(generation)
        # A forked worker inherits the store's listening socket. A worker that is a new program binds the port anew.
        self.seating.start(generation, seat, self.progress.last, shared=self._method == "fork")

    def _begin(self, generation: Generation) -> None:
        """Note that workers are being started, or get new seats, for `generation`."""
        self._kill_at = None
        self.progress.began()
        self.hangs.began(self._clock.monotonic())
        self._events.write(_begun(generation, self._names))

    def _go_on(self, generation: Generation, seat: Seat) -> None:
        """Send living workers their seats in `generation`, which goes on in place.

        Workers of the generation before come first, then workers that have set up beside the training. Workers that
        cannot go on in place are killed.
        """
        before, group = self._state, self.group
        number = before.number if before.running else 0
        lives = [(rank, number) for rank in self.pages.able_in_place(before)]
        chosen = [*lives, *((rank, 0) for rank in self.pages.ready_beside(self._joining.ranks))][: seat.workers]
        pids = {**group.pids(0), **group.pids(number)}
        # The time before any seat is sent: a worker may come to its new group before the last seat is out.
        now_ns = self._clock.monotonic_ns()
        self._check_seats_at = self._clock.monotonic() + LATE_S
        # Before a planned change nothing has failed, so a worker that is late for its seat is probably just busy, and
        # is spared while it works. If it is still late at the next change, of any kind, it still does the same work.
        still = self._spares_busy and not all(self.pages.took_seat(before, rank) for rank, _ in lives)
        self._spares_busy = still or generation.kind in ("join", "drain", "resize")
        self._begin(generation)
        ranks = self.seating.reseat(generation, seat, chosen)
        self._joining.let_in(ranks)
        by_rank = {global_rank: pids.get(rank, 0) for rank, global_rank in sorted(ranks.items())}
        self._state = before.went_on(generation, seat, ranks, by_rank, now_ns)
        others = [rank for rank in sorted(group.pids(number)) if rank not in ranks] if number else []
        if others:
            group.kill(number, others)
        self._write_started()
        if generation.waits:
            self.progress.write_waiting()
        if len(ranks) < seat.workers:
            lost = seat.workers - len(ranks)
            why = next((f": {each.summary}" for each in before.failures if not each.collateral), "")
            self._fail_in_place(seat, f"{lost} of {seat.workers} workers had ended before they could go on{why}")
        self.set_up_beside(generation, seat.index)

    def _fail_in_place(self, seat: Seat, message: str) -> None:
        """Fail the present generation as collateral: workers of this node are missing in their new seats."""
        self._fail(lost_peer(rank=seat.rank_offset, node=seat.node, message=message))

    def _fail(self, failure: Failure) -> None:
        """Note a failure of the workers of the present generation."""
        # Workers of a replaced generation may still run, to finish a build of data. Their failures have no consequence.
        at = self._clock.monotonic() if self._pending is None else None
        self._state = self._state.failed(self._with_steps(failure), at)

    def _with_steps(self, failure: Failure) -> Failure:
        """Return `failure` with the most steps that this node's living workers have made.

        The leader compares the steps of two failures: steps in between are progress, which resets the restart budget.
        """
        steps = [page.step if page.entered else page.beats for page in self.pages.of_seated(self._state)]
        return replace(failure, beats=max([failure.beats, *steps]))

    def stands_by(self, generation: Generation, names: tuple[str, ...]) -> None:
        """Write the event that `generation`, of the nodes `names`, runs without this node."""
        begun = _begun(generation, names)
        self._events.write(events.StandsBy(**vars(begun), age_s=round(self.progress.age_s(), 3)))

    def _write_started(self) -> None:
        pids = self._state.pids
        ranks = tuple(sorted(pids))
        self._events.write(events.WorkersStarted(self._state.number, ranks, tuple(pids[rank] for rank in ranks)))

    # Events.

    def fold(self, event: GroupEvent | Stacks) -> None:
        """Take note of `event`, and do what follows from it on this node."""
        match event:
            case Warm():
                # Only deaths in a row count towards PARENT_TRIES.
                self._parent_deaths, self._method = 0, event.method
                write_parent_warm(event, self._events)
                self._start_if_possible()
            case ParentLost():
                self._parent_lost(event)
            case WorkerStarted():
                self._worker_started(event)
            case WorkerMessage():
                self._worker_message(event)
            case WorkerEnded():
                self._worker_ended(event)
            case Stacks():
                self._stalled(event)
            case GroupEnded(generation=generation):
                # Given-up workers have counted as ended already, but their processes may have lived until now. New
                # workers start only after the last process has ended.
                if generation == self._state.number:
                    self._state = replace(self._state, running=False, seated=frozenset())
                    self._start_if_possible()

    def _worker_message(self, event: WorkerMessage) -> None:
        match event.message:
            case Copied() as copied:
                self._copied(event, copied)
            case LeftGeneration(generation=0):
                self._events.write(events.Ready(local_rank=event.local_rank))
            case LeftGeneration() as left:
                self._left(left, event)
            case Step() as step if self._is_current(event):
                self._stepped(event, step)
            case Unsaved() as missed:
                told = events.Unsaved(missed.step, event.generation, missed.reason)
                self._events.write(told)
                self._say(unsaved(told))
            case CopyDamaged() if self._is_current(event):
                # No generation may resume from a damaged copy again. The next one resumes from another node's copy, or
                # from the newest committed checkpoint.
                self.seating.memory.forget()

    def _is_current(self, event: WorkerMessage | WorkerEnded | WorkerStarted | Stacks) -> bool:
        return self._state.running and event.generation == self._state.number

    def _stalled(self, event: Stacks) -> None:
        """Take note of the stacks of workers that make no step, or are late for their seats.

        Stacks that are final make the workers fail. The next generation ends them, not this method: if their processes
        ended now, workers of other nodes would fail in their collectives before their own stacks were taken.
        """
        state = self._state
        if event.why == "closer":
            self.hangs.search.note_positions(event)
            return
        if event.why != "late" and (not self._is_current(event) or state.seat is None or state.failed_at is not None):
            return
        failure = self.hangs.report(event)
        if failure is not None:
            self._state = replace(state, failures=(self._with_steps(failure),), failed_at=self._clock.monotonic())
            self.progress.generation_ending()

    def _parent_lost(self, event: ParentLost) -> None:
        self._method = ""
        self._parent_deaths += 1
        self._say(event.reason)
        if self._parent_deaths > PARENT_TRIES:
            raise parents_keep_dying(self._settings.node, event.reason)
        self.open()

    def _worker_started(self, event: WorkerStarted) -> None:
        if not self._is_current(event):
            return
        self._state = replace(self._state, pids={**self._state.pids, event.rank: event.pid})
        if len(self._state.pids) == len(self._state.ranks):
            self.progress.started(event.generation, event.at_ns)
            self._write_started()

    def _stepped(self, event: WorkerMessage, step: Step) -> None:
        if step.first:
            self._joining.trained(event.local_rank)
        if step.first and event.local_rank == min(self._state.seated, default=0):
            self.progress.stepped(event.generation, step)
        if event.rank == 0:
            self._events.write(events.Step(event.generation, step.step, step.epoch, step.scalars))

    def _copied(self, event: WorkerMessage, copied: Copied) -> None:
        """Keep a copy of the state, unless the leader already counts on an older one.

        After a failure the node's report names its newest copy, and the next generation may resume from exactly that
        copy. So later copies are dropped then. Where workers go on in place, no generation resumes from a copy of the
        report, so all copies are kept: a worker that lost a peer during a pause sends the copy of its newest step after
        the peer's end was reported, and perhaps while its new seat is on the way.
        """
        generation, seated = self._state.generation, self._state.running and event.local_rank in self._state.seated
        counted_on = self._state.failed_at is not None and not self._able_in_place()
        if event.fd >= 0 and seated and generation is not None and not counted_on:
            copy = Copy(copied.step, copied.epoch, copied.size, copied.digest, generation.world_size, copied.place)
            self.seating.memory.put(copy, event.fd)
            self._events.write(events.Copied(event.generation, copied.step, copied.size))
        elif event.fd >= 0:
            self._close_file(event.fd)
        # A worker that is about to end waits for this answer.
        if copied.request:
            event.answer(Reply(copied.request, ok=True))

    def _left(self, left: LeftGeneration, event: WorkerMessage) -> None:
        """Take note that a living worker has handed over, or has lost its group because another worker has ended."""
        state = self._state
        # The worker may have got another seat while its message was under way.
        if not state.running or left.generation != state.number or state.seat is None:
            return
        if left.error and state.failed_at is None:
            how = f"lost its process group: {in_words(left.error)}"
            self._fail(lost_peer(rank=event.rank, node=self._settings.node, message=how))
            self.progress.generation_ending()
            self.progress.note_last_step()
        elif not left.error and (self._is_waiting or 0 < state.going <= left.step):
            self.progress.note_last_step()
            self._state = replace(state, handed_over=state.handed_over | {event.local_rank}, going=left.step)

    def _failed_by_itself(self, event: WorkerEnded) -> bool:
        """Whether the end of a worker is a failure: no handover, departure or next generation explains it."""
        if event.generation == 0:
            return event.local_rank in self._joining.ranks
        wanted = self._pending is not None or self._is_leaving or event.local_rank in self._state.handed_over
        return self._is_current(event) and not wanted

    def _worker_ended(self, event: WorkerEnded) -> None:
        if event.failure is not None and self._is_current(event):
            self.progress.note_last_step()
            # Readers of the event log need the worker's last steps and pauses before its end.
            self.progress.write()
        step = self.pages.step_of(event.local_rank, event.generation)
        ended = events.WorkerEnded(event.generation, event.rank, event.pid, event.code, step=step)
        failure = self._frozen.pop(event.pid, event.failure if self._failed_by_itself(event) else None)
        if failure is not None:
            ended = replace(ended, failure=failure.summary, collateral=failure.collateral)
        self._events.write(ended)
        seated, failure = event.generation > 0, event.failure
        if failure is not None and suspects_gpu(failure.summary):
            self._check.doubt(failure.summary)
        if failure is not None and failure.misfit:
            self.misfit = failure
        if seated and self.pages.has_stepped(event.local_rank, event.generation):
            # Its message about the first step may have arrived after its generation was over, and been ignored.
            self._joining.trained(event.local_rank)
        counts = self._joining.ended(event.local_rank, seated=seated)
        if counts and (not seated or (failure is not None and not failure.collateral)):
            how = "worker that has just joined failed before its first step"
            how = how if seated else "new worker failed during its set-up"
            what = failure.summary if failure is not None else f"exit code {event.code}"
            wait_s = self._joining.failed(self._clock.monotonic())
            self._say(f"a {how}: {what}; another try in {wait_s:g} s, if the run goes on")
        if seated and self._is_current(event):
            self._seated_ended(event)

    def _seated_ended(self, event: WorkerEnded) -> None:
        """Take note that a worker of the present generation has ended."""
        # In this order: `progress` reads the pages of the seated workers only.
        self.progress.note_last_step()
        self._state = replace(self._state, seated=self._state.seated - {event.local_rank})
        if event.local_rank in self._state.handed_over:
            return
        if event.failure is not None:
            self._failed(event.failure)
        elif event.code == 0 and not self.pages.took_seat(self._state, event.local_rank):
            # The worker had finished its script in the generation before, and never came to the group of its new seat.
            # The other workers wait for it there, so an exit with code 0 is a failure here.
            message = "had ended before it could go on"
            self._failed(lost_peer(rank=event.rank, node=self._settings.node, message=message))
        elif event.code == 0:
            self._state = replace(self._state, ended_well=(*self._state.ended_well, event.rank))

    def _failed(self, failure: Failure) -> None:
        """Take note that a worker of the present generation has failed. The first failure ends the generation."""
        first = self._state.failed_at is None
        self._fail(failure)
        if not first:
            return
        self.progress.generation_ending()
        self.progress.note_last_step()
        if failure.collateral and failure.final_code:
            # It ends together with rank 0, which may be on this node, and is about to say why.
            self._kill_at = self._clock.monotonic() + RANK_0_GRACE_S
        elif not self._able_in_place():
            # The other workers of this node cannot go on in place: they can only fail too, or hang.
            self._end_workers()
        elif self._state.generation is not None and self._state.seat is not None:
            self.set_up_beside(self._state.generation, self._state.seat.index)


def _begun(generation: Generation, names: tuple[str, ...]) -> events.Generation:
    copy, resume = generation.memory, generation.resume
    return events.Generation(
        number=generation.number,
        world_size=generation.world_size,
        cause=generation.cause,
        kind=generation.kind,
        restarts=generation.restarts.spent,
        nodes=names,
        resume_step=copy.step if copy else resume.reached if resume else 0,
        in_place=generation.in_place,
        waits=generation.waits,
    )
