"""Searches for the ranks for which the others of a generation wait, and for a node that is slower than the others.

While steps stand still, each agent takes the stacks of its workers. The agent on rank 0's node then asks the other
agents for their workers' positions, and finds the culprit (`liveness.culprit`). The other agents ask that agent for its
finding.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from elasticrt import events
from elasticrt.ipc.failure import Failure
from elasticrt.ipc.proc import unacknowledged
from elasticrt.ipc.time_bounds import CLOSER_S, COMPARE_S, FIRST_STEP_S, FOUND_S, LOOK_IDLE_S, PLACES_S
from elasticrt.ipc.typed import typed
from elasticrt.ipc.wording import UNAGREED, slow_node
from elasticrt.liveness.culprit import LINKS_MAX, Culprit, Position, doing, find
from elasticrt.liveness.stacks import Stacks, main_thread
from elasticrt.liveness.stall_detector import STANDING_FACTOR, WARN_PART, WatchedStandstill
from elasticrt.liveness.step_watch import StepWatch, last_ns, step_of
from elasticrt.liveness.straggler import Comparison
from elasticrt.liveness.watched_workers import WatchedWorkers

log = logging.getLogger(__name__)


class CulpritSearch:
    """One node's part of the search. Times are seconds of the monotonic clock.

    Args:
        workers: the node's workers.
        steps: reads their steps.

    Attributes:
        positions: the positions of this node's workers, while their steps stand still.
        answer: what this agent answers when others ask about its workers: positions, own work and findings, as JSON.
            Any thread may read it.
        unanswered_at: when it was last found that nodes do not answer or a link is cut, so that the agents should probe
            each other; None if that is not so. It also counts where no step is expected, as in an evaluation.
    """

    def __init__(self, workers: WatchedWorkers, steps: StepWatch) -> None:
        self._workers, self._steps = workers, steps
        self._hang_s = workers.settings.options.hang_timeout_s
        self.began()

    def began(self) -> None:
        """Begin anew, because workers are being started or get new seats."""
        self.positions: tuple[Position, ...] = ()
        self._standstill = WatchedStandstill()
        self.answer: Mapping[str, object] = {}
        # The comparison of the nodes' own work, when to ask for the next one, and when to renew `answer`.
        self._comparison, self._compare_at, self._renew_at = Comparison(), 0.0, 0.0
        # The finding about the present stand.
        self._culprit: Culprit | None = None
        self.unanswered_at: float | None = None
        # The step, the look and the key of the last finding that was written as an event and printed.
        self._written = 0, 0, ""
        # When the newest step had ended, as of the last closer look.
        self._last_at = 0.0
        # The step after which no other one came, if that was printed, and when that step had ended.
        self._reported_step: int | None = None
        self._stood_since = 0.0

    def wake_at(self) -> Sequence[float]:
        """The times at which to ask other nodes."""
        return self._standstill.ask_at

    @property
    def reason(self) -> str:
        """For which rank the others wait, and what it does, in words; "" if that is unknown."""
        return self._culprit.reason if self._culprit is not None else ""

    def look_closer(self, now: float, *, ask_s: Iterable[float]) -> bool:
        """Take the workers' stacks if no step has been made for too long at `now`. They arrive at `note_positions`.

        The bound is several times the usual step, and at least CLOSER_S (before the first step FIRST_STEP_S). It
        doubles with each look at the same stand.

        `ask_s`: the seconds from a look to each question to other nodes.

        Returns whether steps are made again after a stand.
        """
        pages, generation = self._workers.pages(), self._workers.state().number
        at = [last_ns(page) / 1e9 for page in pages]
        if not at or not all(at):
            return False
        step = sum(map(step_of, pages))
        made = all(page.step_at_ns or page.beat_at_ns for page in pages)
        bound_s = max(STANDING_FACTOR * self._steps.usual_s, CLOSER_S if made else FIRST_STEP_S)
        # With a short --hang-timeout the look comes no later than the warning about a stall.
        if self._hang_s:
            bound_s = min(bound_s, WARN_PART * self._hang_s)
        before = self._standstill
        # With the same step, too: after a wait for nodes the workers have taken other seats.
        begins = before.step != step or now - max(at) < bound_s
        self._standstill = (WatchedStandstill(step) if begins else before).looked(step, max(at), now, bound_s, ask_s)
        if begins:
            self.positions, self._culprit, self.unanswered_at = (), None, None
        # The sum of all steps falls when a worker ends. That is no progress.
        if step > before.step:
            # Without a Loop, optimizers count their part of a step before the step has ended. So the newest count may
            # be older than the stand that it ends, and then the stand has lasted until now.
            self._report_going_on(generation, (max(at) if max(at) > self._stood_since else now) - self._stood_since)
        self._last_at = max(at)
        if self._standstill.looks > before.looks:
            self._workers.ask_for_stacks(Stacks("closer", generation, min(map(step_of, pages)), now - max(at), False))
        return before.looks > 0 and before.step != step

    def _report_going_on(self, generation: int, stood_s: float) -> None:
        """Say that steps are made again after `stood_s` seconds, if the stand was reported."""
        if self._reported_step is not None:
            self._workers.event_log.write(events.GoesOn(generation, self._reported_step))
            self._workers.say(f"the steps go on: none was made for {stood_s:.0f} s after step {self._reported_step:,}")
        self._reported_step = None

    def note_reported(self, step: int) -> None:
        """Note that a stand after `step` was reported."""
        # A later report about the same stand does not change since when the steps stand.
        self._stood_since = self._last_at if self._reported_step is None else self._stood_since
        self._reported_step = step

    def note_positions(self, stacks: Stacks) -> None:
        """Note the positions of the workers from the `stacks` that `look_closer` has taken.

        They are dropped if steps are made again, or if another generation has begun.
        """
        state = self._workers.state()
        if not self._standstill.looks or not state.running or stacks.generation != state.number:
            return
        ranks, pids = state.ranks, self._workers.group.pids(state.number)
        pages = dict(zip(sorted(state.seated), self._workers.pages(), strict=False))

        def position(local_rank: int, lines: Sequence[str]) -> Position:
            page, pid, (what, place) = pages[local_rank], pids.get(local_rank, 0), doing(main_thread(lines))
            return Position(
                rank=ranks[local_rank],
                step=step_of(page),
                stepping=bool(page.stepping or page.is_meeting or not page.entered),
                state=self._workers.state_of(pid),
                doing=what,
                place=place,
                begun=page.begun,
                unheard=",".join(unacknowledged(pid)[:LINKS_MAX]),
            )

        known = pages.keys() & ranks.keys()
        self.positions = tuple(position(rank, lines) for rank, lines in stacks.lines.items() if rank in known)
        self._renew_at = 0.0

    def asks_for_positions(self, now: float) -> int:
        """The generation whose other nodes the agent should ask at `now` for their workers' positions; 0 for none."""
        state = self._workers.state()
        due = self.is_to_ask(now, first=state.is_first)
        return state.number if due and state.running else 0

    def is_to_ask(self, now: float, *, first: bool) -> bool:
        """Whether to ask other nodes about their workers at `now`.

        It is time some seconds after each closer look, and on the node of rank 0 (`first`) also every COMPARE_S, to
        compare the nodes' own work.
        """
        if first and now >= self._compare_at and self._steps.detector.recent:
            self._compare_at = now + COMPARE_S
            return True
        before, self._standstill = self._standstill, self._standstill.without_due_questions(now)
        return before != self._standstill and bool(self.positions)

    def renew_answer(self, now: float, own_s: float) -> None:
        """Renew `answer`, if that is due at `now`. `own_s`: as `Progress.own_s`."""
        if now < self._renew_at:
            return
        self._renew_at = now + LOOK_IDLE_S
        state = self._workers.state()
        by_rank = dict(zip((state.ranks[each] for each in sorted(state.seated)), self._workers.pages(), strict=False))
        # A worker may write its collectives a moment after its stack. So the positions are completed with each look.
        known = [(each, by_rank[each.rank]) for each in self.positions if each.rank in by_rank]
        self.positions = tuple(replace(each, begun=page.begun, flights=page.flights) for each, page in known)
        found = {"culprit": vars(self._culprit)} if self._culprit is not None else {}
        self.answer = {"workers": [asdict(each) for each in self.positions], "own_s": own_s, **found}

    def compare(self, others: Mapping[str, Mapping[str, object]]) -> None:
        """Report when a node becomes slow, and when it no longer is. `others`: other agents' answers, by node."""
        answers = {self._workers.settings.node: self.answer, **others}
        said = {node: fields.get("own_s") for node, fields in answers.items()}
        own = {node: own_s for node, own_s in said.items() if isinstance(own_s, float) and 0 < own_s < math.inf}
        step = self._steps.detector.step
        before, self._comparison = self._comparison, self._comparison.looked(own, step)
        found = self._comparison.certain
        if (before.certain is None) == (found is None):
            return
        node, own_s, others_s = (found.node, found.own_s, found.others_s) if found is not None else ("", 0.0, 0.0)
        number = self._workers.state().number
        self._workers.event_log.write(events.Straggler(number, step, node, round(own_s, 4), round(others_s, 4)))
        if found is not None:
            self._workers.say(slow_node(node, own_s, others_s))

    def note_answers(
        self, now: float, generation: int, nodes: Mapping[str, str], others: Mapping[str, Mapping[str, object]]
    ) -> None:
        """Take note of other agents' answers.

        On rank 0's node the agent searches for the culprit itself. On any other node it takes over the finding of rank
        0's node.

        Args:
            now: seconds of the monotonic clock.
            generation: the generation in which the question was asked. Answers for another generation are ignored.
            nodes: the addresses of the generation's nodes, by name, as far as this node knows them.
            others: the answers of the agents that were asked, by node.
        """
        state = self._workers.state()
        if not state.running or generation != state.number:
            return
        said = {node: each for node, each in others.items() if each.get("generation") == generation}
        if not state.is_first:
            if self.positions and not others:
                self.unanswered_at = now
            for answer in said.values():
                self.adopt_finding(now, answer)
            return
        reached = {node: str(each["reached_by"]) for node, each in others.items() if "reached_by" in each}
        self.find_culprit(now, nodes, said, reached)
        self.compare(said)

    def find_culprit(
        self,
        now: float,
        nodes: Mapping[str, str],
        others: Mapping[str, Mapping[str, object]],
        reached: Mapping[str, str],
    ) -> None:
        """Find the ranks for which the others wait, and report them.

        Ranks in a pause are not reported while the pause is hardly longer than usual.

        Args:
            now: seconds of the monotonic clock.
            nodes: the address of each node that was asked, and of this node, by name.
            others: the other agents' answers, by node.
            reached: the nodes that have not answered, each with another node that reaches it.
        """
        own = self._workers.settings.node
        if not self.positions:
            return
        by_node: dict[str, Sequence[Position]] = {own: self.positions, **dict(positions_in(others))}
        names = {address: node for node, address in nodes.items()}
        silent = {node: reached.get(node, "") for node in nodes if node not in by_node}
        alone = len(nodes) == self._workers.settings.workers == 1
        if alone and not (self._steps.looped and (self._steps.detector.first or self._standstill.looks > 1)):
            # A single worker waits for nobody, so its slowness has no other witness. A script without a Loop may
            # evaluate between two steps, and a first step may take long: no step is expected of it then.
            by_node[own] = [replace(each, stepping=False) for each in self.positions]
        culprit = find(by_node, silent, names, own, again=bool(self._standstill.ask_at), alone=alone)
        pause_s = STANDING_FACTOR * statistics.median_low(self._steps.pauses_s) if self._steps.pauses_s else math.inf
        age_s = now - self._last_at
        if culprit is not None and not (culprit.resting and age_s < min(pause_s, self._hang_s or math.inf)):
            self._report(now, replace(culprit, step=min(each.step for each in self.positions)))

    def report_unagreed(self, now: float, failed_at: float, failure: Failure, step: int, why: str) -> None:
        """Report once that the nodes cannot agree on a generation after a loss. Otherwise they would seem to train.

        Args:
            now: seconds of the monotonic clock.
            failed_at: when workers of this node have failed, or have lost their group.
            failure: that failure.
            step: the last step of this node's workers.
            why: why no generation can be agreed.
        """
        if now - failed_at >= CLOSER_S:
            self._last_at = self._last_at or failed_at
            # Workers that have only lost their group do not know which worker was the first.
            what = f"another node has lost a worker, and {failure.summary}" if failure.collateral else failure.summary
            self._report(now, Culprit((), (), f"{what}{UNAGREED}{why}", step=step))

    def adopt_finding(self, now: float, answer: Mapping[str, object]) -> None:
        """Report at `now` the finding of rank 0's node, as it or the leader has told it in `answer`.

        Nothing is reported unless the steps of this node's workers stand still too.
        """
        found = answer.get("culprit")
        if not self.positions or not isinstance(found, dict):
            return
        try:
            self._report(now, typed(Culprit, found))
        except TypeError as error:
            log.warning("the finding of the node of rank 0 cannot be read: %s", error)

    def _report(self, now: float, culprit: Culprit) -> None:
        self._culprit, self._renew_at = culprit, 0.0
        self.unanswered_at = now if culprit.nodes and not culprit.ranks else None
        age_s, step = now - self._last_at, culprit.step
        self.note_reported(step)
        found = step, self._standstill.looks, culprit.key
        # Questions for `compare` bring the same finding again. It is reported once for each closer look.
        if found != self._written:
            self._written = found
            number = self._workers.state().number
            self._workers.event_log.write(
                events.Culprit(number, step, round(age_s, 1), culprit.ranks, culprit.nodes, culprit.reason)
            )
            # Without a Loop the steps of the present workers are known, but not those of the run.
            after = f" after step {step:,}" if self._steps.looped else ""
            self._workers.say(f"no step for {age_s:.0f} s{after}: {culprit.reason}")


def question_times(*, first: bool, asks_leader: bool) -> list[float]:
    """The seconds from a closer look at the workers to each question to other nodes.

    A question is useless before the asked node knows the answer. Rank 0's node (`first`) asks the others first. The
    others ask rank 0's node after it has had time to find the culprit. A node that does not know the seat of rank 0
    asks the leader (`asks_leader`), which hears of the finding one round later still.
    """
    later = 0 if first else 2 if asks_leader else 1
    return [places_s + later * found_s for places_s, found_s in zip(PLACES_S, FOUND_S, strict=True)]


def positions_in(by_node: Mapping[str, Mapping[str, object]]) -> Iterator[tuple[str, list[Position]]]:
    """The positions in other agents' answers, by node. An answer with anything malformed is left out."""
    for node, fields in by_node.items():
        said = fields.get("workers")
        try:
            yield node, [typed(Position, dict(each)) for each in said] if isinstance(said, list) else []
        except (TypeError, ValueError) as error:
            log.warning("the positions of the workers of %s cannot be read: %s", node, error)
