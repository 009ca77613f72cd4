"""For which ranks the others of a generation wait, and which node is slower than the others.

While steps stand still each agent takes the stacks of its workers. That of rank 0 asks the others where theirs are, and
all hear from it what it has found: see `culprit`.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from elasticrt import events
from elasticrt.ipc.proc import unacknowledged
from elasticrt.ipc.time_bounds import BLAME_AGAIN_S, CLOSER_S, COMPARE_S, FIRST_STEP_S, LOOK_IDLE_S
from elasticrt.ipc.typed import typed
from elasticrt.ipc.wording import slow_node
from elasticrt.liveness.culprit import LINKS_MAX, Culprit, Position, doing, find, unagreed
from elasticrt.liveness.stacks import Stacks, main_thread
from elasticrt.liveness.stall_detector import STANDING_FACTOR, WARN_PART, Stand
from elasticrt.liveness.step_watch import StepWatch, last_ns, step_of
from elasticrt.liveness.straggler import Comparison, Waits
from elasticrt.liveness.watched_workers import WatchedWorkers

log = logging.getLogger(__name__)

# Identifies, among stands, the wait for another group.
UNAGREED = -1


class CulpritSearch:
    """What this node knows of who holds the training up. Times are seconds of the monotonic clock.

    Attributes:
        positions: of this node's workers, while their steps stand still.
        said: what other agents hear about the workers. Any thread may read it.
    """

    def __init__(self, workers: WatchedWorkers, steps: StepWatch) -> None:
        self._workers, self._steps = workers, steps
        self._hang_s = workers.settings.options.hang_timeout_s
        self.began()

    def began(self) -> None:
        """Workers are being started, or get new seats."""
        self.positions: tuple[Position, ...] = ()
        self._stand = Stand()
        self.said: Mapping[str, object] = {}
        self._comparison, self._compare_at, self._waits_at = Comparison(), 0.0, 0.0  # Of the nodes' own work.
        self._culprit: Culprit | None = None  # The finding about the present stand.
        self._blamed: dict[str, float] = {}  # When each finding was reported last.
        self._written = 0, 0, ""  # The step, the look and the key of the last finding that was written.
        # Since when a loss is known after which no other group can be agreed, and why not; "": it can.
        self._unagreed = 0.0, ""
        self._last_at = 0.0  # When the newest step had ended, at the last closer look for one.
        self._told_of: int | None = None  # The step after which none came, as people were told.
        self._stood_since = 0.0  # Since when, as they were told first.

    def wake_at(self) -> Sequence[float]:
        """When to ask other nodes."""
        return self._stand.asks

    @property
    def reason(self) -> str:
        """Whom the others wait for, and what it does; "": that is not known."""
        return self._culprit.reason if self._culprit is not None else ""

    def look_closer(self, now: float, *, ask_s: Iterable[float]) -> bool:
        """If there has been no step for long at `now`, take the workers' stacks for `placed`; `ask_s` later it is time
        to ask other nodes, each time. Returns whether there is a step again."""
        pages, generation = self._workers.look(), self._workers.state().number
        at = [last_ns(page) / 1e9 for page in pages]
        if not at or not all(at):
            return False
        step = sum(map(step_of, pages))
        made = all(page.step_at_ns or page.beat_at_ns for page in pages)
        bound_s = max(STANDING_FACTOR * self._steps.usual_s, CLOSER_S if made else FIRST_STEP_S)
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
            self._workers.ask(Stacks("closer", generation, min(map(step_of, pages)), now - max(at), False))
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
            self._workers.event_log.write(events.GoesOn(generation, self._told_of))
            self._workers.say(f"the steps go on: none was made for {stood_s:.0f} s after step {self._told_of:,}")
        self._told_of = None

    def told(self, step: int) -> None:
        """Note that people were told that there is none after `step`."""
        self._stood_since = self._last_at if self._told_of is None else self._stood_since
        self._told_of = step

    def placed(self, stacks: Stacks) -> None:
        """Note the positions of the workers from the `stacks` of `look_closer`, unless the steps go on again."""
        state = self._workers.state()
        if not self._stand.times or not state.running or stacks.generation != state.number:
            return
        ranks, pids = state.ranks, self._workers.group.pids(state.number)
        pages = dict(zip(sorted(state.seated), self._workers.look(), strict=False))

        def position(local_rank: int, lines: Sequence[str]) -> Position:
            page, pid, (what, place) = pages[local_rank], pids.get(local_rank, 0), doing(main_thread(lines))
            return Position(
                rank=ranks[local_rank],
                step=step_of(page),
                stepping=bool(page.stepping or not page.entered),
                state=self._workers.state_of(pid),
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
        if first and now >= self._compare_at and self._steps.pace.recent:
            self._compare_at = now + COMPARE_S
            return True
        before, self._stand = self._stand, self._stand.asked(now)
        return before != self._stand and bool(self.positions or self._unagreed[1])

    def look_at_waits(self, now: float) -> None:
        """Renew `said`, if it is time `now`."""
        if now < self._waits_at:
            return
        self._waits_at = now + LOOK_IDLE_S
        state = self._workers.state()
        by_rank = dict(zip((state.ranks[each] for each in sorted(state.seated)), self._workers.look(), strict=False))
        waits = [[rank, page.waited_ns, page.waits] for rank, page in by_rank.items()]
        known = [(each, by_rank[each.rank]) for each in self.positions if each.rank in by_rank]
        self.positions = tuple(replace(each, begun=page.begun, flights=page.flights) for each, page in known)
        found: dict[str, object] = {"culprit": vars(self._culprit)} if self._culprit is not None else {}
        if failed := [each.summary for each in state.failures if not each.collateral]:
            found["failed"] = failed[0]
        self.said = {"workers": [asdict(each) for each in self.positions], "waits": waits, **found}

    def compare(self, others: Mapping[str, Mapping[str, object]]) -> None:
        """Report a node that is slow, or no more, from the waits of all ranks. `others`: other agents' answers."""
        own = self._workers.settings.node
        totals = dict(_waits({own: self.said, **others}))
        step = self._steps.pace.step
        before, self._comparison = self._comparison, self._comparison.looked(totals, step, self._steps.pace.usual_s)
        found = self._comparison.certain
        if (before.certain is None) == (found is None):
            return
        node, own_s, others_s = (found.node, found.own_s, found.others_s) if found is not None else ("", 0.0, 0.0)
        number = self._workers.state().number
        self._workers.event_log.write(events.Straggler(number, step, node, round(own_s, 4), round(others_s, 4)))
        if found is not None:
            self._workers.say(slow_node(node, own_s, others_s))

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
        own, why = self._workers.settings.node, self._unagreed[1]
        if why:
            silent_ones = [node for node in nodes if node != own and node not in others]
            failed = [said for each in (self.said, *others.values()) if isinstance(said := each.get("failed"), str)]
            if not (silent_ones or failed):
                failed = [each.summary for each in self._workers.state().failures[:1]]
            self._tell(now, replace(unagreed(silent_ones, failed, why), step=self._steps.pace.step))
            return
        if not self.positions:
            return
        by_node: dict[str, Sequence[Position]] = {own: self.positions, **dict(positions_in(others))}
        names = {address: node for node, address in nodes.items()}
        silent = {node: reached.get(node, "") for node in nodes if node not in by_node}
        alone = len(nodes) == self._workers.settings.workers == 1
        if alone and not (self._steps.looped and (self._steps.pace.first or self._stand.times > 1)):
            # A script without a Loop may evaluate between two steps, and a first step may take long.
            by_node[own] = [replace(each, stepping=False) for each in self.positions]
        culprit = find(by_node, silent, names, own, again=bool(self._stand.asks) and not last, alone=alone)
        pause_s = STANDING_FACTOR * statistics.median_low(self._steps.pauses_s) if self._steps.pauses_s else math.inf
        age_s = now - self._last_at
        if culprit is not None and not (culprit.resting and age_s < min(pause_s, self._hang_s or math.inf)):
            self._tell(now, replace(culprit, step=min(each.step for each in self.positions)))

    def hear(self, now: float, answer: Mapping[str, object]) -> None:
        """Report at `now` what the node of rank 0 has found, by its `answer` or the leader's, if steps stand still."""
        found = answer.get("culprit")
        if not (self.positions or self._unagreed[1]) or not isinstance(found, dict):
            return
        try:
            self._tell(now, typed(Culprit, found))
        except TypeError as error:
            log.warning("the finding of the node of rank 0 cannot be read: %s", error)

    def _tell(self, now: float, culprit: Culprit) -> None:
        self._culprit, self._waits_at = culprit, 0.0
        age_s, step = now - self._last_at, culprit.step
        self.told(step)
        found = step, self._stand.times, culprit.key
        if found != self._written:  # The nodes are also asked for `compare`, and then say the same again.
            self._written = found
            (failed_at, why), number = self._unagreed, self._workers.state().number
            unagreed_s = round(now - failed_at, 1) if why else 0.0
            self._workers.event_log.write(
                events.Culprit(number, step, round(age_s, 1), culprit.ranks, culprit.nodes, culprit.reason, unagreed_s)
            )
        if now - self._blamed.get(culprit.key, -BLAME_AGAIN_S) >= BLAME_AGAIN_S:
            self._blamed[culprit.key] = now
            self._workers.say(f"no step for {age_s:.0f} s after step {step:,}: {culprit.reason}")


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
