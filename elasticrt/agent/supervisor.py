"""The agent's side of this node's workers: the worker parent, the worker group, and their state.

The agent passes events in (`fold`), carries decisions out (`run`, `hold`, ...), calls `do_what_is_due`, and asks for
the state (`describe`). A generation's workers start when three things have happened, in any order: the decision to run
it, a warm parent, and the end of the generation before.

`workers.group_state` is the state as a value, `workers.group` starts and signals processes, `workers.worker_io` reads
their output, `agent.worker_pages` their status pages. `agent.seating` gives workers their seats, `agent.joining`
remembers which set up beside the training, `liveness.hang_monitor` notices hangs.
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
from elasticrt.ipc.failure import Failure, in_words
from elasticrt.ipc.messages import Copied, Damaged, Left, Reply, Step, Unsaved, Warm
from elasticrt.ipc.time_bounds import (
    EXIT_HOOKS_S,
    FOUND_S,
    HOLD_SEEN_S,
    LATE_S,
    PARENT_END_S,
    PLACES_S,
    SEATED_S_MAX,
    SEATED_WAITING_S_MAX,
)
from elasticrt.liveness.hang_monitor import HangMonitor
from elasticrt.liveness.progress import Progress
from elasticrt.liveness.stacks import Stacks
from elasticrt.liveness.watched_workers import WatchedWorkers
from elasticrt.rendezvous.decision import Me
from elasticrt.rendezvous.records import Generation, Seat
from elasticrt.settings import Settings
from elasticrt.story.sentences import unsaved
from elasticrt.workers.failures import lost_peer, stopped
from elasticrt.workers.fork_server import ParentLost, WorkerParent, keeps_dying, note
from elasticrt.workers.gpu_failures import suspects_gpu
from elasticrt.workers.group_state import GroupState
from elasticrt.workers.worker_io import GroupEnded, WorkerEnded, WorkerSaid, WorkerStarted

if TYPE_CHECKING:
    from elasticrt.agent.edges import Edges

log = logging.getLogger(__name__)

PARENT_TRIES = 3
"""A worker parent that dies more often than this before it is warm cannot start: what it imports is broken."""


class Supervisor:
    """The workers' side of the agent. Used by the agent's thread only.

    Args:
        settings: the agent's.
        put: takes events that come back to `fold` and `stalled`, from any thread.
        event_log: the node's event log.
        say: prints a line for people.
        edges: clock, processes, files and sockets.

    Attributes:
        group: the workers.
        seating: what the workers are given: seats, sockets, saved states.
        pages: what their status pages say.
        progress: how far they are.
        hangs: whether they hang.
        misfit: the failure of a worker whose script is not the run's. None is started beside the training after it.
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
        self._method = ""  # How the parent starts workers; "" until it can.
        self._state = GroupState()
        self._newest = 0  # The newest generation that was decided to run, and the names of its nodes.
        self._names: tuple[str, ...] = ()
        self._wanted: tuple[Generation, Seat] | None = None  # The same, while its workers are not started yet.
        self._leaves = False  # Whether the workers are ended because this node leaves.
        self._kill_late: tuple[int, float] | None = None  # Which generation's workers are killed, and when.
        self._frozen: dict[int, Failure] = {}  # By pid: workers that are ended because a signal had stopped them.
        self._late_at: float | None = None  # When to look for workers that have not taken their new seat.
        self._spares = False  # Whether such a worker is left alone as long as it works.
        self._joining = JoiningWorkers()
        self.misfit: Failure | None = None
        self._check = NodeCheck(settings.options.node_check, say, edges.clock)
        self.group = edges.worker_group(put, options=settings.options)
        self.seating = Seating(settings, self.group, edges)
        self.pages = WorkerPages(self.group)
        self.progress = Progress(lambda: self.pages.of(self._state), event_log, edges.clock)
        watched = WatchedWorkers(
            settings, event_log, say, put,
            group=self.group, state=lambda: self._state, look=lambda: self.pages.of(self._state),
            take=edges.take_stacks, state_of=edges.state_of, cpu_s=edges.cpu_s,
        )  # fmt: skip
        self._watched, self.hangs = watched, HangMonitor(watched)

    def open(self) -> None:
        """Start the worker parent. It imports what the workers need while the agents are still meeting."""
        command, settings = self._settings.command, self._settings
        self._parent = WorkerParent(
            method=settings.start_method,
            env=self.seating.env,
            directory=Path.cwd(),
            preload=settings.options.preload,
            kind=command.kind,
            target=command.argv[0],
        )
        self.group.use(self._parent)

    # State.

    def describe(self, me: Me, now: float) -> Me:
        """The member's own state at `now`: what its key and its report should say. Changes nothing."""
        state, able = self._state, self._able()
        beside = len(self.pages.ready_beside(self._joining.ranks))
        living = {
            "ready": len(able) + beside,
            "new": beside,
            "has_state": self.pages.have_state(state, able),
        }
        seated = state.seat is not None and state.seat.incarnation == me.record.incarnation  # In this life.
        generation = state.number if state.generation is not None and state.running else 0
        says = {
            # Where a GPU has failed, workers of the other GPUs go on in place if they can.
            "warm": bool(self._method) and (self._check.is_fit or bool(able)),
            "port": self.seating.ports.port,
            "generation": generation,
            "seen": max(me.record.seen, me.known),
            **living,
        }
        kept = self.seating.memory.newest
        return replace(
            me,
            record=me.record.model_copy(update=says),
            started=self._newest,
            # Workers that have failed count no more, also while the kernel still takes them apart.
            running=state.number if state.running and (state.seated or state.failed_at is None) else 0,
            seated=state.number if seated else 0,
            report=state.report(kept=kept, **living) if seated else None,
            failed_at=state.failed_at,
            copy=kept if generation else None,
            standing_since=self.hangs.steps.pace.standing_since(now) or self.pages.unmet_since(state, now),
            pause_s=self.progress.pause_s,
            starting=(self._wanted is not None and not self.pages.building(state)) or self.progress.starting(now),
            holding=state.holding,
            going=state.going,
        )

    def alarms(self) -> list[float]:
        """When something may be due, by the monotonic clock."""
        again_at = self._joining.at if self._can_start_beside() else None
        kill_at = self._kill_late[1] if self._kill_late else None
        alarms = (self._late_at, again_at, kill_at, self._check.alarm(), *self.hangs.wake_at())
        return [at for at in alarms if at is not None]

    def doing(self) -> str:
        """What the workers do before their first step, in words; "" when they train, or there are none."""
        if self._wanted is not None:
            return "ending the workers of before" if self._method else "importing torch"
        return self.pages.doing(self._state)

    def are_gone(self) -> bool:
        """Whether no worker is left, seated or setting up."""
        return not self._state.running and not self._joining.ending

    def _able(self) -> list[int]:
        """Local ranks of workers that can go on in another generation without ending."""
        return [] if self._wanted is not None else self.pages.able(self._state)

    def _can_start_beside(self) -> bool:
        able = self._wanted is None and bool(self._method) and self._check.is_fit
        beside = self._joining.beside
        # Where a worker has ended by itself nobody joins any more, in that generation, nor where the run ends with it.
        closes = bool(self._state.well) and (beside is None or beside[0].number == self._state.number)
        closes = closes or (beside is not None and beside[0].last is not None)
        return able and not closes and self.misfit is None

    # Deadlines.

    def do_what_is_due(self, now: float, elsewhere: Sequence[str], *, leaves: bool, unagreed: str = "") -> None:
        """End workers that are late at `now`, start those that are missing, look for hangs.

        `elsewhere`: nodes where some workers of the generation have ended. `leaves`: this node is to leave. `unagreed`:
        why no other generation can be agreed; "": it can.
        """
        self._check.look(now)
        self._kill_overdue(now)
        self.progress.look(self._state.number, now)
        self._end_unseated(now, leaves=leaves)
        self._start_missing(now)
        pages, state = self.pages.of(self._state), self._state
        # Until all have come to the agreed step it is expected of them, and a hang keeps them from it.
        held = self._waits or (bool(state.holding) and all(page.step >= state.going for page in pages))
        self.hangs.steps.look(now, held=held)
        self._end_stopped(now)
        if self._state.failed_at is None and self._state.running and not held:
            if self.hangs.search.look_closer(now, ask_s=self._ask_s):
                self.progress.tell_anew()  # So that nobody counts on from the hang until the next one is due.
            self.hangs.ask_if_stalled(now)
        failed_at = self._state.failed_at
        if failed_at is not None and not self._state.hung:
            self.hangs.search.look_for_agreement(now, failed_at, unagreed, ask_s=self._ask_s)
        self._look_for_laggards(now, elsewhere)
        self.hangs.search.look_at_waits(now)

    def _kill_overdue(self, now: float) -> None:
        """Kill workers that were given time to end, and have used it up."""
        if self._kill_late is None:
            return
        generation, at = self._kill_late
        if not self._state.running or generation != self._state.number:  # The next generation has started meanwhile.
            self._kill_late = None
        elif self.pages.building(self._state):
            self._kill_late = (generation, max(at, now + EXIT_HOOKS_S))
        elif now >= at:
            self._kill_late = None
            self.group.kill(generation)

    def _end_unseated(self, now: float, *, leaves: bool) -> None:
        """End workers that do not take the seats that they were given."""
        state = self._state
        if self._late_at is None or now < self._late_at:
            return
        age_s, limit_s = now - state.seated_ns / 1e9, SEATED_WAITING_S_MAX if self._waits else SEATED_S_MAX
        self._late_at = None if age_s >= limit_s else now + limit_s - age_s
        late = [rank for rank in sorted(state.seated) if self.pages.is_late(state, rank, leaves=leaves)]
        pids = self.group.pids(state.number)
        works = self._spares and self.hangs.work(now, [pids[rank] for rank in late if rank in pids], age_s)
        if late and self._late_at is not None:
            self._watched.ask(Stacks("late", state.number, 0, age_s, False), late)
        elif works:
            self._late_at = now + limit_s
        elif late and state.seat is not None:
            text = f"{len(late)} of {len(state.seated)} workers did not take their new seats in {limit_s:g} s"
            self._say(f"{text}: they are ended")
            self._give_up(state.number, late)
            self._fail_in_place(state.seat, text)

    def _end_stopped(self, now: float) -> None:
        """End workers that a signal has stopped, in their seats or beside the training."""
        state, group = self._state, self.group
        sits = state.seated if state.running and state.seat is not None and not state.hung else frozenset()
        pids = {rank: pid for rank, pid in group.pids(state.number).items() if rank in sits}
        beside = {rank: pid for rank, pid in group.pids(0).items() if rank in self._joining.ranks}
        over = self.hangs.stopped(now, [*pids.values(), *beside.values()])
        if late := {rank: pid for rank, pid in beside.items() if pid in over}:
            self._end_frozen(0, late, stopped([], node=self._settings.node, where="beside the training"))
        if late := {rank: pid for rank, pid in pids.items() if pid in over}:
            self.progress.remember()
            step = self.progress.step()
            where = f"in generation {state.number}{f' after step {step}' if step is not None else ''}"
            failure = stopped([state.ranks[rank] for rank in late], node=self._settings.node, where=where)
            self._events.write(self.hangs.stood(now))
            self._end_frozen(state.number, late, failure)
            self._failed(failure)

    def _end_frozen(self, generation: int, pids: Mapping[int, int], failure: Failure) -> None:
        self._say(f"{failure.summary}: ended")
        self._frozen.update((pid, failure) for pid in pids.values())
        self._give_up(generation, pids)

    def _give_up(self, generation: int, local_ranks: Collection[int]) -> None:
        """End workers of `generation` that live and are of no use. From now on they belong to none."""
        self.group.kill(generation, list(local_ranks))
        self._joining.give_up(local_ranks, self._clock.monotonic())
        self._state = self._state.lost(frozenset(local_ranks))

    def _start_missing(self, now: float) -> None:
        """Start workers beside the training for the seats that have none."""
        if not self._can_start_beside():
            return
        missing = self._joining.start(self._settings.workers, self._state.seated, now)
        if missing and self._joining.beside is not None:
            self.seating.start_beside(*self._joining.beside, missing)

    def asks_for_positions(self, now: float) -> int:
        """The generation whose other nodes are to be asked at `now` where their workers are; 0: none."""
        due = self.hangs.search.is_to_ask(now, first=self.is_first)
        return self._state.number if due and self._is_in_seat else 0

    @property
    def _is_in_seat(self) -> bool:
        """Whether workers of the present generation run, or have failed in it."""
        return self._state.running or self._state.failed_at is not None

    @property
    def is_first(self) -> bool:
        """Whether rank 0 is on this node."""
        return self._state.seat is not None and self._state.seat.index == 0

    @property
    def _ask_s(self) -> list[float]:
        """Seconds from a closer look to the questions to other nodes: no use before those know the answer."""
        generation = self._state.generation
        asks_leader = generation is not None and len(self._names) < generation.nodes
        later = 0 if self.is_first else 2 if asks_leader else 1
        return [places_s + later * found_s for places_s, found_s in zip(PLACES_S, FOUND_S, strict=True)]

    def blame(self, generation: int, nodes: Mapping[str, str], others: Mapping[str, Mapping[str, object]]) -> None:
        """Find out who holds the training up, from the answers in `generation` of `others` that were asked, by node.

        `nodes` has the addresses of all of its nodes.
        """
        if not self._is_in_seat or generation != self._state.number:
            return
        now = self._clock.monotonic()
        said = {node: each for node, each in others.items() if each.get("generation") == generation}
        reached = {node: str(each["reached_by"]) for node, each in others.items() if "reached_by" in each}
        if not self.is_first:
            for answer in said.values():
                self.hangs.search.hear(now, answer)
            generation_known = self._state.generation is not None and len(self._names) == self._state.generation.nodes
            first = self._names[0] if generation_known else ""
            if first in nodes and first not in said:  # While etcd is away it is not taken out.
                asked = {node: nodes[node] for node in (first, self._settings.node) if node in nodes}
                self.hangs.search.blame(now, asked, {}, reached, last=True)
            return
        self.hangs.search.blame(now, nodes, said, reached)
        self.hangs.search.compare(said)

    def saving_s(self) -> float:
        """How long, in seconds, the newest checkpoint of this node's workers has been under way; 0.0: unknown."""
        begun_ns = max((page.saving_ns for page in self.pages.of(self._state)), default=0)
        return max(0, self._clock.monotonic_ns() - begun_ns) / 1e9 if begun_ns else 0.0

    def _look_for_laggards(self, now: float, elsewhere: Sequence[str]) -> None:
        """Look at `now` for workers here that run on after others; `elsewhere`: nodes where some or all have ended."""
        state = self._state
        ended = [f"rank {rank}" for rank in state.well] + [f"those on {node}" for node in elsewhere]
        concerned = state.generation is not None and state.running and state.failed_at is None and bool(ended)
        pids = self.group.pids(state.number) if concerned else {}
        left = {rank: pid for rank, pid in pids.items() if state.ranks.get(rank) not in state.well}
        self.hangs.ask_if_waited_for(now, ended, left)

    # Decisions.

    def attend(self, generation: Generation, index: int) -> None:
        """Let workers that this node lacks set up beside `generation`, which goes on in place; its `index` there."""
        if self._state.hung and self._state.running and generation.number > self._state.number:
            self._end_workers()
        self._joining.beside = (generation, index)

    def run(self, generation: Generation, seat: Seat, names: tuple[str, ...]) -> None:
        """Run `generation` in this node's `seat`, as soon as the one before has ended. `names`: its nodes."""
        self._newest, self._names = generation.number, names
        self._state = self._state.replaced()
        self.progress.replaced(generation.number, waits=generation.waits)
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
                # Exit hooks get a moment. A worker that prepares data may finish: the next generation needs them too.
                self._kill_late = (self._state.number, self._clock.monotonic() + EXIT_HOOKS_S)
            else:
                self._end_workers()
        self._start_if_possible()

    def hold(self, handover: int) -> None:
        """Make all workers hold at the end of their step, for `handover`, and note the furthest step that one began."""
        self.progress.disturbed()
        pages = self.pages.of(self._state)
        for page in pages:
            page.go = 0
            page.stop = 1
        self._clock.sleep(HOLD_SEEN_S)
        entered = [page.entered for page in pages]  # 0 outside of a Loop: such a script cannot hold.
        furthest = max(entered) if entered and all(entered) else 0
        self._state = replace(self._state, holding=handover, entered=furthest, going=0)

    def go(self, step: int, *, save: bool) -> None:
        """Give workers that hold the `step` after which they leave; with `save` rank 0 commits a checkpoint first."""
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

    # Ends.

    def kill(self) -> None:
        """Kill the workers. Nothing of theirs is reported, and their copies in memory are dropped."""
        self.seating.memory.close()
        self._wanted = None
        self._stop_joining()
        if self._state.running:
            self.progress.remember()
            self.group.kill(self._state.number)
        self._state = replace(self._state, generation=None, seat=None)

    def stop(self, grace_s: float, hurry: Callable[[], bool], number: int) -> None:
        """Send the workers signal `number`, or release them; SIGKILL after `grace_s` seconds or when `hurry` says so.

        `hurry` is asked every few milliseconds; it also folds the ends of workers.
        """
        self._wanted, self._leaves = None, True
        self._stop_joining()
        generation = self._state.number
        deadline = self._clock.monotonic() + grace_s
        if self._state.handed >= self._state.seated and self._able():  # They wait for a seat, and get none.
            self.group.release(generation)
        elif self._state.running:
            self._announce_end()
            self.group.terminate(generation, number)
        # Polled, because the loop that waits for events does not go round any more: `hurry` empties its queue.
        while self._state.running and self._clock.monotonic() < deadline and not hurry():
            self._clock.sleep(0.005)
        if self._state.running:
            self.group.kill(generation)

    def finish(self, grace_s: float, *, well: bool) -> None:
        """The run has ended, `well` or not: release workers that still run, and wait `grace_s` seconds for them."""
        self._wanted = None
        self._stop_joining()
        self.progress.tell()
        if not self._state.running:
            return
        generation = self._state.number
        if self._state.failed_at is not None or (not well and self._settings.restart_grace_s):
            self._end_workers()
        elif not well:  # They may be failing of the same cause, and be writing their traceback.
            self._kill_late = (generation, self._clock.monotonic() + EXIT_HOOKS_S)
        self.group.release(generation)
        deadline = max(self._clock.monotonic() + grace_s, self._kill_late[1] if self._kill_late else 0.0)
        while self.group.pids(generation) and (now := self._clock.monotonic()) < deadline:
            self._kill_overdue(now)
            self._clock.sleep(0.005)
        self.progress.tell()

    def close(self) -> None:
        """End everything that this node has started."""
        self.progress.tell()
        if self._parent is not None:
            # A parent that is still importing has no workers and reads no messages: do not wait for it.
            self._parent.close(PARENT_END_S if self._method else 0.0)
        self.group.close()
        self.seating.close()
        self._check.close()

    def _end_workers(self) -> None:
        """End the workers of a generation that is over: at once, or within the grace time that the user asked for."""
        grace_s, generation = self._settings.restart_grace_s, self._state.number
        if not grace_s:
            self.group.kill(generation)
        elif self._kill_late is None or self._kill_late[0] != generation:
            self._announce_end()
            self.group.terminate(generation)
            self._kill_late = (generation, self._clock.monotonic() + grace_s)

    def told_to_leave(self) -> None:
        """Let workers know that this node leaves, and when will be said. Called by a signal handler."""
        for page in self.pages.of(self._state):
            page.leaves = 1

    def _announce_end(self) -> None:
        """Let workers obey the next SIGTERM: they ignore those that do not come from their agent."""
        for page in self.pages.of(self._state):
            page.ending = 1

    def _stop_joining(self) -> None:
        if self._joining.stop():
            self.group.kill(0)

    # Seats.

    @property
    def _waits(self) -> bool:
        """Whether the workers have seats in which they make no step, because there are too few nodes."""
        return self._state.generation is not None and self._state.generation.waits

    def _start_if_possible(self) -> None:
        if self._wanted is None or self._state.running or not self._method:
            return
        (generation, seat), self._wanted = self._wanted, None
        self._state, self._late_at = self._state.started(generation, seat), None
        self.progress.began()
        self.hangs.began(self._clock.monotonic())
        self._events.write(_begun(generation, self._names))
        # Only a fork can serve a store on a socket that it is given. A new program binds the port by itself.
        self.seating.start(generation, seat, self.progress.last, shared=self._method == "fork")

    def _go_on(self, generation: Generation, seat: Seat) -> None:
        """Let living workers go on in `generation`: first those of the one before, then those that have set up."""
        before, group = self._state, self.group
        number = before.number if before.running else 0
        lives = [(rank, number) for rank in self.pages.able(before)]
        chosen = [*lives, *((rank, 0) for rank in self.pages.ready_beside(self._joining.ranks))][: seat.workers]
        pids = {**group.pids(0), **group.pids(number)}
        now_ns = self._clock.monotonic_ns()
        self._late_at = self._clock.monotonic() + LATE_S
        # Nothing has failed before a planned change. Who has not come to that by the next one still does the same.
        still = self._spares and not all(self.pages.took_seat(before, rank) for rank, _ in lives)
        self._spares = still or generation.kind in ("join", "drain", "resize")
        self.progress.began()
        self.hangs.began(self._clock.monotonic())
        self._events.write(_begun(generation, self._names))
        ranks = self.seating.reseat(generation, seat, chosen)
        self._joining.let_in(ranks)
        by_rank = {global_rank: pids.get(rank, 0) for rank, global_rank in sorted(ranks.items())}
        self._state = before.went_on(generation, seat, ranks, by_rank, now_ns)
        others = [rank for rank in sorted(group.pids(number)) if rank not in ranks] if number else []
        if others:  # They cannot go on in place.
            group.kill(number, others)
        self._tell_started()
        if generation.waits:
            self.progress.waits()
        if len(ranks) < seat.workers:
            lost = seat.workers - len(ranks)
            why = next((f": {each.summary}" for each in before.failures if not each.collateral), "")
            self._fail_in_place(seat, f"{lost} of {seat.workers} workers had ended before they could go on{why}")
        self.attend(generation, seat.index)

    def _fail_in_place(self, seat: Seat, message: str) -> None:
        self._fail(lost_peer(rank=seat.rank_offset, node=seat.node, message=message))

    def _fail(self, failure: Failure) -> None:
        """The workers of the present generation have failed."""
        # A generation that was replaced may have been left to finish a build: its failures end nothing.
        at = self._clock.monotonic() if self._wanted is None else None
        self._state = self._state.failed(self._with_steps(failure), at)

    def _with_steps(self, failure: Failure) -> Failure:
        """A failure with the steps that this node's living workers have made: those since the last one are progress."""
        steps = [page.step if page.entered else page.beats for page in self.pages.of(self._state)]
        return replace(failure, beats=max([failure.beats, *steps]))

    def stands_by(self, generation: Generation, names: tuple[str, ...]) -> None:
        """Tell that `generation`, of the nodes `names`, runs without this node."""
        begun = _begun(generation, names)
        self._events.write(events.StandsBy(**vars(begun), age_s=round(self.progress.age_s(), 3)))

    def _tell_started(self) -> None:
        pids = self._state.pids
        ranks = tuple(sorted(pids))
        self._events.write(events.WorkersStarted(self._state.number, ranks, tuple(pids[rank] for rank in ranks)))

    # Events.

    def fold(self, event: Warm | ParentLost | WorkerStarted | WorkerSaid | WorkerEnded | GroupEnded) -> None:
        """Take note of an event, and do what follows from it on this node."""
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
                # Workers that were given up count as ended before this; those of the next generation wait for it too.
                if generation == self._state.number:
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
            case Unsaved() as missed:
                told = events.Unsaved(missed.step, event.generation, missed.reason)
                self._events.write(told)
                self._say(unsaved(told))
            case Damaged() if self._is_current(event):
                # No generation may resume from this copy again: the next takes another node's copy, or the head.
                self.seating.memory.forget()

    def _is_current(self, event: WorkerSaid | WorkerEnded | WorkerStarted | Stacks) -> bool:
        return self._state.running and event.generation == self._state.number

    def stalled(self, event: Stacks) -> None:
        """Take note of the stacks of workers that make no step, or are late; after too long, they have failed.

        They are not ended here but by the next generation: other nodes' workers would fail of it before their stacks
        were taken.
        """
        state = self._state
        if event.why == "closer":
            self.hangs.search.placed(event)
            return
        if event.why != "late" and (not self._is_current(event) or state.seat is None or state.failed_at is not None):
            return
        failure = self.hangs.report(event)
        if failure is not None:
            self._state = replace(state, failures=(self._with_steps(failure),), failed_at=self._clock.monotonic())
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
        if step.first:
            self._joining.trained(event.local_rank)
        if step.first and event.local_rank == min(self._state.seated, default=0):
            self.progress.stepped(event.generation, step)
        if event.rank == 0:
            self._events.write(events.Step(event.generation, step.step, step.epoch, step.scalars))

    def _copied(self, event: WorkerSaid, copied: Copied) -> None:
        """Keep a copy of the state. Not after a failure: the others count on the copy that the report has named.

        Where workers go on in place no copy is counted on. A worker that lost a peer during a pause leaves its newest
        step behind after that peer's end was reported, perhaps with another seat on its way to it.
        """
        generation, seated = self._state.generation, self._state.running and event.local_rank in self._state.seated
        counted_on = self._state.failed_at is not None and not self._able()
        if event.fd >= 0 and seated and generation is not None and not counted_on:
            copy = Copy(copied.step, copied.epoch, copied.size, copied.digest, generation.world_size, copied.place)
            self.seating.memory.put(copy, event.fd)
            self._events.write(events.Copied(event.generation, copied.step, copied.size))
        elif event.fd >= 0:
            self._close_file(event.fd)
        if copied.request:
            event.answer(Reply(copied.request, ok=True))

    def _left(self, left: Left, event: WorkerSaid) -> None:
        """A living worker has handed over, or lost its group because another worker has ended."""
        state = self._state
        # It may have got another seat while the message was under way.
        if not state.running or left.generation != state.number or state.seat is None:
            return
        if left.error and state.failed_at is None:
            how = f"lost its group: {in_words(left.error)}"
            self._fail(lost_peer(rank=event.rank, node=self._settings.node, message=how))
            self.progress.disturbed()
            self.progress.remember()
        elif not left.error and (self._waits or 0 < state.going <= left.step):
            self.progress.remember()
            self._state = replace(state, handed=state.handed | {event.local_rank}, going=left.step)

    def _failed_by_itself(self, event: WorkerEnded) -> bool:
        """Whether a worker has ended in the present generation, and no handover and no next generation explain that."""
        if event.generation == 0:
            return event.local_rank in self._joining.ranks
        wanted = self._wanted is not None or self._leaves or event.local_rank in self._state.handed
        return self._is_current(event) and not wanted

    def _worker_ended(self, event: WorkerEnded) -> None:
        if event.failure is not None and self._is_current(event):
            self.progress.remember()
            self.progress.tell()  # What it spent, perhaps in a pause, is told before its end.
        step = self.pages.step_of(event.local_rank, event.generation)
        ended = events.WorkerEnded(event.generation, event.rank, event.pid, event.code, step=step)
        failure = self._frozen.pop(event.pid, event.failure if self._failed_by_itself(event) else None)
        if failure is not None:
            ended = replace(ended, failure=failure.summary, collateral=failure.collateral)
        self._events.write(ended)
        if event.failure is not None and suspects_gpu(event.failure.summary):
            self._check.doubt(event.failure.summary)
        if event.failure is not None and event.failure.misfit:
            self.misfit = event.failure
        if event.generation == 0:
            self._joining_ended(event)
            return
        if self.pages.has_stepped(event.local_rank, event.generation):
            self._joining.trained(event.local_rank)  # Its message may have come when that generation was over.
        if self._joining.lost(event.local_rank) and event.failure is not None and not event.failure.collateral:
            wait_s = self._joining.failed(self._clock.monotonic())
            self._tell_next_try("was let in failed before its first step", event.failure.summary, wait_s)
        if self._is_current(event):
            self._seated_ended(event)

    def _joining_ended(self, event: WorkerEnded) -> None:
        """A worker that was to set up beside the training has ended."""
        wait_s = self._joining.ended(event.local_rank, self._clock.monotonic())
        if wait_s is not None:
            what = event.failure.summary if event.failure is not None else f"exit code {event.code}"
            self._tell_next_try("was to join failed while it set up", what, wait_s)

    def _tell_next_try(self, how: str, what: str, wait_s: float) -> None:
        self._say(f"a worker that {how}: {what}; another try in {wait_s:g} s, if the run goes on")

    def _seated_ended(self, event: WorkerEnded) -> None:
        """A worker of the present generation has ended."""
        stepped = self.progress.step() is not None
        self.progress.remember()  # Before its page is dropped from those that are looked at.
        self._state = replace(self._state, seated=self._state.seated - {event.local_rank})
        if event.local_rank in self._state.handed:
            return
        if event.failure is not None:
            if self._state.failed_at is None:
                unmet = self._state.unmet + 1 if event.failure.unmet and not stepped else 0
                self._state = replace(self._state, unmet=unmet)
            self._failed(event.failure)
        elif event.code == 0 and not self.pages.took_seat(self._state, event.local_rank):
            # It has finished in the generation before. The others wait for it, and for its state.
            message = "had ended before it could go on"
            self._failed(lost_peer(rank=event.rank, node=self._settings.node, message=message))
        elif event.code == 0:
            self._state = replace(self._state, well=(*self._state.well, event.rank))

    def _failed(self, failure: Failure) -> None:
        """A worker of the present generation has failed; the first failure ends it."""
        first = self._state.failed_at is None
        self._fail(failure)
        if not first:
            return
        self.progress.disturbed()
        self.progress.remember()
        if not self._able():
            self._end_workers()  # The others of this node can only fail too, or hang.
        elif self._state.generation is not None and self._state.seat is not None:
            self.attend(self._state.generation, self._state.seat.index)


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
