"""Reads the status pages of this node's workers a few times a second, and reports workers that do not make progress.

It costs the workers no message and no system call. A worker that a signal has stopped is ended soon (`stopped`). In the
other cases the workers' stacks are taken first (`Stacks.why`):

* "closer": no step for longer than usual. The stacks tell for which rank the others wait, see `culprit`.
* "stalled": no step for much longer. First a warning, then a failure.
* "late": workers have not taken their new seats.
* "paused": no step was expected for `--hang-timeout`: `loop.pause`, a save, code between two epochs. Only reported.
* "waited_for": workers run on after others have ended. One rank may save or evaluate alone, so it is a failure only
  when their sessions use next to no processor time for `--hang-timeout`.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from elasticrt import events
from elasticrt.event_log import EventLog
from elasticrt.ipc.failure import Failure
from elasticrt.ipc.proc import unacknowledged
from elasticrt.ipc.status_page import StatusPage
from elasticrt.ipc.time_bounds import (
    BLAME_AGAIN_S,
    CLOSER_S,
    COMPARE_S,
    FIRST_STEP_S,
    LOOK_IDLE_S,
    LOOK_S,
    STANDING_IN_PLACE_S,
)
from elasticrt.ipc.typed import typed
from elasticrt.ipc.wording import slow_node
from elasticrt.liveness.culprit import LINKS_MAX, Culprit, Position, doing, find, unagreed
from elasticrt.liveness.stacks import Stacks, keep, main_thread
from elasticrt.liveness.stall_detector import (
    IDLE_SHARE,
    STANDING_FACTOR,
    STANDING_S,
    Idle,
    Sight,
    StallDetector,
    Stand,
    Stopped,
)
from elasticrt.liveness.straggler import Comparison, Waits
from elasticrt.settings import Settings
from elasticrt.workers.failures import stalled
from elasticrt.workers.group import WorkerGroup
from elasticrt.workers.group_state import GroupState

log = logging.getLogger(__name__)

# The part of the limit of a stall after which there is a warning.
WARN_PART = 0.5
# The usual pause is the median of this many.
PAUSES_KEPT = 9
# Identifies, among stands, the wait for another group.
UNAGREED = -1


class HangMonitor:
    """Watches the workers of one node. Used by the agent's thread. Times are seconds of the monotonic clock.

    Args:
        put: takes `Stacks`, on another thread, as events for `placed` and `report`.
        say: prints a line for the user.
        group: the workers.
        state: tells what they are in.
        look: returns the pages of all that run, by local rank.
        take: asks workers for their stacks, as `stacks.take`.
        state_of: the kernel's letter for the state of a process, as `proc.state_of`.
        cpu_s: the processor time of sessions, as `proc.cpu_s`.
    """

    def __init__(
        self,
        settings: Settings,
        put: Callable[[Any], None],
        event_log: EventLog,
        say: Callable[[str], None],
        *,
        group: WorkerGroup,
        state: Callable[[], GroupState],
        look: Callable[[], Sequence[StatusPage]],
        take: Callable[..., None],
        state_of: Callable[[int], str],
        cpu_s: Callable[[Iterable[int]], float],
    ) -> None:
        self._group, self._state, self._look = group, state, look
        self._take = take
        self._state_of, self._cpu_s = state_of, cpu_s
        self._settings = settings
        self._hang_s = settings.options.hang_timeout_s
        self._put = put
        self._events = event_log
        self._say = say
        self._stopped = Stopped()
        self._stopped_look_at: float | None = None
        self._pace, self._usual_before_s = StallDetector(self._hang_s), 0.0
        self.began(0.0)

    def began(self, now: float) -> None:
        """Workers are being started, or get new seats, at `now`: their pace will be another one."""
        self._began_at = now
        self._usual_before_s = self._usual_s
        self._pace = StallDetector(self._hang_s)
        self._asked = (0, 0.0)  # The step and the part of the limit for which stacks were taken last.
        self._looped = False
        self._paused_since: float | None = None  # No step has been expected since then.
        self._told_pause = False  # That has been reported.
        self._paused_ns: int | None = None  # The time in pauses so far.
        self._pauses: tuple[float, ...] = ()  # Seconds of the newest ones.
        self._look_at: float | None = None  # None before the first step, which wakes the agent.
        self._stand = Stand()
        self.positions: tuple[Position, ...] = ()  # Of this node's workers, while their steps stand still.
        self.said: Mapping[str, object] = {}  # What other agents hear about the workers. Any thread may read it.
        self.comparison, self._compare_at, self._waits_at = Comparison(), 0.0, 0.0  # Of the nodes' own work.
        self._culprit: Culprit | None = None  # The finding about the present stand.
        self._blamed: dict[str, float] = {}  # When each finding was reported last.
        self._written = 0, 0, ""  # The step, the look and the key of the last finding that was written.
        # Since when a loss is known after which no other group can be agreed, and why not; "": it can.
        self._unagreed = 0.0, ""
        self._last_at = 0.0  # When the newest step had ended, at the last closer look for one.
        self._told_of: int | None = None  # The step after which none came, as people were told.
        self._stood_since = 0.0  # Since when, as they were told first.
        self._idle_until: float | None = None
        self._idle: Idle | None = None
        self._idle_look_at: float | None = None
        self._used = now, math.inf  # When it was asked last whether late workers work; their processor time then.

    @property
    def _usual_s(self) -> float:
        """The median seconds of a step; until it is known that of the generation before, 0.0 for none."""
        return self._pace.usual_s or self._usual_before_s

    def wake_at(self) -> list[float]:
        """The times at which to look again."""
        times = (self._look_at or self._idle_until, self._idle_look_at, *self._stand.asks, self._stopped_look_at)
        return [at for at in times if at is not None]

    def look(self, now: float, *, held: bool) -> None:
        """Look at the pages of all running workers, if it is time `now`.

        `held`: the workers stop after their step for a handover, so no step is expected.
        """
        if self._look_at is not None and now < self._look_at:
            return
        pages = self._look()
        self._look_at, self._idle_until = None, now + LOOK_IDLE_S if pages else None
        in_loop = bool(pages) and all(page.entered for page in pages)
        paused_ns = max((page.pause_ns for page in pages), default=0)
        if self._paused_ns is not None and paused_ns > self._paused_ns:
            self._pauses = (*self._pauses, (paused_ns - self._paused_ns) / 1e9)[-PAUSES_KEPT:]
        self._paused_ns = paused_ns
        if in_loop and not held and not all(page.stepping for page in pages):
            self._paused_since = self._paused_since or now
        else:
            self._paused_since, self._told_pause = None, False
        if not in_loop and not (pages and all(page.beats for page in pages)):
            return
        if in_loop and not self._looped:  # Steps of optimizers before the Loop do not count.
            self._looped, self._pace = True, StallDetector(self._hang_s)
        in_place = all(page.in_place for page in pages)
        self._look_at = now + LOOK_S
        sight = (sight_of_steps if in_loop else sight_of_beats)(pages, held=held)
        if sight.ready_at < self._began_at:
            # A page of before: its worker has not taken its new seat. The time since it was ready was many steps.
            sight = replace(sight, ready_at=0.0)
        pace = replace(self._pace, standing_s=STANDING_IN_PLACE_S if in_place else STANDING_S)
        self._pace = pace.looked(sight, now)

    def stopped(self, now: float, pids: Collection[int]) -> frozenset[int]:
        """Those of the workers `pids` that a signal has stopped for so long that they will not go on by themselves."""
        if not self._hang_s or now - self._stopped.looked_at < LOOK_S:
            return frozenset()
        # A process under a debugger ("t") is not meant. `began` leaves this as it is: a worker may get another seat
        # while it is stopped.
        self._stopped = self._stopped.looked([pid for pid in pids if self._state_of(pid) == "T"], now)
        self._stopped_look_at = now + LOOK_S if pids else None
        return self._stopped.over(now)

    def work(self, now: float, pids: Collection[int], age_s: float) -> bool:
        """Whether the workers `pids`, which have been late for `age_s`, have used processor time since the question
        before. None has at the first question, nor after --hang-timeout."""
        (at, before_s), self._used = self._used, (now, self._cpu_s(pids))
        too_long = 0 < self._hang_s <= age_s
        return bool(pids) and not too_long and self._used[1] - before_s >= IDLE_SHARE * (now - at)

    def stood(self, now: float) -> events.Stalled:
        """The event about workers that a signal has stopped, as of `now`."""
        age_s = round(now - self._pace.since, 1) if self._pace.step else 0.0
        return events.Stalled(self._state().number, self._pace.step, age_s, True, {})

    def look_closer(self, now: float, *, ask_s: Iterable[float]) -> bool:
        """If there has been no step for long at `now`, take the workers' stacks for `placed`; `ask_s` later it is time
        to ask other nodes, each time. Returns whether there is a step again."""
        pages, generation = self._look(), self._state().number
        at = [last_ns(page) / 1e9 for page in pages]
        if not at or not all(at):
            return False
        step = sum(map(step_of, pages))
        made = all(page.step_at_ns or page.beat_at_ns for page in pages)
        bound_s = max(STANDING_FACTOR * self._usual_s, CLOSER_S if made else FIRST_STEP_S)
        if self._hang_s:
            bound_s = min(bound_s, WARN_PART * self._hang_s)
        before = self._stand
        self._stand = before.looked(step, max(at), now, bound_s, ask_s)
        if before.step != step:
            self.positions, self._culprit = (), None
            if step > before.step:  # It falls when a worker ends.
                # Optimizers tell of their part of a step before it ends, and a stand between two steps ends with none.
                self._goes_on(generation, (max(at) if max(at) > self._stood_since else now) - self._stood_since)
        self._last_at = max(at)
        if self._stand.times > before.times:
            self.ask(Stacks("closer", generation, min(map(step_of, pages)), now - max(at), False))
        return before.times > 0 and before.step != step

    def look_for_agreement(self, now: float, failed_at: float, why: str, *, ask_s: Iterable[float]) -> None:
        """Workers here have failed at `failed_at`, or lost their group. While no other one can be agreed (`why`; "": it
        can), it is time to ask other nodes who is lost, each `ask_s` after a look."""
        if not why:
            self._unagreed = failed_at, why
            return
        if self._stand.step != UNAGREED:
            self.positions, self._culprit = (), None
        self._unagreed, self._last_at = (failed_at, why), self._last_at or failed_at
        self._stand = self._stand.looked(UNAGREED, failed_at, now, CLOSER_S, ask_s)

    def _goes_on(self, generation: int, stood_s: float) -> None:
        """Tell that there are steps again, after `stood_s` seconds, if it was told that there were none."""
        if self._told_of is not None:
            self._events.write(events.GoesOn(generation, self._told_of))
            self._say(f"the steps go on: none was made for {stood_s:.0f} s after step {self._told_of:,}")
        self._told_of = None

    def _told(self, step: int) -> None:
        """Note that people were told that there is none after `step`."""
        self._stood_since = self._last_at if self._told_of is None else self._stood_since
        self._told_of = step

    def placed(self, stacks: Stacks) -> None:
        """Note the positions of the workers from the `stacks` of `look_closer`, unless the steps go on again."""
        state = self._state()
        if not self._stand.times or not state.running or stacks.generation != state.number:
            return
        ranks, pids = state.ranks, self._group.pids(state.number)
        pages = dict(zip(sorted(state.seated), self._look(), strict=False))

        def position(local_rank: int, lines: Sequence[str]) -> Position:
            page, pid, (what, place) = pages[local_rank], pids.get(local_rank, 0), doing(main_thread(lines))
            return Position(
                rank=ranks[local_rank],
                step=step_of(page),
                stepping=bool(page.stepping or not page.entered),
                state=self._state_of(pid),
                doing=what,
                place=place,
                begun=page.begun,
                unheard=",".join(unacknowledged(pid)[:LINKS_MAX]),
            )

        known = pages.keys() & ranks.keys()
        self.positions = tuple(position(rank, lines) for rank, lines in stacks.lines.items() if rank in known)
        self._waits_at = 0.0

    def is_to_ask(self, now: float, *, first: bool) -> bool:
        """Whether to ask other nodes about their workers `now`: after each closer look at this node's workers, and on
        the node of rank 0, the `first`, every COMPARE_S while steps are made."""
        if first and now >= self._compare_at and self._pace.recent:
            self._compare_at = now + COMPARE_S
            return True
        before, self._stand = self._stand, self._stand.asked(now)
        return before != self._stand and bool(self.positions or self._unagreed[1])

    def look_at_waits(self, now: float) -> None:
        """Renew `said`, if it is time `now`."""
        if now < self._waits_at:
            return
        self._waits_at = now + LOOK_IDLE_S
        state = self._state()
        by_rank = dict(zip((state.ranks[each] for each in sorted(state.seated)), self._look(), strict=False))
        waits = [[rank, page.waited_ns, page.waits] for rank, page in by_rank.items()]
        known = [(each, by_rank[each.rank]) for each in self.positions if each.rank in by_rank]
        self.positions = tuple(replace(each, begun=page.begun, flights=page.flights) for each, page in known)
        found: dict[str, object] = {"culprit": vars(self._culprit)} if self._culprit is not None else {}
        if failed := [each.summary for each in state.failures if not each.collateral]:
            found["failed"] = failed[0]
        self.said = {"workers": [asdict(each) for each in self.positions], "waits": waits, **found}

    def compare(self, others: Mapping[str, Mapping[str, object]]) -> None:
        """Report a node that is slow, or no more, from the waits of all ranks. `others`: other agents' answers."""
        own = self._settings.node
        totals = dict(_waits({own: self.said, **others}))
        step = self._pace.step
        before, self.comparison = self.comparison, self.comparison.looked(totals, step, self._pace.usual_s)
        found = self.comparison.certain
        if (before.certain is None) == (found is None):
            return
        node, own_s, others_s = (found.node, found.own_s, found.others_s) if found is not None else ("", 0.0, 0.0)
        self._events.write(events.Straggler(self._state().number, step, node, round(own_s, 4), round(others_s, 4)))
        if found is not None:
            self._say(slow_node(node, own_s, others_s))

    def blame(
        self,
        now: float,
        nodes: Mapping[str, str],
        others: Mapping[str, Mapping[str, object]],
        reached: Mapping[str, str],
        *,
        last: bool = False,
    ) -> None:
        """Report at `now` for which ranks the others wait, unless they are in a pause that is hardly longer than usual.

        Args:
            nodes: the addresses of the generation's nodes, as far as they were asked, and this one's.
            others: the other agents' answers, by node.
            reached: of those that have not answered, by which other node each is reached.
            last: whether another question would tell no more.
        """
        own, why = self._settings.node, self._unagreed[1]
        if why:
            silent_ones = [node for node in nodes if node != own and node not in others]
            failed = [said for each in (self.said, *others.values()) if isinstance(said := each.get("failed"), str)]
            if not (silent_ones or failed):
                failed = [each.summary for each in self._state().failures[:1]]
            self._tell(now, replace(unagreed(silent_ones, failed, why), step=self._pace.step))
            return
        if not self.positions:
            return
        by_node: dict[str, Sequence[Position]] = {own: self.positions, **dict(positions_in(others))}
        names = {address: node for node, address in nodes.items()}
        silent = {node: reached.get(node, "") for node in nodes if node not in by_node}
        alone = len(nodes) == self._settings.workers == 1
        if alone and not (self._looped and (self._pace.first or self._stand.times > 1)):
            # A script without a Loop may evaluate between two steps, and a first step may take long.
            by_node[own] = [replace(each, stepping=False) for each in self.positions]
        culprit = find(by_node, silent, names, own, again=bool(self._stand.asks) and not last, alone=alone)
        pause_s = STANDING_FACTOR * statistics.median_low(self._pauses) if self._pauses else math.inf
        age_s = now - self._last_at
        if culprit is not None and not (culprit.resting and age_s < min(pause_s, self._hang_s or math.inf)):
            self._tell(now, replace(culprit, step=self._own_step()))

    def hear(self, now: float, answer: Mapping[str, object]) -> None:
        """Report at `now` what the node of rank 0 has found, by its `answer` or the leader's, if steps stand still."""
        found = answer.get("culprit")
        if not (self.positions or self._unagreed[1]) or not isinstance(found, dict):
            return
        try:
            self._tell(now, typed(Culprit, found))
        except TypeError as error:
            log.warning("the finding of the node of rank 0 cannot be read: %s", error)

    def _own_step(self) -> int:
        return min(each.step for each in self.positions)

    def _tell(self, now: float, culprit: Culprit) -> None:
        self._culprit, self._waits_at = culprit, 0.0
        age_s, step = now - self._last_at, culprit.step
        self._told(step)
        found = step, self._stand.times, culprit.key
        if found != self._written:  # The nodes are also asked for `compare`, and then say the same again.
            self._written = found
            (failed_at, why), number = self._unagreed, self._state().number
            unagreed_s = round(now - failed_at, 1) if why else 0.0
            self._events.write(
                events.Culprit(number, step, round(age_s, 1), culprit.ranks, culprit.nodes, culprit.reason, unagreed_s)
            )
        if now - self._blamed.get(culprit.key, -BLAME_AGAIN_S) >= BLAME_AGAIN_S:
            self._blamed[culprit.key] = now
            self._say(f"no step for {age_s:.0f} s after step {step:,}: {culprit.reason}")

    def standing_since(self, now: float) -> float | None:
        """See `StallDetector.standing_since`."""
        return self._pace.standing_since(now)

    def ask_if_stalled(self, now: float) -> None:
        """Take stacks at `now` after half of the limit of a stall, after all of it, and in a pause of that length."""
        generation = self._state().number
        paused_s = now - self._paused_since if self._paused_since is not None else 0.0
        if 0 < self._hang_s <= paused_s and not self._told_pause:
            self._told_pause = True
            self.ask(Stacks("paused", generation, self._pace.step, paused_s, False))
            return
        for part in (1.0, WARN_PART):
            age_s = self._pace.stalled_s(now, part=part) if self._looped else None
            if age_s is not None and self._asked < (self._pace.step, part):
                self._asked = (self._pace.step, part)
                self.ask(Stacks("stalled", generation, self._pace.step, age_s, part == 1.0))
                return

    def ask_if_waited_for(self, now: float, ended: Sequence[str], left: Mapping[int, int]) -> None:
        """Look at `now` at the workers that run on after those that `ended` names: `left` are pids by local rank."""
        if not ended or not left:
            self._idle, self._idle_look_at = None, None
        elif self._idle_look_at is None or now >= self._idle_look_at:
            self._idle_look_at = now + LOOK_IDLE_S
            used_s = self._cpu_s(left.values())
            before = self._idle or Idle(now, used_s, now)
            self._idle = before.looked(used_s, now, self._hang_s)
            over = self._idle.over and not before.over
            if over or (self._idle.said and not before.said):
                age_s = now - (before.idle_since if over else before.since)
                who = " and ".join(ended)
                self.ask(Stacks("waited_for", self._state().number, 0, age_s, over, ended=who), left)

    def ask(self, blank: Stacks, local_ranks: Collection[int] = ()) -> None:
        """Ask all workers of a generation, or `local_ranks`, for their stacks. `blank`: the answer without lines."""
        group, generation, pids = self._group, blank.generation, self._group.pids(blank.generation)
        workers = {rank: (pids[rank], group.page(rank, generation)) for rank in local_ranks or pids if rank in pids}

        def signal(number: int, ranks: Sequence[int]) -> None:
            group.signal(number, generation, ranks)

        self._take(workers, partial(group.look, generation), signal, self._put, blank)

    def report(self, stacks: Stacks) -> Failure | None:
        """Report `stacks`. Returns the failure, if they are final."""
        if (stacks.why == "stalled" and stacks.step != self._pace.step) or not stacks.lines:
            return None  # The steps go on again, or the workers have ended meanwhile.
        node, generation, ranks = self._settings.node, stacks.generation, self._state().ranks
        lines = {ranks.get(local_rank, local_rank): each for local_rank, each in stacks.lines.items()}
        report = self._report_waited_for if stacks.why == "waited_for" else self._report_stand
        message = report(stacks, lines)
        return stalled(node=node, generation=generation, message=message, stacks=lines) if stacks.final else None

    def _report_waited_for(self, stacks: Stacks, lines: Mapping[int, Sequence[str]]) -> str:
        """Say which ranks run on after others have ended. Returns the failure's message."""
        age, bound = f"{stacks.age_s:.0f} s", ""
        if stacks.final:
            self._write(stacks, lines, self._pace.step)
        if self._hang_s:
            bound = f", until it has done nothing for {self._hang_s:g} s (--hang-timeout)"
        what = "has done nothing since" if stacks.final else f"is waited for{bound}"
        for rank, each in lines.items():
            self._say(f"{stacks.ended} ended {age} ago; rank {rank} {what}: {where(each)}")
        who = f"rank {min(lines)} on {self._settings.node}"
        return f"{who} did not end, and did nothing for {age}, after {stacks.ended} had"

    def _report_stand(self, stacks: Stacks, lines: Mapping[int, Sequence[str]]) -> str:
        """Keep the stacks of workers that make no step, and say where they are. Returns the failure's message."""
        age_s, directory = stacks.age_s, self._settings.run_dir
        keep(stacks, lines, self._settings.node, directory)
        if stacks.why == "stalled":
            self._write(stacks, lines, stacks.step)
            if not stacks.final:
                logs = f"{directory}/logs/generation-{stacks.generation}"
                self._say(f"no step for {age_s:.0f} s after step {stacks.step:,}; stacks are in {logs}")
                self._told(stacks.step)
        for rank, each in lines.items() if stacks.why == "paused" else ():
            self._say(f"no step was expected for {age_s:.0f} s (loop.pause, a save): rank {rank} is at {where(each)}")
        culprit = f": {self._culprit.reason}" if self._culprit is not None else ""
        return f"no progress for {age_s:.0f} s after step {stacks.step:,}{culprit}"

    def _write(self, stacks: Stacks, lines: Mapping[int, Sequence[str]], step: int) -> None:
        by_rank = {str(rank): tuple(each) for rank, each in lines.items()}
        self._events.write(events.Stalled(stacks.generation, step, round(stacks.age_s, 3), stacks.final, by_rank))


def last_ns(page: StatusPage) -> int:
    """When the wait for a worker's next step began, in CLOCK_MONOTONIC nanoseconds; 0 before its first one."""
    return max(page.step_at_ns, page.beat_at_ns, page.restored_at_ns)


def step_of(page: StatusPage) -> int:
    """The last step that a worker has done, or begins after; without a Loop the number of its optimizers' steps."""
    return page.entered - 1 if page.entered else page.beats


def sight_of_steps(pages: Sequence[StatusPage], *, held: bool) -> Sight:
    """The sight of workers with a Loop: the one that is furthest behind. `held`: no step is expected."""
    last = min(pages, key=lambda page: page.step if page.step_at_ns else 0)
    expected = not held and all(page.stepping for page in pages)
    return Sight(step_of(last), last.step_at_ns / 1e9, expected, last.restored_at_ns / 1e9)


def sight_of_beats(pages: Sequence[StatusPage], *, held: bool) -> Sight:
    """The same without a Loop: workers may make different numbers of steps, so the oldest newest one counts."""
    last = min(pages, key=lambda page: page.beat_at_ns)
    return Sight(sum(page.beats for page in pages), last.beat_at_ns / 1e9, not held, last.begun_at_ns / 1e9)


def _waits(by_node: Mapping[str, Mapping[str, object]]) -> Iterator[tuple[int, Waits]]:
    """The waits in agents' answers, by rank. Anything malformed is left out."""
    for node, fields in by_node.items():
        said = fields.get("waits")
        for each in said if isinstance(said, list) else ():
            if isinstance(each, list) and len(each) == 3 and all(type(number) is int for number in each):
                yield each[0], Waits(node, each[1], each[2])


def positions_in(by_node: Mapping[str, Mapping[str, object]]) -> Iterator[tuple[str, list[Position]]]:
    """The positions in other agents' answers, by node. An answer with anything malformed is left out."""
    for node, fields in by_node.items():
        said = fields.get("workers")
        try:
            yield node, [typed(Position, dict(each)) for each in said] if isinstance(said, list) else []
        except (TypeError, ValueError) as error:
            log.warning("the positions of the workers of %s cannot be read: %s", node, error)


def where(lines: Sequence[str]) -> str:
    """The innermost place in the `lines` of a stack; the first lines if there is none."""
    places = [line.strip() for line in lines if line.startswith("  File ")]
    return places[0] if places else "; ".join(lines[:2])
